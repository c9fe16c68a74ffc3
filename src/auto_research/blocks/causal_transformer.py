"""Causal Transformer over padded event sequences (SASRec, arXiv:1808.09781; GPT-style pre-norm blocks).

Padding may sit on either side. A position sees itself and the valid positions before it, so a padded row never
turns into NaN and never reaches a valid one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a causal Transformer.

    hidden: inner width of the feed-forward layer (default 4 * width).  attention_dropout: on attention weights; 0 keeps
    torch's fused attention kernel, which on CPU has no dropout.  norm: 'pre' or 'post'.
    """

    width: int = 64
    heads: int = 2
    layers: int = 2
    hidden: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm: str = "pre"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', not {self.norm!r}")


def causal_mask(mask: Tensor) -> Tensor:
    """Who sees whom: [B, L] validity -> [B, 1, L, L] bool, True where query row may read key column.

    The diagonal is always True, so that a padded query has something to attend to.
    """
    length = mask.shape[1]
    below = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()  # (L, L)
    itself = torch.eye(length, dtype=torch.bool, device=mask.device)
    return (below & mask[:, None, None, :]) | itself  # (B, 1, L, L)


class CausalSelfAttention(nn.Module):
    """Multi-head scaled dot-product attention; x [B, L, D], visible [B, 1, L, L] bool -> [B, L, D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, L, D/H)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class CausalBlock(nn.Module):
    """Attention and a two-layer GELU feed-forward network, each with dropout, a residual and a LayerNorm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.pre = config.norm == "pre"
        self.attention = CausalSelfAttention(config)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, hidden), nn.GELU(), Dropout(config.dropout), nn.Linear(hidden, config.width)
        )
        self.norm_attention = nn.LayerNorm(config.width)
        self.norm_feed_forward = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        if self.pre:
            x = x + self.dropout(self.attention(self.norm_attention(x), visible))
            return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        x = self.norm_attention(x + self.dropout(self.attention(x, visible)))
        return self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))


class CausalTransformer(nn.Module):
    """Stack of causal blocks; pre-norm stacks end with a LayerNorm.

    Parameters: x [B, L, D] float, mask [B, L] bool (True = real event). Returns [B, L, D]; rows of padded positions
    hold finite values that no valid row depends on.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(CausalBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        visible = causal_mask(mask)
        for block in self.blocks:
            x = block(x, visible)
        return self.norm(x)
