"""The split by sessions, the training windows, and batches of them.

A session is `size` consecutive events of a user in the canonical order. The last session of a user is the test session,
the one before validation, everything earlier is training, in which every window of `size` events is a session. Rows are
rows of the canonical order; a user's rows are a range in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from auto_research.data.interactions import Interactions
from auto_research.data.rewards import good_sessions
from auto_research.data.sequences import LeaveTwoOut, fixed_user_order, head_items
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng

SESSION = 5


@dataclass(frozen=True)
class SessionSplit:
    """U users with at least two sessions and one event before them.

    users: int64[U] ids.  first, stop: int64[U] rows [first, stop) of each.  size: events of a session.
    """

    interactions: Interactions
    users: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    size: int = SESSION

    inside_seconds = True  # cuts follow the canonical order, as leave-two-out does, not the clock

    @classmethod
    def build(cls, data: Interactions, size: int = SESSION) -> SessionSplit:
        starts = data.user_starts()
        users = np.flatnonzero(np.diff(starts) > 2 * size).astype(np.int64)
        return cls(data, users, starts[users], starts[users + 1], size)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def n_items(self) -> int:
        return self.interactions.n_items

    def target_start(self, split: str) -> np.ndarray:
        """int64[U] first row of the target session of 'valid' or 'test'."""
        if split not in ("valid", "test"):
            raise ConfigError(f"unknown split '{split}'; known: valid, test")
        return self.stop - self.size * (1 if split == "test" else 2)

    def targets(self, split: str) -> np.ndarray:
        """int64[U, size] items of the target sessions, in order."""
        return self.interactions.item[self.target_start(split)[:, None] + np.arange(self.size)].astype(np.int64)

    def seen(self, split: str, positions: np.ndarray) -> list[np.ndarray]:
        """Items before the target session of users at positions: never candidates."""
        ends = self.target_start(split)
        return [self.interactions.item[self.first[i] : ends[i]].astype(np.int64) for i in positions]

    def restrict(self, users: int) -> SessionSplit:
        """The first `users` of a fixed shuffle of the users."""
        if users >= len(self):
            return self
        order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)
        keep = np.isin(self.users, order[np.isin(order, self.users)][:users])
        return replace(self, users=self.users[keep], first=self.first[keep], stop=self.stop[keep])

    @cached_property
    def train_rows(self) -> np.ndarray:
        """int64: all rows before the validation sessions."""
        return np.concatenate([np.arange(a, b) for a, b in zip(self.first, self.target_start("valid"), strict=True)])

    def train_items(self) -> list[np.ndarray]:
        """Items of every user's train part, int64."""
        return self.seen("valid", np.arange(len(self)))

    @cached_property
    def popularity(self) -> np.ndarray:
        """int64[n_items + 1] train events of every item."""
        return np.bincount(self.interactions.item[self.train_rows], minlength=self.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        return head_items(self.popularity)

    def windows(self) -> tuple[np.ndarray, np.ndarray]:
        """First row of every training session int64[W], by user and time, and the user position of each."""
        count = np.maximum(self.target_start("valid") - self.first - self.size + 1, 0)
        owner = np.repeat(np.arange(len(self)), count)
        start = self.first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return start, owner

    def good_windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Those sessions a generator may learn to make: at most one rating under 3, a mean not under the user's."""
        start, owner = self.windows()
        rating = self.interactions.rating
        ends = self.target_start("valid")
        mean = np.array([rating[a:b].mean(dtype=np.float64) for a, b in zip(self.first, ends, strict=True)])
        keep = good_sessions(rating[start[:, None] + np.arange(self.size)], mean[owner])
        return start[keep], owner[keep]

    def sequences(self) -> LeaveTwoOut:
        """The train parts as sequences, for models that learn from next items (the targets are not to be read)."""
        items = self.train_items()
        starts = np.concatenate([[0], np.cumsum([len(i) for i in items])]).astype(np.int64)
        table, nothing = self.interactions, np.zeros(len(self), dtype=np.int64)
        return LeaveTwoOut(
            table.n_users, table.n_items, self.users, np.concatenate(items), starts, nothing, nothing, table.dataset
        )

    # What the contract tests ask of a split (tests/adapters/contract_edits.py, OwnSplit)

    def hidden(self, split: str) -> np.ndarray:
        """bool[N]: from the target session on, nothing of a user may reach a score of `split`."""
        marked = np.zeros(len(self.interactions), dtype=bool)
        for start, stop in zip(self.target_start(split), self.stop, strict=True):
            marked[start:stop] = True
        return marked

    def tested(self) -> np.ndarray:
        return self.hidden("test")

    def fixed(self) -> np.ndarray:
        """No rating decides what a target is."""
        return np.zeros(len(self.interactions), dtype=bool)

    def edited(self, **columns: np.ndarray) -> SessionSplit:
        return replace(self, interactions=self.interactions.edited(**columns))


def histories(data: SessionSplit, start: np.ndarray, owner: np.ndarray, length: int) -> np.ndarray:
    """int64[B, length] the last items before rows `start` of user positions `owner`, newest last, 0 where there is none."""
    rows = start[:, None] + np.arange(-length, 0)
    inside = rows >= data.first[owner][:, None]
    return np.where(inside, data.interactions.item[np.maximum(rows, 0)], 0).astype(np.int64)


class SessionBatch(NamedTuple):
    """history int64[B, n] items, 0 padded on the left; session int64[B, m] items that follow it."""

    history: Tensor
    session: Tensor

    def to(self, device: torch.device | str) -> SessionBatch:
        return SessionBatch(*(x.to(device) for x in self))


def session_batch(data: SessionSplit, start: np.ndarray, owner: np.ndarray, length: int) -> SessionBatch:
    """Sessions that begin at rows `start`, with their histories."""
    session = data.interactions.item[start[:, None] + np.arange(data.size)].astype(np.int64)
    return SessionBatch(torch.from_numpy(histories(data, start, owner, length)), torch.from_numpy(session))


def target_batch(data: SessionSplit, split: str, positions: np.ndarray, length: int) -> SessionBatch:
    """Target sessions of a split and the histories before them."""
    return session_batch(data, data.target_start(split)[positions], positions, length)


class Steps(Sequence):
    """`length` batches made when asked for: at(number of the step) -> batch."""

    def __init__(self, length: int, at: Callable[[int], Any]):
        self.length, self.at = length, at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.at(index)


class SessionSteps:
    """Batches of training sessions as a function of the step: seeded passes over the windows that pass the filter.

    epoch(number) gives the batches of the steps [number * epoch_steps, (number + 1) * epoch_steps).
    """

    def __init__(
        self, data: SessionSplit, *, batch: int, epoch_steps: int, history: int, seed: tuple, device: torch.device
    ):
        self.data, self.seed, self.device = data, seed, device
        self.start, self.owner = data.good_windows()
        if not len(self.start):
            raise ConfigError("no training session passes the quality filter")
        self.batch, self.epoch_steps, self.history = min(batch, len(self.start)), epoch_steps, history
        self.per_pass = -(-len(self.start) // self.batch)

    def epoch(self, number: int) -> Steps:
        return Steps(self.epoch_steps, lambda index: self.at(number * self.epoch_steps + index))

    def at(self, step: int) -> SessionBatch:
        number, part = divmod(step, self.per_pass)
        order = stable_rng("session-windows", *self.seed, number).permutation(len(self.start))
        rows = order[part * self.batch : (part + 1) * self.batch]
        return session_batch(self.data, self.start[rows], self.owner[rows], self.history).to(self.device)
