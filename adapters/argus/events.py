"""Logged events as (context, item, feedback), their split by time, and windows of them.

The state that predicts an event is that of the last event of a strictly earlier second, p(t): half of MovieLens' ratings
share their second with the one before. All events of a second have one context and one state. Splits are those of the
request table: by the share of a user's ratings in earlier seconds, below 0.8 train, below 0.9 validation, else test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from auto_research.data.interactions import Interactions
from auto_research.data.prefix import LIKE_RATING, LOG_BUCKETS, log2_bucket
from auto_research.data.request_index import SPLITS, RequestIndex
from auto_research.data.sequences import fixed_user_order, head_items

DAY = 86_400
FIRST_GAP = LOG_BUCKETS - 1
DELAYS = ("none", "request", "day")


@dataclass(frozen=True)
class EventSplit:
    """Events of `everyone` (int64 ids), of whom `users` int64[U] have a liked test event.

    index: the requests, one per user and second.  valid_target, test_target: int64[U] row of the first liked event of
    that part, -1 without one.
    """

    interactions: Interactions
    index: RequestIndex
    everyone: np.ndarray
    users: np.ndarray
    valid_target: np.ndarray
    test_target: np.ndarray

    @classmethod
    def build(cls, data: Interactions, index: RequestIndex | None = None) -> EventSplit:
        index = RequestIndex.build(data) if index is None else index
        part = np.repeat(index.split, index.stop - index.start)
        liked = data.rating >= LIKE_RATING
        found = {}
        for split in ("valid", "test"):
            rows = np.flatnonzero(liked & (part == SPLITS.index(split)))
            owner, at = np.unique(data.user[rows], return_index=True)
            found[split] = np.full(data.n_users + 1, -1, dtype=np.int64)
            found[split][owner] = rows[at]
        everyone = np.unique(data.user).astype(np.int64)
        users = everyone[found["test"][everyone] >= 0]
        return cls(data, index, everyone, users, found["valid"][users], found["test"][users])

    def __len__(self) -> int:
        return len(self.users)

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    def restrict(self, users: int) -> EventSplit:
        """The first `users` of a fixed shuffle."""
        if users >= len(self.everyone):
            return self
        order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)
        everyone = np.sort(order[np.isin(order, self.everyone)][:users])
        keep = np.isin(self.users, everyone)
        targets = self.valid_target[keep], self.test_target[keep]
        return EventSplit(self.interactions, self.index, everyone, self.users[keep], *targets)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[n_users + 2] first row of every user."""
        return self.interactions.user_starts()

    @cached_property
    def part(self) -> np.ndarray:
        """int8[N] position in SPLITS of every row, -1 with fewer than five earlier ratings."""
        return np.repeat(self.index.split, self.index.stop - self.index.start)

    @cached_property
    def second(self) -> np.ndarray:
        """int64[N] first row of each row's second."""
        return np.repeat(self.index.start, self.index.stop - self.index.start)

    @cached_property
    def past(self) -> np.ndarray:
        """int64[N] p(t), the user's last row of a strictly earlier second, -1 without one."""
        first = np.repeat(self.index.first, self.index.stop - self.index.start)
        return np.where(self.second > first, self.second - 1, -1)

    def delayed(self, delay: str) -> np.ndarray:
        """int64[N] row whose state the user tower reads for an event: p(t), p of the request before, or p of the day."""
        if delay == "none":
            return self.past
        if delay == "request":
            return np.where(self.past >= 0, self.past[self.past], -1)
        day = self.interactions.timestamp // DAY
        key = self.interactions.user.astype(np.int64) * (int(day.max()) + 1) + day
        first = np.searchsorted(key, key)
        return np.where(first > self.starts[self.interactions.user], first - 1, -1)

    @cached_property
    def context(self) -> dict[str, np.ndarray]:
        """hour, weekday and gap (log2 bucket of the seconds since the user's last earlier second), int64[N]."""
        time = self.interactions.timestamp
        since = np.where(self.past >= 0, time - time[self.past], 0)
        gap = np.where(self.past >= 0, log2_bucket(since), FIRST_GAP)
        return {"hour": time // 3600 % 24, "weekday": (time // DAY + 4) % 7, "gap": gap}

    def rows(self, split: str) -> np.ndarray:
        """int64: rows of a split, of `everyone`."""
        return np.flatnonzero((self.part == SPLITS.index(split)) & np.isin(self.interactions.user, self.everyone))

    def popularity(self) -> np.ndarray:
        """int64[n_items + 1] events before the validation part of every item."""
        rows = self.index.train_row & np.isin(self.interactions.user, self.everyone)
        return np.bincount(self.interactions.item[rows], minlength=self.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        return head_items(self.popularity())

    def target(self, split: str) -> np.ndarray:
        """int64[U] target row of 'valid' or 'test', -1 without one."""
        return {"valid": self.valid_target, "test": self.test_target}[split]

    def cut(self, split: str) -> np.ndarray:
        """int64[U] first row that the score of a user's target may not see: of its second, or of its part without one."""
        target = self.target(split)
        part = np.where(self.part < SPLITS.index(split), 0, 1)
        begin = np.array([self.starts[u] + np.argmax(part[self.starts[u] : self.starts[u + 1]]) for u in self.users])
        return np.where(target >= 0, self.second[target], begin)

    def seen(self, split: str, positions: np.ndarray) -> list[np.ndarray]:
        """Per user the items rated in earlier seconds: never candidates."""
        cut = self.cut(split)
        return [self.interactions.item[self.starts[self.users[i]] : cut[i]].astype(np.int64) for i in positions]

    # What the contract tests ask of a split (tests/adapters/contract_edits.py, OwnSplit)

    def hidden(self, split: str) -> np.ndarray:
        return self._until_the_end(self.cut(split))

    def tested(self) -> np.ndarray:
        return (self.part == SPLITS.index("test")) & np.isin(self.interactions.user, self.everyone) | self.hidden(
            "test"
        )

    def fixed(self) -> np.ndarray:
        """bool[N]: targets stay liked, and what comes before them, or is in a part without one, stays not liked."""
        user, liked = self.interactions.user, self.interactions.rating >= LIKE_RATING
        fixed = (self.part == SPLITS.index("test")) & ~np.isin(user, self.users)
        for split in ("valid", "test"):
            target = self.target(split)
            last = np.full(self.interactions.n_users + 1, -1, dtype=np.int64)
            last[self.users] = np.where(target >= 0, target, len(user))
            fixed |= (self.part == SPLITS.index(split)) & (np.arange(len(user)) <= last[user])
            second = self.second[target[target >= 0]]
            fixed |= np.isin(self.second, second) & ~liked
        return fixed

    def edited(self, **columns: np.ndarray) -> EventSplit:
        """The same split and targets over other items or ratings."""
        return replace(self, interactions=self.interactions.edited(**columns))

    def _until_the_end(self, start: np.ndarray) -> np.ndarray:
        marked = np.zeros(len(self.interactions), dtype=bool)
        for user, first in zip(self.users, start, strict=True):
            marked[first : self.starts[user + 1]] = True
        return marked


@dataclass
class EventBatch:
    """B windows of L events, left-padded; int64 unless said otherwise.

    item, rating (1..5; 0 unknown), hour, weekday, gap, time: [B, L]; mask: bool[B, L].
    state: [B, L] where the state that predicts an event stands: 0 the beginning, j + 1 after event j.
    second: [B, L] number of the event's second, ascending along a window.
    delayed: [B, L] the state the user tower reads.  at: [N] flat places (b * L + t) of the events with a loss.
    negative, owner: [M] drawn items and the window each is from, -1 for uniform ones.
    better, worse: [Q] flat places of the events of a pair; earlier: [Q] the earlier of the two.
    """

    item: Tensor
    rating: Tensor
    hour: Tensor
    weekday: Tensor
    gap: Tensor
    mask: Tensor
    state: Tensor
    second: Tensor
    delayed: Tensor
    at: Tensor
    negative: Tensor
    owner: Tensor
    better: Tensor
    worse: Tensor
    earlier: Tensor

    def to(self, device: torch.device | str) -> EventBatch:
        return EventBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.item.shape)


def windows(
    data: EventSplit,
    start: np.ndarray,
    stop: np.ndarray,
    *,
    losses: np.ndarray | None = None,
    blank_last: bool = False,
    delay: str = "request",
    previous: bool = False,
) -> EventBatch:
    """Windows of the rows [start_b, stop_b).

    losses: bool[N] rows that have a loss.  blank_last: item and feedback of the last event are unknown.  previous: the
    leaky reading p(t) = t - 1.
    """
    table = data.interactions
    size = stop - start
    length = int(size.max())
    row = stop[:, None] - np.arange(length, 0, -1)[None, :]
    mask = row >= start[:, None]
    row = np.where(mask, row, 0)
    first_column = (length - size)[:, None]

    def column_of(wanted: np.ndarray) -> np.ndarray:
        inside = wanted >= start[:, None]
        return np.where(mask & inside, wanted - start[:, None] + first_column + 1, 0)

    past = np.where(row > data.starts[table.user[row]], row - 1, -1) if previous else data.past[row]
    known = mask.copy()
    if blank_last:
        known[:, -1] = False
    listed = np.zeros_like(mask) if losses is None else losses[row] & mask
    columns = {
        "item": np.where(known, table.item[row], 0),
        "rating": np.where(known, np.rint(table.rating[row]), 0),
        **{name: np.where(mask, values[row], 0) for name, values in data.context.items()},
        "state": column_of(past),
        "second": np.where(mask, data.second[row], -1),
        "delayed": column_of(data.delayed(delay)[row]),
        "at": np.flatnonzero(listed),
    }
    made = {name: torch.from_numpy(np.ascontiguousarray(values.astype(np.int64))) for name, values in columns.items()}
    empty = torch.zeros(0, dtype=torch.int64)
    drawn = dict.fromkeys(("negative", "owner", "better", "worse", "earlier"), empty)
    return EventBatch(**made, **drawn, mask=torch.from_numpy(mask))


def target_windows(data: EventSplit, split: str, positions: np.ndarray, context: int, **options) -> EventBatch:
    """Windows that end with the blank target event of each user: at most `context` events, the target included.

    Its other events are those strictly before the target's second. A user without target has its part's first event.
    """
    cut = data.cut(split)[positions]
    first = data.starts[data.users[positions]]
    return windows(data, np.maximum(first, cut + 1 - context), cut + 1, blank_last=True, **options)


def part_windows(data: EventSplit, split: str, users: np.ndarray, context: int, **options) -> EventBatch:
    """The newest `context` events of users up to the end of a part, with losses on the events of the part."""
    first, last = data.starts[users], data.starts[users + 1]
    if split == "valid":
        after = np.concatenate([[0], np.cumsum(data.part == SPLITS.index("test"))])
        last = last - (after[last] - after[first])
    listed = data.part == SPLITS.index(split)
    return windows(data, np.maximum(first, last - context), last, losses=listed, **options)
