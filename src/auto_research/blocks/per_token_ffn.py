"""Feed-forward layers over token-major tensors [T, P, D] (arXiv:2507.15551, section 3.3).

    v_t = W_{t,2} GELU(W_{t,1} s_t + b_{t,1}) + b_{t,2}

Private weights are one Parameter [T, D, kD], so a layer is two batched products and no Python loop.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout


def private_linear(tokens: int, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight [T, inputs, outputs] and bias [T, 1, outputs], each token started like nn.Linear."""
    bound = inputs**-0.5
    weight = torch.empty(tokens, inputs, outputs).uniform_(-bound, bound)
    bias = torch.empty(tokens, 1, outputs).uniform_(-bound, bound)
    return nn.Parameter(weight), nn.Parameter(bias)


def swiglu_width(width: int) -> int:
    """8 D / 3 rounded to a multiple of 8: a SwiGLU of this width is as large as a two-layer FFN with k = 4."""
    return max(8, 8 * round(width / 3))


class PerTokenFFN(nn.Module):
    """One two-layer MLP per token, D -> kD -> D with GELU; `hidden` instead of kD where it is given."""

    def __init__(self, tokens: int, width: int, expansion: int = 4, dropout: float = 0.0, *, hidden: int | None = None):
        super().__init__()
        self.tokens, self.width, self.hidden = tokens, width, hidden or expansion * width
        self.w1, self.b1 = private_linear(tokens, width, self.hidden)
        self.w2, self.b2 = private_linear(tokens, self.hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.baddbmm(self.b1, x, self.w1))  # (T, P, kD)
        return self.dropout(torch.baddbmm(self.b2, h, self.w2))

    def params(self) -> int:
        return self.tokens * (2 * self.width * self.hidden + self.hidden + self.width)

    def flops(self, pairs: int) -> int:
        return 4 * pairs * self.tokens * self.width * self.hidden


class SharedFFN(nn.Module):
    """Ablation: one FFN for all tokens, same width; `wide` widens the hidden layer to T k D to match parameters."""

    def __init__(self, tokens: int, width: int, expansion: int = 4, dropout: float = 0.0, wide: bool = False):
        super().__init__()
        self.tokens, self.width = tokens, width
        self.hidden = expansion * width * (tokens if wide else 1)
        self.first = nn.Linear(width, self.hidden)
        self.second = nn.Linear(self.hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.second(F.gelu(self.first(x))))

    def params(self) -> int:
        return 2 * self.width * self.hidden + self.hidden + self.width

    def flops(self, pairs: int) -> int:
        return 4 * pairs * self.tokens * self.width * self.hidden


class PerTokenSwiGLU(nn.Module):
    """W_3 (SiLU(W_1 s) * W_2 s) with private weights per token and hidden width 8 D / 3."""

    def __init__(self, tokens: int, width: int, expansion: int = 4, dropout: float = 0.0):
        super().__init__()
        self.tokens, self.width, self.hidden = tokens, width, swiglu_width(width)
        self.w12, self.b12 = private_linear(tokens, width, 2 * self.hidden)
        self.w3, self.b3 = private_linear(tokens, self.hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = torch.baddbmm(self.b12, x, self.w12).chunk(2, dim=2)  # each (T, P, hidden)
        return self.dropout(torch.baddbmm(self.b3, F.silu(gate) * value, self.w3))

    def params(self) -> int:
        return self.tokens * (3 * self.width * self.hidden + 2 * self.hidden + self.width)

    def flops(self, pairs: int) -> int:
        return 6 * pairs * self.tokens * self.width * self.hidden
