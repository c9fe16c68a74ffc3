"""Train rows of the request table for both losses, and the targets of recall.

Train rows are those of the request table (below 0.8 of a user's ratings by time). Ranking is measured on its test part
with strictly earlier seconds as history; recall on a user's last event with everything before it in canonical order.
Users whose last event is not a test row, or who have no validation row, have no recall target.
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
from auto_research.data.prefix import log2_bucket
from auto_research.data.request_index import SPLITS, RequestIndex
from auto_research.data.sequences import fixed_user_order, head_items
from auto_research.runtime.errors import ConfigError


@dataclass(frozen=True)
class UnifiedSplit:
    """everyone: int64 ids whose events are used; users: int64[U] those with recall targets.

    part: int8[N] place in SPLITS of every row, -1 with fewer than five earlier ratings.  begin: int64[N] first row of
    the row's second.  train_row: bool[N].  valid_target, test_target: int64[U] rows.
    """

    interactions: Interactions
    everyone: np.ndarray
    users: np.ndarray
    part: np.ndarray
    begin: np.ndarray
    train_row: np.ndarray
    valid_target: np.ndarray
    test_target: np.ndarray

    inside_seconds = True  # the last event of a user may share its second with the one before

    @classmethod
    def build(cls, data: Interactions) -> UnifiedSplit:
        index = RequestIndex.build(data)
        size = index.stop - index.start
        part, begin = np.repeat(index.split, size), np.repeat(index.start, size)
        starts = data.user_starts()
        everyone = np.unique(data.user).astype(np.int64)
        valid, test = np.full(data.n_users + 1, -1), np.full(data.n_users + 1, -1)
        for split, last in (("valid", valid), ("test", test)):
            rows = np.flatnonzero(part == SPLITS.index(split))
            last[data.user[rows]] = rows  # ascending, so the last one stays
        keep = (valid[everyone] >= 0) & (test[everyone] == starts[everyone + 1] - 1)
        users = everyone[keep]
        return cls(data, everyone, users, part, begin, index.train_row, valid[users], test[users])

    def __len__(self) -> int:
        return len(self.users)

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    def restrict(self, users: int) -> UnifiedSplit:
        """The first `users` of a fixed shuffle."""
        if users >= len(self.everyone):
            return self
        order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)
        everyone = np.sort(order[np.isin(order, self.everyone)][:users])
        keep = np.isin(self.users, everyone)
        targets = {name: getattr(self, name)[keep] for name in ("users", "valid_target", "test_target")}
        return replace(self, everyone=everyone, **targets)

    @cached_property
    def starts(self) -> np.ndarray:
        return self.interactions.user_starts()

    def rows(self, split: str) -> np.ndarray:
        """int64 rows of a split, of `everyone`."""
        return np.flatnonzero((self.part == SPLITS.index(split)) & np.isin(self.interactions.user, self.everyone))

    @cached_property
    def known_rows(self) -> np.ndarray:
        """int64 train rows of `everyone`, also those with fewer than five earlier ratings."""
        return np.flatnonzero(self.train_row & np.isin(self.interactions.user, self.everyone))

    def train_items(self) -> list[np.ndarray]:
        """Per user of `everyone` its train items, oldest first."""
        owner, item = self.interactions.user[self.known_rows], self.interactions.item[self.known_rows].astype(np.int64)
        return np.split(item, np.searchsorted(owner, self.everyone)[1:])

    def popularity(self) -> np.ndarray:
        """int64[n_items + 1] train events of every item."""
        return np.bincount(self.interactions.item[self.known_rows], minlength=self.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        return head_items(self.popularity())

    def cut(self, split: str) -> np.ndarray:
        """int64[U] target row of 'valid' or 'test'."""
        if split not in ("valid", "test"):
            raise ConfigError(f"unknown split '{split}'; known: valid, test")
        return self.valid_target if split == "valid" else self.test_target

    def target(self, split: str) -> np.ndarray:
        """int64[U] target items."""
        return self.interactions.item[self.cut(split)].astype(np.int64)

    def history(self, split: str, i: int) -> np.ndarray:
        """int64 items before the target of user position i: never candidates."""
        return self.interactions.item[self.starts[self.users[i]] : self.cut(split)[i]].astype(np.int64)

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
        for user, start in zip(self.users, self.cut(split), strict=True):
            marked[start : self.starts[user + 1]] = True
        return marked

    def tested(self) -> np.ndarray:
        used = np.isin(self.interactions.user, self.everyone)
        return ((self.part == SPLITS.index("test")) & used) | self.hidden("test")

    def fixed(self) -> np.ndarray:
        return np.zeros(len(self.interactions), dtype=bool)

    def edited(self, **columns: np.ndarray) -> UnifiedSplit:
        """The same rows over other items or ratings."""
        return replace(self, interactions=self.interactions.edited(**columns))


class Requests(NamedTuple):
    """B requests: profile int64[B, 4] (gender, age, occupation, hashed user); n events, left-padded, newest last.

    item, rating (1..5), gap (log2 bucket): int64[B, n]; mask: bool[B, n]; hours: float32[B, n] before the request, 0
    where the event is padding.
    """

    profile: Tensor
    item: Tensor
    rating: Tensor
    gap: Tensor
    mask: Tensor
    hours: Tensor

    def to(self, device: torch.device | str) -> Requests:
        return Requests(*(x.to(device) for x in self))


def requests_at(data: UnifiedSplit, rows: np.ndarray, length: int, hashed: int, *, strict: bool) -> Requests:
    """Requests just before the events at rows int64[B]: the newest `length` events of strictly earlier seconds, or of
    everything before in canonical order (strict=False). hashed: number of user tokens."""
    table = data.interactions
    user = table.user[rows].astype(np.int64)
    stop = data.begin[rows] if strict else rows
    row = stop[:, None] + np.arange(-length, 0)[None, :]
    mask = row >= data.starts[user][:, None]
    row = np.where(mask, row, 0)
    hours = np.where(mask, (table.timestamp[rows][:, None] - table.timestamp[row]) / 3600.0, 0.0)
    fields = table.user_fields or {name: np.zeros(table.n_users + 1, dtype=np.int64) for name in ("gender", "age", "occupation")}  # fmt: skip
    mixed = (user * 2_654_435_761) % 2**32 % hashed
    profile = np.stack([fields["gender"][user], fields["age"][user], fields["occupation"][user], mixed], axis=1)
    columns = table.item[row], np.rint(table.rating[row]), data.gap[row]
    return Requests(
        torch.from_numpy(profile.astype(np.int64)),
        *(torch.from_numpy(np.where(mask, column, 0).astype(np.int64)) for column in columns),
        torch.from_numpy(mask),
        torch.from_numpy(hours.astype(np.float32)),
    )


def seen_items(data: UnifiedSplit, rows: np.ndarray) -> Tensor:
    """int64[B, S] all items of a user before the rows, filled up with 0."""
    first = data.starts[data.interactions.user[rows].astype(np.int64)]
    size = rows - first
    column = np.arange(max(1, int(size.max(initial=0))))
    inside = column < size[:, None]
    row = np.where(inside, first[:, None] + column, 0)
    return torch.from_numpy(np.where(inside, data.interactions.item[row], 0).astype(np.int64))
