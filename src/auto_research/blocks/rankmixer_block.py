"""A RankMixer block (arXiv:2507.15551) of any hidden width, as the interaction half of late-fusion baselines.

S = LayerNorm(X + Mix(X)),   X' = LayerNorm(S + PFFN(S))          X [T, P, D], token-major
"""

from __future__ import annotations

from torch import Tensor, nn

from auto_research.blocks.per_token_ffn import PerTokenFFN
from auto_research.blocks.token_mixing import HeadShuffle


class RankMixerBlock(nn.Module):
    """Head shuffle and per-token FFN, each with a residual and a LayerNorm behind it: [T, P, D] -> [T, P, D]."""

    def __init__(self, tokens: int, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.mix = HeadShuffle(tokens, width)
        self.ffn = PerTokenFFN(tokens, width, dropout=dropout, hidden=hidden)
        self.mix_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        s = self.mix_norm(x + self.mix(x))
        return self.ffn_norm(s + self.ffn(s))

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int) -> int:
        return self.ffn.flops(pairs)


def matched_width(target: int, build, low: int = 8, high: int = 4096) -> int:
    """The hidden width h in [low, high] for which `build(h).params()`, affine in h, comes closest to `target`.

    Raises ValueError when even `low` is more than 5% above the target.
    """
    first, second = build(low).params(), build(low + 8).params()
    width = low + round(8 * (target - first) / (second - first))
    if width < low and first > 1.05 * target:
        raise ValueError(f"a hidden width of {low} already holds {first} parameters, not {target}")
    return min(max(width, low), high)
