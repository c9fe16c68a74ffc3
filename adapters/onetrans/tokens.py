"""Tokens of OneTrans: behaviour events (S-tokens) and everything else (NS-tokens).

    x_j = MLP_seq(j)(ev_j) + type_seq(j) + pos            ev = item | genres | rating | gap to the previous event, 48 floats
    NS  = split( SiLU(W [fields] + b), L_NS )             fields = user | context | statistics | candidate | cross, 224

An age measured from the request would change every S-token at every request; the gap to the user's previous rating does
not, which is what allows keys and values to be kept from request to request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.behaviour_events import window_events
from auto_research.blocks.private_projection import GroupTokenizer
from auto_research.blocks.request_encoder import START_SCALE, RequestEncoder
from auto_research.blocks.two_sided import BroadcastLinear
from auto_research.data.behaviours import BehaviourBatch, interleave

SEQUENCES = ("liked", "other")
MERGES = ("timestamp_aware", "timestamp_agnostic")
POSITIONS = ("newest", "oldest")
GROUPS = 6  # user, context, statistics, item and genres, decade and popularity, cross


class Tokens(NamedTuple):
    """S-tokens x [R, L_S, D], left-padded; mask bool[R, L_S]; row int64[R, L_S], the rating behind each, -1 for none."""

    x: Tensor
    mask: Tensor
    row: Tensor


class SequenceTokenizer(nn.Module):
    """Two behaviour windows of L events -> one list of L_S = 2 L tokens, oldest first, left-padded.

    merge: 'timestamp_aware' interleaves all events by time and adds the type of their sequence; 'timestamp_agnostic'
    puts the weaker signal first, others [SEP] liked, others capped at L - 1.
    positions: counted from the 'newest' token backwards, or from the 'oldest' onwards (cross-request caching).
    """

    def __init__(self, event_width: int, width: int, history: int, *, merge: str, positions: str):
        super().__init__()
        self.length, self.merge, self.positions = 2 * history, merge, positions
        self.mlp = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(event_width, width), nn.GELU(), nn.Linear(width, width))
                for name in SEQUENCES
            }
        )
        self.position = nn.Parameter(torch.randn(self.length, width) * START_SCALE)
        aware = merge == "timestamp_aware"
        self.sequence_type = nn.Parameter(torch.randn(len(SEQUENCES), width) * START_SCALE) if aware else None
        self.separator = None if aware else nn.Parameter(torch.randn(width) * START_SCALE)

    def forward(self, encoder: RequestEncoder, batch: BehaviourBatch) -> Tokens:
        windows = [batch.window(name) for name in SEQUENCES]
        liked, other = (
            self.mlp[name](window_events(encoder, window, clock="gap"))  # (R, L, D)
            for name, window in zip(SEQUENCES, windows, strict=True)
        )
        if self.merge == "timestamp_aware":
            order, mask = interleave(*windows)
            x = torch.cat([liked + self.sequence_type[0], other + self.sequence_type[1]], dim=1)  # (R, 2L, D)
            row = torch.cat([w.row for w in windows], dim=1)
        else:
            x, mask, row = self._joined(liked, other, *windows)
            order = torch.argsort(mask.long(), dim=1, stable=True)  # padding of both windows goes to the left
            mask = mask.gather(1, order)
        x = x.gather(1, order.unsqueeze(2).expand_as(x))
        return Tokens(x + self._position(mask), mask, row.gather(1, order))

    def _joined(self, liked, other, liked_window, other_window) -> tuple[Tensor, Tensor, Tensor]:
        """others[1:] | SEP | liked, 2L tokens, not yet compacted."""
        requests = len(liked)
        separator = self.separator.to(liked.dtype).expand(requests, 1, -1)
        always = liked_window.mask.new_ones(requests, 1)
        nothing = liked_window.row.new_full((requests, 1), -1)
        return (
            torch.cat([other[:, 1:], separator, liked], dim=1),
            torch.cat([other_window.mask[:, 1:], always, liked_window.mask], dim=1),
            torch.cat([other_window.row[:, 1:], nothing, liked_window.row], dim=1),
        )

    def _position(self, mask: Tensor) -> Tensor:
        if self.positions == "newest":
            return self.position.flip(0)  # slot L_S - 1 is position 0
        return self.position[(mask.long().cumsum(1) - 1).clamp(min=0)]  # (R, L_S, D)


class AutoSplit(nn.Module):
    """All fields -> one Linear(9w + 5w, L_NS D) -> SiLU -> L_NS tokens; the request's share is computed once."""

    def __init__(self, request_width: int, pair_width: int, tokens: int, width: int):
        super().__init__()
        self.tokens = tokens
        self.project = BroadcastLinear(request_width, pair_width, tokens * width)

    def forward(self, request: Tensor, pair: Tensor, request_of: Tensor) -> Tensor:
        return F.silu(self.project(request, pair, request_of)).unflatten(1, (self.tokens, -1))  # (P, L_NS, D)


class GroupWise(nn.Module):
    """Alternative tokenizer: one Linear per field group, six tokens."""

    tokens = GROUPS

    def __init__(self, request_width: int, pair_width: int, width: int):
        super().__init__()
        w = request_width // 9
        self.request_widths, self.pair_widths = [5 * w, 3 * w, w], [2 * w, 2 * w, w]
        if sum(self.request_widths) != request_width or sum(self.pair_widths) != pair_width:
            raise ValueError(f"field groups do not add up to {request_width} + {pair_width} floats")
        self.request = GroupTokenizer(self.request_widths, width)
        self.pair = GroupTokenizer(self.pair_widths, width)

    def forward(self, request: Tensor, pair: Tensor, request_of: Tensor) -> Tensor:
        first = self.request(*request.split(self.request_widths, dim=1))[:, request_of]  # (3, P, D)
        second = self.pair(*pair.split(self.pair_widths, dim=1))
        return torch.cat([first, second]).transpose(0, 1)  # (P, 6, D)
