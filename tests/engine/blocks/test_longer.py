"""LONGER: grouping, causality by time, cached keys, and the independence the search relies on."""

import pytest
import torch

from auto_research.blocks.longer import GROUP, AttentionLayer, Longer, LongerSmall, TokenMerge, masked_attention
from auto_research.metrics.cost import flops_of

LENGTH, WIDTH = 18, 12


def slot(kind, **switch):
    torch.manual_seed(0)
    return kind(WIDTH, 20, 16, **switch).eval()


def history(requests: int = 3, filled: int = LENGTH):
    torch.manual_seed(1)
    events, user, key = torch.randn(requests, LENGTH, WIDTH), torch.randn(requests, 20), torch.randn(6, WIDTH)
    mask = (torch.arange(LENGTH) >= LENGTH - filled).expand(requests, LENGTH).clone()
    return events, mask, user, key, torch.tensor([0, 0, 1, 1, 2, 2])


def vectors(summary, events, mask, user, key, request_of):
    with torch.no_grad():
        shared, state = summary.prepare(events, mask, user)
        return torch.cat([shared[request_of], summary.score(state, key, request_of)], dim=1)


@pytest.mark.parametrize("kind", [Longer, LongerSmall])
def test_three_vectors_and_only_the_declared_ones_see_the_candidate(kind):
    events, mask, user, key, request_of = history()
    summary = slot(kind)
    before = vectors(summary, events, mask, user, key, request_of)
    assert before.shape == (6, 3, WIDTH)
    moved = (vectors(summary, events, mask, user, key * -1, request_of) != before).flatten(0, 0).any(2).any(0)
    assert moved.tolist() == [i >= summary.shared for i in range(3)]


@pytest.mark.parametrize("kind", [Longer, LongerSmall])
def test_cached_keys_equal_recomputed_ones(kind):
    events, mask, user, key, request_of = history()
    summary = slot(kind)
    together = vectors(summary, events, mask, user, key, request_of)
    for pair in range(len(key)):
        r = request_of[pair : pair + 1]
        alone = vectors(summary, events[r], mask[r], user[r], key[pair : pair + 1], torch.zeros(1, dtype=torch.int64))
        assert torch.allclose(alone[0], together[pair], atol=1e-5)


@pytest.mark.parametrize("kind", [Longer, LongerSmall])
def test_masked_events_and_more_padding_change_nothing(kind):
    events, mask, user, key, request_of = history(filled=7)
    summary = slot(kind)
    before = vectors(summary, events, mask, user, key, request_of)
    noise = torch.where(mask.unsqueeze(2), events, torch.full_like(events, 1e3))
    assert torch.allclose(vectors(summary, noise, mask, user, key, request_of), before, atol=1e-5)
    longer = torch.nn.functional.pad(events, (0, 0, 5, 0)), torch.nn.functional.pad(mask, (5, 0))
    assert torch.allclose(vectors(summary, *longer, user, key, request_of), before, atol=1e-5)


def test_groups_are_aligned_to_the_newest_event():
    merge = TokenMerge(WIDTH, 16).eval()
    events, mask, *_ = history(1)
    merged, valid = merge(events, mask)
    assert merged.shape == (1, -(-LENGTH // GROUP), 16)
    changed = events.clone()
    changed[0, LENGTH - GROUP] += 1  # oldest member of the newest group
    moved = (merge(changed, mask)[0] != merged).any(2)[0]
    assert moved.tolist() == [False] * 4 + [True]
    assert valid.all()


def test_sequence_rows_are_causal_by_time():
    """Editing the newest group reaches the globals and the candidate, but no cached row of an older group."""
    events, mask, user, *_ = history(1)
    summary = slot(Longer)
    with torch.no_grad():
        _, before = summary.prepare(events, mask, user)
        changed = events.clone()
        changed[0, -1] *= -1
        _, after = summary.prepare(changed, mask, user)
    moved = (before.k2 != after.k2).any(2)[0]  # CLS, user, then merged rows from old to new
    assert moved.tolist() == [True, True] + [False] * 4 + [True]


def test_a_query_that_is_allowed_nothing_reads_zero():
    q, k = torch.randn(1, 2, 4), torch.randn(1, 3, 4)
    allowed = torch.tensor([[[True, False, False], [False] * 3]])
    read = masked_attention(q, k, k, allowed, heads=2)
    assert torch.allclose(read[0, 0], k[0, 0])
    assert torch.equal(read[0, 1], torch.zeros(4))
    layer = AttentionLayer(4).eval()
    expected = q[:, 1] + layer.ffn(layer.ffn_norm(q[:, 1]))
    assert torch.allclose(layer(q, k, allowed)[:, 1], expected, atol=1e-6)


@pytest.mark.parametrize("switch", [{"inner": False}, {"global_tokens": False}, {"merge": False}])
def test_ablations_have_the_same_outputs_and_other_numbers(switch):
    events, mask, user, key, request_of = history()
    plain, ablated = slot(Longer), slot(Longer, **switch)
    a, b = (vectors(s, events, mask, user, key, request_of) for s in (plain, ablated))
    assert a.shape == b.shape
    assert not torch.allclose(a, b)
    requests, pairs = 3, 6

    def work():
        vectors(ablated, events, mask, user, key, request_of)

    assert flops_of(work) == ablated.flops(pairs, LENGTH, requests)
    if "inner" in switch:
        assert ablated.params() < plain.params()
