"""What the baselines without a neural network share: batches as plain feature columns, and their measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import Scorer, measure_requests, rated_batches, rated_metrics, score_rated
from auto_research.experiment.contract import Measurement
from auto_research.train.ctr import RequestBudget

if TYPE_CHECKING:
    from auto_research.experiment.context import Context


def feature_columns(batch: RequestBatch, item_genres: np.ndarray) -> np.ndarray:
    """Prefix statistics of every pair, float32[P, 26 + 3 + G + 1].

    User statistics (22 with 19 genres), item popularity (2), cross features (2), gap, hour and weekday of the request,
    the candidate's genres and decade. No ids.
    """
    owner = batch.request_of.numpy()
    request = np.column_stack([batch.user_stats.numpy(), batch.gap.numpy(), batch.hour.numpy(), batch.weekday.numpy()])
    pair = [batch.popularity.numpy(), batch.cross.numpy(), item_genres[batch.item.numpy()], batch.decade.numpy()]
    return np.column_stack([request[owner], *pair]).astype(np.float32)


def measure_scorer(
    ctx: Context, score: Scorer, table: RequestTable, budget: RequestBudget, device: torch.device
) -> Measurement:
    """Validation and test of a scorer that works on CPU arrays."""
    cpu = torch.device("cpu")
    measured = measure_requests(
        score,
        table,
        device=cpu,
        history=1,
        chunk=table.interactions.n_items,
        catalogue_users=budget.catalogue_users,
        progress=ctx.progress,
    )
    measured.validation = rated_metrics(score_rated(score, rated_batches(table, "valid", history=1)))
    if device.type != "cpu":
        measured.notes.append("computed on the CPU: this baseline has no accelerator path")
    return measured
