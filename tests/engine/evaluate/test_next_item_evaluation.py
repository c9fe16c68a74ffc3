"""Full-catalogue evaluation of next-item models."""

import numpy as np
import pytest

from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import measure_next_item, rank_split, validation_metrics

# user 1 saw 1 2 3, then 4 (validation), then 5 (test); user 2 saw 1, then 2, then 3
DATA = LeaveTwoOut(
    2, 6, np.array([1, 2]), np.array([1, 2, 3, 1]), np.array([0, 3, 4]), np.array([4, 2]), np.array([5, 3]), "toy"
)


def by_item(split, positions):
    return np.tile(np.arange(7, 0, -1.0), (len(positions), 1))  # lower ids score higher


def test_history_is_excluded_and_grows_by_the_validation_item():
    ranks, tops = rank_split(by_item, DATA, "valid")
    assert ranks.tolist() == [1, 1]
    assert [[i for i in top if i] for top in tops.tolist()] == [[4, 5, 6], [2, 3, 4, 5, 6]]
    ranks, tops = rank_split(by_item, DATA, "test", chunk=1)
    assert ranks.tolist() == [1, 1]
    assert [[i for i in top if i] for top in tops.tolist()] == [[5, 6], [3, 4, 5, 6]]


def test_ties_rank_against_the_target():
    ranks, _ = rank_split(lambda split, positions: np.zeros((len(positions), 7)), DATA, "test")
    assert ranks.tolist() == [2, 4]  # candidates left: {5, 6} and {3, 4, 5, 6}


def test_metrics_and_contributions_by_hand():
    def upside_down(split, positions):
        return -by_item(split, positions)

    measured = measure_next_item(upside_down, DATA)
    assert measured.metrics["ndcg@10"] == pytest.approx((1 / np.log2(3) + 1 / np.log2(5)) / 2)
    assert measured.metrics["mrr"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert measured.units["ndcg@10"].ids == [1, 2]
    assert np.mean(measured.units["hit@10"].values) == measured.metrics["hit@10"] == 1.0
    assert validation_metrics(upside_down, DATA)["mrr"] == pytest.approx((1 / 3 + 1 / 5) / 2)


def test_further_cut_offs_and_metrics_of_the_lists():
    def upside_down(split, positions):
        return -by_item(split, positions)

    measured = measure_next_item(upside_down, DATA, at=(3,), also=lambda lists: {"first": lists.items[:, 0] / 2.0})
    assert measured.units["recall@3"].values == [1.0, 0.0]  # ranks 2 and 4
    assert measured.metrics["ndcg@3"] == pytest.approx(1 / np.log2(3) / 2)
    assert measured.units["first"].values == [3.0, 3.0]
