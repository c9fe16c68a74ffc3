"""Multi-task relation mining and the redundancy loss of Mosaic.

rho_ij = corr(rank y_i, rank y_j);  tasks with |rho| >= 0.3 are connected; components of 2 or 3 tasks are groups
l_n = (y_{g1,n}, ..., y_{gm,n});    L_MRM = CE(softmax over classes seen in train, l)
L_red = (1/K) sum_k cos(e_new, stopgrad e_k)  (signed)   or   (1/K) sum_k cos^2  (squared)
lambda(t) = lambda_max clip((t - t0) / t1, 0, 1)
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.runtime.precision import float32_region
from auto_research.runtime.seeds import stable_rng

THRESHOLD = 0.3
LARGEST_GROUP = 3
NORM_FLOOR = 1e-6
PENALTY_START, PENALTY_RISE = 0.2, 0.3  # t0 and t1 as shares of all steps


def spearman(labels: np.ndarray) -> np.ndarray:
    """Rank correlation [K, K] of label columns [N, K], average ranks for ties; 0 beside a constant column."""
    ranks = np.column_stack([average_ranks(column) for column in np.asarray(labels).T])
    centred = ranks - ranks.mean(axis=0)
    covariance = centred.T @ centred
    scale = np.sqrt(np.diag(covariance))
    outer = np.outer(scale, scale)
    return np.divide(covariance, outer, out=np.zeros_like(covariance), where=outer > 0)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """1-based ranks, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def task_groups(rho: np.ndarray, threshold: float = THRESHOLD) -> list[tuple[int, ...]]:
    """Connected components of the tasks whose |rho| reaches the threshold, those of 2 to 3 tasks."""
    count, groups, seen = len(rho), [], set()
    for start in range(count):
        component, open_tasks = set(), [start]
        while open_tasks:
            task = open_tasks.pop()
            if task not in component:
                component.add(task)
                open_tasks += [j for j in range(count) if j != task and abs(rho[task, j]) >= threshold]
        if not component & seen and 2 <= len(component) <= LARGEST_GROUP:
            groups.append(tuple(sorted(component)))
        seen |= component
    return groups


def random_group(group: tuple[int, ...], tasks: int, seed: int) -> tuple[int, ...]:
    """Ablation: as many of the tasks 0..tasks-1, drawn, but not the mined group itself."""
    others = [c for c in itertools.combinations(range(tasks), len(group)) if c != tuple(group)]
    return others[int(stable_rng("mosaic-random-group", seed).integers(len(others)))]


def seen_classes(labels: np.ndarray, group: tuple[int, ...]) -> list[int]:
    """Composite classes of a group that occur in labels [N, K], as binary numbers with the first task's bit lowest."""
    return np.unique(composite(np.asarray(labels)[:, list(group)])).tolist()


def composite(bits):
    """Bits [N, m] -> class numbers [N]; numpy or torch."""
    return sum(bits[:, j] * 2**j for j in range(bits.shape[1]))


class CompositeHead(nn.Module):
    """Softmax over the classes of a task group that were seen in train: z [P, d] -> [P, C]."""

    def __init__(self, inputs: int, group: tuple[int, ...], classes: list[int]):
        super().__init__()
        self.group, self.classes = tuple(group), list(classes)
        position = torch.full((2 ** len(group),), -1, dtype=torch.int64)
        position[torch.tensor(classes)] = torch.arange(len(classes))
        self.register_buffer("position", position, persistent=False)
        bits = torch.tensor([[(c >> j) & 1 for j in range(len(group))] for c in classes], dtype=torch.float32)
        self.register_buffer("bits", bits, persistent=False)
        self.out = nn.Linear(inputs, len(classes))

    def loss(self, z: Tensor, labels: Tensor, rated: Tensor) -> Tensor:
        """Cross-entropy over rated pairs, labels [P, K]; pairs of a class never seen in train have no part."""
        with float32_region(z.device):
            target = self.position[composite(labels[:, list(self.group)]).long()]
            weight = (rated & (target >= 0)).float()
            each = F.cross_entropy(self.out(z).float(), target.clamp(min=0), reduction="none")
            return (each * weight).sum() / weight.sum().clamp(min=1)

    def marginals(self, z: Tensor) -> Tensor:
        """Diagnostics: probability of every task of the group, class probabilities summed, [P, m]."""
        return torch.softmax(self.out(z).float(), dim=1) @ self.bits


def redundancy_loss(new: Tensor, deployed: Tensor, kind: str = "signed") -> Tensor:
    """Mean cosine (or squared cosine) of new [R, D] to deployed [R, K, D], which gets no gradient; scalar, float32.

    A pair with a vector shorter than 1e-6 has cosine 0 and no gradient.
    """
    with float32_region(new.device):
        new, deployed = new.float(), deployed.detach().float()
        short = (new.norm(dim=1, keepdim=True) < NORM_FLOOR) | (deployed.norm(dim=2) < NORM_FLOOR)  # (R, K)
        safe = torch.where(new.norm(dim=1, keepdim=True) < NORM_FLOOR, torch.ones_like(new), new)
        cosine = F.cosine_similarity(safe.unsqueeze(1), deployed, dim=2, eps=NORM_FLOOR).masked_fill(short, 0.0)
        return (cosine.square() if kind == "squared" else cosine).mean()


def penalty_weight(step: int, total: int, largest: float) -> float:
    """lambda(t) with t0 = 0.2 total and t1 = 0.3 total."""
    return largest * min(1.0, max(0.0, (step - PENALTY_START * total) / max(1e-9, PENALTY_RISE * total)))


class RisingPenalty(nn.Module):
    """Base of the models that train a specialist: lambda(t) in `penalty` and t / total in `elapsed`, both saved."""

    def __init__(self, largest: float):
        super().__init__()
        self.largest = largest
        self.register_buffer("penalty", torch.zeros(()))
        self.register_buffer("elapsed", torch.zeros(()))

    def after_step(self, step: int, total: int) -> None:
        """lambda of the next step."""
        self.penalty.fill_(penalty_weight(step, total, self.largest))
        self.elapsed.fill_(step / total)

    def choice(self, value: float, beside: bool) -> float:
        """What chooses the epoch: the validation value; beside deployed specialists only once lambda is full.

        Before that it rises from -2, so that no value of a full lambda (an AUC) is below it and patience does not count.
        """
        full = PENALTY_START + PENALTY_RISE
        elapsed = float(self.elapsed)
        return value if not beside or elapsed >= full - 1e-6 else elapsed - 2


def mean_cosine(vectors: np.ndarray, squared: bool = False) -> float:
    """Mean cosine (or its square) over the pairs of specialists: vectors [N, K, D], K >= 2; short vectors count as 0."""
    x = vectors.astype(np.float64)
    norm = np.linalg.norm(x, axis=2, keepdims=True)
    x = np.where(norm < NORM_FLOOR, 0.0, x / np.maximum(norm, NORM_FLOOR))
    cosine = (x @ x.transpose(0, 2, 1))[:, *np.triu_indices(x.shape[1], 1)]  # (N, pairs)
    return float((cosine**2 if squared else cosine).mean())


def predictability(new: np.ndarray, old: np.ndarray, user: np.ndarray, ridge: float = 1.0) -> float:
    """R^2 of a ridge regression of new [N, D] on old [N, D'], fitted on users of even id, measured on the others.

    float64 numpy: a rotation fools a cosine, not this. At least -1; 0 where the held-out users have no variance.
    """
    fit, held = user % 2 == 0, user % 2 == 1
    new, old = new.astype(np.float64), old.astype(np.float64)
    centre, target = old[fit].mean(axis=0), new[fit].mean(axis=0)
    x = old - centre
    gram = x[fit].T @ x[fit] + ridge * np.eye(x.shape[1])
    weight = np.linalg.solve(gram, x[fit].T @ (new[fit] - target))
    error = ((new[held] - target - x[held] @ weight) ** 2).sum()
    spread = ((new[held] - new[held].mean(axis=0)) ** 2).sum()
    return float(max(-1.0, 1 - error / spread)) if spread > 0 else 0.0
