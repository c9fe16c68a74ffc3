"""MixFormer (arXiv:2602.14110): feature heads are mixed, then are themselves the attention queries over the sequence.

    X^0: N_U pieces of the user part and N_G pieces of the item part, each through its own Linear           [N, ., D]
    P = X + HeadMix(RMSNorm(X)),   Q = P + SwiGLU_i(RMSNorm(P))                                             query mixer
    Hs = S + SwiGLU^l(RMSNorm(S)),  k_{t,i}, v_{t,i} = W_K^{l,i}, W_V^{l,i} RMSNorm(Hs_t)[i]        from the raw events S
    z_i = q_i + sum_t softmax_t(RMSNorm(q_i) . k_{t,i} / sqrt(D)) v_{t,i}                            head-wise attention
    O = Z + SwiGLU'_i(RMSNorm(Z))                                                                         output fusion
    UI-MixFormer: HeadMix_UI(X) = M * HeadMix(X), M[h, c] = 0 iff h < N_U and c >= N_U D / N

With M the user heads of every block are functions of the request. They are then carried at R rows, [N_U, R, D], and only
the item heads, [N_G, P, D], are paid per candidate; `recompute` is the same network with all heads at P rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import PieceTokenizer, PrivateSwiGLU, SwiGLU
from auto_research.blocks.request_attention import HeadwiseCrossAttention, NullEvent, RequestKeys
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.request_groups import Group, request_groups
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.blocks.token_mixing import TokenAttention
from auto_research.blocks.two_sided import BroadcastLinear, DecoupledHeadShuffle
from auto_research.data.requests import RequestBatch

TASKS = 3  # engage, like, love


@dataclass(frozen=True)
class MixFormerConfig:
    """Sizes and switches. user_heads N_U, item_heads N_G, width D (a multiple of N for the shuffle), blocks, history L,
    field: width of an embedded field.

    decoupled: UI-MixFormer.  mixing: shuffle | attention | identity (P = X); sequence: attention | mean (one summary for all heads);
    fusion: swiglu | identity; heads: pieces | joint (one Linear of everything, reshaped); pooling: flatten | mean.
    """

    user_heads: int = 4
    item_heads: int = 4
    width: int = 32
    blocks: int = 3
    expansion: int = 2
    head_hidden: int = 128
    history: int = 50
    dropout: float = 0.2
    field: int = 16
    decoupled: bool = False
    mixing: str = "shuffle"
    sequence: str = "attention"
    fusion: str = "swiglu"
    heads: str = "pieces"
    pooling: str = "flatten"

    def __post_init__(self):
        for switch, known in SWITCHES.items():
            if getattr(self, switch) not in known:
                raise ValueError(f"unknown {switch} {getattr(self, switch)!r}; known: {', '.join(known)}")
        if self.mixing == "shuffle" and self.width % self.count:
            raise ValueError(f"width {self.width} is not a multiple of {self.count} heads")
        if self.decoupled and (self.mixing == "attention" or self.heads == "joint"):
            raise ValueError("decoupling needs head mixing and heads made of pieces: others mix user and item")

    @property
    def count(self) -> int:
        """N."""
        return self.user_heads + self.item_heads


SWITCHES = {
    "mixing": ("shuffle", "attention", "identity"),
    "sequence": ("attention", "mean"),
    "fusion": ("swiglu", "identity"),
    "heads": ("pieces", "joint"),
    "pooling": ("flatten", "mean"),
}


class HeadFFN(nn.Module):
    """SwiGLU with weights of its own per head, user heads and item heads apart, so that each side can run alone."""

    def __init__(self, config: MixFormerConfig):
        super().__init__()
        sizes = (config.width, config.expansion * config.width, config.dropout)
        self.user, self.item = PrivateSwiGLU(config.user_heads, *sizes), PrivateSwiGLU(config.item_heads, *sizes)

    def forward(self, x: Tensor) -> Tensor:
        cut = len(self.user.up.weight)
        return torch.cat([self.user(x[:cut]), self.item(x[cut:])])


class MeanReading(nn.Module):
    """Ablation: one summary, the same for every head: Linear of the mean of RMSNorm(Hs) over null and unmasked events."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.summary = nn.Linear(tokens * width, width)

    def keys_values(self, source: Tensor, mask: Tensor) -> RequestKeys:
        summary = self.summary(masked_mean(source, mask))[:, None, None]  # (R, 1, 1, D)
        return RequestKeys(summary, summary, mask)

    def attend(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        return keys.v[request_of, 0, 0].expand_as(x).to(x.dtype)

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        return requests * 2 * self.summary.in_features * (length + self.summary.out_features)


READINGS = {"attention": HeadwiseCrossAttention, "mean": MeanReading}


def side_of(keys: RequestKeys, heads: slice) -> RequestKeys:
    """The keys of some heads; a summary shared by all heads stays whole."""
    return keys if keys.k.shape[1] == 1 else RequestKeys(keys.k[:, heads], keys.v[:, heads], keys.mask)


class Block(nn.Module):
    """One MixFormer block. `keys(events)` and `user(...)` once per request; `item(...)` once per candidate."""

    def __init__(self, config: MixFormerConfig):
        super().__init__()
        c, n, d = config, config.count, config.width
        self.n_user, self.decoupled = c.user_heads, c.decoupled
        mixers = {
            "shuffle": lambda: DecoupledHeadShuffle(n, d, c.user_heads if c.decoupled else n),
            "attention": lambda: TokenAttention(n, d),
        }
        mixes = c.mixing != "identity"
        self.mixer, self.mix_norm = (mixers[c.mixing](), nn.RMSNorm(d)) if mixes else (None, None)
        self.query_norm, self.read_norm = nn.RMSNorm(d), nn.RMSNorm(d) if c.sequence == "attention" else nn.Identity()
        self.event_norm, self.event_ffn = nn.RMSNorm(n * d), SwiGLU(n * d, n * d // 2, c.dropout)
        self.source_norm = nn.RMSNorm(n * d)
        self.query_ffn = HeadFFN(c)
        self.reading = READINGS[c.sequence](n, d)
        self.fusion_norm, self.fusion = (nn.RMSNorm(d), HeadFFN(c)) if c.fusion == "swiglu" else (None, None)

    def sequence(self, events: Tensor) -> Tensor:
        """Hs [R, L, N D] of this block, from the raw events S."""
        return events + self.event_ffn(self.event_norm(events))

    def keys(self, events: Tensor, mask: Tensor) -> RequestKeys:
        return self.reading.keys_values(self.source_norm(self.sequence(events)), mask)

    def forward(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
        """All heads, one row per pair: [N, P, D] -> [N, P, D]; the decoupling mask multiplies the mixed heads."""
        p = x if self.mixer is None else x + self.mixer(self.mix_norm(x))
        return self._after(p, None, keys, request_of, groups)

    def user(self, x: Tensor, keys: RequestKeys) -> tuple[Tensor, Tensor]:
        """User heads [N_U, R, D] -> the same after the block, and what the item heads' mixing reads of them."""
        n_user, shared = self.n_user, x[:0]
        p = x
        if self.mixer is not None:
            slices = self._slices(self.mix_norm(x))  # (N, R, N_U D / N)
            p, shared = x + F.pad(slices[:n_user], (0, x.shape[2] - slices.shape[2])), slices[n_user:]
        own = torch.arange(x.shape[1], device=x.device)
        return self._after(p, "user", side_of(keys, slice(n_user)), own, None), shared

    def item(self, x: Tensor, shared: Tensor, keys: RequestKeys, request_of: Tensor, groups=None) -> Tensor:
        """Item heads [N_G, P, D] -> the same after the block. shared: from `user`, [N_G, R, N_U D / N]."""
        p = x
        if self.mixer is not None:
            own = self._slices(self.mix_norm(x))[self.n_user :]  # (N_G, P, N_G D / N)
            p = x + torch.cat([shared.index_select(1, request_of), own], dim=2)
        return self._after(p, "item", side_of(keys, slice(self.n_user, None)), request_of, groups)

    def _slices(self, x: Tensor) -> Tensor:
        """Slice h of every head of one side, for all N output heads: [n, B, D] -> [N, B, n D / N]."""
        heads, rows, width = x.shape
        count = self.mixer.mask.shape[0]
        return x.reshape(heads, rows, count, width // count).permute(2, 1, 0, 3).reshape(count, rows, -1)

    def _after(self, p: Tensor, side: str | None, keys: RequestKeys, request_of: Tensor, groups) -> Tensor:
        """Everything behind the mixing, head by head; side None: all heads."""
        query_ffn = self.query_ffn if side is None else getattr(self.query_ffn, side)
        q = p + query_ffn(self.query_norm(p))
        z = q + self.reading.attend(self.read_norm(q), keys, request_of, groups)
        if self.fusion is None:
            return z
        return z + (self.fusion if side is None else getattr(self.fusion, side))(self.fusion_norm(z))

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        """Forward matrix FLOPs. length: events, the null event included. User heads cost `requests` rows if decoupled."""
        rows = {"user": requests if self.decoupled else pairs, "item": pairs}
        ffns = [self.query_ffn] if self.fusion is None else [self.query_ffn, self.fusion]
        heads = sum(getattr(ffn, side).flops(count) for ffn in ffns for side, count in rows.items())
        events = self.event_ffn.flops(requests * length)
        mixing = 0 if self.mixer is None else self.mixer.flops(pairs)
        if isinstance(self.reading, MeanReading):
            return heads + events + mixing + self.reading.flops(pairs, length, requests)
        reading, n = self.reading, self.reading.tokens
        read = rows["user"] * self.n_user + rows["item"] * (n - self.n_user)
        return heads + events + mixing + reading.flops(0, length, requests) + 4 * read * length * reading.width


class JointHeads(nn.Module):
    """Ablation: one Linear of the whole input to N D, reshaped; heads without field meaning."""

    def __init__(self, request: int, pair: int, tokens: int, width: int):
        super().__init__()
        self.tokens, self.project = tokens, BroadcastLinear(request, pair, tokens * width)

    def forward(self, user: Tensor, item: Tensor, request_of: Tensor) -> Tensor:
        return self.project(user, item, request_of).unflatten(1, (self.tokens, -1)).transpose(0, 1)

    def flops(self, pairs: int, requests: int = 1) -> int:
        return self.project.flops(pairs, requests)


class PieceHeads(nn.Module):
    """User part and item part cut into equal pieces, one Linear each; `user` once per request, `item` per candidate."""

    def __init__(self, request: int, pair: int, config: MixFormerConfig):
        super().__init__()
        self.user = PieceTokenizer(request, config.user_heads, config.width)
        self.item = PieceTokenizer(pair, config.item_heads, config.width)

    def forward(self, user: Tensor, item: Tensor, request_of: Tensor) -> Tensor:
        return torch.cat([self.user(user).index_select(1, request_of), self.item(item)])

    def flops(self, pairs: int, requests: int = 1) -> int:
        return self.user.flops(requests) + self.item.flops(pairs)


class TaskHead(nn.Module):
    """Linear(N D, hidden)-SiLU-Linear(hidden, 3) of all heads; the user half of the first layer can be paid per request.

    pooling 'mean' (ablation) reads the mean of the heads.
    """

    def __init__(self, config: MixFormerConfig):
        super().__init__()
        self.mean, self.count = config.pooling == "mean", config.count
        width = config.width
        inputs = (width, width) if self.mean else (config.user_heads * width, config.item_heads * width)
        self.first = nn.Linear(width, config.head_hidden) if self.mean else BroadcastLinear(*inputs, config.head_hidden)
        self.last, self.dropout = nn.Linear(config.head_hidden, TASKS), Dropout(config.dropout)

    def forward(self, user: Tensor, item: Tensor, user_of: Tensor) -> Tensor:
        """user [N_U, B, D], item [N_G, P, D], user_of int64[P] -> logits [P, 3]."""
        if self.mean:
            x = self.first((user.sum(0).index_select(0, user_of) + item.sum(0)) / self.count)
        else:
            x = self.first(user.transpose(0, 1).flatten(1), item.transpose(0, 1).flatten(1), user_of)
        return self.last(self.dropout(F.silu(x)))

    def flops(self, pairs: int, users: int) -> int:
        last = 2 * pairs * self.last.weight.numel()
        if self.mean:
            return last + 2 * pairs * self.first.weight.numel()
        return last + self.first.flops(pairs, users)


class RequestState(NamedTuple):
    """What a request costs once: user part [R, 144] and the keys of every block; when decoupled also the final user
    heads [N_U, R, D] and, per block, what the item heads' mixing reads of them."""

    fields: Tensor
    keys: list[RequestKeys]
    user: Tensor | None
    shared: list[Tensor]


class MixFormer(nn.Module):
    """model(batch) -> logits [P, 3]. `prepare` once per request, `score` per candidate; `recompute` shares K and V only."""

    def __init__(self, config: MixFormerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config, self.encoder = config, RequestEncoder(vocab, item_genres, field=config.field)
        e, whole = self.encoder, config.count * config.width
        self.dropout = Dropout(config.dropout)
        self.events, self.null = nn.Linear(e.event_width, whole), NullEvent(whole)
        if config.heads == "pieces":
            self.heads = PieceHeads(e.request_width, e.pair_width, config)
        else:
            self.heads = JointHeads(e.request_width, e.pair_width, config.count, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.head = TaskHead(config)

    def sequence(self, batch: RequestBatch) -> tuple[Tensor, Tensor, Tensor]:
        """User part [R, 144], raw events S [R, 1 + L, N D] with the null event first, and their mask."""
        r = self.encoder.request(batch)
        return self.dropout(r.flat()), *self.null(self.events(r.events), r.mask)

    def candidate(self, batch: RequestBatch) -> Tensor:
        """Item part [P, 80]."""
        p = self.encoder.pairs(batch)
        return self.dropout(torch.cat([p.candidate, p.cross], dim=1))

    def prepare(self, batch: RequestBatch) -> RequestState:
        fields, events, mask = self.sequence(batch)
        keys = [block.keys(events, mask) for block in self.blocks]
        if not self.config.decoupled:
            return RequestState(fields, keys, None, [])
        user, shared = self.heads.user(fields), []
        for block, own in zip(self.blocks, keys, strict=True):
            user, part = block.user(user, own)
            shared.append(part)
        return RequestState(fields, keys, user, shared)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        """Logits of the candidates of prepared requests; when decoupled only their item heads are computed."""
        if state.user is None:
            return self._all_heads(state, batch)
        x, groups = self.heads.item(self.candidate(batch)), request_groups(batch.request_of, len(state.fields))
        for block, keys, shared in zip(self.blocks, state.keys, state.shared, strict=True):
            x = block.item(x, shared, keys, batch.request_of, groups)
        return self.head(state.user, x, batch.request_of)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def recompute(self, batch: RequestBatch) -> Tensor:
        """The definition, with all heads at one row per candidate and the mask M where decoupled."""
        fields, events, mask = self.sequence(batch)
        keys = [block.keys(events, mask) for block in self.blocks]
        return self._all_heads(RequestState(fields, keys, None, []), batch)

    def _all_heads(self, state: RequestState, batch: RequestBatch) -> Tensor:
        x = self.heads(state.fields, self.candidate(batch), batch.request_of)  # (N, P, D)
        groups = request_groups(batch.request_of, len(state.fields))
        for block, keys in zip(self.blocks, state.keys, strict=True):
            x = block(x, keys, batch.request_of, groups)
        own = torch.arange(x.shape[1], device=x.device)
        return self.head(x[: self.config.user_heads], x[self.config.user_heads :], own)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return decay_groups(self, weight_decay)

    def dense_params(self) -> int:
        """Parameters behind the embedded fields and events."""
        return sum(p.numel() for p in self.parameters()) - sum(p.numel() for p in self.encoder.parameters())

    params = dense_params

    def flops(self, pairs: int, requests: int = 1) -> int:
        """Forward matrix FLOPs behind the embedded fields and events, histories full."""
        events = 2 * requests * self.config.history * self.events.weight.numel()
        blocks = sum(block.flops(pairs, 1 + self.config.history, requests) for block in self.blocks)
        users = requests if self.config.decoupled else pairs
        return events + self.heads.flops(pairs, requests) + blocks + self.head.flops(pairs, users)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Optimizer groups: biases (also those stored [T, 1, D]), norms and the null event do not decay."""
    decayed, kept = [], []
    for name, p in model.named_parameters():
        (kept if p.ndim < 2 or name.endswith("bias") else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
