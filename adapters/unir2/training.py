"""Batches of train rows, the joint loss, and the probe of conflicting gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.unir2.events import Requests, UnifiedSplit, requests_at
from adapters.unir2.model import THRESHOLDS
from auto_research.runtime.precision import float32_region
from auto_research.runtime.seeds import stable_rng

NEGATIVE_WEIGHT = 0.3


@dataclass(frozen=True)
class BatchRule:
    """history: events of a prefix.  batch: train rows of a step.  hashed: user tokens.

    inside: events of every prefix that are generated as well, each from what stands before it.
    """

    history: int = 30
    batch: int = 64
    hashed: int = 1000
    inside: int = 0


@dataclass
class RowBatch:
    """B logged events with strictly earlier history. item: int64[B, 2] the event's item and a uniform unseen one.

    rating: int64[B].  inside: int64[B, K] columns of the prefix's own events that are generated too.
    own: int64[B, 2] the rating that is among the train rows and that the item's statistics must not hold, 0 for none.
    """

    request: Requests
    item: Tensor
    rating: Tensor
    inside: Tensor

    @property
    def own(self) -> Tensor:
        return torch.stack([self.rating, torch.zeros_like(self.rating)], dim=1)

    def to(self, device: torch.device | str) -> RowBatch:
        return RowBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


class RowBatches:
    """`length` batches an epoch, out of seeded passes over the train rows."""

    def __init__(self, data: UnifiedSplit, rule: BatchRule, seed: int, length: int, device: torch.device):
        self.data, self.rule, self.seed, self.length, self.device = data, rule, seed, length, device
        self.rows = data.rows("train")

    def epoch(self, epoch: int) -> Sequence[RowBatch]:
        return _Steps(self, epoch * self.length, self.length)

    def at(self, step: int) -> RowBatch:
        """The batch of a step, counted from 0 over all epochs."""
        batch = min(self.rule.batch, len(self.rows))
        number, part = divmod(step, len(self.rows) // batch)
        order = stable_rng("unir2-rows", self.seed, number).permutation(len(self.rows))
        rows = self.rows[order[part * batch : (part + 1) * batch]]
        return row_batch(self.data, self.rule, rows, stable_rng("unir2-negatives", self.seed, step)).to(self.device)


class _Steps(Sequence):
    def __init__(self, batches: RowBatches, start: int, length: int):
        self.batches, self.start, self.length = batches, start, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> RowBatch:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.batches.at(self.start + index)


def row_batch(data: UnifiedSplit, rule: BatchRule, rows: np.ndarray, rng: np.random.Generator) -> RowBatch:
    """Batch of the events at rows int64[B]; unseen: not rated by the user up to the event."""
    table = data.interactions
    item = table.item[rows].astype(np.int64)
    drawn = np.empty_like(item)
    for k, row in enumerate(rows):
        known = table.item[data.starts[table.user[row]] : row + 1]
        free = np.ones(data.n_items + 1, dtype=bool)
        free[known], free[0] = False, False
        choice = np.flatnonzero(free)
        drawn[k] = choice[rng.integers(len(choice))] if len(choice) else item[k]
    request = requests_at(data, rows, rule.history, rule.hashed, strict=True)
    key = rng.random((len(rows), rule.history)) + ~request.mask.numpy()  # real events first
    inside = np.argsort(key, axis=1)[:, : rule.inside]
    return RowBatch(
        request,
        torch.from_numpy(np.stack([item, drawn], axis=1)),
        torch.from_numpy(np.rint(table.rating[rows]).astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(inside)),
    )


def task_labels(rating: Tensor) -> Tensor:
    """click, long view and gift float32 [.., 3] of ratings: at least 3, 4, 5."""
    return torch.stack([(rating >= least).float() for least in THRESHOLDS], dim=-1)


def ranking_loss(tasks: Tensor, rating: Tensor, task_weights: Sequence[float] = (1, 1, 1)) -> Tensor:
    """L_rank of logits [B, 2, 3]: BCE of every task, logged events with weight 1, unseen items 0 with weight 0.3."""
    with float32_region(tasks.device):
        label = torch.stack([task_labels(rating), torch.zeros_like(tasks[:, 1])], dim=1)
        weight = tasks.new_tensor([1.0, NEGATIVE_WEIGHT], dtype=torch.float32).view(1, 2, 1)
        loss = F.binary_cross_entropy_with_logits(tasks.float(), label, reduction="none") * weight
        by_task = loss.sum((0, 1)) / (len(tasks) * (1 + NEGATIVE_WEIGHT))
        return (by_task * by_task.new_tensor(list(task_weights))).sum()


@dataclass(frozen=True)
class LossWeights:
    """mu of the ranking loss beside that of generation, and the weights of its tasks."""

    mu: float = 1.0
    task_weights: Sequence[float] = (1, 1, 1)


def joint_loss(model: nn.Module, batch: RowBatch, weights: LossWeights | None = None) -> Tensor:
    """L_gen + mu L_rank of whatever branches the model has."""
    weights = weights or LossWeights()
    generated, tasks = model.outputs(batch)
    total = 0.0 if generated is None else generated
    return total if tasks is None else total + weights.mu * ranking_loss(tasks, batch.rating, weights.task_weights)


def conflict(model: nn.Module, batch: RowBatch, shared: Sequence[nn.Parameter]) -> dict[str, float]:
    """Cosine of the two losses' gradients on shared weights, and how many of these the ranking loss reaches.

    cosine is 0 where ranking reaches none: the losses cannot disagree.
    """
    generated, tasks = model.outputs(batch)
    ranked = ranking_loss(tasks, batch.rating)
    one = torch.autograd.grad(generated, shared, retain_graph=True, allow_unused=True)
    other = torch.autograd.grad(ranked, shared, allow_unused=True)
    reached = [g is not None and bool(g.abs().sum() > 0) for g in other]

    def flat(parts) -> Tensor:  # float64 on the CPU, as MPS has none
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(parts, shared, strict=True)]
        return torch.cat([g.flatten().float().cpu().double() for g in filled])

    a, b = flat(one), flat(other)
    cosine = float(a @ b / (a.norm() * b.norm()).clamp(min=1e-30))
    return {"cosine": cosine, "shared_parameters": len(shared), "reached_by_ranking": sum(reached)}
