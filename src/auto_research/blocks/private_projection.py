"""Projections private to a token position, and the mixture of shared and private ones.

Token-major [T, P, D] is the layout of per-token layers; `PositionLinear` takes sequence-major [B, T, D] for layers that
sit beside attention. Sources: OneTrans (arXiv:2510.26104), MixFormer (arXiv:2602.14110), HyFormer (arXiv:2601.12681).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.per_token_ffn import private_linear


class PrivateLinear(nn.Module):
    """One Linear per token: [T, P, D] -> [T, P, K] with weight [T, D, K]."""

    def __init__(self, tokens: int, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight, offset = private_linear(tokens, inputs, outputs)
        self.bias = offset if bias else None  # (T, 1, K)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int) -> int:
        return 2 * pairs * self.weight.numel()


class PositionLinear(PrivateLinear):
    """The same over [..., T, D] -> [..., T, K]: y_i = x_i W_i + b_i."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...td,tdk->...tk", x, self.weight)
        return y if self.bias is None else y + self.bias.squeeze(1)


class MixedLinear(nn.Module):
    """OneTrans' rule: one weight for all sequence tokens, a private one for each of the last `private` positions.

    `sequence(x [..., L, D])` and `private(x [..., T, D])` are the two halves, as caching needs them; forward takes the
    whole list [..., L + T, D] -> [..., L + T, K].
    """

    def __init__(self, private: int, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.sequence = nn.Linear(inputs, outputs, bias=bias)
        self.private = PositionLinear(private, inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        cut = x.shape[-2] - len(self.private.weight)
        return torch.cat([self.sequence(x[..., :cut, :]), self.private(x[..., cut:, :])], dim=-2)

    @torch.no_grad()
    def share(self) -> None:
        """Copy the sequence weight to every private position (the shared-parameter arm, as a check)."""
        self.private.weight.copy_(self.sequence.weight.t().expand_as(self.private.weight))
        if self.private.bias is not None:
            self.private.bias.copy_(self.sequence.bias.expand_as(self.private.bias))

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, sequence: int, pairs: int) -> int:
        """Forward matrix FLOPs of `sequence` shared rows and `pairs` sets of private rows."""
        return 2 * sequence * self.sequence.weight.numel() + self.private.flops(pairs)


class SharedLinear(nn.Module):
    """Ablation of MixedLinear under the same calls: the sequence weight serves every position."""

    def __init__(self, private: int, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.sequence = nn.Linear(inputs, outputs, bias=bias)
        self.positions = private

    def private(self, x: Tensor) -> Tensor:
        return self.sequence(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequence(x)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, sequence: int, pairs: int) -> int:
        return 2 * (sequence + pairs * self.positions) * self.sequence.weight.numel()


class PrivateOnlyLinear(nn.Module):
    """MixedLinear of a layer that emits no sequence token: it has no sequence weight, so none is idle."""

    def __init__(self, private: int, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.private = PositionLinear(private, inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.private(x)

    def params(self) -> int:
        return self.private.params()

    def flops(self, sequence: int, pairs: int) -> int:
        return self.private.flops(pairs)


class MixedFFN(nn.Module):
    """Two-layer GELU FFN under the same sharing rule; `sequence`, `private` and forward as in MixedLinear.

    linear: MixedLinear, or SharedLinear, or PrivateOnlyLinear.
    """

    def __init__(
        self, private: int, width: int, hidden: int, dropout: float = 0.0, linear: type[nn.Module] = MixedLinear
    ):
        super().__init__()
        self.up, self.down = linear(private, width, hidden), linear(private, hidden, width)
        self.dropout = Dropout(dropout)

    def sequence(self, x: Tensor) -> Tensor:
        return self.dropout(self.down.sequence(F.gelu(self.up.sequence(x))))

    def private(self, x: Tensor) -> Tensor:
        return self.dropout(self.down.private(F.gelu(self.up.private(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))

    def params(self) -> int:
        return self.up.params() + self.down.params()

    def flops(self, sequence: int, pairs: int) -> int:
        return self.up.flops(sequence, pairs) + self.down.flops(sequence, pairs)


class SwiGLU(nn.Module):
    """W_3 (SiLU(W_1 z) * W_2 z) over [..., D], hidden width given."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.dropout(self.down(F.silu(gate) * value))

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, rows: int) -> int:
        return 6 * rows * self.down.in_features * self.down.out_features


class PrivateSwiGLU(nn.Module):
    """SwiGLU with private weights per token over [T, P, D]; unlike PerTokenSwiGLU the hidden width is given."""

    def __init__(self, tokens: int, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.up, self.down = PrivateLinear(tokens, width, 2 * hidden), PrivateLinear(tokens, hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=2)  # each (T, P, hidden)
        return self.dropout(self.down(F.silu(gate) * value))

    def params(self) -> int:
        return self.up.params() + self.down.params()

    def flops(self, pairs: int) -> int:
        return self.up.flops(pairs) + self.down.flops(pairs)


class GroupTokenizer(nn.Module):
    """Field groups of different widths -> one token each: F_m = W_m f_m + b_m, [P, w_m] each -> [M, P, D]."""

    def __init__(self, widths: Sequence[int], width: int):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(w, width) for w in widths)

    def forward(self, *groups: Tensor) -> Tensor:
        return torch.stack([layer(group) for layer, group in zip(self.projections, groups, strict=True)])

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int) -> int:
        return 2 * pairs * sum(layer.weight.numel() for layer in self.projections)


class PieceTokenizer(nn.Module):
    """Concatenated fields cut into T equal pieces, zero-padded at the end, each with its own Linear: [P, W] -> [T, P, D]."""

    def __init__(self, inputs: int, tokens: int, width: int):
        super().__init__()
        self.tokens, self.piece = tokens, -(-inputs // tokens)
        self.missing = self.piece * tokens - inputs
        self.project = PrivateLinear(tokens, self.piece, width)

    def forward(self, x: Tensor) -> Tensor:
        pieces = F.pad(x, (0, self.missing)).reshape(len(x), self.tokens, self.piece)
        return self.project(pieces.transpose(0, 1).contiguous())

    def params(self) -> int:
        return self.project.params()

    def flops(self, pairs: int) -> int:
        return self.project.flops(pairs)
