"""The baselines: their formulas by hand, and each of them once on a cut of MovieLens-100K."""

import importlib

import numpy as np
import pytest
import torch
from scipy import sparse

from auto_research.baselines.bias import bias_scorer, smoothed_logit
from auto_research.baselines.dcnv2 import DCNv2, matched_hidden
from auto_research.baselines.ease import ease_weights
from auto_research.baselines.itemknn import cosine_neighbours
from auto_research.baselines.popularity import popularity_scorer
from auto_research.baselines.prefix import engage_logit, feature_columns, recent_ratings
from auto_research.baselines.registry import BASELINES, baseline
from auto_research.baselines.sasrec import SASRec
from auto_research.blocks.causal_transformer import TransformerConfig
from auto_research.data.requests import RequestTable
from auto_research.evaluate.ctr import measure_requests
from auto_research.runtime.errors import UnknownName

CPU = torch.device("cpu")
BINARY = sparse.csr_matrix(np.array([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1]], dtype=float))


@pytest.fixture(scope="module")
def table(movielens_100k) -> RequestTable:
    return RequestTable.load(movielens_100k / "requests").restrict(24)


def test_ease_is_the_best_linear_map_with_a_zero_diagonal():
    """Column j of B is ridge regression of item j on all other items."""
    x, strength = BINARY.toarray(), 0.7
    weights = ease_weights(BINARY, strength)
    for j in range(4):
        others = [i for i in range(4) if i != j]
        a = x[:, others]
        ridge = np.linalg.solve(a.T @ a + strength * np.eye(3), a.T @ x[:, j])
        assert weights[others, j] == pytest.approx(ridge)
        assert weights[j, j] == 0


def test_cosine_neighbours_by_hand():
    # items 1 and 2: together 2, counts 3 and 3; items 2 and 3: together 2, counts 3 and 2; items 1 and 3: 1
    similarity = cosine_neighbours(BINARY, 4, 1.0)
    assert similarity[1, 2] == pytest.approx(2 / (3 + 1))
    assert similarity[2, 3] == pytest.approx(2 / (np.sqrt(6) + 1))
    assert similarity.diagonal().tolist() == [0] * 4
    nearest = cosine_neighbours(BINARY, 1, 1.0)
    assert nearest[2].tolist() == [0, 0, 0, pytest.approx(similarity[2, 3])]


def test_smoothed_logit_by_hand():
    found = smoothed_logit(np.array([1, 1, 2]), np.array([1.0, 1.0, 0.0]), 4, 3.0)
    expected = np.array([2 / 3, (2 + 2) / 5, 2 / 4, 2 / 3])  # overall like-rate 2/3
    assert found == pytest.approx(np.log(expected / (1 - expected)))


def test_bias_reads_train_rows_only(table):
    batch = table.batch(table.requests("test")[:20], history=1)
    before = bias_scorer(table, 5.0, 3)(batch)
    data = table.interactions
    rating = data.rating.copy()
    rating[~table.index.train_row] = 1.0
    other = RequestTable(data.edited(rating=rating))
    assert np.array_equal(before, bias_scorer(other, 5.0, 3)(batch))


def test_engage_logit_by_hand(table):
    """At the odds of training: with 3 negatives an event, an item drawn as often as it was an event has logit 0."""
    expected = 3 * len(table.train_rows()) / table.interactions.n_items
    assert engage_logit(np.log(np.array([expected, 2 * expected])), table, 3) == pytest.approx([0.0, np.log(2)])


def test_the_popularity_floor_lists_popular_items(movielens_100k):
    whole = RequestTable.load(movielens_100k / "requests")
    table = whole.restrict(150)
    measured = measure_requests(
        popularity_scorer(table, 3), table, device=CPU, history=1, chunk=table.interactions.n_items
    )
    assert measured.metrics["head_share@10"] > 0.95


def test_recent_ratings_by_hand(table):
    batch = table.batch(table.requests("train")[:1], history=20)
    batch.hist_mask = torch.tensor([[False] * 17 + [True] * 3])
    batch.hist_rating = torch.tensor([[0] * 17 + [2, 4, 5]])
    assert recent_ratings(batch)[0] == pytest.approx([5.0, 11 / 3, 11 / 3, (2 + 1) / (3 + 2)])


def test_tree_features_hold_no_ids(table):
    """Two users with the same past and two items with the same statistics look the same."""
    batch = table.batch(table.requests("train")[:9], history=20)
    before = feature_columns(batch, table.item_genres)
    batch.user_id = batch.user_id * 0
    batch.user_of_pair = batch.user_of_pair * 0
    assert np.array_equal(before, feature_columns(batch, table.item_genres))
    assert before.shape == (batch.pairs(), 22 + 4 + 2 + 2 + 19 + 1)


def test_tree_features_refuse_a_batch_with_too_short_a_history(table):
    batch = table.batch(table.requests("valid")[:4], history=19)
    with pytest.raises(ValueError, match="19 history slots"):
        feature_columns(batch, table.item_genres)


def test_cross_network_mlp_meets_the_parameter_count_of_the_card(table):
    hidden = matched_hidden(566_659, 368)
    model = DCNv2(table.vocab, torch.from_numpy(table.item_genres), hidden=hidden)
    assert model.input.width == 368
    assert abs(model.dense_params() / 566_659 - 1) < 0.05
    with pytest.raises(ValueError, match="already hold"):
        matched_hidden(100_000, 368)


def test_sasrec_scores_a_short_history_as_in_a_padded_window():
    torch.manual_seed(0)
    model = SASRec(20, 6, TransformerConfig(width=8, heads=2, layers=1)).eval()
    short = model(torch.tensor([[3, 5, 7]]))[:, -1]
    padded = model(torch.tensor([[0, 0, 0, 3, 5, 7]]))[:, -1]
    torch.testing.assert_close(short, padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_baseline_measures_its_task(name, arm_context):
    entry = BASELINES[name]
    measured = baseline(name)(arm_context(name), device=CPU)
    primary = {"next_item": "ndcg@10", "ctr": "auc"}[entry.task]
    assert 0 <= measured.metrics[primary] <= 1
    for metric, unit in measured.units.items():
        assert np.mean(unit.values) == pytest.approx(measured.metrics[metric])
    assert measured.as_dict()["metrics"] == measured.metrics
    again = baseline(name)(arm_context(name + "-again"), device=CPU)
    assert again.metrics == measured.metrics


def test_the_registry_is_all_there_is():
    import pkgutil

    import auto_research.baselines as package

    modules = {m.name for m in pkgutil.iter_modules(package.__path__)}
    with_run = {m for m in modules if hasattr(importlib.import_module(f"auto_research.baselines.{m}"), "run")}
    assert with_run == {entry.function.split(":")[0].rsplit(".", 1)[1] for entry in BASELINES.values()}
    with pytest.raises(UnknownName, match="popularity"):
        baseline("nonesuch")
