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
REQUEST_SLOTS = len(USER_FIELDS) + len(CONTEXT_FIELDS) + 1  # 9
PAIR_SLOTS = 5


class RequestInputs(NamedTuple):
    """slots [R, m_r, d], events [R, L + 1, d] (null event first), mask bool[R, L + 1]."""

    slots: Tensor
    events: Tensor
    mask: Tensor

    def copied(self, request_of: Tensor) -> RequestInputs:
        """One copy per candidate: what ROCS avoids."""
        return RequestInputs(*(x[request_of] for x in self))


class SlotInput(nn.Module):
    """Fields of a batch as slots of width d, each field through its own Linear(w, d), and events as [R, L + 1, d]."""

    def __init__(self, config: ROCSConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field)
        self.request_slots = PositionLinear(REQUEST_SLOTS, config.field, config.width)
        self.pair_slots = PositionLinear(PAIR_SLOTS, config.field, config.width)
        self.events = nn.Linear(self.encoder.event_width, config.width)
        self.null = NullEvent(config.width)
        self.dropout = Dropout(config.dropout)

    def request(self, batch: RequestBatch) -> RequestInputs:
        r = self.encoder.request(batch)
        fields = self.dropout(r.flat()).reshape(len(r.user), REQUEST_SLOTS, -1)
        events, mask = self.null(self.events(r.events), r.mask)
        return RequestInputs(self.request_slots(fields), events, mask)

    def pairs(self, batch: RequestBatch) -> Tensor:
        """X_c [P, 5, d]."""
        p = self.encoder.pairs(batch)
        fields = self.dropout(torch.cat([p.candidate, p.cross], dim=1))
        return self.pair_slots(fields.reshape(len(fields), PAIR_SLOTS, -1))


class ROCSState(NamedTuple):
    """A request's share of every layer and of the head ([R, 64], None when its term is dropped)."""

    layers: tuple[LayerState, ...]
    head: Tensor | None


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
        for _ in range(config.layers):
            layers.append(MaskedLayer(config, m_r, m_c))
            m_r, m_c = 2 * config.request_outputs, 2 * config.pair_outputs
        self.layers = nn.ModuleList(layers)
        self.head = TwoPartHead(config, m_r, m_c)

    def prepare(self, batch: RequestBatch) -> ROCSState:
        """The request pathway at R rows."""
        return self.request_path(self.input.request(batch))

    def score(self, state: ROCSState, batch: RequestBatch) -> Tensor:
        """Logits [P, 3] of the batch's candidates for prepared requests."""
        return self.pair_path(state, self.input.pairs(batch), batch.request_of)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def broadcast(self, batch: RequestBatch) -> Tensor:
        """The same logits from request content that is copied per candidate before the first layer."""
        request_of = batch.request_of
        state = self.request_path(self.input.request(batch).copied(request_of))
        return self.pair_path(state, self.input.pairs(batch), torch.arange(len(request_of), device=request_of.device))

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
