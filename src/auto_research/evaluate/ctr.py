"""Measure a ranker on the request table: every rated row of a split, and the full catalogue for one request per user.

A scorer is any callable RequestBatch -> logits [P, 3] (engage, like, love), tensor or array; P is at most the chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.requests import CatalogueTasks, RequestBatch, RequestTable
from auto_research.experiment.contract import Measurement, Rows, Units
from auto_research.metrics.ctr import ctr_metrics
from auto_research.metrics.ranking import rank_of_target, ranking_metrics, top_items
from auto_research.runtime.devices import synchronize

Scorer = Callable[[RequestBatch], "Tensor | np.ndarray"]

CHUNK = 256
REQUESTS_AT_ONCE = 256
WARM_UP = 5
LIKE = 1


@dataclass(frozen=True)
class RatedScores:
    """Scored rated rows in table order: user int64[N], label int64[N], score float64[N] = P(like)."""

    user: np.ndarray
    label: np.ndarray
    score: np.ndarray


class ModelScorer:
    """Scorer of a model: eval mode, no gradient, batch moved to `device`.

    A model with `prepare(batch) -> state` and `score(state, batch) -> logits` has the request's part computed once for
    all chunks of its candidates.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device

    @torch.no_grad()
    def __call__(self, batch: RequestBatch) -> Tensor:
        return self.model.eval()(batch.to(self.device))

    @torch.no_grad()
    def chunks(self, batch: RequestBatch, size: int) -> list[Tensor]:
        """Logits of one request's candidates, `size` at a time."""
        model = self.model.eval()
        parts = split_pairs(batch, size)
        if not (hasattr(model, "prepare") and hasattr(model, "score")):
            return [model(part) for part in parts]
        state = model.prepare(batch)
        return [model.score(state, part) for part in parts]


def model_scorer(model: nn.Module, device: torch.device) -> ModelScorer:
    """Scorer of a model on a device."""
    return ModelScorer(model, device)


def rated_batches(
    table: RequestTable, split: str, *, history: int, at_once: int = REQUESTS_AT_ONCE
) -> list[RequestBatch]:
    """All requests of a split with their rated rows, `at_once` requests per batch, on CPU."""
    requests = table.requests(split)
    return [table.batch(requests[i : i + at_once], history=history) for i in range(0, len(requests), at_once)]


def score_rated(score: Scorer, batches: Sequence[RequestBatch]) -> RatedScores:
    """P(like) of every rated row of the batches."""
    logits = [_array(score(batch))[:, LIKE] for batch in batches]
    return RatedScores(
        np.concatenate([batch.user_of_pair.numpy() for batch in batches]).astype(np.int64),
        np.concatenate([batch.like.numpy() for batch in batches]).astype(np.int64),
        sigmoid(np.concatenate(logits)),
    )


def rated_metrics(rows: RatedScores) -> dict[str, float]:
    """auc, uauc, gauc, logloss of rated rows."""
    return ctr_metrics(rows.user, rows.label, rows.score)[0]


@dataclass(frozen=True)
class CatalogueRanks:
    """Rank of each task's target (1 = best, ties against it), its ten best items, and the time it took.

    user, rank: int64[U]; top: int64[U, 10].
    """

    user: np.ndarray
    rank: np.ndarray
    top: np.ndarray
    pairs: int
    seconds: float


def rank_catalogue(
    score: Scorer,
    table: RequestTable,
    tasks: CatalogueTasks,
    *,
    history: int,
    device: torch.device,
    chunk: int = CHUNK,
    progress: Callable[..., None] | None = None,
) -> CatalogueRanks:
    """Score every item for every task's request, `chunk` candidates at a time, and rank the target.

    score = logsigmoid(engage) + logsigmoid(like); items the user rated at an earlier second are no candidates.
    """
    items = np.arange(1, table.interactions.n_items + 1)
    scores = np.zeros((len(tasks), len(items) + 1))
    spent = 0.0
    for index in range(len(tasks)):
        request = table.score_batch(int(tasks.request[index]), items, history=history)
        request = request.to(device)
        for _ in range(WARM_UP if index == 0 and device.type != "cpu" else 0):
            _score_chunks(score, request, chunk)
        synchronize(device)
        started = time.perf_counter()
        logits = _score_chunks(score, request, chunk)
        synchronize(device)
        spent += time.perf_counter() - started
        scores[index, 1:] = joint_score(np.concatenate([_array(part) for part in logits]))
        if progress:
            progress(index + 1, len(tasks), phase="catalogue")
    return CatalogueRanks(
        np.asarray(tasks.user, dtype=np.int64),
        rank_of_target(scores, tasks.target, tasks.excluded),
        top_items(scores, tasks.excluded),
        len(tasks) * len(items),
        spent,
    )


def _score_chunks(score: Scorer, batch: RequestBatch, chunk: int) -> list:
    if isinstance(score, ModelScorer):
        return score.chunks(batch, chunk)
    return [score(part) for part in split_pairs(batch, chunk)]


def split_pairs(batch: RequestBatch, size: int) -> list[RequestBatch]:
    """Parts of one request's batch with at most `size` pairs; the request-level tensors are shared."""
    names = ("request_of", "item", "decade", "popularity", "cross", "engage", "like", "love", "rated", "user_of_pair")
    starts = range(0, batch.pairs(), size)
    return [replace(batch, **{name: getattr(batch, name)[i : i + size] for name in names}) for i in starts]


def joint_score(logits: np.ndarray) -> np.ndarray:
    """logsigmoid(engage) + logsigmoid(like) of logits [P, 3] in float64, [P]."""
    logits = logits[:, :2].astype(np.float64)
    return -(np.logaddexp(0.0, -logits[:, 0]) + np.logaddexp(0.0, -logits[:, 1]))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Logistic function in float64."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


def measure_requests(
    score: Scorer,
    table: RequestTable,
    *,
    device: torch.device,
    history: int,
    chunk: int = CHUNK,
    catalogue_users: int | None = None,
    progress: Callable[..., None] | None = None,
) -> Measurement:
    """Everything the protocol reports about a scorer on the test split.

    metrics: auc uauc gauc logloss of the like head, ndcg@10 hit@10 mrr head_share@10 coverage@10 of the full catalogue;
    units per user for uauc and the ranking metrics; rows for the bootstrap of AUC; cost: pairs_per_s.
    """
    rows = score_rated(score, rated_batches(table, "test", history=history))
    metrics, per_user = ctr_metrics(rows.user, rows.label, rows.score)
    tasks = table.catalogue_tasks("test", catalogue_users)
    ranked = rank_catalogue(score, table, tasks, history=history, device=device, chunk=chunk, progress=progress)
    ranking, contributions = ranking_metrics(ranked.rank, ranked.top, table.head_items(), table.interactions.n_items)
    units = {name: Units("user", ranked.user, values) for name, values in contributions.items()}
    units["uauc"] = Units("user", per_user["user"], per_user["uauc"])
    return Measurement(
        metrics={**metrics, **ranking},
        units=units,
        rows=Rows(rows.user, rows.label, rows.score),
        cost={"pairs_per_s": ranked.pairs / max(ranked.seconds, 1e-9), "catalogue_seconds": ranked.seconds},
    )


def _array(logits: Tensor | np.ndarray) -> np.ndarray:
    return logits.float().cpu().numpy() if isinstance(logits, Tensor) else np.asarray(logits)
