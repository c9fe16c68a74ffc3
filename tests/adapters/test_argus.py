"""Mechanism tests of card argus, with the numbers of its specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch
import torch.nn.functional as F

from adapters.argus import experiment
from adapters.argus.evaluation import (
    last_places,
    mean_by_user,
    model_scorer,
    normalised_entropy,
    pair_accuracy,
    tower_scorer,
)
from adapters.argus.events import DAY, EventSplit, part_windows, target_windows, windows
from adapters.argus.experiment import Trainer, fine_tune, recent_counts, serving, tower_optimizer, train, user_vectors
from adapters.argus.model import Argus, ArgusConfig
from adapters.argus.training import BatchRule, EpochWindows, group_by_area, proposal, with_negatives, with_pairs
from auto_research.blocks.pairwise_loss import logistic_pairs
from auto_research.blocks.sampled_softmax import sampled_softmax
from auto_research.data.request_index import SPLITS
from auto_research.experiment.context import Budget, Context
from auto_research.train.state import StateFolder

CONFIG = ArgusConfig(width=16, layers=2, heads=2, field=8, dropout=0.0, context=40)
RULE = BatchRule(context=24, batch=6, in_batch=20, uniform=20)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data():
    return EventSplit.build(synthetic.interactions(users=14, ratings=50))


def build(data, seed=0, **switches) -> Argus:
    torch.manual_seed(seed)
    table = data.interactions
    model = Argus(
        replace(CONFIG, **switches),
        torch.tensor(table.item_genres),
        torch.tensor(table.item_decade),
        table.vocab["decade"],
    )
    for name, parameter in model.named_parameters():  # large enough that every part is seen
        if parameter.ndim == 2 and "mlp" not in name and "trunk" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def history(data, user=0, events=20, **options):
    """One window of a user's first events, all of them with a loss."""
    first = data.starts[data.everyone[[user]]]
    everywhere = np.ones(len(data.interactions), dtype=bool)
    return windows(data, first, first + events, losses=everywhere, **options)


def outputs(model, batch):
    """Item queries [L, D] and feedback logits [L, 7] of one window."""
    with torch.no_grad():
        done = model.encode(batch)
        said = model.feedback(done, batch.at, batch.item.flatten()[batch.at])
        return model.queries(done, batch.at), torch.cat([said.rating, said.like[:, None], said.love[:, None]], 1), done


# Events and split


def test_split_is_by_the_share_of_earlier_events(data):
    table = data.interactions
    for user in data.everyone[:5]:
        rows = np.flatnonzero(table.user == user)
        earlier = np.array([(table.timestamp[rows] < t).sum() for t in table.timestamp[rows]])
        expected = np.where(earlier < 5, -1, (earlier / len(rows) >= 0.8) + 0 + (earlier / len(rows) >= 0.9))
        assert data.part[rows].tolist() == expected.tolist()
    assert not data.part[data.rows("train")].any()


def test_the_state_is_that_of_a_strictly_earlier_second(data):
    table = data.interactions
    for row in range(120):
        same = np.flatnonzero((table.user == table.user[row]) & (table.timestamp < table.timestamp[row]))
        assert data.past[row] == (same.max() if len(same) else -1)


def test_targets_are_the_first_liked_events(data):
    table = data.interactions
    for split in ("valid", "test"):
        for user, target in zip(data.users, data.target(split), strict=True):
            rows = np.flatnonzero((table.user == user) & (data.part == SPLITS.index(split)) & (table.rating >= 4))
            assert target == (rows[0] if len(rows) else -1)


def test_movielens_has_the_pairs_of_the_specification(movielens_100k):
    from auto_research.data.interactions import load_interactions

    split = EventSplit.build(load_interactions(movielens_100k / "canonical"))
    users, found = split.everyone, []
    for start in range(0, len(users), 100):
        chosen = users[start : start + 100]
        batch = part_windows(split, "test", chosen, 256)
        pairs = with_pairs(batch, split, split.starts[chosen + 1], None, only_like=True)
        found.append(chosen[(pairs.better // batch.shape[1]).numpy()])
    found = np.concatenate(found)
    assert (len(found), len(np.unique(found))) == (22_018, 577)


def test_target_windows_hold_only_the_strict_past_and_a_blank_target(data):
    table = data.interactions
    positions = np.arange(len(data))
    for split in ("valid", "test"):
        batch = target_windows(data, split, positions, 12)
        assert batch.item.shape[1] <= 12
        for i, position in enumerate(positions):
            target = data.target(split)[position]
            if target < 0:
                continue
            before = np.flatnonzero((table.user == data.users[position]) & (table.timestamp < table.timestamp[target]))[
                -11:
            ]
            assert batch.item[i][batch.mask[i]].tolist() == [*table.item[before], 0]
            assert batch.rating[i, -1] == 0
            assert batch.hour[i, -1] == table.timestamp[target] // 3600 % 24


def test_events_of_one_second_share_context(data):
    table = data.interactions
    for values in data.context.values():
        pairs = np.flatnonzero((table.user[1:] == table.user[:-1]) & (np.diff(table.timestamp) == 0))
        assert len(pairs) > 50
        assert np.array_equal(values[pairs], values[pairs + 1])


# Conditioning, ties, triplets


@pytest.mark.parametrize("inputs", ["merged", "triplet"])
def test_conditioning(data, inputs):
    """Feedback of t reaches neither prediction of t; its item reaches the feedback only; its context reaches both."""
    model, batch = build(data, inputs=inputs), history(data)
    query, said, done = outputs(model, batch)
    ends = batch.state[0].unique()[1:] - 1
    t = next(int(t) for t in ends if t > 4 and batch.second[0, t - 1] == batch.second[0, t])
    later = batch.second[0] > batch.second[0, t]
    assert later.any()
    reader = torch.nonzero(batch.state[0] == t + 1).flatten()
    assert len(reader)  # predicted from the state right after t
    edits = {
        "rating": (batch.rating[0, t] % 5 + 1, False, False),
        "item": (batch.item[0, t] % data.n_items + 1, False, True),
        "hour": ((batch.hour[0, t] + 5) % 24, True, True),
        "weekday": ((batch.weekday[0, t] + 3) % 7, True, True),
        "gap": ((batch.gap[0, t] + 4) % 32, True, True),
    }
    for name, (value, moves_query, moves_feedback) in edits.items():
        changed = getattr(batch, name).clone()
        changed[0, t] = value
        q, s, d = outputs(model, replace(batch, **{name: changed}))
        assert torch.equal(q[t], query[t]) != moves_query
        assert torch.equal(s[t], said[t]) != moves_feedback
        if inputs == "merged":
            assert torch.equal(d.states[0, : t + 1], done.states[0, : t + 1])  # state 0 is the beginning
        assert not torch.allclose(d.states[0, t + 1], done.states[0, t + 1], atol=1e-5)
        assert not torch.allclose(d.states[0, t + 2 :], done.states[0, t + 2 :], atol=1e-5)
        assert not torch.allclose(q[reader], query[reader], atol=1e-5)
        touched = (q != query).any(1) | (s != said).any(1)
        touched[t] = False
        assert not (touched & ~later).any()
        assert (touched & later).any()


@pytest.mark.parametrize("inputs", ["merged", "triplet", "items"])
@pytest.mark.parametrize("previous", [False, True])
def test_shuffling_inside_a_second(data, inputs, previous):
    """It changes no query of that second; with p(t) = t - 1 it does."""
    if inputs == "triplet" and previous:
        pytest.skip("triplets have no reading by t - 1")
    model = build(data, inputs=inputs, fp=inputs != "items")
    table = data.interactions
    moved = False
    for user in range(4):
        batch = history(data, user, previous=previous)
        first = int(data.starts[data.everyone[user]])
        for second in batch.second[0].unique():
            inside = torch.nonzero(batch.second[0] == second).flatten()
            if len(inside) < 2:
                continue
            order = torch.arange(batch.shape[1])
            order[inside] = inside.flip(0)
            shuffled = replace(batch, item=batch.item[:, order], rating=batch.rating[:, order])
            assert table.timestamp[first + int(inside[0])] == table.timestamp[first + int(inside[-1])]
            with torch.no_grad():
                one, two = (model.queries(model.encode(b), b.at)[inside] for b in (batch, shuffled))
            moved |= not torch.equal(one, two)
    assert moved == previous


def test_triplets_predict_items_at_context_tokens_and_feedback_at_item_tokens(data):
    """Exactly one of each per event, with the weights of a merged model."""
    merged = build(data)
    model = build(data, inputs="triplet")
    missing = model.load_state_dict(merged.state_dict(), strict=False)
    assert missing.missing_keys == ["kind"]
    batch = history(data)
    seen = {}
    model.trunk.register_forward_hook(lambda module, given, hidden: seen.update(hidden=hidden))
    done = model.encode(batch)
    events = batch.shape[1]
    hidden = seen["hidden"][0]
    assert len(hidden) == 1 + 3 * events
    assert torch.equal(done.for_item[0], hidden[1::3])
    assert torch.equal(done.for_feedback[0], hidden[2::3])
    item = batch.item.flatten()[batch.at]
    for logits, kind in ((model.queries(done, batch.at), 0), (model.feedback(done, batch.at, item).rating, 1)):
        assert len(logits) == events
        (gradient,) = torch.autograd.grad(logits.sum(), seen["hidden"], retain_graph=True)
        read = torch.nonzero(gradient[0].abs().sum(1)).flatten()
        assert read.tolist() == list(range(1 + kind, 1 + 3 * events, 3))


def test_padding_changes_nothing(data):
    model = build(data)
    first = data.starts[data.everyone[[0, 1]]]
    everywhere = np.ones(len(data.interactions), dtype=bool)
    both = windows(data, first, first + np.array([8, 20]), losses=everywhere)
    alone = windows(data, first[:1], first[:1] + 8, losses=everywhere)
    with torch.no_grad():
        together = model.queries(model.encode(both), both.at)[:8]
        assert torch.allclose(together, model.queries(model.encode(alone), alone.at), atol=1e-5)
    assert together.isfinite().all()


def test_items_alone_know_neither_context_nor_feedback(data):
    batch = history(data)
    other = replace(batch, rating=batch.rating % 5 + 1, hour=(batch.hour + 5) % 24)
    for inputs, same in (("items", True), ("merged", False)):
        model = build(data, inputs=inputs, fp=inputs != "items")
        with torch.no_grad():
            one, two = (model.queries(model.encode(b), b.at) for b in (batch, other))
        assert torch.equal(one, two) == same
    with pytest.raises(ValueError, match="no loss"):
        ArgusConfig(nip=False, fp=False)


def test_the_mean_encoder_averages_the_past(data):
    model, batch = build(data, encoder="mean"), history(data, events=6)
    with torch.no_grad():
        done = model.encode(batch)
        tokens = done.context + done.items[batch.item] + done.feedback[batch.rating] + model.position[-6:]
        x = torch.cat([model.begin.expand(1, 1, -1), tokens], 1)
        for t in range(7):
            assert torch.allclose(done.states[0, t], model.norm(x[0, : t + 1].mean(0)), atol=1e-5)


# Next item


def test_log_q_by_hand():
    q = torch.log(torch.tensor([0.5, 0.25]))
    corrected = -q
    assert corrected.tolist() == pytest.approx([0.6931, 1.3863], abs=1e-4)
    loss = sampled_softmax(torch.zeros(1), torch.zeros(1, 1), log_q_positive=q[:1], log_q_negative=q[1:])
    assert loss.item() == pytest.approx(math.log(3), abs=1e-5)
    assert math.log(3) == pytest.approx(1.0986, abs=1e-4)


def test_sampling_every_item_once_is_the_full_softmax(data):
    model, batch = build(data), history(data)
    n = data.n_items
    everything = replace(batch, negative=torch.arange(1, n + 1), owner=torch.full((n,), -1))
    log_q = torch.full((n + 1,), -math.log(n))
    done = model.encode(batch)
    sampled = model.nip_loss(done, everything, log_q)
    full = model.nip_loss(done, batch, log_q, full=True)
    item = batch.item.flatten()[batch.at]
    logits = model.catalogue(done, batch.at)[:, 1:]
    assert sampled.item() == pytest.approx(full.item(), abs=1e-5)
    assert F.cross_entropy(logits, item - 1).item() == pytest.approx(full.item(), abs=1e-5)


def test_full_softmax_is_the_cross_entropy_over_the_catalogue(data):
    model, batch = build(data, softmax="full", fp=False), history(data)
    logits = model.catalogue(model.encode(batch), batch.at)[:, 1:]
    expected = F.cross_entropy(logits, batch.item.flatten()[batch.at] - 1)
    assert model.loss(batch, torch.zeros(0)).item() == pytest.approx(expected.item(), abs=1e-5)


def test_losses_are_the_sums_of_the_specification(data):
    model = build(data, tower=True)
    batch = EpochWindows(data, replace(RULE, pairs=8), 0, 0, CPU)[0]
    log_q = proposal(data, RULE, 0)
    with torch.no_grad():
        done = model.encode(batch)
        nip, fp = model.nip_loss(done, batch, log_q).item(), model.fp_loss(done, batch).item()
        pairs = logistic_pairs(*model.pair_scores(done, batch)).item()
        assert min(nip, fp, pairs) > 0.1
        assert model.loss(batch, log_q).item() == pytest.approx(nip + fp, abs=1e-5)
        assert model.tuning_loss(batch, log_q).item() == pytest.approx(pairs + 0.1 * nip, abs=1e-5)
    for switch, expected in (({"fp": False}, nip), ({"nip": False}, fp)):
        one = build(data, **switch)
        one.load_state_dict({k: v for k, v in model.state_dict().items() if k in one.state_dict()})
        assert one.loss(batch, log_q).item() == pytest.approx(expected, abs=1e-5)


def test_without_correction_log_q_has_no_say(data):
    batch = with_negatives(history(data), RULE, data.n_items, np.random.default_rng(0))
    log_q = torch.linspace(-6, -2, data.n_items + 1)
    for logq in (True, False):
        model = build(data, logq=logq)
        done = model.encode(batch)
        same = model.nip_loss(done, batch, log_q) == model.nip_loss(done, batch, log_q.flip(0))
        assert bool(same) != logq


def test_proposal_is_what_batches_draw(data):
    rule = BatchRule(context=16, batch=4, in_batch=3000, uniform=1000)
    q = proposal(data, rule, 0)[1:].exp().numpy()
    assert q.sum() == pytest.approx(1, abs=1e-5)
    assert q.min() >= 0.25 / data.n_items - 1e-8
    drawn = np.zeros(data.n_items + 1)
    for epoch in range(40):
        batches = EpochWindows(data, rule, 0, epoch, CPU)
        for index in range(len(batches)):
            drawn += np.bincount(batches[index].negative.numpy(), minlength=data.n_items + 1)
    assert abs(drawn[1:] / drawn.sum() - q).sum() / 2 < 0.03


def test_steps_have_one_area(data):
    """Neither a step of short histories nor one of long ones weighs its events much more than another."""
    rng = np.random.default_rng(0)
    length = rng.integers(5, 65, 400)
    order = np.argsort(length, kind="stable")
    groups = group_by_area(order, length, 512)
    assert np.array_equal(np.concatenate(groups), order)
    area = [len(group) * length[group].max() for group in groups]
    assert max(area) <= 512
    assert min(area[:-1]) > 512 - 2 * 64
    assert [len(group) for group in group_by_area(np.arange(2), np.array([9, 9]), 4)] == [1, 1]
    rule = replace(RULE, batch=8)
    batches = EpochWindows(data, rule, 0, 0, CPU)
    assert all(math.prod(batches[i].shape) <= rule.batch * rule.context // 2 for i in range(len(batches)))
    assert all(len(batches.losses_on(i)) == len(batches[i].at) > 0 for i in range(len(batches)))


def test_negatives_are_not_of_the_same_user_and_not_the_positive(data, monkeypatch):
    batch = EpochWindows(data, RULE, 0, 0, CPU)[0]
    kept = {}

    def spy(positive, negative, *, usable, **_):
        kept["usable"] = usable
        return positive * 0

    monkeypatch.setattr("adapters.argus.model.sampled_softmax", spy)
    model = build(data)
    model.nip_loss(model.encode(batch), batch, torch.zeros(data.n_items + 1))
    window = batch.at // batch.shape[1]
    item = batch.item.flatten()[batch.at]
    expected = (batch.owner[None] != window[:, None]) & (batch.negative[None] != item[:, None])
    assert torch.equal(kept["usable"], expected)
    assert 0 < (~expected).float().mean() < 0.5
    assert (batch.owner >= 0).sum() == RULE.in_batch
    drawn = batch.negative[batch.owner >= 0], batch.owner[batch.owner >= 0]
    assert all(int(i) in batch.item[int(o)].tolist() for i, o in zip(*drawn, strict=True))


def test_training_reads_train_events_only(data):
    table = data.interactions
    seen = set()
    for epoch in range(16):
        batches = EpochWindows(data, RULE, 1, epoch, CPU)
        for index in range(len(batches)):
            batch = batches[index]
            stop = batches.stop[batches.groups[index]]
            length = batch.shape[1]
            rows = stop[(batch.at // length).numpy()] - length + (batch.at % length).numpy()
            assert (data.part[rows] == SPLITS.index("train")).all()
            assert np.array_equal(table.item[rows], batch.item.flatten()[batch.at].numpy())
            assert data.index.train_row[
                np.concatenate(
                    [np.arange(a, b) for a, b in zip(batches.start[batches.groups[index]], stop, strict=True)]
                )
            ].all()
            seen |= set(rows.tolist())
    assert len(seen) == len(data.rows("train"))  # windows move, so that every event is learned from


# Feedback


def test_feedback_loss_by_hand(data, monkeypatch):
    model, batch = build(data), history(data, events=1)
    batch.rating[0, 0] = 4
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 0, 0]])
    monkeypatch.setattr(model.judge, "forward", lambda x: logits)
    done = model.encode(batch)
    assert model.fp_loss(done, batch).item() == pytest.approx(math.log(5) + 2 * math.log(2), abs=1e-5)
    logits = torch.tensor([[0.0, 0, 0, 9, 0, 9, -9]])
    assert model.fp_loss(done, batch).item() < 0.01  # rating 4 is liked and not loved


def test_like_of_all_items_equals_one_item_at_a_time(data):
    model, batch = build(data, nip=False), history(data)
    with torch.no_grad():
        done = model.encode(batch)
        everything = model.catalogue(done, batch.at)
        for item in (1, 7, data.n_items):
            one = model.feedback(done, batch.at, torch.full_like(batch.at, item)).like
            assert torch.allclose(everything[:, item], one, atol=1e-5)


def test_reversed_items_are_conditioned_on_feedback(data):
    model, batch = build(data, reverse=True), history(data)
    with torch.no_grad():
        done = model.encode(batch)
        low, high = (model.queries(done, batch.at, torch.full_like(batch.at, r)) for r in (1, 5))
        assert not torch.allclose(low, high, atol=1e-3)
        share = torch.softmax(model.feedback(done, batch.at, batch.item.flatten()).rating, 1)
        known = model._known(done.for_item, done, batch.at)
        expected = model.query(torch.cat([known, share @ done.feedback[1:]], 1))
        assert torch.allclose(model.queries(done, batch.at), expected, atol=1e-5)
        other = model.feedback(done, batch.at, batch.item.flatten() % data.n_items + 1).like
        assert torch.equal(model.feedback(done, batch.at, batch.item.flatten()).like, other)  # feedback knows no item


def test_reversed_loss_reads_no_true_feedback_when_it_is_measured(data):
    model, batch = build(data, reverse=True), history(data)
    t = int(torch.nonzero(batch.second[0] < batch.second[0, -1]).flatten()[-1])
    batch = replace(batch, at=torch.tensor([t]))
    rating = batch.rating.clone()
    rating[0, t] = rating[0, t] % 5 + 1
    for training in (False, True):
        model.train(training)  # without dropout
        one, two = (
            model.nip_loss(model.encode(b), b, torch.zeros(0), full=True)
            for b in (batch, replace(batch, rating=rating))
        )
        assert torch.equal(one, two) != training


def test_normalised_entropy_of_a_constant_guess_is_one():
    label = np.array([1, 1, 1, 0])
    assert normalised_entropy(label, np.full(4, 0.75)) == pytest.approx(1)
    assert normalised_entropy(label, np.array([0.9, 0.9, 0.9, 0.1])) < 0.3


# Pairs and towers


def test_pairwise_loss_by_hand():
    assert logistic_pairs(torch.tensor([2.0]), torch.tensor([1.0])).item() == pytest.approx(0.3133, abs=1e-4)


def test_pairs_stay_inside_users_and_days_and_differ(data):
    table = data.interactions
    rows_of = {}
    batches = EpochWindows(data, replace(RULE, pairs=8), 0, 0, CPU)
    for index in range(len(batches)):
        batch, length = batches[index], batches[index].shape[1]
        stop = batches.stop[batches.groups[index]]
        better, worse, earlier = (
            stop[(at // length).numpy()] - length + (at % length).numpy()
            for at in (batch.better, batch.worse, batch.earlier)
        )
        assert (table.user[better] == table.user[worse]).all()
        assert (abs(table.timestamp[better] - table.timestamp[worse]) < DAY).all()
        like = table.rating >= 4
        assert (
            (like[better] & ~like[worse])
            | ((like[better] == like[worse]) & (table.rating[better] > table.rating[worse]))
        ).all()
        assert np.array_equal(earlier, np.minimum(better, worse))
        assert np.bincount(batch.better // length).max() <= 8
        rows_of[index] = len(better)
    assert sum(rows_of.values()) > 30


def test_equal_labels_yield_no_pair(data):
    batch = history(data)
    stop = data.starts[data.everyone[[0]]] + 20
    same = replace(batch, rating=torch.full_like(batch.rating, 4))
    assert len(with_pairs(same, data, stop, None).better) == 0
    by_rating = replace(batch, rating=torch.where(torch.arange(20)[None] % 2 == 0, 4, 5))
    assert len(with_pairs(by_rating, data, stop, None).better) > 0
    assert len(with_pairs(by_rating, data, stop, None, only_like=True).better) == 0


def test_served_dot_products_are_the_training_scores(data):
    model = build(data, tower=True)
    batches = EpochWindows(data, replace(RULE, pairs=8), 0, 0, CPU)
    batch = batches[0]
    with torch.no_grad():
        done = model.encode(batch)
        better, worse = model.pair_scores(done, batch)
        matrix, users = model.object_vectors(done), model.user_vectors(done, batch, batch.earlier)
        item = batch.item.flatten()
        for score, at in ((better, batch.better), (worse, batch.worse)):
            assert torch.allclose((users @ matrix.t()).gather(1, item[at][:, None])[:, 0], score, atol=1e-5)
        g = model.object_tower(done.items)[5] @ model.user_tower(done.states[0, 0]) / math.sqrt(CONFIG.width)
        assert (matrix[5] @ model.user_tower(done.states[0, 0])).item() == pytest.approx(g.item(), abs=1e-5)


@pytest.mark.parametrize("delay", ["request", "day"])
def test_the_user_vector_ignores_events_after_the_cut(data, delay):
    """delay request: what it reads ends before the second before the event's own; day: before the event's day."""
    model, batch = build(data, tower=True), history(data, delay=delay)
    table = data.interactions
    first = int(data.starts[data.everyone[0]])
    time = table.timestamp[first : first + 20]

    def visible(t):
        return time < time[time < time[t]].max() if delay == "request" else time // DAY < time[t] // DAY

    t = max(t for t in range(5, 20) if not visible(t)[:t].all())
    hidden, seen = torch.from_numpy(~visible(t)), torch.from_numpy(visible(t))
    assert hidden[:t].any()
    assert seen.any()

    def vector(changed):
        item = torch.where(changed, batch.item % data.n_items + 1, batch.item)
        edited = replace(batch, item=item)
        with torch.no_grad():
            return model.user_vectors(model.encode(edited), edited, torch.tensor([t]))

    nothing = torch.zeros(20, dtype=torch.bool)
    assert torch.equal(vector(nothing), vector(hidden[None]))
    assert not torch.allclose(vector(nothing), vector(seen[None]), atol=1e-5)


def test_fine_tuning_rates(data):
    model = build(data, tower=True)
    optimizer = tower_optimizer(model, {"learning_rate": 1e-2, "weight_decay": 0.1}, 0.1)
    by_rate = {group["lr"]: 0 for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        by_rate[group["lr"]] += sum(p.numel() for p in group["params"])
    towers = sum(p.numel() for m in (model.user_tower, model.object_tower) for p in m.parameters())
    assert by_rate == {1e-2: towers, 1e-2 * 0.1: sum(p.numel() for p in model.parameters()) - towers}
    tower_optimizer(model, {"learning_rate": 1e-2}, 0.0)
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {"user_tower", "object_tower"}


# Stages

TRIAL = {"learning_rate": 1e-3, "weight_decay": 1e-4}
BUDGET = (
    {"context": 24, "batch": 6, "in_batch": 20, "uniform": 20}
    | {"width": 16, "field": 8, "layers": 1, "heads": 2, "dropout": 0.3}
    | {"epochs": 2, "patience": None, "warmup": 2, "trials": [TRIAL]}
    | {"tune_epochs": 1, "scaling": [[16, 1]], "scaling_epochs": 1}
)


@pytest.fixture
def stage(data, tmp_path, monkeypatch):
    """Makes the context of a stage on the synthetic events."""
    monkeypatch.setattr(experiment, "load_split", lambda ctx, build: data)

    def make(name, switch=None, **more):
        state = StateFolder(tmp_path / name)
        shared = {"seed": 3, "budget": Budget(BUDGET), "layout": None, "state": state, "quiet": True}
        return Context("argus", name, "tiny", data.interactions.dataset, switch=switch, **(shared | more))

    return make


def test_fine_tuning_starts_from_the_pre_training_of_argus(stage):
    last = {}

    def keep(name):
        def observe(event, values):
            if event == "step" and not values["model"].config.tower:
                last[name] = {k: v.detach().clone() for k, v in values["model"].state_dict().items()}

        return observe

    argus = train(stage("argus", observer=keep("argus")), CPU)
    tuned = fine_tune(stage("argus_ft", {"scratch": False}, observer=keep("argus_ft")), CPU)
    assert last["argus"].keys() == last["argus_ft"].keys()
    assert all(torch.equal(value, last["argus_ft"][name]) for name, value in last["argus"].items())
    assert tuned.cost["pretrain_steps"] == argus.cost["steps"]
    scratch = fine_tune(stage("ft_scratch", {"scratch": True}), CPU)
    assert scratch.cost["steps"] == pytest.approx(tuned.cost["steps"], abs=2)  # epochs differ by a batch
    assert tuned.cost["steps"] > argus.cost["steps"]
    assert tuned.cost["seconds"] > tuned.cost["pretrain_seconds"] > 0


def test_without_pre_training_the_towers_have_the_steps_of_both_stages(stage):
    budget = Budget(BUDGET | {"steps": 4, "tune_steps": 2})
    tuned, scratch = (
        fine_tune(stage(f"scratch-{scratch}", {"scratch": scratch}, budget=budget), CPU) for scratch in (False, True)
    )
    assert tuned.cost["steps"] == scratch.cost["steps"] == 6


def test_scaling_is_studied_on_the_tuning_seed_only(stage):
    for tuned in (None, TRIAL):
        measured = train(stage(f"argus-{tuned is None}", {"scaling": True}, tuned=tuned), CPU)
        assert ("studies" in measured.extra) == (tuned is None)


def test_a_frozen_encoder_stays_bit_for_bit(data, stage, tmp_path):
    model = build(data, tower=True, context=24).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Trainer(stage("frozen"), CPU).tune(model, TRIAL, StateFolder(tmp_path / "tune"), 0.0, 1, steps=2)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".")[0] for name in moved} == {"user_tower", "object_tower"}
    assert len(moved) >= 6  # the last bias of the item tower cancels in a pair


def test_stale_lists_and_user_vectors(data):
    model = build(data, tower=True, context=24)
    found = serving(model, data, CPU)["ndcg@10_of_towers_by_delay"]
    assert found.keys() == {"none", "request", "day"}
    users = np.arange(len(data))
    batch = target_windows(data, "test", users, 24, delay="none")
    with torch.no_grad():
        fresh, *stale = (tower_scorer(model, data, CPU, delay)("test", users) for delay in ("none", "request", "day"))
        own = user_vectors(model, batch) @ model.object_vectors(model.encode(batch)).t()
    assert np.allclose(own.numpy(), fresh, atol=1e-5)
    assert not any(np.allclose(late, fresh, atol=1e-5) for late in stale)


# Measures


def test_scorers_see_only_the_strict_past(data):
    """Also the two-tower scorer; the contract checks the retrieval scorer on edited data again."""
    model = build(data, tower=True)
    hidden = data.hidden("test")
    item = np.where(hidden, data.interactions.item % data.n_items + 1, data.interactions.item).astype(np.int32)
    edited = data.edited(item=item)
    positions = np.arange(len(data))
    for scorer in (model_scorer, tower_scorer):
        before, after = (scorer(model, d, CPU)("test", positions) for d in (data, edited))
        assert np.array_equal(before, after)
        past = data.edited(item=np.where(hidden, data.interactions.item, item[::-1]).astype(np.int32))
        assert not np.array_equal(before, scorer(model, past, CPU)("test", positions))


def test_edits_keep_the_split(data):
    table = data.interactions
    rows = data.hidden("valid") | data.tested()
    rating = np.where(rows & ~data.fixed(), 6 - table.rating, table.rating).astype(np.float32)
    again = EventSplit.build(table.edited(rating=rating))
    for name in ("users", "valid_target", "test_target"):
        assert np.array_equal(getattr(again, name), getattr(data, name))
    assert (rating != table.rating).sum() > 0.3 * rows.sum()


def test_pair_accuracy_counts_ties_half(data):
    model = build(data, tower=True)
    torch.nn.init.zeros_(model.object_tower[2].weight)
    torch.nn.init.zeros_(model.object_tower[2].bias)
    users, accuracy = pair_accuracy(model, data, "test", CPU)
    assert len(users) > 3
    assert (accuracy == 0.5).all()
    assert mean_by_user(np.array([3, 3, 5]), np.array([1.0, 0.0, 1.0]))[1].tolist() == [0.5, 1.0]


def test_recent_popularity_counts_the_month_before(data):
    table = data.interactions
    counts = recent_counts(data, "test", np.array([0]))[0]
    now = table.timestamp[data.cut("test")[0]]
    rows = data.index.train_row & (table.timestamp < now) & (table.timestamp >= now - 30 * DAY)
    assert np.array_equal(counts, np.bincount(table.item[rows], minlength=data.n_items + 1))


def test_last_places():
    batch = EpochWindows(EventSplit.build(synthetic.interactions(users=3)), RULE, 0, 0, CPU)[0]
    assert batch.mask.flatten()[last_places(batch)].all()
    assert (last_places(batch) % batch.shape[1] == batch.shape[1] - 1).all()
