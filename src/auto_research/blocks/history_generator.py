"""TIGER's generator (arXiv:2305.05065): a history of semantic ids and a hashed user token in, the next id out.

Two ways to write a history (`source`): "flat", one token per code, as in the paper, or "fused", one token per item, the
sum of its L code embeddings over sqrt(L). Two ways to train: on the last target of a row, or (`causal`) at every item of
a window; then the encoder is causal between items and open inside one, and what follows item t is spelled from items <= t.
`HistoryDecoder` puts the flat tokens into one causal stack instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.blocks.branch_cache import Memory, OwnCache, Prompt
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDDecoder, SIDSeq2Seq, sid_loss

SOURCES = ("fused", "flat")


@dataclass(frozen=True)
class GeneratorConfig:
    """width .. dropout: as in SIDConfig.  length: items of a history.  causal: train at every item of a window."""

    width: int = 64
    heads: int = 4
    encoder_layers: int = 2
    layers: int = 2
    hidden: int = 256
    dropout: float = 0.1
    length: int = 50
    source: str = "fused"
    causal: bool = True
    user_token: bool = True

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"unknown source {self.source!r}; known: {', '.join(SOURCES)}")

    def sid(self, **changes) -> SIDConfig:
        """Sizes of the underlying model."""
        config = SIDConfig(
            self.width, self.heads, self.encoder_layers, self.layers, self.hidden, self.dropout,
            history=self.length, prefix=int(self.user_token),
        )  # fmt: skip
        return replace(config, **changes)


class _Tokens(nn.Module):
    """Lookups from ids to tokens: items int64[n_items + 1, L] (row 0: PAD), codes (row 0: -1), users int64[n_users + 1]."""

    def __init__(self, table: SIDTable, vocab: SIDVocab, n_users: int):
        super().__init__()
        users = vocab.user_token(np.arange(n_users + 1)) if vocab.users else np.full(n_users + 1, vocab.pad)
        for name, array in {"items": vocab.item_tokens(table), "codes": table.codes, "users": users}.items():
            self.register_buffer(name, torch.from_numpy(np.array(array)), persistent=False)


class HistoryGenerator(SIDSeq2Seq):
    """Encoder over a history of items, decoder over the codes of the next one; see `train.sid` for its callers.

    table, vocab: the semantic ids and their tokens, with user tokens where config.user_token asks for one (ConfigError
    where it was made for other ids).  n_users: largest user id.
    """

    def __init__(self, table: SIDTable, vocab: SIDVocab, config: GeneratorConfig, n_users: int):
        super().__init__(vocab, config.sid())
        self.choice = config
        self.tokens = _Tokens(table, vocab, n_users)
        if config.source == "fused":
            self.level = None

    def context(self, items: Tensor, user: Tensor) -> Memory:
        """Memory of histories items int64[B, n] (left-padded with 0, newest last) of users int64[B]."""
        place = self._place(items.shape[1], items.device)
        visible = None
        if self.choice.causal:
            visible = (place <= place.unsqueeze(1)).expand(len(items), -1, -1)
        return self.encode(self.source(items, user), self._mask(items), visible=visible)

    def source(self, items: Tensor, user: Tensor) -> Tensor:
        """Encoder input float[B, S, D]: the user token, then one token per item (fused) or per code (flat)."""
        tokens, prefix = self.tokens.items[items], self.choice.user_token
        front = self.tokens.users[user].unsqueeze(1)  # (B, 1)
        if self.choice.source == "flat":
            flat = tokens.flatten(1)
            return self.embed_source(torch.cat([front, flat], dim=1) if prefix else flat)
        fused = self.embedding(tokens).sum(2) / math.sqrt(tokens.shape[2]) + self.slot[self._back(items)]
        return torch.cat([self.embedding(front) + self.front, fused], dim=1) if prefix else fused

    def training_loss(self, batch) -> Tensor:
        """Mean of - log p(codes of a target | what came before it): batch has items, target int64[B, n], user int64[B]."""
        ctx = self.context(batch.items, batch.user)
        if not self.choice.causal:
            return sid_loss(self, ctx, self.tokens.codes[batch.target[:, -1]].unsqueeze(1))
        columns = batch.items.shape[1]
        place = self._place(columns, batch.items.device)
        visible = place <= torch.arange(columns, device=place.device).unsqueeze(1)  # (n, S)
        return sid_loss(
            self,
            ctx,
            self.tokens.codes[batch.target],
            batch.target > 0,
            visible=visible.expand(len(batch.items), -1, -1),
            extra=self.slot[self._back(batch.items)].unsqueeze(1),
        )

    def spell(self, tokens: Tensor, ctx: Memory, own: OwnCache | None = None, **options) -> tuple[Tensor, OwnCache]:
        """As SIDSeq2Seq; a target without a slot of its own follows the newest item."""
        return self.decode(tokens, ctx, own, **{"extra": self.slot[0], **options})

    def _per_item(self) -> int:
        return self.vocab.levels if self.choice.source == "flat" else 1

    def _back(self, items: Tensor) -> Tensor:
        """Slots of the columns of items, 0 = newest."""
        return torch.arange(items.shape[1] - 1, -1, -1, device=items.device)

    def _place(self, columns: int, device: torch.device) -> Tensor:
        """int64[S]: item column that every source token belongs to, -1 for the user."""
        place = torch.arange(columns, device=device).repeat_interleave(self._per_item())
        return torch.cat([place.new_full((1,), -1), place]) if self.choice.user_token else place

    def _mask(self, items: Tensor) -> Tensor:
        mask = (items > 0).repeat_interleave(self._per_item(), dim=1)
        return torch.cat([mask.new_ones(len(mask), 1), mask], dim=1) if self.choice.user_token else mask


class HistoryDecoder(SIDDecoder):
    """The flat tokens of a history in one causal stack, trained on the last target; as many parameters as a
    `HistoryGenerator` of the same config (to less than a row of a weight matrix)."""

    def __init__(self, table: SIDTable, vocab: SIDVocab, config: GeneratorConfig, n_users: int):
        longest = (config.length + 1) * vocab.levels + 2
        layers = config.encoder_layers + config.layers
        sizes = config.sid(encoder_layers=0, layers=layers, positions=longest)
        goal = _count(HistoryGenerator(table, vocab, replace(config, source="flat"), n_users))
        narrow, wide = (_count(SIDDecoder(vocab, replace(sizes, hidden=hidden))) for hidden in (1, 2))
        super().__init__(vocab, replace(sizes, hidden=1 + round((goal - narrow) / (wide - narrow))))
        self.choice = config
        self.tokens = _Tokens(table, vocab, n_users)

    def context(self, items: Tensor, user: Tensor) -> Prompt:
        """Prompt of histories items int64[B, n] (left-padded with 0, newest last) of users int64[B]."""
        tokens = self.tokens.items[items].flatten(1)
        mask = (items > 0).repeat_interleave(self.vocab.levels, dim=1)
        if self.choice.user_token:
            tokens = torch.cat([self.tokens.users[user].unsqueeze(1), tokens], dim=1)
            mask = torch.cat([mask.new_ones(len(mask), 1), mask], dim=1)
        return self(tokens, mask=mask)[1]


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
