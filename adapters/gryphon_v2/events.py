"""Feedback events of users, the split of card gryphon-v2 and the windows that models read.

Positives are ratings of 4 and 5. The last positive of a user is the test target, the one before the validation target;
the history of a target is everything before it in canonical order. The rating window is what the weighted pair accuracy
is measured on: the test target, what follows, and the nine events before. Training stops before the earlier of the
validation target and the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auto_research.data.behaviours import FIRST_GAP
from auto_research.data.interactions import Interactions
from auto_research.data.prefix import LIKE_RATING, log2_bucket
from auto_research.data.sequences import fixed_user_order, head_items
from auto_research.runtime.errors import ConfigError

BEFORE_TARGET = 9
MIN_POSITIVES = 2
WINDOW = 10


@dataclass(frozen=True)
class FeedbackSplit:
    """U users with at least two positives; all fields but `interactions` are int64[U].

    users: ids.  first, end: a user's rows are [first, end).  valid_target, test_target: rows.  window: first row of the
    rating window, which ends at `end`.
    """

    interactions: Interactions
    users: np.ndarray
    first: np.ndarray
    end: np.ndarray
    valid_target: np.ndarray
    test_target: np.ndarray
    window: np.ndarray

    inside_seconds = True  # a history ends inside a second, as in leave-two-out

    @classmethod
    def build(cls, data: Interactions) -> FeedbackSplit:
        rows = np.flatnonzero(data.rating >= LIKE_RATING)
        users, count = np.unique(data.user[rows], return_counts=True)
        last = np.cumsum(count) - 1
        users, last = users[count >= MIN_POSITIVES].astype(np.int64), last[count >= MIN_POSITIVES]
        starts = data.user_starts()
        first, test = starts[users], rows[last]
        window = np.maximum(first, test - BEFORE_TARGET)
        return cls(data, users, first, starts[users + 1], rows[last - 1], test, window)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    def restrict(self, users: int) -> FeedbackSplit:
        """The first `users` of a fixed shuffle."""
        if users >= len(self):
            return self
        order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)
        keep = np.isin(self.users, order[np.isin(order, self.users)][:users])
        names = ("users", "first", "end", "valid_target", "test_target", "window")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def cut(self, split: str) -> np.ndarray:
        """int64[U] target row of 'valid' or 'test'."""
        if split not in ("valid", "test"):
            raise ConfigError(f"unknown split '{split}'; known: valid, test")
        return self.valid_target if split == "valid" else self.test_target

    def target(self, split: str) -> np.ndarray:
        """int64[U] target items."""
        return self.interactions.item[self.cut(split)].astype(np.int64)

    def history(self, split: str, i: int) -> np.ndarray:
        """int64 items before the target of user position i: what a model may read, and never candidates."""
        return self.interactions.item[self.first[i] : self.cut(split)[i]].astype(np.int64)

    @property
    def train_stop(self) -> np.ndarray:
        """int64[U]: training reads rows [first, train_stop)."""
        return np.minimum(self.valid_target, self.window)

    @cached_property
    def train_rows(self) -> np.ndarray:
        return np.concatenate([np.arange(a, b) for a, b in zip(self.first, self.train_stop, strict=True)])

    @cached_property
    def train_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """Positive train rows with an event before them, int64[T], and the position in `users` of each."""
        rows = self.train_rows
        owner = np.repeat(np.arange(len(self)), self.train_stop - self.first)
        keep = (self.interactions.rating[rows] >= LIKE_RATING) & (rows > self.first[owner])
        return rows[keep], owner[keep]

    def train_items(self, positive: bool = False) -> list[np.ndarray]:
        """Per user int64 items of its train rows, or of the positive ones."""
        data, found = self.interactions, []
        for start, stop in zip(self.first, self.train_stop, strict=True):
            items = data.item[start:stop].astype(np.int64)
            found.append(items[data.rating[start:stop] >= LIKE_RATING] if positive else items)
        return found

    def popularity(self) -> np.ndarray:
        """int64[n_items + 1] train events of every item."""
        return np.bincount(self.interactions.item[self.train_rows], minlength=self.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        return head_items(self.popularity())

    @cached_property
    def gap(self) -> np.ndarray:
        """int64[N] log2 bucket of the seconds since the user's previous event."""
        data = self.interactions
        fresh = np.ones(len(data), dtype=bool)
        fresh[1:] = data.user[1:] != data.user[:-1]
        since = np.diff(data.timestamp, prepend=data.timestamp[:1])
        return np.where(fresh, FIRST_GAP, log2_bucket(np.where(fresh, 0, since)))

    # What the contract tests ask of a split (tests/adapters/contract_edits.py, OwnSplit)

    def hidden(self, split: str) -> np.ndarray:
        marked = np.zeros(len(self.interactions), dtype=bool)
        for start, stop in zip(self.cut(split), self.end, strict=True):
            marked[start:stop] = True
        return marked

    def tested(self) -> np.ndarray:
        return self.hidden("test")

    def fixed(self) -> np.ndarray:
        return np.zeros(len(self.interactions), dtype=bool)

    def other_ratings(self) -> np.ndarray:
        """float32[N]: every rating replaced by another of its own sign, since signs decide what the targets are."""
        return np.array([0, 2, 3, 1, 5, 4], dtype=np.float32)[np.rint(self.interactions.rating).astype(np.int64)]

    def edited(self, **columns: np.ndarray) -> FeedbackSplit:
        """The same rows as targets over other items or ratings."""
        return replace(self, interactions=self.interactions.edited(**columns))


class EventWindow(NamedTuple):
    """B histories of n events, left-padded, newest last: item, rating (1..5), gap (log2 bucket) int64[B, n], mask bool."""

    item: Tensor
    rating: Tensor
    gap: Tensor
    mask: Tensor

    def to(self, device: torch.device | str) -> EventWindow:
        return EventWindow(*(x.to(device) for x in self))


def event_windows(data: FeedbackSplit, positions: np.ndarray, stop: np.ndarray, length: int) -> EventWindow:
    """The newest `length` events before the rows `stop` int64[B] of the users at `positions` int64[B]."""
    row = stop[:, None] + np.arange(-length, 0)[None, :]
    mask = row >= data.first[positions][:, None]
    row = np.where(mask, row, 0)
    table = data.interactions
    columns = table.item[row], np.rint(table.rating[row]), data.gap[row]
    return EventWindow(
        *(torch.from_numpy(np.where(mask, column, 0).astype(np.int64)) for column in columns), torch.from_numpy(mask)
    )


def seen_items(data: FeedbackSplit, positions: np.ndarray, stop: np.ndarray) -> Tensor:
    """int64[B, S] all items of a user before the rows `stop`, filled up with 0."""
    first = data.first[positions]
    size = stop - first
    column = np.arange(max(1, int(size.max(initial=0))))
    inside = column < size[:, None]
    row = np.where(inside, first[:, None] + column, 0)
    return torch.from_numpy(np.where(inside, data.interactions.item[row], 0).astype(np.int64))


def logged_events(start: np.ndarray, stop: np.ndarray, data: FeedbackSplit) -> tuple[Tensor, Tensor]:
    """Items and ratings int64[B, W] of the rows [start, stop), 0 padded; W is the largest size."""
    row = start[:, None] + np.arange(max(1, int((stop - start).max())))
    inside = row < stop[:, None]
    row = np.where(inside, row, 0)
    item, rating = data.interactions.item[row], np.rint(data.interactions.rating[row])
    return tuple(torch.from_numpy(np.where(inside, x, 0).astype(np.int64)) for x in (item, rating))
