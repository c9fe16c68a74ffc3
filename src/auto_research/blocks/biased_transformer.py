"""Causal Transformer with a choice of attention bias, a key-value cache, and candidates that read a user's sequence.

    prefill(x, ...)            hidden states of a sequence, and the keys and values of every layer
    cache(x, ...)              the keys and values alone
    extend(x, cache, ...)      later tokens of the same sequences, causal among themselves
    candidates(x, cache, ...)  isolated rows per (request, candidate): each sees its request's events and itself, so a
                               candidate's state never depends on the others and no event depends on a candidate
Without cache forward() equals prefill(). Sources: GenRank (arXiv:2505.04180), ARGUS (arXiv:2507.15994).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.attention_bias import Rotary, attention_bias
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import SwiGLU
from auto_research.blocks.request_attention import OwnKeys, request_attention


@dataclass(frozen=True)
class BiasedConfig:
    """Sizes and choices. bias: none | alibi | relative | rotary; norm: layer | rms; ffn: gelu | relu | swiglu (hidden given).

    positions, times: rows of the relative tables (times 0: no time table).
    dropout: after attention and after the FFN; attention_dropout: after attention instead, where given.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int | None = None
    bias: str = "none"
    norm: str = "layer"
    ffn: str = "gelu"
    dropout: float = 0.0
    positions: int = 128
    times: int = 32
    attention_dropout: float | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.norm not in ("layer", "rms") or self.ffn not in ("gelu", "relu", "swiglu"):
            raise ValueError(f"unknown norm {self.norm!r} or ffn {self.ffn!r}")


class KeyValueCache(NamedTuple):
    """Keys and values of every layer [B, H, L, dh], and what later rows need: mask bool[B, L], position, time [B, L]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    position: Tensor
    time: Tensor | None

    def bytes(self) -> int:
        """Size of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class BiasedBlock(nn.Module):
    """Pre-norm attention and feed-forward of one layer; the callers differ in what the queries may read."""

    def __init__(self, config: BiasedConfig):
        super().__init__()
        norm = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
        width, hidden = config.width, config.hidden or 4 * config.width
        self.heads = config.heads
        self.norm_attention, self.norm_ffn = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if config.ffn == "swiglu":
            self.ffn = SwiGLU(width, hidden)
        else:
            activation = nn.ReLU() if config.ffn == "relu" else nn.GELU()
            self.ffn = nn.Sequential(nn.Linear(width, hidden), activation, nn.Linear(hidden, width))
        self.bias = attention_bias(config.bias, config.heads, positions=config.positions, times=config.times)
        self.learns_bias = any(True for _ in self.bias.parameters())  # else all layers have the same
        self.rotary = Rotary(width // config.heads) if config.bias == "rotary" else None
        self.dropout = Dropout(config.dropout)
        own = config.attention_dropout is not None
        self.attention_dropout = Dropout(config.attention_dropout) if own else self.dropout

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, L, dh] of x [B, L, D]; rotated where the configuration says so."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary is not None:
            q, k = self.rotary.turn(q, position), self.rotary.turn(k, position)
        return q, k, v

    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        """Output projection, residual and feed-forward: x [B, L, D], read [B, H, L, dh]."""
        x = x + self.attention_dropout(self.out(read.transpose(1, 2).flatten(2).to(x.dtype)))
        return x + self.dropout(self.ffn(self.norm_ffn(x)))


class BiasedTransformer(nn.Module):
    """Stack of biased causal blocks, closed by a norm.

    x [B, L, D]; mask bool[B, L] (True = real event); position int[B, L], default 0..L-1 (only differences count for
    alibi, relative and rotary); time int[B, L] seconds, for relative tables; visible bool[B, L, L]: replaces the causal
    mask (True where a row may read a column), e.g. strictly smaller timestamps. A row always sees itself.
    """

    def __init__(self, config: BiasedConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(BiasedBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width) if config.norm == "layer" else nn.RMSNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor, *, position=None, time=None, visible=None) -> Tensor:
        return self.prefill(x, mask, position=position, time=time, visible=visible)[0]

    def prefill(
        self,
        x: Tensor,
        mask: Tensor,
        *,
        position: Tensor | None = None,
        time: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueCache]:
        """Hidden states [B, L, D] and the cache."""
        states, cache = self._layers(x, mask, position, time, visible)
        return self.norm(states), cache

    def cache(self, x: Tensor, mask: Tensor, *, position=None, time=None, visible=None) -> KeyValueCache:
        """The cache alone: the rows' own states in the last layer, which candidates never read, are not computed."""
        return self._layers(x, mask, position, time, visible, last=False)[1]

    def _layers(self, x: Tensor, mask: Tensor, position, time, visible, last: bool = True):
        batch, length, _ = x.shape
        if position is None:
            position = torch.arange(length, device=x.device).expand(batch, length)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(batch, -1, -1)
        itself = torch.eye(length, dtype=torch.bool, device=x.device)
        visible = (visible & mask.unsqueeze(1)) | itself
        keys, values, bias = [], [], None
        for index, block in enumerate(self.blocks):
            q, k, v = block.project(x, position)
            keys.append(k), values.append(v)
            if last or index < len(self.blocks) - 1:
                if index == 0 or block.learns_bias:
                    bias = block.bias(position, position, time, time)
                x = block.finish(x, _attend(q, k, v, visible, bias))
        return x, KeyValueCache(tuple(keys), tuple(values), mask, position, time)

    def extend(
        self,
        x: Tensor,
        cache: KeyValueCache,
        mask: Tensor | None = None,
        *,
        position: Tensor | None = None,
        time: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueCache]:
        """T later tokens x [B, T, D] of the cached sequences -> their states [B, T, D] and the longer cache.

        position: default follows the cache's last one. New tokens read the cached ones, earlier new ones and themselves.
        """
        batch, count, _ = x.shape
        known = cache.mask.shape[1]
        if mask is None:
            mask = cache.mask.new_ones(batch, count)
        if position is None:
            position = cache.position[:, -1:] + torch.arange(1, count + 1, device=x.device)
        all_mask, all_position = torch.cat([cache.mask, mask], 1), torch.cat([cache.position, position], 1)
        all_time = None if cache.time is None else torch.cat([cache.time, time], 1)
        recent = torch.ones(count, known + count, dtype=torch.bool, device=x.device).tril(known)
        itself = torch.zeros_like(recent)
        itself[:, known:] = torch.eye(count, dtype=torch.bool, device=x.device)
        visible = (recent & all_mask.unsqueeze(1)) | itself  # (B, T, known + T)
        keys, values = [], []
        for block, k_old, v_old in zip(self.blocks, cache.keys, cache.values, strict=True):
            q, k, v = block.project(x, position)
            k, v = torch.cat([k_old, k], dim=2), torch.cat([v_old, v], dim=2)
            x = block.finish(x, _attend(q, k, v, visible, block.bias(position, all_position, time, all_time)))
            keys.append(k), values.append(v)
        return self.norm(x), KeyValueCache(tuple(keys), tuple(values), all_mask, all_position, all_time)

    def candidates(
        self,
        x: Tensor,
        cache: KeyValueCache,
        request_of: Tensor,
        *,
        position: Tensor | None = None,
        time: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> Tensor:
        """One isolated row per pair: x [P, D] -> [P, D]; sequence b of the cache is request b.

        position int[P] (default: after the request's last token) and time int[P] of the candidates; pair_mask
        bool[P, L]: events the candidate may read, where it is fewer than the mask allows. K, V stay at batch B.
        """
        if position is None:
            position = cache.position[request_of, -1] + 1
        where = position.unsqueeze(1)  # (P, 1)
        when = None if time is None else time.unsqueeze(1)
        key_time = None if cache.time is None else cache.time[request_of]
        row, bias = x.unsqueeze(1), None  # (P, 1, D)
        for index, (block, k, v) in enumerate(zip(self.blocks, cache.keys, cache.values, strict=True)):
            q, own_k, own_v = block.project(row, where)
            if index == 0 or block.learns_bias:
                bias = block.bias(where, cache.position[request_of], when, key_time)  # (P, H, 1, L)
                own_bias = block.bias(where, where, when, when)  # (P, H, 1, 1)
                if own_bias is not None:
                    bias = bias - own_bias  # the softmax needs differences only
            read = request_attention(
                q,
                k,
                v,
                request_of,
                mask=cache.mask,
                pair_mask=pair_mask,
                pair_bias=None if bias is None else bias.squeeze(2),
                own=OwnKeys(own_k, own_v),
            )
            row = block.finish(row, read)
        return self.norm(row.squeeze(1))

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, rows: int, keys: int) -> int:
        """Forward matrix FLOPs of `rows` new rows that each read `keys` keys (prefill of L: rows = keys = L)."""
        width = self.config.width
        ffn = sum(p.numel() for p in self.blocks[0].ffn.parameters() if p.dim() == 2)
        return self.config.layers * rows * (8 * width * width + 2 * ffn + 4 * keys * width)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
    """[B, H, Q, dh] over [B, H, K, dh] where visible bool[B, Q, K]; bias [B, H, Q, K] or None."""
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1))
    masked = bias.to(q.dtype).masked_fill(~visible.unsqueeze(1), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=masked)
