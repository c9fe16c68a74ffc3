"""Training a generator of semantic ids on leave-two-out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from auto_research.blocks.history_generator import GeneratorConfig, HistoryGenerator
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDVocab, random_codes, resolve_collisions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.metrics.ranking import top_items
from auto_research.runtime.errors import ConfigError
from auto_research.train.sid import SIDBudget, SIDCuts, SIDWindows, beam_lister, fit_sid, measure_sid, sid_scorer
from auto_research.train.state import StateFolder

CPU = torch.device("cpu")
ITEMS = 30
TABLE = resolve_collisions(random_codes(ITEMS, (4, 4, 4), seed=0), (4, 4, 4))


def circle(users: int = 24) -> LeaveTwoOut:
    """Every user walks round the catalogue from a place of their own: the next item is known from the last one."""
    walks = [(np.arange(12) + 7 * user) % ITEMS + 1 for user in range(users)]
    starts = np.arange(users + 1) * 10
    train = np.concatenate([walk[:10] for walk in walks]).astype(np.int64)
    ends = np.array([walk[10:] for walk in walks], dtype=np.int64)
    return LeaveTwoOut(users, ITEMS, np.arange(1, users + 1), train, starts, ends[:, 0], ends[:, 1], "circle")


def build(_, data):
    config = GeneratorConfig(16, 2, 1, 1, 32, 0.0, length=4)
    return HistoryGenerator(TABLE, SIDVocab.of(TABLE, users=4), config, data.n_users)


def context(tmp_path, seen=None):
    return SimpleNamespace(
        key="toy",
        tier="tiny",
        seed=1,
        tuned=None,
        budget={"trials": [{"learning_rate": 1e-2}]},
        state=StateFolder(tmp_path),
        log=lambda text: None,
        progress=lambda *args, **values: None,
        observe=lambda event, **values: None if seen is None else seen.append((event, values)),
    )


def test_windows_and_cuts_hold_every_event_but_the_first_once_with_its_user():
    data = circle(3)
    expected = sorted(
        (user, items[t - 1], items[t]) for user, items in zip(data.users, data.train, strict=True) for t in range(1, 10)
    )
    for kind, budget in ((SIDWindows, SIDBudget(length=4, batch=2)), (SIDCuts, SIDBudget(length=4, batch=9, round=3))):
        rows = kind(data, budget, 0, 0, CPU)
        found = []
        for batch in (rows[i] for i in range(len(rows))):
            row, column = torch.nonzero(batch.target, as_tuple=True)
            found += zip(
                batch.user[row].tolist(),
                batch.items[row, column].tolist(),
                batch.target[row, column].tolist(),
                strict=True,
            )
        assert sorted(found) == expected


def test_cuts_hold_the_events_before_the_target():
    data = circle(3)
    batch = SIDCuts(data, SIDBudget(length=4, batch=27, round=1), 0, 0, CPU)[0]
    for items, target, user in zip(batch.items.tolist(), batch.target.tolist(), batch.user.tolist(), strict=True):
        train = data.train[user - 1].tolist()
        before = train[: train.index(target[-1])][-4:]
        assert items == [0] * (4 - len(before)) + before
        assert target[:-1] == [0, 0, 0]


def test_passes_of_cuts_follow_each_other_and_are_a_function_of_seed_and_round():
    data = circle(3)
    budget = SIDBudget(length=4, batch=9, round=2)
    targets = [SIDCuts(data, budget, 5, n // 2, CPU)[n % 2].target[:, -1].tolist() for n in range(6)]
    passes = [sorted(item for step in targets[n : n + 3] for item in step) for n in (0, 3)]
    assert passes[0] == passes[1]
    assert targets[:3] != targets[3:]
    assert SIDCuts(data, budget, 5, 1, CPU)[0].target[:, -1].tolist() == targets[2]


@pytest.mark.parametrize("cuts", [False, True])
def test_a_generator_learns_the_circle_and_shows_itself(tmp_path, cuts):
    seen, data = [], circle()
    budget = SIDBudget(
        epochs=30, patience=None, warmup=5, length=4, batch=16, cuts=cuts, round=8, validate_every=15,
        validation_beam=10, beam=20, validation_users=12,
    )  # fmt: skip
    ctx = context(tmp_path, seen)
    trained, records = fit_sid(ctx, build, table=TABLE, device=CPU, sequences=data, budget=budget)
    measured = measure_sid(trained, records, data, TABLE, budget, device=CPU, at=(1, 5))
    assert measured.metrics["recall@1"] > 0.3
    assert measured.metrics["short_lists"] == measured.metrics["struck_items"] == 0.0
    assert trained.validation["ndcg@10"] > 0.3
    assert measured.trials[0]["status"] == "finished"
    assert measured.cost["flops"] > 0
    assert [event for event, _ in seen].count("trained") == 1
    shown = seen[-1][1]
    assert shown["score"](data, "test", np.arange(3)).shape == (3, ITEMS + 1)


def test_lists_of_a_wide_beam_are_the_exhaustive_ones():
    torch.manual_seed(0)
    data = circle()
    model = build(None, data).eval()
    positions = np.arange(5)
    trie = PrefixTrie.of(TABLE)
    lists = beam_lister(model, data, trie, width=ITEMS, length=4, device=CPU, count=12)("test", positions)
    scores = sid_scorer(model, data, TABLE, length=4, device=CPU)("test", positions)
    expected = top_items(scores, [data.history("test", i) for i in positions], 12)
    assert np.array_equal(lists, expected)


def test_another_table_is_refused(tmp_path):
    other = resolve_collisions(random_codes(ITEMS, (4, 4, 4), seed=1), (4, 4, 4))
    with pytest.raises(ConfigError, match="semantic ids"):
        fit_sid(context(tmp_path), build, table=other, device=CPU, sequences=circle(), budget=SIDBudget(length=4))
