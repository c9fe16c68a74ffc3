"""Percentile bootstrap intervals (95%), paired: both arms are resampled with the same units. numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVELS = (2.5, 97.5)
CELLS_PER_CHUNK = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A point estimate and its 95% interval."""

    delta: float
    low: float
    high: float

    def excludes_zero(self) -> bool:
        """True when the whole interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def _interval(estimate: float, samples: np.ndarray) -> Interval:
    low, high = np.percentile(samples, LEVELS)
    return Interval(float(estimate), float(low), float(high))


def _draws(units: int, resamples: int, seed: int, width: int) -> Iterator[np.ndarray]:
    """Chunks of float64[c, units]: how often each unit is drawn in a resample; width = cells a resample will need."""
    rng = np.random.Generator(np.random.PCG64(seed))
    chunk = max(1, CELLS_PER_CHUNK // max(1, width))
    for start in range(0, resamples, chunk):
        picks = rng.integers(0, units, size=(min(chunk, resamples - start), units))
        offsets = np.arange(len(picks))[:, None] * units
        counts = np.bincount((picks + offsets).ravel(), minlength=len(picks) * units)
        yield counts.reshape(len(picks), units).astype(np.float64)


def interval_mean(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean of per-unit values [n] and its interval."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("values must be a non-empty vector")
    samples = [counts @ values / len(values) for counts in _draws(len(values), resamples, seed, len(values))]
    return _interval(values.mean(), np.concatenate(samples))


def paired_mean(a: np.ndarray, b: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """mean(a) - mean(b) over the same units in the same order, a and b: [n]."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired values differ in shape: {a.shape} and {b.shape}")
    return interval_mean(a - b, resamples, seed)


def paired_cluster_mean(
    cluster: np.ndarray, a: np.ndarray, b: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """mean(a) - mean(b) over rows [N], resampling whole clusters (users): rows of a user stay together."""
    _, code = np.unique(cluster, return_inverse=True)
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    total, rows = np.bincount(code, weights=difference), np.bincount(code).astype(np.float64)
    samples = [(c @ total) / (c @ rows) for c in _draws(len(total), resamples, seed, len(total))]
    return _interval(difference.mean(), np.concatenate(samples))


class WeightedAuc:
    """AUC of fixed scores under many row weightings at once; ties count half."""

    def __init__(self, label: np.ndarray, score: np.ndarray):
        self.order = np.argsort(score, kind="stable")
        self.positive = label[self.order]
        ordered = score[self.order]
        fresh = np.ones(len(score), dtype=bool)
        fresh[1:] = ordered[1:] != ordered[:-1]
        self.start = np.flatnonzero(fresh)

    def __call__(self, weights: np.ndarray) -> np.ndarray:
        """weights: float64[c, N] in the rows' own order -> float64[c]; NaN where a label is missing."""
        ordered = weights[:, self.order]
        positive = np.add.reduceat(ordered * self.positive, self.start, axis=1)
        negative = np.add.reduceat(ordered * ~self.positive, self.start, axis=1)
        below = np.cumsum(negative, axis=1) - negative
        wins = (positive * (below + 0.5 * negative)).sum(axis=1)
        pairs = positive.sum(axis=1) * negative.sum(axis=1)
        return np.divide(wins, pairs, out=np.full_like(wins, np.nan), where=pairs > 0)


class _Wins:
    """Won pairs between users: how many (positive of u, negative of v) pairs a score orders rightly, ties half."""

    def __init__(self, user: np.ndarray, label: np.ndarray, score: np.ndarray):
        """user: int[N], numbered from 0; label: bool[N]; score: float[N]."""
        _, group = np.unique(score, return_inverse=True)
        self.n_groups, self.n_users = int(group.max()) + 1, int(user.max()) + 1
        self.negative_user, self.negative_group = user[~label], group[~label]
        order = np.argsort(user[label], kind="stable")
        self.positive_group = group[label][order]
        self.owners, self.starts = np.unique(user[label][order], return_index=True)

    def columns(self, first: int, stop: int) -> np.ndarray:
        """float64[n_users, stop - first]: wins of every user's positives over the negatives of users first..stop."""
        width = stop - first
        inside = (self.negative_user >= first) & (self.negative_user < stop)
        cell = self.negative_group[inside] * width + self.negative_user[inside] - first
        equal = np.bincount(cell, minlength=self.n_groups * width).reshape(self.n_groups, width).astype(np.float64)
        below = np.cumsum(equal, axis=0) - 0.5 * equal
        wins = np.zeros((self.n_users, width))
        wins[self.owners] = np.add.reduceat(below[self.positive_group], self.starts, axis=0)
        return wins


def paired_auc(
    user: np.ndarray,
    label: np.ndarray,
    score_a: np.ndarray,
    score_b: np.ndarray,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """AUC(a) - AUC(b) over rows [N], resampling whole users; scores [N], or [S, N] whose S AUCs (seeds) are averaged.

    With D[u, v] = won pairs of a minus those of b between users u and v, and c the times each user is drawn, a
    resample's difference is c'Dc / ((c . positives) (c . negatives)): exact, and one matrix product for all resamples.
    Raises ValueError when only one label occurs.
    """
    return _auc_interval(user, label, [(score_a, 1), (score_b, -1)], resamples, seed)


def auc_interval(
    user: np.ndarray, label: np.ndarray, score: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """AUC over rows [N], resampling whole users; score [N], or [S, N] whose S AUCs are averaged. Errors: `paired_auc`."""
    return _auc_interval(user, label, [(score, 1)], resamples, seed)


def _auc_interval(user, label, sides: list[tuple[np.ndarray, int]], resamples: int, seed: int) -> Interval:
    label = np.asarray(label) > 0.5
    if label.all() or not label.any():
        raise ValueError("AUC needs both labels")
    _, code = np.unique(user, return_inverse=True)
    signed = [(np.atleast_2d(np.asarray(scores, dtype=np.float64)), sign) for scores, sign in sides]
    wins = [(_Wins(code, label, score), sign / len(side)) for side, sign in signed for score in side]
    users = int(code.max()) + 1
    counts = np.concatenate(list(_draws(users, resamples, seed, users)))
    won, total = np.zeros(resamples), 0.0
    width = max(1, CELLS_PER_CHUNK // len(label))
    for first in range(0, users, width):
        stop = min(users, first + width)
        difference = sum(part.columns(first, stop) * weight for part, weight in wins)
        won += ((counts @ difference) * counts[:, first:stop]).sum(axis=1)
        total += difference.sum()
    positives, negatives = np.bincount(code, weights=label), np.bincount(code, weights=~label)
    pairs = (counts @ positives) * (counts @ negatives)
    return _interval(total / (positives.sum() * negatives.sum()), won[pairs > 0] / pairs[pairs > 0])
