"""Mechanism tests of card slimper, with the numbers of its specification."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch

from adapters.slimper.experiment import costs, finish, size_of, transformer_config
from adapters.slimper.model import FIELD_TOKENS, Layer, SlimPer, SlimPerConfig, dense_params, match, select
from adapters.slimper.transformer import FullTransformer, TransformerConfig, matched_hidden
from auto_research.evaluate.ctr import split_pairs
from auto_research.evaluate.serving import candidates_of
from auto_research.experiment.card import find_card
from auto_research.experiment.context import Budget, Context
from auto_research.experiment.contract import Measurement, Rows
from auto_research.metrics.cost import flops_of, saved_bytes
from auto_research.runtime.paths import code_root

CARD = find_card(code_root(), "slimper")
HISTORY = 9
SMALL = SlimPerConfig(
    width=8, slots=4, layers=3, queries=2, templates=3, hidden=12, user_width=6, head=10, field=4, dropout=0.0
)
SWITCHES = {
    "slimper": {},
    "no_match": {"match": False},
    "select_once": {"evidence": "once"},
    "refined": {"tokens": "refined"},
    "channels": {"maps": "channels"},
    "user_start": {"start": "user"},
    "no_residual": {"residual": False},
    "sum": {"readout": "sum"},
    "copied": {"storage": "candidate"},
}
TRANSFORMER = TransformerConfig(width=8, layers=2, heads=2, hidden=12, user_width=6, head=10, field=4, dropout=0.0)


@pytest.fixture(scope="module")
def table():
    return synthetic.request_table()


@pytest.fixture(scope="module")
def batch(table):
    return synthetic.training_batch(table, history=HISTORY)


def build(table, config=SMALL, **switches) -> SlimPer:
    torch.manual_seed(0)
    return SlimPer(replace(config, **switches), table.vocab, torch.as_tensor(table.item_genres)).eval()


def transformer(table, **changes) -> FullTransformer:
    torch.manual_seed(0)
    config = replace(TRANSFORMER, **changes)
    return FullTransformer(config, table.vocab, torch.as_tensor(table.item_genres)).eval()


def logits(model, batch):
    with torch.no_grad():
        return model(batch)


# Select and Match


def test_select_and_match_by_hand():
    tokens, mask = torch.eye(2).unsqueeze(0), torch.ones(1, 2, dtype=torch.bool)
    evidence = select(torch.zeros(1, 1, 2), tokens, mask, torch.tensor([0]))
    assert evidence.flatten().tolist() == pytest.approx([0.5, 0.5])
    assert match(evidence, torch.tensor([[[2.0, 4.0]]])).item() == pytest.approx(3.0)


def test_select_reads_visible_tokens_only():
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    query = torch.tensor([[[math.sqrt(2) * math.log(3), 0.0]]])  # exp(q . e / sqrt(2)) = 3 and 1
    assert select(query, tokens, mask, torch.tensor([0])).flatten().tolist() == pytest.approx([0.75, 0.25])
    assert select(query, tokens, ~mask | mask, torch.tensor([0])).flatten()[0] > 8
    nothing = select(query, tokens, torch.zeros_like(mask), torch.tensor([0]))
    assert nothing.flatten().tolist() == [0, 0]


def test_slot_maps_do_not_touch_channels(table):
    """With the channels of X, E and T permuted alike, lambda stays; the channel maps of the ablation would change it."""
    torch.manual_seed(3)
    x, tokens = torch.randn(5, 4, 8), torch.randn(2, 7, 8)
    mask, request_of = torch.ones(2, 7, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1])
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])

    def relevance(layer, x, tokens):
        evidence = select(layer.query_map(x), tokens, mask, request_of)
        return match(evidence, layer.template_map(x))

    slots, channels = Layer(SMALL), Layer(replace(SMALL, maps="channels"))
    for layer, same in ((slots, True), (channels, False)):
        before, after = relevance(layer, x, tokens), relevance(layer, x[..., order], tokens[..., order])
        assert torch.allclose(before, after, atol=1e-5) is same


def test_maps_start_as_the_card_says():
    torch.manual_seed(0)
    layer = Layer(SlimPerConfig())
    assert torch.equal(layer.refine_map.weight, torch.eye(16))
    assert layer.query_map.weight.shape == layer.template_map.weight.shape == (8, 16)
    assert layer.query_map.weight.std().item() == pytest.approx(16**-0.5, rel=0.2)


# Sizes


def test_score_elements(table):
    full = SlimPerConfig()
    assert FIELD_TOKENS + 50 == 58
    assert build(table, config=full).score_elements(58) == 3 * 8 * 58 == 1392
    assert build(table, config=full, evidence="once").score_elements(58) == 8 * 58
    assert transformer(table, layers=6).score_elements(58) == 6 * 59**2 == 20_886


def test_knowledge_is_the_same_size_at_any_length(table):
    model = build(table)
    for length in (50, 200):
        batch = candidates_of(table, 32, history=length, device="cpu")
        state = model.prepare(batch)
        assert state.tokens.shape == (1, length + FIELD_TOKENS, 8)
        states = model.knowledge(state, model.tokenizer.item(batch), batch.request_of)
        assert [x.shape for x in states] == [(32, 4, 8)] * 4


def test_bytes_kept_for_backward_over_history_length(table):
    """SlimPer keeps less than 20 bytes per attention score; the Transformer the paper replaces keeps N d per layer."""
    config = SlimPerConfig(width=64, dropout=0.2)

    def growth(model) -> float:
        model.train()
        few, many = (
            saved_bytes(partial(model, candidates_of(table, 32, history=length, device="cpu"))) for length in (50, 200)
        )
        return (many - few) / 32

    slim = growth(build(table, config=config))
    assert slim < config.layers * config.queries * (200 - 50) * 20
    copied = growth(transformer(table, width=64, layers=3, heads=4, hidden=256, storage="candidate", dropout=0.2))
    assert copied > 3 * (200 - 50) * 64 * 4
    assert copied > 10 * slim
    memory_baseline = growth(build(table, config=config, storage="candidate"))
    assert memory_baseline > slim + 0.9 * (200 - 50) * 64 * 4  # E once per candidate, kept once for all layers


def test_bytes_of_the_shared_transformer_are_linear_in_the_history(table):
    """Besides the float mask of a layer, 4 N^2 bytes in all layers but the last, which gives its keys and values only."""
    model, lengths = transformer(table, width=64, layers=6, heads=4, hidden=240, dropout=0.2).train(), (50, 125, 200)
    linear = []
    for length in lengths:
        kept = saved_bytes(partial(model, candidates_of(table, 32, history=length, device="cpu")))
        linear.append(kept - 5 * 4 * (length + FIELD_TOKENS) ** 2)
    first, second = np.diff(linear)
    assert second == pytest.approx(first, rel=0.05)
    assert first > 5 * 75 * 4 * (6 * 64 + 2 * 240)  # inputs, q, k, v, attention, both sides of the feed-forward product


def test_costs_are_taken_at_the_history_of_the_arm(table):
    def cost(model, history: int) -> dict:
        budget = Budget({"history": history, "serving": [1, 16], "timed": 1})
        return costs(model, table, device=torch.device("cpu"), budget=budget, studies=False)["efficiency"]

    for make, scores in ((build, lambda n: 3 * 2 * n), (transformer, lambda n: 2 * (n + 1) ** 2)):
        short, long = cost(make(table), 10), cost(make(table), 40)
        assert short["unshared_attention_score_elements"] == scores(10 + FIELD_TOKENS)
        assert long["unshared_attention_score_elements"] == scores(40 + FIELD_TOKENS)
        kept = saved_bytes(partial(make(table).train(), candidates_of(table, 32, history=40, device="cpu")))
        assert long["saved_activation_bytes"] == kept / 32 > short["saved_activation_bytes"]
        assert short["request_ms"] > 0


@pytest.mark.parametrize(("pairs", "history"), [(1, 10), (32, 10), (32, 40)])
def test_counted_flops_are_the_analytic_ones(table, pairs, history):
    batch = candidates_of(table, pairs, history=history, device="cpu")
    for model in (build(table), transformer(table)):
        encoder = model.tokenizer.encoder
        with torch.no_grad():
            fields = flops_of(lambda e=encoder: (e.request(batch), e.pairs(batch)))
            counted = flops_of(lambda m=model: m(batch)) - fields
        declared = model.flops(pairs, 1, history)
        assert counted == declared


def sizes(tier: str) -> tuple[SlimPerConfig, TransformerConfig]:
    """SlimPer and its matched Transformer as the arms of this tier build them."""
    ctx = SimpleNamespace(budget=Budget(CARD.budget(tier)), switch=None)
    ctx.configured = partial(Context.configured, ctx)
    return ctx.configured(SlimPerConfig), transformer_config(ctx)


def paper_pair() -> tuple[SlimPerConfig, TransformerConfig]:
    config, baseline = SlimPerConfig(width=32, slots=8, hidden=136), TransformerConfig(width=64)
    return config, replace(baseline, hidden=matched_hidden(size_of(config), 5 * config.field, baseline))


@pytest.mark.parametrize("tier", ["smoke", "standard", "full", "paper"])
def test_the_baseline_has_the_parameters_of_slimper(table, tier):
    config, matched = paper_pair() if tier == "paper" else sizes(tier)
    assert 2 * matched.width <= matched.hidden <= 6 * matched.width
    genres = torch.as_tensor(table.item_genres)
    ours, theirs = SlimPer(config, table.vocab, genres), FullTransformer(matched, table.vocab, genres)
    target = size_of(config, genres=synthetic.GENRES)
    assert dense_params(ours) == target
    assert dense_params(theirs) == pytest.approx(target, rel=0.05)
    totals = [sum(p.numel() for p in model.parameters()) for model in (theirs, ours)]
    assert totals[0] == pytest.approx(totals[1], rel=0.05)


def test_dense_weights_of_the_sizes_of_the_card(table):
    """1.89M at the full size. 331k at the small one, of which layers, D_u and head are the 304k of the specification;
    the start map (21k) and the token projections (6k) are the rest."""
    assert size_of(SlimPerConfig()) == pytest.approx(1.89e6, rel=0.02)
    config, _ = paper_pair()
    assert size_of(config) == pytest.approx(331_000, rel=0.02)
    model = build(table, config=config)
    parts = (model.layers, model.tokenizer.user, model.head)
    assert sum(p.numel() for part in parts for p in part.parameters()) == pytest.approx(304_000, rel=0.01)


# Raw tokens


def tokens_of(table, **switches):
    """The token tensors that reach the layers of one pass."""
    model, seen = build(table, **switches), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[1].tokens))
    logits(model, synthetic.training_batch(table, history=HISTORY))
    return seen


def test_all_layers_read_the_same_storage(table):
    first, *rest = tokens_of(table)
    assert len(rest) == 2
    assert all(tokens.data_ptr() == first.data_ptr() for tokens in rest)
    assert len({tokens.data_ptr() for tokens in tokens_of(table, tokens="refined")}) == 3


def test_later_queries_matter_unless_evidence_is_selected_once(table, batch):
    for switches, matters in (({}, True), ({"evidence": "once"}, False)):
        model = build(table, **switches)
        before = logits(model, batch)
        for layer in model.layers[1:]:
            if layer.query_map is not None:
                torch.nn.init.normal_(layer.query_map.weight)
            else:
                layer.query_map = Layer(SMALL).query_map  # a map that exists and is not read
        assert torch.equal(before, logits(model, batch)) is not matters


def test_tokens_are_a_set(table, batch):
    """Any order of the rows of E gives the same logits."""
    model = build(table)
    state = model.prepare(batch)
    order = torch.randperm(state.tokens.shape[1], generator=torch.Generator().manual_seed(1))
    moved = state._replace(tokens=state.tokens[:, order], mask=state.mask[:, order])
    with torch.no_grad():
        before, after = model.score(state, batch), model.score(moved, batch)
    assert torch.allclose(before, after, atol=1e-5)
    assert not torch.allclose(before, model.score(state._replace(tokens=state.tokens[:, order]), batch), atol=1e-5)


def test_padding_rows_have_no_gradient(table, batch):
    assert not batch.hist_mask.all()
    model = build(table)
    state = model.prepare(batch)
    state.tokens.retain_grad()
    model.score(state, batch).square().sum().backward()
    gradient = state.tokens.grad
    assert gradient[~state.mask].abs().max() == 0
    assert (gradient[state.mask].abs().sum(1) > 0).all()


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_longer_padding_changes_nothing(table, switches):
    requests = table.requests("train")[:6]
    short, long = (table.batch(requests, history=length) for length in (40, 70))
    model = build(table, **switches)
    assert torch.allclose(logits(model, short), logits(model, long), atol=1e-5)


# Requests


@pytest.mark.parametrize("kind", ["slimper", "transformer"])
def test_shared_tokens_equal_copied_tokens(table, batch, kind):
    make = build if kind == "slimper" else transformer
    shared, copied = make(table), make(table, storage="candidate")
    copied.load_state_dict(shared.state_dict())
    assert torch.allclose(logits(shared, batch), logits(copied, batch), atol=1e-5)


@pytest.mark.parametrize("make", [build, transformer])
def test_the_request_part_runs_once_for_all_chunks(table, make, monkeypatch):
    model, calls, encoded = make(table), [], []
    encoder, encode = model.tokenizer.encoder, model.tokenizer.encoder.request
    model.tokenizer.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(encoder, "request", lambda batch: encoded.append(1) or encode(batch))
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, synthetic.ITEMS + 1), history=HISTORY)
    whole = logits(model, batch)
    assert len(calls) == len(encoded) == 1
    with torch.no_grad():
        state = model.prepare(batch)
        parts = torch.cat([model.score(state, part) for part in split_pairs(batch, 7)])
    assert len(calls) == len(encoded) == 2
    assert torch.allclose(parts, whole, atol=1e-5)


def test_candidates_of_the_transformer_do_not_see_each_other(table, batch):
    model = transformer(table)
    alone = torch.cat([logits(model, part) for part in split_pairs(batch, 1)])
    assert torch.allclose(alone, logits(model, batch), atol=1e-5)


# Switches and training


@pytest.mark.parametrize("name", ["select_once", "refined", "no_residual", "sum"])
def test_a_switch_changes_the_logits_of_the_same_weights(table, batch, name):
    model, other = build(table), build(table, **SWITCHES[name])
    other.load_state_dict(other.state_dict() | {k: v for k, v in model.state_dict().items() if k in other.state_dict()})
    assert not torch.allclose(logits(model, batch), logits(other, batch), atol=1e-4)


@pytest.mark.parametrize("matched", [True, False])
def test_without_match_refine_reads_the_evidence_itself(table, batch, matched):
    model, facts, seen = build(table, match=matched), [], []
    for layer in model.layers:
        layer.fact_norm.register_forward_pre_hook(lambda _, args: facts.append(args[0]))
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out[1])))
    logits(model, batch)
    for layer, fact, (x, evidence) in zip(model.layers, facts, seen, strict=True):
        expected = match(evidence, layer.template_map(x)) if matched else evidence
        assert torch.equal(fact, expected.flatten(1))


def test_only_the_user_start_knows_the_user(table, batch):
    for switches, knows in (({}, False), ({"start": "user"}, True)):
        model = build(table, **switches)
        with torch.no_grad():
            state, item = model.prepare(batch), model.tokenizer.item(batch)
            here = model.knowledge(state, item, batch.request_of)
            there = model.knowledge(state._replace(user=state.user + 1), item, batch.request_of)
        assert torch.equal(here[0], there[0]) is not knows
        assert not torch.allclose(here[1], there[1], atol=1e-4)  # D_u reaches Refine either way


def test_channel_maps_read_one_slot_a_row(table):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
    moved = x.clone()
    moved[:, 1] += 1
    for maps, rows in (("slots", [0, 1]), ("channels", [1])):
        layer = build(table, maps=maps).layers[0]
        changed = (layer.query_map(x) - layer.query_map(moved)).abs().amax((0, 2)) > 1e-6
        assert changed.nonzero().flatten().tolist() == rows


# Dropout


def test_the_user_vector_and_the_statistics_token_share_one_dropout(table, batch):
    model, seen = build(table, dropout=0.5).train(), []
    model.tokenizer.fields[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.tokenizer.user.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, : SMALL.field]))
    model.prepare(batch)
    token, user = seen
    assert torch.equal(token, user)
    assert 0.3 < (token == 0).float().mean() < 0.7


def test_refine_drops_hidden_units_and_not_its_output(table, batch):
    model, seen = build(table, dropout=0.5), []
    layer = model.layers[0].train()
    for part in (layer.out, layer.norm):
        part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.zeros(batch.pairs(), SMALL.slots, SMALL.width)
    layer(x, model.prepare(batch), batch.request_of)
    hidden, change = seen  # x is zero, so the norm reads the change alone
    assert 0.3 < (hidden == 0).float().mean() < 0.7
    assert (change != 0).all()


def test_no_match_keeps_the_hidden_width(table):
    a, b = build(table), build(table, match=False)
    assert a.layers[0].pair_in.out_features == b.layers[0].pair_in.out_features
    assert a.layers[0].pair_in.in_features == 2 * 3 + 4 * 8
    assert b.layers[0].pair_in.in_features == 2 * 8 + 4 * 8


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_every_parameter_learns(table, batch, switches):
    model = build(table, **switches).train()
    model(batch).square().sum().backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == {"tokenizer.encoder.key_constant"}


@pytest.mark.parametrize("make", [build, transformer])
def test_an_empty_history_is_scored(table, batch, make):
    empty = replace(batch, hist_mask=torch.zeros_like(batch.hist_mask))
    model = make(table).train()
    model(empty).sum().backward()
    assert logits(make(table), empty).isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_unknown_switches_are_refused():
    with pytest.raises(ValueError, match="evidence"):
        SlimPerConfig(evidence="never")


def test_normalised_entropy_by_hand():
    rows = Rows(user=[1, 1, 2, 2], label=[1, 0, 1, 0], score=[0.5] * 4)
    measured = finish(Measurement(metrics={"logloss": math.log(2)}, rows=rows))
    assert measured.metrics["ne"] == pytest.approx(1.0)
    rows = Rows(user=[1, 1, 2, 2], label=[1, 1, 1, 0], score=[0.5] * 4)
    measured = finish(Measurement(metrics={"logloss": math.log(2)}, rows=rows))
    assert measured.metrics["ne"] == pytest.approx(math.log(2) / 0.5623351)
    alike = Rows(user=[1, 2], label=[1, 1], score=[0.5] * 2)
    assert "ne" not in finish(Measurement(metrics={"logloss": 0.3}, rows=alike)).metrics
