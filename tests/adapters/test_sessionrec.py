"""Mechanism tests of card sessionrec, with the numbers of its specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch

from adapters.sessionrec.batches import Draws, EpochBatches, SessionBatch, take
from adapters.sessionrec.evaluation import measure, set_metrics, set_ranks
from adapters.sessionrec.experiment import (
    model_scorer,
    optimizer_of,
    serving_costs,
    target_share,
    train_step_ms,
)
from adapters.sessionrec.model import SessionRec, SessionRecConfig, excluded, negative_counts
from adapters.sessionrec.sessions import (
    SessionSplit,
    TokenRule,
    chunk_numbers,
    session_numbers,
    token_sequences,
)
from auto_research.baselines.linear_floor import known_items
from auto_research.blocks.pairwise_loss import all_pairs
from auto_research.blocks.sampled_softmax import multi_positive_softmax
from auto_research.metrics.cost import flops_of
from auto_research.runtime.errors import NonFinite

ITEMS = 30
CONFIG = SessionRecConfig(width=16, field=8, layers=2, heads=2, dropout=0.0, tokens=12)
RULE = TokenRule(events=30, tokens=12, token_items=6, targets_kept=6)
CPU = torch.device("cpu")


def build(seed=0, items=ITEMS, **switches) -> SessionRec:
    torch.manual_seed(seed)
    genres = (torch.rand(items + 1, 5) < 0.4).float()
    model = SessionRec(replace(CONFIG, **switches), genres, torch.randint(1, 9, (items + 1,)), 9)
    for parameter in (model.sse.position, model.sign.weight):  # large enough that every part is seen
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def batch_of(sessions, gaps=None, pos=(), neg=(), state=()) -> SessionBatch:
    """One user. sessions: lists of (item, sign); pos, neg: target lists of the tokens `state`."""
    events = [(item, sign, token) for token, session in enumerate(sessions) for item, sign in session]
    item, sign, token_of = (torch.tensor(column) for column in zip(*events, strict=True))
    width = max((len(items) for items in [*pos, *neg]), default=1)

    def padded(lists):
        return torch.tensor([[*items, *[0] * (width - len(items))] for items in lists], dtype=torch.int64).reshape(
            len(lists), width
        )

    return SessionBatch(
        item=item,
        sign=sign,
        token_of=token_of,
        user=torch.zeros(len(sessions), dtype=torch.int64),
        gap=torch.tensor(gaps or [0] * len(sessions)),
        state=torch.tensor(state, dtype=torch.int64),
        pos=padded(pos),
        neg=padded(neg),
        aim=padded(pos),
        wrong=padded(neg),
        skip=torch.tensor([item for lists in (pos, neg) for items in lists for item in items], dtype=torch.int64),
        skip_of=torch.tensor(
            [row for lists in (pos, neg) for row, items in enumerate(lists) for _ in items], dtype=torch.int64
        ),
        drawn=torch.zeros(ITEMS + 1),
        users=1,
    )


SESSIONS = [[(1, 1), (2, 2), (3, 1)], [(4, 1)], [(5, 2), (6, 1)], [(7, 1), (8, 1), (9, 2), (10, 1)]]


def queries(model, sessions, gaps=(0, 9, 14, 20)):
    with torch.no_grad():
        return model.queries(batch_of(sessions, list(gaps[: len(sessions)])))


@pytest.fixture(scope="module")
def data():
    return SessionSplit.build(synthetic.interactions(users=24, ratings=60, items=90))


# Sessions and split


def test_session_builder_by_hand():
    time = np.array([0, 30, 91, 91, 152, 153])
    session = session_numbers(np.ones(6), time)
    assert np.bincount(session).tolist() == [2, 2, 2]
    assert session_numbers(np.ones(2), np.array([0, 60])).tolist() == [0, 0]  # a gap of exactly 60 does not split
    assert session_numbers(np.array([1, 2]), np.array([5, 5])).tolist() == [0, 1]
    assert session_numbers(np.ones(3), np.array([0, 100, 2000]), gap=1800).tolist() == [0, 0, 1]


def test_chunks_ignore_time():
    user = np.array([1] * 9 + [2] * 3)
    assert chunk_numbers(user, 7).tolist() == [0] * 7 + [1] * 2 + [2] * 3


def test_movielens_has_the_sessions_of_the_specification(movielens_100k):
    from auto_research.data.interactions import load_interactions

    table = load_interactions(movielens_100k / "canonical")
    split = SessionSplit.build(table)
    positives, negatives = split.relevant("test")
    assert int(session_numbers(table.user, table.timestamp)[-1]) + 1 == 14_846
    assert len(split) == 830
    assert sum(len(p) > 0 and len(n) > 0 for p, n in zip(positives, negatives, strict=True)) == 503


def test_targets_are_the_last_two_sessions_with_a_positive(data):
    table = data.interactions
    session = session_numbers(table.user, table.timestamp)
    for i, user in enumerate(data.users):
        rows = np.flatnonzero(table.user == user)
        rich = [s for s in np.unique(session[rows]) if (table.rating[rows][session[rows] == s] >= 4).any()]
        for (start, stop), number in ((data.valid[i], rich[-2]), (data.test[i], rich[-1])):
            assert np.flatnonzero(session == number).tolist() == list(range(start, stop))
    assert len(data) > 10


@pytest.mark.parametrize("unit", ["session", "item", "chunk"])
@pytest.mark.parametrize("inputs", ["all", "positive"])
def test_histories_end_before_the_target_session(data, unit, inputs):
    table = data.interactions
    for split in ("valid", "test"):
        rule = replace(RULE, unit=unit, inputs=inputs, chunk=3)
        sequences = token_sequences(data, rule, split)
        for i in range(len(data)):
            items = sequences.item[sequences.event_start[i] : sequences.event_start[i + 1]]
            start = data.target(split)[i, 0]
            allowed = table.item[max(data.first[i], start - rule.events) : start]
            assert set(items) <= set(allowed.tolist())
            assert np.diff(sequences.token_start)[i] <= rule.longest
        sizes = np.bincount(sequences.token_of)
        assert sizes.min() == 1 if unit != "chunk" else sizes.min() >= 1
        assert sizes.max() <= (1 if unit == "item" else rule.token_items)
        assert inputs == "all" or sequences.positive.all()


def test_item_level_targets_are_the_next_positive(data):
    sequences = token_sequences(data, replace(RULE, unit="item", targets="item"), "valid", targets=True)
    for i in range(3):
        first, stop = sequences.event_start[i : i + 2]
        chosen = slice(*sequences.target_start[i : i + 2])
        item, liked = sequences.item[first:stop], sequences.positive[first:stop]
        for token, target in zip(
            sequences.state[chosen] - sequences.token_start[i], sequences.pos[chosen], strict=True
        ):
            later = [j for j in range(token + 1, len(item)) if liked[j]]
            assert target.tolist() == [item[later[0]]]


def test_next_session_targets_of_sessions_and_of_items_are_the_same(data):
    wide = replace(RULE, tokens=40, token_items=40, targets_kept=40)
    pooled = token_sequences(data, wide, "valid", targets=True)
    flat = token_sequences(data, replace(wide, unit="item"), "valid", targets=True)
    assert np.array_equal(pooled.pos, flat.pos)
    assert np.array_equal(pooled.neg, flat.neg)
    last_event = np.searchsorted(pooled.token_of, pooled.state, side="right") - 1
    assert np.array_equal(last_event, flat.state)  # the flat state stands at the end of the session


def test_no_chunk_reaches_into_the_target_session_or_is_predicted_from_it(data):
    sequences = token_sequences(data, replace(RULE, unit="chunk", chunk=4), "valid", targets=True)
    table = data.interactions
    for i in range(len(data)):
        chosen = slice(*sequences.target_start[i : i + 2])
        later = set(table.item[data.valid[i, 0] : data.test[i, 1]].tolist())
        assert not later & set(sequences.pos[chosen].ravel().tolist())


def test_newest_items_are_kept():
    table = synthetic.interactions(users=1, ratings=40)
    table = table.edited(timestamp=np.repeat(np.arange(4) * 1000, 10), rating=np.full(40, 5.0, dtype=np.float32))
    split = SessionSplit.build(table)
    rule = TokenRule(events=17, tokens=50, token_items=6, targets_kept=4)
    found = token_sequences(split, rule, "valid", targets=True)
    assert np.diff(np.flatnonzero(np.diff(found.token_of, prepend=-1, append=99))).tolist() == [6, 6]
    assert found.item.tolist() == [*table.item[4:10], *table.item[14:20]]
    assert found.pos.tolist() == [table.item[16:20].tolist()]


@pytest.mark.parametrize("unit", ["session", "item", "chunk"])
def test_the_whole_target_session_is_skipped_however_few_targets_are_kept(data, unit):
    rule = replace(RULE, unit=unit, events=60, tokens=40)
    few = token_sequences(data, replace(rule, targets_kept=2), "valid", targets=True)
    every = token_sequences(data, replace(rule, targets_kept=60), "valid", targets=True)
    assert few.pos.shape[1] == 2
    cut = 0
    for row in range(len(few.state)):
        whole = {*every.pos[row].tolist(), *every.neg[row].tolist()} - {0}
        assert set(few.skip[few.skip_start[row] : few.skip_start[row + 1]].tolist()) == whole
        cut += len(whole - set(few.pos[row].tolist()) - set(few.neg[row].tolist()))
    assert cut > 50
    batch = take(few, np.array([3, 1]), data.n_items)
    table = excluded(batch)
    chosen = [*range(*few.target_start[3:5]), *range(*few.target_start[1:3])]
    for row, target in enumerate(chosen):
        whole = few.skip[few.skip_start[target] : few.skip_start[target + 1]]
        assert set(np.flatnonzero(table[row])) == {0, *whole.tolist()}
    assert len(chosen) == len(table) > 2


def test_a_history_without_a_positive_keeps_its_newest_event():
    table = synthetic.interactions(users=2, ratings=40)
    rating = np.full(80, 5.0, dtype=np.float32)
    rating[20:30] = 1  # the newest events before the validation session
    table = table.edited(timestamp=np.tile(np.repeat(np.arange(4) * 1000, 10), 2), rating=rating)
    split = SessionSplit.build(table)
    assert split.valid[0].tolist() == [10, 20]
    split = replace(split, valid=split.test)
    found = token_sequences(split, TokenRule(events=10, inputs="positive"), "valid", targets=True)
    assert np.diff(found.token_start).tolist() == [1, 1]
    assert found.item[0] == table.item[29]
    assert take(found, np.array([1, 0]), table.n_items).last().tolist() == [0, 1]


def test_a_longer_gap_joins_sessions(data):
    wide = replace(RULE, events=60, tokens=60, token_items=60, gap=1800)
    table = data.interactions
    number = session_numbers(table.user, table.timestamp, gap=1800)
    found = token_sequences(data, wide, "valid")
    for i in range(len(data)):
        rows = np.arange(data.first[i], data.valid[i, 0])
        assert np.diff(found.token_start)[i] == len(np.unique(number[rows]))
    assert len(found.gap) < len(token_sequences(data, replace(wide, gap=60), "valid").gap)


# Items, session encoder, sequence encoder


def test_order_inside_a_session_does_not_matter_and_the_order_of_sessions_does():
    for pooling in ("mean", "attention", "transformer"):
        model = build(pooling=pooling)
        shuffled = [session[::-1] for session in SESSIONS]
        assert torch.allclose(queries(model, SESSIONS), queries(model, shuffled), atol=1e-6)
        swapped = [SESSIONS[1], SESSIONS[0], *SESSIONS[2:]]
        assert not torch.allclose(queries(model, SESSIONS)[-1], queries(model, swapped)[-1], atol=1e-3)
    last = build(pooling="last")
    assert not torch.allclose(queries(last, SESSIONS), queries(last, [s[::-1] for s in SESSIONS]), atol=1e-3)


@pytest.mark.parametrize("pooling", ["attention", "transformer"])
def test_other_poolings_are_trained_and_are_no_mean(pooling):
    model, mean = build(pooling=pooling), build()
    batch = batch_of(SESSIONS, pos=[[11], [12]], neg=[[13], []], state=[1, 2])
    model.loss(batch, torch.zeros(ITEMS + 1)).backward()
    parameters = dict(model.ise.named_parameters())
    assert parameters
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    with torch.no_grad():
        if pooling == "attention":
            model.ise.query.copy_(torch.randn(16))
        x, token_of = torch.randn(4, 16), torch.tensor([0, 0, 0, 1])
        assert not torch.allclose(model.ise(x, token_of, 2)[0], mean.ise(x, token_of, 2)[0], atol=1e-2)


def test_attention_pooling_by_hand():
    model = build(pooling="attention")
    with torch.no_grad():
        model.ise.query.copy_(torch.eye(16)[0])
        x = torch.zeros(3, 16)
        x[0, 0], x[1, 1], x[2, 2] = math.log(3), 1, 1
        pooled = model.ise(x, torch.tensor([0, 0, 1]), 2)
    assert torch.allclose(pooled[0, :2], torch.tensor([0.75 * math.log(3), 0.25]))  # weights 3 : 1
    assert torch.equal(pooled[1], x[2])


def test_identifiers_start_with_unit_variance_and_move_by_several_learning_rates():
    model = build(items=400)
    inputs = []
    model.items.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    model.items()
    assert inputs[0][:, :8].std().item() == pytest.approx(1, abs=0.05)
    optimizer = optimizer_of(model, {"learning_rate": 1e-3})
    model.items().square().sum().backward()
    optimizer.step()
    model.items()
    moved = (inputs[-1] - inputs[0])[:, :8].abs()
    assert moved.median().item() == pytest.approx(8e-3, rel=0.01)


def test_the_mean_is_over_the_items_of_the_session():
    model = build()
    x = torch.randn(4, 16)
    pooled = model.ise(x, torch.tensor([0, 0, 0, 1]), 2)
    assert torch.allclose(pooled, torch.stack([x[:3].mean(0), x[3]]), atol=1e-6)


@pytest.mark.parametrize("encoder", ["transformer", "hstu"])
@pytest.mark.parametrize("change", ["items", "signs", "gap"])
def test_a_session_changes_no_earlier_state(encoder, change):
    model = build(encoder=encoder)
    before = queries(model, SESSIONS)
    gaps = (0, 9, 3 if change == "gap" else 14, 20)
    third = {"items": [(11, 2), (12, 1)], "signs": [(5, 1), (6, 1)], "gap": SESSIONS[2]}[change]
    after = queries(model, [*SESSIONS[:2], third, SESSIONS[3]], gaps)
    assert torch.equal(before[:2], after[:2])
    assert not torch.allclose(before[2:], after[2:], atol=1e-4)


@pytest.mark.parametrize("encoder", ["transformer", "hstu"])
def test_one_pass_equals_a_pass_per_prefix(encoder):
    model = build(encoder=encoder)
    whole = queries(model, SESSIONS)
    for t in range(1, len(SESSIONS)):
        assert torch.allclose(whole[t - 1], queries(model, SESSIONS[:t])[-1], atol=1e-5)


def up_to(batch, state):
    """The batch of one user cut behind the token `state`."""
    inside = batch.token_of <= state
    events = {name: getattr(batch, name)[inside] for name in ("item", "sign", "token_of")}
    return replace(batch, **events, user=batch.user[: state + 1], gap=batch.gap[: state + 1])


@pytest.mark.parametrize("encoder", ["transformer", "hstu"])
@pytest.mark.parametrize("unit", ["session", "item", "chunk"])
def test_all_targets_of_one_pass_equal_prefix_passes_on_sequences(data, encoder, unit):
    rule = replace(RULE, unit=unit, chunk=3)
    model = build(items=data.n_items, encoder=encoder, tokens=rule.longest)
    sequences = token_sequences(data, rule, "valid", targets=True)
    compared = 0
    with torch.no_grad():
        for i in range(3):
            batch = take(sequences, np.array([i]), data.n_items)
            whole = model.queries(batch)
            for state in batch.state.tolist():
                assert torch.allclose(whole[state], model.queries(up_to(batch, state))[-1], atol=1e-5)
                compared += state + 1 < batch.tokens
    assert compared > 5


@pytest.mark.parametrize("pauses", [True, False])
def test_pauses_are_read_only_where_asked_for(data, pauses):
    model = build(items=data.n_items, pauses=pauses)
    batch = take(token_sequences(data, RULE, "test"), np.arange(4), data.n_items)
    with torch.no_grad():
        other = model.queries(replace(batch, gap=(batch.gap + 7) % 33))
        assert torch.allclose(model.queries(batch), other, atol=1e-4) != pauses


@pytest.mark.parametrize("encoder", ["transformer", "hstu"])
def test_users_of_a_batch_do_not_touch_each_other(data, encoder):
    model = build(items=data.n_items, encoder=encoder)
    sequences = token_sequences(data, RULE, "test")
    with torch.no_grad():
        together = model(take(sequences, np.arange(len(data)), data.n_items))
        for i in range(3):
            alone = model(take(sequences, np.array([i]), data.n_items))
            assert torch.allclose(together[i : i + 1], alone, atol=1e-5)


@pytest.mark.parametrize("encoder", ["transformer", "hstu"])
def test_single_item_sessions_are_the_item_level_model(data, encoder):
    """With the gap embedding zeroed, although both read it."""
    table = data.interactions
    apart = table.edited(timestamp=np.arange(len(table)) * 1000)
    split = replace(data, interactions=apart)
    model = build(items=data.n_items, encoder=encoder, tokens=30)
    torch.nn.init.zeros_(model.sse.gap.weight)
    rule = replace(RULE, tokens=30)
    found = []
    for unit in ("session", "item"):
        sequences = token_sequences(split, replace(rule, unit=unit), "test")
        with torch.no_grad():
            found.append(model.queries(take(sequences, np.arange(len(split)), data.n_items)))
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_items_use_their_side_information_unless_told_not_to():
    model, plain = build(), build(id_only=True)
    before, bare = model.items().detach(), plain.items().detach()
    model.items.genres[3] = 1 - model.items.genres[3]
    assert not torch.allclose(before[3], model.items()[3], atol=1e-4)
    assert torch.equal(before[4], model.items()[4])
    assert bare.shape == before.shape
    assert sum(p.numel() for p in plain.parameters()) < sum(p.numel() for p in model.parameters())


# Losses


def test_retrieval_loss_by_hand():
    positive, everyone = torch.tensor([[1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    loss = multi_positive_softmax(positive, everyone, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert loss.item() == pytest.approx(0.3133, abs=1e-4)
    kept = -math.log(math.e / (math.e + math.e + 1))  # the other positive left in the denominator
    assert kept == pytest.approx(0.8620, abs=1e-4)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 0.3133), (1.0, 0.3133 + math.log(1 + math.exp(-2)))])
def test_loss_of_the_model_by_hand(alpha, expected, monkeypatch):
    """Positives 1, 2 score 1, the only other item 0; the negative 4 scores -1 and is no retrieval negative."""
    model = build(negatives="full", alpha=alpha)
    batch = batch_of(SESSIONS, pos=[[1, 2]], neg=[[4]], state=[2])
    batch.drawn = torch.zeros(5)
    scores = torch.tensor([[9.0, 1.0, 1.0, 0.0, -1.0]])
    monkeypatch.setattr(SessionRec, "scores", lambda self, q, items: scores)
    assert model.loss(batch, torch.zeros(5)).item() == pytest.approx(expected, abs=1e-4)


def test_sampled_loss_of_the_model_by_hand(monkeypatch):
    """Every item drawn once, as expected: positives 1, 2 score 1, item 3 scores 0, the negative 4 is left out."""
    model = build(alpha=0.0)
    batch = batch_of(SESSIONS, pos=[[1, 2]], neg=[[4]], state=[2])
    batch.drawn = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    scores = torch.tensor([[9.0, 1.0, 1.0, 0.0, -1.0]])
    monkeypatch.setattr(SessionRec, "scores", lambda self, q, items: scores)
    assert model.loss(batch, torch.zeros(5)).item() == pytest.approx(0.3133, abs=1e-4)
    batch.drawn = torch.tensor([0.0, 1.0, 1.0, 3.0, 1.0])  # item 3 counts 3 over an expected 6 / 4
    assert model.loss(batch, torch.zeros(5)).item() == pytest.approx(math.log(1 + 2 / math.e), abs=1e-4)


def test_rank_loss_by_hand():
    yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
    assert all_pairs(torch.tensor([[2.0]]), yes, torch.tensor([[1.0]]), yes).item() == pytest.approx(0.3133, abs=1e-4)
    for masks in ((no, yes), (yes, no)):
        positive = torch.tensor([[torch.inf]]) if masks[0] is no else torch.tensor([[1.0]])
        positive.requires_grad_()
        negative = torch.tensor([[2.0]], requires_grad=True)
        loss = all_pairs(positive, masks[0], negative, masks[1])
        loss.sum().backward()
        assert loss.item() == 0
        assert positive.grad.item() == negative.grad.item() == 0


def test_a_target_without_negatives_costs_no_rank_loss():
    with_rank, without = build(negatives="full", alpha=0.5), build(negatives="full", alpha=0.0)
    batch = batch_of(SESSIONS, pos=[[1, 2], [3]], neg=[[], []], state=[0, 1])
    share = torch.zeros(ITEMS + 1)
    assert torch.equal(with_rank.loss(batch, share), without.loss(batch, share))


def test_scores_are_cosines_over_the_temperature():
    model = build()
    model.temperature.tau.data.fill_(0.05)
    q, items = torch.randn(3, 16), torch.randn(7, 16)
    cosine = torch.nn.functional.cosine_similarity(q.unsqueeze(1), items.unsqueeze(0), dim=2)
    assert torch.allclose(model.scores(q, items), cosine / 0.05, atol=1e-4)


# Negatives


def epoch(data, draws, seed=3, number=0, size=5):
    sequences = token_sequences(data, RULE, "valid", targets=True)
    return sequences, EpochBatches(sequences, data.n_items, size, draws, seed, number, CPU)


def test_negatives_hold_no_item_of_the_target_session(data):
    sequences, batches = epoch(data, Draws(uniform=300))
    share = target_share(sequences, data.n_items)
    for index in range(len(batches)):
        batch = batches[index]
        count, _ = negative_counts(batch, share)
        usable = (count > 0)[batch.user[batch.state]] & ~excluded(batch)
        for row, (usable_items, listed) in enumerate(
            zip(usable, torch.cat([batch.pos, batch.neg], dim=1), strict=True)
        ):
            assert not usable_items[listed].any()
            assert not usable_items[batch.skip[batch.skip_of == row]].any()
            assert usable_items.any()
        assert not usable[:, 0].any()


def test_positives_of_the_same_user_are_no_in_batch_negatives(data):
    _, batches = epoch(data, Draws(uniform=0))
    batch = batches[0]
    count, _ = negative_counts(batch, torch.zeros(data.n_items + 1))
    everything = torch.bincount(batch.pos[batch.pos > 0], minlength=data.n_items + 1)
    for user in range(batch.users):
        own = batch.pos[batch.user[batch.state] == user]
        expected = everything - torch.bincount(own[own > 0], minlength=data.n_items + 1)
        assert torch.equal(count[user].long(), expected)


def test_expected_counts_match_what_is_drawn(data):
    """Over more than 10,000 in-batch draws, and in the uniform part by chance."""
    drawn, expected = torch.zeros(data.n_items + 1), torch.zeros(data.n_items + 1)
    sequences, _ = epoch(data, Draws())
    share = target_share(sequences, data.n_items)
    for number in range(40):
        _, batches = epoch(data, Draws(uniform=0), number=number)
        for index in range(len(batches)):
            count, mean = negative_counts(batches[index], share)
            drawn, expected = drawn + count.sum(0), expected + mean.sum(0)
    often = expected > 400
    assert drawn.sum() > 10_000
    assert often.sum() > 20
    assert drawn.sum() / expected.sum() == pytest.approx(1, abs=0.01)
    assert np.corrcoef(drawn, expected)[0, 1] > 0.99
    assert (drawn / expected - 1)[often].abs().max() < 0.2
    batch = Draws(uniform=9_000).apply(take(sequences, np.arange(3), data.n_items), np.random.default_rng(0))
    count, mean = negative_counts(batch, torch.zeros(data.n_items + 1))
    assert mean[0, 1].item() == pytest.approx(9_000 / data.n_items)
    assert batch.drawn[1:].mean() == pytest.approx(100, abs=0.01)
    assert batch.drawn[1:].std() == pytest.approx(10, abs=3)  # a fair draw


def test_expected_counts_match_for_short_and_long_histories():
    """Users with long histories like other items; were users of like length to share a batch, they would meet only those."""
    table = synthetic.interactions(users=45, ratings=60, items=90)
    kind = np.repeat(np.arange(45) % 3, 60)  # a third of the users each: items 1-30, 31-60, 61-90
    place = np.tile(np.arange(60), 45)
    size = np.array([12, 4, 2])[kind]  # events of a session
    table = table.edited(
        item=(1 + 30 * kind + place % 30).astype(np.int32),
        timestamp=(place // size * 1000).astype(np.int64),
        rating=np.full(len(table), 5.0, dtype=np.float32),
    )
    data = SessionSplit.build(table)
    rule = replace(RULE, events=60, tokens=60)
    sequences = token_sequences(data, rule, "valid", targets=True)
    length = np.diff(sequences.token_start)
    tercile = np.searchsorted(np.unique(length), length)
    assert np.bincount(tercile).tolist() == [15, 15, 15]
    share = target_share(sequences, data.n_items)
    drawn, expected = torch.zeros(3, 3), torch.zeros(3, 3)  # tercile of the user x tercile that likes the item
    for number in range(60):
        batches = EpochBatches(sequences, data.n_items, 9, Draws(uniform=0), 3, number, CPU)
        for index, group in enumerate(batches.groups):
            count, mean = negative_counts(batches[index], share)
            for total, found in ((drawn, count), (expected, mean)):
                total.index_add_(0, torch.from_numpy(tercile[group]), found[:, 1:].reshape(-1, 3, 30).sum(2))
    assert expected.min() > 400
    assert (drawn / expected - 1).abs().max() < 0.15  # without the user's own positives, 1 user of 15


def test_sampled_loss_estimates_the_full_softmax(data):
    """Averaged over draws, e^loss comes near; without logQ it would not."""
    sequences, _ = epoch(data, Draws())
    share = target_share(sequences, data.n_items)
    sampled, full = build(items=data.n_items, alpha=0.0), build(items=data.n_items, alpha=0.0, negatives="full")
    values, exact, bare = [], [], []
    with torch.no_grad():
        for number in range(15):
            _, batches = epoch(data, Draws(uniform=2000), number=number, size=12)
            values.append(sampled.loss(batches[0], share).item())
            exact.append(full.loss(batches[0], share).item())
            many = replace(batches[0], drawn=batches[0].drawn * 3)
            bare.append(sampled.loss(many, share).item())
    assert np.mean(values) == pytest.approx(np.mean(exact), rel=0.01)
    assert np.mean(bare) == pytest.approx(np.mean(exact), rel=0.01)  # more draws, the same expectation


def test_single_positive_draws_one_of_the_session_anew_in_every_epoch(data):
    _, whole = epoch(data, Draws())
    _, one = epoch(data, Draws(single=True))
    _, later = epoch(data, Draws(single=True), number=1)
    assert one[0].aim.shape[1] == 1
    for chosen, listed in zip(one[0].aim, whole[0].aim, strict=True):
        assert chosen.item() in listed[listed > 0].tolist()
    several = {int(n) for batches in (one, later) for i in range(len(batches)) for n in batches[i].aim}
    assert len(several) > len({int(n) for i in range(len(one)) for n in one[i].aim})


def test_single_positive_changes_the_targets_and_nothing_else(data):
    sequences, _ = epoch(data, Draws())
    share = target_share(sequences, data.n_items)
    for uniform in (0, 50):  # the draws of single come after the uniform ones
        _, whole = epoch(data, Draws(uniform=uniform))
        _, one = epoch(data, Draws(uniform=uniform, single=True))
        for many, few in ((whole[i], one[i]) for i in range(len(one))):
            for expected, found in zip(negative_counts(many, share), negative_counts(few, share), strict=True):
                assert torch.equal(expected, found)
            assert torch.equal(excluded(many), excluded(few))
            assert torch.equal(many.neg, few.wrong)
            assert many.aim.shape[1] > few.aim.shape[1]


def test_random_rank_negatives_are_no_positives(data):
    _, observed = epoch(data, Draws())
    _, random = epoch(data, Draws(wrong="random"))
    assert torch.equal(observed[0].wrong, observed[0].neg)
    assert not torch.equal(random[0].wrong, observed[0].wrong)
    assert torch.equal(random[0].neg, observed[0].neg)  # what retrieval leaves out stays the same
    clash = (random[0].wrong.unsqueeze(2) == random[0].pos.unsqueeze(1)) & (random[0].wrong > 0).unsqueeze(2)
    assert not clash.any()


def test_batches_are_a_function_of_seed_epoch_and_index(data):
    _, one = epoch(data, Draws())
    _, same = epoch(data, Draws())
    _, other = epoch(data, Draws(), seed=4)
    assert torch.equal(one[2].drawn, same[2].drawn)
    assert torch.equal(one[2].item, same[2].item)
    assert not torch.equal(one[2].drawn, other[2].drawn)
    seen = torch.cat([one[i].pos.flatten() for i in range(len(one))])
    assert torch.equal(seen.sort().values, torch.from_numpy(np.sort(epoch(data, Draws())[0].pos.ravel())))


# Metrics, serving, floors


def test_metrics_by_hand():
    recall, ndcg = set_metrics(np.array([1, 3, 40]), 10)
    assert recall == pytest.approx(0.6667, abs=1e-4)
    assert ndcg == pytest.approx((1 + 0.5) / (1 + 0.6309 + 0.5), abs=1e-4)
    assert ndcg == pytest.approx(0.7039, abs=1e-4)


def test_ranks_leave_seen_items_out_and_lose_ties():
    scores = np.array([99.0, 5.0, 4.0, 4.0, 3.0, 2.0])
    assert set_ranks(scores, np.array([2, 5]), seen=np.array([1])).tolist() == [2, 4]  # item 3 ties and goes first
    assert set_ranks(scores, np.array([2, 3]), seen=np.array([], dtype=int)).tolist() == [2, 3]
    with pytest.raises(NonFinite):
        set_ranks(np.array([0.0, np.nan, 1.0]), np.array([2]), seen=np.array([1]))


def test_a_perfect_scorer_gets_perfect_metrics(data):
    positives, _ = data.relevant("test")

    def oracle(split, positions):
        scores = np.zeros((len(positions), data.n_items + 1))
        for row, i in enumerate(positions):
            scores[row, positives[i]] = 1
        return scores

    measured = measure(oracle, data)
    assert measured.metrics["ndcg@10"] == measured.metrics["in_session_auc"] == pytest.approx(1)
    assert measured.metrics["recall@20"] == pytest.approx(1)  # no session here has more than 20 positives
    for name, unit in measured.units.items():
        assert np.mean(unit.values) == pytest.approx(measured.metrics[name])


def test_served_items_are_the_models_best_unseen_items(data):
    model = build(items=data.n_items)
    batch = take(token_sequences(data, RULE, "test"), np.arange(len(data)), data.n_items)
    items, candidates = model.export()
    assert torch.allclose(candidates.norm(dim=1), torch.ones(len(items)))
    seen = torch.zeros(len(data), data.n_items + 1, dtype=torch.bool)
    for row, known in enumerate(data.seen("test", np.arange(len(data)))):
        seen[row, known] = True
    served = model.retrieve(batch, items, candidates, seen, 8).numpy()
    scores = model_scorer(model, data, RULE, CPU)("test", np.arange(len(data)))
    for row in range(len(data)):
        candidates_left = np.flatnonzero(~seen[row].numpy())[1:]
        best = candidates_left[np.argsort(-scores[row, candidates_left], kind="stable")[:8]]
        assert served[row].tolist() == best.tolist()


def test_a_query_costs_no_item_tower_and_timing_a_step_leaves_the_model_alone(data):
    model = build(items=data.n_items)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cost = serving_costs(model, data, RULE, CPU)
    tower = flops_of(model.items)
    user = take(token_sequences(data, RULE, "test", np.zeros(1, dtype=int)), np.zeros(1, dtype=int), data.n_items)
    with torch.no_grad():
        assert cost["flops"] == flops_of(lambda: model(user)) - tower > 0
    sequences = token_sequences(data, RULE, "valid", targets=True)
    share = target_share(sequences, data.n_items)
    assert train_step_ms(model, {"learning_rate": 1e-3}, sequences, Draws(single=True), share, 5) > 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_floors_know_only_what_was_rated_before(data):
    table = data.interactions
    known = known_items(table, data.first, data.test[:, 0], everything=True)
    for i in range(len(data)):
        before = table.item[data.first[i] : data.test[i, 0]]
        assert set(known[i].indices) == set(before.tolist())
    assert known_items(table, data.first[:3], data.test[:3, 0], everything=False).nnz < known[:3].nnz
    train = data.popularity()
    assert train.sum() == sum(data.valid[:, 0] - data.first)


def test_edits_of_the_future_keep_the_split(data):
    """What the contract tests rely on: mirrored ratings in all rows that are not fixed leave the same targets."""
    table = data.interactions
    hidden = data.hidden("valid")
    rating = np.where(hidden & ~data.fixed(), 6 - table.rating, table.rating)
    again = SessionSplit.build(table.edited(rating=rating.astype(np.float32)))
    assert np.array_equal(again.valid, data.valid)
    assert np.array_equal(again.test, data.test)
    assert (rating != table.rating).sum() > 0.3 * hidden.sum()
