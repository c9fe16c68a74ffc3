"""What attention scores know about position and time: ALiBi, relative tables over position and log2 time, rotary, none.

A bias is a module called with positions and times of queries and keys, integers of shapes [..., Q] and [..., K]; it
returns a float bias [..., H, Q, K] (or None), added to the scores before the softmax. Rotary instead turns q and k.
A negative position is a prefix token (a user profile): it is at distance 0 from everything.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BIAS_KINDS = ("none", "alibi", "relative", "rotary")


def alibi_slopes(heads: int) -> Tensor:
    """m_k = 2^(-8 k / H), k = 1..H (arXiv:2108.12409; 1/4, 1/16, 1/64, 1/256 for H = 4)."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def log2_distance(one: Tensor, other: Tensor, buckets: int) -> Tensor:
    """min(buckets - 1, floor(log2(1 + |one - other|))) of whole seconds, as int64, exactly, on any device.

    By comparison with powers of two: Unix time does not fit float32, and MPS has no float64.
    """
    distance = (one - other).abs()
    edges = (2 ** torch.arange(1, buckets, device=distance.device)) - 1  # bucket b starts at 2^b - 1
    return torch.bucketize(distance, edges, right=True)


def position_distance(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """|q - k| of positions [..., Q] and [..., K], 0 where either is a prefix token; and where that is: [..., Q, K]."""
    query, key = query.unsqueeze(-1), key.unsqueeze(-2)
    prefix = (query < 0) | (key < 0)
    return (query - key).abs().masked_fill(prefix, 0), prefix


class NoBias(nn.Module):
    """No bias: the order is known only through the mask or through added embeddings."""

    def forward(self, query_position: Tensor, key_position: Tensor, query_time=None, key_time=None) -> None:
        return None


class Alibi(nn.Module):
    """-m_k * |pos_q - pos_k| per head; no parameters (GenRank, arXiv:2505.04180)."""

    def __init__(self, heads: int):
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, query_position: Tensor, key_position: Tensor, query_time=None, key_time=None) -> Tensor:
        distance, _ = position_distance(query_position, key_position)
        return -self.slopes[:, None, None] * distance.unsqueeze(-3).to(self.slopes.dtype)


class RelativeBias(nn.Module):
    """Learned tables per head: rab(|dpos|) + rab(log2 |dt|), as HSTU has them (arXiv:2402.17152).

    positions: distances told apart (larger ones share the last row); times: log2 buckets of whole seconds, 0 for no
    time table. Tables start at zero spread `std`. Times are needed when times > 0.
    """

    def __init__(self, heads: int, positions: int = 128, times: int = 32, std: float = 0.02):
        super().__init__()
        self.position = nn.Parameter(torch.randn(positions, heads) * std)
        self.time = nn.Parameter(torch.randn(times, heads) * std) if times else None

    def forward(
        self, query_position: Tensor, key_position: Tensor, query_time: Tensor | None = None, key_time=None
    ) -> Tensor:
        distance, prefix = position_distance(query_position, key_position)
        bias = self.position[distance.clamp(max=len(self.position) - 1)]  # (..., Q, K, H)
        if self.time is not None:
            if query_time is None or key_time is None:
                raise ValueError("a relative bias with a time table needs the times of queries and keys")
            gap = log2_distance(query_time.unsqueeze(-1), key_time.unsqueeze(-2), len(self.time))
            bias = bias + self.time[gap.masked_fill(prefix, 0)]
        return bias.movedim(-1, -3)


class Rotary(nn.Module):
    """Rotary positions (arXiv:2104.09864): pairs (x_i, x_{i + dh/2}) turned by position * base^(-2 i / dh).

    turn(x [..., H, L, dh], position int[..., L]) -> the same shape; q . k then depends on the distance only.
    """

    def __init__(self, head_width: int, base: float = 10_000.0):
        super().__init__()
        if head_width % 2:
            raise ValueError(f"rotary positions need an even head width, not {head_width}")
        frequency = base ** (-torch.arange(0, head_width, 2) / head_width)
        self.register_buffer("frequency", frequency, persistent=False)

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        angle = position.to(self.frequency.dtype).unsqueeze(-1) * self.frequency  # (..., L, dh / 2)
        cos, sin = angle.cos().unsqueeze(-3), angle.sin().unsqueeze(-3)
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attention_bias(kind: str, heads: int, *, positions: int = 128, times: int = 32) -> nn.Module:
    """The bias module of a kind; 'rotary' has no additive part and gives NoBias."""
    if kind not in BIAS_KINDS:
        raise ValueError(f"unknown attention bias {kind!r}; known: {', '.join(BIAS_KINDS)}")
    if kind == "alibi":
        return Alibi(heads)
    return RelativeBias(heads, positions, times) if kind == "relative" else NoBias()
