"""k-means tokenizers: worked examples, optimality of the result, capacities, empty clusters, other processes."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import auto_research.blocks.residual_kmeans as module
from auto_research.blocks.residual_kmeans import (
    code_statistics,
    kmeans,
    mutual_information,
    nearest_codes,
    rq_kmeans,
)
from auto_research.runtime.errors import ConfigError

LINE = np.array([[0.0], [1], [2], [3], [10], [11]])


def clouds(items=300, width=6, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((9, width)) * 5)[rng.integers(9, size=items)] + rng.standard_normal((items, width))


def within(x, code, centroids):
    return float(((x - centroids[code]) ** 2).sum())


def test_balanced_worked_example():
    first = kmeans(LINE, 2, balanced=True, start=np.array([[0.0], [10.0]]), rounds=1)
    assert first.code.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.centroids.ravel().tolist() == [1, 8]
    assert kmeans(LINE, 2, balanced=True, start=np.array([[0.0], [10.0]])).code.tolist() == [0, 0, 0, 1, 1, 1]


def test_plain_worked_example():
    found = kmeans(LINE, 2, start=np.array([[0.0], [10.0]]))
    assert found.code.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.centroids.ravel().tolist() == [1.5, 10.5]
    assert found.rounds == 2


def test_balanced_takes_clusters_in_index_order_and_ties_by_row():
    # capacity 2; all rows are as far from both centroids
    x = np.array([[0.0, 1], [0, -1], [0, 2], [0, -2]])
    found = kmeans(x, 2, balanced=True, start=np.array([[-1.0, 0], [1.0, 0]]), rounds=1)
    assert found.code.tolist() == [0, 0, 1, 1]
    same = kmeans(np.ones((5, 2)), 2, balanced=True, start=np.array([[0.0, 0], [9.0, 9]]), rounds=1)
    assert same.code.tolist() == [0, 0, 0, 1, 1]


def test_balanced_last_clusters_may_be_short_or_empty_and_keep_their_centroid():
    # 9 rows, 4 clusters: capacity 3, sizes 3 3 3 0
    start = np.array([[0.0], [3], [6], [77]])
    found = kmeans(np.arange(9.0)[:, None], 4, balanced=True, start=start)
    assert np.bincount(found.code, minlength=4).tolist() == [3, 3, 3, 0]
    assert found.centroids[3, 0] == 77


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 99), st.integers(1, 6))
def test_balanced_clusters_are_full_in_order(items, size, seed, distinct):
    x = np.random.default_rng(seed).integers(0, distinct, (items, 2)).astype(float)
    found = kmeans(x, size, balanced=True, seed=seed, rounds=5)
    capacity = math.ceil(items / size)
    expected = [min(capacity, max(0, items - k * capacity)) for k in range(size)]
    assert np.bincount(found.code, minlength=size).tolist() == expected
    for cluster in np.flatnonzero(expected):
        assert np.allclose(found.centroids[cluster], x[found.code == cluster].mean(axis=0), atol=1e-5)


def test_balanced_pass_equals_its_definition():
    x = clouds(53, 3)
    start = x[[5, 1, 30, 44]]
    free, expected = list(range(53)), np.empty(53, dtype=int)
    for cluster, centroid in enumerate(start):
        near = sorted(free, key=lambda i: (((x[i] - centroid) ** 2).sum(), i))[:14]
        expected[near] = cluster
        free = [i for i in free if i not in near]
    assert kmeans(x, 4, balanced=True, start=start, rounds=1).code.tolist() == expected.tolist()


def test_an_empty_cluster_moves_to_the_farthest_row():
    # the second centroid attracts nothing; the farthest row from its centroid is 11
    found = kmeans(LINE, 2, start=np.array([[0.0], [1000.0]]), rounds=1)
    assert found.centroids.ravel().tolist() == [3.2000000476837158, 11]


@settings(max_examples=40)
@given(st.integers(0, 99), st.integers(2, 40))
def test_no_code_is_empty_while_there_are_distinct_rows(seed, size):
    x = np.random.default_rng(seed).standard_normal((40, 2))
    found = kmeans(x, size, seed=seed)
    assert len(np.unique(found.code)) == size


def test_more_clusters_than_distinct_rows():
    x = np.repeat(np.eye(3), 4, axis=0)
    found = kmeans(x, 8, seed=0)
    assert len(np.unique(found.code)) == 3
    assert within(x, found.code, found.centroids) == 0
    assert np.isfinite(found.centroids).all()


def test_the_result_is_a_fixed_point_of_lloyd():
    x = clouds()
    found = kmeans(x, 9, seed=1)
    distance = ((x[:, None] - found.centroids[None]) ** 2).sum(2)
    assert (found.code == distance.argmin(1)).all()
    for cluster in range(9):
        assert np.allclose(found.centroids[cluster], x[found.code == cluster].mean(0), atol=1e-5)


def test_the_incremental_means_equal_fresh_ones(monkeypatch):
    x = clouds(3000)
    usual = kmeans(x, 40, seed=3)
    monkeypatch.setattr(module, "CHUNK", 7)
    chunked = kmeans(x, 40, seed=3)
    assert usual.rounds > 5
    assert (usual.code == chunked.code).all()
    assert np.allclose(usual.centroids, chunked.centroids, atol=1e-6)


def test_the_start_spreads_over_separate_clouds():
    rng = np.random.default_rng(0)
    centres = rng.permutation(16)[:, None] * np.array([[100.0, 0]])
    x = np.repeat(centres, 30, axis=0) + rng.standard_normal((480, 2)) * 0.01
    for seed in range(5):
        found = kmeans(x, 16, seed=seed, rounds=1)
        assert len(np.unique(np.round(found.centroids[:, 0] / 100))) == 16


def test_codes_are_nearest_entries_of_the_returned_books():
    x = clouds()
    found = rq_kmeans(x, [8, 4, 2], seed=0)
    assert found.codes.shape == (300, 3)
    assert [book.shape for book in found.books] == [(8, 6), (4, 6), (2, 6)]
    residual = x.copy()
    for level, book in enumerate(found.books):
        assert (found.codes[:, level] == ((residual[:, None] - book[None]) ** 2).sum(2).argmin(1)).all()
        residual -= book[found.codes[:, level]]
        assert found.residual[level] == pytest.approx((residual**2).sum(1).mean())
    assert (nearest_codes(x, found.books) == found.codes).all()
    assert found.residual == sorted(found.residual, reverse=True)


def test_large_inputs_are_worked_on_in_single_precision_to_the_same_codes(monkeypatch):
    x = clouds().astype(np.float32)
    double = rq_kmeans(x, [9, 4], seed=0)
    monkeypatch.setattr(module, "DOUBLE_ELEMENTS", 0)
    single = rq_kmeans(x, [9, 4], seed=0)
    assert (double.codes == single.codes).all()


def test_a_large_start_is_drawn_from_a_sample(monkeypatch):
    x = clouds(2000)
    monkeypatch.setattr(module, "START_ROWS", 10)
    found = kmeans(x, 9, seed=0)
    assert len(np.unique(found.code)) == 9


def test_input_is_not_changed_and_seeds_matter():
    x = clouds()
    before = x.copy()
    first = rq_kmeans(x, [8, 8], seed=0)
    assert (x == before).all()
    assert (first.codes == rq_kmeans(x, [8, 8], seed=0).codes).all()
    assert (first.codes != rq_kmeans(x, [8, 8], seed=1).codes).any()


@pytest.mark.parametrize("balanced", [False, True])
def test_codes_are_the_same_in_another_process(balanced):
    script = (
        "import sys, hashlib, numpy as np; sys.path.insert(0, sys.argv[1]);"
        "from test_residual_kmeans import clouds; from auto_research.blocks.residual_kmeans import rq_kmeans;"
        f"c = rq_kmeans(clouds(), [16, 8], balanced={balanced}, seed=7).codes;"
        "print(hashlib.sha256(c.tobytes()).hexdigest())"
    )
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    codes = rq_kmeans(clouds(), [16, 8], balanced=balanced, seed=7).codes
    assert done.stdout.strip() == hashlib.sha256(codes.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("x", "sizes"),
    [(np.zeros((0, 3)), [2]), (np.zeros(3), [2]), (np.array([[np.nan]]), [2]), (np.ones((3, 1)), []), (LINE, [2, 0])],
)
def test_wrong_input_is_refused(x, sizes):
    with pytest.raises(ConfigError):
        rq_kmeans(x, sizes, seed=0)


def test_statistics_of_codes():
    codes = np.array([[0, 0], [0, 0], [1, 0], [1, 2]])
    found = code_statistics(codes, (2, 4))
    assert found["utilisation"] == [1, 0.5]
    assert found["perplexity"] == pytest.approx([2, np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))])
    assert (found["distinct"], found["largest_group"], found["shared_items"]) == (3, 2, 0.5)


def test_mutual_information_of_equal_and_independent_columns():
    a = np.repeat(np.arange(4), 16)
    assert mutual_information(a, 3 - a) == pytest.approx(np.log(4))
    assert mutual_information(a, 3 - a, normalised=True) == pytest.approx(1)
    assert mutual_information(a, a // 2, normalised=True) == pytest.approx(np.log(2) / (1.5 * np.log(2)))
    assert mutual_information(a * 0, a * 0, normalised=True) == 0
    assert mutual_information(a, np.tile(np.arange(4), 16)) == pytest.approx(0, abs=1e-12)


def test_movielens_codes(movielens_100k):
    from auto_research.data.item_vectors import item_cf_vectors, text_and_cf_vectors
    from auto_research.data.sequences import LeaveTwoOut
    from auto_research.data.titles import load_title_vectors

    split = LeaveTwoOut.load(movielens_100k / "sequences")
    vectors = text_and_cf_vectors(load_title_vectors(movielens_100k / "titles"), item_cf_vectors(split))[1:]
    plain = rq_kmeans(vectors, [24, 24, 24], seed=42)
    balanced = rq_kmeans(vectors, [24, 24, 24], balanced=True, seed=42)
    assert np.bincount(balanced.codes[:, 0]).tolist() == [71] * 23 + [49]
    assert code_statistics(plain.codes, (24, 24, 24))["utilisation"] == [1, 1, 1]
    distinct = [code_statistics(found.codes, (24, 24, 24))["distinct"] for found in (plain, balanced)]
    assert distinct[0] > 1400
    assert 1100 < distinct[1] < distinct[0] - 150  # capacities cost resolution
    assert balanced.residual[0] > plain.residual[0]
