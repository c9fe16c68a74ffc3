"""What a ranker costs at several lengths of history: per candidate of one request, and per training step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from auto_research.data.requests import RequestTable
from auto_research.evaluate.serving import candidates_of, median_seconds
from auto_research.metrics.cost import flops_of, saved_bytes
from auto_research.runtime.seeds import stable_rng
from auto_research.train.ctr import training_loss

CANDIDATES, STEP_REQUESTS, NEGATIVES = 32, 64, 3
WARM_UP, TIMED = 1, 3


class CandidateCost(NamedTuple):
    """Forward FLOPs and bytes kept for backward, each divided by the number of candidates."""

    flops: float
    saved_bytes: float


def candidate_cost(
    model: nn.Module, table: RequestTable, *, device: torch.device, history: int, candidates: int = CANDIDATES
) -> CandidateCost:
    """Cost per candidate of one request; the request's own part is shared by its candidates. Leaves the model in eval."""
    batch = candidates_of(table, candidates, history=history, device=device)
    kept = saved_bytes(partial(model.train(), batch))
    with torch.no_grad():
        flops = flops_of(partial(model.eval(), batch))
    return CandidateCost(flops / candidates, kept / candidates)


def step_milliseconds(
    model: nn.Module, table: RequestTable, *, device: torch.device, history: int, requests: int = STEP_REQUESTS
) -> float:
    """Median of forward and backward on one training batch, without the optimizer. Leaves the model in eval."""
    rng = stable_rng("step-milliseconds", history)
    batch = table.batch(table.requests("train")[:requests], history=history, negatives=NEGATIVES, rng=rng).to(device)
    model.train()

    def work() -> None:
        model.zero_grad(set_to_none=True)
        training_loss(model, batch).backward()

    seconds = median_seconds(work, device, WARM_UP, TIMED)
    model.zero_grad(set_to_none=True)
    model.eval()
    return 1e3 * seconds
