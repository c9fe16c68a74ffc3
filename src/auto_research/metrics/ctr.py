"""Metrics of binary labels: pooled AUC and log loss, and AUC inside users."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from auto_research.runtime.errors import NonFinite, RunFailure

PROBABILITY_FLOOR = 1e-7


@dataclass(frozen=True)
class UserAuc:
    """AUC inside each user that has both labels. user: int64[V] ascending; auc: float64[V]; rows: int64[V]."""

    user: np.ndarray
    auc: np.ndarray
    rows: np.ndarray


def user_auc(user: np.ndarray, label: np.ndarray, score: np.ndarray) -> UserAuc:
    """AUC of every user with both labels, ties counted half. user, label, score: [N]."""
    user, label, score = np.asarray(user, dtype=np.int64), np.asarray(label) > 0.5, np.asarray(score, np.float64)
    order = np.lexsort((score, user))
    user, label, score = user[order], label[order], score[order]
    ids, first, rows = np.unique(user, return_index=True, return_counts=True)
    group = np.repeat(np.arange(len(ids)), rows)
    rank = _average_rank(group, score) - first[group]
    positives = np.bincount(group, weights=label, minlength=len(ids))
    negatives = rows - positives
    rank_sum = np.bincount(group, weights=np.where(label, rank, 0.0), minlength=len(ids))
    both = (positives > 0) & (negatives > 0)
    wins = rank_sum[both] - positives[both] * (positives[both] + 1) / 2
    return UserAuc(ids[both], wins / (positives[both] * negatives[both]), rows[both])


def _average_rank(group: np.ndarray, score: np.ndarray) -> np.ndarray:
    """1-based positions in an array sorted by (group, score), equal scores of a group sharing their mean position."""
    fresh = np.ones(len(score), dtype=bool)
    fresh[1:] = (group[1:] != group[:-1]) | (score[1:] != score[:-1])
    start = np.flatnonzero(fresh)
    size = np.diff(np.append(start, len(score)))
    return np.repeat(start + (size + 1) / 2, size)


def row_logloss(label: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Negative log likelihood of every row, float64[N]; probabilities are clipped to [1e-7, 1 - 1e-7]."""
    p = np.clip(np.asarray(score, dtype=np.float64), PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    return -np.where(np.asarray(label) > 0.5, np.log(p), np.log1p(-p))


def ctr_metrics(
    user: np.ndarray, label: np.ndarray, score: np.ndarray
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of probabilities `score` [N] against labels 0/1 [N] of users [N].

    auc and logloss over all rows (scikit-learn); uauc = mean AUC over users with both labels; gauc = the same,
    weighted by the user's number of rows (card din). Second value: `user` int64[V], `uauc` float64[V] (its mean is
    uauc), `rows` int64[V]. Raises NonFinite, and RunFailure when there are not both labels.
    """
    from sklearn.metrics import log_loss, roc_auc_score

    label = (np.asarray(label) > 0.5).astype(np.int64)
    score = np.asarray(score, dtype=np.float64)
    if not np.isfinite(score).all():
        raise NonFinite("scores contain NaN or infinity")
    inside = user_auc(user, label, score)
    if len(np.unique(label)) < 2 or not len(inside.user):
        raise RunFailure(f"AUC needs both labels, overall and inside one user; {len(label)} rows do not have them")
    clipped = np.clip(score, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    metrics = {
        "auc": float(roc_auc_score(label, score)),
        "uauc": float(inside.auc.mean()),
        "gauc": float(np.average(inside.auc, weights=inside.rows)),
        "logloss": float(log_loss(label, clipped, labels=[0, 1])),
    }
    return metrics, {"user": inside.user, "uauc": inside.auc, "rows": inside.rows}
