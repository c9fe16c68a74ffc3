"""Leave-two-out sequences: nothing lost, nothing shared, targets last."""

from __future__ import annotations

import archives
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.interactions import load_interactions
from auto_research.data.samplers import epoch_batches, histories, left_padded, next_item_windows
from auto_research.data.sequences import LeaveTwoOut, fixed_user_order, head_items
from auto_research.metrics.ranking import rank_of_target, ranking_metrics, top_items
from auto_research.runtime.errors import ConfigError

lengths = st.lists(st.integers(1, 8), min_size=1, max_size=8)


def data_of(sizes: list[int]):
    rows, item = [], 0
    for user, size in enumerate(sizes, start=1):
        for time in range(size):
            rows.append((user, item % 9 + 1, 3, time))
            item += 1
    return archives.table_of(rows, [[1.0]] * 9)


@settings(max_examples=80, deadline=None)
@given(lengths)
def test_train_valid_test_of_a_user_are_its_whole_sequence(sizes):
    data = data_of(sizes)
    split = LeaveTwoOut.build(data)
    assert split.users.tolist() == [u for u, size in enumerate(sizes, start=1) if size >= 3]
    for i, user in enumerate(split.users):
        whole = data.item[data.user == user].tolist()
        assert [*split.train[i].tolist(), split.valid_target[i], split.test_target[i]] == whole
        assert split.history("valid", i).tolist() == whole[:-2]
        assert split.history("test", i).tolist() == whole[:-1]


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 9))
def test_restrict_keeps_sequences_and_grows_by_inclusion(sizes, users):
    split = LeaveTwoOut.build(data_of(sizes))
    small, larger = split.restrict(users), split.restrict(users + 1)
    assert len(small) == min(users, len(split))
    assert set(small.users.tolist()) <= set(larger.users.tolist())
    position = {user: i for i, user in enumerate(split.users.tolist())}
    for i, user in enumerate(small.users.tolist()):
        assert small.train[i].tolist() == split.train[position[user]].tolist()
        assert small.test_target[i] == split.test_target[position[user]]
    assert (small.n_users, small.n_items) == (split.n_users, split.n_items)


def test_restrict_takes_the_users_the_request_table_takes(movielens_100k):
    split = LeaveTwoOut.load(movielens_100k / "sequences")
    assert split.restrict(120).users.tolist() == sorted(fixed_user_order("movielens-100k", 943)[:120].tolist())
    assert split.restrict(943) is split


def test_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="tset"):
        LeaveTwoOut.build(data_of([5])).history("tset", 0)


def test_head_items_are_the_most_rated_tenth_with_ties_by_id():
    counts = np.array([99, *([1] * 20)])
    counts[[7, 15]] = 5
    assert head_items(counts).tolist() == [7, 15]
    counts[[3, 9]] = 5
    assert head_items(counts).tolist() == [3, 7]
    assert head_items(np.array([0, 1, 2])).tolist() == [2]


def test_prepared_sequences_equal_a_fresh_build(movielens_100k):
    loaded = LeaveTwoOut.load(movielens_100k / "sequences")
    built = LeaveTwoOut.build(load_interactions(movielens_100k / "canonical"))
    assert (len(loaded), len(loaded.train_items)) == (943, 98_114)
    for name in ("users", "train_items", "train_starts", "valid_target", "test_target"):
        assert np.array_equal(getattr(loaded, name), getattr(built, name)), name
    assert (loaded.n_users, loaded.n_items, loaded.dataset) == (built.n_users, built.n_items, built.dataset)


def test_popularity_floor_on_the_canonical_order(movielens_100k):
    split = LeaveTwoOut.load(movielens_100k / "sequences")
    scores = np.tile(split.popularity(), (len(split), 1))
    excluded = split.excluded("test")
    ranks = rank_of_target(scores, split.test_target, excluded)
    metrics, _ = ranking_metrics(ranks, top_items(scores, excluded), split.head_items(), split.n_items)
    assert metrics["ndcg@10"] == pytest.approx(0.0357, abs=0.002)
    assert metrics["hit@10"] == pytest.approx(0.074, abs=0.002)
    assert metrics["head_share@10"] == 1.0


def test_user_order_is_fixed():
    assert sorted(fixed_user_order("movielens-100k", 943).tolist()) == list(range(1, 944))
    assert fixed_user_order("movielens-100k", 943)[:4].tolist() == [223, 652, 554, 617]
    assert fixed_user_order("movielens-1m", 943)[:4].tolist() != [223, 652, 554, 617]


def test_epoch_batches_are_a_seeded_permutation():
    ids = np.arange(100, 110)
    first = list(epoch_batches(ids, 4, "order", 42, 0))
    assert [len(b) for b in first] == [4, 4, 2]
    assert sorted(np.concatenate(first).tolist()) == ids.tolist()
    assert all(np.array_equal(a, b) for a, b in zip(first, epoch_batches(ids, 4, "order", 42, 0), strict=True))
    assert not np.array_equal(np.concatenate(first), np.concatenate(list(epoch_batches(ids, 4, "order", 42, 1))))


def test_windows_are_left_padded_and_shifted_by_one():
    split = LeaveTwoOut.build(data_of([7, 3]))  # user 1: 1 2 3 4 5 | 6 | 7, user 2: 8 | 9 | 1
    inputs, targets = next_item_windows(split, 3)
    assert inputs.tolist() == [[2, 3, 4], [0, 0, 0]]
    assert targets.tolist() == [[3, 4, 5], [0, 0, 0]]
    assert histories(split, "test", 4).tolist() == [[3, 4, 5, 6], [0, 0, 8, 9]]
    assert left_padded([np.array([1, 2])], 0).shape == (1, 0)
