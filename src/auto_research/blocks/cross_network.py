"""Cross network of DCN-V2 (arXiv:2008.13535, equation 1), full-rank:  x_{l+1} = x_0 * (W_l x_l + b_l) + x_l."""

from __future__ import annotations

from torch import Tensor, nn


class CrossNetwork(nn.Module):
    """`layers` cross layers on [..., width] -> [..., width]; layers * (width^2 + width) parameters.

    After l layers an output holds products of up to l + 1 input features.
    """

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = x  # x_0
        for layer in self.layers:
            x = first * layer(x) + x
        return x

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, rows: int) -> int:
        """Forward multiply-adds times two for `rows` inputs."""
        return sum(2 * rows * layer.in_features * layer.out_features for layer in self.layers)
