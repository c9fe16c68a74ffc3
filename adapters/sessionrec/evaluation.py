"""Set metrics of the next session over the full catalogue.

    Recall@k = hits in the top k / |P|        NDCG@k = sum_hits 1 / log2(1 + rank) / sum_{r <= min(|P|, k)} 1 / log2(1 + r)

A scorer is (split, positions int64[B]) -> scores [B, n_items + 1]; items of earlier sessions are excluded here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from adapters.sessionrec.sessions import SessionSplit
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.ctr import user_auc
from auto_research.metrics.ranking import EMPTY_SLOT, top_items
from auto_research.runtime.errors import NonFinite

Scorer = Callable[[str, np.ndarray], np.ndarray]
CHUNK = 256
CUTS = (10, 20)
HEAD_TOP = 10


def set_ranks(scores: np.ndarray, positives: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Ranks (1 = best, ascending) of the positives among items not seen; int64[|P|].

    scores: [n_items + 1], column 0 is padding. Pessimistic: any other item with the same score ranks above a positive.
    Raises NonFinite.
    """
    if not np.isfinite(scores[1:]).all():
        raise NonFinite("scores contain NaN or infinity")
    other = np.ones(len(scores), dtype=bool)
    other[0] = False
    other[seen] = False
    other[positives] = False
    mine = np.sort(scores[positives])[::-1]
    above = (scores[other] >= mine[:, None]).sum(1)
    return above + np.arange(1, len(mine) + 1)


def set_metrics(ranks: np.ndarray, k: int) -> tuple[float, float]:
    """Recall@k and NDCG@k of one user from the ranks of all positives."""
    hits = ranks[ranks <= k]
    ideal = 1.0 / np.log2(1.0 + np.arange(1, min(len(ranks), k) + 1))
    return len(hits) / len(ranks), float((1.0 / np.log2(1.0 + hits)).sum() / ideal.sum())


def _scored(score: Scorer, data: SessionSplit, split: str):
    """(position, its scores) one user at a time."""
    for start in range(0, len(data), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(data)))
        yield from zip(positions, np.asarray(score(split, positions), dtype=np.float64), strict=True)


def validation_metrics(score: Scorer, data: SessionSplit) -> dict[str, float]:
    """ndcg@10 and recall@10 of the validation sessions."""
    positives, _ = data.relevant("valid")
    seen = data.seen("valid", np.arange(len(data)))
    found = [set_metrics(set_ranks(s, positives[i], seen[i]), HEAD_TOP) for i, s in _scored(score, data, "valid")]
    recall, ndcg = np.mean(found, axis=0)
    return {"ndcg@10": float(ndcg), "recall@10": float(recall)}


def measure(score: Scorer, data: SessionSplit) -> Measurement:
    """Test metrics with contributions per user; in_session_auc over the users whose session has both kinds."""
    positives, negatives = data.relevant("test")
    seen = data.seen("test", np.arange(len(data)))
    head = data.head_items()
    values: dict[str, list[float]] = {f"{name}@{k}": [] for k in CUTS for name in ("recall", "ndcg")}
    values["head_share@10"] = []
    rows: list[tuple[int, bool, float]] = []
    began = time.perf_counter()
    for i, scores in _scored(score, data, "test"):
        ranks = set_ranks(scores, positives[i], seen[i])
        for k in CUTS:
            recall, ndcg = set_metrics(ranks, k)
            values[f"recall@{k}"].append(recall), values[f"ndcg@{k}"].append(ndcg)
        top = top_items(scores[None, :], [seen[i]], HEAD_TOP)[0]
        values["head_share@10"].append(float(np.isin(top[top != EMPTY_SLOT], head).mean()))
        for items, liked in ((positives[i], True), (negatives[i], False)):
            rows += [(int(data.users[i]), liked, float(scores[item])) for item in items]
    seconds = time.perf_counter() - began
    units = {name: Units("user", data.users, found) for name, found in values.items()}
    inside = user_auc(*(np.array(column) for column in zip(*rows, strict=True)))
    units["in_session_auc"] = Units("user", inside.user, inside.auc)
    return Measurement(
        metrics={name: float(np.mean(unit.values)) for name, unit in units.items()},
        units=units,
        cost={"users_per_s": len(data) / max(seconds, 1e-9)},
    )
