"""The request table: the protocol's counts, features worked by hand, and no look into the future."""

from __future__ import annotations

import math
from dataclasses import fields

import archives
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.prefix import log2_bucket
from auto_research.data.request_index import HISTORY_ONLY
from auto_research.data.requests import RequestTable
from auto_research.runtime.errors import ConfigError

ODD, EVEN = [1.0, 0.0], [0.0, 1.0]
GENRES = [ODD if item % 2 else EVEN for item in range(1, 11)]
USER_1 = [(1, 5, 10), (2, 3, 20), (3, 4, 30), (4, 1, 40), (5, 5, 50), (6, 4, 60), (7, 2, 60), (8, 5, 70), (9, 4, 80)]
USER_1 += [(10, 3, 90)]
USER_2 = [(6, 5, 55), (1, 1, 56), (2, 1, 57), (3, 1, 58), (4, 1, 59), (7, 5, 60), (9, 5, 61), (10, 5, 62)]
USER_2 += [(5, 5, 63), (8, 5, 65)]
AT_60 = 5  # sixth request of user 1: items 6 and 7, five earlier ratings


@pytest.fixture(scope="module")
def toy() -> RequestTable:
    rows = [(user, *row) for user, part in ((1, USER_1), (2, USER_2)) for row in part]
    return RequestTable.build(archives.table_of(rows, GENRES))


@pytest.fixture(scope="module")
def real(movielens_100k) -> RequestTable:
    return RequestTable.load(movielens_100k / "requests")


def equal(a, b, skip: tuple[str, ...] = ()) -> list[str]:
    """Names of fields in which two batches differ bitwise."""
    names = [f.name for f in fields(a) if f.name not in skip]
    return [name for name in names if not torch.equal(getattr(a, name), getattr(b, name))]


def test_protocol_counts_on_the_real_data(real):
    sizes = real.index.stop - real.index.start
    assert real.n_requests == 49_439
    assert (round(sizes.mean(), 2), sizes.max()) == (2.02, 10)
    assert [real.rows(split) for split in ("train", "valid", "test")] == [75_993, 9_857, 8_649]
    assert len(real.requests("train")) == 36_087
    test = real.batch(real.requests("test"), history=1)
    user, like = test.user_of_pair.numpy(), test.like.numpy()
    rate = np.bincount(user, like) / np.maximum(np.bincount(user), 1)
    assert len(np.unique(user)) == 834
    assert ((rate > 0) & (rate < 1)).sum() == 586
    assert len(real.catalogue_tasks("test")) == 730


def test_vocabulary_of_the_real_data(real):
    assert real.vocab == {
        "user_id": 944,
        "age": 8,
        "gender": 3,
        "occupation": 22,
        "zip": 12,
        "hour": 24,
        "weekday": 7,
        "gap": 32,
        "item": 1683,
        "decade": 10,
        "hist_item": 1683,
        "hist_rating": 6,
        "hist_age": 32,
    }
    batch = real.batch(np.arange(real.n_requests), history=2)
    for name, size in real.vocab.items():
        assert 0 <= int(getattr(batch, name).min()) <= int(getattr(batch, name).max()) < size, name
    assert batch.user_stats.shape[1] == 22


def test_splits_by_fraction_of_earlier_ratings(toy):
    assert toy.index.split[:9].tolist() == [HISTORY_ONLY] * 5 + [0, 0, 1, 2]
    assert toy.index.train_row[:10].tolist() == [True] * 8 + [False] * 2


def test_user_statistics_by_hand(toy):
    batch = toy.batch([AT_60], history=3)
    expected = [math.log(6), 18 / 5, 4 / 7, 4 / 5, 1 / 4]
    assert batch.user_stats[0].tolist() == pytest.approx(expected)
    first = toy.batch([0], history=3)
    assert first.user_stats[0].tolist() == pytest.approx([0, 0, 0.5, 0.5, 0.5])
    assert not first.hist_mask.any()


def test_candidate_statistics_by_hand(toy):
    batch = toy.batch([AT_60], history=3)
    assert batch.item.tolist() == [6, 7]
    # item 6 was liked by user 2 at 55; item 7 was rated by user 2 at the very same second, which does not count
    assert batch.popularity.flatten().tolist() == pytest.approx([math.log(2), 2 / 3, 0.0, 0.5])
    assert batch.cross.flatten().tolist() == pytest.approx([1 / 4, 0.0, 4 / 5, 1.0])
    assert batch.like.tolist() == [1, 0]
    assert batch.love.tolist() == [0, 0]
    assert batch.engage.tolist() == [1, 1]
    assert batch.rated.tolist() == [True, True]


def test_popularity_counts_train_rows_only(toy):
    # user 2 rated item 8 at 65, but in its test part; user 1 asks at 70
    assert toy.score_batch(AT_60 + 1, [8], history=1).popularity[0].tolist() == pytest.approx([0.0, 0.5])


def test_history_and_context_by_hand(toy):
    batch = toy.batch([AT_60], history=7)
    assert batch.hist_item.tolist() == [[0, 0, 1, 2, 3, 4, 5]]
    assert batch.hist_rating.tolist() == [[0, 0, 5, 3, 4, 1, 5]]
    assert batch.hist_age.tolist() == [[0, 0, 5, 5, 4, 4, 3]]  # floor log2 of 51, 41, 31, 21, 11
    assert batch.hist_mask.tolist() == [[False, False, True, True, True, True, True]]
    assert (batch.hour.item(), batch.weekday.item(), batch.gap.item()) == (0, 3, 3)
    assert toy.batch([AT_60], history=3).hist_item.tolist() == [[3, 4, 5]]


def test_negatives_are_drawn_from_items_without_a_train_rating(toy):
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(20):
        batch = toy.batch([AT_60, AT_60 + 1], history=2, negatives=3, rng=rng)
        assert batch.request_of.tolist() == [0] * 8 + [1] * 4
        assert batch.rated.tolist() == [True] * 2 + [False] * 6 + [True] + [False] * 3
        assert batch.engage.tolist() == batch.rated.float().tolist()
        assert not batch.like[~batch.rated].any()
        drawn += batch.item[~batch.rated].tolist()
    assert set(drawn) == {9, 10}
    assert 0.4 < np.mean(np.array(drawn) == 9) < 0.6


def test_negatives_carry_their_own_features_as_of_the_request(toy):
    batch = toy.batch([AT_60 + 1], history=2, negatives=3, rng=np.random.default_rng(3))
    single = toy.score_batch(AT_60 + 1, batch.item.numpy(), history=2)
    assert equal(batch, single, skip=("engage", "like", "love", "rated")) == []
    # user 2 loved item 9 at 61 and item 10 at 62, both train rows
    assert batch.popularity[1:].tolist() == [pytest.approx([math.log(2), 2 / 3])] * 3


def test_negatives_need_a_generator(toy):
    with pytest.raises(ConfigError, match="generator"):
        toy.batch([AT_60], history=2, negatives=1)


def test_negatives_are_reproducible_and_uniform_on_the_real_data(real):
    chosen = real.requests("train")[:2000]
    a = real.batch(chosen, history=1, negatives=3, rng=np.random.default_rng(7))
    b = real.batch(chosen, history=1, negatives=3, rng=np.random.default_rng(7))
    assert equal(a, b) == []
    train = real.train_rows()
    data = real.interactions
    rated = set(zip(data.user[train].tolist(), data.item[train].tolist(), strict=True))
    negative = ~a.rated
    pairs = list(zip(a.user_of_pair[negative].tolist(), a.item[negative].tolist(), strict=True))
    assert not rated & set(pairs)
    assert 1 <= int(a.item.min()) <= int(a.item.max()) <= 1682
    user = pairs[0][0]
    free = 1682 - sum(u == user for u, _ in rated)
    many = real._unrated.draw(np.full(40 * free, user), np.random.default_rng(1))
    counts = np.bincount(many, minlength=1683)
    assert (counts > 0).sum() == free
    assert counts.max() < 40 + 6 * math.sqrt(40)


@pytest.mark.parametrize("seed", range(3))
def test_future_ratings_change_nothing_on_the_real_data(real, seed):
    rng = np.random.default_rng(seed)
    request = int(rng.choice(real.requests("train")[10_000:]))
    data, time = real.interactions, real.request_time[request]
    future = data.timestamp >= time
    item, rating = data.item.copy(), data.rating.copy()
    item[future] = rng.integers(1, data.n_items + 1, future.sum())
    rating[future] = rng.integers(1, 6, future.sum())
    assert future.sum() > 1000
    edited = real.edited(item=item, rating=rating)
    items = np.arange(1, data.n_items + 1)
    assert equal(real.score_batch(request, items, history=50), edited.score_batch(request, items, history=50)) == []
    # the same test sees a change in the past
    past = np.flatnonzero((data.user == real.request_user[request]) & ~future)[-1]
    rating = data.rating.copy()
    rating[past] = 6 - rating[past] if rating[past] != 3 else 5
    changed = equal(
        real.score_batch(request, items, history=50),
        real.edited(rating=rating).score_batch(request, items, history=50),
    )
    assert "user_stats" in changed
    assert "hist_rating" in changed


def test_a_request_does_not_see_its_own_ratings(real):
    request = int(real.requests("valid")[100])
    rows = slice(int(real.index.start[request]), int(real.index.stop[request]))
    rating = real.interactions.rating.copy()
    rating[rows] = np.where(rating[rows] >= 4, 1, 5)
    before, after = real.batch([request], history=50), real.edited(rating=rating).batch([request], history=50)
    assert equal(before, after, skip=("like", "love")) == []
    assert torch.equal(before.like, 1 - after.like)


def slow_features(table: RequestTable, request: int, item: int) -> dict[str, list[float]]:
    """The card's definitions, written with loops over all rows."""
    data = table.interactions
    user, time = int(table.request_user[request]), int(table.request_time[request])
    owned = [k for k in range(len(data)) if data.user[k] == user and data.timestamp[k] < time]
    genres = data.item_genres.astype(float)
    liked = [k for k in owned if data.rating[k] >= 4]
    seen_genre = sum((genres[data.item[k]] for k in owned), np.zeros(genres.shape[1]))
    liked_genre = sum((genres[data.item[k]] for k in liked), np.zeros(genres.shape[1]))
    rate = (liked_genre + 1) / (seen_genre + 2)
    mean = sum(float(data.rating[k]) for k in owned) / len(owned) if owned else 0.0
    others = [k for k in np.flatnonzero((data.item == item) & table.index.train_row) if data.timestamp[k] < time]
    likes = sum(data.rating[k] >= 4 for k in others)
    profile, candidate = liked_genre / max(len(liked), 1), genres[item]
    norm = np.linalg.norm(profile) * np.linalg.norm(candidate)
    return {
        "user_stats": [math.log1p(len(owned)), mean, (len(liked) + 1) / (len(owned) + 2), *rate],
        "popularity": [math.log1p(len(others)), (likes + 1) / (len(others) + 2)],
        "cross": [float(rate @ candidate), float(profile @ candidate / norm) if norm > 0 else 0.0],
    }


small_rows = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 12)),
    min_size=8,
    max_size=50,
)


@settings(max_examples=40, deadline=None)
@given(small_rows, st.data())
def test_vectorised_features_equal_loops_over_all_rows(rows, data):
    table = RequestTable.build(archives.table_of([*rows, (3, 5, 3, 13)], [ODD, EVEN, [1.0, 1.0], [0.0, 0.0], ODD]))
    request = data.draw(st.integers(0, table.n_requests - 1))
    item = data.draw(st.integers(1, 5))
    batch = table.score_batch(request, [item], history=4)
    for name, expected in slow_features(table, request, item).items():
        assert getattr(batch, name)[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7), name


@settings(max_examples=60, deadline=None)
@given(small_rows)
def test_requests_partition_rows_and_history_is_strictly_earlier(rows):
    table = RequestTable.build(archives.table_of([*rows, (3, 5, 3, 13)], [ODD] * 5))
    data, index = table.interactions, table.index
    assert index.start[0] == 0
    assert index.stop[-1] == len(data)
    assert np.array_equal(index.start[1:], index.stop[:-1])
    keys = list(zip(table.request_user.tolist(), table.request_time.tolist(), strict=True))
    assert len(set(keys)) == len(keys)
    batch = table.batch(np.arange(table.n_requests), history=6)
    for request, (user, time) in enumerate(keys):
        earlier = data.item[(data.user == user) & (data.timestamp < time)][-6:]
        assert batch.hist_item[request][batch.hist_mask[request]].tolist() == earlier.tolist()
    total = np.bincount(data.user, minlength=4)
    for request in range(table.n_requests):
        before = int(index.start[request] - index.first[request])
        share = before / total[table.request_user[request]]
        expected = HISTORY_ONLY if before < 5 else 0 if share < 0.8 else 1 if share < 0.9 else 2
        assert index.split[request] == expected


def test_prepared_index_equals_a_fresh_build(real):
    fresh = RequestTable.build(real.interactions)
    for f in fields(fresh.index):
        assert np.array_equal(getattr(real.index, f.name), getattr(fresh.index, f.name)), f.name


def test_catalogue_tasks_take_the_first_liked_item_and_exclude_every_earlier_one(real):
    tasks = real.catalogue_tasks("test")
    data = real.interactions
    for i in (0, 100, 729):
        user, time = tasks.user[i], real.request_time[tasks.request[i]]
        rows = real.index
        test = np.flatnonzero((real.request_user == user) & (rows.split == 2))
        liked = [k for r in test for k in range(rows.start[r], rows.stop[r]) if data.rating[k] >= 4]
        assert tasks.target[i] == data.item[liked[0]]
        assert data.timestamp[liked[0]] == time
        earlier = data.item[(data.user == user) & (data.timestamp < time)]
        assert np.array_equal(tasks.excluded[i], np.unique(earlier))
        assert len(tasks.excluded[i]) > 15
    some = real.catalogue_tasks("test", users=60)
    assert len(some) == 60
    assert set(some.user) <= set(tasks.user)


def test_restrict_takes_fewer_requests_with_unchanged_features(real):
    small = real.restrict(120, test_rows=300)
    users = np.unique(real.request_user[small.requests("train")])
    assert len(users) <= 120
    assert set(np.unique(small.request_user[small.requests("valid")])) <= set(users)
    assert 300 <= small.rows("test") < 450
    assert len(real.requests("train")) == 36_087
    assert small.vocab == real.vocab
    chosen = small.requests("train")[:50]
    assert equal(small.batch(chosen, history=20), real.batch(chosen, history=20)) == []


def test_unknown_split_is_refused(real):
    with pytest.raises(ConfigError, match="validation"):
        real.requests("validation")


def test_log2_buckets_at_their_borders():
    seconds = np.array([0, 1, 2, 3, 6, 7, 2**30 - 1, 2**31 - 2, 2**31 - 1, 2**40])
    assert log2_bucket(seconds).tolist() == [0, 1, 1, 2, 2, 3, 30, 30, 31, 31]
