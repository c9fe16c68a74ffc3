"""Pairwise losses by hand, empty sets, and which pairs count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.blocks.pairwise_loss import all_pairs, at_most, label_pairs, logistic_pairs, margin_pairs


def test_losses_by_hand():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert logistic_pairs(a[:1], b[:1]).item() == pytest.approx(0.3133, abs=1e-4)
    assert logistic_pairs(a, b, torch.tensor([3.0, 1.0])).item() == pytest.approx((3 * 0.3133 + 2.1269) / 4, abs=1e-4)
    assert margin_pairs(a, b, 1.5).item() == pytest.approx((0.5 + 3.5) / 2)
    assert logistic_pairs(a[:0], b[:0]).item() == 0.0
    assert margin_pairs(a[:0], b[:0], weight=a[:0]).item() == 0.0


def test_all_pairs_by_hand_and_empty_sets_are_free():
    positive = torch.tensor([[1.0, 9.0], [1.0, 1.0], [0.0, 0.0]], requires_grad=True)
    negative = torch.tensor([[0.0, -torch.inf], [0.0, 0.0], [0.0, 0.0]], requires_grad=True)
    p_mask = torch.tensor([[True, False], [True, True], [False, False]])
    n_mask = torch.tensor([[True, False], [False, False], [True, True]])
    loss = all_pairs(positive, p_mask, negative, n_mask)
    assert loss.tolist() == [pytest.approx(0.3133, abs=1e-4), 0.0, 0.0]
    loss.sum().backward()
    assert (positive.grad[1:] == 0).all()
    assert positive.grad.isfinite().all()
    assert negative.grad.isfinite().all()


def test_pairs_stay_in_their_group_and_window():
    group = torch.tensor([1, 1, 1, 1, 2])
    like = torch.tensor([1, 0, 1, 0, 0])
    rating = torch.tensor([5, 3, 4, 3, 1])
    time = torch.tensor([0, 10, 86_399, 86_400, 0])
    better, worse = label_pairs(group, like, second=rating, time=time, within=86_400)
    found = set(zip(better.tolist(), worse.tolist(), strict=True))
    # rows 0 and 3 are a whole day apart; rows 1 and 3 have equal labels; row 4 is another user's
    assert found == {(0, 1), (2, 1), (2, 3), (0, 2)}
    assert set(zip(*(t.tolist() for t in label_pairs(group, like)), strict=True)) == {(0, 1), (0, 3), (2, 1), (2, 3)}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 5))
def test_at_most_keeps_as_many_as_allowed(groups, limit):
    group = torch.tensor(groups, dtype=torch.int64)
    kept = at_most(group, limit, torch.Generator().manual_seed(0))
    assert kept.tolist() == sorted(set(kept.tolist()))
    for g in set(groups):
        assert int((group[kept] == g).sum()) == min(limit, groups.count(g))


def test_the_choice_is_random_and_seeded():
    group = torch.zeros(100, dtype=torch.int64)
    draws = [at_most(group, 10, torch.Generator().manual_seed(s)).tolist() for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_no_rows_give_no_pairs():
    empty = torch.zeros(0, dtype=torch.int64)
    assert [t.tolist() for t in label_pairs(empty, empty)] == [[], []]
