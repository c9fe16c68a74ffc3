"""Gradient-boosted trees on the prefix statistics (scikit-learn HistGradientBoosting): the floor of a deep ranker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from auto_research.baselines.prefix import RECENT, feature_columns, measure_scorer
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import rated_batches, rated_metrics, score_rated
from auto_research.experiment.contract import Measurement
from auto_research.runtime.seeds import stable_rng
from auto_research.train.ctr import SELECTION, RequestBudget, load_requests
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

TRIALS = ({"rounds": 100, "learning_rate": 0.1, "leaves": 15}, {"rounds": 100, "learning_rate": 0.1, "leaves": 31})
BUILD_REQUESTS = 4096


def training_rows(table: RequestTable, negatives: int, seed: int) -> dict[str, np.ndarray]:
    """Feature columns and labels of all train pairs: x float32[P, F], engage, like float32[P], rated bool[P]."""
    requests = table.requests("train")
    rng = stable_rng("negatives", seed, 0, "gbdt")
    parts = [
        table.batch(requests[i : i + BUILD_REQUESTS], history=RECENT, negatives=negatives, rng=rng)
        for i in range(0, len(requests), BUILD_REQUESTS)
    ]
    columns = {name: np.concatenate([getattr(p, name).numpy() for p in parts]) for name in ("engage", "like", "rated")}
    return columns | {"x": np.concatenate([feature_columns(part, table.item_genres) for part in parts])}


def _classifier(hyperparameters: dict[str, Any], seed: int):
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        max_iter=int(hyperparameters["rounds"]),
        learning_rate=float(hyperparameters["learning_rate"]),
        max_leaf_nodes=int(hyperparameters["leaves"]),
        min_samples_leaf=50,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=seed,
    )


def gbdt_scorer(rows: dict[str, np.ndarray], hyperparameters: dict[str, Any], seed: int, item_genres: np.ndarray):
    """Fit engage (all pairs of `training_rows`) and like (rated rows); returns RequestBatch -> logits [P, 3]."""
    rated = rows["rated"]
    like = _classifier(hyperparameters, seed).fit(rows["x"][rated], rows["like"][rated])
    engage = _classifier(hyperparameters, seed).fit(rows["x"], rows["engage"])

    return lambda batch: tree_logits(batch, item_genres, like, engage)


def tree_logits(batch: RequestBatch, item_genres: np.ndarray, like, engage=None) -> np.ndarray:
    """Logits float64[P, 3]; rated rows are measured by the like head alone, so the engage head is not asked for them."""
    x = feature_columns(batch, item_genres)
    wanted = like.decision_function(x)
    shown = np.zeros(len(x)) if engage is None or bool(batch.rated.all()) else engage.decision_function(x)
    return np.column_stack([shown, wanted, wanted])


def run(ctx: Context, *, device: torch.device, **overrides: Any) -> Measurement:
    """Two classifiers, engage (with sampled negatives) and like (rated rows); trials chosen by validation AUC. CPU only.

    Budget `gbdt_rounds` caps the boosting rounds of every trial (tiny tiers).
    """
    table = load_requests(ctx)
    budget = RequestBudget.of(ctx.budget, **overrides)
    rows = training_rows(table, budget.negatives, ctx.seed)
    validation = rated_batches(table, "valid", history=RECENT)
    cap = ctx.budget.get("gbdt_rounds")
    trials = [{**trial, "rounds": min(trial["rounds"], cap or trial["rounds"])} for trial in TRIALS]

    def fit(hyperparameters: dict[str, Any], _) -> Trained:
        started = time.perf_counter()
        like = _classifier(hyperparameters, ctx.seed).fit(rows["x"][rows["rated"]], rows["like"][rows["rated"]])
        seconds = time.perf_counter() - started
        values = rated_metrics(score_rated(lambda batch: tree_logits(batch, table.item_genres, like), validation))
        return Trained(like, values, cost={"seconds": seconds})

    best, records = best_of_trials(ctx, fit, SELECTION, trials=trials)
    started = time.perf_counter()
    engage = _classifier(best.hyperparameters, ctx.seed).fit(rows["x"], rows["engage"])
    best.cost["engage_seconds"] = time.perf_counter() - started

    def score(batch: RequestBatch) -> np.ndarray:
        return tree_logits(batch, table.item_genres, best.model, engage)

    measured = measure_scorer(ctx, score, table, budget, device, RECENT)
    measured.hyperparameters, measured.trials = best.hyperparameters, records
    measured.cost |= best.cost
    return measured
