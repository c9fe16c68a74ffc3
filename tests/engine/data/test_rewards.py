"""Reward tables: mid-ranks worked by hand, fallbacks, and that only train events decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.data.interactions import load_interactions
from auto_research.data.rewards import (
    Events,
    duration_bucket,
    exposure_buckets,
    good_sessions,
    rating_quantile_reward,
    raw_reward,
    session_labels,
    train_events,
)
from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.errors import ConfigError


def events(rows, n_users=3, n_items=40) -> Events:
    user, item, value = (np.array(column) for column in zip(*rows, strict=True))
    return Events(user, item, value.astype(float), n_users, n_items)


def one_bucket(train):
    return np.zeros(train.n_items + 1, dtype=np.int64)


def test_buckets_of_durations():
    assert duration_bucket(np.array([1, 2, 10, 15, 16, 300])).tolist() == [0, 1, 3, 3, 4, 8]


def test_exposure_counts_train_events_and_one():
    train = events([(1, 5, 3)] + [(1, 7, 3)] * 9)
    assert exposure_buckets(train)[[5, 7, 9]].tolist() == [1, 3, 0]


def test_mid_ranks_of_the_worked_example():
    ratings = [1, 2, 3, 4, 5, 5, 4, 3]
    train = events([(1, i, r) for i, r in enumerate(ratings, start=1)])
    table = rating_quantile_reward(train, one_bucket)
    q = table.quantile(train.user, train.item, train.value)
    assert q.tolist() == [0.0625, 0.1875, 0.375, 0.625, 0.875, 0.875, 0.625, 0.375]
    assert table.label(train.user, train.item, train.value).tolist() == [-1, -1, 0, 0, 1, 1, 0, 0]


def test_dislikes_can_be_given():
    train = events([(1, i, r) for i, r in enumerate([10, 20, 30, 400], start=1)])
    table = rating_quantile_reward(train, one_bucket)
    disliked = np.array([False, True, False, False])
    assert table.label(train.user, train.item, train.value, disliked).tolist() == [0, -1, 0, 1]


def test_buckets_separate_and_small_ones_fall_back_to_the_user():
    bucket = np.array([0] + [0] * 4 + [1] * 3)

    def of(train):
        return bucket

    rows = [(1, i, r) for i, r in enumerate([1, 2, 3, 4, 5, 5, 5], start=1)]
    table = rating_quantile_reward(events(rows, 2, 7), of)
    # four events in bucket 0: (3 + .5) / 4; three in bucket 1: among all seven, (4 + 1.5) / 7
    q = table.quantile([1, 1], [4, 5], [4, 5])
    assert q.tolist() == pytest.approx([3.5 / 4, 5.5 / 7])


def test_events_of_unknown_users_are_ranked_among_all_users_of_the_bucket():
    bucket = np.array([0, 0, 0, 1, 2])
    rows = [(1, 1, 1), (2, 2, 3), (1, 3, 5)]
    table = rating_quantile_reward(events(rows, 3, 4), lambda train: bucket)
    assert table.quantile([3], [1], [3]).tolist() == [0.75]  # 1, 3: (1 + .5) / 2
    assert table.quantile([3], [4], [3]).tolist() == [0.5]  # nothing in bucket 2: 1, 3, 5
    assert table.quantile([3, 3], [1, 1], [9, 0.5]).tolist() == [1, 0]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=60))
def test_quantiles_equal_their_definition(rows):
    train = events(rows, 3, 6)
    bucket = np.array([0, 0, 0, 0, 1, 1, 2])
    table = rating_quantile_reward(train, lambda _: bucket)
    for user, item, value in rows + [(u, i, v) for u in (1, 2, 3) for i in (1, 6) for v in (2, 2.5)]:
        own = train.user == user
        same = bucket[train.item] == bucket[item]
        for chosen, least in ((own & same, 4), (own, 1), (same, 1), (own | True, 1)):
            if chosen.sum() >= least:
                values = train.value[chosen]
                break
        expected = ((values < value).sum() + 0.5 * (values == value).sum()) / len(values)
        assert table.quantile([user], [item], [value])[0] == pytest.approx(expected)


def test_wrong_bucket_tables_are_refused():
    with pytest.raises(ConfigError, match="do not fit"):
        rating_quantile_reward(events([(1, 1, 3)]), lambda train: np.zeros(3, dtype=np.int64))


def test_raw_rewards():
    assert raw_reward(np.array([1, 2, 3, 4, 5])).tolist() == [-1, -1, 0, 1, 1]


def test_session_labels_worked_by_hand():
    labels = session_labels(np.array([[1, 3, 4, 5, 5], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]]))
    assert labels[0].tolist() == pytest.approx([(0 + 2 + 3 + 4 + 4) / 20, 0.8, 0.6, 0.4])
    assert labels[1].tolist() == [0, 0, 0, 0]
    assert labels[2].tolist() == pytest.approx([0.2] * 4)


def test_good_sessions_need_four_of_five_and_the_users_mean():
    ratings = np.array([[3, 3, 3, 3, 1], [3, 3, 3, 2, 2], [5, 5, 5, 5, 1], [4, 4, 4, 3, 3]])
    assert good_sessions(ratings, np.array([2.6, 1, 4.3, np.float32(3.6)])).tolist() == [True, False, False, True]


def test_train_rewards_of_movielens(movielens_100k):
    data = load_interactions(movielens_100k / "canonical")
    split = LeaveTwoOut.load(movielens_100k / "sequences")
    train = train_events(data, split)
    assert len(train.user) == 98114
    labels = rating_quantile_reward(train).label(*train[:3])
    assert np.bincount(labels + 1).tolist() == [17058, 58190, 22866]
    # other ratings on validation and test events change no train label
    rating = data.rating.copy()
    last = np.cumsum(np.bincount(data.user)[1:]) - 1
    rating[last] = 6 - rating[last]
    rating[last - 1] = 6 - rating[last - 1]
    edited = train_events(data.edited(rating=rating), split)
    assert (rating_quantile_reward(edited).label(*edited[:3]) == labels).all()


def test_sequences_of_another_data_set_are_refused(movielens_100k):
    data = load_interactions(movielens_100k / "canonical")
    split = LeaveTwoOut.load(movielens_100k / "sequences")
    with pytest.raises(ConfigError, match="same data set"):
        train_events(data.edited(item=data.item[::-1].copy()), split)


def test_good_windows_of_movielens(movielens_100k):
    data = load_interactions(movielens_100k / "canonical")
    starts, good, total = data.user_starts(), 0, 0
    for user in range(1, data.n_users + 1):
        ratings = data.rating[starts[user] : starts[user + 1] - 10]
        windows = np.lib.stride_tricks.sliding_window_view(ratings, 5)
        good += int(good_sessions(windows, np.full(len(windows), ratings.mean())).sum())
        total += len(windows)
    assert (good, total) == (43970, 86798)
