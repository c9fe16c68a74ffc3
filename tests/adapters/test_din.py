"""Mechanism tests of card din, with the numbers of its specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch

from adapters.din.experiment import train_occurrences
from adapters.din.model import DIN, DINConfig, LogisticRegression, MiniBatchAware
from adapters.din.user_split import split_by_user
from auto_research.blocks.activation_unit import AttentionPooling, LocalActivationUnit
from auto_research.blocks.dice import Dice
from auto_research.evaluate.ctr import split_pairs
from auto_research.metrics.ctr import ctr_metrics
from auto_research.results.verdict import relative_improvement
from auto_research.train.optimizer import adamw

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
    assert torch.allclose(logits(din, batch), logits(base, batch), atol=1e-6)


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


# Mini-batch-aware regularisation


def one_table(rows=((0.0,), (2.0,), (3.0,)), counts=(0, 4, 5)):
    table = torch.nn.Parameter(torch.tensor(rows))
    return table, MiniBatchAware({"item": table}, {"item": torch.tensor(counts)}, 0.01)


def test_mini_batch_aware_regularisation_by_hand():
    table, mba = one_table()
    mba.present["item"] = torch.tensor([False, True, False])
    optimizer = torch.optim.Adam([table], lr=0.1)
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


def test_tables_have_no_weight_decay(table):
    groups = adamw(build(table), 1e-3, 0.1).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    model = build(table)
    groups = model.param_groups(0.1)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    assert all(decays[id(w)] == 0 for w in model.tables().values())
    assert decays[id(model.first.weight)] == 0.1


def test_plain_l2_touches_all_rows_but_padding(table):
    model = build(table, plain_l2=0.1)
    model.extra_loss().backward()
    for weight in model.tables().values():
        assert torch.allclose(weight.grad[1:], 0.1 * weight[1:].detach())
        assert weight.grad[0].abs().max() == 0


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
        model.wide.item.weight[batch.item[0]] += 1
    assert torch.allclose(model(batch)[0], out[0] + 1)


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
