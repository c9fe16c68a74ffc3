"""Measure a model that answers with lists of items, leave-two-out.

A lister is any callable (split, positions) -> int64[B, K] items, best first, 0 = none, where positions are int64[B]
places in `LeaveTwoOut.users`; K is at least 10 and may be larger. A list should hold distinct unseen items: others are
struck out, the rest moves up, and their share is reported. A target that is not in the list counts 0 everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from auto_research.data.sequences import LeaveTwoOut
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.ranking import EMPTY_SLOT, TOP_K, ranking_metrics

Lister = Callable[[str, np.ndarray], np.ndarray]

CHUNK = 256


class Lists(NamedTuple):
    """Cleaned lists of one split, int64[U, K] with 0 behind the last item, and how many slots were struck out.

    ranks: float64[U] place of the target, infinite where the list does not hold it.
    """

    items: np.ndarray
    ranks: np.ndarray
    struck: int

    def short(self, k: int = TOP_K) -> float:
        """Share of users with fewer than k items."""
        return float(((self.items[:, :k] != EMPTY_SLOT).sum(1) < k).mean())

    def recall(self, k: int) -> np.ndarray:
        """float64[U]: 1 where the target is among the first k."""
        return (self.ranks <= k).astype(np.float64)

    def ndcg(self, k: int) -> np.ndarray:
        """float64[U]: 1 / log2(1 + rank) up to rank k."""
        return np.where(self.ranks <= k, 1.0 / np.log2(1.0 + self.ranks), 0.0)


def genre_entropy(items: np.ndarray, genres: np.ndarray) -> np.ndarray:
    """float64[U] entropy in nats of the genres of each list int64[U, K]; an item spreads its weight over its genres.

    genres: float[n_items + 1, G] multi-hot. Items without a genre and empty slots count nothing; no genre at all gives 0.
    """
    share = genres / np.maximum(genres.sum(1, keepdims=True), 1)
    share[EMPTY_SLOT] = 0
    total = share[items].sum(1).astype(np.float64)  # (U, G)
    total /= np.maximum(total.sum(1, keepdims=True), 1e-12)
    return -(total * np.log(np.maximum(total, 1e-300))).sum(1)


def clean_lists(items: np.ndarray, excluded: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """Lists int64[B, K] without excluded or repeated items, what is left moved up; and the number struck out."""
    items = np.asarray(items, dtype=np.int64)
    if items.ndim != 2 or len(items) != len(excluded):
        raise ValueError(f"lists of {len(excluded)} users must be [users, K], got {list(items.shape)}")
    keep = items != EMPTY_SLOT
    filled = keep.sum()
    for row, seen in enumerate(excluded):
        keep[row] &= ~np.isin(items[row], seen)
        first = np.zeros(items.shape[1], dtype=bool)
        first[np.unique(items[row], return_index=True)[1]] = True
        keep[row] &= first
    order = np.argsort(~keep, axis=1, kind="stable")
    kept = np.take_along_axis(np.where(keep, items, EMPTY_SLOT), order, axis=1)
    return kept, int(filled - keep.sum())


def split_lists(
    lister: Lister, sequences: LeaveTwoOut, split: str, *, positions: np.ndarray | None = None, chunk: int = CHUNK
) -> Lists:
    """Cleaned lists and target ranks of users at `positions` (default: all). ValueError for lists under 10."""
    positions = np.arange(len(sequences)) if positions is None else np.asarray(positions)
    target = sequences.target(split)
    items, struck = [], 0
    for start in range(0, len(positions), chunk):
        part = positions[start : start + chunk]
        kept, bad = clean_lists(lister(split, part), [sequences.history(split, int(i)) for i in part])
        items.append(kept)
        struck += bad
    joined = np.concatenate(items) if items else np.zeros((0, TOP_K), dtype=np.int64)
    if joined.shape[1] < TOP_K:
        raise ValueError(f"lists of {joined.shape[1]} items; {TOP_K} are needed")
    hit = joined == target[positions][:, None]
    ranks = np.where(hit.any(1), 1.0 + hit.argmax(1), np.inf)
    return Lists(joined, ranks, struck)


def validation_lists(
    lister: Lister, sequences: LeaveTwoOut, *, users: int | None = None, chunk: int = CHUNK
) -> dict[str, float]:
    """ndcg@10, hit@10 and mrr (inside the list) on the validation targets of all users, or of the first `users`."""
    positions = np.arange(len(sequences) if users is None else min(users, len(sequences)))
    lists = split_lists(lister, sequences, "valid", positions=positions, chunk=chunk)
    return {
        "ndcg@10": float(lists.ndcg(TOP_K).mean()),
        "hit@10": float(lists.recall(TOP_K).mean()),
        "mrr": float((1.0 / lists.ranks).mean()),
    }


def add_metrics(
    metrics: dict[str, float],
    contributions: dict[str, np.ndarray],
    lists: Lists,
    at: tuple[int, ...],
    also: Callable[[Lists], dict[str, np.ndarray]] | None,
) -> None:
    """Add recall@k and ndcg@k for k in `at`, and what `also` finds, to metrics and contributions float64[U]."""
    more = {f"{name}@{k}": values(k) for k in at for name, values in (("recall", lists.recall), ("ndcg", lists.ndcg))}
    more |= also(lists) if also is not None else {}
    contributions |= more
    metrics |= {name: float(values.mean()) for name, values in more.items()}


def measure_next_list(
    lister: Lister,
    sequences: LeaveTwoOut,
    *,
    at: tuple[int, ...] = (),
    also: Callable[[Lists], dict[str, np.ndarray]] | None = None,
    chunk: int = CHUNK,
) -> Measurement:
    """Test metrics as `measure_next_item` gives them, from lists: mrr counts only targets inside the list.

    at: more cut-offs k, each adding recall@k and ndcg@k with their contributions (k up to the list's length).
    also: gives more metrics of the lists by their contributions float64[U], e.g. `genre_entropy`.
    Also short_lists (share of users with fewer than 10 items), struck_items (share of slots struck out: seen or
    repeated), and users_per_s among the costs.
    """
    started = time.perf_counter()
    lists = split_lists(lister, sequences, "test", chunk=chunk)
    seconds = time.perf_counter() - started
    head = sequences.head_items()
    metrics, contributions = ranking_metrics(lists.ranks, lists.items[:, :TOP_K], head, sequences.n_items)
    if max(at, default=0) > lists.items.shape[1]:
        raise ValueError(f"recall@{max(at)} of lists of {lists.items.shape[1]} items")
    add_metrics(metrics, contributions, lists, at, also)
    metrics["short_lists"] = lists.short()
    metrics["struck_items"] = lists.struck / max(1, lists.items.size)
    return Measurement(
        metrics=metrics,
        units={name: Units("user", sequences.users, values) for name, values in contributions.items()},
        cost={"users_per_s": len(sequences) / max(seconds, 1e-9)},
    )
