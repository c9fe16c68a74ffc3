"""Layers of ROCS (arXiv:2607.27744): request slots at R rows, candidate slots at P rows, joined by request_of [P].

    H^n  = H^{n-1} + MHSA(RMSNorm H^{n-1}) + FFN                                        events, R rows
    Q_r  = MLP(W_rr X_r),   Q_c = MLP((W_cr X_r)[r] + W_cc X_c)       deep cross attention, MLP behind an RMSNorm
    X_r <- [X_r; Attn(Q_r, H^n)],   X_c <- [X_c; Attn(Q_c, H^n[r])]
    Y_r  = LN([MLP(fm_r); W_rr X_r] + V_rr X_r)                                         masked Wukong layer
    Y_c  = LN([MLP_c(fm_r[r], fm_c); (W_cr X_r)[r] + W_cc X_c] + (V_cr X_r)[r] + V_cc X_c)
    MLP_c hidden = SiLU((U_r fm_r)[r] + U_c fm_c)

Every product is a request part at R rows, a candidate part at P rows and a gather-add; `request` returns what `pairs` needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.biased_transformer import BiasedBlock, BiasedConfig
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_attention import RequestCrossAttention, RequestKeys
from auto_research.blocks.request_groups import Group
from auto_research.blocks.two_sided import BroadcastLinear, MaskedSlotLinear, UpperPairs, cross_pairs
from auto_research.blocks.wukong import close_layer
from auto_research.runtime.precision import float32_region


@dataclass(frozen=True)
class ROCSConfig:
    """Sizes. width d; queries a per side and layer; request_outputs, pair_outputs: n_l of each half of a layer.

    attention: dca | mean (ablation: the mean of H^0 as one more request slot).
    request_head: False drops the request term of the head (ablation).
    """

    width: int = 32
    layers: int = 3
    queries: int = 2
    request_outputs: int = 4
    pair_outputs: int = 4
    fm_hidden: int = 128
    head_hidden: int = 64
    heads: int = 4
    expansion: int = 4
    history: int = 50
    field: int = 16
    attention: str = "dca"
    request_head: bool = True
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.attention not in ("dca", "mean"):
            raise ValueError(f"attention must be 'dca' or 'mean', not {self.attention!r}")
        if self.layers < 1:
            raise ValueError("ROCS needs at least one layer")

    @property
    def added(self) -> int:
        """Slots that attention appends to a side in every layer."""
        return self.queries if self.attention == "dca" else 0


def query_mlp(width: int) -> nn.Module:
    """[..., d] -> [..., d]; normalised, because the slots that queries are made of start small."""
    return nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))


def all_events(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention q [R, H, Q, dh] over k, v [R, H, L, dh] where mask bool[R, L]; float32; some event is visible.

    Written out, because PyTorch's FLOP counts leave its fused CPU kernel out.
    """
    heads = q.shape[1]
    with float32_region(q.device):
        hidden = q.new_zeros(mask.shape, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
        hidden = hidden.repeat_interleave(heads, dim=0).unsqueeze(1)  # (R H, 1, L)
        query, key, value = (x.float().flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=q.shape[3] ** -0.5)
        read = torch.bmm(torch.softmax(scores, dim=2), value)
    return read.unflatten(0, (len(q), heads)).to(v.dtype)


class EventReader(nn.Module):
    """One step of the event sequence, and the reading of it by request and candidate queries.

    `advance(H [R, L, d], mask) -> (H^n, keys)` once per request; keys and values stay at R rows.
    """

    def __init__(self, config: ROCSConfig):
        super().__init__()
        d = config.width
        sizes = BiasedConfig(
            d, config.heads, 1, config.expansion * d, norm="rms", dropout=config.dropout, attention_dropout=0.0
        )
        self.block = BiasedBlock(sizes)
        self.norm = nn.RMSNorm(d)
        self.read = RequestCrossAttention(d, heads=config.heads)
        self.request_mlp, self.pair_mlp = query_mlp(d), query_mlp(d)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # PyTorch's biases are many times as large as the events at the start
                nn.init.zeros_(module.bias)

    def advance(self, events: Tensor, mask: Tensor) -> tuple[Tensor, RequestKeys]:
        q, k, v = self.block.project(events, None)
        read = all_events(q, k, v, mask)
        events = self.block.finish(events, read)
        return events, self.read.keys_values(self.norm(events), mask)

    def of_request(self, queries: Tensor, keys: RequestKeys) -> Tensor:
        """A_r [R, a, d]."""
        q = self.read.q(self.request_mlp(queries)).unflatten(2, (self.read.heads, -1)).transpose(1, 2)
        return self.read.out(all_events(q, *keys).transpose(1, 2).flatten(2).to(queries.dtype))

    def of_pairs(self, queries: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group] | None) -> Tensor:
        """A_c [P, a, d]."""
        return self.read.attend(self.pair_mlp(queries), keys, request_of, groups)

    def flops(self, length: int, queries: int) -> tuple[int, int]:
        """Matrix FLOPs (per request, per candidate) for `length` events, the null event included."""
        d = self.norm.normalized_shape[0]
        ffn = sum(p.numel() for p in self.block.ffn.parameters() if p.dim() == 2)
        events = length * (8 * d * d + 2 * ffn + 4 * length * d) + length * 4 * d * d
        read = queries * (4 * d * d + 4 * d * d + 4 * length * d)  # MLP; query and output projections; scores and sums
        return events + read, read


class LayerState(NamedTuple):
    """What the candidates of a request need of one layer, at R rows.

    slots X_r [R, m_r, d] with the appended ones; linear [R, 3 n_c, d] and fm [R, hidden]: request parts of the candidate
    side's products; queries [R, a, d] and keys of deep cross attention, None without it.
    """

    slots: Tensor
    linear: Tensor
    fm: Tensor
    queries: Tensor | None
    keys: RequestKeys | None


class MaskedLayer(nn.Module):
    """One layer of both sides under the block-triangular mask; slots (m_r, m_c) -> (2 n_r, 2 n_c).

    emits False: nothing reads the request outputs (the last layer without a request head), so n_r = 0.
    """

    def __init__(self, config: ROCSConfig, request_slots: int, pair_slots: int, emits: bool = True):
        super().__init__()
        c, n_r, n_c = config, config.request_outputs if emits else 0, config.pair_outputs
        self.config = config
        self.events, self.queries = None, None
        if c.added:
            self.events = EventReader(c)
            self.queries = MaskedSlotLinear((request_slots, c.queries), (pair_slots, c.queries))
        m_r, m_c = request_slots + c.added, pair_slots + c.added
        self.linear = MaskedSlotLinear((m_r, 3 * n_r), (m_c, 3 * n_c))  # compression and residual in one product
        self.request_dots, self.pair_dots = UpperPairs(m_r), UpperPairs(m_c)
        fm_r, fm_c = self.request_dots.outputs, m_c * m_r + self.pair_dots.outputs
        self.request_hidden = nn.Linear(fm_r, c.fm_hidden) if emits else None
        self.request_out = nn.Linear(c.fm_hidden, n_r * c.width) if emits else None
        self.request_norm = nn.LayerNorm(c.width) if emits else None
        self.pair_hidden = BroadcastLinear(fm_r, fm_c, c.fm_hidden)
        self.pair_out = nn.Linear(c.fm_hidden, n_c * c.width)
        self.pair_norm, self.dropout = nn.LayerNorm(c.width), Dropout(c.dropout)

    def request(self, x: Tensor, events: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, LayerState]:
        """X_r [R, m_r, d], H [R, L, d] -> (X_r of the next layer [R, 2 n_r, d], H^n, state)."""
        shared = keys = None
        if self.events is not None:
            events, keys = self.events.advance(events, mask)
            queries, shared = self.queries.request_part(x)  # (R, a, d) each
            x = torch.cat([x, self.events.of_request(queries, keys)], dim=1)
        linear, linear_pair = self.linear.request_part(x)
        dots = self.request_dots(x) * self.config.width**-0.5
        state = LayerState(x, linear_pair, self.pair_hidden.request_part(dots), shared, keys)
        if self.request_norm is None:
            return x[:, :0], events, state
        mixed = self.dropout(F.silu(self.request_hidden(dots)))
        return close_layer(self.request_out(mixed), linear, self.request_norm), events, state

    def pairs(self, state: LayerState, x: Tensor, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        """X_c [P, m_c, d] -> [P, 2 n_c, d] for candidates of prepared requests."""
        if self.events is not None:
            queries = self.queries.pair_part(state.queries, x, request_of)  # (P, a, d)
            x = torch.cat([x, self.events.of_pairs(queries, state.keys, request_of, groups)], dim=1)
        linear = self.linear.pair_part(state.linear, x, request_of)
        dots = torch.cat([cross_pairs(state.slots, x, request_of, groups), self.pair_dots(x)], dim=1)
        hidden = self.pair_hidden.pair_part(state.fm, dots * self.config.width**-0.5, request_of)
        mixed = self.dropout(F.silu(hidden))
        return close_layer(self.pair_out(mixed), linear, self.pair_norm)

    def flops(self, length: int) -> tuple[int, int]:
        """Matrix FLOPs (per request, per candidate)."""
        c, d = self.config, self.config.width
        m_r, m_c = self.request_dots.slots, self.pair_dots.slots
        request, pair = self.events.flops(length, c.queries) if self.events is not None else (0, 0)
        for layer in (self.queries, self.linear) if self.events is not None else (self.linear,):
            request += layer.flops(0, d)
            pair += layer.flops(1, d, requests=0)
        request += self.request_dots.flops(1, d) + self.pair_hidden.flops(0)
        if self.request_norm is not None:
            request += 2 * (self.request_hidden.weight.numel() + self.request_out.weight.numel())
        pair += self.pair_dots.flops(1, d) + 2 * m_r * m_c * d + self.pair_hidden.flops(1, requests=0)
        return request, pair + 2 * self.pair_out.weight.numel()
