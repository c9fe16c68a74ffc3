"""Popularity, the floor of both tasks: what everybody rates, and on the request table what everybody likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from auto_research.baselines.prefix import measure_scorer
from auto_research.data.requests import RequestBatch
from auto_research.evaluate.next_item import Measure, measure_next_item
from auto_research.experiment.contract import Measurement
from auto_research.train.ctr import RequestBudget, load_requests
from auto_research.train.next_item import load_sequences

if TYPE_CHECKING:
    from auto_research.experiment.context import Context


def run(ctx: Context, *, device: torch.device, measure: Measure = measure_next_item) -> Measurement:
    """Next item: every user gets the items with most train events. Nothing is trained, `device` is not used.

    measure: (scorer, sequences) -> Measurement, where an adapter wants further metrics.
    """
    sequences = load_sequences(ctx)
    counts = sequences.popularity().astype(np.float64)
    return measure(lambda split, positions: np.tile(counts, (len(positions), 1)), sequences)


def run_requests(ctx: Context, *, device: torch.device, **overrides: Any) -> Measurement:
    """Request table: engage by the item's number of earlier train rows, like by its smoothed like-rate.

    Both are the batch's prefix popularity, so they are as of the request's time.
    """
    table = load_requests(ctx)

    def score(batch: RequestBatch) -> np.ndarray:
        count, rate = batch.popularity.double().cpu().numpy().T  # log1p(count), (likes + 1) / (n + 2)
        like = np.log(rate) - np.log1p(-rate)
        return np.column_stack([count, like, like])

    return measure_scorer(ctx, score, table, RequestBudget.of(ctx.budget, **overrides), device)
