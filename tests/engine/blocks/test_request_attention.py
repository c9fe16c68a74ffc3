"""Candidates read the keys of their request: values by hand, equality with copied keys, padding, isolation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.blocks import request_attention as module
from auto_research.blocks.request_attention import (
    HeadwiseCrossAttention,
    NullEvent,
    OwnKeys,
    RequestCrossAttention,
    request_attention,
)
from auto_research.blocks.request_groups import request_groups
from auto_research.metrics.cost import flops_of


def copied(q, k, v, request_of, mask=None, bias=None, pair_mask=None, pair_bias=None, own=None, scale=None):
    """The definition, with K and V copied once per pair and -inf softmax."""
    k, v = k[request_of], v[request_of]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = scale * q @ k.transpose(2, 3)
    if bias is not None:
        scores = scores + (bias[request_of] if len(bias) > 1 else bias).unsqueeze(2)
    if pair_bias is not None:
        scores = scores + pair_bias.unsqueeze(2)
    for allowed in (None if mask is None else mask[request_of], pair_mask):
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, None, None, :], -torch.inf)
    if own is not None:
        extra = scale * q @ own.k.transpose(2, 3)
        extra = extra if own.visible is None else extra.masked_fill(~own.visible, -torch.inf)
        scores, v = torch.cat([scores, extra], dim=3), torch.cat([v, own.v], dim=2)
    return torch.softmax(scores, dim=3).nan_to_num(0.0) @ v


def sample(counts, heads=2, queries=3, length=5, width=4, seed=0):
    torch.manual_seed(seed)
    request_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    q = torch.randn(len(request_of), heads, queries, width)
    k, v = torch.randn(2, len(counts), heads, length, width)
    mask = torch.rand(len(counts), length) < 0.7
    return q, k, v, request_of, mask


def test_select_by_hand():
    """Two unit tokens, a zero query: R = (0.5, 0.5), and the template (2, 4) matches it with 3 (card slimper)."""
    keys = torch.eye(2).reshape(1, 1, 2, 2)
    read = request_attention(torch.zeros(1, 1, 1, 2), keys, keys, torch.tensor([0]))
    assert read.flatten().tolist() == [0.5, 0.5]
    assert float(read.flatten() @ torch.tensor([2.0, 4.0])) == 3.0


def test_weights_by_hand_with_bias_and_own_key():
    q = torch.ones(1, 1, 1, 1)
    k = torch.zeros(1, 1, 2, 1)
    v = torch.tensor([[[[1.0], [10.0]]]])
    own = OwnKeys(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 100.0))
    bias = torch.tensor([[[math.log(2), 0.0]]])  # weights 2 : 1 : 1
    read = request_attention(q, k, v, torch.tensor([0]), bias=bias, own=own)
    assert read.item() == pytest.approx((2 * 1 + 10 + 100) / 4)


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), seed=st.integers(0, 99), full=st.booleans())
def test_equals_attention_over_copied_keys(counts, seed, full):
    q, k, v, request_of, mask = sample(counts, seed=seed)
    options = {"mask": mask}
    if full:
        pairs = len(request_of)
        options |= {
            "bias": torch.randn(len(counts), 2, 5),
            "pair_mask": torch.rand(pairs, 5) < 0.8,
            "pair_bias": torch.randn(pairs, 2, 5),
            "own": OwnKeys(*torch.randn(2, pairs, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool).tril()),
        }
    found = request_attention(q, k, v, request_of, **options)
    torch.testing.assert_close(found, copied(q, k, v, request_of, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[3, 1, 2], [3, 1, 2, 5, 1, 1, 2, 9, 4, 1]])
@pytest.mark.parametrize("visible", [None, torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)])
def test_own_keys_alone_equal_attention_over_copied_keys(counts, visible):
    q, k, v, request_of, mask = sample(counts)
    mask[1] = False
    own = OwnKeys(*torch.randn(2, len(request_of), 2, 3, 4), visible)
    found = request_attention(q, k, v, request_of, mask=mask, own=own)
    torch.testing.assert_close(found, copied(q, k, v, request_of, mask=mask, own=own), atol=1e-5, rtol=1e-5)
    blind = found[request_of == 1][:, :, 1]
    assert (blind == 0).all() == (visible is not None)


def test_groups_cover_every_pair_once_and_are_half_full():
    counts = torch.tensor([1, 0, 40, 3, 2, 17, 33, 4, 8, 5])
    request_of = torch.repeat_interleave(torch.arange(10), counts)
    groups = request_groups(request_of, 10)
    assert torch.cat([g.pairs for g in groups]).sort().values.tolist() == list(range(int(counts.sum())))
    for group in groups:
        assert torch.equal(group.rows[group.row], request_of[group.pairs])
        assert (2 * counts[group.rows] > group.width).all()


def test_no_tensor_holds_keys_once_per_pair(monkeypatch):
    """Shapes of every saved tensor: nothing with P rows carries the width of K or V over L."""
    q, k, v, request_of, mask = sample([20, 30], heads=1, queries=1, length=7, width=11)
    k.requires_grad_(), v.requires_grad_()
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        request_attention(q, k, v, request_of, mask=mask).sum().backward()
    assert shapes
    assert max(math.prod(s) for s in shapes) <= 60 * 11  # P L = 350 scores and queries, never P L d = 3,850


def test_a_request_without_visible_events_reads_zero_with_zero_gradient():
    q, k, v, request_of, mask = sample([2, 3])
    mask[1] = False
    q.requires_grad_()
    read = request_attention(q, k, v, request_of, mask=mask)
    assert torch.equal(read[2:], torch.zeros_like(read[2:]))
    read.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("counts", [[3, 1, 2], [3, 1, 2, 5, 1, 1, 2, 9, 4, 1]])
def test_candidates_and_requests_are_isolated(counts):
    q, k, v, request_of, mask = sample(counts)
    before = request_attention(q, k, v, request_of, mask=mask)
    k[1], v[1], q[0] = torch.randn_like(k[1]), torch.randn_like(v[1]), torch.randn_like(q[0])
    after = request_attention(q, k, v, request_of, mask=mask)
    same = (request_of != 1) & (torch.arange(len(request_of)) > 0)
    torch.testing.assert_close(after[same], before[same])
    assert not torch.allclose(after[0], before[0])


def test_null_event_keeps_an_empty_history_readable_and_padding_changes_nothing():
    torch.manual_seed(0)
    layer = RequestCrossAttention(8, 6, heads=2, null_event=True)
    x, source, request_of = torch.randn(3, 2, 8), torch.randn(1, 4, 6), torch.zeros(3, dtype=torch.int64)
    mask = torch.tensor([[False, False, True, True]])
    alone = layer(x, source[:, 2:], mask[:, 2:], request_of)
    torch.testing.assert_close(layer(x, source, mask, request_of), alone)
    empty = layer(x, source, torch.zeros_like(mask), request_of)
    v = layer.kv(layer.null.event)[8:]
    torch.testing.assert_close(empty, layer.out(v).expand(3, 2, 8))


def test_null_event_comes_first_and_is_visible():
    events, mask = NullEvent(2)(torch.zeros(1, 1, 2), torch.tensor([[False]]))
    assert events.shape == (1, 2, 2)
    assert mask.tolist() == [[True, False]]
    assert (events[0, 0] != 0).all()


def test_headwise_attention_by_hand_and_heads_are_private():
    layer = HeadwiseCrossAttention(2, 1)
    with torch.no_grad():
        layer.kv.copy_(torch.tensor([[[1.0, 2.0]], [[0.0, 3.0]]]))  # head 0: k = s, v = 2 s; head 1: k = 0, v = 3 s
    source = torch.tensor([[[0.0, 1.0], [math.log(3), 5.0]]])  # two events, one float per head
    x = torch.ones(2, 1, 1)  # both heads ask with 1
    read = layer(x, source, torch.ones(1, 2, dtype=torch.bool), torch.tensor([0]))
    assert read.flatten().tolist() == pytest.approx([2 * math.log(3) * 3 / 4, 3 * (1 + 5) / 2])
    moved = source.clone()
    moved[..., 1] += 1.0
    again = layer(x, moved, torch.ones(1, 2, dtype=torch.bool), torch.tensor([0]))
    assert again[0].item() == read[0].item()
    assert again[1].item() == pytest.approx(read[1].item() + 3)


def test_declared_flops_are_counted_flops():
    request_of = torch.repeat_interleave(torch.arange(2), 6)
    mask = torch.ones(2, 5, dtype=torch.bool)
    layer = RequestCrossAttention(8, 6, heads=2)
    x, source = torch.randn(12, 3, 8), torch.randn(2, 5, 6)
    assert flops_of(lambda: layer(x, source, mask, request_of)) == layer.flops(12, 3, 5, 2)
    heads = HeadwiseCrossAttention(4, 8)
    y, events = torch.randn(4, 12, 8), torch.randn(2, 5, 32)
    assert flops_of(lambda: heads(y, events, mask, request_of)) == heads.flops(12, 5, 2)


def test_width_must_be_divisible_by_heads():
    with pytest.raises(ValueError, match="divisible"):
        module.RequestCrossAttention(10, heads=4)
