"""One order for a data set, whatever the file order, with ties broken by a hash that knows nothing."""

from __future__ import annotations

import random

import archives
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.interactions import canonical_tables, load_interactions, order_hash
from auto_research.data.readers import RawData

ratings = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(1, 5), st.integers(0, 3)),
    min_size=1,
    max_size=60,
    unique_by=lambda row: row[:2],
)


def raw_of(rows) -> RawData:
    raw = RawData()
    for user, item, rating, time in rows:
        raw.add(str(user), str(item), float(rating), time)
    return raw


def test_tie_hash_is_the_documented_text():
    expected = "514fa5304423b305bc55062f2f85d62b56fb9a373de13b9f72e0cc2932694cd5"
    assert order_hash("movielens-100k", "196", "242") == expected


@settings(max_examples=60, deadline=None)
@given(ratings, st.randoms(use_true_random=False))
def test_file_order_does_not_matter(rows, rng: random.Random):
    shuffled = list(rows)
    rng.shuffle(shuffled)
    first, second = canonical_tables(raw_of(rows), "toy"), canonical_tables(raw_of(shuffled), "toy")
    assert all(first[name].equals(second[name]) for name in first)


@settings(max_examples=60, deadline=None)
@given(ratings)
def test_rows_are_sorted_by_user_time_and_hash_and_none_is_lost(rows):
    tables = canonical_tables(raw_of(rows), "toy")
    user_id, item_id = tables["users"]["user_id"].to_pylist(), tables["items"]["item_id"].to_pylist()
    got = [
        (user_id[u - 1], time, order_hash("toy", user_id[u - 1], item_id[i - 1]), item_id[i - 1], rating)
        for u, i, rating, time in zip(*(c.to_pylist() for c in tables["ratings"].columns), strict=True)
    ]
    assert [row[:3] for row in got] == sorted(row[:3] for row in got)
    assert sorted((int(u), int(i), int(r), t) for u, t, _, i, r in got) == sorted(rows)


def test_ids_are_numbered_by_value_not_by_text():
    tables = canonical_tables(raw_of([(9, 9, 1, 0), (10, 10, 1, 0)]), "toy")
    assert tables["items"]["item_id"].to_pylist() == ["9", "10"]


def test_item_ids_inside_a_second_are_not_ascending_on_the_real_data(movielens_100k):
    data = load_interactions(movielens_100k / "canonical")
    same = (data.user[1:] == data.user[:-1]) & (data.timestamp[1:] == data.timestamp[:-1])
    ascending = (data.item[1:] > data.item[:-1])[same].mean()
    assert round(same.mean(), 3) == 0.506
    assert abs(ascending - 0.5) < 0.01


def test_real_data_has_the_known_size_and_dense_ids(movielens_100k):
    data = load_interactions(movielens_100k)
    assert (len(data), data.n_users, data.n_items) == (100_000, 943, 1682)
    assert np.array_equal(np.unique(data.item), np.arange(1, 1683))
    assert data.vocab == {"age": 8, "gender": 3, "occupation": 22, "zip": 12, "decade": 10}
    assert data.item_title[1] == "Toy Story"
    assert data.item_genres.shape == (1683, 19)
    assert (data.item_genres[1:].sum(axis=1) >= 1).all()
    assert np.bincount(data.item_decade)[[0, 9]].tolist() == [1, 1]


def test_edited_columns_leave_the_original_alone():
    data = archives.table_of([(1, 1, 3, 0), (1, 2, 4, 1), (1, 1, 5, 2)], [[1.0], [1.0]])
    changed = data.edited(rating=np.zeros(3, dtype=np.float32))
    assert data.rating.tolist() == [3, 4, 5]
    assert changed.rating.tolist() == [0, 0, 0]
