"""Encode, then interact: a Transformer over the S-tokens, then RankMixer blocks over pooled states and fields.

The baseline of OneTrans' introduction: the sequence is encoded without the fields, and meets them as a few vectors.

    H = Transformer(S)                                            (R, L_S, D), causal, L_S rows in every layer
    e = fields | mean of H | newest of H | H read by the candidate | candidate | cross
    z = mean over tokens of RankMixer(pieces of e),  logits = MLP(z)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapters.onetrans.model import TASKS, OneTrans, OneTransConfig
from adapters.onetrans.tokens import SequenceTokenizer
from auto_research.blocks.behaviour_events import request_fields
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import PieceTokenizer
from auto_research.blocks.rankmixer_block import RankMixerBlock, matched_width
from auto_research.blocks.request_attention import RequestCrossAttention, RequestKeys
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.data.behaviours import BehaviourBatch

MIXER_TOKENS, MIXER_BLOCKS = 8, 2


class EncodedRequest(NamedTuple):
    """fields | mean | newest [R, 9w + 2D], and the keys that candidates read."""

    fields: Tensor
    keys: RequestKeys


class EncodeThenInteract(nn.Module):
    """model(batch) -> logits [P, 3]; the same tokens, depth and width as OneTrans; `mixer_hidden` sets its size."""

    def __init__(self, config: OneTransConfig, vocab: dict[str, int], item_genres: Tensor, mixer_hidden: int):
        super().__init__()
        width, dropout = config.width, config.dropout
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field)
        encoder = self.encoder
        self.sequence_tokens = SequenceTokenizer(
            encoder.event_width, width, config.history, merge=config.merge, positions=config.positions
        )
        sizes = BiasedConfig(
            width=width,
            heads=config.heads,
            layers=len(config.schedule),
            hidden=config.expansion * width,
            norm="rms",
            dropout=dropout,
            attention_dropout=0.0,  # as in OneTrans: on the inputs and in the FFNs only
        )
        self.transformer = BiasedTransformer(sizes)
        self.query = nn.Linear(encoder.pair_width, width)
        self.attention = RequestCrossAttention(width, heads=config.heads, null_event=True)
        self.dropout = Dropout(dropout)
        inputs = encoder.request_width + encoder.pair_width + 3 * width
        self.pieces = PieceTokenizer(inputs, MIXER_TOKENS, width)
        self.blocks = nn.ModuleList(
            RankMixerBlock(MIXER_TOKENS, width, mixer_hidden, dropout) for _ in range(MIXER_BLOCKS)
        )
        self.head = nn.Sequential(nn.Linear(width, config.hidden), nn.GELU(), nn.Linear(config.hidden, TASKS))

    def prepare(self, batch: BehaviourBatch) -> EncodedRequest:
        tokens = self.sequence_tokens(self.encoder, batch)
        states = self.transformer(tokens.x, tokens.mask)  # (R, L_S, D)
        newest = states[:, -1] * tokens.mask[:, -1:].to(states.dtype)
        flat = torch.cat([request_fields(self.encoder, batch), masked_mean(states, tokens.mask), newest], dim=1)
        return EncodedRequest(self.dropout(flat), self.attention.keys_values(states, tokens.mask))

    def score(self, state: EncodedRequest, batch: BehaviourBatch) -> Tensor:
        pair = self.encoder.pairs(batch)
        own = torch.cat([pair.candidate, pair.cross], dim=1)  # (P, 5w)
        read = self.attention.attend(self.query(own).unsqueeze(1), state.keys, batch.request_of).squeeze(1)  # (P, D)
        x = self.pieces(torch.cat([state.fields[batch.request_of], self.dropout(torch.cat([read, own], 1))], dim=1))
        for block in self.blocks:
            x = block(x)  # (T, P, D)
        return self.head(x.mean(0))

    def forward(self, batch: BehaviourBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())


def matched(config: OneTransConfig, vocab: dict[str, int], item_genres: Tensor) -> EncodeThenInteract:
    """The baseline with as many parameters as OneTrans at the same sizes, tables included in both."""
    target = sum(p.numel() for p in OneTrans(config, vocab, item_genres).parameters())
    hidden = matched_width(target, lambda width: EncodeThenInteract(config, vocab, item_genres, width))
    return EncodeThenInteract(config, vocab, item_genres, hidden)
