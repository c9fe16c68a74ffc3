"""The stream of events: contexts of what happened before a row, targets of the splits, batches in global time order.

Rows are rows of the canonical order. A context holds the newest events of the row's user before that row, and nothing
else; each train row is the target of exactly one sample of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from auto_research.data.interactions import Interactions
from auto_research.data.prefix import LOG_BUCKETS, log2_bucket
from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng

GAPS = LOG_BUCKETS + 2  # 0 padding, 1 first event of a user, 2 + log2 bucket of the pause before an event
RATINGS = 6
USER_FIELDS = ("gender", "age", "occupation")
PRIOR_EVENTS, TESTED_PER_USER = 5, 5
HASH = 2654435761


class ContextBatch(NamedTuple):
    """fields int64[B, 4]: gender, age, occupation (0 unknown), hashed user.  item, rating, gap int64[B, n], newest last,
    0 where there is no event."""

    fields: Tensor
    item: Tensor
    rating: Tensor
    gap: Tensor

    def to(self, device: torch.device | str) -> ContextBatch:
        return ContextBatch(*(x.to(device) for x in self))

    def __len__(self) -> int:
        return len(self.item)


@dataclass(frozen=True)
class EventStream:
    """Columns int64[N] of all rows, the rows that train, and the target rows of each split.

    first: first row of the row's user.  item may differ from the interactions' own where sequences say so.
    train: int64[T].  targets: split -> int64[U].
    """

    interactions: Interactions
    item: np.ndarray
    first: np.ndarray
    gap: np.ndarray
    train: np.ndarray
    targets: dict[str, np.ndarray]

    @classmethod
    def of_sequences(cls, data: Interactions, sequences: LeaveTwoOut) -> EventStream:
        """Leave-two-out: the last event of a user is test, the one before validation. Items are the sequences'."""
        starts = data.user_starts()
        first, stop = starts[sequences.users], starts[sequences.users + 1]
        lengths = np.diff(sequences.train_starts)
        if not np.array_equal(lengths, stop - first - 2):
            raise ConfigError("the interactions and the sequences are not of the same data set")
        train = np.arange(lengths.sum()) + np.repeat(first - sequences.train_starts[:-1], lengths)
        item = data.item.astype(np.int64)
        item[train] = sequences.train_items
        item[stop - 2], item[stop - 1] = sequences.valid_target, sequences.test_target
        return cls._of(data, item, train, {"valid": stop - 2, "test": stop - 1})

    @classmethod
    def of_time(cls, data: Interactions, users: np.ndarray | None = None) -> EventStream:
        """Global time: the first 80 percent of all events train, the next 10 validate, the last 10 test.

        Targets have at least 5 earlier events; at most the first 5 of a user are tested. users: ids that count.
        """
        rows = np.arange(len(data))
        if users is not None:
            rows = rows[np.isin(data.user, users)]
        order = rows[np.argsort(data.timestamp[rows], kind="stable")]
        a, b = int(0.8 * len(order)), int(0.9 * len(order))
        first = data.user_starts()[data.user]
        targets = {}
        for split, part in (("valid", order[a:b]), ("test", order[b:])):
            part = np.sort(part)
            part = part[part - first[part] >= PRIOR_EVENTS]
            user = data.user[part]
            rank = np.arange(len(part)) - np.searchsorted(user, user)
            targets[split] = part[rank < TESTED_PER_USER]
        return cls._of(data, data.item.astype(np.int64), np.sort(order[:a]), targets)

    @classmethod
    def _of(cls, data: Interactions, item: np.ndarray, train: np.ndarray, targets: dict) -> EventStream:
        first = data.user_starts()[data.user]
        pause = np.diff(data.timestamp, prepend=data.timestamp[:1])
        opens = np.arange(len(data)) == first
        gap = np.where(opens, 1, 2 + log2_bucket(np.where(opens, 0, pause)))
        return cls(data, item, first, gap, train, targets)

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    def user(self, rows: np.ndarray) -> np.ndarray:
        return self.interactions.user[rows].astype(np.int64)

    def rating(self, rows: np.ndarray) -> np.ndarray:
        return self.interactions.rating[rows]

    def history(self, row: int) -> np.ndarray:
        """int64 items of the user before a row."""
        return self.item[self.first[row] : row]

    def popularity(self) -> np.ndarray:
        """int64[n_items + 1] train events of every item."""
        return np.bincount(self.item[self.train], minlength=self.n_items + 1).astype(np.int64)

    def train_lists(self) -> list[np.ndarray]:
        """Per user with train events their int64 items, oldest first."""
        user = self.user(self.train)
        return np.split(self.item[self.train], np.flatnonzero(np.diff(user)) + 1)

    def contexts(self, rows: np.ndarray, length: int, user_slots: int) -> ContextBatch:
        """What happened before each row: the `length` newest events of its user."""
        at = rows[:, None] + np.arange(-length, 0)
        inside = at >= self.first[rows][:, None]
        at = np.maximum(at, 0)
        data, user = self.interactions, self.user(rows)
        fields = [data.user_fields.get(name, np.zeros(data.n_users + 1, dtype=np.int64))[user] for name in USER_FIELDS]
        fields.append(user * HASH % 2**32 % user_slots)
        columns = (self.item[at], np.rint(data.rating[at]).astype(np.int64), self.gap[at])
        return ContextBatch(
            torch.from_numpy(np.stack(fields, axis=1).astype(np.int64)),
            *(torch.from_numpy(np.where(inside, column, 0)) for column in columns),
        )


class StreamBatch(NamedTuple):
    """Contexts and the event that followed each: target int64[B] items, advantage int64[B] in {-1, 0, 1}."""

    context: ContextBatch
    target: Tensor
    advantage: Tensor

    def to(self, device: torch.device | str) -> StreamBatch:
        return StreamBatch(self.context.to(device), self.target.to(device), self.advantage.to(device))


@dataclass(frozen=True)
class StreamRule:
    """batch; history: events of a context; chunk: rows shuffled together; order: 'time' or 'random'."""

    batch: int = 128
    history: int = 50
    chunk: int = 4096
    order: str = "time"
    user_slots: int = 1024

    def __post_init__(self) -> None:
        if self.order not in ("time", "random"):
            raise ConfigError(f"unknown order {self.order!r}; known: time, random")


class Stream:
    """Batches of passes over all train rows; a function of the step.

    Time order: ascending timestamps, shuffled anew in every pass inside chunks. advantage: int64[N] of every row.
    """

    def __init__(
        self,
        data: EventStream,
        rule: StreamRule,
        seed: tuple,
        device: torch.device,
        advantage: np.ndarray | None = None,
    ):
        self.data, self.rule, self.seed, self.device = data, rule, seed, device
        self.advantage = np.zeros(len(data.item), dtype=np.int64) if advantage is None else advantage
        time = data.interactions.timestamp[data.train]
        self.rows = data.train[np.argsort(time, kind="stable")]
        self.batch = min(rule.batch, len(self.rows))
        self.per_pass = -(-len(self.rows) // self.batch)
        self._order = lru_cache(maxsize=1)(self._ordered)

    def _ordered(self, number: int) -> np.ndarray:
        rng = stable_rng("stream", *self.seed, number)
        if self.rule.order == "random":
            return self.rows[rng.permutation(len(self.rows))]
        starts = range(0, len(self.rows), self.rule.chunk)
        parts = [self.rows[start : start + self.rule.chunk] for start in starts]
        return np.concatenate([part[rng.permutation(len(part))] for part in parts])

    def at(self, step: int) -> StreamBatch:
        number, part = divmod(step, self.per_pass)
        return self.read(self._order(number)[part * self.batch : (part + 1) * self.batch])

    def read(self, rows: np.ndarray) -> StreamBatch:
        """The batch of given target rows."""
        context = self.data.contexts(rows, self.rule.history, self.rule.user_slots)
        target, advantage = torch.from_numpy(self.data.item[rows]), torch.from_numpy(self.advantage[rows])
        return StreamBatch(context, target, advantage).to(self.device)

    def steps(self, length: int, first: int = 0) -> Callable[[int], Sequence[StreamBatch]]:
        """epoch -> its `length` batches; the first epoch begins at step `first`."""
        return lambda epoch: Steps(length, lambda index: self.at(first + epoch * length + index))

    def steps_to_newest(self, length: int, total: int) -> Callable[[int], Sequence[StreamBatch]]:
        """epoch -> its `length` batches; begun so that the last of `total` steps ends a pass, on the newest events."""
        return self.steps(length, -total % self.per_pass)


class Steps(Sequence):
    """`length` batches made when asked for."""

    def __init__(self, length: int, at: Callable[[int], Any]):
        self.length, self.at = length, at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"batch {index} of {self.length}")
        return self.at(index)


def restricted(data: Interactions, sequences: LeaveTwoOut) -> EventStream:
    """The time split over the users of the sequences."""
    everyone = len(sequences) == data.n_users
    return EventStream.of_time(data, None if everyone else sequences.users)
