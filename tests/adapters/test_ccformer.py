"""Mechanism tests of card ccformer, with the numbers of its specification."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch

from adapters import ccformer
from adapters.ccformer.experiment import TitledDCNv2, dense_size, hstu_config, tokens_entering
from adapters.ccformer.hstu_ranker import HstuRanker, HstuRankerConfig
from adapters.ccformer.model import CCFormer, CCFormerConfig, one_per_request
from adapters.ccformer.streams import (
    AttentionMix,
    Compress,
    ConvMix,
    CrossField,
    StreamLayer,
    compressed_length,
    unit_rms,
)
from adapters.ccformer.titles import TitledEncoder
from auto_research.blocks.request_groups import request_groups
from auto_research.data.behaviours import BehaviourTable
from auto_research.evaluate.ctr import split_pairs
from auto_research.experiment.card import load_card
from auto_research.experiment.context import Budget, Context
from auto_research.metrics.cost import flops_of

CARD = load_card(Path(ccformer.__file__).parent)
HISTORY, TITLE = 9, 6
SMALL = CCFormerConfig(
    history=HISTORY, recent=3, width=8, layers=3, heads=2, field=4, tower=10, expansion=2, dropout=0.0
)
SWITCHES = {
    "ccformer": {},
    "fused_fields": {"streams": "wide"},
    "fused_narrow": {"streams": "sum"},
    "shared": {"projections": "shared"},
    "uniform": {"compression": "all"},
    "no_compression": {"compression": "none"},
    "truncate": {"compression": "truncate"},
    "attention": {"mix": "attention"},
    "read_id": {"read": "id"},
    "alone": {"targets": "alone"},
}


@pytest.fixture(scope="module")
def table():
    return BehaviourTable.of(synthetic.request_table())


@pytest.fixture(scope="module")
def batch(table):
    return synthetic.training_batch(table, history=HISTORY)


@pytest.fixture(scope="module")
def titles():
    vectors = torch.randn(synthetic.ITEMS + 1, TITLE, generator=torch.Generator().manual_seed(5))
    vectors[0] = 0
    return vectors


@pytest.fixture
def build(table, titles):
    def make(**switches) -> CCFormer:
        torch.manual_seed(0)
        config = replace(SMALL, **switches)
        return CCFormer(config, table.vocab, torch.as_tensor(table.item_genres), titles.clone()).eval()

    return make


@pytest.fixture
def hstu(table, titles):
    def make(**changes) -> HstuRanker:
        torch.manual_seed(0)
        config = replace(HstuRankerConfig(width=8, layers=2, heads=2, tower=10, field=4, history=HISTORY), **changes)
        return HstuRanker(config, table.vocab, torch.as_tensor(table.item_genres), titles).eval()

    return make


def logits(model, batch):
    with torch.no_grad():
        return model(batch)


# Compression


def test_lengths():
    assert CCFormerConfig().lengths() == [64, 40, 28, 22]
    assert CCFormerConfig().lengths(63) == [63, 40, 28, 22]
    assert CCFormerConfig(compression="none").lengths() == [64] * 4
    assert CCFormerConfig(compression="truncate").lengths() == [22] * 4
    assert CCFormerConfig(compression="all").lengths() == [64, 32, 16, 8]
    assert CCFormerConfig(history=24, recent=8, layers=2).lengths() == [24, 16, 12]
    assert compressed_length(3, 8) == 3
    assert compressed_length(9, 8) == 9


def test_tokens_that_enter_the_layers():
    """An event is a token of each stream; HSTU keeps one per event in every layer."""
    assert tokens_entering(CCFormerConfig(), 64) == [192, 120, 84]
    assert tokens_entering(CCFormerConfig(streams="wide"), 64) == [64, 40, 28]
    assert tokens_entering(CCFormerConfig(compression="none"), 64) == [192] * 3
    assert tokens_entering(HstuRankerConfig(layers=2), 64) == [64, 64]


def test_the_model_has_these_lengths(build, table):
    model = build(history=64, recent=16)
    for length in (64, 63):
        batch = table.batch(table.requests("valid")[:2], history=length)
        assert [s.shape[2] for s, _ in model.encode(batch)] == [40, 28, 22]
    model = build(history=64, recent=16, compression="truncate")
    assert [s.shape[2] for s, _ in model.encode(table.batch(table.requests("valid")[:2], history=64))] == [22] * 3


@pytest.mark.parametrize("length", [64, 63])
def test_recent_positions_pass_unchanged(length):
    torch.manual_seed(0)
    s, mask = torch.randn(3, 2, length, 4), torch.ones(2, length, dtype=torch.bool)
    merged, valid = Compress(3, 4, recent=16)(s, mask)
    assert merged.shape == (3, 2, 40, 4)
    assert torch.equal(merged[:, :, -16:], s[:, :, -16:])
    assert valid.all()
    if length == 63:  # the window of one is the oldest: softmax part and mean are both the event itself
        assert torch.equal(merged[:, :, 0], 2 * s[:, :, 0])


def test_a_single_old_position_is_a_window_of_one():
    """As behind longer padding: what an event becomes must not depend on how far the row is padded."""
    torch.manual_seed(0)
    compress, s, mask = Compress(3, 4, recent=4), torch.randn(3, 2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    merged, valid = compress(s, mask)
    assert torch.equal(merged, torch.cat([2 * s[:, :, :1], s[:, :, 1:]], dim=2))
    padded = torch.nn.functional.pad(s, (0, 0, 1, 0)), torch.nn.functional.pad(mask, (1, 0))
    assert torch.equal(compress(*padded)[0], merged)
    assert valid.all()
    assert merged.shape[2] == compressed_length(5, 4)
    assert flops_of(lambda: compress(s, mask)) == compress.flops(2, 5) > 0
    assert torch.equal(compress(s[:, :, 1:], mask[:, 1:])[0], s[:, :, 1:])


def test_window_by_hand():
    compress = Compress(1, 1, recent=0)
    torch.nn.init.zeros_(compress.score)
    s = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    merged, _ = compress(s, torch.ones(1, 2, dtype=torch.bool))
    assert merged.item() == pytest.approx(2 + 2)
    merged, valid = compress(s, torch.tensor([[False, True]]))
    assert merged.item() == pytest.approx(2 * 3)
    assert valid.item()
    merged, valid = compress(s, torch.tensor([[False, False]]))
    assert merged.item() == 0
    assert not valid.item()


def test_pooling_weights_follow_the_learned_vector():
    compress = Compress(1, 2, recent=0)
    with torch.no_grad():
        compress.score.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1))
    s = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
    merged, _ = compress(s, torch.ones(1, 2, dtype=torch.bool))
    a = torch.tensor([2**0.5, 0.0]).softmax(0)  # RMSNorm of (1, 0) is (sqrt 2, 0)
    assert merged.flatten().tolist() == pytest.approx([a[0].item() + 0.5, a[1].item() + 0.5], abs=1e-5)


def test_receptive_field():
    """With Mix off, a merged token covers 2^l consecutive events after layer l, a recent token one."""
    torch.manual_seed(0)
    layers = [StreamLayer(3, 4, heads=2, recent=16, hidden=8) for _ in range(3)]
    events = torch.randn(3, 1, 64, 4, requires_grad=True)
    s, mask = events, torch.ones(1, 64, dtype=torch.bool)
    for level, layer in enumerate(layers, start=1):
        for parameter in layer.mix.ffn.down.parameters():
            torch.nn.init.zeros_(parameter)
        s, mask = layer(s, mask)
        old = s.shape[2] - 16
        for position in (0, old - 1):  # all windows are complete at 64
            (gradient,) = torch.autograd.grad(s[:, 0, position].square().sum(), events, retain_graph=True)
            touched = gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
            assert touched == list(range(position * 2**level, (position + 1) * 2**level))
        for i in (0, 15):
            (gradient,) = torch.autograd.grad(s[:, 0, old + i].square().sum(), events, retain_graph=True)
            assert gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [48 + i]


def test_old_states_grow_and_readers_do_not_see_it():
    torch.manual_seed(0)
    s, mask = torch.ones(1, 1, 8, 4), torch.ones(1, 8, dtype=torch.bool)
    for level in range(1, 4):
        s, mask = Compress(1, 4, recent=0)(s, mask)
        assert s.flatten()[0].item() == pytest.approx(2**level)
        assert torch.allclose(unit_rms(s), torch.ones_like(s), atol=1e-5)


# Cross-field


def test_cross_field_by_hand():
    """Zero queries: every field reads the mean of the three values; the gate starts from its bias."""
    cross = CrossField(3, 2, heads=1)
    with torch.no_grad():
        for parameter in cross.parameters():
            parameter.zero_()
        cross.v.weight[:] = torch.eye(2)
        cross.out.weight[:] = torch.eye(2)
    s = torch.tensor([[1.0, 1.0], [-2.0, 2.0], [3.0, 3.0]]).view(3, 1, 1, 2)
    mean = torch.tensor([1.0, 3.0]) / 3  # of the normalised fields (1, 1), (-1, 1), (1, 1)
    out = cross(s, torch.ones(1, 1, dtype=torch.bool))
    assert torch.allclose(out, s + 0.5 * mean, atol=1e-5)


def test_order_of_the_fields_is_arbitrary():
    torch.manual_seed(0)
    order = [2, 0, 1]
    layer, other = (StreamLayer(3, 4, heads=2, recent=2, hidden=8) for _ in range(2))
    moved = {}
    for name, value in layer.state_dict().items():
        moved[name] = value[:, order] if name == "mix.taps" else value[order]
    other.load_state_dict(moved)
    s, mask = torch.randn(3, 2, 7, 4), torch.ones(2, 7, dtype=torch.bool)
    out, _ = layer(s, mask)
    assert torch.allclose(other(s[order], mask)[0], out[order], atol=1e-6)
    assert not torch.allclose(layer(s[order], mask)[0], out[order], atol=1e-3)


def test_equal_projections_are_the_shared_ones(build, batch):
    private, shared = build(), build(projections="shared")
    own = private.state_dict()
    given = shared.state_dict()
    private.load_state_dict({name: given[name].expand_as(value) for name, value in own.items()})
    assert given["layers.0.cross.q.weight"].shape[0] == 1
    assert torch.equal(logits(private, batch), logits(shared, batch))


def close_gates(model):
    for layer in model.layers:
        torch.nn.init.zeros_(layer.cross.gate_state.weight)
        torch.nn.init.zeros_(layer.cross.gate.weight)
        torch.nn.init.constant_(layer.cross.gate.bias, -200.0)


def test_a_field_stays_pure_when_nothing_is_written_back(build, table):
    """Gates shut and the content stream unread: titles and genres of the history change nothing; fused, they do."""
    request = int(table.requests("test")[0])
    batch = table.score_batch(request, [1, 2, 3], history=HISTORY)
    history = sorted(set(batch.hist_item[batch.hist_mask].tolist()) - {1, 2, 3})

    def changed(model) -> bool:
        before = logits(model, batch)
        for name in ("titles", "item_genres"):
            vectors = getattr(model.encoder, name).clone()  # the table owns the original
            vectors[history] = 1 - vectors[history]
            setattr(model.encoder, name, vectors)
        return not torch.equal(before, logits(model, batch))

    model = build()
    assert changed(model)
    model = build()
    close_gates(model)
    assert changed(model)
    model = build()
    close_gates(model)
    with torch.no_grad():
        for reader in model.readers:
            reader.kv.weight[1] = 0
    assert not changed(model)
    assert changed(build(streams="wide"))
    assert changed(build(streams="sum"))


def test_shared_projections_do_not_know_the_field(build):
    """With equal gates, fields that change places take their reads along; private projections tell them apart."""
    for projections, knows in (("private", True), ("shared", False)):
        cross = build(projections=projections).layers[0].cross
        for gate in (cross.gate_state.weight, cross.gate.weight, cross.gate.bias):
            torch.nn.init.constant_(gate, 0.1)
        torch.manual_seed(1)
        s, mask, order = torch.randn(3, 2, 5, 8), torch.ones(2, 5, dtype=torch.bool), [2, 0, 1]
        assert torch.allclose(cross(s[order], mask), cross(s, mask)[order], atol=1e-6) != knows


# Tokens at the start


def test_fused_streams_are_the_sum_of_the_fields(build, batch):
    fields, fused, wide = build(), build(streams="sum"), build(streams="wide")
    for part in ("tokenizer", "encoder"):
        getattr(fused, part).load_state_dict(getattr(fields, part).state_dict())
    apart = fields.tokenizer.events(batch, fields.encoder)
    together = fused.tokenizer.events(batch, fused.encoder)
    assert together.shape == (1, *apart.shape[1:])
    assert torch.allclose(together[0], apart.sum(0), atol=1e-6)
    names = ("id", "content", "action")
    whole = wide.tokenizer.events(batch, wide.encoder)
    assert whole.shape == (1, *apart.shape[1:3], 3 * SMALL.width)
    parts = []
    for kept in names:
        only = build(streams="wide")
        for name in names:
            if name != kept:
                torch.nn.init.zeros_(getattr(only.tokenizer, name).weight)
        parts.append(only.tokenizer.events(batch, only.encoder))
        assert parts[-1].abs().max() > 0
    assert torch.allclose(sum(parts), whole, atol=1e-6)
    assert all(layer.cross is None for model in (fused, wide) for layer in model.layers)
    for f, name in enumerate(names):  # apart, a field's projection reaches its own stream and no other
        only = build()
        torch.nn.init.zeros_(getattr(only.tokenizer, name).weight)
        changed = (only.tokenizer.events(batch, only.encoder) != apart).flatten(1).any(1)
        assert changed.tolist() == [i == f for i in range(3)]


def test_nothing_but_embeddings_makes_the_first_tokens(build):
    t = build().tokenizer
    for layer in (t.id, t.content, t.action, t.target_id, t.target_content):
        assert not layer(torch.zeros(layer.in_features)).any()


def test_every_token_of_a_target_is_dropped_out(build, batch):
    model = build(dropout=0.5).train()
    t, e = model.tokenizer, model.encoder
    torch.nn.init.zeros_(t.target_rest.weight)  # leaves genres and title of the content token
    user, context = (torch.zeros(len(batch.hist_item), 8) for _ in range(2))
    first, second = (t.targets(user, context, batch, e) for _ in range(2))
    changed = (first != second).flatten(1).any(1)
    assert changed.tolist() == [True, True, False, True]
    model.eval()
    assert torch.equal(t.targets(user, context, batch, e), t.targets(user, context, batch, e))


# Mix


def test_convolution_is_causal_with_three_taps():
    torch.manual_seed(0)
    mix = ConvMix(3, 4, 8)
    n = torch.randn(3, 2, 6, 4, requires_grad=True)
    mix(n, torch.ones(2, 6, dtype=torch.bool))[:, :, 4].sum().backward()
    assert n.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [2, 3, 4]
    with torch.no_grad():
        y = sum(torch.nn.functional.pad(n[:, :, : 6 - k], (0, 0, k, 0)) * mix.taps[k] for k in range(3))
        conv = torch.nn.functional.conv1d(
            torch.nn.functional.pad(n[1].transpose(1, 2), (2, 0)),
            mix.taps[:, 1, 0, 0].flip(0).t().unsqueeze(1),
            groups=4,
        )
    assert torch.allclose(conv.transpose(1, 2), y[1], atol=1e-5)


def test_attention_reads_beyond_the_taps():
    """The event itself and every earlier one, none later; the convolution of the last test sees three."""
    torch.manual_seed(0)
    mix, mask = AttentionMix(3, 8, 8), torch.ones(2, 6, dtype=torch.bool)
    mask[1, :2] = False
    n = torch.randn(3, 2, 6, 8, requires_grad=True)
    mix(n, mask)[:, :, 4].sum().backward()
    touched = n.grad.abs().sum((0, 3))
    assert touched[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert touched[1].nonzero().flatten().tolist() == [2, 3, 4]


@pytest.mark.parametrize("mix", ["conv", "attention"])
def test_mix_reads_no_later_event(mix):
    torch.manual_seed(0)
    layer = StreamLayer(3, 8, heads=2, recent=3, hidden=8, mix=mix)
    s, mask = torch.randn(3, 2, 7, 8), torch.ones(2, 7, dtype=torch.bool)
    later = s.clone()
    later[:, :, 6] = torch.randn(3, 2, 8)
    a, b = layer(s, mask)[0], layer(later, mask)[0]
    assert torch.equal(a[:, :, :-1], b[:, :, :-1])
    assert not torch.equal(a[:, :, -1], b[:, :, -1])


# Padding


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_longer_padding_changes_nothing(build, table, switches):
    """Except for truncation, whose number of events follows from the length."""
    requests = table.requests("train")[:6]
    short, long = (table.batch(requests, history=length) for length in (40, 63))
    model = build(**switches)
    if switches.get("compression") != "truncate":
        assert torch.allclose(logits(model, short), logits(model, long), atol=1e-5)
    for s, mask in model.encode(long):
        assert s[:, ~mask].abs().sum() == 0


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_an_empty_history_is_scored_and_trained(build, batch, switches):
    empty = replace(batch, hist_mask=torch.zeros_like(batch.hist_mask))
    model = build(**switches).train()
    model(empty).sum().backward()
    assert logits(model, empty).isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_invisible_stream_contributes_nothing(build, batch):
    model = build()
    state = model.prepare(replace(batch, hist_mask=torch.zeros_like(batch.hist_mask)))
    g = torch.randn(4, batch.pairs(), 8)
    k, v, mask = state.keys[0], torch.ones_like(state.values[0]), state.masks[0]
    of_one = torch.zeros(batch.pairs(), dtype=torch.int64)
    read = model.readers[0](g, k[:1], v[:1], mask[:1], of_one, request_groups(of_one, 1))
    assert read.abs().max() == 0


# Targets


@pytest.mark.parametrize("kind", ["ccformer", "hstu"])
def test_targets_do_not_see_each_other(build, hstu, table, kind):
    model = build() if kind == "ccformer" else hstu()
    request = int(table.requests("test")[0])
    items = np.arange(1, 33)
    batch = table.score_batch(request, items, history=HISTORY)
    together = logits(model, batch)
    for j in (0, 17):
        alone = table.score_batch(request, items[j : j + 1], history=HISTORY)
        assert torch.allclose(logits(model, alone)[0], together[j], atol=1e-6)
        others = table.score_batch(request, np.where(items == items[j], items, items + 20), history=HISTORY)
        assert torch.allclose(logits(model, others)[j], together[j], atol=1e-6)


@pytest.mark.parametrize("kind", ["ccformer", "hstu"])
def test_the_sequence_runs_once_per_request(build, hstu, table, kind):
    model, calls = (build() if kind == "ccformer" else hstu()), []
    first = model.layers[0] if kind == "ccformer" else model.event
    first.register_forward_hook(lambda *_: calls.append(1))
    batch = table.score_batch(int(table.requests("test")[0]), np.arange(1, synthetic.ITEMS + 1), history=HISTORY)
    whole = logits(model, batch)
    assert len(calls) == 1
    with torch.no_grad():
        state = model.prepare(batch)
        parts = torch.cat([model.score(state, part) for part in split_pairs(batch, 7)])
    assert len(calls) == 2
    assert torch.allclose(parts, whole, atol=1e-5)


def test_one_forward_per_target_is_the_same(build, batch):
    together, alone = build(), build(targets="alone")
    assert torch.allclose(logits(together, batch), logits(alone, batch), atol=1e-5)
    assert flops_of(lambda: logits(alone, batch)) > 1.2 * flops_of(lambda: logits(together, batch))
    assert len(one_per_request(batch).hist_item) == batch.pairs()


def test_a_single_task_trains_like_alone(build, batch):
    model = build(tasks="like").train()
    model.training_loss(batch, None).backward()
    gradient = model.tower[-1].weight.grad
    assert gradient[1].any()
    assert not gradient[[0, 2]].any()


# Leakage


def test_no_event_at_or_after_the_request_is_read(table, build):
    """Later ratings are poisoned: not a number in the history would reach the logits."""
    request = int(table.requests("valid")[5])
    data = table.interactions
    later = data.timestamp >= table.request_time[request]
    assert later[int(table.index.start[request])]  # the target's own rating is among them
    rating = np.where(later, np.nan, data.rating).astype(np.float32)
    past = table._window("hist", np.array([request]), HISTORY)
    rows = past["hist_row"][past["hist_mask"]]
    assert len(rows)
    assert not np.isnan(rating[rows]).any()
    assert (data.timestamp[rows] < table.request_time[request]).all()
    for row in rows:  # the gap of an event looks back only
        earlier = data.timestamp[:row][data.user[:row] == data.user[row]]
        gap = math.floor(math.log2(1 + int(data.timestamp[row] - earlier.max()))) if len(earlier) else 31
        assert table._event_gap[row] == min(gap, 31)
    assert past["hist_gap"][past["hist_mask"]].tolist() == table._event_gap[rows].tolist()
    item = data.item.copy()
    item[later] = item[later][::-1]
    edited = table.edited(rating=np.where(later, 6 - data.rating, data.rating).astype(np.float32), item=item)
    items = np.arange(1, synthetic.ITEMS + 1)
    model = build()
    before, after = (t.score_batch(request, items, history=HISTORY) for t in (table, edited))
    assert torch.equal(logits(model, before), logits(model, after))
    early = np.where(later, data.rating, 6 - data.rating).astype(np.float32)
    assert not torch.equal(
        logits(model, before), logits(model, table.edited(rating=early).score_batch(request, items, history=HISTORY))
    )


# Sizes and switches


@pytest.mark.parametrize("name", [name for name in SWITCHES if name not in ("ccformer", "alone")])
def test_every_switch_changes_the_model(build, batch, name):
    model, other = build(), build(**SWITCHES[name])
    given = model.state_dict()
    own = other.state_dict()
    other.load_state_dict({k: given[k] if k in given and given[k].shape == v.shape else v for k, v in own.items()})
    assert not torch.allclose(logits(model, batch), logits(other, batch), atol=1e-5)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_every_parameter_learns(build, batch, switches):
    model = build(**switches).train()
    model(batch).square().sum().backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    unread = {"encoder.key_constant", "encoder.event_age.weight"}
    if switches.get("read") == "id":  # the last layer's other streams end there
        silent = {name for name in silent if not name.startswith("layers.2.")}
    assert silent == unread


def test_every_parameter_of_hstu_learns(hstu, batch):
    model = hstu().train()
    model(batch).square().sum().backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == {"encoder.key_constant", "encoder.event_age.weight"}


@pytest.mark.parametrize("requests_history", [(3, 9), (5, 20)])
def test_counted_flops_of_the_sequence_branch(build, table, requests_history):
    requests, history = requests_history
    batch = table.batch(table.requests("valid")[:requests], history=history)
    for switches in ({}, {"streams": "wide"}, {"compression": "none"}, {"compression": "truncate"}):
        model = build(**switches)
        s, mask = model.tokenizer.events(batch, model.encoder), batch.hist_mask
        kept = model.config.lengths(history)[0]
        s, mask = s[:, :, -kept:], mask[:, -kept:]

        def branch(model=model, s=s, mask=mask):
            for layer, reader in zip(model.layers, model.readers, strict=True):
                s, mask = layer(s, mask)
                reader.keys_values(s)

        with torch.no_grad():
            assert flops_of(branch) == model.stream_flops(requests, history)


@pytest.mark.parametrize(("tier", "surplus"), [("smoke", 0.21), ("standard", 0.22), ("full", 0.05)])
def test_parameters_at_the_budgets_of_the_card(table, tier, surplus):
    """HSTU has CCFormer's; of the wide stream, only its layers do (surplus: the share said in the card's boundary)."""
    ctx = SimpleNamespace(budget=Budget(CARD.budget(tier)), switch=None)
    ctx.configured = partial(Context.configured, ctx)
    titles = torch.zeros(synthetic.ITEMS + 1, 384)
    config, baseline = ctx.configured(CCFormerConfig), hstu_config(ctx, titles)
    target = dense_size(config, 384)
    genres = torch.as_tensor(table.item_genres)
    ours, theirs = (
        CCFormer(config, table.vocab, genres, titles),
        HstuRanker(baseline, table.vocab, genres, titles),
    )
    assert ours.dense_params() == target
    assert theirs.dense_params() == pytest.approx(target, rel=0.05)
    wide = CCFormer(replace(config, streams="wide"), table.vocab, genres, titles)
    layer, reader = (
        [sum(p.numel() for p in getattr(model, part).parameters()) for model in (ours, wide)]
        for part in ("layers", "readers")
    )
    inputs = [
        sum(getattr(m.tokenizer, name).weight.numel() for name in ("id", "content", "action")) for m in (ours, wide)
    ]
    assert layer[1] == pytest.approx(layer[0], rel=0.05)
    assert 3 * reader[1] == 2 * reader[0]
    assert inputs[1] == 3 * inputs[0]
    assert wide.dense_params() / target - 1 == pytest.approx(surplus, abs=0.005)


def test_titles_reach_every_trained_arm(build, hstu, table, batch, titles):
    dcn = TitledDCNv2(table.vocab, torch.as_tensor(table.item_genres), titles.clone(), history=9, hidden=8, field=4)
    for model in (build(), hstu(), dcn.eval()):
        before = logits(model, batch)
        encoder = model.input.encoder if model is dcn else model.encoder
        assert "titles" not in {name.rpartition(".")[2] for name in model.state_dict()}
        encoder.titles = encoder.titles + 1
        assert not torch.equal(before, logits(model, batch))


def test_padding_has_no_title_and_no_item(table, titles):
    encoder = TitledEncoder(table.vocab, torch.as_tensor(table.item_genres), titles, field=4)
    assert encoder.titles[0].abs().max() == 0
    assert encoder.item_vectors().shape == (synthetic.ITEMS + 1, 8)


def test_rows_are_projected_alone_or_looked_up(table, titles, batch):
    """The same vectors either way; one request does not pay for the vocabulary."""
    torch.manual_seed(0)
    encoder, layer = (
        TitledEncoder(table.vocab, torch.as_tensor(table.item_genres), titles, field=4),
        torch.nn.Linear(10, 3),
    )
    few, many = batch.item[:20], batch.item.repeat(2)
    assert encoder.few(few)
    assert not encoder.few(many)
    looked_up = torch.nn.functional.embedding(few, layer(encoder.content_vectors()))
    assert torch.allclose(encoder.projected(layer, few), looked_up, atol=1e-6)
    assert torch.allclose(encoder.projected(layer, many)[:20], looked_up, atol=1e-6)
    one = table.batch(table.requests("valid")[:2], history=HISTORY)
    assert encoder.few(one.hist_item)
    plain = encoder.request(one, encoder.item_vectors()).events, encoder.pairs(one, encoder.item_vectors()).key
    for short, long in zip((encoder.request(one).events, encoder.pairs(one).key), plain, strict=True):
        assert torch.allclose(short, long, atol=1e-6)
    with torch.no_grad():
        assert flops_of(lambda: encoder.pairs(one)) < flops_of(lambda: encoder.pairs(one, encoder.item_vectors()))


def test_unknown_switches_are_refused():
    with pytest.raises(ValueError, match="compression"):
        CCFormerConfig(compression="some")
