"""The contract on splits that an adapter makes itself: leaks are found, and so are splits that hide too little."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import contract_checks as checks
import numpy as np
import pytest
import synthetic
import torch
from contract_edits import EditedFolders, EditedTables, OwnSplit, blind_spot, other_future, other_past

from auto_research.data.interactions import Interactions, load_interactions


@dataclass(frozen=True)
class LastSeconds:
    """A toy: the last second of a user is test, the one before validation."""

    interactions: Interactions

    def __len__(self) -> int:
        return self.interactions.n_users

    def start(self, split: str) -> np.ndarray:
        """int64[U] first row of the split's second."""
        user, time = self.interactions.user, self.interactions.timestamp
        fresh = np.append(True, (user[1:] != user[:-1]) | (np.diff(time) != 0))
        opens = np.flatnonzero(fresh)
        owner = user[opens]
        back = 1 if split == "test" else 2
        return np.array([opens[owner == u][-back] for u in range(1, len(self) + 1)])

    def hidden(self, split: str) -> np.ndarray:
        rows = np.arange(len(self.interactions))
        return rows >= self.start(split)[self.interactions.user - 1]

    def tested(self) -> np.ndarray:
        return self.hidden("test")

    def fixed(self) -> np.ndarray:
        return np.zeros(len(self.interactions), dtype=bool)

    def edited(self, **columns: np.ndarray) -> LastSeconds:
        return replace(self, interactions=self.interactions.edited(**columns))


@pytest.fixture(scope="module")
def data():
    return LastSeconds(synthetic.interactions(users=6, ratings=20))


def scorer(beyond: int = 0, blind: bool = False):
    """Scores of an item: its rating by the user, read up to `beyond` rows into what is hidden."""

    def score(data: LastSeconds, split: str, positions: np.ndarray) -> np.ndarray:
        table, scores = data.interactions, np.zeros((len(positions), data.interactions.n_items + 1))
        first = table.user_starts()[1:]
        for row, i in enumerate(positions):
            rows = slice(first[i], data.start(split)[i] + beyond)
            if not blind:
                scores[row, table.item[rows]] = table.rating[rows]
        return scores

    return score


def runs(data, score, role="treatment", **more):
    trained = SimpleNamespace(data=data, score=score, weights={}, validation={})
    return SimpleNamespace(
        arms=[("arm", "full")],
        watch=lambda name: SimpleNamespace(trained=trained),
        role=lambda name: role,
        card=SimpleNamespace(task="next_item"),
        **more,
    )


def check(made) -> None:
    checks.the_future_changes_no_score(made, EditedTables())


def test_an_honest_scorer_passes(data):
    assert isinstance(data, OwnSplit)
    check(runs(data, scorer()))


def test_a_scorer_that_reads_its_target_is_found(data):
    with pytest.raises(AssertionError, match="full: ratings from the valid target on change the valid scores"):
        check(runs(data, scorer(beyond=1)))


def test_a_scorer_that_reads_no_past_is_found(data):
    with pytest.raises(AssertionError, match="full: the user's past does not change"):
        check(runs(data, scorer(blind=True)))
    check(runs(data, scorer(blind=True), role="baseline"))


def test_data_that_cannot_be_edited_are_refused(data):
    with pytest.raises(AssertionError, match="full: Interactions is no split that can be edited"):
        check(runs(data.interactions, scorer()))


class HidesLess(LastSeconds):
    """where: what is wrong with the rows it hides."""

    where = "end"

    def hidden(self, split):
        hidden = super().hidden(split)
        stop = self.interactions.user_starts()[2:]
        if self.where == "end":
            hidden[stop - 1] = False
        elif self.where == "user":
            hidden[self.interactions.user == 1] = False
        elif self.where == "second":
            hidden[self.start(split)] = False
        return hidden

    def tested(self):
        tested = self.hidden("test").copy()
        if self.where == "training":
            tested[self.start("test")[0]] = False
        return tested

    def fixed(self):
        return self.hidden("valid") if self.where == "fixed" else super().fixed()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("end", "end before the last rating"),
        ("user", "not every scored user"),
        ("second", "begin inside a second"),
        ("training", "seen by validation or training"),
        ("fixed", "are fixed"),
    ],
)
def test_a_split_that_hides_too_little_is_found(where, message):
    table = synthetic.interactions(users=6, ratings=20)
    time = table.timestamp.reshape(6, 20).copy()
    time[:, -2:] = time[:, -1:]  # two ratings in the last second,
    time[:, -4:-2] = time[:, -1:] - 10  # and in the one before
    split = HidesLess(table.edited(timestamp=time.ravel()))
    assert blind_spot(LastSeconds(split.interactions)) == ""
    object.__setattr__(split, "where", where)
    assert message in blind_spot(split)
    with pytest.raises(AssertionError, match=message):
        check(runs(split, scorer()))


def test_a_split_in_canonical_order_may_hide_part_of_a_second():
    table = synthetic.interactions(users=6, ratings=20)
    time = table.timestamp.reshape(6, 20).copy()
    time[:, -2:] = time[:, -1:]
    split = HidesLess(table.edited(timestamp=time.ravel()))
    object.__setattr__(split, "where", "second")
    object.__setattr__(split, "inside_seconds", True)
    assert "second" not in blind_spot(split)


def test_a_split_may_say_what_ratings_become(data):
    split = replace(data)
    object.__setattr__(split, "other_ratings", lambda: np.full(len(data.interactions), 2.5, dtype=np.float32))
    hidden, edited = data.hidden("test"), other_future(split, "test").interactions
    assert (edited.rating[hidden] == 2.5).all()
    assert np.array_equal(edited.rating[~hidden], data.interactions.rating[~hidden])
    mirrored = other_future(data, "test").interactions
    assert np.array_equal(mirrored.rating[hidden], 6 - data.interactions.rating[hidden])


def test_edits_are_where_they_should_be(data):
    table = data.interactions
    for split in ("valid", "test"):
        hidden, edited = data.hidden(split), other_future(data, split).interactions
        assert np.array_equal(table.item[~hidden], edited.item[~hidden])
        assert np.array_equal(table.rating[~hidden], edited.rating[~hidden])
        assert (table.item[hidden] != edited.item[hidden]).mean() > 0.5
    past = other_past(data).interactions
    hidden = data.hidden("test")
    assert np.array_equal(table.item[hidden], past.item[hidden])
    assert (table.item[~hidden] != past.item[~hidden]).mean() > 0.5


@pytest.mark.parametrize("greedy", [False, True])
def test_training_on_test_rows_is_found(greedy, movielens_100k, tmp_path):
    """The weights are item counts, of the rows before the test seconds or of all of them."""

    def learned(folder) -> SimpleNamespace:
        data = LastSeconds(load_interactions(folder))
        table, rows = data.interactions, ~data.hidden("test") | greedy
        counts = np.bincount(table.item[rows], weights=table.rating[rows], minlength=table.n_items + 1)
        return SimpleNamespace(data=data, weights={"counts": torch.from_numpy(counts)}, validation={"ndcg@10": 0.0})

    def seen(name, variant, until, *, workdir, data_root):
        return SimpleNamespace(trained=learned(data_root / "movielens-100k" / "canonical"))

    made = SimpleNamespace(
        arms=[("arm", "full")],
        watch=lambda name: SimpleNamespace(trained=learned(movielens_100k / "canonical")),
        seen=seen,
        folder=tmp_path,
    )
    folders = EditedFolders(movielens_100k, "movielens-100k", tmp_path)
    if greedy:
        with pytest.raises(AssertionError, match=r"full: test rows changed what was trained \(counts\)"):
            checks.test_rows_change_no_training(made, folders)
    else:
        checks.test_rows_change_no_training(made, folders)
