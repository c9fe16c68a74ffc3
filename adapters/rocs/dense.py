"""The same layers without the mask: early interaction, the arm full_broadcast.

All slots of request and candidate are one list [P, m_r + m_c, d]; every output reads every input, so nothing of a request
can be shared but the event sequence, which reads no slot. With the weights of ROCS in its blocks and zeros where the mask
is zero it is the reference of the equivalence test.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.rocs.layers import EventReader, ROCSConfig
from adapters.rocs.model import PAIR_SLOTS, REQUEST_SLOTS, TASKS, RequestInputs, SlotInput
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_attention import RequestKeys
from auto_research.blocks.request_groups import Group, request_groups
from auto_research.blocks.two_sided import SlotLinear, UpperPairs
from auto_research.blocks.wukong import close_layer
from auto_research.data.requests import RequestBatch


class DenseLayer(nn.Module):
    """[P, m_r + m_c, d] -> [P, 2 n_r + 2 n_c, d], request slots first; the counterpart of MaskedLayer."""

    def __init__(self, config: ROCSConfig, request_slots: int, pair_slots: int):
        super().__init__()
        c, a = config, config.queries
        self.config, self.request_slots = config, request_slots
        self.events = EventReader(c)
        self.queries = SlotLinear(request_slots + pair_slots, 2 * a)
        self.m_r, self.m_c = request_slots + a, pair_slots + a
        slots = self.m_r + self.m_c
        self.linear = SlotLinear(slots, 3 * (c.request_outputs + c.pair_outputs))
        self.request_dots, self.pair_dots = UpperPairs(self.m_r), UpperPairs(self.m_c)
        self.hidden = nn.Linear(slots * (slots - 1) // 2, 2 * c.fm_hidden)
        self.request_out = nn.Linear(c.fm_hidden, c.request_outputs * c.width)
        self.pair_out = nn.Linear(c.fm_hidden, c.pair_outputs * c.width)
        self.request_norm, self.pair_norm = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.dropout = Dropout(c.dropout)

    def forward(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group]) -> Tensor:
        c, a = self.config, self.config.queries
        queries = self.queries(x)  # (P, 2 a, d)
        queries = torch.cat([self.events.request_mlp(queries[:, :a]), self.events.pair_mlp(queries[:, a:])], dim=1)
        read = self.events.read.attend(queries, keys, request_of, groups)
        cut = self.request_slots
        x_r, x_c = torch.cat([x[:, :cut], read[:, :a]], dim=1), torch.cat([x[:, cut:], read[:, a:]], dim=1)
        dots = [self.request_dots(x_r), (x_c @ x_r.transpose(1, 2)).flatten(1), self.pair_dots(x_c)]
        hidden = self.hidden(torch.cat(dots, dim=1) * c.width**-0.5)
        mixed_r, mixed_c = self.dropout(F.silu(hidden)).chunk(2, dim=1)
        linear = self.linear(torch.cat([x_r, x_c], dim=1))
        cut = 3 * c.request_outputs
        y_r = close_layer(self.request_out(mixed_r), linear[:, :cut], self.request_norm)
        return torch.cat([y_r, close_layer(self.pair_out(mixed_c), linear[:, cut:], self.pair_norm)], dim=1)


class DenseState(NamedTuple):
    """Request slots [R, 9, d] and the keys of every layer; vectors of `SlotInput`."""

    slots: Tensor
    keys: tuple[RequestKeys, ...]
    vectors: Tensor | None = None


class DenseROCS(nn.Module):
    """model(batch) -> logits [P, 3]. The sequence is computed once per request, everything else once per candidate;
    `broadcast` copies the sequence as well."""

    def __init__(self, config: ROCSConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        self.input = SlotInput(config, vocab, item_genres)
        m_r, m_c, layers = REQUEST_SLOTS, PAIR_SLOTS, []
        for _ in range(config.layers):
            layers.append(DenseLayer(config, m_r, m_c))
            m_r, m_c = 2 * config.request_outputs, 2 * config.pair_outputs
        self.layers = nn.ModuleList(layers)
        self.first = nn.Linear((m_r + m_c) * config.width, config.head_hidden)
        self.out = nn.Linear(config.head_hidden, TASKS)
        self.dropout = Dropout(config.dropout)

    def prepare(self, batch: RequestBatch) -> DenseState:
        vectors = self.input.encoder.item_vectors()
        return self.sequence(self.input.request(batch, vectors))._replace(vectors=vectors)

    def score(self, state: DenseState, batch: RequestBatch) -> Tensor:
        return self.rank(state, self.input.pairs(batch, state.vectors), batch.request_of)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def broadcast(self, batch: RequestBatch) -> Tensor:
        request_of, vectors = batch.request_of, self.input.encoder.item_vectors()
        state = self.sequence(self.input.request(batch, vectors).copied(request_of))
        own = torch.arange(len(request_of), device=request_of.device)
        return self.rank(state, self.input.pairs(batch, vectors), own)

    def sequence(self, inputs: RequestInputs) -> DenseState:
        events, keys = inputs.events, []
        for layer in self.layers:
            events, of_layer = layer.events.advance(events, inputs.mask)
            keys.append(of_layer)
        return DenseState(inputs.slots, tuple(keys))

    def rank(self, state: DenseState, x_c: Tensor, request_of: Tensor) -> Tensor:
        groups = request_groups(request_of, len(state.slots))
        x = torch.cat([state.slots[request_of], x_c], dim=1)  # (P, 14, d)
        for layer, keys in zip(self.layers, state.keys, strict=True):
            x = layer(x, keys, request_of, groups)
        return self.out(self.dropout(F.silu(self.first(x.flatten(1)))))

    def dense_params(self) -> int:
        """Parameters behind the slots: layers and head."""
        return sum(p.numel() for part in (self.layers, self.first, self.out) for p in part.parameters())
