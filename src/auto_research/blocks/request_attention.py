"""Attention of candidate tokens to request-level keys and values, which are never copied once per candidate.

The P flat pairs are regrouped per request, so that scores and weighted sums are one matrix product per request:

    a_{p,q,j} = softmax_j( scale * q_{p,q} . k_{r(p),j} + bias_j ),   o_{p,q} = sum_j a_{p,q,j} v_{r(p),j}

Sources: cached K,V of HyFormer (arXiv:2601.12681), NS tokens of OneTrans (arXiv:2510.26104), `bcast_attn` of ROCS
(arXiv:2607.27744), Select of SlimPer (arXiv:2607.12281), candidate rows of GenRank (arXiv:2505.04180).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from auto_research.blocks.per_token_ffn import private_linear
from auto_research.blocks.request_groups import Group, collect, request_groups, spread
from auto_research.runtime.precision import float32_region


class OwnKeys(NamedTuple):
    """Keys and values that belong to the pair itself: k [P, H, M, dh], v [P, H, M, dv], visible bool[Q, M] or None."""

    k: Tensor
    v: Tensor
    visible: Tensor | None = None


def request_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request_of: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    pair_mask: Tensor | None = None,
    pair_bias: Tensor | None = None,
    own: OwnKeys | None = None,
    scale: float | None = None,
    groups: list[Group] | None = None,
) -> Tensor:
    """Softmax attention of pair-level queries to the keys of their request, and optionally to keys of their own.

    Parameters
    ----------
    q: [P, H, Q, dh].  k: [R, H, L, dh].  v: [R, H, L, dv].  request_of: int64[P], pairs of one request contiguous.
    mask: bool[R, L], keys of the request that may be read.  bias: float [R, H, L] (or [1, H, L]) added to the scores.
    pair_mask: bool[P, L] and pair_bias: float [P, H, L]: the same per pair (events later than this candidate).
    own: further keys of the pair inside the same softmax.  scale: default dh^-0.5.
    groups: those of `request_of`, where a caller has them.

    Returns [P, H, Q, dv]. Scores and softmax are float32. A query without any visible key reads 0.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    requests = k.shape[0]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for group in request_groups(request_of, requests) if groups is None else groups:
        whole = len(group.rows) == requests
        rows = slice(None) if whole else group.rows
        everyone = len(group.pairs) == len(request_of)
        pairs = slice(None) if everyone else group.pairs
        part = _attend_group(
            q if everyone else q.index_select(0, group.pairs),
            k if whole else k.index_select(0, group.rows),
            v if whole else v.index_select(0, group.rows),
            group,
            mask=None if mask is None else mask[rows],
            bias=bias if bias is None or len(bias) == 1 else bias[rows],
            pair_mask=None if pair_mask is None else pair_mask[pairs],
            pair_bias=pair_bias if pair_bias is None or everyone else pair_bias.index_select(0, group.pairs),
            own=own if own is None or everyone else _own_of(own, group),
            scale=scale,
        )
        out = part if everyone else out.index_copy(0, group.pairs, part.to(out.dtype))
    return out


def _own_of(own: OwnKeys, group: Group) -> OwnKeys:
    return OwnKeys(own.k.index_select(0, group.pairs), own.v.index_select(0, group.pairs), own.visible)


def _attend_group(q, k, v, group: Group, *, mask, bias, pair_mask, pair_bias, own, scale) -> Tensor:
    if bias is None and pair_mask is None and pair_bias is None:
        return _read_group(q, k, v, group, mask, own, scale)
    rows, heads, keys, _ = k.shape
    queries = q.shape[2]
    with float32_region(q.device):
        grid = spread(q.float(), group)  # (r, J, H, Q, dh)
        folded = grid.transpose(1, 2).reshape(rows, heads, group.width * queries, -1)
        scores = scale * (folded @ k.float().transpose(2, 3))  # (r, H, J Q, L)
        if bias is not None:
            scores = scores + bias.float().unsqueeze(2)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        scores = scores.reshape(rows, heads, group.width, queries, keys)
        scores = collect(scores.transpose(1, 2), group)  # (p, H, Q, L)
        if pair_bias is not None:
            scores = scores + pair_bias.float().unsqueeze(2)
        if pair_mask is not None:
            scores = scores.masked_fill(~pair_mask[:, None, None, :], -torch.inf)
        if own is not None:
            extra = scale * (q.float() @ own.k.float().transpose(2, 3))  # (p, H, Q, M)
            if own.visible is not None:
                extra = extra.masked_fill(~own.visible, -torch.inf)
            scores = torch.cat([scores, extra], dim=3)
        weights = visible_softmax(scores)
        grid = spread(weights[..., :keys], group).transpose(1, 2)  # (r, H, J, Q, L)
        read = grid.reshape(rows, heads, group.width * queries, keys) @ v.float()
        read = collect(read.reshape(rows, heads, group.width, queries, -1).transpose(1, 2), group)
        if own is not None:
            read = read + weights[..., keys:] @ own.v.float()
    return read.to(v.dtype)


def _read_group(
    q: Tensor, k: Tensor, v: Tensor, group: Group, mask: Tensor | None, own: OwnKeys | None, scale: float
) -> Tensor:
    """The same where no request key is hidden from single pairs: softmax on the grid, only own scores are spread to it."""
    rows, heads, keys, width = k.shape
    queries = q.shape[2]
    least = torch.finfo(torch.float32).min
    with float32_region(q.device):
        grid = spread(q.float(), group).transpose(1, 2).reshape(rows * heads, group.width * queries, width)
        hidden = q.new_zeros(rows, keys, dtype=torch.float32)
        if mask is not None:
            hidden = hidden.masked_fill(~mask, least)
        hidden = hidden.repeat_interleave(heads, dim=0).unsqueeze(1)  # (r H, 1, L)
        scores = torch.baddbmm(hidden, grid, k.float().flatten(0, 1).transpose(1, 2), alpha=scale)  # (r H, J Q, L)
        if own is not None:
            extra = scale * (q.float() @ own.k.float().transpose(2, 3))  # (p, H, Q, M)
            if own.visible is not None:
                extra = extra.masked_fill(~own.visible, least)
            extra = spread(extra, group).transpose(1, 2).reshape(rows * heads, group.width * queries, -1)
            scores = torch.cat([scores, extra], dim=2)
        weights = torch.softmax(scores, dim=2)
        read = torch.bmm(weights[..., :keys], v.float().flatten(0, 1))
        read = collect(read.reshape(rows, heads, group.width, queries, -1).transpose(1, 2), group)
        if own is not None:
            extra = weights[..., keys:].reshape(rows, heads, group.width, queries, -1).transpose(1, 2)
            read = read + collect(extra, group) @ own.v.float()
        seen = _sees_any(mask, own, group)
        if seen is not None:
            read = read * seen
    return read.to(v.dtype)


def _sees_any(mask: Tensor | None, own: OwnKeys | None, group: Group) -> Tensor | None:
    """Whether each query has a visible key, [p, 1, Q or 1, 1]; None where all have one."""
    if mask is None or (own is not None and own.visible is None):
        return None
    of_request = mask.any(1)[group.row, None, None, None]
    return of_request if own is None else of_request | own.visible.any(1)[None, None, :, None]


def visible_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis where -inf means not visible; a row of -inf gives zeros and zero gradient."""
    if scores.shape[-1] == 0:
        return scores
    hidden = scores == -torch.inf
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
    return weights.masked_fill(hidden, 0.0)


class NullEvent(nn.Module):
    """One learned, always visible event in front of every sequence: [R, L, d], bool[R, L] -> [R, L + 1, d], mask."""

    def __init__(self, width: int):
        super().__init__()
        self.event = nn.Parameter(torch.randn(width) * width**-0.5)

    def forward(self, events: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        requests, _, width = events.shape
        row = self.event.to(events.dtype).expand(requests, 1, width)
        return torch.cat([row, events], dim=1), torch.cat([mask.new_ones(requests, 1), mask], dim=1)


class RequestKeys(NamedTuple):
    """What a request's candidates read: k and v [R, H, L, dh], mask bool[R, L]. Can be kept as the serving cache."""

    k: Tensor
    v: Tensor
    mask: Tensor


class RequestCrossAttention(nn.Module):
    """Multi-head cross attention of candidate tokens to a request's events; bring your own norm and residual.

    `keys_values(source [R, L, ds], mask)` once per request, `attend(x [P, Q, d], keys, request_of)` per candidate.
    null_event: prepend a learned event to the source, so that an empty history stays readable.
    """

    def __init__(self, width: int, source_width: int | None = None, heads: int = 4, null_event: bool = False):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        source_width = width if source_width is None else source_width
        self.heads = heads
        self.null = NullEvent(source_width) if null_event else None
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(source_width, 2 * width), nn.Linear(width, width)

    def keys_values(self, source: Tensor, mask: Tensor) -> RequestKeys:
        if self.null is not None:
            source, mask = self.null(source, mask)
        requests, length, _ = source.shape
        k, v = self.kv(source).reshape(requests, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return RequestKeys(k, v, mask)

    def attend(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        pairs, queries, width = x.shape
        q = self.q(x).reshape(pairs, queries, self.heads, -1).transpose(1, 2)  # (P, H, Q, dh)
        read = request_attention(q, keys.k, keys.v, request_of, mask=keys.mask, groups=groups)
        return self.out(read.transpose(1, 2).reshape(pairs, queries, width).to(x.dtype))

    def forward(self, x: Tensor, source: Tensor, mask: Tensor, request_of: Tensor) -> Tensor:
        return self.attend(x, self.keys_values(source, mask), request_of)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, queries: int, length: int, requests: int = 1) -> int:
        """Forward matrix FLOPs; keys and values of a request are paid once."""
        d, source = self.q.in_features, self.kv.in_features
        keys = length + (self.null is not None)
        return requests * keys * 4 * source * d + pairs * queries * (4 * d * d + 4 * keys * d)


class HeadwiseCrossAttention(nn.Module):
    """As many attention heads as feature heads, each with its own K and V (MixFormer, arXiv:2602.14110).

        z_i = sum_t softmax_t( q_i . k_{t,i} / sqrt(D) ) v_{t,i},  k_{t,i} = W_K^i s_t[i],  v_{t,i} = W_V^i s_t[i]

    Head i's normalised vector is the single query of attention head i; there is no query or output projection.
    `keys_values(source [R, L, N D], mask)`, `attend(x [N, P, D] token-major, keys, request_of) -> [N, P, D]`.
    """

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.tokens, self.width = tokens, width
        self.kv, _ = private_linear(tokens, width, 2 * width)  # (N, D, 2D)

    def keys_values(self, source: Tensor, mask: Tensor) -> RequestKeys:
        requests, length, _ = source.shape
        heads = source.reshape(requests * length, self.tokens, self.width).transpose(0, 1)  # (N, R L, D)
        k, v = torch.bmm(heads, self.kv).reshape(self.tokens, requests, length, -1).transpose(0, 1).chunk(2, dim=3)
        return RequestKeys(k, v, mask)  # (R, N, L, D) each

    def attend(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        """x and keys may hold some of the heads only."""
        q, scale = x.transpose(0, 1).unsqueeze(2), 1 / math.sqrt(self.width)  # (P, N, 1, D)
        read = request_attention(q, keys.k, keys.v, request_of, mask=keys.mask, scale=scale, groups=groups)
        return read.squeeze(2).transpose(0, 1).to(x.dtype)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor, request_of: Tensor) -> Tensor:
        return self.attend(x, self.keys_values(source, mask), request_of)

    def params(self) -> int:
        return self.kv.numel()

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        """Forward matrix FLOPs; keys and values of a request are paid once."""
        return self.tokens * self.width * (requests * length * 4 * self.width + pairs * 4 * length)
