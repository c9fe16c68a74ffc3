"""What the baselines without a neural network share: batches as plain feature columns, and their measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from auto_research.data.prefix import LIKE_RATING
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import Scorer, measure_requests, rated_batches, rated_metrics, score_rated
from auto_research.experiment.contract import Measurement
from auto_research.train.ctr import RequestBudget

if TYPE_CHECKING:
    from auto_research.experiment.context import Context


RECENT = 20


def feature_columns(batch: RequestBatch, item_genres: np.ndarray) -> np.ndarray:
    """Prefix statistics of every pair, float32[P, 3 + G + 4 + 2 + 2 + G + 1]; no ids.

    User statistics (3 + G), mean rating of the last 1, 5 and 20 ratings and like-rate of the last 10, item popularity
    (2), cross features (2), the candidate's genres and decade. Raises ValueError for a batch of fewer than 20 history
    slots: its means would be others than those of training.
    """
    if batch.hist_rating.shape[1] < RECENT:
        raise ValueError(f"the batch has {batch.hist_rating.shape[1]} history slots; tree features need {RECENT}")
    request = np.column_stack([batch.user_stats.numpy(), recent_ratings(batch)])
    pair = [batch.popularity.numpy(), batch.cross.numpy(), item_genres[batch.item.numpy()], batch.decade.numpy()]
    return np.column_stack([request[batch.request_of.numpy()], *pair]).astype(np.float32)


def recent_ratings(batch: RequestBatch) -> np.ndarray:
    """float64[R, 4]: mean rating of the last 1, 5, 20 earlier ratings (0 without one), (likes + 1) / (n + 2) of 10."""
    rating, valid = batch.hist_rating.numpy().astype(np.float64), batch.hist_mask.numpy()

    def mean(values: np.ndarray, count: int, pseudo: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        kept = valid[:, -count:]
        size = kept.sum(1) + pseudo[1]
        return ((values[:, -count:] * kept).sum(1) + pseudo[0]) / np.maximum(size, 1)

    liked = (rating >= LIKE_RATING).astype(np.float64)
    return np.column_stack([mean(rating, 1), mean(rating, 5), mean(rating, RECENT), mean(liked, 10, (1.0, 2.0))])


def engage_logit(count: np.ndarray, table: RequestTable, negatives: int) -> np.ndarray:
    """Log-odds that a pair is an event and not one of `negatives` uniform items drawn for every event of training.

    count: log(1 + rows of the item), any shape. With the count itself as a logit every well-known item would be certain,
    and the joint score of the catalogue would rank by the like-rate alone.
    """
    expected = negatives * len(table.train_rows()) / table.interactions.n_items
    return count - np.log(expected)


def measure_scorer(
    ctx: Context,
    score: Scorer,
    table: RequestTable,
    budget: RequestBudget,
    device: torch.device,
    history: int = 1,
) -> Measurement:
    """Validation and test of a scorer that works on CPU arrays of `history` slots."""
    cpu = torch.device("cpu")
    measured = measure_requests(
        score,
        table,
        device=cpu,
        history=history,
        chunk=table.interactions.n_items,
        catalogue_users=budget.catalogue_users,
        progress=ctx.progress,
    )
    measured.validation = rated_metrics(score_rated(score, rated_batches(table, "valid", history=history)))
    if device.type != "cpu":
        measured.notes.append("computed on the CPU: this baseline has no accelerator path")
    return measured
