"""Operators that fill HyFormer's slots (arXiv:2601.12681). Each reports params() and flops().

Row 0 of every sequence is the learned null event: always visible, encoded like an event, kept by every reducer and
encoder. Reducers and encoders get a sequence and its mask, nothing of the candidate. Queries and non-sequence tokens are
token-major, [tokens, P, D]; sequences are [R, L, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.longer import AttentionLayer, masked_attention
from auto_research.blocks.per_token_ffn import private_linear
from auto_research.blocks.private_projection import GroupTokenizer, PieceTokenizer, SwiGLU
from auto_research.blocks.request_attention import (
    RequestCrossAttention,
    RequestKeys,
    request_attention,
    visible_softmax,
)
from auto_research.blocks.request_groups import Group, request_groups, spread
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.runtime.precision import float32_region

GROUP, RECENT, SURVIVORS = 4, 8, 16


class Operator(nn.Module):
    """Base of a slot's operator."""

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())


# Non-sequence tokenizers: request groups [R, w], pair groups [P, w] -> [M, P, D]


class SemanticTokens(Operator):
    """One token per group of fields, F_m = W_m f_m + b_m; a request's groups are projected once per request."""

    def __init__(self, request_widths: tuple[int, ...], pair_widths: tuple[int, ...], tokens: int, width: int):
        super().__init__()
        if tokens != len(request_widths) + len(pair_widths):
            raise ValueError(f"semantic tokens: {tokens} tokens for {len(request_widths) + len(pair_widths)} groups")
        self.request, self.pair = GroupTokenizer(request_widths, width), GroupTokenizer(pair_widths, width)

    def forward(self, request: list[Tensor], pair: list[Tensor], request_of: Tensor) -> Tensor:
        return torch.cat([self.request(*request)[:, request_of], self.pair(*pair)])

    def flops(self, pairs: int, requests: int = 1) -> int:
        return self.request.flops(requests) + self.pair.flops(pairs)


class SplitTokens(Operator):
    """All groups concatenated and cut into M equal pieces ("auto_split"); the fields of a token have no common meaning."""

    def __init__(self, request_widths: tuple[int, ...], pair_widths: tuple[int, ...], tokens: int, width: int):
        super().__init__()
        self.pieces = PieceTokenizer(sum(request_widths) + sum(pair_widths), tokens, width)

    def forward(self, request: list[Tensor], pair: list[Tensor], request_of: Tensor) -> Tensor:
        return self.pieces(torch.cat([torch.cat(request, dim=1)[request_of], *pair], dim=1))

    def flops(self, pairs: int, requests: int = 1) -> int:
        return self.pieces.flops(pairs)


# Sequence reducers: [R, 1 + L, D], mask -> [R, 1 + L', D], mask


class NoReducer(Operator):
    """Every event is kept."""

    def __init__(self, width: int):
        super().__init__()

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return h, mask

    def length(self, length: int) -> int:
        return length

    def flops(self, length: int) -> int:
        return 0


class LongerReducer(Operator):
    """LONGER's token merge: the events before the last 8 in groups of 4, each group through one Transformer block and a
    learned attention pooling; in front a global mean token, behind it the last 8 events as they are.

    Groups are aligned to the newest event. [null, L events] -> [null, mean, ceil((L - 8) / 4) groups, 8 events].
    """

    def __init__(self, width: int):
        super().__init__()
        self.inner, self.score = AttentionLayer(width), nn.Linear(width, 1)

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        events, valid = h[:, 1:], mask[:, 1:]
        mean = masked_mean(events, valid).unsqueeze(1)
        cut = max(0, events.shape[1] - RECENT)
        groups, open_ = self._merged(events[:, :cut], valid[:, :cut]) if cut else (events[:, :0], valid[:, :0])
        h = torch.cat([h[:, :1], mean, groups, events[:, cut:]], dim=1)
        return h, torch.cat([mask[:, :1], valid.any(1, keepdim=True), open_, valid[:, cut:]], dim=1)

    def _merged(self, events: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        requests, length, width = events.shape
        missing = -length % GROUP
        count = (length + missing) // GROUP
        e = F.pad(events, (0, 0, missing, 0)).reshape(requests * count, GROUP, width)
        valid = F.pad(mask, (missing, 0)).reshape(requests * count, GROUP)
        e = self.inner(e, e, valid.unsqueeze(1) & valid.unsqueeze(2))
        scores = self.score(e).squeeze(2).float().masked_fill(~valid, -torch.inf)
        pooled = (visible_softmax(scores).to(e.dtype).unsqueeze(1) @ e).squeeze(1)
        return pooled.reshape(requests, count, width), valid.any(1).reshape(requests, count)

    def length(self, length: int) -> int:
        return 1 + -(-max(0, length - RECENT) // GROUP) + min(RECENT, length)

    def flops(self, length: int) -> int:
        """Forward matrix FLOPs of one request."""
        count, width = -(-max(0, length - RECENT) // GROUP), self.score.in_features
        return 2 * length * width + count * (self.inner.flops(GROUP, GROUP, GROUP) + 4 * GROUP * width)


# Query generators: tokens F [M, P, D], means [R, S D] -> queries [N, P, D]


class GeneratedQueries(Operator):
    """Q_n = MLP_n(g), g = [F_1; ..; F_M; mean(H_1); ..; mean(H_S)]; one Linear-SiLU-Linear per query.

    The part of the first layer that reads the means is evaluated once per request. mean: False leaves them out.
    """

    def __init__(self, queries: int, tokens: int, sequences: int, width: int, mean: bool = True):
        super().__init__()
        self.queries, self.cut, self.mean = queries, tokens * width, mean
        self.first, self.b1 = private_linear(queries, (tokens + sequences * mean) * width, width)
        self.second, self.b2 = private_linear(queries, width, width)

    def forward(self, f: Tensor, means: Tensor, request_of: Tensor) -> Tensor:
        flat = f.transpose(0, 1).flatten(1)  # (P, M D)
        h = torch.baddbmm(self.b1, flat.expand(self.queries, -1, -1), self.first[:, : self.cut])  # (N, P, D)
        if self.mean:
            h = h + torch.bmm(means.expand(self.queries, -1, -1), self.first[:, self.cut :])[:, request_of]
        return torch.baddbmm(self.b2, F.silu(h), self.second)

    def flops(self, pairs: int, requests: int = 1) -> int:
        inputs, width = self.first.shape[1:]
        return 2 * self.queries * width * (pairs * (self.cut + width) + requests * (inputs - self.cut))


class StaticQueries(Operator):
    """Ablation: learned constants that do not depend on the request."""

    def __init__(self, queries: int, tokens: int, sequences: int, width: int):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(queries, 1, width) * width**-0.5)

    def forward(self, f: Tensor, means: Tensor, request_of: Tensor) -> Tensor:
        return self.constant.expand(-1, f.shape[1], -1)

    def flops(self, pairs: int, requests: int = 1) -> int:
        return 0


# Sequence encoders of a layer: [R, 1 + L, D], mask -> the same, or shorter


class SwiGLUEncoder(Operator):
    """Every event by itself: H + SwiGLU(RMSNorm(H)), hidden 2D."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float):
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(width), SwiGLU(width, hidden, dropout)

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return h + self.ffn(self.norm(h)), mask

    def length(self, rows: int) -> int:
        return rows

    def flops(self, rows: int) -> int:
        return self.ffn.flops(rows)


class AttentionEncoder(Operator):
    """Pre-RMSNorm bidirectional self-attention and SwiGLU FFN over all rows.

    survivors: only the null event and the last `survivors` rows are queries and outputs (LONGER); the rest ends here.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, survivors: int | None = None):
        super().__init__()
        self.heads, self.survivors = heads, survivors
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.ffn, self.dropout = SwiGLU(width, hidden, dropout), Dropout(dropout)

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        source = self.attention_norm(h)
        k, v = self.kv(source).chunk(2, dim=2)
        seen, queries = mask, source
        if self.survivors is not None and h.shape[1] > 1 + self.survivors:
            h, queries, mask = (torch.cat([x[:, :1], x[:, -self.survivors :]], dim=1) for x in (h, source, mask))
        allowed = seen.unsqueeze(1).expand(-1, queries.shape[1], -1)
        h = h + self.dropout(self.out(masked_attention(self.q(queries), k, v, allowed, self.heads)))
        return h + self.ffn(self.ffn_norm(h)), mask

    def length(self, rows: int) -> int:
        return rows if self.survivors is None else min(rows, 1 + self.survivors)

    def flops(self, rows: int) -> int:
        d, queries = self.q.in_features, self.length(rows)
        return 4 * rows * d * d + queries * (4 * d * d + 4 * rows * d) + self.ffn.flops(queries)


# Query decoders: queries [Q, P, D] read one sequence's keys and values; K,V keep the request's batch size


class Decoder(Operator):
    """Q + MHA(RMSNorm(Q), K, V) W_O, masked multi-head attention."""

    attention: type[nn.Module] = RequestCrossAttention

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm, self.read = nn.RMSNorm(width), self.attention(width, heads=heads)

    def keys_values(self, h: Tensor, mask: Tensor) -> NamedTuple:
        return self.read.keys_values(h, mask)

    def forward(self, q: Tensor, keys: NamedTuple, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        return q + self.read.attend(self.norm(q).transpose(0, 1), keys, request_of, groups).transpose(0, 1)

    @staticmethod
    def merged(keys: list[RequestKeys]) -> RequestKeys:
        """One sequence out of several, [R, H, L_1 + .. + L_S, dh]."""
        return RequestKeys(
            *(torch.cat(part, dim=axis) for part, axis in zip(zip(*keys, strict=True), (2, 2, 1), strict=True))
        )

    def flops(self, pairs: int, queries: int, length: int, read: int, requests: int = 1) -> int:
        """length: rows projected to K and V; read: rows the queries attend to (more when sequences are merged)."""
        d = self.read.q.in_features
        return requests * length * 4 * d * d + pairs * queries * (4 * d * d + 4 * read * d)


class GatedCrossAttention(RequestCrossAttention):
    """Gated attention: the read is multiplied by sigmoid(W_g q) before W_O."""

    def __init__(self, width: int, source_width: int | None = None, heads: int = 4):
        super().__init__(width, source_width, heads)
        self.gate = nn.Linear(width, width)

    def attend(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        pairs, queries, width = x.shape
        q = self.q(x).reshape(pairs, queries, self.heads, -1).transpose(1, 2)  # (P, H, Q, dh)
        read = request_attention(q, keys.k, keys.v, request_of, mask=keys.mask, groups=groups)
        read = read.transpose(1, 2).reshape(pairs, queries, width).to(x.dtype)
        return self.out(torch.sigmoid(self.gate(x)) * read)


class GatedDecoder(Decoder):
    """Q + (sigmoid(W_g RMSNorm(Q)) * MHA(RMSNorm(Q), K, V)) W_O."""

    attention = GatedCrossAttention

    def flops(self, pairs: int, queries: int, length: int, read: int, requests: int = 1) -> int:
        return super().flops(pairs, queries, length, read, requests) + 2 * pairs * queries * self.read.q.in_features**2


class LinearKeys(NamedTuple):
    """All a query needs: state sum_j phi(k_j) v_j^T [R, H, dh, dh] and total sum_j phi(k_j) [R, H, dh]."""

    state: Tensor
    total: Tensor


class LinearCrossAttention(RequestCrossAttention):
    """Linear attention, phi(q) S / (phi(q) . t) with phi = elu + 1: the cost of a candidate does not depend on L."""

    def keys_values(self, source: Tensor, mask: Tensor) -> LinearKeys:
        keys = super().keys_values(source, mask)
        with float32_region(source.device):
            k = (F.elu(keys.k.float()) + 1) * mask[:, None, :, None]
            return LinearKeys(k.transpose(2, 3) @ keys.v.float(), k.sum(2))

    def attend(self, x: Tensor, keys: LinearKeys, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        pairs, queries, width = x.shape
        q = self.q(x).reshape(pairs, queries, self.heads, -1).transpose(1, 2)  # (P, H, Q, dh)
        with float32_region(x.device):
            q = F.elu(q.float()) + 1
            read = q.new_zeros(q.shape)
            for group in request_groups(request_of, len(keys.state)) if groups is None else groups:
                grid = spread(q[group.pairs], group).transpose(1, 2).flatten(2, 3)  # (r, H, J Q, dh)
                total = (grid * keys.total[group.rows].unsqueeze(2)).sum(3, keepdim=True)
                out = (grid @ keys.state[group.rows]) / total.clamp(min=torch.finfo(total.dtype).tiny)
                out = out.unflatten(2, (group.width, queries)).transpose(1, 2)[group.row, group.slot]
                read = read.index_put((group.pairs,), out)
        return self.out(read.to(x.dtype).transpose(1, 2).reshape(pairs, queries, width))


class LinearDecoder(Decoder):
    """Q + LinearAttention(RMSNorm(Q), K, V) W_O."""

    attention = LinearCrossAttention

    @staticmethod
    def merged(keys: list[LinearKeys]) -> LinearKeys:
        return LinearKeys(*(sum(part) for part in zip(*keys, strict=True)))

    def flops(self, pairs: int, queries: int, length: int, read: int, requests: int = 1) -> int:
        d, heads = self.read.q.in_features, self.read.heads
        return requests * length * (4 * d * d + 2 * d * d // heads) + pairs * queries * (4 * d * d + 2 * d * d // heads)


# Heads: final tokens [T, P, D] -> [P, K]


class FlatHead(Operator):
    """Linear(T D, hidden)-SiLU-Linear(hidden, K) of all tokens."""

    def __init__(self, tokens: int, width: int, hidden: int, outputs: int, dropout: float):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(self.inputs(tokens, width), hidden), nn.SiLU(), Dropout(dropout), nn.Linear(hidden, outputs)
        )

    @staticmethod
    def inputs(tokens: int, width: int) -> int:
        return tokens * width

    def forward(self, z: Tensor) -> Tensor:
        return self.network(z.transpose(0, 1).flatten(1))

    def flops(self, pairs: int) -> int:
        return 2 * pairs * (self.network[0].weight.numel() + self.network[3].weight.numel())


class MeanHead(FlatHead):
    """The same of the tokens' mean (ablation)."""

    @staticmethod
    def inputs(tokens: int, width: int) -> int:
        return width

    def forward(self, z: Tensor) -> Tensor:
        return self.network(z.mean(0))
