"""Dropout that draws one byte per element on CPU.

torch draws a float per element there, which costs more than the matrix products around it at width 64. Eight elements
share one 64-bit draw here, so that the rate is rounded to a multiple of 1/256; the kept elements are scaled by the exact
rate. Draws come from torch's global generator, so saved generator states cover them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 256


def byte_dropout(x: Tensor, rate: float) -> Tensor:
    """Zero each element with probability round(256 * rate) / 256 and scale the others; CPU tensors of any shape."""
    threshold = round(LEVELS * rate)
    count = x.numel()
    draws = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    kept = draws.view(torch.uint8)[:count].view(x.shape) >= threshold
    return x * (kept.to(x.dtype) * (LEVELS / (LEVELS - threshold)))


class Dropout(nn.Module):
    """Drop-in for nn.Dropout: byte draws on CPU, torch's own kernel elsewhere. 0 <= rate < 1."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"dropout rate {rate} is not in [0, 1)")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        return byte_dropout(x, self.rate) if x.device.type == "cpu" else F.dropout(x, self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
