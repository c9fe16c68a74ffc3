"""Evaluation of models that answer with lists."""

import numpy as np
import pytest

from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import measure_next_item
from auto_research.evaluate.next_list import (
    clean_lists,
    genre_entropy,
    measure_next_list,
    split_lists,
    validation_lists,
)
from auto_research.metrics.ranking import top_items

# user 1 saw 1 2 3, then 4 (validation), then 5 (test); user 2 saw 1, then 2, then 3
DATA = LeaveTwoOut(
    2, 30, np.array([1, 2]), np.array([1, 2, 3, 1]), np.array([0, 3, 4]), np.array([4, 2]), np.array([5, 3]), "toy"
)


def constant(*rows):
    lists = np.zeros((len(rows), 12), dtype=np.int64)
    for row, items in zip(lists, rows, strict=True):
        row[: len(items)] = items
    return lambda split, positions: lists[positions]


def test_metrics_by_hand():
    measured = measure_next_list(constant([9, 8, 5], [7, 6]), DATA, at=(2, 5))
    assert measured.metrics["ndcg@10"] == pytest.approx(1 / np.log2(4) / 2)
    assert measured.metrics["hit@10"] == 0.5
    assert measured.metrics["mrr"] == pytest.approx(1 / 3 / 2)
    assert measured.metrics["recall@2"] == 0.0
    assert measured.metrics["recall@5"] == 0.5
    assert measured.metrics["short_lists"] == 1.0
    assert measured.metrics["struck_items"] == 0.0
    assert measured.metrics["coverage@10"] == pytest.approx(5 / 30)
    assert measured.units["recall@5"].values == [1.0, 0.0]
    assert measured.units["ndcg@10"].ids == [1, 2]


def test_seen_and_repeated_items_are_struck_out_and_counted():
    kept, struck = clean_lists(np.array([[4, 9, 9, 0, 5]]), [np.array([4])])
    assert kept.tolist() == [[9, 5, 0, 0, 0]]
    assert struck == 2
    measured = measure_next_list(constant([4, 1, 5], [3]), DATA)
    assert measured.metrics["mrr"] == 1.0
    assert measured.metrics["struck_items"] == pytest.approx(2 / 24)


def test_validation_looks_at_its_own_targets_and_histories():
    lister = constant([3, 4], [9, 2])
    assert validation_lists(lister, DATA)["ndcg@10"] == pytest.approx((1 + 1 / np.log2(3)) / 2)
    assert validation_lists(lister, DATA, users=1)["ndcg@10"] == 1.0


def test_lists_of_a_scorer_measure_like_the_scorer():
    scores = np.random.default_rng(0).normal(size=(2, 31))

    def lister(split, positions):
        return top_items(scores[positions], [DATA.history(split, int(i)) for i in positions], 30)

    ours = measure_next_list(lister, DATA).metrics
    theirs = measure_next_item(lambda split, positions: scores[positions], DATA).metrics
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)


def test_a_list_holds_ten_slots_and_cut_offs_lie_inside():
    with pytest.raises(ValueError, match="10 are needed"):
        split_lists(lambda split, positions: np.zeros((len(positions), 5), dtype=np.int64), DATA, "test")
    with pytest.raises(ValueError, match="recall@50"):
        measure_next_list(constant([1], [1]), DATA, at=(50,))


def test_genre_entropy_by_hand_and_more_metrics_of_lists():
    genres = np.zeros((31, 2))
    genres[[5, 6], 0] = genres[[6, 7], 1] = 1
    found = genre_entropy(np.array([[5, 0], [5, 7], [5, 6], [9, 0]]), genres)
    quarter = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    np.testing.assert_allclose(found, [0, np.log(2), quarter, 0], atol=1e-12)
    measured = measure_next_list(
        constant([5], [5, 7]), DATA, also=lambda lists: {"genre_entropy": genre_entropy(lists.items, genres)}
    )
    assert measured.metrics["genre_entropy"] == pytest.approx(np.log(2) / 2)
    assert measured.units["genre_entropy"].values == pytest.approx([0, np.log(2)])
