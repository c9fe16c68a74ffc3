"""HSTU: pointwise SiLU attention with relative bias and gating (arXiv:2402.17152, equations 1-3).

    U, V, Q, K = Split(SiLU(W x)),  A = SiLU(Q K^T + rab) / n,  y = W_o (LayerNorm(A V) * U) + x

No softmax: the sum of weights grows with the number of matching events, so n must not be the padded length. n is the
number of visible keys (SessionRec) or a constant of the configuration (the paper's maximum length).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.attention_bias import attention_bias
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_groups import Group, collect, request_groups, spread
from auto_research.runtime.precision import float32_region


@dataclass(frozen=True)
class HstuConfig:
    """Sizes of a stack. longest: the constant divisor n, or None for the number of visible keys.

    bias: none | alibi | relative, with `positions` rows and `times` log2 rows (0: no time table).
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    longest: int | None = None
    bias: str = "relative"
    positions: int = 128
    times: int = 32
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.bias == "rotary":
            raise ValueError("HSTU takes an additive bias, not rotary")


class CandidatePlaces(NamedTuple):
    """mask bool[R, L], position and time int[R, L] of the events; position and time int[R, 1] of the candidates."""

    mask: Tensor
    position: Tensor
    time: Tensor | None
    end: Tensor
    now: Tensor | None


class HstuBlock(nn.Module):
    """One layer: x [B, L, D], visible bool[B, L, L], position and time int[B, L] -> [B, L, D]. SiLU attention is float32."""

    def __init__(self, config: HstuConfig):
        super().__init__()
        width = config.width
        self.heads, self.longest = config.heads, config.longest
        self.norm, self.norm_read = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.bias = attention_bias(config.bias, config.heads, positions=config.positions, times=config.times)
        self.dropout = Dropout(config.dropout)

    def weights(self, q: Tensor, k: Tensor, visible: Tensor, position: Tensor, time: Tensor | None) -> Tensor:
        """A [B, H, L, L]: SiLU(q k^T + rab) / n at visible keys, 0 elsewhere; q, k [B, H, L, dh]."""
        with float32_region(q.device):
            scores = q.float() @ k.float().transpose(2, 3)
            bias = self.bias(position, position, time, time)
            scores = scores if bias is None else scores + bias.float()
            count = visible.sum(2, keepdim=True).clamp(min=1) if self.longest is None else self.longest
            share = visible.float() / count  # (B, L, L)
            return F.silu(scores) * share.unsqueeze(1)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u [B, L, D] and q, k, v [B, H, L, dh] of x [B, L, D]."""
        batch, length, _ = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=2)
        q, k, v = (t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        return u, q, k, v

    def finish(self, x: Tensor, u: Tensor, read: Tensor) -> Tensor:
        """Norm, gate, output and residual: x, u [B, L, D], read [B, H, L, dh]."""
        return x + self.dropout(self.out(self.norm_read(read.transpose(1, 2).flatten(2)) * u))

    def forward(self, x: Tensor, visible: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        u, q, k, v = self.project(x)
        read = self.weights(q, k, visible, position, time).to(v.dtype) @ v  # (B, H, L, dh)
        return self.finish(x, u, read)

    def candidate(
        self, x: Tensor, k: Tensor, v: Tensor, places: CandidatePlaces, request_of: Tensor, groups: list[Group]
    ) -> Tensor:
        """One appended row per pair, which reads its request's keys and itself: x [P, D]; k, v [R, H, L, dh] -> [P, D]."""
        u, q, own_k, own_v = self.project(x.unsqueeze(1))
        mask, position, time, end, now = places
        with float32_region(q.device):
            bias, own_bias = (
                self.bias(end, position, now, time),
                self.bias(end, end, now, now),
            )  # (R, H, 1, L), (R, H, 1, 1)
            count = mask.sum(1) + 1 if self.longest is None else torch.full_like(mask.sum(1), self.longest)
            q, k, v = q.float(), k.float(), v.float()
            own = (q * own_k.float()).sum(3, keepdim=True)  # (P, H, 1, 1)
            own = own if own_bias is None else own + own_bias.float()[request_of]
            read = F.silu(own) / count[request_of, None, None, None] * own_v.float()  # (P, H, 1, dh)
            share = mask.float() / count.unsqueeze(1)  # (R, L)
            past = torch.zeros_like(read)
            for group in groups:
                grid = spread(q[group.pairs].squeeze(2), group).transpose(1, 2)  # (r, H, J, dh)
                scores = grid @ k[group.rows].transpose(2, 3)
                scores = scores if bias is None else scores + bias[group.rows].float()
                part = (F.silu(scores) * share[group.rows, None, None]) @ v[group.rows]  # (r, H, J, dh)
                past = past.index_copy(0, group.pairs, collect(part.transpose(1, 2), group).unsqueeze(2))
        return self.finish(x.unsqueeze(1), u, (past + read).to(x.dtype)).squeeze(1)


class Hstu(nn.Module):
    """Stack of HSTU blocks. x [B, L, D], mask bool[B, L]; position default 0..L-1; time for time tables.

    visible bool[B, L, L] replaces the causal mask; padded keys are never read, a row always sees itself.
    """

    def __init__(self, config: HstuConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(HstuBlock(config) for _ in range(config.layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        *,
        position: Tensor | None = None,
        time: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        return self._layers(x, mask, position, time, visible)[0]

    def cache(self, x: Tensor, mask: Tensor, *, position=None, time=None) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, H, L, dh] of every layer; the last layer's own states, which nobody reads, are left out."""
        return self._layers(x, mask, position, time, None, last=False)[1]

    def candidates(
        self,
        x: Tensor,
        cache: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        request_of: Tensor,
        *,
        time: Tensor | None = None,
        now: Tensor | None = None,
    ) -> Tensor:
        """Rows appended behind the sequence, one per pair, isolated from each other: x [P, D] -> [P, D].

        cache and mask of R requests; time int[R, L] of the events and now int[R] of the candidates for time tables.
        Equal to a forward of each pair's own sequence with the candidate at its end.
        """
        requests, length = mask.shape
        position = torch.arange(length, device=x.device).expand(requests, length)
        places = CandidatePlaces(
            mask, position, time, torch.full_like(position[:, :1], length), None if now is None else now.unsqueeze(1)
        )
        groups = request_groups(request_of, requests)
        for block, (k, v) in zip(self.blocks, cache, strict=True):
            x = block.candidate(x, k, v, places, request_of, groups)
        return x

    def _layers(self, x: Tensor, mask: Tensor, position, time, visible, last: bool = True):
        batch, length, _ = x.shape
        if position is None:
            position = torch.arange(length, device=x.device).expand(batch, length)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(batch, -1, -1)
        visible = (visible & mask.unsqueeze(1)) | torch.eye(length, dtype=torch.bool, device=x.device)
        cache = []
        for index, block in enumerate(self.blocks):
            u, q, k, v = block.project(x)
            cache.append((k, v))
            if last or index < len(self.blocks) - 1:
                x = block.finish(x, u, block.weights(q, k, visible, position, time).to(v.dtype) @ v)
        return x, cache

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, batch: int, length: int) -> int:
        """Forward matrix FLOPs of `batch` sequences, all pairs of positions counted."""
        width = self.config.width
        return self.config.layers * batch * length * (10 * width * width + 4 * length * width)
