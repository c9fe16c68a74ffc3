"""ROCS (arXiv:2607.27744): a request pathway that stays free of candidates through the whole depth, computed once.

    X_r [R, 9, d]   user_id, age, gender, occupation, zip, hour, weekday, gap, user statistics
    X_c [P, 5, d]   item_id, genres, decade, popularity, cross
    H   [R, L+1, d] the last L events behind a learned null event
    logits = W_o SiLU((flatten(X_r) V_r)[r] + flatten(X_c) V_c)                      engage, like, love

`prepare` runs the request pathway, `score` any candidates against it; training uses the same two. `broadcast` is the usual
way of computing the same numbers: request content copied to every candidate before the first layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.rocs.layers import LayerState, MaskedLayer, ROCSConfig
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import PositionLinear
from auto_research.blocks.request_attention import NullEvent
from auto_research.blocks.request_encoder import CONTEXT_FIELDS, USER_FIELDS, RequestEncoder
from auto_research.blocks.request_groups import request_groups
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.blocks.two_sided import BroadcastLinear
from auto_research.data.requests import RequestBatch

TASKS = 3  # engage, like, love
REQUEST_IDS = len(USER_FIELDS) + len(CONTEXT_FIELDS)
REQUEST_SLOTS = REQUEST_IDS + 1  # 9
ITEM_SLOTS = 3  # item_id, genres, decade: the candidate's slots that depend on the item alone
PAIR_SLOTS = ITEM_SLOTS + 2
NUMERIC_GAIN = 0.2


class RequestInputs(NamedTuple):
    """slots [R, m_r, d], events [R, L + 1, d] (null event first), mask bool[R, L + 1]."""

    slots: Tensor
    events: Tensor
    mask: Tensor

    def copied(self, request_of: Tensor) -> RequestInputs:
        """One copy per candidate: what ROCS avoids."""
        return RequestInputs(*(x[request_of] for x in self))


def slot_projection(slots: int, config: ROCSConfig) -> PositionLinear:
    """A Linear(w, d) per field, [B, slots, w] -> [B, slots, d]; biases start at zero, as they would drown the ids."""
    project = PositionLinear(slots, config.field, config.width)
    nn.init.zeros_(project.bias)
    return project


class NumericSlots(nn.Module):
    """Slots of numeric fields [B, n w] -> [B, n, d], normalised: at the start they are many times as large as ids."""

    def __init__(self, slots: int, config: ROCSConfig):
        super().__init__()
        self.slots, self.project, self.norm = slots, slot_projection(slots, config), nn.RMSNorm(config.width)
        nn.init.constant_(self.norm.weight, NUMERIC_GAIN)

    def forward(self, fields: Tensor) -> Tensor:
        return self.norm(self.project(fields.unflatten(1, (self.slots, -1))))


class SlotInput(nn.Module):
    """Fields of a batch as slots of width d, each field through its own Linear(w, d), and events as [R, L + 1, d].

    vectors: `encoder.item_vectors()` [n_items + 1, 2w], computed once per forward pass for events and candidates.
    """

    def __init__(self, config: ROCSConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field)
        self.request_ids, self.request_numbers = slot_projection(REQUEST_IDS, config), NumericSlots(1, config)
        self.item_slots = slot_projection(ITEM_SLOTS, config)
        self.pair_numbers = NumericSlots(PAIR_SLOTS - ITEM_SLOTS, config)
        self.events = nn.Linear(self.encoder.event_width, config.width, bias=False)
        self.null = NullEvent(config.width)
        self.dropout = Dropout(config.dropout)

    def request(self, batch: RequestBatch, vectors: Tensor | None = None) -> RequestInputs:
        r = self.encoder.request(batch, vectors)
        ids = torch.cat([r.user, r.context], dim=1)
        ids = self.request_ids(self.dropout(ids).unflatten(1, (REQUEST_IDS, -1)))
        slots = torch.cat([ids, self.request_numbers(self.dropout(r.statistics))], dim=1)
        return RequestInputs(slots, *self.null(self.events(self.dropout(r.events)), r.mask))

    def pairs(self, batch: RequestBatch, vectors: Tensor | None = None) -> Tensor:
        """X_c [P, 5, d]."""
        vectors = self.encoder.item_vectors() if vectors is None else vectors
        return torch.cat([self.items(F.embedding(batch.item, vectors), batch.decade), self.numbers(batch)], dim=1)

    def items(self, vectors: Tensor, decade: Tensor) -> Tensor:
        """Slots of the item alone [B, 3, d]; vectors [B, 2w], decade int64[B]."""
        fields = torch.cat([vectors, self.encoder.decade(decade)], dim=1)
        return self.item_slots(self.dropout(fields).unflatten(1, (ITEM_SLOTS, -1)))

    def numbers(self, batch: RequestBatch) -> Tensor:
        """Slots of popularity and cross features [P, 2, d], which depend on the request."""
        fields = torch.cat([self.encoder.popularity(batch.popularity), self.encoder.cross(batch.cross)], dim=1)
        return self.pair_numbers(self.dropout(fields))


class ROCSState(NamedTuple):
    """A request's share of every layer and of the head ([R, 64], None when its term is dropped); vectors of `SlotInput`."""

    layers: tuple[LayerState, ...]
    head: Tensor | None
    vectors: Tensor | None = None


class TwoPartHead(nn.Module):
    """W_o SiLU((flatten(X_r) V_r)[r] + flatten(X_c) V_c); request_term False drops the first part (ablation)."""

    def __init__(self, config: ROCSConfig, request_slots: int, pair_slots: int):
        super().__init__()
        d, hidden = config.width, config.head_hidden
        if config.request_head:
            self.first = BroadcastLinear(request_slots * d, pair_slots * d, hidden)
        else:
            self.first = nn.Linear(pair_slots * d, hidden)
        self.out, self.dropout = nn.Linear(hidden, TASKS), Dropout(config.dropout)

    def request(self, x: Tensor) -> Tensor | None:
        return self.first.request_part(x.flatten(1)) if isinstance(self.first, BroadcastLinear) else None

    def forward(self, shared: Tensor | None, x: Tensor, request_of: Tensor) -> Tensor:
        x = x.flatten(1)
        hidden = self.first(x) if shared is None else self.first.pair_part(shared, x, request_of)
        return self.out(self.dropout(F.silu(hidden)))

    def flops(self) -> tuple[int, int]:
        """Matrix FLOPs (per request, per candidate)."""
        out = 2 * self.out.weight.numel()
        if isinstance(self.first, BroadcastLinear):
            return self.first.flops(0), self.first.flops(1, requests=0) + out
        return 0, 2 * self.first.weight.numel() + out


class ROCS(nn.Module):
    """The ranker: model(batch) -> logits [P, 3] for engage, like, love."""

    def __init__(self, config: ROCSConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        self.input = SlotInput(config, vocab, item_genres)
        m_r, m_c, layers = REQUEST_SLOTS + (config.attention == "mean"), PAIR_SLOTS, []
        for index in range(config.layers):
            emits = config.request_head or index < config.layers - 1
            layers.append(MaskedLayer(config, m_r, m_c, emits))
            m_r, m_c = 2 * config.request_outputs, 2 * config.pair_outputs
        self.layers = nn.ModuleList(layers)
        self.head = TwoPartHead(config, m_r, m_c)

    def prepare(self, batch: RequestBatch) -> ROCSState:
        """The request pathway at R rows."""
        vectors = self.input.encoder.item_vectors()
        return self.request_path(self.input.request(batch, vectors))._replace(vectors=vectors)

    def score(self, state: ROCSState, batch: RequestBatch) -> Tensor:
        """Logits [P, 3] of the batch's candidates for prepared requests."""
        return self.pair_path(state, self.input.pairs(batch, state.vectors), batch.request_of)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def broadcast(self, batch: RequestBatch) -> Tensor:
        """The same logits from request content that is copied per candidate before the first layer."""
        request_of, vectors = batch.request_of, self.input.encoder.item_vectors()
        state = self.request_path(self.input.request(batch, vectors).copied(request_of))
        own = torch.arange(len(request_of), device=request_of.device)
        return self.pair_path(state, self.input.pairs(batch, vectors), own)

    def request_path(self, inputs: RequestInputs) -> ROCSState:
        x, events, mask = inputs
        if self.config.attention == "mean":
            x = torch.cat([x, masked_mean(events, mask).unsqueeze(1)], dim=1)
        states = []
        for layer in self.layers:
            x, events, state = layer.request(x, events, mask)
            states.append(state)
        return ROCSState(tuple(states), self.head.request(x))

    def pair_path(self, state: ROCSState, x: Tensor, request_of: Tensor) -> Tensor:
        groups = request_groups(request_of, len(state.layers[0].slots))
        for layer, of_request in zip(self.layers, state.layers, strict=True):
            x = layer.pairs(of_request, x, request_of, groups)
        return self.head(state.head, x, request_of)

    def dense_params(self) -> int:
        """Parameters behind the slots: layers and head."""
        return sum(p.numel() for part in (self.layers, self.head) for p in part.parameters())

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        """cost(J) = a + b J of layers and head for a history of `length`: the request part is paid once per request."""
        parts = [layer.flops(length + 1) for layer in self.layers] + [self.head.flops()]
        mean = 2 * (length + 1) * self.config.width if self.config.attention == "mean" else 0
        return requests * (mean + sum(a for a, _ in parts)) + pairs * sum(b for _, b in parts)
