"""The disposable model around one specialist: it trains the user tower and is thrown away, the tower is exported.

    v = sum of projected candidate fields,  z = MLP([u; v; u * v; u . v_f; cross; context]),  logit_k = tower_k(z)
    L = BCE(engage) + BCE(like) + 0.5 BCE(love) + 0.5 BCE(dislike) + 0.3 L_MRM + lambda(t) L_red + L_specialist

The user tower reads no candidate field. Deployed specialists enter as exported vectors, so they cannot change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.mosaic.data import MosaicBatch, label_matrix
from adapters.mosaic.relations import CompositeHead, RisingPenalty, redundancy_loss
from adapters.mosaic.towers import Catalogue, TowerConfig, build_tower
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_encoder import CONTEXT_FIELDS, RequestEncoder
from auto_research.runtime.precision import float32_region

TASKS = ("engage", "like", "love", "dislike")
TASK_WEIGHTS = (1.0, 1.0, 0.5, 0.5)
COMPOSITE_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01
CANDIDATE_FIELDS = 4
TOWER_HIDDEN = 32


@dataclass(frozen=True)
class UpstreamConfig:
    """redundancy: none | signed | squared with largest weight `redundancy_weight`; hidden of the interaction network."""

    redundancy: str = "none"
    redundancy_weight: float = 0.05
    hidden: tuple[int, int] = (128, 64)
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.redundancy not in ("none", "signed", "squared"):
            raise ValueError(f"redundancy must be none, signed or squared, not {self.redundancy!r}")


class Interaction(nn.Module):
    """[u; v; u * v; u . v_f; cross; context] -> MLP -> z [P, hidden]."""

    def __init__(self, width: int, config: UpstreamConfig, catalogue: Catalogue, field: int):
        super().__init__()
        self.encoder = RequestEncoder(catalogue.vocab, catalogue.item_genres, field=field, user_fields=())
        self.fields = nn.ModuleList(nn.Linear(field, width) for _ in range(CANDIDATE_FIELDS))
        first, second = config.hidden
        inputs = 3 * width + CANDIDATE_FIELDS + (1 + len(CONTEXT_FIELDS)) * field
        self.network = nn.Sequential(
            *(Dropout(config.dropout), nn.Linear(inputs, first), nn.SiLU()),
            *(Dropout(config.dropout), nn.Linear(first, second), nn.SiLU()),
        )

    def forward(self, u: Tensor, batch: MosaicBatch) -> Tensor:
        pair, request_of = self.encoder.pairs(batch), batch.request_of
        context = torch.cat([self.encoder.tables[name](getattr(batch, name)) for name in CONTEXT_FIELDS], dim=1)
        parts = pair.candidate.unflatten(1, (CANDIDATE_FIELDS, -1)).unbind(1)
        fields = torch.stack([layer(x) for layer, x in zip(self.fields, parts, strict=True)], dim=1)  # (P, 4, D)
        v, u = fields.sum(1), u.index_select(0, request_of)
        dots = (fields @ u.unsqueeze(2)).squeeze(2) * u.shape[1] ** -0.5
        return self.network(torch.cat([u, v, u * v, dots, pair.cross, context.index_select(0, request_of)], dim=1))


class UpstreamModel(RisingPenalty):
    """model(batch) -> logits [P, 4] for engage, like, love, dislike; `training_loss` adds what the stage trains with."""

    def __init__(
        self,
        tower: nn.Module,
        width: int,
        config: UpstreamConfig,
        catalogue: Catalogue,
        *,
        field: int = 16,
        groups: list[tuple[tuple[int, ...], list[int]]] = (),
    ):
        super().__init__(config.redundancy_weight)
        self.config, self.tower = config, tower
        self.interaction = Interaction(width, config, catalogue, field)
        hidden = config.hidden[1]
        self.tasks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, TOWER_HIDDEN), nn.SiLU(), nn.Linear(TOWER_HIDDEN, 1)) for _ in TASKS
        )
        self.composite = nn.ModuleList(CompositeHead(hidden, group, classes) for group, classes in groups)

    def forward(self, batch: MosaicBatch) -> Tensor:
        return self.logits(self.interaction(self.tower(batch), batch))

    def logits(self, z: Tensor) -> Tensor:
        return torch.cat([task(z) for task in self.tasks], dim=1)

    def training_loss(self, batch: MosaicBatch, task_loss=None) -> Tensor:
        """The whole loss of a batch; `task_loss` of the request table is not used, because there is a fourth task."""
        sequential = hasattr(self.tower, "targets")
        u, cache = self.tower.states(batch) if sequential else (self.tower(batch), None)
        balance = self.tower.take_balance() if hasattr(self.tower, "take_balance") else None
        z, labels = self.interaction(u, batch), label_matrix(batch)
        loss = tasks_loss(self.logits(z), labels, batch.rated)
        for head in self.composite:
            mined = labels.roll(-1, 1)  # like, love, dislike, engage
            loss = loss + COMPOSITE_WEIGHT * head.loss(z, mined, batch.rated)
        if sequential:
            auxiliary = self.tower.targets(cache, batch)
            loss = loss + tasks_loss(auxiliary.flip(1), labels[:, :2], batch.rated)
        if balance is not None:
            loss = loss + BALANCE_WEIGHT * balance
        if self.config.redundancy != "none" and batch.vectors is not None:
            loss = loss + self.penalty * redundancy_loss(u, batch.vectors, self.config.redundancy)
        return loss


def tasks_loss(logits: Tensor, labels: Tensor, rated: Tensor) -> Tensor:
    """Weighted BCE: engage over all pairs, the other tasks over rated pairs; logits and labels [P, <= 4]."""
    with float32_region(logits.device):
        each = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        share = rated.float() / rated.sum().clamp(min=1)
        losses = [each[:, 0].mean(), *((each[:, k] * share).sum() for k in range(1, labels.shape[1]))]
        return sum(weight * loss for weight, loss in zip(TASK_WEIGHTS, losses, strict=False))


def upstream_model(
    kind: str, towers: TowerConfig, config: UpstreamConfig, catalogue: Catalogue, groups: list
) -> UpstreamModel:
    """A specialist inside its disposable model."""
    tower = build_tower(kind, towers, catalogue)
    return UpstreamModel(tower, towers.user_width, config, catalogue, field=towers.field, groups=groups)
