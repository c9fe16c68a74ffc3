"""Metrics of ranked lists against the five items of a session, and of the sessions a model makes.

NDCG@10 = sum_hits 1 / log2(1 + rank) / sum_{r <= min(m, 10)} 1 / log2(1 + r),   recall@10 = hits / m
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from adapters.onerec.decoding import TOP
from adapters.onerec.sessions import SessionSplit
from auto_research.data.rewards import SESSION_LABELS
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.ranking import top_items

Lister = Callable[[str, np.ndarray], np.ndarray]  # (split, positions) -> int64[B, 10]
Scorer = Callable[[str, np.ndarray], np.ndarray]  # (split, positions) -> [B, n_items + 1]
CHUNK = 256


def list_contributions(lists: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """ndcg@10 and recall@10 of every user, float64[U]; lists int64[U, 10] (0 = none), targets int64[U, m]."""
    hit = (lists[:, :, None] == targets[:, None, :]).any(2) & (lists > 0)  # (U, 10)
    gain = 1.0 / np.log2(1.0 + np.arange(1, lists.shape[1] + 1))
    ideal = gain[: min(targets.shape[1], lists.shape[1])].sum()
    return {"ndcg@10": hit @ gain / ideal, "recall@10": hit.sum(1) / targets.shape[1]}


def validation_metrics(lister: Lister, data: SessionSplit) -> dict[str, float]:
    """ndcg@10 and recall@10 of the validation sessions."""
    lists = lister("valid", np.arange(len(data)))
    return {name: float(v.mean()) for name, v in list_contributions(lists, data.targets("valid")).items()}


def measure(lister: Lister, data: SessionSplit) -> tuple[Measurement, np.ndarray]:
    """Test metrics of lists with their contributions per user, and the lists."""
    began = time.perf_counter()
    lists = lister("test", np.arange(len(data)))
    seconds = time.perf_counter() - began
    values = list_contributions(lists, data.targets("test"))
    filled = lists > 0
    values["head_share@10"] = (np.isin(lists, data.head_items()) & filled).sum(1) / np.maximum(filled.sum(1), 1)
    metrics = {name: float(v.mean()) for name, v in values.items()}
    metrics["coverage@10"] = len(np.unique(lists[filled])) / data.n_items
    metrics["short_lists"] = float((~filled.all(1)).mean())
    units = {name: Units("user", data.users, v) for name, v in values.items()}
    return Measurement(metrics, units=units, cost={"users_per_s": len(data) / max(seconds, 1e-9)}), lists


def score_lister(score: Scorer, data: SessionSplit) -> Lister:
    """The ten best unseen items of a scorer."""

    def lists(split: str, positions: np.ndarray) -> np.ndarray:
        parts = []
        for start in range(0, len(positions), CHUNK):
            part = positions[start : start + CHUNK]
            parts.append(top_items(np.asarray(score(split, part)), data.seen(split, part), TOP))
        return np.concatenate(parts)

    return lists


def session_values(
    sessions: np.ndarray, genres: np.ndarray, judged: np.ndarray, best: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Reward and diversity of one session a user, each float64[U].

    sessions: int64[U, m].  judged: [U, 4] its labels as the reward model sees them.  best: [U, 4] the largest of every
    label, and of R [U, 5], among all sessions made for the user.
    """
    found = {"mean_reward": judged.mean(1), "session_genre_diversity": genre_diversity(sessions, genres)}
    found |= {f"mean_{name}": judged[:, n] for n, name in enumerate(SESSION_LABELS) if name in ("swt", "ltr")}
    if best is not None:
        found["max_reward"] = best[:, -1]
        found |= {f"max_{name}": best[:, n] for n, name in enumerate(SESSION_LABELS) if name in ("swt", "ltr")}
    return {name: values.astype(np.float64) for name, values in found.items()}


def genre_diversity(sessions: np.ndarray, genres: np.ndarray) -> np.ndarray:
    """float64[U]: 1 - mean cosine of the genre vectors of two items of a session; 0 for single items."""
    vectors = genres[sessions].astype(np.float64)  # (U, m, G)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=2, keepdims=True), 1e-9)
    cosine = vectors @ vectors.transpose(0, 2, 1)
    m = sessions.shape[1]
    if m == 1:
        return np.zeros(len(sessions))
    return 1 - (cosine.sum((1, 2)) - np.trace(cosine, axis1=1, axis2=2)) / (m * (m - 1))


def code_entropy(lists: np.ndarray, codes: np.ndarray) -> float:
    """Entropy in nats of the first code over all listed items."""
    first = codes[lists[lists > 0], 0]
    share = np.bincount(first) / max(1, len(first))
    return float(-(share[share > 0] * np.log(share[share > 0])).sum())


def add_units(measured: Measurement, users: np.ndarray, values: dict[str, np.ndarray]) -> None:
    """Metrics with their contributions per user."""
    measured.metrics |= {name: float(v.mean()) for name, v in values.items()}
    measured.units |= {name: Units("user", users, v) for name, v in values.items()}
