"""Mechanism tests of card onetrans, with the numbers of its specification."""

from dataclasses import fields, replace

import numpy as np
import pytest
import synthetic
import torch

from adapters.onetrans.caching import continues, extend, listed
from adapters.onetrans.late_fusion import matched
from adapters.onetrans.model import CHOICES, Layer, OneTrans, OneTransConfig, RequestState, score_elements
from adapters.onetrans.replay import COLD, KEPT, growth_studies, replay, shortest_histories
from auto_research.blocks.behaviour_events import request_fields
from auto_research.blocks.request_groups import request_groups
from auto_research.data.behaviours import BehaviourTable
from auto_research.evaluate.ctr import split_pairs
from auto_research.experiment.card import find_card
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.paths import code_root

SMALL = OneTransConfig(
    history=6, width=16, heads=4, schedule=(8, 4, 0), ns_tokens=3, hidden=8, expansion=2, dropout=0.1
)
PAPER = OneTransConfig()
CARD = find_card(code_root(), "onetrans")
VARIANTS = {
    "default": {},
    "timestamp_agnostic": {"merge": "timestamp_agnostic"},
    "group": {"tokenizer": "group"},
    "shared": {"qkv": "shared", "ffn": "shared"},
    "shared_qkv": {"qkv": "shared"},
    "shared_ffn": {"ffn": "shared"},
    "isolated": {"mask": "isolated"},
    "oldest": {"positions": "oldest"},
    "no_pyramid": {"pyramid": False},
    "last": {"head": "last"},
}


@pytest.fixture(scope="module")
def table():
    return BehaviourTable.of(synthetic.request_table())


@pytest.fixture(scope="module")
def batch(table):
    return synthetic.training_batch(table, requests=6, history=6)


def build(table, config=SMALL, seed=0, **switches) -> OneTrans:
    torch.manual_seed(seed)
    return OneTrans(replace(config, **switches), table.vocab, torch.as_tensor(table.item_genres))


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


def lists(model, batch, ns=None, x=None):
    """Every layer's whole list per pair, [P, K_n + T, D]: input and output of all layers; the input may be replaced."""
    model.eval()
    with torch.no_grad():
        tokens = model.tokens(batch)
        ns = model.candidate_tokens(request_fields(model.encoder, batch), batch) if ns is None else ns
        x = (tokens.x if x is None else x)[batch.request_of]
        mask, states = tokens.mask[batch.request_of], [torch.cat([x, ns], dim=1)]
        for layer in model.layers:
            x, mask = layer.whole(states[-1], mask)
            states.append(x)
    return states, ns


# Causality


@pytest.mark.parametrize("mask", ["causal", "isolated"])
def test_no_sequence_state_depends_on_a_field_token(table, batch, mask):
    model = build(table, mask=mask)
    before, ns = lists(model, batch)
    after, _ = lists(model, batch, ns=torch.randn_like(ns))
    for a, b in zip(before, after, strict=True):
        cut = a.shape[1] - SMALL.ns_tokens
        assert torch.equal(a[:, :cut], b[:, :cut])
        assert not torch.allclose(a[:, cut:], b[:, cut:])


def test_a_bidirectional_mask_breaks_that(table, batch):
    model = build(table, mask="bidirectional")
    before, ns = lists(model, batch)
    after, _ = lists(model, batch, ns=torch.randn_like(ns))
    assert not torch.allclose(before[1][:, : -SMALL.ns_tokens], after[1][:, : -SMALL.ns_tokens])
    assert logits(model, batch).isfinite().all()


def test_no_cache_gives_the_same_logits(table, batch):
    model = build(table).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.uncached(batch), model(batch), atol=1e-5, rtol=0)


def test_only_fields_and_ffns_have_dropout(table, batch):
    """In both: attention outputs are never dropped."""
    theirs = matched(replace(SMALL, dropout=0.5), table.vocab, torch.as_tensor(table.item_genres))
    for block in theirs.transformer.blocks:
        assert block.attention_dropout.rate == 0.0
        assert block.dropout.rate == 0.5


def test_an_event_changes_no_earlier_state(table, batch):
    model = build(table, pyramid=False)
    with torch.no_grad():
        tokens = model.tokens(batch)
    j = 9
    edited = tokens.x.clone()
    edited[:, j] += 1
    (before, _), (after, _) = lists(model, batch), lists(model, batch, x=edited)
    reads = tokens.mask[batch.request_of][:, j]
    assert reads.any()
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :j], b[:, :j])
        assert not torch.allclose(a[reads, j:], b[reads, j:])


@pytest.mark.parametrize(("mask", "moved"), [("causal", [1, 2]), ("isolated", [1]), ("bidirectional", [0, 1, 2])])
def test_which_field_tokens_read_the_second_one(table, batch, mask, moved):
    model = build(table, mask=mask)
    before, ns = lists(model, batch)
    edited = ns.clone()
    edited[:, 1] += 1
    after, _ = lists(model, batch, ns=edited)
    for layer in (1, -1):
        a, b = before[layer][:, -3:], after[layer][:, -3:]
        assert [i for i in range(3) if not torch.equal(a[:, i], b[:, i])] == moved


# Caching across candidates


@pytest.mark.parametrize("switches", VARIANTS.values(), ids=VARIANTS)
def test_cached_logits_equal_the_full_forward(table, batch, switches):
    model = build(table, **switches)
    plain = build(table, **switches, cache=False)
    assert not torch.allclose(logits(model, batch)[0], logits(model, batch)[1], atol=1e-4)
    torch.testing.assert_close(logits(model, batch), logits(plain, batch), atol=1e-5, rtol=0)


def test_the_sequence_pass_runs_once_per_request(table, batch, monkeypatch):
    rows = []
    original = Layer.sequence
    monkeypatch.setattr(Layer, "sequence", lambda self, x, mask: rows.append(len(x)) or original(self, x, mask))
    logits(build(table), batch)
    assert rows == [6, 6, 6]  # requests, in each of three layers
    assert batch.pairs() > 6


@pytest.mark.parametrize("switches", [{}, {"cache": False}, {"mask": "bidirectional"}], ids=["cached", "plain", "both"])
def test_chunked_serving_equals_one_batch(table, switches):
    model = build(table, **switches).eval()
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, 20), history=6)
    whole = logits(model, batch)
    with torch.no_grad():
        state = model.prepare(batch)
        parts = torch.cat([model.score(state, part) for part in split_pairs(batch, 7)])
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


def test_cache_bytes_are_those_of_the_kept_tensors(table):
    model = build(table).eval()
    batch = table.score_batch(int(table.requests("test")[2]), [1], history=6)
    kept = sum(t.numel() * t.element_size() for keys in model.prepare(batch).keys for t in (keys.k, keys.v))
    assert kept == model.cache_bytes() == 2 * 4 * 16 * (12 + 8 + 4)


# Pyramid


def test_the_pyramid_forms_fewer_queries_and_changes_no_kept_row(table, batch, monkeypatch):
    model = build(table).eval()
    layer = model.layers[0]
    full = build(table, pyramid=False).layers[0].eval()
    full.load_state_dict(layer.state_dict())
    with torch.no_grad():
        tokens = model.tokens(batch)
        ns = model.candidate_tokens(request_fields(model.encoder, batch), batch)
    x, mask = torch.cat([tokens.x[batch.request_of], ns], dim=1), tokens.mask[batch.request_of]
    queries = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **o: queries.append((q.shape[2], k.shape[2])) or attend(q, k, v, **o),
    )
    with torch.no_grad():
        cut, everything = layer.whole(x, mask)[0], full.whole(x, mask)[0]
        tail = layer.sequence(tokens.x, tokens.mask)[0]
    assert queries == [(8 + 3, 12 + 3), (12 + 3, 12 + 3), (8, 12)]
    torch.testing.assert_close(cut, everything[:, -(8 + 3) :], atol=1e-6, rtol=0)
    torch.testing.assert_close(tail[batch.request_of], everything[:, 4:12], atol=1e-6, rtol=0)


def test_attention_cost_of_the_schedule():
    assert score_elements((48, 24, 12, 0), 100, 6) == 54 * 106 + 30 * 54 + 18 * 30 + 6 * 18 == 7_992
    assert score_elements(replace(PAPER, pyramid=False).kept, 100, 6) == 4 * 106 * 106 == 44_944
    assert PAPER.length == 100


def test_the_last_layer_holds_no_idle_sequence_ffn(table):
    names = [name for name, _ in build(table).named_parameters()]
    assert any("layers.1.ffn.up.sequence" in name for name in names)
    assert not any("layers.2.ffn.up.sequence" in name for name in names)


@pytest.mark.parametrize("schedule", [(), (13, 0), (4, 8, 0)])
def test_a_schedule_has_to_fall(schedule):
    with pytest.raises(ValueError, match="schedule"):
        replace(SMALL, schedule=schedule)


def test_unknown_choices_are_refused():
    for name in CHOICES:
        with pytest.raises(ValueError, match=name):
            replace(SMALL, **{name: "other"})
    with pytest.raises(ValueError, match="heads"):
        replace(SMALL, heads=3)


# Caching across requests


def user_tokens(model, count, seed=0):
    torch.manual_seed(seed)
    return torch.randn(1, count, model.config.width)


def cold(model, x):
    """Keys of every layer from a padded list, cut to the real tokens."""
    padding = model.config.length - x.shape[1]
    mask = torch.arange(model.config.length)[None] >= padding
    with torch.no_grad():
        keys = model.sequence_keys(torch.nn.functional.pad(x, (0, 0, padding, 0)), mask)
    return [(k.k[:, :, k.mask[0]], k.v[:, :, k.mask[0]]) for k in keys]


@pytest.mark.parametrize("old", [60, 20])
def test_appended_events_reuse_two_layers_and_no_third_one(table, old):
    model = build(table, replace(PAPER, width=16, hidden=8), positions="oldest").eval()
    x = user_tokens(model, old + 3)
    before, after = cold(model, x[:, :old]), cold(model, x)
    with torch.no_grad():
        cache, _ = extend(model, None, x[:, :old])
        _, keys = extend(model, cache, x[:, old:])
    for layer in range(4):
        for kept, fresh in zip((keys[layer].k, keys[layer].v), after[layer], strict=True):
            torch.testing.assert_close(kept, fresh, atol=1e-5, rtol=0)
    for part in (0, 1):
        torch.testing.assert_close(before[0][part], after[0][part][:, :, :old], atol=1e-6, rtol=0)
        stays = after[1][part].shape[2] - 3  # old rows of the new tail K_1 = 48
        torch.testing.assert_close(before[1][part][:, :, -stays:], after[1][part][:, :, :stays], atol=1e-5, rtol=0)
        stays = after[2][part].shape[2] - 3
        third = torch.allclose(before[2][part][:, :, -stays:], after[2][part][:, :, :stays], atol=1e-5)
        assert third == (old == 20)  # with 60 the moving tail dropped keys that old rows had read


def test_incremental_logits_equal_the_cold_path_over_a_users_requests(table):
    model = build(table, replace(SMALL, history=40, schedule=(12, 6, 0)), positions="oldest").eval()
    user = table.request_user[table.requests("test")[0]]
    requests = np.flatnonzero(table.request_user == user)[3:]
    cache, rows, appended = None, None, []
    for request in requests:
        batch = table.score_batch(int(request), [1, 2, 3], history=40)
        with torch.no_grad():
            tokens = listed(model.tokens(batch))
            if cache is not None:
                assert continues(rows, tokens.row[0])
                appended.append(tokens.row.shape[1] - len(rows))
            cache, keys = extend(model, cache, tokens.x[:, 0 if rows is None else len(rows) :])
            kept = model.score(RequestState(request_fields(model.encoder, batch), keys, None), batch)
        rows = tokens.row[0]
        assert cache.tokens() == len(rows)
        torch.testing.assert_close(kept, logits(model, batch), atol=1e-5, rtol=0)
    assert len(appended) >= 8
    assert max(appended) > 1
    assert len(rows) > 12


def test_positions_from_the_newest_event_move_the_old_tokens(table):
    request = int(table.requests("test")[3])
    batches = [table.score_batch(r, [1], history=40) for r in (request - 1, request)]
    for positions, same in (("oldest", True), ("newest", False)):
        model = build(table, replace(SMALL, history=40), positions=positions).eval()
        with torch.no_grad():
            old, new = (listed(model.tokens(b)) for b in batches)
        assert continues(old.row[0], new.row[0])
        assert torch.allclose(old.x, new.x[:, : old.x.shape[1]], atol=1e-6) == same


def test_a_full_window_breaks_the_cache(table):
    assert continues(torch.tensor([1, 2]), torch.tensor([1, 2, 3]))
    assert not continues(torch.tensor([1, 2]), torch.tensor([2, 3, 4]))
    assert not continues(torch.tensor([1, 2, 3]), torch.tensor([1, 2]))


def test_the_cache_refuses_a_mask_it_cannot_serve(table):
    with pytest.raises(ValueError, match="causal"):
        extend(build(table, mask="bidirectional"), None, torch.randn(1, 4, 16))


def test_replay_begins_with_users_whose_windows_are_not_full(table):
    users = np.unique(table.request_user[table.requests("test")])
    order = shortest_histories(table, users)
    data = table.interactions
    longest = [max((data.rating[data.user == u] >= 4).sum(), (data.rating[data.user == u] < 4).sum()) for u in order]
    assert longest == sorted(longest)
    assert longest[0] < longest[-1]
    model = build(table, replace(SMALL, history=int(longest[0])), positions="oldest")
    assert replay(model, table, device=torch.device("cpu"), users=1)["kept"] > 0


def test_replay_reuses_requests_and_costs_less(table):
    model = build(table, replace(SMALL, history=40, schedule=(12, 6, 0)), positions="oldest")
    found = replay(model, table, device=torch.device("cpu"), users=3)
    assert 0 < found["kept"] <= 1
    assert found["requests"] > 3
    assert found["kept_flops"] < found["cold_flops"]
    assert found["largest_difference"] < 1e-5
    studies = growth_studies(model, table, device=torch.device("cpu"), timed=1)
    flops = studies["sequence_side_flops"]["lines"]
    assert [n for n, _ in flops[COLD]] == [6, 12, 24, 48, 80]
    assert all(kept < fresh for (_, fresh), (_, kept) in zip(flops[COLD], flops[KEPT], strict=True))


# Mixed parameters


def test_positions_of_a_sequence_share_their_projection_and_field_positions_do_not(table):
    layer = build(table).layers[0]
    same = torch.randn(16).expand(1, 4, 16)
    q, k = layer.queries(same), layer.keys_values(same)[0]
    assert torch.equal(q[:, :, 0], q[:, :, 3])
    assert torch.equal(k[:, :, 0], k[:, :, 3])
    own = layer.qkv.private(same[:, :3])
    assert not torch.allclose(own[:, 0], own[:, 1])
    assert not torch.allclose(own[:, 1], own[:, 2])


def test_equal_sets_give_the_shared_arm(table, batch):
    model, shared = build(table), build(table, qkv="shared", ffn="shared")
    with torch.no_grad():
        for layer in model.layers:
            layer.qkv.share()
            for linear in (layer.ffn.up, layer.ffn.down):
                if hasattr(linear, "sequence"):
                    linear.share()
    last = model.layers[2].ffn  # it has no sequence set: all private sets become the first one
    for linear in (last.up, last.down):
        for p in linear.parameters():
            p.data.copy_(p.data[:1].expand_as(p).clone())
    weights = model.state_dict()
    own = shared.state_dict()
    for name in own:
        if name in weights:
            own[name] = weights[name]
        else:  # layers.2.ffn.*.sequence
            private = weights[name.replace("sequence", "private")]
            own[name] = private[0].t() if name.endswith("weight") else private[0, 0]
    shared.load_state_dict(own)
    assert count_params(shared) < count_params(model)
    torch.testing.assert_close(logits(model, batch), logits(shared, batch), atol=1e-6, rtol=0)


# Padding


def test_left_padding_changes_no_output(table):
    model, requests = build(table, replace(SMALL, history=9)), table.requests("train")
    short = build(table, replace(SMALL, history=6))
    own = short.state_dict()
    for name, value in model.state_dict().items():
        own[name] = value[: len(own[name])] if name == "sequence_tokens.position" else value
    short.load_state_dict(own)
    few = table.batch(requests, history=6)
    requests = requests[~(few.liked_mask.all(1) | few.other_mask.all(1)).numpy()]
    few = table.batch(requests, history=6)
    assert len(requests) > 3
    torch.testing.assert_close(logits(model, table.batch(requests, history=9)), logits(short, few), atol=1e-6, rtol=0)


@pytest.mark.parametrize("switches", [{}, {"cache": False}, {"merge": "timestamp_agnostic"}, {"mask": "bidirectional"}])
def test_an_empty_history_gives_finite_logits_and_gradients(table, switches):
    batch = table.batch(table.requests("train")[:3], history=6)
    batch.liked_mask[:], batch.other_mask[:] = False, False
    model = build(table, **switches).train()
    out = model(batch)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# Tokens


def test_events_are_merged_by_time_with_the_newest_at_the_end(table):
    batch = table.batch(table.requests("test")[:3], history=6)
    tokens = build(table).eval().tokens(batch)
    assert tokens.x.shape == (3, 12, 16)
    for r in range(3):
        rows = sorted(
            batch.liked_row[r][batch.liked_mask[r]].tolist() + batch.other_row[r][batch.other_mask[r]].tolist()
        )
        assert tokens.row[r][tokens.mask[r]].tolist() == rows
        assert tokens.mask[r].tolist() == sorted(tokens.mask[r].tolist())


def test_weaker_signal_first_with_a_separator_and_one_event_less(table):
    batch = table.batch(table.requests("test")[:3], history=6)
    model = build(table, merge="timestamp_agnostic").eval()
    tokens = model.tokens(batch)
    for r in range(3):
        other = batch.other_row[r][1:][batch.other_mask[r][1:]].tolist()
        assert tokens.row[r][tokens.mask[r]].tolist() == [*other, -1, *batch.liked_row[r][batch.liked_mask[r]].tolist()]
    slot = int((tokens.row[0] == -1).nonzero()[-1])
    position = model.sequence_tokens.position[11 - slot]
    torch.testing.assert_close(tokens.x[0, slot], model.sequence_tokens.separator + position)
    assert not hasattr(build(table).sequence_tokens.separator, "shape")


def test_position_zero_is_the_newest_or_the_oldest_event(table):
    batch = table.batch(table.requests("train")[:1], history=6)
    for positions in ("newest", "oldest"):
        model = build(table, positions=positions).eval()
        with torch.no_grad():
            before = model.tokens(batch)
            model.sequence_tokens.position[0] += 1
            moved = (model.tokens(batch).x != before.x).any(2)[0] & before.mask[0]
        events = before.mask[0].nonzero().flatten()
        assert 1 < len(events) < 12
        assert moved.nonzero().flatten().tolist() == [int(events[-1 if positions == "newest" else 0])]


def test_the_clock_of_an_event_is_its_gap_and_not_its_age(table, batch):
    model = build(table)
    other = replace(batch, liked_age=batch.liked_age * 0 + 3, other_age=batch.other_age * 0 + 3)
    assert torch.equal(logits(model, batch), logits(model, other))
    other = replace(batch, liked_gap=batch.liked_gap * 0 + 3)
    assert not torch.equal(logits(model, batch), logits(model, other))


def test_auto_split_is_one_layer_over_all_fields(table, batch):
    model = build(table).eval()
    layer = model.ns_tokens.project
    fields, pair = request_fields(model.encoder, batch), model.encoder.pairs(batch)
    everything = torch.cat([fields[batch.request_of], pair.candidate, pair.cross], dim=1)
    assert everything.shape[1] == 224
    weight = torch.cat([layer.request, layer.pair])
    expected = torch.nn.functional.silu(everything @ weight + layer.bias).reshape(len(everything), 3, 16)
    torch.testing.assert_close(model.candidate_tokens(fields, batch), expected, atol=1e-5, rtol=0)


def test_group_tokens_read_their_own_fields(table, batch):
    model = build(table, tokenizer="group").eval()
    assert model.config.tokens == 6
    fields = request_fields(model.encoder, batch)
    before = model.candidate_tokens(fields, batch)
    edited = fields.clone()
    edited[:, 80:128] += 1  # context
    moved = (model.candidate_tokens(edited, batch) != before).any(2).any(0)
    assert moved.tolist() == [False, True, False, False, False, False]
    moved = (model.candidate_tokens(fields, replace(batch, cross=batch.cross + 1)) != before).any(2).any(0)
    assert moved.tolist() == [False, False, False, False, False, True]


# Leakage, learning and cost


def test_nothing_at_or_after_the_request_is_read(table):
    data, request = table.interactions, int(table.requests("valid")[5])
    later = data.timestamp >= table.request_time[request]
    item = data.item.copy()
    item[later] = item[later][::-1]
    edited = table.edited(rating=np.where(later, 6 - data.rating, data.rating).astype(np.float32), item=item)
    model, items = build(table), np.arange(1, synthetic.ITEMS + 1)
    before, after = (t.score_batch(request, items, history=6) for t in (table, edited))
    assert torch.equal(logits(model, before), logits(model, after))
    past = table.edited(rating=np.where(later, data.rating, 6 - data.rating).astype(np.float32))
    assert not torch.equal(logits(model, before), logits(model, past.score_batch(request, items, history=6)))


@pytest.mark.parametrize("switches", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_learns(table, batch, switches):
    model = build(table, **switches).train()
    model(batch).square().sum().backward()
    still = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    idle = {"encoder.key_constant"}
    if switches.get("pyramid") is False:  # nobody reads the last layer's sequence rows
        idle |= {n for n, _ in model.named_parameters() if n.startswith("layers.2.ffn") and "sequence" in n}
    if switches.get("head") == "last":  # and only the last field token of the last layer is read
        still = {n for n in still if not n.startswith("layers.2")}
    assert still == idle


@pytest.mark.parametrize("tier", ["smoke", "standard", "full"])
def test_late_fusion_has_as_many_parameters_in_every_tier(table, tier):
    budget = CARD.budget(tier, "onetrans")
    config = OneTransConfig(**{f.name: budget[f.name] for f in fields(OneTransConfig) if f.name in budget})
    genres = torch.as_tensor(table.item_genres)
    ours, theirs = OneTrans(config, table.vocab, genres), matched(config, table.vocab, genres)
    assert count_params(theirs) == pytest.approx(count_params(ours), rel=0.05)


def test_every_parameter_of_late_fusion_learns(table):
    config = replace(PAPER, history=20, width=32, heads=2, schedule=(20, 10, 0), ns_tokens=4)
    theirs = matched(config, table.vocab, torch.as_tensor(table.item_genres))
    batch = synthetic.training_batch(table, requests=4, history=20)
    theirs.train()(batch).square().sum().backward()
    still = {n for n, p in theirs.named_parameters() if p.grad is None or not p.grad.any()}
    assert still == {"encoder.key_constant"}


def test_counted_flops_are_the_analytic_ones(table):
    model = build(table, replace(SMALL, history=20, width=32, schedule=(20, 10, 0))).eval()
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, 31), history=20)
    with torch.no_grad():
        tokens = model.tokens(batch)
        x = model.candidate_tokens(request_fields(model.encoder, batch), batch)
        groups = request_groups(batch.request_of, 1)

        def layers():
            y = x
            for layer, keys in zip(model.layers, model.sequence_keys(tokens.x, tokens.mask), strict=True):
                y = layer.candidates(y, keys, batch.request_of, groups)

        assert flops_of(layers) == model.flops(30)


def test_serving_many_candidates_costs_far_less_with_the_cache(table):
    model, plain = build(table), build(table, cache=False)
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, 41), history=6)
    with torch.no_grad():
        cached, copied = flops_of(lambda: model.eval()(batch)), flops_of(lambda: plain.eval()(batch))
    assert cached < 0.6 * copied
