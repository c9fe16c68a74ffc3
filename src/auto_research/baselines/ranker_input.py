"""Input vector of the neural request-table baselines: embedded fields and three summaries of the behaviour sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from auto_research.blocks.activation_unit import AttentionPooling
from auto_research.blocks.behaviour_events import request_fields, window_events
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.sequence_summary import RECENT, masked_mean
from auto_research.data.behaviours import BehaviourBatch
from auto_research.data.requests import RequestBatch

SUMMARIES = 3
UNIT_HIDDEN = (32, 16)


class RequestState(NamedTuple):
    """What is computed once per request: flat [R, .], events [R, L, 3w] and their mask."""

    flat: Tensor
    events: Tensor
    mask: Tensor


class BehaviourState(NamedTuple):
    """The same for several windows: flat [R, .], events and mask of every window."""

    flat: Tensor
    events: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]


class RankerInput(nn.Module):
    """RequestBatch -> e [P, E], E = 224 + 3 * 48 = 368 at field width 16: user | context | statistics | mean of all
    events | mean of the last 8 | DIN attention | candidate | cross."""

    def __init__(
        self,
        vocab: dict[str, int],
        item_genres: Tensor,
        *,
        field: int = 16,
        history: int = 50,
        unit_hidden: tuple[int, int] = UNIT_HIDDEN,
    ) -> None:
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=field)
        encoder = self.encoder
        self.attention = AttentionPooling(encoder.event_width, longest=history, hidden=unit_hidden)
        self.width = encoder.request_width + encoder.pair_width + SUMMARIES * encoder.event_width

    def prepare(self, batch: RequestBatch) -> RequestState:
        request = self.encoder.request(batch)
        events, mask = request.events, request.mask
        newest = slice(max(0, events.shape[1] - RECENT), None)
        means = [masked_mean(events, mask), masked_mean(events[:, newest], mask[:, newest])]  # each (R, 3w)
        return RequestState(torch.cat([request.flat(), *means], dim=1), events, mask)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        pair = self.encoder.pairs(batch)
        attended = self.attention(state.events, state.mask, pair.key, batch.request_of)  # (P, 3w)
        return torch.cat([state.flat[batch.request_of], attended, pair.candidate, pair.cross], dim=1)


class BehaviourInput(nn.Module):
    """The same from several windows of a `BehaviourBatch`: every window has its own two means and DIN attention.

    e [P, E], E = 224 + S * 3 * 48 at field width 16; `sequences` are names of windows (liked, other, hist).
    """

    def __init__(
        self,
        vocab: dict[str, int],
        item_genres: Tensor,
        *,
        sequences: Sequence[str],
        field: int = 16,
        history: int = 50,
        unit_hidden: tuple[int, int] = UNIT_HIDDEN,
    ) -> None:
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=field)
        encoder = self.encoder
        self.attention = nn.ModuleDict(
            {name: AttentionPooling(encoder.event_width, longest=history, hidden=unit_hidden) for name in sequences}
        )
        self.width = encoder.request_width + encoder.pair_width + SUMMARIES * len(sequences) * encoder.event_width

    def prepare(self, batch: BehaviourBatch) -> BehaviourState:
        vectors = self.encoder.item_vectors()
        flat, events, masks = [request_fields(self.encoder, batch)], [], []
        for name in self.attention:
            window = batch.window(name)
            e, newest = window_events(self.encoder, window, vectors), slice(max(0, window.mask.shape[1] - RECENT), None)
            flat += [masked_mean(e, window.mask), masked_mean(e[:, newest], window.mask[:, newest])]
            events.append(e)
            masks.append(window.mask)
        return BehaviourState(torch.cat(flat, dim=1), tuple(events), tuple(masks))

    def score(self, state: BehaviourState, batch: BehaviourBatch) -> Tensor:
        pair, of = self.encoder.pairs(batch), batch.request_of
        attended = [
            attention(events, mask, pair.key, of)
            for attention, events, mask in zip(self.attention.values(), state.events, state.masks, strict=True)
        ]
        return torch.cat([state.flat[of], *attended, pair.candidate, pair.cross], dim=1)
