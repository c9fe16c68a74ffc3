"""Liked and other sequences: windows by hand, strict past, gaps, and order across the two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.behaviours import FIRST_GAP, BehaviourTable, interleave
from auto_research.data.interactions import Interactions
from auto_research.data.requests import RequestTable


def interactions(users: list[list[tuple[int, int, int]]], items: int = 12) -> Interactions:
    """Users as lists of (item, rating, second), in canonical order."""
    rows = [(u, *row) for u, events in enumerate(users, start=1) for row in events]
    user, item, rating, time = (np.array(column) for column in zip(*rows, strict=True))
    return Interactions(
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        rating=rating.astype(np.float32),
        timestamp=time.astype(np.int64),
        n_users=len(users),
        n_items=items,
        user_fields={},
        item_genres=np.zeros((items + 1, 2), dtype=np.float32),
        item_decade=np.ones(items + 1, dtype=np.int64),
        item_title=[""] * (items + 1),
        genre_names=["a", "b"],
        vocab={"decade": 2},
        dataset="toy",
    )


HAND = interactions(
    [
        [(9, 5, 7)],  # user 1 only shifts the rows
        [(1, 5, 100), (2, 3, 100), (3, 4, 103), (4, 1, 110), (5, 4, 110), (6, 5, 110), (7, 2, 140)],
    ]
)


def test_windows_by_hand():
    table = BehaviourTable.build(HAND)
    last = int(np.flatnonzero((table.request_user == 2) & (table.request_time == 140))[0])
    batch = table.batch([last], history=3)
    liked, other, everything = batch.window("liked"), batch.window("other"), batch.window("hist")
    assert liked.item.tolist() == [[3, 5, 6]]  # the newest three of 1, 3, 5, 6
    assert liked.rating.tolist() == [[4, 4, 5]]
    assert liked.gap.tolist() == [[2, 0, 0]]  # 3 s after the previous rating of either sign; same second
    assert liked.age.tolist() == [[5, 4, 4]]  # 37, 30 and 30 seconds before the request
    assert other.item.tolist() == [[0, 2, 4]]
    assert other.mask.tolist() == [[False, True, True]]
    assert other.row.tolist() == [[-1, 2, 4]]
    assert other.gap.tolist() == [[0, 0, 3]]  # 110 - 103 = 7 seconds
    assert everything.item.tolist() == [[4, 5, 6]] == batch.hist_item.tolist()
    assert everything.gap.tolist() == [[3, 0, 0]]


def test_the_first_rating_of_a_user_has_the_last_bucket():
    table = BehaviourTable.build(HAND)
    request = int(np.flatnonzero((table.request_user == 2) & (table.request_time == 103))[0])
    batch = table.score_batch(request, [8, 9], history=2)
    assert batch.window("liked").gap.tolist() == [[0, FIRST_GAP]]
    assert batch.window("other").item.tolist() == [[0, 2]]
    assert batch.pairs() == 2


def test_a_first_request_has_empty_sequences():
    table = BehaviourTable.build(HAND)
    request = int(np.flatnonzero((table.request_user == 2) & (table.request_time == 100))[0])
    batch = table.score_batch(request, [8], history=2)
    assert not batch.liked_mask.any()
    assert not batch.other_mask.any()
    assert batch.liked_item.tolist() == [[0, 0]]


def test_interleaved_sequences_are_the_history():
    table = BehaviourTable.build(HAND)
    request = int(np.flatnonzero((table.request_user == 2) & (table.request_time == 140))[0])
    batch = table.batch([request], history=5)
    liked, other = batch.window("liked"), batch.window("other")
    order, mask = interleave(liked, other)
    items = torch.cat([liked.item, other.item], dim=1).gather(1, order)
    assert items.tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 5, 6]]
    assert mask.tolist() == [[False] * 4 + [True] * 6]


events = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(0, 60)), min_size=1, max_size=25).map(
    lambda rows: sorted(rows, key=lambda row: row[2])
)


@settings(max_examples=25, deadline=None)
@given(users=st.lists(events, min_size=1, max_size=4), length=st.integers(1, 6))
def test_windows_are_the_newest_strictly_earlier_events_of_their_sign(users, length):
    data = interactions(users)
    table = BehaviourTable.build(data)
    batch = table.batch(np.arange(table.n_requests), history=length)
    for r in range(table.n_requests):
        past = (data.user == table.request_user[r]) & (data.timestamp < table.request_time[r])
        for name, sign in (("liked", data.rating >= 4), ("other", data.rating < 4)):
            window = batch.window(name)
            expected = data.item[past & sign][-length:].tolist()
            assert window.item[r].tolist() == [0] * (length - len(expected)) + expected
            assert int(window.mask[r].sum()) == len(expected)


def test_edits_at_or_after_the_request_change_nothing():
    table = BehaviourTable.build(HAND)
    request = int(np.flatnonzero((table.request_user == 2) & (table.request_time == 110))[0])
    rating = HAND.rating.copy()
    rating[HAND.timestamp >= 110] = 6 - rating[HAND.timestamp >= 110]
    edited = table.edited(rating=rating)
    assert isinstance(edited, BehaviourTable)
    before, after = (t.score_batch(request, [8], history=4) for t in (table, edited))
    for name in ("liked", "other", "hist"):
        for one, two in zip(before.window(name), after.window(name), strict=True):
            assert torch.equal(one, two)


def test_real_table_keeps_its_restriction_and_its_own_columns(movielens_100k):
    plain = RequestTable.load(movielens_100k / "requests").restrict(20)
    table = BehaviourTable.of(plain)
    requests = table.requests("valid")
    assert np.array_equal(requests, plain.requests("valid"))
    one, two = plain.batch(requests, history=10), table.batch(requests, history=10).to("cpu")
    assert torch.equal(one.hist_item, two.hist_item)
    assert torch.equal(one.cross, two.cross)
    assert torch.equal(two.hist_mask, two.hist_row >= 0)
    assert bool((two.liked_rating[two.liked_mask] >= 4).all())
    assert bool((two.other_rating[two.other_mask] <= 3).all())
    assert len(table.restrict(5).requests("valid")) < len(requests)


def test_an_unknown_window_is_refused():
    with pytest.raises(AttributeError):
        BehaviourTable.build(HAND).batch([0], history=1).window("disliked")
