"""HSTU: pointwise SiLU attention with relative bias and gating (arXiv:2402.17152, equations 1-3).

    U, V, Q, K = Split(SiLU(W x)),  A = SiLU(Q K^T + rab) / n,  y = W_o (LayerNorm(A V) * U) + x

No softmax: the sum of weights grows with the number of matching events, so n must not be the padded length. n is the
number of visible keys (SessionRec) or a constant of the configuration (the paper's maximum length).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.attention_bias import attention_bias
from auto_research.blocks.dropout import Dropout
from auto_research.runtime.precision import float32_region


@dataclass(frozen=True)
class HstuConfig:
    """Sizes of a stack. longest: the constant divisor n, or None for the number of visible keys.

    bias: none | alibi | relative, with `positions` rows and `times` log2 rows (0: no time table).
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    longest: int | None = None
    bias: str = "relative"
    positions: int = 128
    times: int = 32
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.bias == "rotary":
            raise ValueError("HSTU takes an additive bias, not rotary")


class HstuBlock(nn.Module):
    """One layer: x [B, L, D], visible bool[B, L, L], position and time int[B, L] -> [B, L, D]. SiLU attention is float32."""

    def __init__(self, config: HstuConfig):
        super().__init__()
        width = config.width
        self.heads, self.longest = config.heads, config.longest
        self.norm, self.norm_read = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.bias = attention_bias(config.bias, config.heads, positions=config.positions, times=config.times)
        self.dropout = Dropout(config.dropout)

    def weights(self, q: Tensor, k: Tensor, visible: Tensor, position: Tensor, time: Tensor | None) -> Tensor:
        """A [B, H, L, L]: SiLU(q k^T + rab) / n at visible keys, 0 elsewhere; q, k [B, H, L, dh]."""
        with float32_region(q.device):
            scores = q.float() @ k.float().transpose(2, 3)
            bias = self.bias(position, position, time, time)
            scores = scores if bias is None else scores + bias.float()
            count = visible.sum(2, keepdim=True).clamp(min=1) if self.longest is None else self.longest
            share = visible.float() / count  # (B, L, L)
            return F.silu(scores) * share.unsqueeze(1)

    def forward(self, x: Tensor, visible: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=2)
        q, k, v = (t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        read = self.weights(q, k, visible, position, time).to(v.dtype) @ v  # (B, H, L, dh)
        read = self.norm_read(read.transpose(1, 2).reshape(batch, length, width))
        return x + self.dropout(self.out(read * u))


class Hstu(nn.Module):
    """Stack of HSTU blocks. x [B, L, D], mask bool[B, L]; position default 0..L-1; time for time tables.

    visible bool[B, L, L] replaces the causal mask; padded keys are never read, a row always sees itself.
    """

    def __init__(self, config: HstuConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(HstuBlock(config) for _ in range(config.layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        *,
        position: Tensor | None = None,
        time: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        batch, length, _ = x.shape
        if position is None:
            position = torch.arange(length, device=x.device).expand(batch, length)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(batch, -1, -1)
        visible = (visible & mask.unsqueeze(1)) | torch.eye(length, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, visible, position, time)
        return x

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, batch: int, length: int) -> int:
        """Forward matrix FLOPs of `batch` sequences, all pairs of positions counted."""
        width = self.config.width
        return self.config.layers * batch * length * (10 * width * width + 4 * length * width)
