"""Mechanism tests of card unir2, with the numbers of its specification."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch

from adapters.unir2 import experiment
from adapters.unir2.evaluation import (
    GENERATION_ORDER,
    EncoderCalls,
    Server,
    impression_uauc,
    ordered,
    ranked_rows,
    ranking_flops,
    serving_cost,
    unified_score,
)
from adapters.unir2.events import UnifiedSplit, requests_at, seen_items
from adapters.unir2.experiment import build_table, random_table
from adapters.unir2.features import RANKING_TOKENS, cross_scalars, item_facts
from adapters.unir2.model import Served, UniR2, UniR2Config, generation_loss
from adapters.unir2.training import (
    BatchRule,
    LossWeights,
    RowBatches,
    conflict,
    joint_loss,
    ranking_loss,
    row_batch,
    task_labels,
)
from adapters.unir2.two_stage import DinConfig, SasrecDin, TwoStage, matched_din
from auto_research.blocks.beam_search import constrained_beam
from auto_research.blocks.semantic_ids import SIDTable, resolve_collisions
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.interactions import load_interactions
from auto_research.evaluate.next_list import validation_lists
from auto_research.experiment.card import TIERS, load_card
from auto_research.experiment.context import Budget, Context
from auto_research.metrics.cost import count_params, flops_of
from auto_research.metrics.ctr import user_auc
from auto_research.runtime.errors import ConfigError
from auto_research.train.fitting import FitBudget, fit_model
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder

CPU = torch.device("cpu")
CONFIG = UniR2Config(width=16, heads=2, layers=2, hidden=24, dropout=0.0, history=7, rank=4)
RULE = BatchRule(history=7, batch=12, hashed=20)
CARD = load_card(Path(experiment.__file__).parent)
ALONE = {"generation": False, "stop": False, "lora": False, "reads": "prefix", "trajectory": False}


@pytest.fixture(scope="module")
def data():
    return UnifiedSplit.build(synthetic.interactions(users=14, ratings=40))


@pytest.fixture(scope="module")
def facts(data):
    return item_facts(data, RULE.hashed)


@pytest.fixture(scope="module")
def table(data):
    text = np.random.default_rng(0).normal(size=(data.n_items + 1, 20)).astype(np.float32)
    return build_table(data, text, [4, 3, 3], seed=0, text_width=8)


def build(table, facts, seed=0, loud=True, **switches) -> UniR2:
    """loud: all parts are large enough to be seen, low-rank updates included; else as a model starts."""
    torch.manual_seed(seed)
    model = UniR2(replace(CONFIG, **switches), table, facts).eval()
    if loud:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def request(data, count=3, strict=False, split="test"):
    rows = data.cut(split)[:count]
    return requests_at(data, rows, CONFIG.history, RULE.hashed, strict=strict), seen_items(data, rows)


def items(data, count=3, width=4):
    return torch.from_numpy(np.random.default_rng(1).integers(1, data.n_items + 1, (count, width)))


def first_batch(data):
    return RowBatches(data, RULE, 1, 4, CPU).at(0)


# Split, batches, features


def test_targets_and_train_rows(data):
    table = data.interactions
    assert 5 < len(data) <= 14
    for i, user in enumerate(data.users):
        rows = np.flatnonzero(table.user == user)
        assert data.test_target[i] == rows[-1]
        assert data.part[rows[-1]] == 2
        assert data.valid_target[i] == rows[data.part[rows] == 1][-1]
        assert np.array_equal(data.history("test", i), table.item[rows[:-1]])
    assert set(data.known_rows) >= set(data.rows("train"))
    assert not data.train_row[data.rows("test")].any()
    assert not data.train_row[data.rows("valid")].any()
    assert np.concatenate(data.train_items()).tolist() == table.item[data.known_rows].tolist()


def test_movielens_rows(movielens_100k):
    split = UnifiedSplit.build(load_interactions(movielens_100k / "canonical"))
    assert [len(split.rows(name)) for name in ("train", "valid", "test")] == [75_993, 9_857, 8_649]
    rating = split.interactions.rating
    rates = [(rating >= least).mean() for least in (3, 4, 5)]
    assert rates == pytest.approx([0.825, 0.554, 0.212], abs=0.001)


def test_ranking_rows_read_strictly_earlier_seconds_and_recall_the_canonical_past(data):
    table = data.interactions
    rows = data.rows("train")[::7]
    for strict in (True, False):
        found = requests_at(data, rows, CONFIG.history, RULE.hashed, strict=strict)
        for k, row in enumerate(rows):
            own = np.flatnonzero(table.user == table.user[row])
            past = own[table.timestamp[own] < table.timestamp[row]] if strict else own[own < row]
            expected = past[-CONFIG.history :]
            assert found.item[k][found.mask[k]].tolist() == table.item[expected].tolist()
            hours = (table.timestamp[row] - table.timestamp[expected]) / 3600
            assert np.allclose(found.hours[k][found.mask[k]], hours, rtol=1e-5)


def test_batches_hold_the_event_and_an_unseen_item(data):
    batch = first_batch(data)
    assert batch.item.shape == (12, 2)
    assert (batch.item[:, 0] != batch.item[:, 1]).all()
    for k in range(12):
        assert int(batch.item[k, 1]) not in batch.request.item[k].tolist()
    seen = [int(i) for step in range(3) for i in RowBatches(data, RULE, 1, 4, CPU).at(step).rating]
    assert set(seen) == {1, 2, 3, 4, 5}


def test_labels_are_nested():
    assert task_labels(torch.tensor([1, 3, 4, 5])).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_item_facts_are_of_train_rows(data, facts):
    other = data.interactions.rating.copy()
    other[~data.train_row] = 6 - other[~data.train_row]
    again = item_facts(data.edited(rating=other), RULE.hashed)
    assert torch.equal(again.mean, facts.mean)
    assert torch.equal(again.decile, facts.decile)
    count = data.popularity()
    best, least = int(count[1:].argmax()) + 1, int(np.where(count[1:] > 0, count[1:], 999).argmin()) + 1
    assert facts.decile[best, 0] >= 9
    assert facts.decile[least, 0] == 1
    assert (facts.decile[torch.from_numpy(count == 0)] == 0).all()
    rows = data.known_rows[data.interactions.item[data.known_rows] == best]
    assert int(facts.mean[best, 0]) == round(2 * float(data.interactions.rating[rows].mean())) - 1


def test_item_facts_of_a_trained_row_leave_it_out(data, facts):
    table, count = data.interactions, data.popularity()
    counts = np.sort(count[count > 0])
    for row in data.known_rows[::5]:
        item, own = table.item[row], int(table.rating[row])
        others = [r for r in data.known_rows if table.item[r] == item and r != row]
        if not others:
            assert (facts.decile[item, own], facts.mean[item, own]) == (0, 0)
            continue
        assert facts.mean[item, own] == np.rint(2 * table.rating[others].mean()) - 1
        assert facts.decile[item, own] == min(10, 1 + 10 * (counts < len(others)).sum() // len(counts))


def test_the_statistics_token_of_a_trained_row(data, table, facts):
    item, rating = data.interactions.item, np.rint(data.interactions.rating).astype(int)
    moved = (facts.decile[:, 0:1] != facts.decile) & (facts.mean[:, 0:1] != facts.mean)
    row = next(r for r in data.rows("train") if moved[item[r], rating[r]])
    batch, tokens = row_batch(data, RULE, np.array([row]), np.random.default_rng(0)), build(table, facts).ranking.tokens
    found = tokens(batch.request, batch.item, batch.own)[0, :, 2] - tokens.kind[2]
    for candidate, own in enumerate((rating[row], 0)):
        places = (table[batch.item[0, candidate], own] for table in (facts.decile, facts.mean))
        expected = sum(part.weight[place] for part, place in zip((tokens.decile, tokens.mean), places, strict=True))
        torch.testing.assert_close(found[candidate], expected)


def test_a_trained_row_does_not_see_its_label(data, table, facts):
    """Another rating of the row moves the statistics of its item, and no logit of the row."""
    count = data.popularity()
    row = next(r for r in data.rows("train") if count[data.interactions.item[r]] < 6)
    rating = data.interactions.rating.copy()
    rating[row] = 6 - rating[row] if rating[row] != 3 else 5
    edited = data.edited(rating=rating)
    others = item_facts(edited, RULE.hashed)
    item = data.interactions.item[row]
    assert facts.mean[item, 0] != others.mean[item, 0]
    for ranker in ("unir2", "din"):
        found, shown = [], []
        for split, known in ((data, facts), (edited, others)):
            if ranker == "unir2":
                model = build(table, known)
            else:
                torch.manual_seed(0)
                model = SasrecDin(known, DinConfig(16, 2, 1, 16, 16, history=CONFIG.history)).eval()
            batch = row_batch(split, RULE, np.array([row]), np.random.default_rng(0))
            found.append(model.outputs(batch)[1])
            shown.append(torch.equal(model.rank(batch.request, batch.item)[:, 0], found[-1][:, 0]))
        assert torch.equal(*found)
        assert not all(shown)


def test_cross_features_by_hand(data):
    ask, _ = request(data, 1)
    genres = torch.zeros(data.n_items + 1, 3)
    ask = ask._replace(
        item=torch.tensor([[0, 0, 0, 1, 2, 3, 4]]), rating=torch.tensor([[0, 0, 0, 5, 2, 4, 1]]),
        mask=torch.tensor([[False] * 3 + [True] * 4]), hours=torch.tensor([[0, 0, 0, 50.0, 20, 3, 0]]),
    )  # fmt: skip
    genres[[1, 2], 0] = 1
    genres[[2, 3], 1] = 1
    genres[5, 0], genres[6, 2] = 1, 1
    found = cross_scalars(genres, ask, torch.tensor([[5, 6]]))[0]
    assert found[0].tolist() == pytest.approx([np.log(3), np.log(21), 3.5], abs=1e-5)
    assert found[1].tolist() == pytest.approx([0, np.log(1 + 24 * 365), 0], abs=1e-5)


# Semantic ids


def test_every_item_has_an_id_of_its_own_and_the_control_keeps_sizes(data, table):
    assert table.levels == 4
    assert len(table.leaves) == data.n_items
    control = random_table(table, seed=0)
    assert control.sizes == table.sizes
    assert len(control.leaves) == data.n_items
    assert not np.array_equal(control.codes, table.codes)
    assert sorted(map(tuple, control.codes[1:])) == sorted(map(tuple, table.codes[1:]))
    assert control.content_hash != random_table(table, seed=1).content_hash


# Masks


def test_generation_masks_of_the_specification(data, table, facts):
    """P = 3, inputs BOS and one code: rows over the 5 keys [1,1,1,1,0] and [1,1,1,1,1], measured by gradients."""
    model = build(table, facts)
    x = torch.randn(1, 3, CONFIG.width, requires_grad=True)
    ctx = model.generator.read(x, torch.ones(1, 3, dtype=torch.bool))
    codes = torch.tensor([[[1, 0, 0, 0]]])
    tokens = model.generator.target_tokens(codes)[..., :2]
    weight = model.generator.embedding.weight
    states, _ = model.generator.spell(tokens, ctx)
    rows = []
    for query in range(2):
        prefix, code = torch.autograd.grad(states[0, 0, query].sum(), (x, weight), retain_graph=True)
        rows.append(
            [*(int(bool(g.abs().sum() > 0)) for g in prefix[0]), *(int(bool(code[t].any())) for t in tokens[0, 0])]
        )
    assert rows == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_ranking_mask_of_the_specification(data, facts):
    """P = 3, L' = 2: of the prefix only key 3, BOS and both codes, and all R tokens, in every layer."""
    short = resolve_collisions(np.arange(data.n_items)[:, None] % 20, [20], "suffix")
    model = build(short, facts, stop=False)
    ctx = model.generator.read(torch.randn(1, 3, CONFIG.width), torch.ones(1, 3, dtype=torch.bool))
    _, made = model.generator.whole(torch.tensor([[[1, 0]]]), ctx)
    ctx, made = (x._replace(inputs=tuple(y.detach().requires_grad_() for y in x.inputs)) for x in (ctx, made))
    x = torch.randn(1, 1, RANKING_TOKENS, CONFIG.width, requires_grad=True)
    out = model.ranking.states(model.generator, ctx, made, x)
    for query in range(RANKING_TOKENS):
        found = torch.autograd.grad(out[0, 0, query].sum(), (*ctx.inputs, *made.inputs, x), retain_graph=True)
        reached = [(g.flatten(0, -2).abs().sum(1) > 0).int().tolist() for g in found]
        assert reached == [[0, 0, 1]] * CONFIG.layers + [[1, 1, 1]] * CONFIG.layers + [[1] * RANKING_TOKENS]


def test_ranking_masks(data, table, facts):
    """Keys: the last prefix token, the code states, the R ranking tokens."""
    model, (ask, _) = build(table, facts), request(data)
    ctx = model.read(ask)
    _, made = model.generator.whole(model.codes[items(data)], ctx)
    mask = model.ranking.visible(ctx, made, 4, 4)
    assert mask.shape == (12, 4, 1 + 5 + 4)
    assert mask.all()
    assert torch.equal(model.ranking._prefix(ctx, 0)[:, 0], ctx.inputs[0][:, -1])
    for reads, rows in (("prefix", [[1] * 4] * 4), ("causal", np.tril(np.ones((4, 4))).tolist())):
        other = build(table, facts, reads=reads)
        mask = other.ranking.visible(ctx, made, 4, 4)
        assert mask.shape[2] == 4 + CONFIG.history + 5 + 4
        assert mask[0, :, -4:].int().tolist() == rows
        assert torch.equal(mask[0, 0, : 4 + CONFIG.history], ctx.mask[0])
    assert build(table, facts).ranking.visible(ctx, None, 4, 4).shape[2] == 1 + 4


def test_prefix_is_causal(data, table, facts):
    model, (ask, _) = build(table, facts), request(data)
    t = 4 + 3
    before = model.read(ask)
    item = ask.item.clone()
    item[:, 3] = item[:, 3] % data.n_items + 1
    after = model.read(ask._replace(item=item))
    for part in ("keys", "values"):
        for one, other in zip(getattr(before.shared, part), getattr(after.shared, part), strict=True):
            assert torch.equal(one[:, :, :t], other[:, :, :t])
            assert not torch.allclose(one[:, :, t:], other[:, :, t:], atol=1e-4)
    for one, other in zip(before.inputs, after.inputs, strict=True):
        assert torch.equal(one[:, :t], other[:, :t])
        assert not torch.allclose(one[:, t:], other[:, t:], atol=1e-4)


def test_logits_of_a_code_depend_on_earlier_codes_only(data, table, facts):
    model, (ask, _) = build(table, facts), request(data)
    ctx, codes = model.read(ask), model.codes[items(data)]
    base = model.generator.whole(codes, ctx)[0]
    for level in range(4):
        other = codes.clone()
        other[..., level] = (other[..., level] + 1) % table.sizes[level]
        changed = model.generator.whole(other, ctx)[0]
        assert torch.equal(changed[:, :, : level + 1], base[:, :, : level + 1])
        assert not torch.allclose(changed[:, :, level + 1], base[:, :, level + 1], atol=1e-4)


# Isolation


def nonzero(model) -> set[str]:
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


@pytest.mark.parametrize("loud", [False, True])
def test_the_ranking_loss_moves_ranking_parameters_only(data, table, facts, loud):
    model, batch = build(table, facts, loud=loud).train(), first_batch(data)
    _, tasks = model.outputs(batch)
    ranking_loss(tasks, batch.rating).backward()
    found = nonzero(model)
    assert all(name.startswith("ranking.") for name in found)
    quiet = set() if loud else {n for n, _ in model.named_parameters() if "layers" in n and n.endswith(".a")}
    assert {n for n, _ in model.named_parameters() if n.startswith("ranking.")} - found == quiet  # B = 0 at the start
    model.zero_grad()
    generated, _ = model.outputs(batch)
    generated.backward()
    found = nonzero(model)
    assert found
    assert not any(name.startswith("ranking.") for name in found)
    trained = {
        n for n, p in model.named_parameters() if n.startswith(("generator.trunk", "generator.heads", "prefix."))
    }
    assert not trained - found


def test_without_stop_gradient_both_losses_move_the_trunk(data, table, facts):
    batch = first_batch(data)
    for stop, reached in ((True, 0), (False, None)):
        model = build(table, facts, stop=stop)
        shared = [p for p in model.generator.trunk.parameters() if p.ndim == 2]
        found = conflict(model, batch, shared)
        assert found["shared_parameters"] == len(shared)
        if stop:
            assert (found["reached_by_ranking"], found["cosine"]) == (reached, 0.0)
        else:
            assert found["reached_by_ranking"] == len(shared)
            assert 0 < abs(found["cosine"]) < 1


def test_an_untrained_update_leaves_the_detached_shared_projection(data, table, facts):
    model = build(table, facts, loud=False)
    x = torch.randn(5, CONFIG.width)
    for layer, block in zip(model.ranking.layers, model.generator.trunk.blocks, strict=True):
        projected = layer.project(block, x)
        assert torch.equal(projected, block.qkv(x))
        with torch.no_grad():
            layer.query.b.fill_(0.5)
        assert not torch.allclose(layer.project(block, x), block.qkv(x))
    plain = build(table, facts, loud=False, lora=False)
    ask, item = request(data)[0], items(data)
    fresh = build(table, facts, loud=False)
    shared = {n: p for n, p in fresh.state_dict().items() if n in plain.state_dict()}
    plain.load_state_dict(shared)
    torch.testing.assert_close(plain.rank(ask, item), fresh.rank(ask, item))


def test_ranking_tokens_do_not_disturb_generation(data, table, facts):
    """At the start and after training, with and without them in the batch."""
    ask, item = request(data)[0], items(data)
    for trained in (False, True):
        model = build(table, facts, loud=False)
        if trained:
            optimizer = adamw(model, 5e-3)
            for step in range(4):
                optimizer.zero_grad()
                joint_loss(model, RowBatches(data, RULE, 1, 4, CPU).at(step)).backward()
                optimizer.step()
        ctx = model.read(ask)
        both, tasks = model.paths(ask, ctx, item)
        assert tasks is not None
        alone = UniR2(replace(CONFIG, ranking=False), table, facts).eval()
        alone.load_state_dict({n: p for n, p in model.state_dict().items() if not n.startswith("ranking.")})
        torch.testing.assert_close(alone.paths(ask, alone.read(ask), item)[0], both, atol=1e-6, rtol=0)


@pytest.mark.parametrize("tier", [*TIERS, "clipped"])
def test_generator_trains_as_without_ranking(data, table, facts, tmp_path, tier):
    """The stop-gradient is complete: the generator's weights are those of unir2_gen_only, bit for bit.

    A norm over all gradients would undo it.
    """
    found = []
    plan = {"epochs": 1, "steps": 3, "warmup": 0}
    budget = FitBudget(clip=0.1, **plan) if tier == "clipped" else FitBudget.of(CARD.budget(tier), **plan)
    for ranking in (True, False):
        model = build(table, facts, loud=False, ranking=ranking)
        fit_model(
            SimpleNamespace(observe=lambda *_, **__: None, progress=None),
            model,
            {"learning_rate": 5e-3},
            StateFolder(tmp_path / str(ranking)),
            budget=budget,
            batches=RowBatches(data, RULE, 1, 3, CPU).epoch,
            loss=joint_loss,
            validate=lambda _: {"value": 0.0},
            key="value",
        )
        found.append({n: p for n, p in model.state_dict().items() if not n.startswith("ranking.")})
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items()) == (tier != "clipped")


# Ranking branch


def test_ranking_tokens_have_no_order(data, table, facts):
    model, (ask, _), item = build(table, facts), request(data), items(data)
    ctx = model.read(ask)
    _, made = model.generator.whole(model.codes[item], ctx)
    x, order = model.ranking.tokens(ask, item), torch.tensor([2, 0, 3, 1])
    straight = model.ranking.states(model.generator, ctx, made, x)
    permuted = model.ranking.states(model.generator, ctx, made, x[:, :, order])
    torch.testing.assert_close(permuted, straight[:, :, order])
    causal = build(table, facts, reads="causal")
    one, other = (causal.ranking.states(causal.generator, ctx, made, y) for y in (x, x[:, :, order]))
    assert not torch.allclose(other, one[:, :, order], atol=1e-3)


def test_the_trajectory_is_read_unless_hidden(data, table, facts):
    ask, item = request(data)[0], items(data)
    for trajectory in (True, False):
        model = build(table, facts, trajectory=trajectory)
        ctx, codes = model.read(ask), model.codes[item]
        other = codes.clone()
        other[..., 1] = (other[..., 1] + 1) % table.sizes[1]
        x = model.ranking.tokens(ask, item)
        one, two = (model.ranking(model.generator, ctx, model.generator.whole(c, ctx)[1], x) for c in (codes, other))
        assert torch.allclose(one, two, atol=1e-6) != trajectory


def test_ranking_reads_the_compact_state_or_the_whole_prefix(data, table, facts):
    """Its cost does not depend on the history: the states before the last reach it only through reads='prefix'."""
    ask, item = request(data)[0], items(data)
    for reads, reached in (("state", False), ("prefix", True)):
        model = build(table, facts, reads=reads)
        ctx = model.read(ask)
        _, made = model.generator.whole(model.codes[item], ctx)
        x = model.ranking.tokens(ask, item)
        changed = ctx._replace(inputs=tuple(torch.cat([y[:, :-1] + 1, y[:, -1:]], 1) for y in ctx.inputs))
        same = torch.allclose(*(model.ranking(model.generator, c, made, x) for c in (ctx, changed)), atol=1e-6)
        assert same != reached


def test_a_copy_shares_no_layer(data, table, facts):
    model, batch = build(table, facts, copy=True).train(), first_batch(data)
    _, tasks = model.outputs(batch)
    ranking_loss(tasks, batch.rating).backward()
    found = nonzero(model)
    assert any(name.startswith("ranking.layers.0.own.qkv") for name in found)
    assert all(name.startswith("ranking.") for name in found)
    assert model.ranking.layers[0].own.qkv.weight is not model.generator.trunk.blocks[0].qkv.weight


# Losses


def test_losses_by_hand():
    logp = torch.log(torch.tensor([[0.5, 0.25], [0.1, 0.1]]))
    logp = logp.unsqueeze(0)  # one request, two events, two levels
    assert generation_loss(logp, torch.tensor([[3, 2]])).item() == pytest.approx((np.log(2) + np.log(4)) / 2, abs=1e-6)
    assert generation_loss(logp, torch.tensor([[1, 2]])).item() == 0
    tasks, rating = torch.zeros(1, 2, 3), torch.tensor([4])
    assert ranking_loss(tasks, rating).item() == pytest.approx(3 * np.log(2), abs=1e-6)
    tasks[0, 0, 2] = 2.0  # gift, label 0
    expected = 2 * np.log(2) + (np.log1p(np.exp(2)) + 0.3 * np.log(2)) / 1.3
    assert ranking_loss(tasks, rating).item() == pytest.approx(expected, abs=1e-6)
    assert ranking_loss(tasks, rating, (1, 0, 0)).item() == pytest.approx(np.log(2), abs=1e-6)


def test_events_of_the_prefix_are_generated_from_what_stands_before_them(data, table, facts):
    model = build(table, facts)
    batch = RowBatches(data, replace(RULE, inside=3), 1, 4, CPU).at(0)
    assert batch.inside.shape == (12, 3)
    assert batch.request.mask.gather(1, batch.inside).all()
    ctx = model.read(batch.request)
    found = model.inside_logprob(batch.request, ctx, batch.inside)
    codes = model.codes[batch.request.item.gather(1, batch.inside)]
    for b in range(4):
        for k, column in enumerate(batch.inside[b].tolist()):
            x, mask = model.prefix(batch.request)
            cut = model.generator.read(x[b : b + 1, : 4 + column], mask[b : b + 1, : 4 + column])
            states, _ = model.generator.whole(codes[b : b + 1, k : k + 1], cut)
            expected = model.generator.logprob(states, codes[b : b + 1, k : k + 1])
            torch.testing.assert_close(found[b, k], expected[0, 0], atol=1e-5, rtol=1e-5)
    own = model.paths(batch.request, ctx, batch.item)[0][:, :1]
    rating = torch.cat([batch.rating[:, None], batch.request.rating.gather(1, batch.inside)], dim=1)
    torch.testing.assert_close(model.outputs(batch)[0], generation_loss(torch.cat([own, found], 1), rating))


def test_the_joint_loss_has_the_branches_of_the_arm(data, table, facts):
    batch = first_batch(data)
    model = build(table, facts)
    generated, tasks = model.outputs(batch)
    weights = LossWeights(0.5, (1, 0, 2))
    expected = generated + 0.5 * ranking_loss(tasks, batch.rating, (1, 0, 2))
    torch.testing.assert_close(joint_loss(model, batch, weights), expected)
    quiet = [build(table, facts, loud=False, ranking=ranking) for ranking in (True, False)]
    torch.testing.assert_close(joint_loss(quiet[1], batch), quiet[0].outputs(batch)[0])
    alone = build(table, facts, **ALONE)
    assert alone.outputs(batch)[0] is None
    alone.zero_grad()
    joint_loss(alone, batch).backward()
    assert {n for n, p in alone.named_parameters() if p.requires_grad} - nonzero(alone) <= {"prefix.gap.weight"}


# Serving


def test_serving_equals_teacher_forcing(data, table, facts):
    model, (ask, seen) = build(table, facts), request(data)
    served = model.serve(ask, seen, width=10)
    assert (served.item > 0).all()
    ctx = model.read(ask)
    logp, tasks = model.paths(ask, ctx, served.item)
    torch.testing.assert_close(served.logp, logp.sum(2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(served.tasks, tasks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("switches", [{}, {"reads": "prefix"}, {"trajectory": False}, ALONE])
def test_a_candidate_alone_and_among_40(switches):
    data = UnifiedSplit.build(synthetic.interactions(users=6, items=110, ratings=40))
    text = np.random.default_rng(0).normal(size=(data.n_items + 1, 20)).astype(np.float32)
    model = build(build_table(data, text, [4, 3, 3], seed=0, text_width=8), item_facts(data, RULE.hashed), **switches)
    ask, seen = request(data, 2)
    served = model.serve(ask, seen, width=40)
    assert (served.item > 0).all()
    for column in (0, 17, 39):
        alone = model.rank(ask, served.item[:, column : column + 1])
        torch.testing.assert_close(alone[:, 0], served.tasks[:, column], atol=1e-4, rtol=1e-4)


def test_a_wide_beam_is_exhaustive(data, table, facts):
    model, (ask, seen) = build(table, facts), request(data)
    served = model.serve(ask, seen, width=data.n_items)
    logp, tasks = model.catalogue(ask, chunk=17)
    for row in range(3):
        known = set(seen[row].tolist())
        unseen = [i for i in range(1, data.n_items + 1) if i not in known]
        found = [i for i in served.item[row].tolist() if i]
        assert found == sorted(unseen, key=lambda i: -logp[row, i])
        torch.testing.assert_close(served.tasks[row, : len(found)], tasks[row, found], atol=1e-4, rtol=1e-4)
    beams = constrained_beam(
        SIDStep(model.generator, cache=False), model.read(ask), model.trie, 10, alive=model.trie.alive(seen)
    )
    assert torch.equal(beams.leaf[:, :, 0], model.trie.leaf_of[model.serve(ask, seen, width=10).item])


def test_the_prefix_is_encoded_once_and_by_cascades_twice(data, table, facts):
    ask, seen = request(data)
    two = TwoStage(build(table, facts, ranking=False), build(table, facts, **ALONE))
    din = SasrecDin(facts, DinConfig(width=16, heads=2, layers=1, hidden=16, history=CONFIG.history))
    for model, calls in ((build(table, facts), 1), (two, 2), (din, 2)):
        with EncoderCalls(model.eval()) as counted:
            model.serve(ask, seen, width=6)
        assert counted.calls == calls


def test_ranking_pays_for_the_last_code_and_never_for_a_prefix_again(data, table, facts):
    ask, seen = request(data, 1)
    model = build(table, facts)
    found = {name: build(table, facts, **s) for name, s in {"blind": {"trajectory": False}, "alone": ALONE}.items()}
    ctx = model.read(ask)
    _, own = model.generator.spell(model.generator.target_tokens(model.codes[items(data, 1, 10)]), ctx)
    spelled = flops_of(lambda: model.generator.spell(torch.zeros(1, 10, 1, dtype=torch.int64), ctx, own)) / 10
    read = 2 * (5 * 2 * 16 * 16) * CONFIG.layers  # keys and values of BOS and four codes
    updates = 5 * 2 * 2 * (2 * 16 * CONFIG.rank) * CONFIG.layers
    attention = 4 * RANKING_TOKENS * 5 * 16 * CONFIG.layers
    blind = ranking_flops(found["blind"], ask, seen, 10)
    assert ranking_flops(model, ask, seen, 10) - blind == pytest.approx(spelled + read + updates + attention)
    short = requests_at(data, data.cut("test")[:1], 3, RULE.hashed, strict=False)
    longer = ranking_flops(found["alone"], ask, seen, 10) - ranking_flops(found["alone"], short, seen, 10)
    genres = 2 * 4 * synthetic.GENRES  # cross features
    assert longer == 4 * RANKING_TOKENS * 4 * 16 * CONFIG.layers + genres


def test_serving_cost_of_every_kind(data, table, facts):
    models = {
        "unir2": build(table, facts),
        "gen_only": build(table, facts, ranking=False),
        "two": TwoStage(build(table, facts, ranking=False), build(table, facts, **ALONE)),
        "alone": build(table, facts, **ALONE),
    }
    for name, model in models.items():
        cost = serving_cost(Server(model, data, CPU, RULE, width=10, levels=4))
        assert cost["user_encodings_per_request"] == (2 if name == "two" else 1)
        assert cost["recall_ms"] > 0
        assert ("rank_ms" in cost) == ("flops_rank_per_candidate" in cost) == (name != "gen_only")


@pytest.mark.parametrize("tier", TIERS)
def test_the_din_cascade_has_as_many_parameters(facts, tier):
    """With the 1,682 items of MovieLens-100K and the sizes of the card; a suffix level has a few codes."""
    budget = CARD.budget(tier)
    many = 1682
    wide = facts._replace(
        genres=torch.zeros(many + 1, 19), decade=torch.zeros(many + 1, dtype=torch.int64), decades=10,
        decile=torch.zeros(many + 1, 6, dtype=torch.int64), mean=torch.zeros(many + 1, 6, dtype=torch.int64),
        profile=(3, 8, 22, budget["hashed"]),
    )  # fmt: skip
    sizes = budget["codes"]
    codes = np.random.default_rng(0).integers(0, sizes[0], (many, 3))
    table = resolve_collisions(codes, sizes, "suffix", suffix_size=60)
    names = ("width", "heads", "layers", "hidden", "history", "rank")
    goal = count_params(UniR2(UniR2Config(**{name: budget[name] for name in names}), table, wide))
    sizes = DinConfig(budget["width"], 2, 2, inner=budget["hidden"], history=budget["history"])
    made = matched_din(goal, wide, sizes)
    assert abs(count_params(SasrecDin(wide, made)) - goal) <= 0.05 * goal
    assert made.hidden > 8
    with pytest.raises(ConfigError, match="smallest cascade"):
        matched_din(goal // 3, wide, sizes)


def test_cascades_serve_what_their_stages_say(data, table, facts):
    ask, seen = request(data)
    torch.manual_seed(0)
    din = SasrecDin(facts, DinConfig(width=16, heads=2, layers=1, hidden=16, history=CONFIG.history)).eval()
    served = din.serve(ask, seen, width=9)
    logp, tasks = din.catalogue(ask, chunk=13)
    for row in range(3):
        known = set(seen[row].tolist())
        best = sorted((i for i in range(1, data.n_items + 1) if i not in known), key=lambda i: -logp[row, i])[:9]
        assert served.item[row].tolist() == best
        torch.testing.assert_close(served.tasks[row], tasks[row, best], atol=1e-5, rtol=1e-5)
    assert torch.exp(logp).sum(1).tolist() == pytest.approx([1] * 3, abs=1e-5)


def test_unified_score_by_hand():
    served = Served(torch.tensor([[3, 4, 0]]), torch.tensor([[-2.0, -4.0, -torch.inf]]), torch.zeros(1, 3, 3))
    score = unified_score(served, 4, 0.5, (1.0, 0.5, 0.0))
    assert score[0, :2].tolist() == pytest.approx([-0.25 - 1.5 * np.log(2), -0.5 - 1.5 * np.log(2)], abs=1e-6)
    assert score[0, 2] == -torch.inf
    assert unified_score(served, 4, 0.0, (1.0, 0.0, 0.0))[0, 0].item() == pytest.approx(-np.log(2), abs=1e-6)
    assert ordered(served, torch.tensor([[0.1, 0.9, -torch.inf]])).tolist() == [[4, 3, 0]]


def test_score_weights_are_chosen_on_validation_and_never_worse_than_generation_order(data, table, facts):
    server = Server(build(table, facts), data, CPU, RULE, width=15, levels=table.levels)
    weights, ranking, found = server.choose_weights()
    assert found["chosen"] >= max(found["generation_order"], found["ranking_order"])
    assert ranking.alpha == 0
    kept = Server(server.model, data, CPU, RULE, width=15, levels=table.levels, keep=True)
    for order, name in ((weights, "chosen"), (ranking, "ranking_order"), (GENERATION_ORDER, "generation_order")):
        for one in (server, kept):
            assert validation_lists(one.lister(order), data)["ndcg@10"] == pytest.approx(found[name], abs=1e-6)
    alone = Server(build(table, facts, ranking=False), data, CPU, RULE, width=15, levels=table.levels)
    assert alone.choose_weights()[:2] == (GENERATION_ORDER, None)


def test_impression_weighted_uauc_by_hand():
    user, label = np.array([1, 1, 2, 2, 2, 3]), np.array([1, 0, 1, 0, 0, 1])
    score = np.array([0.9, 0.1, 0.2, 0.3, 0.1, 0.5])
    assert impression_uauc(user, label, score) == pytest.approx((2 * 1 + 3 * 0.5) / 5)
    assert impression_uauc(user, label, score) == pytest.approx(0.7)
    assert user_auc(user, label, score).auc.tolist() == [1.0, 0.5]


def test_ranked_rows_are_the_rows_of_the_split(data, table, facts):
    user, rating, logits = ranked_rows(build(table, facts), data, "test", CPU, RULE)
    rows = data.rows("test")
    assert np.array_equal(user, data.interactions.user[rows])
    assert np.array_equal(rating, data.interactions.rating[rows])
    assert logits.shape == (len(rows), 3)


@pytest.fixture
def context(data, table, tmp_path, monkeypatch):
    """Makes the context of an arm with a switch on the tiny tier, over the synthetic data."""
    table.save(tmp_path)
    monkeypatch.setattr(experiment, "load_data", lambda ctx: data)
    monkeypatch.setattr(Context, "artifact", lambda self, name: tmp_path)

    def made(observer=None, beam=12, **switch):
        return Context(
            "unir2", "arm", "tiny", "synthetic", 1, Budget(CARD.budget("tiny") | {"beam": beam}), None, StateFolder(tmp_path / "state"),
            switch=switch, quiet=True, observer=observer,
        )  # fmt: skip

    return made


def test_a_ranker_alone_runs_and_is_chosen_by_ranking(data, context):
    found = experiment.train(context(**ALONE), CPU)
    assert set(found.validation) == {
        f"{kind}_{task}" for kind in ("auc", "uauc") for task in ("click", "longview", "gift")
    }
    assert {"ndcg@10", "auc_gift", "ranking_order_ndcg@10"} <= set(found.metrics)
    assert not any(name.startswith("code_accuracy") for name in found.metrics)
    assert "gradient_conflict" not in found.extra


def test_a_ranker_alone_finds_what_it_likes_best(data, table, facts):
    model, (ask, seen) = build(table, facts, **ALONE), request(data)
    _, tasks = model.catalogue(ask)
    liked = torch.nn.functional.logsigmoid(tasks).sum(2)
    served = model.serve(ask, seen, width=9)
    for row in range(3):
        unseen = sorted(set(range(1, data.n_items + 1)) - set(seen[row].tolist()), key=lambda i: -liked[row, i])
        assert served.item[row].tolist() == unseen[:9]


def test_the_weights_of_the_tasks_reach_the_loss(context):
    reached = {}

    def look(event, values):
        if event == "step":
            towers = values["model"].ranking.towers
            reached[values["step"]] = [bool(tower[0].weight.grad.any()) for tower in towers]

    experiment.train(context(look, task_weights=[0, 0, 1]), CPU)
    assert set(map(tuple, reached.values())) == {(False, False, True)}


def test_random_ids_are_an_arm(table, context):
    seen = {}
    experiment.train(
        context(lambda event, values: seen.update({event: values}), **CARD.arms["unir2_random_sid"]["switch"]), CPU
    )
    used: SIDTable = seen["trained"]["model"].sid
    assert used.sizes == table.sizes
    assert not np.array_equal(used.codes, table.codes)
    with pytest.raises(ConfigError, match="semantic"):
        experiment.Arm(context(semantic="hashed"), CPU)


def test_floors_have_lists_as_long_as_a_beam(data, context):
    beam = 20
    found = experiment.popularity(context(beam=beam))
    count, places = data.popularity(), []
    for i, target in enumerate(data.target("test")):
        known = set(data.history("test", i).tolist())
        order = sorted(set(range(1, data.n_items + 1)) - known, key=lambda item: (-count[item], item))[:beam]
        places.append(1 / (1 + order.index(target)) if target in order else 0)
    assert sum(0 < place < 0.1 for place in places)
    assert found.metrics["mrr"] == pytest.approx(np.mean(places))


def test_unknown_switches_are_refused():
    with pytest.raises(ValueError, match="reads"):
        UniR2Config(reads="half")
    with pytest.raises(ValueError, match="neither"):
        UniR2Config(generation=False, ranking=False)


def test_a_few_rows_are_learned_by_heart(data, table, facts):
    model, batch = build(table, facts, loud=False).train(), first_batch(data)
    optimizer = adamw(model, 1e-2)
    first = joint_loss(model, batch).item()
    for _ in range(80):
        optimizer.zero_grad()
        loss = joint_loss(model, batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * first
