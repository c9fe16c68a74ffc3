"""Training batches: cuts of users' histories, functions of seed and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from adapters.gryphon_v2.events import (
    WINDOW,
    EventWindow,
    FeedbackSplit,
    event_windows,
    logged_events,
    seen_items,
)
from auto_research.runtime.seeds import stable_rng


@dataclass(frozen=True)
class BatchRule:
    """history, long_history: events that student and teacher read.  batch: cuts of a step.  rollout_users: the first of
    them, which have pools.  negatives: uniform items, neither seen nor logged from the cut on.  rollout_items: most
    items of a rollout.
    """

    history: int = 50
    long_history: int = 200
    batch: int = 64
    rollout_users: int = 16
    negatives: int = 64
    rollout_items: int = 12


@dataclass
class CutBatch:
    """B cuts; a cut is a positive event of training, and everything before it is history. R <= B rows have pools.

    history: student windows [B, n].  target: int64[B].  negative: int64[B, M] items outside history and event.
    event, rating: int64[B, W] the logged events from the cut on, 0 padded (column 0 is the target).
    seen: int64[R, S] history items.  long: teacher windows [R, N].  uniform: int64[R, K] unseen items for a random pool.
    """

    history: EventWindow
    target: Tensor
    negative: Tensor
    event: Tensor
    rating: Tensor
    seen: Tensor
    long: EventWindow
    uniform: Tensor

    def to(self, device: torch.device | str) -> CutBatch:
        return CutBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @property
    def pools(self) -> int:
        return len(self.seen)


class CutBatches:
    """`length` batches an epoch, out of seeded passes over all train targets; `name` tells the streams of stages apart."""

    def __init__(self, data: FeedbackSplit, rule: BatchRule, seed: int, length: int, device: torch.device, name: str):
        self.data, self.rule, self.seed, self.length, self.device, self.name = data, rule, seed, length, device, name
        self.rows, self.owner = data.train_targets

    def epoch(self, epoch: int) -> Sequence[CutBatch]:
        return _Steps(self, epoch * self.length, self.length)

    def at(self, step: int) -> CutBatch:
        """The batch of a step, counted from 0 over all epochs."""
        batch = min(self.rule.batch, len(self.rows))
        number, part = divmod(step, len(self.rows) // batch)
        order = stable_rng("cuts", self.name, self.seed, number).permutation(len(self.rows))
        chosen = order[part * batch : (part + 1) * batch]
        rng = stable_rng("cut-draws", self.name, self.seed, step)
        return cut_batch(self.data, self.rule, self.rows[chosen], self.owner[chosen], rng).to(self.device)


class _Steps(Sequence):
    def __init__(self, batches: CutBatches, start: int, length: int):
        self.batches, self.start, self.length = batches, start, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> CutBatch:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.batches.at(self.start + index)


def cut_batch(
    data: FeedbackSplit, rule: BatchRule, rows: np.ndarray, owner: np.ndarray, rng: np.random.Generator
) -> CutBatch:
    """Batch of cuts at train rows int64[B] of the users at positions `owner` int64[B]."""
    pools = min(rule.rollout_users, len(rows))
    event, rating = logged_events(rows, np.minimum(rows + WINDOW, data.train_stop[owner]), data)
    seen = seen_items(data, owner, rows)
    target = torch.from_numpy(data.interactions.item[rows].astype(np.int64))
    drawn = unseen_items(torch.cat([seen, event], 1).numpy(), data.n_items, rule.negatives, rng)
    uniform = unseen_items(seen[:pools].numpy(), data.n_items, rule.rollout_items, rng)
    return CutBatch(
        history=event_windows(data, owner, rows, rule.history),
        target=target,
        negative=torch.from_numpy(drawn),
        event=event,
        rating=rating,
        seen=seen[:pools],
        long=event_windows(data, owner[:pools], rows[:pools], rule.long_history),
        uniform=torch.from_numpy(uniform),
    )


def unseen_items(seen: np.ndarray, n_items: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64[B, count] uniform draws with repetition from the items 1..n_items that are not in seen int64[B, S]."""
    free = np.ones((len(seen), n_items + 1), dtype=bool)
    np.put_along_axis(free, seen, False, axis=1)
    free[:, 0] = False
    order = np.argsort(~free, axis=1, kind="stable")  # free items first
    size = np.maximum(free.sum(axis=1), 1)
    place = (rng.random((len(seen), count)) * size[:, None]).astype(np.int64)
    return np.take_along_axis(order, place, axis=1).astype(np.int64)
