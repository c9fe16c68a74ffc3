"""Keys and values that a request shares between its branches, those that each branch owns, and attention to both.

A branch is a beam, a candidate or a training target of a request. What the request gives (a memory or a prompt) is never
copied per branch: its queries are folded into one matrix product per request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.biased_transformer import BiasedBlock, BiasedConfig, KeyValueCache
from auto_research.runtime.precision import float32_region


class OwnCache(NamedTuple):
    """Keys and values [B, w, H, t, dh] of every layer for the t tokens that the branches hold so far."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        return self.keys[0].shape[3]

    def reorder(self, parent: Tensor) -> OwnCache:
        """Branch c continues branch parent[b, c]; int64 [B, c]."""
        batch, width = self.keys[0].shape[:2]
        row = (torch.arange(batch, device=parent.device).unsqueeze(1) * width + parent).flatten()

        def moved(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, row).unflatten(0, (batch, -1)).contiguous()

        return OwnCache(tuple(map(moved, self.keys)), tuple(map(moved, self.values)))

    def bytes(self) -> int:
        """Size of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class Memory(NamedTuple):
    """Encoder states [B, S, D], mask bool[B, S], and their keys and values [B, H, S, dh] for every decoder layer."""

    states: Tensor
    mask: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class Prompt(NamedTuple):
    """A read prompt: keys and values of every layer, its last state [B, D], and the branches' own cache."""

    shared: KeyValueCache
    last: Tensor
    own: OwnCache | None = None

    @property
    def mask(self) -> Tensor:
        return self.shared.mask


class CrossBlock(BiasedBlock):
    """Decoder layer: self-attention, attention to a memory, feed-forward; `ffn` may be replaced (mixture of experts)."""

    def __init__(self, config: BiasedConfig):
        super().__init__(config)
        self.norm_cross = nn.LayerNorm(config.width) if config.norm == "layer" else nn.RMSNorm(config.width)
        self.query, self.cross_out = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width)
        self.memory = nn.Linear(config.width, 2 * config.width)

    def remember(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, dh] of memory states [B, S, D]."""
        k, v = self.memory(states).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k.contiguous(), v.contiguous()  # read once per beam step

    def read(self, x: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """x [B, w, T, D] after reading keys and values [B, H, S, dh] where visible bool [B, 1 or w, S]."""
        batch, width, length, _ = x.shape
        q = self.query(self.norm_cross(x)).reshape(batch, width * length, self.heads, -1).transpose(1, 2)
        some = visible.any(-1, keepdim=True)
        if width > 1 and visible.shape[1] > 1:
            visible, some = (m.repeat_interleave(length, dim=1) for m in (visible, some))
        mask = (visible | ~some).unsqueeze(1)  # (B, 1, 1 or w * T, S); a query without any key reads 0
        seen = F.scaled_dot_product_attention(q.contiguous(), k, v, attn_mask=mask).transpose(1, 2).flatten(2) * some
        return x + self.dropout(self.cross_out(seen.to(x.dtype)).view_as(x))


def branch_attention(
    block: BiasedBlock, q: Tensor, k: Tensor, v: Tensor, shared: KeyValueCache, layer: int, readable: Tensor,
    position: Tensor,
) -> Tensor:  # fmt: skip
    """Attention of branches to the prompt, kept once per request, and to themselves, in one softmax.

    q [B * w, H, T, dh]; own k, v [B * w, H, t, dh]; readable bool [B, 1 or w, P]; position int64 [B * w, t].
    """
    rows, _, length, _ = q.shape
    batch, own = len(shared.mask), k.shape[2]
    width = rows // batch

    def fold(x: Tensor) -> Tensor:  # (B * w, H, T, n) -> (B, H, w * T, n)
        return x.unflatten(0, (batch, width)).transpose(1, 2).flatten(2, 3)

    def unfold(x: Tensor) -> Tensor:  # and back
        return x.unflatten(2, (width, length)).transpose(1, 2).flatten(0, 1)

    at = position[:, own - length :]
    with float32_region(q.device):
        q = q.float() * q.shape[3] ** -0.5
        scores = fold(q) @ shared.keys[layer].float().transpose(2, 3)  # (B, H, w * T, P)
        inside = q @ k.float().transpose(2, 3)  # (B * w, H, T, t)
        bias, own_bias = block.bias(at.reshape(batch, -1), shared.position), block.bias(at, position)
        if bias is not None:
            scores, inside = scores + bias, inside + own_bias
        visible = readable if readable.shape[1] == 1 else readable.repeat_interleave(length, dim=1)
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        causal = torch.ones(length, own, dtype=torch.bool, device=q.device).tril(own - length)
        weights = torch.cat([scores, fold(inside.masked_fill(~causal, -torch.inf))], dim=3).softmax(-1)
        prompt = weights.shape[3] - own
        read = unfold(weights[..., :prompt] @ shared.values[layer].float())
        return read + unfold(weights[..., prompt:].contiguous()) @ v.float()
