"""LONGER (arXiv:2505.04421): token merge and a few queries over a long behaviour history.

`LongerSmall` is the slot option of the card rankmixer, `Longer` the search operator with user token and cached keys.
Both are causal by time and split into a part per request (`prepare`) and a part per candidate (`score`).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 4
RECENT = 8


def masked_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, heads: int) -> Tensor:
    """Multi-head attention, q [B, Q, d], k and v [B, K, d], allowed bool [B, Q, K] -> [B, Q, d].

    A query that is allowed no key reads 0.
    """
    batch, _, width = q.shape
    split = [x.reshape(batch, -1, heads, width // heads).transpose(1, 2) for x in (q, k, v)]
    logits = (split[0] @ split[1].transpose(2, 3)).float() / math.sqrt(width // heads)
    blocked = ~allowed.unsqueeze(1)
    weights = torch.softmax(logits.masked_fill(blocked, torch.finfo(logits.dtype).min), dim=3)
    weights = weights.masked_fill(blocked, 0.0).to(v.dtype)
    return (weights @ split[2]).transpose(1, 2).reshape(batch, -1, width)


class AttentionLayer(nn.Module):
    """Pre-norm cross-attention and GELU feed-forward: x + Attn(n(x), n(source)), then x + FFN(n(x))."""

    def __init__(self, width: int, heads: int = 2, expansion: int = 2):
        super().__init__()
        self.heads = heads
        self.query_norm, self.source_norm, self.ffn_norm = (nn.LayerNorm(width) for _ in range(3))
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width))

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of source rows [..., d]; independent of the queries, so they can be cached."""
        return self.kv(self.source_norm(source)).chunk(2, dim=-1)

    def attend(self, x: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """x [B, Q, d] over cached k, v [B, K, d]."""
        read = masked_attention(self.q(self.query_norm(x)), k, v, allowed, self.heads)
        seen = allowed.any(dim=2, keepdim=True).to(x.dtype)
        x = x + self.out(read) * seen
        return x + self.ffn(self.ffn_norm(x))

    def forward(self, x: Tensor, source: Tensor, allowed: Tensor) -> Tensor:
        return self.attend(x, *self.keys_values(source), allowed)

    def flops(self, queries: int, keys: int, sources: int) -> int:
        """Forward matrix FLOPs of one set of `queries` over `keys`, of which `sources` get new K and V."""
        d, hidden = self.q.in_features, self.ffn[0].out_features
        return queries * (4 * d * d + 4 * d * hidden + 4 * keys * d) + 4 * sources * d * d


class TokenMerge(nn.Module):
    """Groups of K = 4 adjacent events, aligned to the newest: m_i = W [InnerTrans(e_{iK..iK+K-1})].

    events [R, L, d], mask [R, L] -> merged [R, M, D], mask [R, M], M = ceil(L / 4). `inner` False averages the
    group's events instead of InnerTrans and concatenation (ablation).
    """

    def __init__(self, event_width: int, width: int, inner: bool = True):
        super().__init__()
        self.transformer = AttentionLayer(event_width) if inner else None
        self.project = nn.Linear(GROUP * event_width if inner else event_width, width)

    def forward(self, events: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        requests, length, width = events.shape
        missing = -length % GROUP
        events, mask = F.pad(events, (0, 0, missing, 0)), F.pad(mask, (missing, 0))
        groups = (length + missing) // GROUP
        e = events.reshape(requests * groups, GROUP, width)
        valid = mask.reshape(requests * groups, GROUP)
        if self.transformer is None:
            share = valid.to(e.dtype) / valid.sum(1, keepdim=True).clamp(min=1)
            merged = (share.unsqueeze(1) @ e).squeeze(1)
        else:
            allowed = valid.unsqueeze(1) & valid.unsqueeze(2)
            merged = (self.transformer(e, e, allowed) * valid.unsqueeze(2)).flatten(1)  # (R M, 4 d)
        return self.project(merged).reshape(requests, groups, -1), valid.any(1).reshape(requests, groups)

    def flops(self, length: int) -> int:
        """Forward matrix FLOPs of one request."""
        groups = -(-length // GROUP)
        project = 2 * groups * self.project.in_features * self.project.out_features
        if self.transformer is None:
            return project + 2 * groups * GROUP * self.project.in_features
        return project + groups * self.transformer.flops(GROUP, GROUP, GROUP)


class LongerState(NamedTuple):
    """Request-level part of a LONGER summary: keys and values of both layers and their masks."""

    k1: Tensor
    v1: Tensor
    mask1: Tensor
    k2: Tensor
    v2: Tensor
    mask2: Tensor


class Longer(nn.Module):
    """LONGER with CLS, user and candidate tokens; the candidate is a query only, so K and V are cached per request.

    Layer 1: O = [CLS, user, candidate; last min(8, M) merged tokens] attends to R = [CLS, user, m_1 .. m_M]; global
    rows see all of R, a sequence row sees the globals and merged tokens up to its own time. Layer 2: the three global
    rows are queries over O; CLS and user see all but the candidate, the candidate sees all. Outputs of CLS, user and
    candidate, projected to the event width, are the three summary vectors; two of them are per request.
    Ablations: inner=False, global_tokens=False (CLS and user are not among the keys of R and read only the sequence),
    merge=False (full self-attention on all L events in place of the merged tokens).
    """

    shared = 2  # vectors per request; the rest depends on the candidate

    def __init__(
        self,
        event_width: int = 48,
        user_width: int = 80,
        width: int = 64,
        *,
        inner: bool = True,
        global_tokens: bool = True,
        merge: bool = True,
        **unused,
    ):
        super().__init__()
        self.global_tokens = global_tokens
        self.merge = TokenMerge(event_width, width, inner) if merge else None
        self.lift = None if merge else nn.Linear(event_width, width)
        self.full = None if merge else AttentionLayer(width)
        self.cls = nn.Parameter(torch.randn(width) * width**-0.5)
        self.user = nn.Linear(user_width, width)
        self.candidate = nn.Linear(event_width, width)
        self.layer1, self.layer2 = AttentionLayer(width), AttentionLayer(width)
        self.project = nn.Linear(width, event_width)

    def _tokens(self, events: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.merge is not None:
            return self.merge(events, mask)
        length = events.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=events.device).tril()
        allowed = causal & mask.unsqueeze(1) & mask.unsqueeze(2)
        x = self.lift(events)
        return self.full(x, x, allowed), mask

    def prepare(self, events: Tensor, mask: Tensor, user: Tensor) -> tuple[Tensor, LongerState]:
        """events [R, L, d], mask [R, L], user [R, 80] -> CLS and user vectors [R, 2, d], and the cache."""
        merged, valid = self._tokens(events, mask)  # (R, M, D), (R, M)
        requests, count, width = merged.shape
        top = torch.stack([self.cls.expand(requests, width), self.user(user)], dim=1)  # (R, 2, D)
        always = valid.new_full((requests, 2), self.global_tokens)
        source, source_mask = torch.cat([top, merged], dim=1), torch.cat([always, valid], dim=1)
        recent = min(RECENT, count)
        rows = torch.cat([top, merged[:, count - recent :]], dim=1)  # (R, 2 + recent, D)
        row_valid = torch.cat([valid.new_ones(requests, 2), valid[:, count - recent :]], dim=1)

        age = torch.arange(count + 2, device=merged.device)  # position in R; the two globals come first
        own = torch.cat([age.new_full((2,), count + 2), age[count + 2 - recent :]])
        allowed = (age[None, :] <= own[:, None]) & source_mask.unsqueeze(1) & row_valid.unsqueeze(2)
        k1, v1 = self.layer1.keys_values(source)
        rows = self.layer1.attend(rows, k1, v1, allowed) * row_valid.unsqueeze(2)

        k2, v2 = self.layer2.keys_values(rows)
        out = self.layer2.attend(rows[:, :2], k2, v2, row_valid.unsqueeze(1).expand(-1, 2, -1))
        return self.project(out), LongerState(k1, v1, source_mask, k2, v2, row_valid)

    def score(self, state: LongerState, key: Tensor, request_of: Tensor) -> Tensor:
        """Candidate row of every pair: key [P, d] -> [P, 1, d]."""
        k1, v1, mask1, k2, v2, mask2 = (part[request_of] for part in state)
        row = self.layer1.attend(self.candidate(key).unsqueeze(1), k1, v1, mask1.unsqueeze(1))  # (P, 1, D)
        own_k, own_v = self.layer2.keys_values(row)
        allowed = F.pad(mask2, (0, 1), value=True).unsqueeze(1)
        row = self.layer2.attend(row, torch.cat([k2, own_k], dim=1), torch.cat([v2, own_v], dim=1), allowed)
        return self.project(row)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        """Forward matrix FLOPs; a request's part is paid once."""
        width, d = self.project.in_features, self.project.out_features
        if self.merge is None:
            merged, tokens = length, 2 * length * d * width + self.full.flops(length, length, length)
        else:
            merged, tokens = -(-length // GROUP), self.merge.flops(length)
        rows = 2 + min(RECENT, merged)
        request = tokens + 2 * self.user.in_features * width + 4 * width * d
        request += self.layer1.flops(rows, merged + 2, merged + 2) + self.layer2.flops(2, rows, rows)
        pair = self.layer1.flops(1, merged + 2, 0) + self.layer2.flops(1, rows + 1, 1) + 4 * width * d
        return requests * request + pairs * pair


class SmallState(NamedTuple):
    k: Tensor
    v: Tensor
    mask: Tensor
    rows: Tensor
    row_mask: Tensor


class LongerSmall(nn.Module):
    """The card's smaller form at the event width: queries [candidate, learned global, last 8 events].

    They cross-attend to all merged tokens: candidate and global rows see every merged token, an event row those whose
    newest member is not newer than itself, and a row that sees none reads 0. One self-attention layer over the rows
    follows. Vectors: global row, masked mean of the event rows, candidate row last. Self-attention lets every row see
    the candidate, so all three are per pair.
    """

    shared = 0

    def __init__(self, event_width: int = 48, user_width: int = 80, width: int = 64, **unused):
        super().__init__()
        self.merge = TokenMerge(event_width, event_width)
        self.cls = nn.Parameter(torch.randn(event_width) * event_width**-0.5)
        self.cross, self.self_attention = AttentionLayer(event_width), AttentionLayer(event_width)

    def prepare(self, events: Tensor, mask: Tensor, user: Tensor) -> tuple[Tensor, SmallState]:
        """-> no shared vectors [R, 0, d], and the cache: K and V of merged tokens, global and event rows."""
        merged, valid = self.merge(events, mask)
        requests, count, width = merged.shape
        length = events.shape[1]
        recent = min(RECENT, length)
        row = torch.cat([self.cls.expand(requests, 1, width), events[:, length - recent :]], dim=1)
        row_mask = torch.cat([mask.new_ones(requests, 1), mask[:, length - recent :]], dim=1)
        newest = length - 1 - GROUP * torch.arange(count - 1, -1, -1, device=events.device)  # newest member of a group
        own = torch.cat([newest.new_full((1,), length), torch.arange(length - recent, length, device=events.device)])
        allowed = (newest[None, :] <= own[:, None]) & valid.unsqueeze(1) & row_mask.unsqueeze(2)
        k, v = self.cross.keys_values(merged)
        row = self.cross.attend(row, k, v, allowed) * row_mask.unsqueeze(2)
        return events.new_zeros(requests, 0, width), SmallState(k, v, valid, row, row_mask)

    def score(self, state: SmallState, key: Tensor, request_of: Tensor) -> Tensor:
        """key [P, d] -> [P, 3, d]."""
        k, v, mask, rows, row_mask = (part[request_of] for part in state)
        candidate = self.cross.attend(key.unsqueeze(1), k, v, mask.unsqueeze(1))  # (P, 1, d)
        row = torch.cat([candidate, rows], dim=1)  # (P, 2 + recent, d)
        valid = F.pad(row_mask, (1, 0), value=True)
        row = self.self_attention(row, row, valid.unsqueeze(1) & valid.unsqueeze(2))
        events = valid[:, 2:].to(row.dtype)
        share = events / events.sum(1, keepdim=True).clamp(min=1)
        mean = share.unsqueeze(1) @ row[:, 2:]
        return torch.cat([row[:, 1:2], mean, row[:, :1]], dim=1)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        """Forward matrix FLOPs; a request's part is paid once."""
        merged, recent = -(-length // GROUP), min(RECENT, length)
        request = self.merge.flops(length) + self.cross.flops(recent + 1, merged, merged)
        rows = recent + 2
        pair = self.cross.flops(1, merged, 0) + self.self_attention.flops(rows, rows, rows)
        return requests * request + pairs * (pair + 2 * recent * self.cls.numel())
