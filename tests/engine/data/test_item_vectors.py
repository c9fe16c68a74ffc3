"""Item vectors: the singular vectors they must be, signs, empty rows, and the real data's numbers."""

from __future__ import annotations

import archives
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.interactions import load_interactions
from auto_research.data.item_vectors import (
    co_occurrence,
    item_cf_vectors,
    item_texts,
    principal_components,
    text_and_cf_vectors,
    unit_rows,
)
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.titles import load_title_vectors
from auto_research.runtime.errors import ConfigError


def test_co_occurrence_counts_users_and_has_a_zero_diagonal():
    counts = co_occurrence([np.array([1, 2, 3]), np.array([2, 1]), np.array([4])], 5).toarray()
    assert counts[1:, 1:].tolist() == [[0, 2, 1, 0, 0], [2, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0] * 5, [0] * 5]
    assert not counts[0].any()


def test_an_item_counts_once_a_user():
    counts = co_occurrence([np.array([1, 2, 1, 1])], 2)
    assert counts[1, 2] == 1
    assert counts[1, 1] == 0


def test_two_items_worked_by_hand():
    # Users {1,2}, {1,2}, {1,2,3}: log counts a = log 4 between 1 and 2, b = log 2 from 3 to both.
    vectors = item_cf_vectors([np.array([1, 2]), np.array([2, 1]), np.array([1, 2, 3])], 4, width=1)
    matrix = np.log(np.array([[1, 4, 2], [4, 1, 2], [2, 2, 1.0]]))
    value = (np.log(4) + np.sqrt(np.log(4) ** 2 + 8 * np.log(2) ** 2)) / 2  # largest root of the 3 x 3 matrix
    column = vectors[1:4, 0] / np.sqrt(value)
    assert np.allclose(matrix @ column, value * column, atol=1e-6)
    assert column @ column == pytest.approx(1, abs=1e-6)
    assert (column > 0).all()
    assert not vectors[[0, 4]].any()


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=8), min_size=8, max_size=20))
def test_vectors_are_the_singular_vectors_of_the_log_counts(rows):
    sequences = [np.arange(1, 11), *(np.array(row) for row in rows)]
    matrix = np.log1p(co_occurrence(sequences, 12).toarray())
    vectors = item_cf_vectors(sequences, 12, width=2).astype(float)
    values = np.linalg.svd(matrix, compute_uv=False)
    assert np.allclose((vectors**2).sum(axis=0), values[:2], atol=1e-5)
    assert np.allclose(np.abs(vectors).max(axis=0), vectors.max(axis=0), atol=1e-6)
    if values[1] - values[2] > 1e-3 and values[0] - values[1] > 1e-3:
        left, _, _ = np.linalg.svd(matrix)
        assert np.allclose(np.abs(vectors), np.abs(left[:, :2] * np.sqrt(values[:2])), atol=1e-4)


def test_too_few_items_are_refused():
    with pytest.raises(ConfigError, match="more than 3 items"):
        item_cf_vectors([np.array([1, 2, 3])], 5, width=3)
    with pytest.raises(ConfigError, match="number of items"):
        item_cf_vectors([np.array([1, 2, 3])])


@pytest.fixture(scope="module")
def real(movielens_100k):
    split = LeaveTwoOut.load(movielens_100k / "sequences")
    return split, item_cf_vectors(split), load_title_vectors(movielens_100k / "titles")


def test_collaborative_vectors_of_movielens(real):
    split, vectors, _ = real
    assert vectors.shape == (1683, 16)
    assert vectors.dtype == np.float32
    zero = np.flatnonzero((vectors[1:] == 0).all(axis=1)) + 1
    assert zero.tolist() == [1525, 1624, 1625, 1671]
    assert not split.popularity()[zero].any()
    unit = unit_rows(vectors)[1:].astype(float)
    assert (unit[:, 0] ** 2).sum() / (unit**2).sum() == pytest.approx(0.452, abs=0.001)
    assert np.corrcoef(vectors[1:, 0], np.log1p(split.popularity()[1:]))[0, 1] > 0.95
    assert np.linalg.norm(vectors, axis=0)[:2] ** 2 == pytest.approx([2739.5, 326.5], abs=0.1)
    assert (vectors.max(axis=0) == np.abs(vectors).max(axis=0)).all()
    assert (item_cf_vectors(split) == vectors).all()


def test_test_and_validation_events_do_not_reach_the_vectors(real, movielens_100k):
    vectors = real[1]
    data = load_interactions(movielens_100k / "canonical")
    last = np.cumsum(np.bincount(data.user)[1:]) - 1
    item = data.item.copy()
    item[last], item[last - 1] = item[last - 1], item[last]
    assert (item != data.item).any()
    assert (item_cf_vectors(LeaveTwoOut.build(data.edited(item=item))) == vectors).all()


def test_text_and_collaborative_halves_have_length_one(real):
    _, cf, titles = real
    vectors = text_and_cf_vectors(titles, cf)
    assert vectors.shape == (1683, 64)
    assert np.allclose(np.linalg.norm(vectors[1:, :48], axis=1), 1, atol=1e-6)
    lengths = np.linalg.norm(vectors[1:, 48:], axis=1)
    assert np.allclose(lengths[lengths > 0], 1, atol=1e-6)
    assert (lengths == 0).sum() == 4
    assert not vectors[0].any()
    with pytest.raises(ConfigError, match="do not fit"):
        text_and_cf_vectors(titles[:-1], cf)


def test_principal_components_keep_the_most_variance():
    rng = np.random.default_rng(0)
    items = rng.standard_normal((50, 3)) @ np.diag([5.0, 2.0, 0.1]) @ np.linalg.qr(rng.standard_normal((3, 3)))[0] + 7
    padded = np.concatenate([np.full((1, 3), 99.0), items])
    scores = principal_components(padded, 2)
    axes = np.linalg.svd(items - items.mean(axis=0), full_matrices=False)[2]
    assert np.allclose(np.abs(scores[1:]), np.abs((items - items.mean(axis=0)) @ axes[:2].T), atol=1e-4)
    assert not scores[0].any()
    with pytest.raises(ConfigError, match="cannot be taken"):
        principal_components(padded, 4)


def test_texts_name_title_and_genres():
    data = archives.table_of([(1, 1, 5, 1)], [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    first, second = item_texts(data)
    assert first == f"{data.item_title[1]}. Genres: {data.genre_names[0]}, {data.genre_names[2]}"
    assert second == data.item_title[2]
