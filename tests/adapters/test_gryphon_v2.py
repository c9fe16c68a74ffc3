"""Mechanism tests of card gryphon-v2, with the numbers of its specification."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch
import torch.nn.functional as F
from contract_runs import Runs, Watch

from adapters.gryphon_v2 import experiment
from adapters.gryphon_v2.batches import BatchRule, CutBatches, unseen_items
from adapters.gryphon_v2.evaluation import (
    EncoderCalls,
    add_beam_order,
    agreement,
    gryphon_lister,
    gryphon_scorer,
    kendall_tau,
    measured,
    pair_accuracy,
    score_lister,
)
from adapters.gryphon_v2.events import FeedbackSplit, event_windows, logged_events, seen_items
from adapters.gryphon_v2.model import Gryphon, GryphonConfig, distillation, matched_config, merged_pool, rollout
from adapters.gryphon_v2.stages import build_table, positive_sequences
from adapters.gryphon_v2.teacher import Teacher, TeacherConfig, feedback_loss, pair_loss, weighted_pair_accuracy
from adapters.gryphon_v2.training import JointLoss, JointRule, next_positives
from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores
from auto_research.blocks.preference import weights_hash
from auto_research.blocks.sid_models import SIDStep
from auto_research.evaluate.next_list import split_lists
from auto_research.experiment.card import Card, find_card
from auto_research.experiment.loader import load_experiment
from auto_research.metrics.cost import count_params
from auto_research.runtime.errors import ConfigError, RunFailure
from auto_research.runtime.paths import code_root
from auto_research.train.optimizer import adamw

CPU = torch.device("cpu")
CONFIG = GryphonConfig(width=16, heads=2, encoder_layers=1, layers=1, hidden=24, dropout=0.0, history=8)
TEACHER = TeacherConfig(width=12, heads=2, layers=2, dropout=0.0, long_history=20)
RULE = BatchRule(history=8, long_history=20, batch=10, rollout_users=4, negatives=6, rollout_items=6)


@pytest.fixture(scope="module")
def data():
    return FeedbackSplit.build(synthetic.interactions(users=14, ratings=40))


@pytest.fixture(scope="module")
def text(data):
    return torch.from_numpy(np.random.default_rng(0).normal(size=(data.n_items + 1, 20)).astype(np.float32))


@pytest.fixture(scope="module")
def table(data, text):
    return build_table(data, text.numpy(), [4, 3, 3], seed=0, text_width=8)


def build(table, text, seed=0, **switches) -> Gryphon:
    """A model whose parts are all large enough to be seen."""
    torch.manual_seed(seed)
    model = Gryphon(replace(CONFIG, **switches), table, text).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def build_teacher(text, seed=0) -> Teacher:
    torch.manual_seed(seed)
    teacher = Teacher(TEACHER, text).eval().requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return teacher


def first_batch(data, **changes):
    return CutBatches(data, replace(RULE, **changes), 1, 4, CPU, "test").at(0)


def request(data, positions=(0, 1, 2), split="test"):
    positions = np.array(positions)
    stop = data.cut(split)[positions]
    return event_windows(data, positions, stop, CONFIG.history), seen_items(data, positions, stop)


# Split and batches


def test_targets_are_the_last_two_positives_and_training_ends_before_both(data):
    table = data.interactions
    for i, user in enumerate(data.users):
        rows = np.flatnonzero(table.user == user)
        liked = rows[table.rating[rows] >= 4]
        assert (data.valid_target[i], data.test_target[i]) == tuple(liked[-2:])
        assert data.window[i] == max(rows[0], liked[-1] - 9)
        assert data.train_stop[i] == min(liked[-2], data.window[i])
        assert np.array_equal(data.history("test", i), table.item[rows[0] : liked[-1]])
    rows, owner = data.train_targets
    assert (rows < data.train_stop[owner]).all()
    assert (table.rating[rows] >= 4).all()
    assert (
        positive_sequences(data).train_items.tolist()
        == table.item[data.train_rows[table.rating[data.train_rows] >= 4]].tolist()
    )


def test_movielens_split(movielens_100k):
    """942 users, as specified. Window events are 11,518 and 6,378 of them precede the validation target; the
    specification's 11,511 and 6,360 are of another order inside seconds."""
    from auto_research.data.interactions import load_interactions

    split = FeedbackSplit.build(load_interactions(movielens_100k / "canonical"))
    assert (len(split), split.interactions.n_users) == (942, 943)
    assert int((split.end - split.window).sum()) == 11_518
    assert int(np.maximum(split.valid_target - split.window, 0).sum()) == 6_378


def test_edits_keep_the_split(data):
    again = FeedbackSplit.build(data.interactions.edited(rating=data.other_ratings()))
    for name in ("users", "valid_target", "test_target", "window"):
        assert np.array_equal(getattr(again, name), getattr(data, name))
    assert (data.other_ratings() != data.interactions.rating).all()


def test_batches_hold_the_past_of_their_cut(data):
    batches = CutBatches(data, RULE, 1, 4, CPU, "test")
    rows, owner = batches.rows, batches.owner
    found, passes = [], len(rows) // RULE.batch
    for step in range(passes):
        batch = batches.at(step)
        found += batch.target.tolist()
        for r in range(batch.pools):
            known = set(batch.seen[r].tolist()) - {0}
            item = int(batch.target[r])
            cut = next(t for t, o in zip(rows, owner, strict=True)
                       if data.interactions.item[t] == item
                       and set(data.interactions.item[data.first[o] : t].tolist()) == known)  # fmt: skip
            user = owner[list(rows).index(cut)]
            n = min(RULE.history, cut - data.first[user])
            assert batch.history.item[r, -n:].tolist() == data.interactions.item[cut - n : cut].tolist()
            m = min(RULE.long_history, cut - data.first[user])
            assert batch.long.item[r, -m:].tolist() == data.interactions.item[cut - m : cut].tolist()
            stop = min(cut + 10, data.train_stop[user])
            assert batch.event[r, : stop - cut].tolist() == data.interactions.item[cut:stop].tolist()
            assert not known & set(batch.uniform[r].tolist())
            assert not (known | set(batch.event[r].tolist())) & set(batch.negative[r].tolist())
        assert torch.equal(batch.event[:, 0], batch.target)
    assert len(found) == passes * RULE.batch


def test_unseen_items_are_uniform_and_unseen():
    drawn = unseen_items(np.array([[2, 3, 0], [0, 0, 0]]), 5, 3000, np.random.default_rng(0))
    assert set(drawn[0]) == {1, 4, 5}
    assert np.allclose(np.bincount(drawn[1], minlength=6)[1:] / 3000, 0.2, atol=0.03)


# Tokenizer


def test_groups_may_share_a_semantic_id_and_a_suffix_parts_them(data, text, table):
    assert table.levels == 3
    assert table.statistics()["shared_items"] > 0.3
    leaf = int(np.argmax(np.diff(table.leaf_starts)))
    group = table.items_of(table.leaves[leaf])
    counts = data.popularity()[group]
    assert (np.diff(counts) <= 0).all()
    with_suffix = build_table(data, text.numpy(), [4, 3, 3], seed=0, mode="suffix", text_width=8)
    assert with_suffix.levels == 4
    assert len(with_suffix.leaves) == data.n_items


# Weighted pair accuracy and the teacher's loss


def test_weighted_pair_accuracy_by_hand():
    rating = torch.tensor([[5, 3, 1]] * 4)
    score = torch.tensor([[0.2, 0.9, 0.1], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    right, total = weighted_pair_accuracy(score, rating)
    assert total.tolist() == [8] * 4
    assert (right / total).tolist() == [0.75, 1.0, 0.0, 0.5]
    padded = weighted_pair_accuracy(F.pad(score, (0, 2), value=9.0), F.pad(rating, (0, 2)))
    assert torch.equal(padded[0], right)


def test_feedback_loss_by_hand():
    score, rating = torch.tensor([[0.2, 0.9, 0.1, 7.0]]), torch.tensor([[5, 3, 1, 0]])
    terms = 2 * np.log1p(np.exp(0.7)) + 4 * np.log1p(np.exp(-0.1)) + 2 * np.log1p(np.exp(-0.8))
    assert pair_loss(score, rating).item() == pytest.approx(terms / 8, abs=1e-6)
    negative = torch.tensor([[0.2, 0.2, 0.2]])
    assert feedback_loss(score, rating, negative).item() == pytest.approx(terms / 8 + np.log(4), abs=1e-6)
    assert pair_loss(score, torch.tensor([[4, 4, 4, 0]])).item() == 0
    later = torch.tensor([[5, 3, 4, 0]])  # the second positive is the third event
    both = (np.log(4) + np.log1p(3 * np.exp(0.2 - 0.1))) / 2
    expected = pair_loss(score, later).item() + both
    assert feedback_loss(score, later, negative, 2).item() == pytest.approx(expected, abs=1e-6)
    assert feedback_loss(score, later, negative, 9).item() == pytest.approx(expected, abs=1e-6)


def test_pair_accuracy_scores_a_window_from_before_it(data):
    asked = {}

    def score(positions, stop, item):
        for position, end, items in zip(positions, stop, item, strict=True):
            asked[int(position)] = (int(end), items[items > 0].tolist())
        return np.where(item > 0, item, 0).astype(np.float64)

    users, accuracy = pair_accuracy(score, data)
    for i in range(len(data)):
        rows = slice(data.window[i], data.end[i])
        assert asked[i] == (data.window[i], data.interactions.item[rows].tolist())
        item, rating = data.interactions.item[rows], data.interactions.rating[rows]
        pairs = [(abs(a - b), (p > q) == (a > b)) for p, a in zip(item, rating, strict=True)
                 for q, b in zip(item, rating, strict=True) if a > b]  # fmt: skip
        expected = sum(w for w, ok in pairs if ok) / sum(w for w, _ in pairs)
        assert accuracy[list(users).index(data.users[i])] == pytest.approx(expected)


# Encode once, candidates


def test_a_request_is_encoded_once_and_by_a_cascade_twice(data, table, text):
    for switches, calls in (({}, 1), ({"separate": True}, 2), ({"ranker": False}, 1)):
        model = build(table, text, **switches)
        with EncoderCalls(model) as counted:
            model.serve(*request(data), width=4, count=20)
        assert counted.calls == calls


def test_the_cascade_has_as_many_parameters(table, text):
    for config in (CONFIG, replace(CONFIG, width=32, hidden=96, encoder_layers=2)):
        goal = count_params(Gryphon(config, table, text))
        cascade = count_params(Gryphon(matched_config(config, table, text), table, text))
        assert abs(cascade - goal) / goal < 0.05


def test_candidates_do_not_see_each_other(data, table, text):
    """Bit for bit whatever the 99 others are; alone, where the matrix products have other shapes, up to rounding."""
    model, generator = build(table, text), torch.Generator().manual_seed(0)
    encoded = model.encode(request(data)[0])
    item, other = (torch.randint(1, data.n_items + 1, (3, 100), generator=generator) for _ in range(2))
    together = model.rank(encoded, item)
    for column in (0, 7, 99):
        mixed = other.clone()
        mixed[:, column] = item[:, column]
        among_others = model.rank(encoded, mixed)
        assert torch.equal(among_others[:, column], together[:, column])
        assert not torch.equal(among_others, together)
        alone = model.rank(encoded, item[:, column : column + 1])[:, 0]
        torch.testing.assert_close(alone, together[:, column], rtol=1e-6, atol=1e-6)


def test_items_on_one_semantic_id_have_one_beam_score_and_different_ranks(data, table, text):
    model = build(table, text)
    encoded = model.encode(request(data)[0])
    leaf = int(np.argmax(np.diff(table.leaf_starts)))
    a, b = table.items_of(table.leaves[leaf])[:2]
    by_id = exhaustive_sid_scores(model.generator, encoded.memory, table)
    assert torch.equal(by_id[:, a], by_id[:, b])
    scores = model.rank(encoded, torch.tensor([[a, b]] * 3))
    assert ((scores[:, 0] - scores[:, 1]).abs() > 1e-3).all()


def test_the_token_of_a_candidate_is_item_text_and_codes(data, table, text):
    model = build(table, text)
    encoded = model.encode(request(data)[0])
    seen = {}
    model.ranker.register_forward_pre_hook(lambda module, args: seen.update(token=args[0]))
    model.rank(encoded, torch.tensor([[5, 0]] * 3))
    codes = [model.generator.embedding.weight[table.codes[5, level] + o] for level, o in enumerate((0, 4, 7))]
    expected = model.table.item.weight[5] + model.table.project(text[5]) + sum(codes)
    torch.testing.assert_close(seen["token"][0, 0], expected)


def test_a_history_of_padding_does_not_count(data, table, text):
    model = build(table, text)
    window, _ = request(data)
    for n in (3, 0):
        short = type(window)(*(torch.where(torch.arange(8) >= 8 - n, x, 0).to(x.dtype) for x in window))
        junk = short._replace(
            item=torch.where(short.mask, short.item, 9), rating=torch.where(short.mask, short.rating, 2)
        )
        one, two = (model.rank(model.encode(w), torch.tensor([[3, 4]] * 3)) for w in (short, junk))
        torch.testing.assert_close(one, two)
        assert one.isfinite().all()


# Serving


def test_serving_equals_the_training_forward(data, table, text):
    model, batch = build(table, text), first_batch(data)
    loss = JointLoss(JointRule(rollout_beam=3, rollout_items=6))
    pool = loss.pool(model, batch)
    trained = model.rank(model.rows(model.encode(batch.history), batch.pools), pool)
    history = type(batch.history)(*(x[: batch.pools] for x in batch.history))
    served = model.serve(history, batch.seen, width=3, count=6)
    compared = 0
    for row in range(batch.pools):
        by_item = dict(zip(served.candidates[row].tolist(), served.scores[row].tolist(), strict=True))
        for item, score in zip(pool[row].tolist(), trained[row].tolist(), strict=True):
            if item in by_item and item:
                assert by_item[item] == pytest.approx(score, abs=1e-5)
                compared += 1
    assert compared == int((served.candidates > 0).sum()) > 10


def test_a_beam_over_all_ids_makes_the_whole_unseen_catalogue_candidates(data, table, text):
    model = build(table, text)
    window, seen = request(data)
    served = model.serve(window, seen, width=len(table.leaves), count=data.n_items)
    positions = np.arange(3)
    scores = gryphon_scorer(model, data, CPU)(positions, data.test_target[positions], None)
    for row in range(3):
        known = set(seen[row].tolist())
        unseen = [i for i in range(1, data.n_items + 1) if i not in known]
        assert sorted(i for i in served.candidates[row].tolist() if i) == unseen
        assert served.top[row].tolist() == sorted(unseen, key=lambda i: -scores[row, i])[:10]
    lists = gryphon_lister(model, data, CPU, width=len(table.leaves), count=data.n_items)("test", positions)
    assert np.array_equal(lists[:, :10], score_lister(gryphon_scorer(model, data, CPU), data, 10)("test", positions))


def test_semantic_ids_with_a_suffix_are_trained_and_served(data, text):
    table = build_table(data, text.numpy(), [4, 3, 3], seed=0, mode="suffix", text_width=8)
    model, batch = build(table, text), first_batch(data)
    trained = gradients(model, JointLoss(JointRule(rollout_beam=3, rollout_items=6), build_teacher(text))(model, batch))
    assert f"generator.heads.{table.levels - 1}.weight" in trained
    window, seen = request(data)
    served = model.serve(window, seen, width=7, count=20)
    beams = constrained_beam(
        SIDStep(model.generator), model.encode(window).memory, model.trie, 7, alive=model.trie.alive(seen)
    )
    for row in range(3):
        items = [int(table.items_of(table.leaves[leaf])[0]) for leaf in beams.leaf[row, :, 0].tolist()]
        assert [i for i in served.candidates[row].tolist() if i] == items
        assert set(served.top[row].tolist()) - {0} == set(items)


def test_beam_order_is_by_semantic_id_and_then_popularity(data, table, text):
    model = build(table, text, ranker=False)
    window, seen = request(data)
    served = model.serve(window, seen, width=5, count=30)
    beams = constrained_beam(
        SIDStep(model.generator), model.encode(window).memory, model.trie, 5, alive=model.trie.alive(seen)
    )
    for row in range(3):
        known = set(seen[row].tolist())
        expected = [
            i for leaf in beams.leaf[row, :, 0].tolist() for i in table.items_of(table.leaves[leaf]) if i not in known
        ]
        assert [i for i in served.candidates[row].tolist() if i] == expected
        assert served.top[row].tolist() == expected[:10] + [0] * (10 - len(expected))


def test_the_judge_orders_the_same_candidates(data, table, text):
    model, positions = build(table, text), np.arange(4)
    options = {"width": 4, "count": 25}
    orders = {
        order: gryphon_lister(model, data, CPU, order=order, judge=lambda p, s, item: -item.astype(float), **options)(
            "test", positions
        )
        for order in ("rank", "beam", "judge")
    }
    for row in range(4):
        candidates = sorted(i for i in orders["beam"][row] if i)
        assert sorted(i for i in orders["rank"][row] if i) == candidates
        assert [i for i in orders["judge"][row] if i] == candidates
    assert not np.array_equal(orders["rank"], orders["beam"])


# Distillation


def gradients(model, loss) -> set[str]:
    model.zero_grad()
    loss.backward()
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def test_distillation_reaches_encoder_tables_and_ranking_module_only(data, table, text):
    model, batch, teacher = build(table, text).train(), first_batch(data), build_teacher(text)
    loss = JointLoss(JointRule(rollout_beam=3, rollout_items=6), teacher)
    moved = gradients(model, loss.ranking_loss(model, model.encode(batch.history), batch))
    decoder = {n for n, _ in model.named_parameters() if n.startswith(("generator.blocks", "generator.heads", "generator.norm", "generator.target"))}  # fmt: skip
    assert decoder
    assert not moved & decoder
    for part in (
        "generator.encoder.",
        "ranker.",
        "table.item",
        "table.project",
        "events.rating",
        "generator.embedding",
    ):
        assert any(name.startswith(part) for name in moved), part
    everything = gradients(model, loss(model, batch))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained <= everything | {"events.gap.weight", "events.rating.weight"}
    assert decoder & trained <= everything


def test_rollouts_are_fresh_and_draw_nothing(data, table, text):
    model, batch = build(table, text, dropout=0.5).train(), first_batch(data)
    history = type(batch.history)(*(x[: batch.pools] for x in batch.history))
    state = torch.get_rng_state()
    before = rollout(model, history, batch.seen, width=3, count=6)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert model.ranker.training
    assert torch.equal(before, rollout(model, history, batch.seen, width=3, count=6))
    known = [set(row.tolist()) for row in batch.seen]
    assert all(not set(row.tolist()) & seen - {0} for row, seen in zip(before, known, strict=True))
    static = JointLoss(JointRule(pool="static", rollout_beam=3, rollout_items=6), start=copy.deepcopy(model))
    fresh = JointLoss(JointRule(rollout_beam=3, rollout_items=6))
    first = fresh.pool(model, batch)
    assert torch.equal(first, static.pool(model, batch))
    with torch.no_grad():
        for head in model.generator.heads:
            head.bias.add_(torch.randn_like(head.bias) * 5)
    assert not torch.equal(first, fresh.pool(model, batch))
    assert torch.equal(first, static.pool(model, batch))


def test_pools_by_arm(data, table, text):
    model, batch = build(table, text), first_batch(data)
    pools = {
        name: JointLoss(JointRule(pool=name, rollout_beam=3, rollout_items=6)).pool(model, batch)
        for name in ("both", "rollout", "impression", "random")
    }
    for row in range(batch.pools):
        held = {name: [i for i in pool[row].tolist() if i] for name, pool in pools.items()}
        assert all(len(items) == len(set(items)) for items in held.values())
        assert set(held["both"]) == set(held["rollout"]) | set(held["impression"])
        assert set(held["impression"]) == set(batch.event[row].tolist()) - {0}
        assert set(held["random"]) == set(held["impression"]) | set(batch.uniform[row].tolist())
    merged = merged_pool(torch.tensor([[3, 4, 0]]), torch.tensor([[4, 5, 3, 0]]))
    assert merged.tolist() == [[3, 4, 0, 0, 5, 0, 0]]


def test_mae_is_zero_with_zero_gradient_where_student_and_teacher_agree():
    taught, pool = torch.tensor([[0.5, -1.0, 9.0]]), torch.tensor([[4, 7, 0]])
    student = torch.tensor([[0.5, -1.0, 3.0]], requires_grad=True)
    loss = distillation(student, taught, pool)
    loss.backward()
    assert loss.item() == 0
    assert student.grad.tolist() == [[0, 0, 0]]
    assert distillation(taught + 2, taught, pool).item() == pytest.approx(2)
    assert distillation(taught, taught, torch.zeros_like(pool)).item() == 0


@pytest.mark.parametrize("pool", ["static", "random"])
def test_a_step_on_pools_without_fresh_rollouts(data, table, text, pool):
    model, teacher = build(table, text), build_teacher(text)
    start = copy.deepcopy(model).requires_grad_(False) if pool == "static" else None
    loss = JointLoss(JointRule(pool=pool, rollout_beam=3, rollout_items=6), teacher, start)
    before = copy.deepcopy(model.state_dict())
    hashes = [weights_hash(m) for m in (teacher, start) if m is not None]
    steps(model, loss, data, count=1)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert any(name.startswith("ranker.") for name in moved)
    assert any(name.startswith("generator.encoder.") for name in moved)
    assert hashes == [weights_hash(m) for m in (teacher, start) if m is not None]


def steps(model, loss, data, count=3, clip=1.0, **changes):
    batches = CutBatches(data, replace(RULE, **changes), 1, count, CPU, "test")
    optimizer = adamw(model, 5e-3, 1e-4)
    model.train()
    for batch in batches.epoch(0):
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("clip", [torch.inf, 1.0])
def test_lambda_zero_trains_the_generator_of_gr_beam(data, table, text, clip):
    """Rollouts and teacher at work: bit for bit, or to 1e-6 with a clip, whose norm sums the ranking module's zeros."""
    trained = {}
    for ranking, weight in (("none", 1.0), ("distill", 0.0), ("distill", 1.0)):
        torch.manual_seed(3)
        model = Gryphon(replace(CONFIG, dropout=0.3, ranker=ranking != "none"), table, text)
        rule = JointRule(ranking=ranking, lambda_r=weight, rollout_beam=3, rollout_items=6)
        torch.manual_seed(4)
        steps(model, JointLoss(rule, build_teacher_like(text)), data, clip=clip)
        trained[ranking, weight] = {n: p for n, p in model.state_dict().items() if not n.startswith("ranker.")}
    plain = trained["none", 1.0]
    for name, value in trained["distill", 0.0].items():
        if clip == torch.inf:
            assert torch.equal(plain[name], value), name
        else:
            torch.testing.assert_close(plain[name], value, rtol=0, atol=1e-6)
    learned = trained["distill", 1.0].items()
    assert not all(torch.allclose(plain[name], value, rtol=0, atol=1e-4) for name, value in learned)


def build_teacher_like(text):
    """A teacher, with the random stream left as it was."""
    with torch.random.fork_rng():
        return build_teacher(text)


def test_held_out_rollouts_are_learned_from_rollouts(data, table, text):
    """Lower MAE on held-out rollouts of one generator than with impressions alone after the same steps; a copy of the
    impressions in place of rollouts would give equality."""
    teacher, mae = build_teacher(text), {}
    torch.manual_seed(0)
    generator = Gryphon(CONFIG, table, text)
    for pool in ("both", "impression"):
        torch.manual_seed(0)
        model = Gryphon(CONFIG, table, text)
        rule = JointRule(pool=pool, rollout_beam=5, rollout_items=12)
        steps(model, JointLoss(rule, teacher), data, count=60, batch=10, rollout_users=10)
        found = agreement(model, teacher, generator, data, CPU, width=5, count=12)
        mae[pool] = found["distill_mae_rollout"][1].mean()
    assert mae["both"] < 0.97 * mae["impression"]


def test_agreement_is_measured_on_rollouts_of_the_generator(data, table, text):
    model, teacher, generator = build(table, text), build_teacher(text), build(table, text, seed=5, ranker=False)
    found = agreement(model, teacher, generator, data, CPU, width=5, count=12)
    for i in (0, 9):
        window, seen = request(data, [i])
        item = generator.candidates(generator.encode(window), seen, 5, 12)
        assert not torch.equal(item, model.candidates(model.encode(window), seen, 5, 12))
        item = item[item > 0].view(1, -1)
        stop = data.test_target[[i]]
        taught = teacher.score(teacher.read(event_windows(data, np.array([i]), stop, TEACHER.long_history)), item)
        student = model.rank(model.encode(window), item)
        users, error = found["distill_mae_rollout"]
        assert users[i] == data.users[i]
        assert error[i] == pytest.approx((student - taught).abs().mean().item(), abs=1e-5)
        tau = kendall_tau(student[0].detach().numpy(), taught[0].numpy())
        assert found["kendall_tau"][1][i] == pytest.approx(tau)


def test_the_gain_of_ranking_is_over_the_beam_order_of_the_same_candidates(data, table, text):
    model = build(table, text)
    listers = {order: gryphon_lister(model, data, CPU, width=8, count=40, order=order) for order in ("rank", "beam")}
    found = measured(listers["rank"], gryphon_scorer(model, data, CPU), data, 40)
    add_beam_order(found, listers["beam"], data)
    lists = {order: lister("test", np.arange(len(data))) for order, lister in listers.items()}
    assert found.units["candidates"].values == (lists["beam"] > 0).sum(1).tolist()
    gains = []
    for i, target in enumerate(data.target("test")):
        value = {}
        for order in lists:
            place = np.flatnonzero(lists[order][i][:10] == target)
            value[order] = 1 / np.log2(2 + place[0]) if len(place) else 0.0
        gains.append(value["rank"] - value["beam"])
    assert any(gains)
    assert found.units["ranking_gain@10"].values == pytest.approx(gains)
    assert found.metrics["ranking_gain@10"] == pytest.approx(
        found.metrics["ndcg@10"] - found.metrics["beam_order_ndcg@10"]
    )


# Teacher


def test_the_teacher_reads_more_and_never_the_future(data, table, text):
    teacher, model = build_teacher(text), build(table, text)
    positions = np.array([0])
    stop = data.test_target[positions]
    item = torch.tensor([[3, 9, 12]])

    def scores(split):
        long = event_windows(split, positions, stop, TEACHER.long_history)
        short = event_windows(split, positions, stop, CONFIG.history)
        return teacher.score(teacher.read(long), item), model.rank(model.encode(short), item)

    before = scores(data)
    row = int(stop[0]) - CONFIG.history - 1
    changed = data.interactions.item.copy()
    changed[row] = changed[row] % data.n_items + 1
    after = scores(data.edited(item=changed))
    assert not torch.allclose(before[0], after[0], atol=1e-4)
    assert torch.equal(before[1], after[1])
    changed = data.interactions.item.copy()
    changed[int(stop[0]) :] = 1
    for one, other in zip(before, scores(data.edited(item=changed)), strict=True):
        assert torch.equal(one, other)


def test_the_teacher_does_not_move(data, table, text):
    teacher = build_teacher(text)
    before = weights_hash(teacher)
    torch.manual_seed(0)
    steps(Gryphon(CONFIG, table, text), JointLoss(JointRule(rollout_beam=3, rollout_items=6), teacher), data)
    assert weights_hash(teacher) == before


def test_a_candidate_of_the_teacher_reads_the_history_and_is_read_by_nothing(data, text):
    teacher, batch = build_teacher(text), first_batch(data)
    read = teacher.read(batch.long)
    one = teacher.score(read, torch.tensor([[3]] * 4))
    many = teacher.score(read, torch.tensor([[3, 8, 9]] * 4))
    torch.testing.assert_close(many[:, :1], one)
    other = batch.long._replace(rating=6 - batch.long.rating.clamp(min=1))
    assert not torch.allclose(teacher.score(teacher.read(other), torch.tensor([[3]] * 4)), one, atol=1e-4)


def test_teacher_scores_are_standardised_once(data, text):
    teacher, batch = build_teacher(text), first_batch(data)
    raw = teacher.score(teacher.read(batch.long), batch.event[: batch.pools])
    teacher.set_scale(raw)
    scaled = teacher.score(teacher.read(batch.long), batch.event[: batch.pools])
    assert scaled.mean().item() == pytest.approx(0, abs=1e-5)
    assert scaled.std().item() == pytest.approx(1, abs=1e-5)


def test_the_teacher_learns_its_windows(data, text):
    torch.manual_seed(0)
    teacher = Teacher(TEACHER, text)
    source = CutBatches(data, replace(RULE, rollout_users=10, history=1), 1, 1, CPU, "test")
    batch, optimizer = source.at(0), adamw(teacher, 1e-2)
    first = teacher.loss(batch).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = teacher.loss(batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * first


# Switches and measures


@pytest.mark.parametrize("ranking", ["next", "label"])
@pytest.mark.parametrize("positives", [1, 3])
def test_other_ranking_losses_reach_the_ranking_module(data, table, text, ranking, positives):
    model, batch = build(table, text).train(), first_batch(data)
    loss = JointLoss(JointRule(ranking=ranking, next_positives=positives))
    encoded = model.encode(batch.history)
    found = loss.ranking_loss(model, encoded, batch)
    scores = model.rank(encoded, torch.cat([batch.event, batch.negative], dim=1))
    own, negative = scores[:, :10], scores[:, 10:]
    rows = []
    for row in range(len(own)):
        liked = (batch.rating[row] >= 4).nonzero()[:positives, 0]
        against = [F.cross_entropy(torch.cat([own[row, [t]], negative[row]]), torch.tensor(0)) for t in liked]
        rows.append(torch.stack(against).mean())
    expected = torch.stack(rows).mean()
    if ranking == "label":
        expected = expected + pair_loss(own, batch.rating)
    torch.testing.assert_close(found, expected)
    assert any(n.startswith("ranker.") for n in gradients(model, found))


def test_a_retriever_in_place_of_the_decoder(data, table, text):
    model, batch = build(table, text, decoder="dot"), first_batch(data)
    window, seen = request(data)
    encoded = model.encode(window)
    found = model.candidates(encoded, seen, 12, 12)
    scores = encoded.memory.states[:, -1] @ encoded.items.t()
    for row in range(3):
        known = set(seen[row].tolist())
        expected = sorted((i for i in range(1, data.n_items + 1) if i not in known), key=lambda i: -scores[row, i])[:12]
        assert found[row].tolist() == expected
    trained = gradients(model, JointLoss(JointRule(ranking="next"))(model, batch))
    assert "table.item.weight" in trained
    idle = {"events.gap.weight", "ranker.out.bias"}  # a softmax does not see a constant
    assert {n for n, p in model.named_parameters() if p.requires_grad} <= trained | idle


def test_separate_encoders_share_nothing(data, table, text):
    model, batch = build(table, text, separate=True).train(), first_batch(data)
    loss = JointLoss(JointRule(ranking="label"))
    encoded = model.encode(batch.history)
    ranking = gradients(model, loss.ranking_loss(model, encoded, batch))
    assert all(name.startswith(("own_", "ranker.")) for name in ranking)
    generation = gradients(model, model.generation_loss(model.encode(batch.history), batch.target.unsqueeze(1)))
    assert not ranking & generation


def test_generation_alone_leaves_the_encoder_of_a_cascade_alone(data, table, text):
    model, batch = build(table, text, separate=True), first_batch(data)
    with EncoderCalls(model) as counted:
        JointLoss(JointRule(ranking="none"))(model, batch)
    assert counted.calls == 1


# Options of the card that no arm has, on the tiny tier


@pytest.fixture(scope="module")
def option(movielens_100k, tmp_path_factory):
    """Runs the arm gryphon_v2 with another switch: option(**switch) -> measurement, watch."""
    root = tmp_path_factory.mktemp("data")
    (root / "movielens-100k").symlink_to(movielens_100k)
    card = find_card(code_root(), "gryphon-v2")
    runs = Runs(card, load_experiment(card.key, card), tmp_path_factory.mktemp("options"), root)

    def run(**switch):
        facts = copy.deepcopy(card.facts)
        facts["arms"]["gryphon_v2"]["switch"] = switch
        runs.card = Card(facts, card.folder)
        name, watch = "-".join(f"{k}-{v}" for k, v in switch.items()), Watch()
        return runs._once(name, "arm", "gryphon_v2", watch=watch), watch

    return run


@pytest.mark.parametrize(
    "switch",
    [{"decoder": "dot"}, {"separate": True, "ranking": "label"}, {"pool": "static"}, {"pool": "random"}],
    ids=lambda switch: "-".join(map(str, switch.values())),
)
def test_options_run(option, switch):
    found, watch = option(**switch)
    config, tiny = watch.trained.model.config, GryphonConfig(width=16, hidden=32)
    assert (config.width, config.hidden) == (tiny.width, tiny.hidden)
    assert config.decoder == switch.get("decoder", "sid")
    assert found["cost"]["user_encodings_per_request"] == 1 + switch.get("separate", False)
    own_warm_up = "decoder" in switch or "separate" in switch
    assert watch.steps == ([1, 2] if own_warm_up else []) + [1, 2, 3]
    assert [row["step"] for row in found["extra"]["warm_up"]] == [2]
    assert found["metrics"]["candidates"] > 0
    if "ranking" not in switch:
        assert found["extra"]["teacher"]["validation"]["recall_users"] == 4
        assert len(found["units"]["distill_mae_rollout"]["ids"]) == 30


def test_an_unknown_separation_is_refused(option):
    with pytest.raises(ConfigError, match="separate"):
        option(separate="half")


def test_a_teacher_that_moved_ends_the_run(option, monkeypatch):
    monkeypatch.setattr(experiment, "weights_hash", lambda model: "moved")
    with pytest.raises(RunFailure, match="teacher"):
        option(pool="impression")


def test_generation_targets_are_the_next_positives(data, table, text):
    event, rating = torch.tensor([[7, 8, 9, 10, 0], [5, 0, 0, 0, 0]]), torch.tensor([[4, 2, 5, 4, 0], [5, 0, 0, 0, 0]])
    assert next_positives(event, rating, 1).tolist() == [[7], [5]]
    assert next_positives(event, rating, 2).tolist() == [[7, 9], [5, 0]]
    model, batch = build(table, text), first_batch(data)
    assert torch.equal(next_positives(batch.event, batch.rating, 1)[:, 0], batch.target)
    for decoder in ("sid", "dot"):
        model = build(table, text, decoder=decoder)
        encoded, target = model.encode(batch.history), next_positives(batch.event, batch.rating, 3)
        single = [
            model.generation_loss(model.encode(type(batch.history)(*(x[[b]] for x in batch.history))), item.view(1, 1))
            for b, row in enumerate(target) for item in row if item > 0
        ]  # fmt: skip
        assert len(single) < target.numel()
        torch.testing.assert_close(model.generation_loss(encoded, target), torch.stack(single).mean())


def test_unknown_switches_are_refused():
    with pytest.raises(ValueError, match="ranking"):
        JointRule(ranking="guess")
    with pytest.raises(ValueError, match="decoder"):
        GryphonConfig(decoder="gru")


def test_kendall_tau_by_hand():
    assert kendall_tau(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) == 1
    assert kendall_tau(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(1 / 3)
    assert kendall_tau(np.array([1.0, 2]), np.array([2.0, 1])) == -1


def test_scorer_without_ranking_module_gives_log_probabilities(data, table, text):
    model = build(table, text, ranker=False)
    score, positions = gryphon_scorer(model, data, CPU), np.arange(3)
    stop = data.test_target[positions]
    every = score(positions, stop, None)
    item = np.array([[4, 9, 30]] * 3)
    assert np.allclose(score(positions, stop, item), np.take_along_axis(every, item, 1), atol=1e-5)
    probability = np.exp(every[:, [table.items_of(leaf)[0] for leaf in table.leaves]]).sum(1)
    assert (probability <= 1.0001).all()
    lists = split_lists(score_lister(score, data, 10), data, "test")
    assert lists.struck == 0


def test_events_from_the_target_on(data):
    item, rating = logged_events(data.test_target, data.end, data)
    assert item[:, 0].tolist() == data.target("test").tolist()
    assert (rating[:, 0] >= 4).all()
    assert (rating[:, 1:] < 4).all()
