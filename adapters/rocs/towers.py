"""Item sides that read no request: the retrieval variant `late`, and two towers that meet in a dot product.

`late` keeps candidates out until the last layer. Before it, item slots (id, genres, decade) pass layers of their own
whose result `item_table` computes once for the catalogue; popularity and cross features, which depend on the request,
enter with them in the last layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.rocs.layers import EventReader, LayerState, MaskedLayer, ROCSConfig
from adapters.rocs.model import ITEM_SLOTS, PAIR_SLOTS, REQUEST_SLOTS, TASKS, ROCSState, SlotInput, TwoPartHead
from auto_research.blocks.request_groups import request_groups
from auto_research.blocks.two_sided import SlotLinear
from auto_research.blocks.wukong import WukongLayer
from auto_research.data.requests import RequestBatch


def side_layer(config: ROCSConfig, slots: int, outputs: int) -> WukongLayer:
    """The masked layer of one side alone: [B, slots, d] -> [B, 2 outputs, d]."""
    return WukongLayer(config.width, slots, outputs, config.fm_hidden, config.dropout)


class RequestLayer(nn.Module):
    """A request side alone: X_r [R, m, d], H [R, L, d] -> [R, 2 n, d], H^n."""

    def __init__(self, config: ROCSConfig, slots: int):
        super().__init__()
        self.events = EventReader(config)
        del self.events.pair_mlp
        self.queries = SlotLinear(slots, config.queries)
        self.mix = side_layer(config, slots + config.queries, config.request_outputs)

    def forward(self, x: Tensor, events: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        events, keys = self.events.advance(events, mask)
        return self.mix(torch.cat([x, self.events.of_request(self.queries(x), keys)], dim=1)), events


def request_layers(config: ROCSConfig, count: int) -> nn.ModuleList:
    slots = [REQUEST_SLOTS, *[2 * config.request_outputs] * count]
    return nn.ModuleList(RequestLayer(config, slots[i]) for i in range(count))


def item_layers(config: ROCSConfig, count: int, slots: int) -> nn.ModuleList:
    slots = [slots, *[2 * config.pair_outputs] * count]
    return nn.ModuleList(side_layer(config, slots[i], config.pair_outputs) for i in range(count))


class LateROCS(nn.Module):
    """model(batch) -> logits [P, 3]; candidates enter in the last of config.layers >= 2 layers."""

    def __init__(self, config: ROCSConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        if config.layers < 2:
            raise ValueError("late entry needs two layers or more")
        self.config, before = config, config.layers - 1
        self.input = SlotInput(config, vocab, item_genres)
        self.request_layers, self.item_layers = request_layers(config, before), item_layers(config, before, ITEM_SLOTS)
        pair_slots = 2 * config.pair_outputs + PAIR_SLOTS - ITEM_SLOTS
        self.last = MaskedLayer(config, 2 * config.request_outputs, pair_slots)
        self.head = TwoPartHead(config, 2 * config.request_outputs, 2 * config.pair_outputs)

    def prepare(self, batch: RequestBatch) -> ROCSState:
        vectors = self.input.encoder.item_vectors()
        x, events, mask = self.input.request(batch, vectors)
        for layer in self.request_layers:
            x, events = layer(x, events, mask)
        x, _, state = self.last.request(x, events, mask)
        return ROCSState((state,), self.head.request(x), vectors)

    def score(self, state: ROCSState, batch: RequestBatch, items: Tensor | None = None) -> Tensor:
        """Logits [P, 3]; items: the result of `item_table`, where it was computed before."""
        if items is None:
            item = self.item_side(self.input.items(F.embedding(batch.item, state.vectors), batch.decade))
        else:
            item = items[batch.item]
        return self.enter(state, item, self.input.numbers(batch), batch.request_of)

    def enter(self, state: ROCSState, item: Tensor, rest: Tensor, request_of: Tensor) -> Tensor:
        """The last layer and the head: item [P, 2 n_c, d], rest [P, 2, d] (popularity, cross)."""
        of_request: LayerState = state.layers[0]
        groups = request_groups(request_of, len(of_request.slots))
        x = self.last.pairs(of_request, torch.cat([item, rest], dim=1), request_of, groups)
        return self.head(state.head, x, request_of)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def item_side(self, slots: Tensor) -> Tensor:
        """[P, 3, d] -> [P, 2 n_c, d], no request read."""
        for layer in self.item_layers:
            slots = layer(slots)
        return slots

    @torch.no_grad()
    def item_table(self, decade: Tensor) -> Tensor:
        """[n_items + 1, 2 n_c, d] for the whole catalogue; decade int64[n_items + 1]."""
        return self.item_side(self.input.items(self.input.encoder.item_vectors(), decade))

    def dense_params(self) -> int:
        """Parameters behind the slots: layers of both sides, the last layer and the head."""
        parts = (self.request_layers, self.item_layers, self.last, self.head)
        return sum(p.numel() for part in parts for p in part.parameters())


class TowerState(NamedTuple):
    """Request vectors u, one per task [R, 3, h]; item vectors of `SlotInput`."""

    u: Tensor
    vectors: Tensor


class TwoTower(nn.Module):
    """model(batch) -> logits [P, 3]: u_k . v_k / sqrt(h), with u of the request side and v of item slots and popularity."""

    def __init__(self, config: ROCSConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        self.input = SlotInput(config, vocab, item_genres)
        self.request_layers = request_layers(config, config.layers)
        self.item_layers = item_layers(config, config.layers, PAIR_SLOTS - 1)
        self.hidden = config.head_hidden
        self.request_out = nn.Linear(2 * config.request_outputs * config.width, TASKS * self.hidden)
        self.item_out = nn.Linear(2 * config.pair_outputs * config.width, TASKS * self.hidden)
        self.offset = nn.Parameter(torch.zeros(TASKS))

    def prepare(self, batch: RequestBatch) -> TowerState:
        vectors = self.input.encoder.item_vectors()
        x, events, mask = self.input.request(batch, vectors)
        for layer in self.request_layers:
            x, events = layer(x, events, mask)
        return TowerState(self.request_out(x.flatten(1)).reshape(len(x), TASKS, self.hidden), vectors)

    def score(self, state: TowerState, batch: RequestBatch) -> Tensor:
        x = self.input.pairs(batch, state.vectors)[:, : PAIR_SLOTS - 1]  # without the cross slot
        for layer in self.item_layers:
            x = layer(x)
        v = self.item_out(x.flatten(1)).reshape(len(x), TASKS, self.hidden)
        return (state.u[batch.request_of] * v).sum(2) * self.hidden**-0.5 + self.offset

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def dense_params(self) -> int:
        """Parameters behind the slots: layers and projections of both towers, offsets."""
        parts = (self.request_layers, self.item_layers, self.request_out, self.item_out)
        return self.offset.numel() + sum(p.numel() for part in parts for p in part.parameters())
