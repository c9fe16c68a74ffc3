"""Batches of pre-training and of two-tower fine-tuning: windows, negatives and pairs, all functions of seed and place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from adapters.argus.events import DAY, EventBatch, EventSplit, windows
from adapters.argus.model import LIKE
from auto_research.blocks.pairwise_loss import at_most, label_pairs
from auto_research.blocks.sampled_softmax import log_proposal
from auto_research.data.request_index import SPLITS
from auto_research.runtime.seeds import stable_rng, stable_seed

PROPOSAL_EPOCHS = 8


@dataclass(frozen=True)
class BatchRule:
    """context: events of a window.  batch: windows of half that length whose area a step fills, padding included.
    in_batch, uniform: negatives of a step from its own events and from the catalogue.  pairs: pairs of a user and step, 0
    for none.  state: strict, or 'previous', which leaks in training windows.
    """

    context: int = 128
    batch: int = 64
    in_batch: int = 256
    uniform: int = 256
    pairs: int = 0
    state: str = "strict"


class EpochWindows:
    """Batches of one epoch: every user once, with a window of the train events that is drawn anew for longer histories.

    The window is slid over both ends by half a window and clipped, so that the oldest and the newest events are no rarer
    than the others. Windows of like length share a batch, within a spread; batches are of one padded area, so that events
    of short and of long histories weigh alike. Windows without a loss are left out.
    """

    def __init__(self, data: EventSplit, rule: BatchRule, seed: int, epoch: int, device: torch.device):
        self.data, self.rule, self.seed, self.epoch, self.device = data, rule, seed, epoch, device
        train = np.concatenate([[0], np.cumsum(data.index.train_row)])
        self.losses = data.part == SPLITS.index("train")
        first = data.starts[data.everyone]
        size = train[data.starts[data.everyone + 1]] - train[first]
        rng = stable_rng("argus-windows", seed, epoch)
        spare = np.maximum(size - rule.context, 0)
        over = rule.context // 2
        shift = np.clip(rng.integers(-over, spare + over + 1), 0, spare)
        self.start, self.stop = first + shift, first + shift + np.minimum(size, rule.context)
        length = self.stop - self.start
        listed = np.concatenate([[0], np.cumsum(self.losses)])
        order = np.argsort(length * rng.uniform(0.9, 1.1, len(length)), kind="stable")
        order = order[(listed[self.stop] > listed[self.start])[order]]
        groups = group_by_area(order, length, rule.batch * rule.context // 2)
        self.groups = [groups[i] for i in rng.permutation(len(groups))]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> EventBatch:
        group, rule = self.groups[index], self.rule
        previous = rule.state == "previous"
        batch = windows(
            self.data, self.start[group], self.stop[group], losses=self.losses, previous=previous, delay="request"
        )
        rng = stable_rng("argus-negatives", self.seed, self.epoch, index)
        batch = with_negatives(batch, rule, self.data.n_items, rng)
        if rule.pairs:
            generator = torch.Generator().manual_seed(stable_seed("argus-pairs", self.seed, self.epoch, index) >> 1)
            batch = with_pairs(batch, self.data, self.stop[group], rule.pairs, generator)
        return batch.to(self.device)

    def losses_on(self, index: int) -> np.ndarray:
        """int64 rows of a batch's events with a loss."""
        group = self.groups[index]
        rows = np.concatenate([np.arange(a, b) for a, b in zip(self.start[group], self.stop[group], strict=True)])
        return rows[self.losses[rows]]


def group_by_area(order: np.ndarray, length: np.ndarray, area: int) -> list[np.ndarray]:
    """Consecutive parts of `order` whose number times longest length stays within `area` (or of one window)."""
    cuts, begin, longest = [], 0, 0
    for place, size in enumerate(length[order].tolist()):
        longest = max(longest, size)
        if place > begin and (place - begin + 1) * longest > area:
            cuts.append(place)
            begin, longest = place, size
    return np.split(order, cuts)


def with_negatives(batch: EventBatch, rule: BatchRule, n_items: int, rng: np.random.Generator) -> EventBatch:
    """Items drawn once for the whole step: `in_batch` of its events with a loss, `uniform` of the catalogue."""
    at = batch.at.numpy()
    place = rng.choice(at, rule.in_batch) if len(at) and rule.in_batch else at[:0]
    uniform = rng.integers(1, n_items + 1, rule.uniform)
    negative = np.concatenate([batch.item.flatten().numpy()[place], uniform])
    owner = np.concatenate([place // batch.shape[1], np.full(rule.uniform, -1)])
    return replace(batch, negative=torch.from_numpy(negative), owner=torch.from_numpy(owner))


def proposal(data: EventSplit, rule: BatchRule, seed: int) -> torch.Tensor:
    """log Q(i) of one draw, float32[n_items + 1]; f_i is the mean share of an item in a batch's events with a loss.

    Shares of all train events would be off: long histories show one window an epoch, and a batch draws from itself.
    """
    share = np.zeros(data.n_items + 1)
    for epoch in range(PROPOSAL_EPOCHS):
        batches = EpochWindows(data, rule, seed, epoch, torch.device("cpu"))
        for index in range(len(batches)):
            item = data.interactions.item[batches.losses_on(index)]
            share += np.bincount(item, minlength=data.n_items + 1) / len(item)
    log_q = log_proposal(torch.from_numpy(share[1:]), rule.in_batch, rule.uniform)
    return torch.cat([torch.zeros(1), log_q])


def with_pairs(
    batch: EventBatch,
    data: EventSplit,
    stop: np.ndarray,
    limit: int | None,
    generator: torch.Generator | None = None,
    only_like: bool = False,
) -> EventBatch:
    """Pairs of events with a loss: one user, less than a day apart, different like labels, else different ratings.

    stop: int64[B] row after each window.  limit: random pairs per user (None: all).  only_like: leave out pairs that differ by rating alone.
    """
    length = batch.shape[1]
    window, column = batch.at // length, batch.at % length
    row = torch.from_numpy(stop)[window] - length + column
    time = torch.from_numpy(data.interactions.timestamp[row.numpy()])
    rating = batch.rating.flatten()[batch.at]
    second = None if only_like else rating
    better, worse = label_pairs(window, (rating >= LIKE).long(), second=second, time=time, within=DAY)
    if limit is not None:
        chosen = at_most(window[better], limit, generator)
        better, worse = better[chosen], worse[chosen]
    better, worse = batch.at[better], batch.at[worse]
    return replace(batch, better=better, worse=worse, earlier=torch.minimum(better, worse))
