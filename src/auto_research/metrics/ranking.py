"""Full-catalogue ranking metrics with one relevant item per user and pessimistic ties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOP_K = 10
EMPTY_SLOT = 0


def candidate_mask(shape: tuple[int, int], excluded: Sequence[np.ndarray]) -> np.ndarray:
    """bool[U, I + 1], False for padding (column 0) and for each user's excluded item ids."""
    mask = np.ones(shape, dtype=bool)
    mask[:, 0] = False
    lengths = [len(items) for items in excluded]
    if sum(lengths):
        mask[np.repeat(np.arange(shape[0]), lengths), np.concatenate(excluded).astype(np.int64)] = False
    return mask


def rank_of_target(scores: np.ndarray, target: np.ndarray, excluded: Sequence[np.ndarray]) -> np.ndarray:
    """Rank (1 = best) of each user's target among the items that are not excluded; int64[U].

    scores: [U, I + 1] by item id, column 0 is padding and never counts; target: int[U]; excluded: U id arrays.
    Pessimistic: a candidate with the target's score, or a NaN, ranks above it. The target itself always counts.
    """
    scores = np.asarray(scores)
    users = np.arange(len(scores))
    mask = candidate_mask(scores.shape, excluded)
    mask[users, target] = False
    below = scores < scores[users, target][:, None]
    return 1 + (mask & ~below).sum(axis=1).astype(np.int64)


def top_items(scores: np.ndarray, excluded: Sequence[np.ndarray], k: int = TOP_K) -> np.ndarray:
    """int64[U, k] best item ids of each user, excluded items left out; ties by lower id, unfilled slots hold 0."""
    masked = np.where(candidate_mask(np.shape(scores), excluded), np.asarray(scores, dtype=np.float64), -np.inf)
    masked = np.where(np.isnan(masked), -np.inf, masked)
    k = min(k, masked.shape[1] - 1)
    worst_kept = -np.partition(-masked, k - 1, axis=1)[:, k - 1]
    # only items at least as good as the k-th can enter, so the stable sort sees a few columns instead of all
    order = np.full((len(masked), k), EMPTY_SLOT, dtype=np.int64)
    for user, floor in enumerate(worst_kept):
        able = np.flatnonzero((masked[user] >= floor) & np.isfinite(masked[user]))
        best = able[np.argsort(-masked[user, able], kind="stable")[:k]]
        order[user, : len(best)] = best
    return order


def ranking_metrics(
    ranks: np.ndarray, top10: np.ndarray, head_items: np.ndarray, n_items: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics and per-user contributions (float64[U], whose mean is the metric).

    ranks: int[U] from `rank_of_target`; top10: int[U, 10] from `top_items`; head_items: ids of the most rated train
    items. ndcg@10 = 1 / log2(1 + rank) up to rank 10; hit@10; mrr = 1 / rank over the whole catalogue;
    head_share@10 = share of filled slots held by head items; coverage@10 = distinct recommended items / n_items
    (a property of all users together, so it has no contributions).
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    within = ranks <= TOP_K
    filled = top10 != EMPTY_SLOT
    in_head = np.isin(top10, head_items) & filled
    per_user = {
        "ndcg@10": np.where(within, 1.0 / np.log2(1.0 + ranks), 0.0),
        "hit@10": within.astype(np.float64),
        "mrr": 1.0 / ranks,
        "head_share@10": in_head.sum(axis=1) / np.maximum(filled.sum(axis=1), 1),
    }
    metrics = {name: float(values.mean()) for name, values in per_user.items()}
    metrics["coverage@10"] = len(np.unique(top10[filled])) / n_items
    return metrics, per_user
