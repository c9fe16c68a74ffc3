"""Ranking metrics against hand cases and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.metrics import label_ranking_average_precision_score, ndcg_score, top_k_accuracy_score

from auto_research.metrics.ranking import candidate_mask, rank_of_target, ranking_metrics, top_items

NONE = [np.zeros(0, dtype=np.int64)]


def test_rank_counts_better_candidates_only():
    scores = np.array([[9.0, 0.1, 0.5, 0.3, 0.9]])
    assert rank_of_target(scores, np.array([3]), NONE).tolist() == [3]
    assert rank_of_target(scores, np.array([3]), [np.array([4])]).tolist() == [2]


def test_ties_and_nan_rank_above_the_target():
    constant = np.zeros((1, 6))
    assert rank_of_target(constant, np.array([2]), NONE).tolist() == [5]
    assert rank_of_target(constant, np.array([2]), [np.array([1, 5])]).tolist() == [3]
    assert rank_of_target(np.array([[0, 1, 2, np.nan, 0]]), np.array([2]), NONE).tolist() == [2]
    assert rank_of_target(np.full((1, 6), np.nan), np.array([2]), NONE).tolist() == [5]


def test_target_counts_even_when_it_is_excluded():
    assert rank_of_target(np.array([[0.0, 3.0, 2.0, 1.0]]), np.array([2]), [np.array([2])]).tolist() == [2]


def test_top_items_skip_padding_and_excluded_and_break_ties_by_id():
    scores = np.array([[9.0, 1.0, 3.0, 2.0, 3.0, 3.0], [9.0, 0.0, np.nan, -np.inf, 5.0, 4.0]])
    excluded = [np.array([4]), np.array([5])]
    assert top_items(scores, excluded, k=3).tolist() == [[2, 5, 3], [4, 1, 0]]


def test_metrics_by_hand():
    ranks = np.array([1, 3, 11])
    top = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 0, 0, 0, 0, 0, 0, 0, 0], [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    metrics, per_user = ranking_metrics(ranks, top, np.array([1, 2]), 20)
    assert metrics["ndcg@10"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert metrics["hit@10"] == pytest.approx(2 / 3)
    assert metrics["mrr"] == pytest.approx((1 + 1 / 3 + 1 / 11) / 3)
    assert metrics["head_share@10"] == pytest.approx((0.2 + 1.0 + 0.1) / 3)
    assert metrics["coverage@10"] == pytest.approx(11 / 20)
    assert per_user["ndcg@10"].tolist() == [1.0, 0.5, 0.0]


def random_case(seed: int, users: int = 40, items: int = 60):
    rng = np.random.default_rng(seed)
    scores = rng.permuted(np.tile(np.arange(items + 1.0), (users, 1)), axis=1)
    return scores, rng.integers(1, items + 1, users), rng


def test_ndcg_hit_and_mrr_equal_scikit_learn():
    scores, target, _ = random_case(0)
    excluded = [NONE[0]] * len(scores)
    ranks = rank_of_target(scores, target, excluded)
    metrics, per_user = ranking_metrics(ranks, top_items(scores, excluded), np.array([1]), 60)
    truth = np.eye(61)[target][:, 1:]
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(truth, scores[:, 1:], k=10))
    assert metrics["hit@10"] == pytest.approx(
        top_k_accuracy_score(target, scores[:, 1:], k=10, labels=np.arange(1, 61))
    )
    assert metrics["mrr"] == pytest.approx(label_ranking_average_precision_score(truth, scores[:, 1:]))
    single = [ndcg_score(truth[i : i + 1], scores[i : i + 1, 1:], k=10) for i in range(5)]
    assert per_user["ndcg@10"][:5].tolist() == pytest.approx(single)


def test_exclusion_equals_scikit_learn_on_the_remaining_catalogue():
    scores, target, rng = random_case(1)
    excluded = [rng.choice(np.setdiff1d(np.arange(1, 61), [t]), 15, replace=False) for t in target]
    ranks = rank_of_target(scores, target, excluded)
    for user in range(len(scores)):
        kept = np.setdiff1d(np.arange(1, 61), excluded[user])
        truth = (kept == target[user]).astype(float)
        expected = ndcg_score(truth[None], scores[user, kept][None], k=10)
        assert ranking_metrics(ranks, np.ones((40, 10), int), NONE[0], 60)[1]["ndcg@10"][user] == pytest.approx(
            expected
        )


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float64, (3, 8), elements=st.integers(0, 3).map(float)), st.data())
def test_pessimistic_rank_is_the_worst_over_all_tie_breaks(scores, data):
    target = np.array(data.draw(st.lists(st.integers(1, 7), min_size=3, max_size=3)))
    excluded = [np.array(data.draw(st.lists(st.integers(1, 7), max_size=4)), dtype=np.int64) for _ in range(3)]
    ranks = rank_of_target(scores, target, excluded)
    for user in range(3):
        others = [i for i in range(1, 8) if i not in excluded[user] and i != target[user]]
        assert ranks[user] == 1 + sum(scores[user, i] >= scores[user, target[user]] for i in others)


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float64, (2, 12), elements=st.integers(0, 4).map(float)), st.integers(1, 11))
def test_top_items_equal_a_full_stable_sort(scores, k):
    expected = 1 + np.argsort(-scores[:, 1:], axis=1, kind="stable")[:, :k]
    assert np.array_equal(top_items(scores, [NONE[0]] * 2, k), expected)


def test_candidate_mask_marks_padding_and_excluded():
    mask = candidate_mask((2, 4), [np.array([1, 3]), np.zeros(0)])
    assert mask.tolist() == [[False, False, True, False], [False, True, True, True]]
