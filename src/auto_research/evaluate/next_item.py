"""Measure a next-item model on the full catalogue, leave-two-out.

A scorer is any callable (split, positions) -> scores [B, n_items + 1] by item id, where positions are int64[B] places
in `LeaveTwoOut.users`; the history before the target is excluded here, not by the scorer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_list import Lists, add_metrics
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.ranking import rank_of_target, ranking_metrics, top_items

Scorer = Callable[[str, np.ndarray], np.ndarray]
Measure = Callable[[Scorer, LeaveTwoOut], Measurement]

CHUNK = 256
TOP = 10


def rank_split(
    score: Scorer, sequences: LeaveTwoOut, split: str, *, chunk: int = CHUNK, top: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks int64[U] of the targets (1 = best, ties against them) and top items int64[U, 10] (empty without `top`)."""
    target = sequences.target(split)
    ranks, tops = [], []
    for start in range(0, len(sequences), chunk):
        positions = np.arange(start, min(start + chunk, len(sequences)))
        scores = np.asarray(score(split, positions))
        excluded = [sequences.history(split, int(i)) for i in positions]
        ranks.append(rank_of_target(scores, target[positions], excluded))
        if top:
            tops.append(top_items(scores, excluded, TOP))
    return np.concatenate(ranks), np.concatenate(tops) if top else np.zeros((0, TOP), dtype=np.int64)


def validation_metrics(score: Scorer, sequences: LeaveTwoOut, *, chunk: int = CHUNK) -> dict[str, float]:
    """ndcg@10, hit@10 and mrr on the validation targets, without the top lists."""
    ranks, _ = rank_split(score, sequences, "valid", chunk=chunk, top=False)
    within = ranks <= TOP
    ndcg = np.where(within, 1.0 / np.log2(1.0 + ranks), 0.0)
    return {"ndcg@10": float(ndcg.mean()), "hit@10": float(within.mean()), "mrr": float((1.0 / ranks).mean())}


def measure_next_item(
    score: Scorer,
    sequences: LeaveTwoOut,
    *,
    at: tuple[int, ...] = (),
    also: Callable[[Lists], dict[str, np.ndarray]] | None = None,
    chunk: int = CHUNK,
) -> Measurement:
    """Test metrics (ndcg@10 hit@10 mrr head_share@10 coverage@10), their contributions per user, and users_per_s.

    at, also: further metrics as in `measure_next_list`, from the full ranks and the lists of the ten best.
    """
    started = time.perf_counter()
    ranks, tops = rank_split(score, sequences, "test", chunk=chunk)
    seconds = time.perf_counter() - started
    metrics, contributions = ranking_metrics(ranks, tops, sequences.head_items(), sequences.n_items)
    add_metrics(metrics, contributions, Lists(tops, ranks.astype(np.float64), 0), at, also)
    return Measurement(
        metrics=metrics,
        units={name: Units("user", sequences.users, values) for name, values in contributions.items()},
        cost={"users_per_s": len(sequences) / max(seconds, 1e-9)},
    )
