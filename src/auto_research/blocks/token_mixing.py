"""Token mixers over token-major tensors [T, P, D]: T tokens, P pairs, width D.

Token-major is the layout of every per-token layer here: private weights are one batched product over T, and the
head shuffle is the only copy in a block. (Papers write [B, T, D]; transpose(0, 1) takes one to the other.)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.runtime.precision import float32_region

SINKHORN_STEPS = 10
TAU_START, TAU_END = 1.0, 0.05
PERMUTATION_STRENGTH = 3.0


class HeadShuffle(nn.Module):
    """RankMixer's parameter-free mixing (arXiv:2507.15551, section 3.2): s_h = Concat_t(x_t^h), H = T.

    Output token h is the concatenation over t of head h of token t. [T, P, D] -> [T, P, D].
    """

    def __init__(self, tokens: int, width: int, heads: int | None = None):
        super().__init__()
        if width % tokens or heads not in (None, tokens):
            raise ValueError(f"the head shuffle needs heads = tokens and width {width} divisible by {tokens}")

    def forward(self, x: Tensor) -> Tensor:
        tokens, pairs, width = x.shape
        heads = x.reshape(tokens, pairs, tokens, width // tokens)  # (T, P, H, D/H)
        return heads.permute(2, 1, 0, 3).reshape(tokens, pairs, width)  # (H, P, T D/H)

    def params(self) -> int:
        return 0

    def flops(self, pairs: int) -> int:
        return 0


class Identity(nn.Module):
    """No mixing (ablation): with the residual S = LayerNorm(2 X)."""

    def __init__(self, tokens: int, width: int, heads: int | None = None):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def params(self) -> int:
        return 0

    def flops(self, pairs: int) -> int:
        return 0


class TokenAttention(nn.Module):
    """Ablation: 4-head self-attention over the T tokens of every pair."""

    def __init__(self, tokens: int, width: int, heads: int | None = None):
        super().__init__()
        self.tokens, self.width = tokens, width
        self.heads = math.gcd(4, width) if heads is None else heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens, pairs, width = x.shape
        qkv = self.qkv(x).reshape(tokens, pairs, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)  # each (P, heads, T, D/heads)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.permute(2, 0, 1, 3).reshape(tokens, pairs, width))

    def params(self) -> int:
        return 4 * self.width**2 + 4 * self.width

    def flops(self, pairs: int) -> int:
        return pairs * (8 * self.tokens * self.width**2 + 4 * self.tokens**2 * self.width)


def shuffle_permutation(tokens: int, heads: int) -> Tensor:
    """The head shuffle as a matrix P [n, n] over the n = T H sub-vectors in token order: block (t, h) goes to (h, t).

    y = P z with z the blocks of the input; y read in order and cut into tokens is the shuffled input. Symmetric for
    H = T only.
    """
    n = tokens * heads
    target = torch.arange(n)
    source = (target % tokens) * heads + target // tokens  # row h T + t of y reads block t H + h of z
    return torch.zeros(n, n).index_put((target, source), torch.ones(n))


def sinkhorn(logits: Tensor, steps: int = SINKHORN_STEPS) -> Tensor:
    """Doubly stochastic matrix exp(u_i + logits_ij + v_j) by `steps` log-domain row and column normalisations."""
    with float32_region(logits.device):
        logits = logits.float()
        for _ in range(steps):
            logits = logits - torch.logsumexp(logits, dim=1, keepdim=True)
            logits = logits - torch.logsumexp(logits, dim=0, keepdim=True)
        return logits.exp()


class UniMixer(nn.Module):
    """The shuffle made learnable (arXiv:2604.00590): y = unflatten(G [z_1 V_1; ..; z_n V_n]).

    n = T H blocks of width b = D / H; V_j [b, b] starts at the identity; G = Sinkhorn(exp((Theta + Theta^T) / (2 tau)))
    for H = T, Sinkhorn(exp(Theta / tau)) otherwise (there the target permutation is not symmetric). Theta starts at 3
    times the shuffle permutation; tau goes from 1.0 to 0.05, geometrically, over training.
    """

    def __init__(self, tokens: int, width: int, heads: int | None = None):
        super().__init__()
        heads = tokens if heads is None else heads
        if width % heads:
            raise ValueError(f"unimixer needs width {width} divisible by heads {heads}")
        self.tokens, self.width, self.heads = tokens, width, heads
        n, b = tokens * heads, width // heads
        self.theta = nn.Parameter(PERMUTATION_STRENGTH * shuffle_permutation(tokens, heads))
        self.local = nn.Parameter(torch.eye(b).repeat(n, 1, 1))
        self.register_buffer("tau", torch.tensor(TAU_START))

    @property
    def symmetric(self) -> bool:
        return self.heads == self.tokens

    def mixing_matrix(self) -> Tensor:
        """G [n, n]."""
        theta = (self.theta + self.theta.t()) / 2 if self.symmetric else self.theta
        return sinkhorn(theta / self.tau)

    def forward(self, x: Tensor) -> Tensor:
        tokens, pairs, width = x.shape
        n, b = tokens * self.heads, width // self.heads
        blocks = x.reshape(tokens, pairs, self.heads, b).transpose(1, 2).reshape(n, pairs, b)
        blocks = torch.bmm(blocks, self.local)  # (n, P, b)
        mixed = self.mixing_matrix().to(blocks.dtype) @ blocks.reshape(n, pairs * b)
        return mixed.reshape(tokens, self.heads, pairs, b).transpose(1, 2).reshape(tokens, pairs, width)

    @torch.no_grad()
    def anneal(self, step: int, total: int) -> None:
        """tau after `step` of `total` steps."""
        self.tau.fill_(TAU_START * (TAU_END / TAU_START) ** min(1.0, step / max(1, total)))

    def row_error(self) -> float:
        """Largest deviation of a row or column sum of G from 1 (10 iterations leave some at low tau)."""
        with torch.no_grad():
            g = self.mixing_matrix()
            return float(torch.cat([g.sum(0) - 1, g.sum(1) - 1]).abs().max())

    def params(self) -> int:
        n, b = self.tokens * self.heads, self.width // self.heads
        return n * n + n * b * b

    def flops(self, pairs: int) -> int:
        n, b = self.tokens * self.heads, self.width // self.heads
        return 2 * pairs * (n * b * b + n * n * b)


TOKEN_MIXERS = {"rankmixer": HeadShuffle, "unimixer": UniMixer, "attention": TokenAttention, "identity": Identity}
