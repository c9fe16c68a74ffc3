"""Downstream: one DCNv2 per surface on base fields and exported vectors, each vector under its own LayerNorm.

A ranker reads `batch.vectors` where a cache gave them and otherwise computes them with the frozen fleet, so that arbitrary
requests can be scored. Surfaces share no parameter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adapters.mosaic.data import SURFACES, MosaicBatch
from adapters.mosaic.relations import RisingPenalty, redundancy_loss
from adapters.mosaic.towers import Catalogue, LikedTitles
from adapters.mosaic.upstream import UpstreamConfig
from auto_research.blocks.behaviour_events import request_fields
from auto_research.blocks.cross_network import CrossNetwork
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_encoder import RequestEncoder

TASKS = 3  # engage, like, love


class SurfaceRanker(nn.Module):
    """DCNv2 (cross layers, then an MLP) on request fields, vectors, candidate and cross fields: -> [P, 3]."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        field: int,
        vectors: list[int],
        extra: int,
        layers: int,
        hidden: int,
        dropout: float,
    ):
        super().__init__()
        self.encoder = RequestEncoder(catalogue.vocab, catalogue.item_genres, field=field)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in vectors)
        self.extra = nn.Linear(extra, 2 * field) if extra else None
        width = self.encoder.request_width + self.encoder.pair_width + sum(vectors) + (2 * field if extra else 0)
        self.dropout, self.cross = Dropout(dropout), CrossNetwork(width, layers)
        self.mlp = nn.Sequential(
            *(nn.Linear(width, hidden), nn.GELU(), Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.GELU(), Dropout(dropout)),
            nn.Linear(hidden, TASKS),
        )

    def request(self, batch: MosaicBatch, vectors: Tensor | None, extra: Tensor | None) -> Tensor:
        """[R, .]: fields and normalised vectors."""
        parts = [request_fields(self.encoder, batch)]
        parts += [norm(vectors[:, k]) for k, norm in enumerate(self.norms)]
        if self.extra is not None:
            parts.append(self.extra(extra))
        return torch.cat(parts, dim=1)

    def rank(self, request: Tensor, batch: MosaicBatch) -> Tensor:
        pair = self.encoder.pairs(batch)
        x = torch.cat([request.index_select(0, batch.request_of), pair.candidate, pair.cross], dim=1)
        return self.mlp(self.cross(self.dropout(x)))


class SurfaceState(NamedTuple):
    """One [R, .] per surface."""

    requests: tuple[Tensor, ...]


class Downstream(nn.Module):
    """model(batch) -> logits [P, 3], every pair by the ranker of its item's surface.

    fleet: frozen specialists whose vectors [R, K, D] are read; titles: the liked-title means as two more fields.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        surface: np.ndarray,
        fleet: list[nn.Module],
        *,
        width: int,
        field: int = 16,
        titles: bool = False,
        layers: int = 3,
        hidden: int = 128,
        dropout: float = 0.2,
    ):
        super().__init__()
        self.fleet = nn.ModuleList(fleet).requires_grad_(False)
        self.titles = LikedTitles(catalogue.titles) if titles else None
        extra = 2 * self.titles.width if titles else 0
        sizes = {"field": field, "vectors": [width] * len(fleet), "extra": extra, "layers": layers}
        self.rankers = nn.ModuleList(
            SurfaceRanker(catalogue, **sizes, hidden=hidden, dropout=dropout) for _ in SURFACES
        )
        self.register_buffer("surface", torch.from_numpy(surface), persistent=False)

    def train(self, mode: bool = True) -> Downstream:
        """The fleet stays in evaluation mode: an exported vector has no dropout."""
        super().train(mode)
        self.fleet.eval()
        return self

    @torch.no_grad()
    def vectors(self, batch: MosaicBatch) -> Tensor | None:
        """[R, K, D] from the cache, or computed from the batch; None without a fleet."""
        if not len(self.fleet):
            return None
        if batch.vectors is not None:
            return batch.vectors
        return torch.stack([tower(batch) for tower in self.fleet], dim=1)

    def prepare(self, batch: MosaicBatch) -> SurfaceState:
        vectors = self.vectors(batch)
        extra = self.titles(batch).flatten(1) if self.titles is not None else None
        return SurfaceState(tuple(ranker.request(batch, vectors, extra) for ranker in self.rankers))

    def score(self, state: SurfaceState, batch: MosaicBatch) -> Tensor:
        surface = self.surface[batch.item]
        parts, order = [], []
        for position, ranker in enumerate(self.rankers):
            chosen = torch.nonzero(surface == position).squeeze(1)
            parts.append(ranker.rank(state.requests[position], pairs_of(batch, chosen)))
            order.append(chosen)
        return torch.cat(parts)[torch.argsort(torch.cat(order))]

    def forward(self, batch: MosaicBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)


def pairs_of(batch: MosaicBatch, chosen: Tensor) -> MosaicBatch:
    """The same requests with the chosen pairs, as far as rankers read them."""
    names = ("request_of", "item", "decade", "popularity", "cross")
    return replace(batch, **{name: getattr(batch, name)[chosen] for name in names})


class CoTraining(RisingPenalty):
    """Stage 3: the CoTrain tower end to end with one downstream ranker for all surfaces; model(batch) -> [P, 3].

    Gradient of the downstream loss reaches the tower; deployed specialists enter the redundancy penalty only.
    """

    def __init__(
        self,
        tower: nn.Module,
        width: int,
        config: UpstreamConfig,
        catalogue: Catalogue,
        *,
        field: int,
        layers: int,
        hidden: int,
    ):
        super().__init__(config.redundancy_weight)
        self.config, self.tower = config, tower
        sizes = {"field": field, "vectors": [width], "extra": 0, "layers": layers, "hidden": hidden}
        self.ranker = SurfaceRanker(catalogue, **sizes, dropout=config.dropout)

    def forward(self, batch: MosaicBatch) -> Tensor:
        return self.rank(self.tower(batch), batch)

    def rank(self, u: Tensor, batch: MosaicBatch) -> Tensor:
        return self.ranker.rank(self.ranker.request(batch, u.unsqueeze(1), None), batch)

    def training_loss(self, batch: MosaicBatch, task_loss) -> Tensor:
        u = self.tower(batch)
        loss = task_loss(self.rank(u, batch))
        if self.config.redundancy != "none" and batch.vectors is not None:
            loss = loss + self.penalty * redundancy_loss(u, batch.vectors, self.config.redundancy)
        return loss
