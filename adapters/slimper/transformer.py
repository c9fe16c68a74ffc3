"""The baseline SlimPer replaces: a pre-norm Transformer over [E; candidate token], N states carried through every layer.

Rows of E see E only and each candidate sees E and itself, so one pass over E serves all candidates of a request
(the strongest form of the baseline: the paper's per-candidate pass costs P times the request part).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapters.slimper.model import FIELD_TOKENS, TASKS, Tokenizer, UserTokens, copied
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer, KeyValueCache
from auto_research.blocks.dropout import Dropout
from auto_research.data.requests import RequestBatch


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes: width d, layers, heads, hidden (feed-forward), head (tower). storage as in SlimPerConfig."""

    width: int = 64
    layers: int = 6
    heads: int = 4
    hidden: int = 256
    user_width: int = 64
    head: int = 128
    field: int = 16
    dropout: float = 0.2
    storage: str = "request"


class TransformerState(NamedTuple):
    """Keys and values of all layers over E, and D_u [R, user_width]."""

    cache: KeyValueCache
    user: Tensor


class FullTransformer(nn.Module):
    """model(batch) -> logits [P, 3] from the candidate token's last state and D_u."""

    def __init__(self, config: TransformerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        d = config.width
        self.tokenizer = Tokenizer(
            vocab, item_genres, d, user_width=config.user_width, field=config.field, dropout=config.dropout
        )
        self.candidate = nn.Linear(self.tokenizer.encoder.pair_width, d)
        self.stack = BiasedTransformer(
            BiasedConfig(d, config.heads, config.layers, config.hidden, dropout=config.dropout, norm="rms")
        )
        self.head = nn.Sequential(
            nn.Linear(d + config.user_width, config.head),
            nn.SiLU(),
            Dropout(config.dropout),
            nn.Linear(config.head, TASKS),
        )

    def encode(self, user: UserTokens) -> TransformerState:
        """One pass over the rows of E."""
        count = user.mask.shape[1]
        everyone = user.mask.new_ones(len(user.mask), count, count)
        return TransformerState(self.stack.cache(user.tokens, user.mask, visible=everyone), user.user)

    def prepare(self, batch: RequestBatch) -> TransformerState | UserTokens:
        user = self.tokenizer(batch)
        return user if self.config.storage == "candidate" else self.encode(user)

    def score(self, state: TransformerState | UserTokens, batch: RequestBatch) -> Tensor:
        request_of = batch.request_of
        if self.config.storage == "candidate":
            state, request_of = copied(state, request_of)
            state = self.encode(state)
        x = self.stack.candidates(self.candidate(self.tokenizer.item(batch)), state.cache, request_of)
        return self.head(torch.cat([x, state.user[request_of]], dim=1))

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def score_elements(self, tokens: int) -> int:
        """Attention scores per pair and head when nothing is shared: layers * (N + 1)^2."""
        return self.config.layers * (tokens + 1) ** 2

    def flops(self, pairs: int, requests: int, history: int) -> int:
        """Forward matrix FLOPs; rows of E once per request (the last layer gives its keys and values only)."""
        c, w, d = self.config, self.config.field, self.config.width
        n = history + FIELD_TOKENS
        request = 2 * d * (history * 3 * w + (FIELD_TOKENS + 1) * w) + 2 * n * d
        request += 2 * c.user_width * (w + d + c.user_width)
        row = 8 * d * d + 4 * d * c.hidden
        request += (c.layers - 1) * n * (row + 4 * n * d) + n * 6 * d * d
        pair = 2 * 5 * w * d + c.layers * (row + 4 * (n + 1) * d) + 2 * c.head * (d + c.user_width + TASKS)
        return requests * request + pairs * pair


def matched_hidden(target: int, inputs: int, c: TransformerConfig) -> int:
    """Feed-forward width for which the dense parameters of the Transformer are about `target`; inputs: candidate floats."""
    d, w = c.width, c.field
    tokenizer = 3 * w * d + d + (FIELD_TOKENS + 1) * w * d + FIELD_TOKENS * d + d
    tokenizer += (w + d + 1) * c.user_width + (c.user_width + 1) * c.user_width
    fixed = tokenizer + (inputs + 1) * d + (d + c.user_width + 1) * c.head + (c.head + 1) * TASKS + d
    layer = 4 * d * d + 4 * d + 2 * d + d  # attention, two norms, bias of the second feed-forward matrix
    return max(1, round((target - fixed - c.layers * layer) / (c.layers * (2 * d + 1))))
