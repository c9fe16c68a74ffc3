"""Input vector of the neural request-table baselines: embedded fields and three summaries of the behaviour sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.sequence_summary import DefaultSummary
from auto_research.data.requests import RequestBatch

SUMMARIES = 3


class RequestState(NamedTuple):
    """What is computed once per request: flat [R, .] and the summary's cache."""

    flat: Tensor
    cache: Any


class RankerInput(nn.Module):
    """RequestBatch -> e [P, E], E = 224 + 3 * 48 = 368 at field width 16: user | context | statistics | mean of all
    events | mean of the last 8 | DIN attention | candidate | cross."""

    def __init__(self, vocab: dict[str, int], item_genres: Tensor, *, field: int = 16, history: int = 50) -> None:
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=field)
        encoder = self.encoder
        self.summary = DefaultSummary(encoder.event_width, encoder.user_width, longest=history)
        self.width = encoder.request_width + encoder.pair_width + SUMMARIES * encoder.event_width

    def prepare(self, batch: RequestBatch) -> RequestState:
        request = self.encoder.request(batch)
        vectors, cache = self.summary.prepare(request.events, request.mask, request.user)  # (R, 2, 3w)
        return RequestState(torch.cat([request.flat(), vectors.flatten(1)], dim=1), cache)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        pair = self.encoder.pairs(batch)
        vectors = self.summary.score(state.cache, pair.key, batch.request_of)  # (P, 1, 3w)
        return torch.cat([state.flat[batch.request_of], vectors.flatten(1), pair.candidate, pair.cross], dim=1)
