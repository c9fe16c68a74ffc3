"""The arm longer_then_rankmixer: the sequences are read once, after the last encoder, and mixed with the fields afterwards.

Tokenizers, query generator, encoders, decoder and head are HyFormer's; then RankMixer blocks over the same T tokens. What
differs is the order: nothing that the fields do reaches the reading of the sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapters.hyformer.model import (
    HEADS,
    KV_ENCODERS,
    QUERY_DECODERS,
    SEQUENCES,
    TASKS,
    HyFormerConfig,
    Inputs,
    RequestState,
    decay_groups,
)
from auto_research.blocks.rankmixer_block import RankMixerBlock
from auto_research.blocks.request_groups import request_groups
from auto_research.data.behaviours import BehaviourBatch


class LateFusion(nn.Module):
    """model(batch) -> logits [P, 3]. hidden: inner width of the RankMixer blocks' feed-forward layers."""

    def __init__(self, config: HyFormerConfig, vocab: dict[str, int], item_genres: Tensor, hidden: int):
        super().__init__()
        self.config = config
        self.inputs = Inputs(config, vocab, torch.as_tensor(item_genres))
        encoder, decoder = KV_ENCODERS[config.kv_encoder], QUERY_DECODERS[config.query_decoder]
        self.encoders = nn.ModuleList(
            nn.ModuleList(encoder(config) for _ in range(config.layers)) for _ in SEQUENCES
        )  # [sequence][layer]
        self.decoders = nn.ModuleList(decoder(config.width, config.heads) for _ in SEQUENCES)
        sizes = (config.all_tokens, config.width)
        self.blocks = nn.ModuleList(RankMixerBlock(*sizes, hidden, config.dropout) for _ in range(config.layers))
        self.head = HEADS[config.head](*sizes, config.head_hidden, TASKS, config.dropout)

    def prepare(self, batch: BehaviourBatch) -> RequestState:
        means, rows = self.inputs.sequences(batch)
        keys: list[NamedTuple] = []
        for (h, mask), encoders, decoder in zip(rows, self.encoders, self.decoders, strict=True):
            for encoder in encoders:
                h, mask = encoder(h, mask)
            keys.append(decoder.keys_values(h, mask))
        return RequestState(self.inputs.fields(batch), means, [keys])

    def score(self, state: RequestState, batch: BehaviourBatch) -> Tensor:
        z = self.inputs.start(state.fields, state.means, self.inputs.candidate(batch), batch.request_of)
        groups = request_groups(batch.request_of, len(state.means))
        queries = z[: self.config.all_queries].chunk(len(SEQUENCES))
        parts = zip(self.decoders, queries, state.keys[0], strict=True)
        decoded = [decoder(q, keys, batch.request_of, groups) for decoder, q, keys in parts]
        z = torch.cat([*decoded, z[self.config.all_queries :]])
        for block in self.blocks:
            z = block(z)
        return self.head(z)

    def forward(self, batch: BehaviourBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return decay_groups(self, weight_decay)

    def dense_params(self) -> int:
        """Parameters behind the embedded fields and events."""
        behind = sum(p.numel() for p in self.parameters()) - sum(p.numel() for p in self.inputs.parameters())
        return behind + self.inputs.params()

    params = dense_params
