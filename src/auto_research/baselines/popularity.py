"""Popularity, the floor of both tasks: what everybody rates, and on the request table what everybody likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from auto_research.baselines.prefix import engage_logit, measure_scorer
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import Scorer
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


def popularity_scorer(table: RequestTable, negatives: int) -> Scorer:
    """engage by the item's number of earlier train rows, like by its smoothed like-rate; logits [P, 3].

    Both are the batch's prefix popularity, so they are as of the request's time.
    """

    def score(batch: RequestBatch) -> np.ndarray:
        count, rate = batch.popularity.double().cpu().numpy().T  # log1p(count), (likes + 1) / (n + 2)
        like = np.log(rate) - np.log1p(-rate)
        return np.column_stack([engage_logit(count, table, negatives), like, like])

    return score


def run_requests(ctx: Context, *, device: torch.device, **overrides: Any) -> Measurement:
    """Request table: `popularity_scorer`. Nothing is trained."""
    table, budget = load_requests(ctx), RequestBudget.of(ctx.budget, **overrides)
    return measure_scorer(ctx, popularity_scorer(table, budget.negatives), table, budget, device)
