"""Input vector of the neural request-table baselines: embedded fields and summaries of the behaviour sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from auto_research.blocks.activation_unit import AttentionPooling
from auto_research.blocks.behaviour_events import request_fields, window_events
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.sequence_summary import RECENT, masked_mean
from auto_research.data.requests import RequestBatch

SUMMARIES = 3
UNIT_HIDDEN = (32, 16)
WHOLE = "history"  # the only window where none is named


class RequestState(NamedTuple):
    """What is computed once per request: flat [R, .], and of every window events [R, L, 3w] and their mask."""

    flat: Tensor
    events: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]


class RankerInput(nn.Module):
    """Batch -> e [P, E], E = 224 + S * 3 * 48 at field width 16 and S windows: user | context | statistics | of every
    window the means of all events and of the last 8 | of every window DIN attention | candidate | cross.

    sequences: windows of a `BehaviourBatch` (liked, other, hist); none: the whole history of a `RequestBatch`, S = 1.
    """

    def __init__(
        self,
        vocab: dict[str, int],
        item_genres: Tensor,
        *,
        sequences: Sequence[str] = (),
        field: int = 16,
        history: int = 50,
        unit_hidden: tuple[int, int] = UNIT_HIDDEN,
    ) -> None:
        super().__init__()
        self.encoder, self.sequences = RequestEncoder(vocab, item_genres, field=field), tuple(sequences)
        encoder, names = self.encoder, self.sequences or (WHOLE,)
        self.attention = nn.ModuleDict(
            {name: AttentionPooling(encoder.event_width, longest=history, hidden=unit_hidden) for name in names}
        )
        self.width = encoder.request_width + encoder.pair_width + SUMMARIES * len(names) * encoder.event_width

    def prepare(self, batch: RequestBatch) -> RequestState:
        flat, windows = self._windows(batch)
        parts = [flat]
        for events, mask in windows:
            newest = slice(max(0, events.shape[1] - RECENT), None)
            parts += [masked_mean(events, mask), masked_mean(events[:, newest], mask[:, newest])]  # each (R, 3w)
        events, masks = zip(*windows, strict=True)
        return RequestState(torch.cat(parts, dim=1), events, masks)

    def _windows(self, batch: RequestBatch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Fields of the requests [R, 9w], and (events, mask) of every window."""
        if not self.sequences:
            request = self.encoder.request(batch)
            return request.flat(), [(request.events, request.mask)]
        windows = [batch.window(name) for name in self.sequences]
        events = [(window_events(self.encoder, window), window.mask) for window in windows]
        return request_fields(self.encoder, batch), events

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        pair, of = self.encoder.pairs(batch), batch.request_of
        attended = [
            attention(events, mask, pair.key, of)  # (P, 3w)
            for attention, events, mask in zip(self.attention.values(), state.events, state.masks, strict=True)
        ]
        return torch.cat([state.flat[of], *attended, pair.candidate, pair.cross], dim=1)
