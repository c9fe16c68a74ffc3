"""User and item bias: smoothed like-rates of train rows, added in log-odds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from auto_research.baselines.prefix import engage_logit, measure_scorer
from auto_research.data.prefix import LIKE_RATING
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import Scorer, rated_batches, rated_metrics, score_rated
from auto_research.experiment.contract import Measurement
from auto_research.train.ctr import SELECTION, RequestBudget, load_requests
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

TRIALS = tuple({"pseudo_rows": value} for value in (1.0, 2.0, 5.0, 10.0, 20.0))


def smoothed_logit(ids: np.ndarray, liked: np.ndarray, size: int, pseudo_rows: float) -> np.ndarray:
    """Log-odds of (likes + m p) / (n + m) for every id, p the overall like-rate; float64[size]."""
    rate = liked.mean()
    count = np.bincount(ids, minlength=size)
    likes = np.bincount(ids, weights=liked, minlength=size)
    smoothed = (likes + pseudo_rows * rate) / (count + pseudo_rows)
    return np.log(smoothed) - np.log1p(-smoothed)


def bias_scorer(table: RequestTable, pseudo_rows: float, negatives: int) -> Scorer:
    """like = logit(user rate) + logit(item rate) - logit(overall rate); engage from the item's train rows."""
    data, rows = table.interactions, table.train_rows()
    liked = (data.rating[rows] >= LIKE_RATING).astype(np.float64)
    user = smoothed_logit(data.user[rows], liked, data.n_users + 1, pseudo_rows)
    item = smoothed_logit(data.item[rows], liked, data.n_items + 1, pseudo_rows)
    overall = np.log(liked.mean()) - np.log1p(-liked.mean())
    engage = engage_logit(np.log1p(table.train_counts()), table, negatives)

    def score(batch: RequestBatch) -> np.ndarray:
        items = batch.item.numpy()
        like = user[batch.user_of_pair.numpy()] + item[items] - overall
        return np.column_stack([engage[items], like, like])

    return score


def run(ctx: Context, *, device: torch.device, **overrides: Any) -> Measurement:
    """Choose the smoothing by validation AUC, then measure. CPU only."""
    table, budget = load_requests(ctx), RequestBudget.of(ctx.budget, **overrides)
    validation = rated_batches(table, "valid", history=1)

    def fit(hyperparameters: dict, _) -> Trained:
        started = time.perf_counter()
        score = bias_scorer(table, float(hyperparameters["pseudo_rows"]), budget.negatives)
        seconds = time.perf_counter() - started
        return Trained(score, rated_metrics(score_rated(score, validation)), cost={"seconds": seconds})

    best, trials = best_of_trials(ctx, fit, SELECTION, trials=TRIALS)
    measured = measure_scorer(ctx, best.model, table, budget, device)
    measured.hyperparameters, measured.trials = best.hyperparameters, trials
    measured.cost |= best.cost | {"params": table.interactions.n_users + table.interactions.n_items}
    return measured
