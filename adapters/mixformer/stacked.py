"""The arm stacked: a sequence Transformer with the target appended, and a RankMixer stack that gets its output.

Two modules with parameters of their own, which meet once: what the sequence module reads of the target row joins the
field vector, which is cut into N tokens for the dense stack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.mixformer.model import TASKS, MixFormerConfig, decay_groups
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer, KeyValueCache
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import PieceTokenizer
from auto_research.blocks.rankmixer_block import RankMixerBlock
from auto_research.blocks.request_attention import NullEvent
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.data.requests import RequestBatch

HEADS = 4


class StackedState(NamedTuple):
    """What a request costs once: user part [R, 144], and the events' keys and values of every layer."""

    fields: Tensor
    cache: KeyValueCache


class Stacked(nn.Module):
    """model(batch) -> logits [P, 3]. hidden: inner width of the RankMixer blocks' feed-forward layers.

    The target row sees all events and itself; no event sees the target, so that a request's events are encoded once.
    """

    def __init__(self, config: MixFormerConfig, vocab: dict[str, int], item_genres: Tensor, hidden: int):
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field)
        e, width = self.encoder, config.count * config.width // 2  # gives it MixFormer's share of sequence parameters
        self.dropout = Dropout(config.dropout)
        self.events, self.target, self.null = (
            nn.Linear(e.event_width, width),
            nn.Linear(e.event_width, width),
            NullEvent(width),
        )
        self.transformer = BiasedTransformer(
            BiasedConfig(
                width=width,
                heads=HEADS,
                layers=max(1, config.blocks - 1),
                hidden=2 * width,
                norm="rms",
                ffn="swiglu",
                dropout=config.dropout,
                attention_dropout=0.0,  # the protocol drops the input vector and feed-forward outputs only
            )
        )
        self.pieces = PieceTokenizer(e.request_width + e.pair_width + width, config.count, config.width)
        sizes = (config.count, config.width, hidden, config.dropout)
        self.blocks = nn.ModuleList(RankMixerBlock(*sizes) for _ in range(config.blocks))
        self.first = nn.Linear(config.count * config.width, config.head_hidden)
        self.last, self.head_dropout = nn.Linear(config.head_hidden, TASKS), Dropout(config.dropout)

    def prepare(self, batch: RequestBatch) -> StackedState:
        r = self.encoder.request(batch)
        events, mask = self.null(self.events(r.events), r.mask)
        return StackedState(self.dropout(r.flat()), self.transformer.cache(events, mask))

    def score(self, state: StackedState, batch: RequestBatch) -> Tensor:
        pair = self.encoder.pairs(batch)
        read = self.transformer.candidates(self.target(pair.key), state.cache, batch.request_of)  # (P, d)
        item = self.dropout(torch.cat([pair.candidate, pair.cross], dim=1))
        x = self.pieces(torch.cat([state.fields[batch.request_of], item, read], dim=1))
        for block in self.blocks:
            x = block(x)
        hidden = self.head_dropout(F.silu(self.first(x.transpose(0, 1).flatten(1))))
        return self.last(hidden)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return decay_groups(self, weight_decay)

    def dense_params(self) -> int:
        """Parameters behind the embedded fields and events."""
        return sum(p.numel() for p in self.parameters()) - sum(p.numel() for p in self.encoder.parameters())

    params = dense_params
