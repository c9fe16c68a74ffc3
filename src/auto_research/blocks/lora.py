"""Low-rank adaptation of linear layers (LoRA, arXiv:2106.09685), with what a second branch may change of the first.

    y = W x + b + (alpha / r) B A x,   A ~ N(0, 1 / r),   B = 0 at the start

    detach_base     W and b are read but not trained; the gradient still reaches x through W
    detach_output   sg(W x + b): neither W, b nor x get a gradient through the base, only through B A x

UniR2 (arXiv:2607.24439) lets a ranking branch read a generator's projections with `detach_output` and its output and
feed-forward layers with `detach_base`, so that ranking cannot move the generator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):
    """(alpha / r) B A x: [.., inputs] -> [.., outputs]; 0 until it was trained. alpha: default r, a scale of 1."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float | None = None):
        super().__init__()
        if rank < 1:
            raise ValueError(f"a low-rank update needs a rank of at least 1, not {rank}")
        self.scale = 1.0 if alpha is None else alpha / rank
        self.a = nn.Parameter(torch.randn(rank, inputs) * rank**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a), self.b) * self.scale


def detached_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """W x + b with gradient to x and none to W and b."""
    return F.linear(x, linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


class LoRALinear(nn.Module):
    """`linear` with a low-rank update. The layer may be shared: it stays one module with one weight.

    Parameters: linear; r: rank; alpha: scale of the update times r (default r); detach_base, detach_output: see above
    (detach_output includes detach_base).
    """

    def __init__(
        self,
        linear: nn.Linear,
        r: int,
        alpha: float | None = None,
        detach_base: bool = False,
        detach_output: bool = False,
    ):
        super().__init__()
        self.linear = linear
        self.update = LowRank(linear.in_features, linear.out_features, r, alpha)
        self.update.to(linear.weight.device)
        self.detach_base, self.detach_output = detach_base, detach_output

    def forward(self, x: Tensor) -> Tensor:
        if self.detach_output:
            with torch.no_grad():
                base = self.linear(x)
        elif self.detach_base:
            base = detached_linear(self.linear, x)
        else:
            base = self.linear(x)
        return base + self.update(x).to(base.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One plain layer with the same output: W + (alpha / r) B A."""
        made = nn.Linear(self.linear.in_features, self.linear.out_features, self.linear.bias is not None)
        made = made.to(self.linear.weight)
        made.weight.copy_(self.linear.weight + self.update.scale * self.update.b @ self.update.a)
        if self.linear.bias is not None:
            made.bias.copy_(self.linear.bias)
        return made
