"""Cross network of DCN-V2 (arXiv:2008.13535):  x_{l+1} = x_0 * (W_l x_l + b_l) + x_l  (equation 1), W_l = U_l V_l^T of
rank r in the low-rank form (equation 3)."""

from __future__ import annotations

from torch import Tensor, nn


class CrossNetwork(nn.Module):
    """`layers` cross layers on [..., width] -> [..., width].

    rank None: layers * (width^2 + width) parameters; rank r: layers * (2 r width + width). After l layers an output holds
    products of up to l + 1 input features.
    """

    def __init__(self, width: int, layers: int = 3, rank: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_cross_linear(width, rank) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = x  # x_0
        for layer in self.layers:
            x = first * layer(x) + x
        return x

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, rows: int) -> int:
        """Forward multiply-adds times two for `rows` inputs."""
        matrices = [p for p in self.parameters() if p.dim() == 2]
        return sum(2 * rows * matrix.numel() for matrix in matrices)


def _cross_linear(width: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
