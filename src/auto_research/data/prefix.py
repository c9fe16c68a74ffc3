"""Strict-past statistics: everything known about a user or an item before a request, computed in float64.

Nothing here reads a rating made at or after the request's second. Definitions: card rankmixer, `data.inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from auto_research.data.interactions import Interactions

LIKE_RATING = 4.0
LOVE_RATING = 5.0
LOG_BUCKETS = 32


def log2_bucket(seconds: np.ndarray) -> np.ndarray:
    """min(31, floor(log2(1 + seconds))) as int64, exact for non-negative integers."""
    _, exponent = np.frexp(1.0 + np.asarray(seconds, dtype=np.float64))
    return np.minimum(LOG_BUCKETS - 1, exponent - 1).astype(np.int64)


@dataclass(frozen=True)
class UserPrefix:
    """Per request statistics of the user's strictly earlier ratings.

    stats: float32[R, 3 + G]: log1p(count), mean rating (0 without one), like rate, like rate per genre; rates are
    (likes + 1) / (n + 2). genre_rate: float64[R, G]; liked_genres: float64[R, G] counts of genres among liked items.
    """

    stats: np.ndarray
    genre_rate: np.ndarray
    liked_genres: np.ndarray


def user_prefix(data: Interactions, first: np.ndarray, start: np.ndarray) -> UserPrefix:
    """Statistics over rows [first[r], start[r]) of every request r; first = the user's first row, both int64[R]."""
    rating = data.rating.astype(np.float64)
    like = (data.rating >= LIKE_RATING).astype(np.float64)
    genres = data.item_genres[data.item].astype(np.float64)
    count = (start - first).astype(np.float64)
    total = _window_sum(rating, first, start)
    likes = _window_sum(like, first, start)
    seen = _window_sum(genres, first, start)
    liked = _window_sum(genres * like[:, None], first, start)
    rate = (liked + 1.0) / (seen + 2.0)
    mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    stats = np.column_stack([np.log1p(count), mean, (likes + 1.0) / (count + 2.0), rate])
    return UserPrefix(stats.astype(np.float32), rate, liked)


def _window_sum(values: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Sums over rows [first, stop). Exact: the values are small multiples of 1/2, far below 2**53 in total."""
    sums = np.zeros((len(values) + 1, *values.shape[1:]), dtype=np.float64)
    np.cumsum(values, axis=0, out=sums[1:])
    return sums[stop] - sums[first]


class ItemPrefix:
    """Popularity of an item at a time: TRAIN rows with a strictly smaller timestamp, of all users.

    One sorted array of (item, time) keys serves every query by binary search.
    """

    def __init__(self, data: Interactions, train_row: np.ndarray):
        """train_row: bool[N], the rows that count."""
        item = data.item[train_row].astype(np.int64)
        self.origin = int(data.timestamp.min())
        span = int(data.timestamp.max()) - self.origin + 2
        self.shift = int(span).bit_length()
        keys = (item << self.shift) + (data.timestamp[train_row] - self.origin)
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        like = (data.rating[train_row][order] >= LIKE_RATING).astype(np.int64)
        self.likes = np.concatenate([[0], np.cumsum(like)])
        self.first = np.searchsorted(self.keys, np.arange(data.n_items + 2, dtype=np.int64) << self.shift)

    def counts(self, item: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ratings, likes) as int64[P] of item int64[P] before time int64[P] (or a scalar)."""
        offset = np.clip(np.asarray(time, dtype=np.int64) - self.origin, 0, (1 << self.shift) - 1)
        stop = np.searchsorted(self.keys, (item.astype(np.int64) << self.shift) + offset, side="left")
        first = self.first[item]
        return stop - first, self.likes[stop] - self.likes[first]

    def popularity(self, item: np.ndarray, time: np.ndarray) -> np.ndarray:
        """float32[P, 2]: log1p(count) and (likes + 1) / (n + 2); (0, 0.5) for an item without earlier train rows."""
        count, likes = self.counts(item, time)
        return np.column_stack([np.log1p(count), (likes + 1.0) / (count + 2.0)]).astype(np.float32)


def cross_features(genre_rate: np.ndarray, liked_genres: np.ndarray, genres: np.ndarray) -> np.ndarray:
    """float32[P, 2]: dot(user genre like-rates, candidate genres), cosine(candidate genres, mean liked genres).

    All inputs [P, G]. The cosine is 0 when nothing was liked or the candidate has no genre.
    """
    dot = (genre_rate * genres).sum(axis=1)
    norm = np.sqrt((liked_genres * liked_genres).sum(axis=1) * (genres * genres).sum(axis=1))
    inner = (liked_genres * genres).sum(axis=1)
    cosine = np.divide(inner, norm, out=np.zeros_like(inner), where=norm > 0)
    return np.column_stack([dot, cosine]).astype(np.float32)


class UnratedItems:
    """Uniform draws from the items a user has not rated in TRAIN rows, without rejection.

    The j-th unrated item of a user is found by binary search over that user's sorted rated items.
    """

    def __init__(self, data: Interactions, train_row: np.ndarray):
        width = data.n_items + 1
        pairs = np.unique(data.user[train_row].astype(np.int64) * width + data.item[train_row])
        user, item = pairs // width, pairs % width
        self.width = width
        self.first = np.searchsorted(user, np.arange(data.n_users + 2))
        rank = np.arange(len(user)) - self.first[user]
        self.keys = user * width + (item - 1 - rank)
        self.free = data.n_items - np.diff(self.first)

    def draw(self, user: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """int64[P] one item for each entry of user int64[P]; a user who rated everything gets any item."""
        free = self.free[user]
        size = np.where(free > 0, free, self.width - 1)
        j = np.minimum((rng.random(len(user)) * size).astype(np.int64), size - 1)
        before = np.searchsorted(self.keys, user * self.width + j, side="right") - self.first[user]
        return np.where(free > 0, j + 1 + before, j + 1)
