"""Reward tables of preference alignment, fitted on train events only.

Duration-aware shaping (DARS, OneRec-V2, arXiv:2508.20900): the reward of an event is the rank of its feedback value
among events of the same user and the same exposure bucket, so that neither generous users nor long (here: popular)
items are rewarded for being so.

    q = (#less + 0.5 #equal) / n;   A = -1 where disliked, +1 where q >= 0.75, else 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from auto_research.data.interactions import Interactions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.errors import ConfigError

MIN_EVENTS = 4
POSITIVE_QUANTILE = 0.75
DISLIKE_RATING = 2
LIKE_RATING = 4
SESSION_LABELS = ("swt", "vtr", "wtr", "ltr")


class Events(NamedTuple):
    """Events in canonical order: user, item int64[N], value float64[N] (rating, or play time), n_users, n_items."""

    user: np.ndarray
    item: np.ndarray
    value: np.ndarray
    n_users: int
    n_items: int


def train_events(data: Interactions, split: LeaveTwoOut) -> Events:
    """The train part of a leave-two-out split with its ratings; ConfigError when the two do not belong together."""
    starts = data.user_starts()
    lengths = np.diff(split.train_starts)
    offset = np.arange(split.train_starts[-1]) - np.repeat(split.train_starts[:-1], lengths)
    rows = np.repeat(starts[split.users], lengths) + offset
    if rows.size and (rows.max() >= len(data) or not np.array_equal(data.item[rows], split.train_items)):
        raise ConfigError("the interactions and the sequences are not of the same data set")
    item = data.item[rows].astype(np.int64)
    return Events(data.user[rows].astype(np.int64), item, data.rating[rows].astype(float), data.n_users, data.n_items)


def duration_bucket(duration: np.ndarray) -> np.ndarray:
    """int64 F(d) = floor(log2(d + 1e-3)); d in seconds, or 1 + train ratings of the item where there is no duration."""
    return np.floor(np.log2(np.asarray(duration, dtype=np.float64) + 1e-3)).astype(np.int64)


def exposure_buckets(train: Events) -> np.ndarray:
    """int64[n_items + 1]: `duration_bucket` of 1 + train ratings of every item."""
    return duration_bucket(1 + np.bincount(train.item, minlength=train.n_items + 1))


@dataclass(frozen=True)
class QuantileReward:
    """Reference distributions of train events; labels any event without looking at other events to be labelled.

    bucket: int64[n_items + 1] of every item.  The distribution an event is compared with is the first that exists of
    the user's events in the item's bucket (at least 4), all of the user's events, all events in the bucket, all events.
    """

    bucket: np.ndarray
    own_bucket: _Reference
    user: _Reference
    any_bucket: _Reference
    everything: _Reference

    def quantile(self, user: np.ndarray, item: np.ndarray, value: np.ndarray) -> np.ndarray:
        """float64[N] mid-rank q in [0, 1] of events."""
        user, item = np.asarray(user, dtype=np.int64), np.asarray(item, dtype=np.int64)
        value = np.asarray(value, dtype=np.float64)
        bucket = self.bucket[item]
        q = np.full(len(user), np.nan)
        for reference, group, least in (
            (self.own_bucket, _pair(user, bucket), MIN_EVENTS),
            (self.user, user, 1),
            (self.any_bucket, bucket, 1),
            (self.everything, np.zeros_like(user), 1),
        ):
            open_rows = np.flatnonzero(np.isnan(q))
            rank, count = reference.mid_rank(group[open_rows], value[open_rows])
            found = count >= least
            q[open_rows[found]] = rank[found] / count[found]
        return q

    def label(self, user, item, value, disliked: np.ndarray | None = None) -> np.ndarray:
        """int64[N] A in {-1, 0, 1}. disliked: bool[N]; None: ratings of at most 2."""
        value = np.asarray(value, dtype=np.float64)
        if disliked is None:
            disliked = value <= DISLIKE_RATING
        high = self.quantile(user, item, value) >= POSITIVE_QUANTILE
        return np.where(disliked, -1, np.where(high, 1, 0)).astype(np.int64)


def rating_quantile_reward(
    train: Events, bucket_fn: Callable[[Events], np.ndarray] = exposure_buckets
) -> QuantileReward:
    """Fit the reference distributions on train events. bucket_fn: train events -> int64[n_items + 1]."""
    if not len(train.user):
        raise ConfigError("a reward table needs train events")
    bucket = np.asarray(bucket_fn(train), dtype=np.int64)
    if len(bucket) != train.n_items + 1:
        raise ConfigError(f"buckets of {len(bucket) - 1} items do not fit a catalogue of {train.n_items}")
    of_event = bucket[train.item]
    return QuantileReward(
        bucket,
        _Reference(_pair(train.user, of_event), train.value),
        _Reference(train.user, train.value),
        _Reference(of_event, train.value),
        _Reference(np.zeros_like(train.user), train.value),
    )


def raw_reward(value: np.ndarray) -> np.ndarray:
    """int64[N]: +1 for ratings of 4 and 5, -1 for 1 and 2, else 0; the unshaped control."""
    value = np.asarray(value)
    return np.where(value >= LIKE_RATING, 1, np.where(value <= DISLIKE_RATING, -1, 0)).astype(np.int64)


def session_labels(ratings: np.ndarray) -> np.ndarray:
    """float32[.., 4] soft targets swt, vtr, wtr, ltr of sessions of m ratings 1..5, [.., m] (OneRec, arXiv:2502.18965).

    swt = mean (r - 1) / 4, vtr = mean 1[r >= 3], wtr = mean 1[r >= 4], ltr = mean 1[r = 5]. An item that was never
    rated has rating 0 and counts 0 in each.
    """
    ratings = np.asarray(ratings, dtype=np.float64)
    parts = [np.maximum(ratings - 1, 0) / 4, ratings >= 3, ratings >= 4, ratings >= 5]
    return np.stack([part.mean(axis=-1) for part in parts], axis=-1).astype(np.float32)


def good_sessions(ratings: np.ndarray, user_mean: np.ndarray) -> np.ndarray:
    """bool[N]: sessions float[N, m] with at most one rating under 3 and a mean of at least the user's train mean [N].

    Means that differ by less than 1e-5 are equal: many windows lie exactly on the user's mean.
    """
    ratings = np.asarray(ratings, dtype=np.float64)
    enough = ratings.mean(axis=1) >= np.asarray(user_mean, dtype=np.float64) - 1e-5
    return enough & ((ratings >= 3).sum(axis=1) >= ratings.shape[1] - 1)


def _pair(user: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    """One int64 per (user, bucket); buckets are log2 values far below 1000."""
    return user * 1000 + bucket + 500


class _Reference:
    """Sorted values of every group, for ranks of other values among them."""

    def __init__(self, group: np.ndarray, value: np.ndarray) -> None:
        self.values = np.unique(value)
        self.span = len(self.values) + 1
        self.groups = np.unique(group)
        self.keys = np.sort(np.searchsorted(self.groups, group) * self.span + np.searchsorted(self.values, value))

    def mid_rank(self, group: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(#less + 0.5 #equal, n) float64[N], int64[N] of values among their group's; n = 0 for an unknown group."""
        index = np.minimum(np.searchsorted(self.groups, group), len(self.groups) - 1)
        known = self.groups[index] == group
        first = index * self.span
        start, end = np.searchsorted(self.keys, first), np.searchsorted(self.keys, first + self.span)
        below = np.searchsorted(self.keys, first + np.searchsorted(self.values, value)) - start
        up_to = np.searchsorted(self.keys, first + np.searchsorted(self.values, value, side="right")) - start
        return (below + up_to) / 2, np.where(known, end - start, 0)
