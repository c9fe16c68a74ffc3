"""Mechanism tests of card din, with the numbers of its specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch

from adapters.din import experiment
from adapters.din.experiment import case_study, half_epoch_decay, train_occurrences
from adapters.din.model import DIN, DINConfig, LogisticRegression, MiniBatchAware
from adapters.din.user_split import split_by_user
from auto_research.blocks.activation_unit import AttentionPooling, LocalActivationUnit
from auto_research.blocks.dice import Dice
from auto_research.evaluate.ctr import split_pairs
from auto_research.experiment.context import Budget, Context
from auto_research.experiment.contract import Measurement
from auto_research.metrics.ctr import ctr_metrics
from auto_research.results.verdict import relative_improvement
from auto_research.train.ctr import request_loss, training_loss
from auto_research.train.optimizer import AdamW, adamw

SMALL = DINConfig(history=9, field=8, unit_hidden=(12, 6), hidden=(20, 10), dropout=0.0)
SWITCHES = {
    "prelu": {},
    "dice": {"activation": "dice"},
    "sigmoid_unit": {"unit_activation": "sigmoid"},
    "softmax": {"pooling": "softmax"},
    "mean": {"pooling": "mean"},
    "sum": {"pooling": "sum"},
    "ids": {"inputs": "ids"},
    "no_product": {"product": False},
    "wide_deep": {"pooling": "mean", "wide": True},
    "no_user": {"user_fields": ()},
}


@pytest.fixture(scope="module")
def table():
    return synthetic.request_table()


def build(table, seed=0, config=SMALL, occurrences=None, **switches) -> DIN:
    torch.manual_seed(seed)
    return DIN(replace(config, **switches), table.vocab, table.item_genres, occurrences)


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


# Dice


def test_dice_by_hand():
    dice = Dice(1)
    out = dice(torch.tensor([[-1.0], [1.0]]))
    assert out.flatten().tolist() == pytest.approx([-0.4517, 0.7983], abs=1e-3)
    p = 1 / (1 + math.exp(-1))  # biased variance 1; the unbiased one is 2 and would give another value
    assert out[1].item() == pytest.approx(p + (1 - p) * 0.25)
    q = 1 / (1 + math.exp(-1 / math.sqrt(2)))
    assert q + (1 - q) * 0.25 == pytest.approx(0.7523, abs=1e-3)


def test_dice_in_evaluation_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    dice = Dice(3)
    for _ in range(5):
        dice(torch.randn(20, 3) * 2 + 1)
    batch = torch.randn(64, 3)
    dice.eval()
    assert torch.equal(dice(batch)[7:8], dice(batch[7:8]))


def test_dice_with_unit_slope_is_the_identity():
    dice, s = Dice(3), torch.randn(20, 3)
    torch.nn.init.ones_(dice.alpha)
    assert torch.allclose(dice(s), s)


def test_running_values_have_no_start_left_in_them():
    dice = Dice(1)
    s = torch.tensor([[3.0], [5.0]])
    for _ in range(3):
        dice(s)
    mean, variance = dice.running()
    assert mean.item() == pytest.approx(4.0, rel=1e-4)
    assert variance.item() == pytest.approx(1.0, rel=1e-4)
    assert dice.mean_average.item() == pytest.approx(4 * (1 - 0.99**3), rel=1e-4)


def test_fewer_than_two_valid_positions_use_the_running_values():
    dice = Dice(1)
    dice(torch.tensor([[3.0], [5.0]]))
    before = dice.running()
    s = torch.tensor([[10.0], [20.0]])
    out = dice(s, torch.tensor([True, False]))
    assert dice.steps.item() == 1
    dice.eval()
    assert torch.equal(out, dice(s))
    assert all(torch.equal(a, b) for a, b in zip(before, dice.running(), strict=True))


# Local activation unit and pooling


def test_factorised_first_layer_is_the_four_part_product():
    torch.manual_seed(0)
    unit = LocalActivationUnit(6, (5, 4), "prelu")
    events, key = torch.randn(2, 3, 6), torch.randn(4, 6)
    request_of, mask = torch.tensor([0, 0, 1, 1]), torch.ones(2, 3, dtype=torch.bool)
    e, v = events[request_of], key.unsqueeze(1).expand(4, 3, 6)
    s = unit.first(torch.cat([e, v, e - v, e * v], dim=2))
    expected = unit.last(unit.second_activation(unit.second(unit.first_activation(s)))).squeeze(2)
    for scores in (unit(events, mask, key, request_of), unit.plain(events, mask, key, request_of)):
        assert torch.allclose(scores, expected, atol=1e-5)


def user_vector(model, batch):
    model.eval()
    with torch.no_grad():
        r, p = model.prepare(batch), model.encoder.pairs(batch)
        return model.attention(r.events, r.mask, p.key[:, : model.width], batch.request_of)


def doubled(batch):
    parts = {name: torch.cat([getattr(batch, name)] * 2, dim=1) for name in ("hist_item", "hist_rating", "hist_age")}
    return replace(batch, **parts, hist_mask=torch.cat([batch.hist_mask] * 2, dim=1))


@pytest.mark.parametrize(("pooling", "factor"), [("attention", 2.0), ("sum", 2.0), ("softmax", 1.0), ("mean", 1.0)])
def test_doubling_a_history(table, pooling, factor):
    batch = table.batch(table.requests("valid")[:4], history=20)
    model = build(table, activation="dice", pooling=pooling, config=replace(SMALL, history=50))
    model.train()(batch)  # give Dice statistics
    assert torch.allclose(user_vector(model, doubled(batch)), factor * user_vector(model, batch), atol=1e-5)


def test_softmax_weights_sum_to_one(table):
    batch = table.batch(table.requests("train")[:6], history=9)
    assert not batch.hist_mask.all()
    model = build(table, pooling="softmax").eval()
    with torch.no_grad():
        weights = model.attention_weights(batch)
    assert torch.allclose(weights.sum(1), torch.ones(batch.pairs()), atol=1e-6)
    assert (weights[~batch.hist_mask[batch.request_of]] == 0).all()


def test_only_attention_depends_on_the_candidate(table):
    request = int(table.requests("valid")[0])
    genres = table.item_genres
    other = next(i for i in range(2, synthetic.ITEMS) if not np.array_equal(genres[i], genres[1]))
    batch = table.score_batch(request, [1, other], history=9)
    for pooling in ("attention", "softmax"):
        a, b = user_vector(build(table, pooling=pooling), batch)
        assert not torch.allclose(a, b, atol=1e-6)
    a, b = user_vector(build(table, pooling="mean"), batch)
    assert torch.equal(a, b)


def test_constant_weights_turn_din_into_the_baseline(table, monkeypatch):
    batch = synthetic.training_batch(table)
    din, base = build(table), build(table, pooling="mean")
    base.load_state_dict({k: v for k, v in din.state_dict().items() if "attention" not in k})

    def mean_weights(self, events, mask, key, request_of):
        share = mask.float() * math.sqrt(SMALL.history) / mask.sum(1, keepdim=True).clamp(min=1)
        return share[request_of]

    assert not torch.allclose(logits(din, batch), logits(base, batch), atol=1e-4)
    monkeypatch.setattr(LocalActivationUnit, "forward", mean_weights)
    assert torch.allclose(logits(din, batch), logits(base, batch), rtol=0, atol=1e-6)


def test_an_empty_history_gives_a_zero_user_vector(table):
    batch = table.batch(table.requests("train")[:3], history=9)
    batch.hist_mask[:] = False
    for pooling in ("attention", "softmax", "mean", "sum"):
        assert user_vector(build(table, pooling=pooling), batch).abs().max() == 0


def test_the_divisor_is_the_configured_length(table):
    pooling = AttentionPooling(4, longest=25, pooling="sum")
    ones = torch.ones(1, 3, 4)
    out = pooling(ones, torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
    assert out[0, 0].item() == pytest.approx(3 / 5)


# Padding and batching


def padded(batch, by: int = 30):
    parts = {
        name: torch.nn.functional.pad(getattr(batch, name), (by, 0))
        for name in ("hist_item", "hist_rating", "hist_age", "hist_mask")
    }
    return replace(batch, **parts)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_padding_changes_neither_logits_nor_dice_statistics(table, switches):
    batch = synthetic.training_batch(table)
    plain, with_padding = build(table, **switches), build(table, **switches)
    a, b = plain.train()(batch), with_padding.train()(padded(batch))
    assert torch.allclose(a, b, atol=1e-5)
    for (name, x), (_, y) in zip(plain.named_buffers(), with_padding.named_buffers(), strict=True):
        assert torch.allclose(x.float(), y.float(), atol=1e-6), name
    assert torch.allclose(logits(plain, batch), logits(plain, padded(batch)), atol=1e-5)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_chunked_serving_equals_one_batch(table, switches):
    model = build(table, **switches)
    model.train()(synthetic.training_batch(table))
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, synthetic.ITEMS + 1), history=9)
    whole = logits(model, batch)
    with torch.no_grad():
        request = model.prepare(batch)
        for size in (1, 16):
            parts = torch.cat([model.score(request, part) for part in split_pairs(batch, size)])
            assert torch.allclose(parts, whole, atol=1e-5)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_nothing_at_or_after_the_request_is_read(table, switches):
    data, request = table.interactions, int(table.requests("valid")[5])
    later = data.timestamp >= table.request_time[request]
    row = int(table.index.start[request])
    assert later[row]  # the target's own rating is among the edited ones
    item = data.item.copy()
    item[later] = item[later][::-1]
    edited = table.edited(rating=np.where(later, 6 - data.rating, data.rating).astype(np.float32), item=item)
    items = np.arange(1, synthetic.ITEMS + 1)
    before, after = (t.score_batch(request, items, history=9) for t in (table, edited))
    model = build(table, **switches)
    assert torch.equal(logits(model, before), logits(model, after))
    past = np.where(later, data.rating, 6 - data.rating).astype(np.float32)
    assert not torch.equal(
        logits(model, before), logits(model, table.edited(rating=past).score_batch(request, items, history=9))
    )


def test_the_targets_own_rating_is_no_input(table):
    model = build(table).eval()
    batch = table.batch(table.requests("train")[:5], history=9)
    flipped = replace(batch, like=1 - batch.like, love=1 - batch.love, engage=1 - batch.engage, rated=~batch.rated)
    assert torch.equal(logits(model, batch), logits(model, flipped))


def test_input_width_is_336(table):
    assert build(table, config=DINConfig()).inputs == 3 * 48 + 160 + 32 == 336
    assert build(table, config=DINConfig(inputs="ids")).width == 32
    assert build(table, config=DINConfig(field=8)).width == 24
    assert build(table, config=DINConfig(user_fields=())).inputs == 336 - 80


def test_every_parameter_learns(table):
    batch = synthetic.training_batch(table)
    for name, switches in SWITCHES.items():
        model = build(table, **switches).train()
        model(batch).square().sum().backward()
        unread = {"encoder.key_constant", "encoder.rating.weight", "encoder.event_age.weight"}
        allowed = unread if name == "ids" else set()
        still = {n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0}
        assert still == allowed, name


def test_the_product_switch_drops_one_vector(table):
    assert build(table).inputs - build(table, product=False).inputs == 24


def narrowed(model, other, read):
    """`other` with the weights of `model`; its first layer takes the columns `read`, in order."""
    own = other.state_dict()
    weights = {name: value for name, value in model.state_dict().items() if own[name].shape == value.shape}
    other.load_state_dict(weights | {"first.weight": model.first.weight.detach()[:, read]}, strict=True)
    return other


def test_the_product_enters_the_logits(table):
    batch, full = synthetic.training_batch(table), build(table)
    d = full.width
    read = [c for c in range(full.inputs) if not 2 * d <= c < 3 * d]
    without = narrowed(full, build(table, seed=1, product=False), read)
    assert not torch.allclose(logits(full, batch), logits(without, batch), atol=1e-4)
    with torch.no_grad():
        full.first.weight[:, 2 * d : 3 * d] = 0
    assert torch.allclose(logits(full, batch), logits(without, batch), rtol=0, atol=1e-6)


def test_the_product_is_of_user_vector_and_candidate(table):
    batch, model, seen = synthetic.training_batch(table), build(table), []
    model.first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(model, batch)
    user, candidate, product = seen[0][:, : 3 * model.width].split(model.width, dim=1)
    assert torch.allclose(user, user_vector(model, batch))
    assert torch.equal(candidate[:, : SMALL.field], model.encoder.item.weight[batch.item])
    assert torch.equal(product, user * candidate)


def test_ids_only_reads_the_ids_and_genres_of_events_and_candidate(table):
    batch, full = synthetic.training_batch(table), build(table, pooling="mean")
    d, ids = full.width, 2 * SMALL.field
    read = [c for c in range(full.inputs) if c >= 3 * d or c % d < ids]
    narrow = narrowed(full, build(table, seed=1, pooling="mean", inputs="ids"), read)
    assert not torch.allclose(logits(full, batch), logits(narrow, batch), atol=1e-4)
    with torch.no_grad():
        full.first.weight[:, sorted(set(range(full.inputs)) - set(read))] = 0
    assert torch.allclose(logits(full, batch), logits(narrow, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("switch", ["activation", "unit_activation"])
def test_dice_and_prelu_differ_for_the_same_weights(table, switch):
    batch, base = synthetic.training_batch(table), {"activation": "prelu", "unit_activation": "prelu"}
    prelu, dice = build(table, **base), build(table, seed=1, **(base | {switch: "dice"}))
    missing = dice.load_state_dict(prelu.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert {key.split(".")[-1] for key in missing.missing_keys} == {"mean_average", "variance_average", "steps"}
    assert (prelu.train()(batch) - dice.train()(batch)).abs().max() > 1e-4
    assert (logits(prelu, batch) - logits(dice, batch)).abs().max() > 1e-4


# Mini-batch-aware regularisation


def one_table(rows=((0.0,), (2.0,), (3.0,)), counts=(0, 4, 5)):
    table = torch.nn.Parameter(torch.tensor(rows))
    return table, MiniBatchAware({"item": table}, {"item": torch.tensor(counts)}, 0.01)


def test_mini_batch_aware_regularisation_by_hand():
    table, mba = one_table()
    mba.present["item"] = torch.tensor([False, True, False])
    optimizer = AdamW([table], lr=0.1, weight_decay=0.0, fused=True)
    (0 * table.sum()).backward()
    assert table.grad.flatten().tolist() == pytest.approx([0, 0.005, 0])
    assert table.grad[2].item() == 0
    before = table.detach().clone()
    optimizer.step()
    assert torch.equal(table[2], before[2])
    assert not torch.equal(table[1], before[1])


def test_regularisation_reaches_every_id_of_the_batch_and_no_padding(table):
    batch = synthetic.training_batch(table)
    ones = {
        "item": torch.ones(synthetic.ITEMS + 1),
        "user_id": torch.ones(table.vocab["user_id"]),
        "zip": torch.ones(table.vocab["zip"]),
    }
    model = build(table, mba=0.01, occurrences=ones).train()
    plain = build(table).train()
    for m in (model, plain):
        m(batch).sum().backward()
    for name, weight in model.tables().items():
        extra = weight.grad - plain.tables()[name].grad
        ids = {
            "item": set(batch.item.tolist()) | set(batch.hist_item[batch.hist_mask].tolist()),
            "user_id": set(batch.user_id.tolist()),
            "zip": set(batch.zip.tolist()),
        }[name] - {0}
        expected = torch.zeros(len(weight), dtype=torch.bool)
        expected[list(ids)] = True
        assert torch.allclose(extra[expected], 0.01 * weight[expected].detach(), atol=1e-5), name
        assert (extra[~expected] == 0).all(), name


def test_occurrences_count_rated_candidates_and_history_slots(table):

    counts = train_occurrences(table, history=9)
    expected = np.zeros(synthetic.ITEMS + 1)
    users = np.zeros(table.vocab["user_id"])
    for request in table.requests("train"):
        batch = table.batch([request], history=9)
        for item in [*batch.item.tolist(), *batch.hist_item[batch.hist_mask].tolist()]:
            expected[item] += 1
        users[batch.user_id.item()] += batch.pairs()
    assert np.array_equal(counts["item"].numpy(), expected)
    assert np.array_equal(counts["user_id"].numpy(), users)


@pytest.mark.parametrize("kind", ["din", "wide_deep", "logistic_regression"])
def test_the_optimizer_decays_matrices_and_no_table(table, kind):
    if kind == "logistic_regression":
        model = LogisticRegression(table.vocab, table.item_genres)
        matrix = model.wide.dense.weight
    else:
        model = build(table, wide=kind == "wide_deep")
        matrix = model.first.weight
    held = [(id(p), group["weight_decay"]) for group in adamw(model, 1e-3, 0.1).param_groups for p in group["params"]]
    decays = dict(held)
    assert len(held) == len(decays) == len(list(model.parameters()))
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    assert tables
    assert all(decays[id(w)] == 0 for w in tables)
    assert decays[id(matrix)] == 0.1
    assert all(decays[id(p)] == 0 for p in model.parameters() if p.ndim < 2)


def test_plain_l2_touches_all_rows_but_padding(table):
    model = build(table, plain_l2=0.1)
    model.extra_loss().backward()
    for weight in model.tables().values():
        assert torch.allclose(weight.grad[1:], 0.1 * weight[1:].detach())
        assert weight.grad[0].abs().max() == 0


def test_plain_l2_is_part_of_the_training_loss(table):
    batch, model = synthetic.training_batch(table), build(table, plain_l2=0.1).train()
    added = training_loss(model, batch) - request_loss(model(batch), batch)
    assert model.extra_loss().item() > 0.01
    assert added.item() == pytest.approx(model.extra_loss().item(), rel=1e-4)
    assert build(table).extra_loss() == 0


# Stages


@pytest.fixture
def stage(table, monkeypatch):
    """What a stage hands to `train_ctr`, its model builder among it, on the synthetic table."""
    monkeypatch.setattr(experiment, "load_requests", lambda ctx: table)
    given = {}

    def train_ctr(ctx, build, **more):
        given.update(more, build=build)
        return Measurement({})

    monkeypatch.setattr(experiment, "train_ctr", train_ctr)

    def run(train, budget, **switch):
        ctx = Context("din", "arm", "tiny", "synthetic", 0, Budget(budget), None, None, switch=switch, quiet=True)
        train(ctx)
        return given

    return run


SIZES = {"history": 9, "field": 8, "unit_hidden": [12, 6], "hidden": [20, 10], "batch": 16}


def test_a_trial_sets_the_strength_of_the_regularisation(stage):
    build = stage(experiment.train, SIZES, activation="dice", mba=0.01)["build"]
    item = build({"learning_rate": 1e-3}).regulariser.factor["item"]
    assert torch.allclose(build({"mba": 0.1}).regulariser.factor["item"], 10 * item)
    assert build({"mba": 0.0}).regulariser is None
    build = stage(experiment.train, SIZES, plain_l2=1e-4)["build"]
    assert build({"learning_rate": 1e-3}).config.plain_l2 == 1e-4
    assert build({"plain_l2": 1e-3}).config.plain_l2 == 1e-3


def test_the_learning_rate_falls_by_a_tenth_each_half_epoch(stage, table):
    factor = half_epoch_decay(141)
    assert [factor(step, 1128) for step in (0, 70, 140)] == pytest.approx([1.0, 0.9, 0.81])
    steps = math.ceil(len(table.requests("train")) / 16)
    for train in (experiment.train, experiment.experiment.stage("arm", "logistic_regression")):
        schedule = stage(train, SIZES)["schedule"]
        assert schedule(2 * (steps // 2), 1000) == pytest.approx(0.81)


# Case study


def test_case_study_names_the_strongest_films_of_20_users():
    table = synthetic.request_table(users=40)
    model = build(table, config=replace(SMALL, history=50)).eval()
    cases = case_study(model, table, torch.device("cpu"))["attention"]
    assert len({case["user"] for case in cases}) == len(cases) == 20
    titles, data = table.interactions.item_title, table.interactions
    for case in cases:
        seen = {titles[item] for item in data.item[data.user == case["user"]]}
        films, weights = zip(*((film["film"], abs(film["weight"])) for film in case["history"]), strict=True)
        assert len(set(films)) == 5
        assert set(films) <= seen - {case["candidate"]}
        assert list(weights) == sorted(weights, reverse=True)
        assert weights[-1] > 0
    assert case_study(build(table, pooling="mean"), table, torch.device("cpu")) == {}


def test_case_study_names_no_padding(monkeypatch):
    table = synthetic.request_table(users=40)
    model = build(table, config=replace(SMALL, history=50)).eval()
    with monkeypatch.context() as patch:  # the largest weights where the padding is
        patch.setattr(model, "attention_weights", lambda batch: 1 - batch.hist_mask.float())
        cases = case_study(model, table, torch.device("cpu"))["attention"]
    assert cases
    assert all(film["film"] for case in cases for film in case["history"])
    model = build(table, config=replace(SMALL, history=3)).eval()
    assert {len(case["history"]) for case in case_study(model, table, torch.device("cpu"))["attention"]} == {3}


# Metrics and baselines


def test_gauc_by_hand():
    user = np.array([1, 1, 1, 1, 2, 2, 3, 3])
    label = np.array([0, 0, 1, 1, 0, 1, 1, 1])
    score = np.array([0.1, 0.2, 0.7, 0.8, 0.5, 0.5, 0.2, 0.9])
    metrics, _ = ctr_metrics(user, label, score)
    assert metrics["gauc"] == pytest.approx((4 * 1 + 2 * 0.5) / 6) == pytest.approx(0.8333, abs=1e-4)


def test_logistic_regression_starts_from_dense_fields_only(table):
    torch.manual_seed(0)
    model = LogisticRegression(table.vocab, table.item_genres)
    batch = synthetic.training_batch(table)
    out = model(batch)
    assert out.shape == (batch.pairs(), 3)
    with torch.no_grad():
        model.wide.item.weight[batch.item[0]] += 0.1
    assert torch.allclose(model(batch)[0], out[0] + 1, atol=1e-5)
    dense, bound = model.wide.dense, 1 / math.sqrt(model.wide.dense.in_features)
    largest = 10 * dense.weight.abs().max().item()  # the coefficients start as those of nn.Linear
    assert 0.8 * bound < largest <= bound
    assert 10 * dense.bias.abs().max().item() <= bound


@pytest.mark.parametrize("kind", ["wide_deep", "logistic_regression"])
def test_a_step_moves_a_wide_coefficient_by_ten_learning_rates(table, kind):
    batch = synthetic.training_batch(table)
    if kind == "wide_deep":
        model = build(table, pooling="mean", wide=True)
    else:
        model = LogisticRegression(table.vocab, table.item_genres)
    optimizer = adamw(model, 1e-3, 0.1)
    training_loss(model.train(), batch).backward()
    optimizer.step()
    with_bias = logits(model, batch)[0]
    with torch.no_grad():
        model.wide.item.weight[batch.item[0]] = 0  # where it started
    moved = with_bias - logits(model, batch)[0]
    assert moved.abs().tolist() == pytest.approx([1e-2] * 3, rel=1e-3)


# Split by user


def test_split_by_user_keeps_whole_users_and_their_ratings_out_of_the_train_rows(table):
    split = split_by_user(table)
    users = {name: set(split.request_user[split.requests(name)].tolist()) for name in ("train", "valid", "test")}
    assert [len(users[name]) for name in ("train", "valid", "test")] == [10, 1, 5]  # of 16
    assert not users["train"] & users["test"]
    assert not users["valid"] & (users["train"] | users["test"])
    held_out = users["valid"] | users["test"]
    rows = split.train_rows()
    assert not held_out & set(split.interactions.user[rows].tolist())
    assert sum(len(split.requests(n)) for n in users) == sum(len(table.requests(n)) for n in users)


def test_without_user_fields_the_user_is_not_read(table):
    model = build(table, user_fields=(), wide=True).eval()
    batch = table.batch(table.requests("valid")[:4], history=9)
    other = replace(batch, user_id=batch.user_id * 0, age=batch.age * 0, gender=batch.gender * 0, zip=batch.zip * 0)
    assert torch.equal(logits(model, batch), logits(model, other))
    assert not {"user_id", "zip"} & set(model.tables())


def test_relative_improvement_by_hand():
    def records(*aucs):
        return {seed: {"measurement": {"metrics": {"auc": auc}}} for seed, auc in enumerate(aucs)}

    found = relative_improvement(records(0.7348, 0.9), records(0.73))  # one shared seed
    assert found.delta == pytest.approx((0.2348 / 0.23 - 1) * 100) == pytest.approx(2.087, abs=1e-3)
    assert relative_improvement(records(0.7), records(0.5)) is None
    assert relative_improvement({}, records(0.7)) is None
