"""What serving one request costs at several numbers of candidates: floating-point operations and milliseconds.

A ranker with `prepare(batch)` and `score(state, batch)` pays its request part once; the line "per candidate" is the same
model asked one candidate at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.experiment.studies import ONLY, Study, study
from auto_research.metrics.cost import flops_of
from auto_research.runtime.devices import synchronize

CANDIDATES = (1, 16, 128, 1682)
SHARED, ALONE = "request part once", "per candidate"
WARM_UP, TIMED = 5, 20


def median_seconds(
    work: Callable[[], object], device: torch.device, warm_up: int = WARM_UP, timed: int = TIMED
) -> float:
    """Median duration of `work` after warm-up runs; the device is synchronised around the clock."""
    for _ in range(warm_up):
        work()
    durations = []
    for _ in range(timed):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def candidates_of(table: RequestTable, count: int, *, history: int, device: torch.device) -> RequestBatch:
    """The last test request with `count` candidates: the first items of the catalogue, repeated when it is smaller."""
    request = int(table.requests("test")[-1])
    items = np.arange(count) % table.interactions.n_items + 1
    return table.score_batch(request, items, history=history).to(device)


@torch.no_grad()
def serving_studies(
    model: nn.Module,
    table: RequestTable,
    *,
    device: torch.device,
    history: int,
    candidates: Sequence[int] = CANDIDATES,
    warm_up: int = WARM_UP,
    timed: int = TIMED,
    label: str = SHARED,
    also: Mapping[str, Callable[[RequestBatch], Tensor]] | None = None,
) -> dict[str, Study]:
    """The studies `flops_per_request` and `request_ms` of a trained ranker, for `Measurement.extra["studies"]`.

    label: what the line of model(batch) is called.  also: label -> another way to compute the same logits.
    """
    model.eval()
    single = candidates_of(table, 1, history=history, device=device)
    alone_flops = flops_of(lambda: model(single))
    alone_ms = 1e3 * median_seconds(lambda: model(single), device, warm_up, timed)
    flops = {name: [] for name in (label, *(also or {}))}
    milliseconds = {name: [] for name in flops}
    for count in candidates:
        batch = candidates_of(table, count, history=history, device=device)
        for name, rank in {label: model, **(also or {})}.items():
            work = partial(rank, batch)
            flops[name].append((count, flops_of(work)))
            milliseconds[name].append((count, 1e3 * median_seconds(work, device, warm_up, timed)))
    x = "candidates of a request"
    alone = [{ALONE: [(count, count * cost) for count in candidates]} for cost in (alone_flops, alone_ms)]
    return {
        "flops_per_request": study(x, "FLOPs", flops | alone[0]),
        "request_ms": study(x, "milliseconds", milliseconds | alone[1]),
    }


@torch.no_grad()
def flop_rates(
    build: Callable[[int], nn.Module],
    work: Callable[[nn.Module], object],
    widths: Sequence[int],
    *,
    device: torch.device,
    warm_up: int = WARM_UP,
    timed: int = TIMED,
) -> dict[str, Study]:
    """The study `flop_rate_per_s`: floating-point operations a second that `work(model)` reaches, by dense parameters.

    build: width -> untrained model with `dense_params()`, the parameters that `work` multiplies with.
    """
    points = []
    for width in widths:
        model = build(width).to(device).eval()
        run = partial(work, model)
        points.append((model.dense_params(), flops_of(run) / median_seconds(run, device, warm_up, timed)))
    return {"flop_rate_per_s": study("parameters", "FLOP/s", {ONLY: points})}
