"""Caching from request to request, replayed: users come back with new events, cold start against kept keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapters.onetrans.caching import UserCache, continues, extend, listed
from adapters.onetrans.model import OneTrans, RequestState
from auto_research.blocks.behaviour_events import request_fields
from auto_research.data.behaviours import BehaviourTable
from auto_research.data.prefix import LIKE_RATING
from auto_research.evaluate.serving import TIMED, median_seconds
from auto_research.experiment.studies import Study, study
from auto_research.metrics.cost import flops_of

COLD, KEPT = "cold start", "keys and values kept"
APPENDED = 2


@torch.no_grad()
def replay(model: OneTrans, table: BehaviourTable, *, device: torch.device, users: int) -> dict[str, Any]:
    """The consecutive test requests of `users` test users, each with its rated candidates.

    Users whose longer sequence is shortest come first: a window that is full loses its oldest event at every request.
    Users with one test request have nothing to reuse and are left out.
    requests; kept: share of those with a predecessor that could reuse its cache (a window that lost its oldest event
    cannot);
    FLOPs of the S side per request cold and kept, over the requests that could; largest difference of logits between
    the kept and the cold path; bytes of the largest cache.
    """
    model.eval()
    requests = table.requests("test")
    count = np.bincount(table.request_user[requests])
    chosen = shortest_histories(table, np.flatnonzero(count > 1))[:users]
    totals = {"requests": 0, "followers": 0, "kept": 0, COLD: 0, KEPT: 0}
    difference, largest = 0.0, 0
    for user in chosen:
        cache, rows = None, None
        for request in requests[table.request_user[requests] == user]:
            batch = table.batch([int(request)], history=model.config.history).to(device)
            tokens = listed(model.tokens(batch))
            totals["requests"] += 1
            totals["followers"] += cache is not None
            if cache is not None and continues(rows, tokens.row[0]):
                totals["kept"] += 1
                added = tokens.x[:, len(rows) :]
                totals[KEPT] += flops_of(lambda cache=cache, added=added: extend(model, cache, added))
                totals[COLD] += flops_of(lambda tokens=tokens: extend(model, None, tokens.x))
                cache, keys = extend(model, cache, added)
                state = RequestState(request_fields(model.encoder, batch), keys, None)
                difference = max(difference, float((model.score(state, batch) - model(batch)).abs().max()))
            else:
                cache, _ = extend(model, None, tokens.x)
            rows, largest = tokens.row[0], max(largest, cache.bytes())
    served = max(1, totals["kept"])
    return {
        "requests": totals["requests"],
        "kept": totals["kept"] / max(1, totals["followers"]),
        "cold_flops": totals[COLD] / served,
        "kept_flops": totals[KEPT] / served,
        "largest_difference": difference,
        "largest_cache_bytes": largest,
    }


def shortest_histories(table: BehaviourTable, users: np.ndarray) -> np.ndarray:
    """Users by the number of ratings in the longer of their two sequences, ascending."""
    data = table.interactions
    liked = np.bincount(data.user, weights=data.rating >= LIKE_RATING, minlength=data.n_users + 1)
    events = np.bincount(data.user, minlength=data.n_users + 1)
    return users[np.argsort(np.maximum(liked, events - liked)[users], kind="stable")]


@torch.no_grad()
def growth_studies(
    model: OneTrans, table: BehaviourTable, *, device: torch.device, timed: int = TIMED
) -> dict[str, Study]:
    """S side of a request whose history grew by two events to n: FLOPs and milliseconds, cold and kept."""
    model.eval()
    batch = table.batch([int(table.requests("test")[-1])], history=model.config.history).to(device)
    x = model.tokens(batch).x
    sizes = [n for n in (6, 12, 24, 48, 100) if n < x.shape[1]] + [x.shape[1]]
    lines: dict[str, dict[str, list]] = {"flops": {COLD: [], KEPT: []}, "ms": {COLD: [], KEPT: []}}
    for n in sizes:
        cache, _ = extend(model, None, x[:, : n - APPENDED])
        for label, known, added in ((COLD, None, x[:, :n]), (KEPT, cache, x[:, n - APPENDED : n])):
            work = _appending(model, known, added)
            lines["flops"][label].append((n, flops_of(work)))
            lines["ms"][label].append((n, 1e3 * median_seconds(work, device, timed=timed)))
    axis = "events in the history, two of them new"
    return {
        "sequence_side_flops": study(axis, "FLOPs of the sequence side", lines["flops"]),
        "sequence_side_ms": study(axis, "milliseconds", lines["ms"]),
    }


def _appending(model: OneTrans, cache: UserCache | None, x: Tensor):
    return lambda: extend(model, cache, x)
