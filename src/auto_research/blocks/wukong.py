"""Wukong-like layer over slots (arXiv:2403.02545): dot products through an MLP beside a linear compression.

Y = LN([MLP(strict upper triangle of X X^T / sqrt(d)); W X] + V X),   X [B, m, d] -> Y [B, 2 n, d]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.two_sided import SlotLinear, UpperPairs


class WukongLayer(nn.Module):
    """[B, slots, width] -> [B, 2 outputs, width]; `outputs` slots from the dot products and `outputs` from the compression."""

    def __init__(self, width: int, slots: int, outputs: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.outputs, self.width = outputs, width
        self.linear = SlotLinear(slots, 3 * outputs)  # compression and residual in one product
        self.dots = UpperPairs(slots)
        self.hidden, self.out = nn.Linear(self.dots.outputs, hidden), nn.Linear(hidden, outputs * width)
        self.norm, self.dropout = nn.LayerNorm(width), Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.dropout(F.silu(self.hidden(self.dots(x) * self.width**-0.5)))
        return close_layer(self.out(mixed), self.linear(x), self.norm)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, rows: int) -> int:
        matrices = self.hidden.weight.numel() + self.out.weight.numel()
        return self.linear.flops(rows, self.width) + self.dots.flops(rows, self.width) + 2 * rows * matrices


def close_layer(fm: Tensor, linear: Tensor, norm: nn.LayerNorm) -> Tensor:
    """[MLP output; compression] + residual, LayerNorm over d: fm [B, n d], linear [B, 3 n, d] -> [B, 2 n, d]."""
    outputs = linear.shape[1] // 3
    fm = fm.reshape(len(fm), outputs, -1)
    return norm(torch.cat([fm, linear[:, :outputs]], dim=1) + linear[:, outputs:])
