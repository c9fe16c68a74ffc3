"""OneTrans (arXiv:2510.26104): behaviours and fields in one causal Transformer that serving can cache.

    [S; NS]   S: L_S event tokens, oldest first      NS: L_NS field tokens, candidate included, after the events
    Z  = X + MixedAttention(RMSNorm(X))              QKV: one set for all S, one private set for every NS position
    X' = Z + MixedFFN(RMSNorm(Z))                    the same rule
    layer n reads K_{n-1} S-tokens and emits the newest K_n of them; queries of older ones are never formed

S never reads NS, so the S side runs once per request (`prepare`) and leaves keys and values of every layer behind; a
candidate runs its L_NS rows against them (`score`). `OneTrans.whole` is the same network over one list per pair.
Shapes: R requests, P pairs, T = L_NS, K_0 = L_S.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.onetrans.tokens import GROUPS, MERGES, POSITIONS, AutoSplit, GroupWise, SequenceTokenizer, Tokens
from auto_research.blocks.behaviour_events import request_fields
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import MixedFFN, MixedLinear, PrivateOnlyLinear, SharedLinear
from auto_research.blocks.request_attention import OwnKeys, RequestKeys, request_attention
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.request_groups import Group, request_groups
from auto_research.data.behaviours import BehaviourBatch

TASKS = 3  # engage, like, love
CHOICES = {
    "merge": MERGES,
    "positions": POSITIONS,
    "tokenizer": ("auto", "group"),
    "qkv": ("mixed", "shared"),
    "ffn": ("mixed", "shared"),
    "mask": ("causal", "isolated", "bidirectional"),
    "head": ("all", "last"),
}


@dataclass(frozen=True)
class OneTransConfig:
    """Sizes: history L of each sequence (L_S = 2 L), width D, schedule (K_1, .., K_N), expansion of the FFNs.

    Switches: merge, positions, tokenizer (see tokens.py); qkv and ffn: mixed | shared; mask: causal | isolated (NS
    tokens do not read each other) | bidirectional; pyramid False keeps all L_S tokens in every layer; head: all NS
    tokens or the last; cache False runs the whole list for every pair (bidirectional has to).
    """

    history: int = 50
    field: int = 16
    width: int = 64
    heads: int = 4
    schedule: tuple[int, ...] = (48, 24, 12, 0)
    ns_tokens: int = 6
    expansion: int = 4
    hidden: int = 128
    dropout: float = 0.2
    merge: str = "timestamp_aware"
    positions: str = "newest"
    tokenizer: str = "auto"
    qkv: str = "mixed"
    ffn: str = "mixed"
    mask: str = "causal"
    head: str = "all"
    pyramid: bool = True
    cache: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", tuple(self.schedule))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        lengths = (self.length, *self.schedule)
        if not self.schedule or any(a < b for a, b in pairwise(lengths)) or lengths[-1] < 0:
            raise ValueError(f"schedule {self.schedule} has to fall from at most {self.length} to at least 0")

    @property
    def length(self) -> int:
        """L_S."""
        return 2 * self.history

    @property
    def kept(self) -> tuple[int, ...]:
        """(K_1, .., K_N) in use."""
        return self.schedule if self.pyramid else (self.length,) * len(self.schedule)

    @property
    def tokens(self) -> int:
        """L_NS."""
        return GROUPS if self.tokenizer == "group" else self.ns_tokens


def score_elements(schedule: tuple[int, ...], length: int, tokens: int) -> int:
    """Attention scores per head and pair, sum of (K_n + L_NS)(K_{n-1} + L_NS), before causal halving."""
    read = (length, *schedule[:-1])
    return sum((kept + tokens) * (keys + tokens) for kept, keys in zip(schedule, read, strict=True))


class RequestState(NamedTuple):
    """What one request costs once: fields [R, 9w], and keys and values of every layer or (no cache) the tokens."""

    fields: Tensor
    keys: tuple[RequestKeys, ...]
    tokens: Tokens | None


class Layer(nn.Module):
    """One block: reads `length` S-tokens, emits the last `kept` of them and all NS-tokens."""

    def __init__(self, config: OneTransConfig, kept: int):
        super().__init__()
        width, tokens = config.width, config.tokens
        self.kept, self.heads, self.mask = kept, config.heads, config.mask
        self.norm_attention, self.norm_ffn = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = (SharedLinear if config.qkv == "shared" else MixedLinear)(tokens, width, 3 * width)
        self.out = nn.Linear(width, width)
        ffn = SharedLinear if config.ffn == "shared" else MixedLinear if kept else PrivateOnlyLinear
        self.ffn = MixedFFN(tokens, width, config.expansion * width, config.dropout, linear=ffn)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [R, H, K, dh] of normalised S-tokens [R, K, D]."""
        width, linear = x.shape[2], self.qkv.sequence
        return self._split(F.linear(x, linear.weight[width:], linear.bias[width:]), 2)

    def queries(self, x: Tensor) -> Tensor:
        """q [R, H, K_n, dh] of normalised S-tokens; only those that will be emitted are passed in."""
        width, linear = x.shape[2], self.qkv.sequence
        return self._split(F.linear(x, linear.weight[:width], linear.bias[:width]), 1)[0]

    def _split(self, y: Tensor, parts: int) -> tuple[Tensor, ...]:
        rows, length, width = y.shape
        y = y.reshape(rows, length, parts, self.heads, width // (parts * self.heads))
        return y.permute(2, 0, 3, 1, 4).unbind(0)  # (R, H, L, dh) each

    def emit(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The last rows of a list, x [R, q, D], after reading keys k, v [R, H, K, dh] of the whole list causally."""
        q, visible = self.queries(self.norm_attention(x)), causal_tail(mask, x.shape[1])
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1))
        z = x + self.out(read.transpose(1, 2).flatten(2))
        return z + self.ffn.sequence(self.norm_ffn(z))

    def sequence(self, x: Tensor, mask: Tensor) -> tuple[Tensor, RequestKeys]:
        """S side: [R, K_{n-1}, D] -> the newest [R, K_n, D], and the keys that candidates read."""
        k, v = self.keys_values(self.norm_attention(x))
        tail = x[:, x.shape[1] - min(self.kept, x.shape[1]) :]
        return (self.emit(tail, k, v, mask) if self.kept else tail), RequestKeys(k, v, mask)

    def candidates(self, x: Tensor, keys: RequestKeys, request_of: Tensor, groups: list[Group]) -> Tensor:
        """NS side: [P, T, D] -> [P, T, D]; keys of a request are read in place by all its pairs."""
        tokens = x.shape[1]
        q, k, v = self._split(self.qkv.private(self.norm_attention(x)), 3)  # (P, H, T, dh) each
        own = OwnKeys(k, v, ns_visible(tokens, self.mask, x.device))
        read = request_attention(q, keys.k, keys.v, request_of, mask=keys.mask, own=own, groups=groups)
        z = x + self.out(read.transpose(1, 2).flatten(2).to(x.dtype))
        return z + self.ffn.private(self.norm_ffn(z))

    def whole(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One list per pair: [P, K_{n-1} + T, D], mask bool[P, K_{n-1}] -> [P, K_n + T, D], and the tail of the mask."""
        length, width = mask.shape[1], x.shape[2]
        tokens, kept = x.shape[1] - length, min(self.kept, length)
        normed = self.norm_attention(x)
        k, v = self.keys_values(normed[:, :length])
        own_q, own_k, own_v = self._split(self.qkv.private(normed[:, length:]), 3)
        q = torch.cat([self.queries(normed[:, length - kept : length]), own_q], dim=2)
        k, v = torch.cat([k, own_k], dim=2), torch.cat([v, own_v], dim=2)
        visible = whole_visible(mask, kept, tokens, self.mask)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1))
        z = x[:, length - kept :] + self.out(read.transpose(1, 2).reshape(len(x), kept + tokens, width))
        normed = self.norm_ffn(z)
        private = self.ffn.private(normed[:, kept:])
        done = torch.cat([self.ffn.sequence(normed[:, :kept]), private], dim=1) if kept else private
        return z + done, mask[:, length - kept :]


def causal_tail(mask: Tensor, rows: int) -> Tensor:
    """Who reads whom among S-tokens: bool[R, rows, K] for the last `rows` of K; a row always sees itself."""
    length = mask.shape[1]
    position = torch.arange(length, device=mask.device)
    query = position[length - rows :, None]
    return ((position <= query) & mask.unsqueeze(1)) | (position == query)


def ns_visible(tokens: int, kind: str, device: torch.device) -> Tensor:
    """bool[T, T]: NS_i reads NS_1..NS_i, only itself (isolated), or all (bidirectional)."""
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    if kind == "isolated":
        return torch.eye(tokens, dtype=torch.bool, device=device)
    return everything.tril() if kind == "causal" else everything


def whole_visible(mask: Tensor, kept: int, tokens: int, kind: str) -> Tensor:
    """bool[P, kept + T, K + T] over the list [S; NS], offset because the first K - kept rows have no query."""
    pairs, length = mask.shape
    visible = mask.new_zeros(pairs, kept + tokens, length + tokens)
    if kind == "bidirectional":
        itself = torch.eye(length, dtype=torch.bool, device=mask.device)[length - kept :]
        visible[:, :kept, :length] = mask.unsqueeze(1) | itself
        visible[:, :kept, length:] = True
    else:
        visible[:, :kept, :length] = causal_tail(mask, kept)
    visible[:, kept:, :length] = mask.unsqueeze(1)
    visible[:, kept:, length:] = ns_visible(tokens, kind, mask.device)
    return visible


class OneTrans(nn.Module):
    """The ranker: model(batch) -> logits [P, 3] for engage, like, love. Takes batches of a `BehaviourTable`."""

    def __init__(self, config: OneTransConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field)
        encoder = self.encoder
        self.sequence_tokens = SequenceTokenizer(
            encoder.event_width, config.width, config.history, merge=config.merge, positions=config.positions
        )
        sizes = (encoder.request_width, encoder.pair_width)
        auto = config.tokenizer == "auto"
        self.ns_tokens = AutoSplit(*sizes, config.tokens, config.width) if auto else GroupWise(*sizes, config.width)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config, kept) for kept in config.kept)
        self.norm = nn.RMSNorm(config.width)
        inputs = config.width * (config.tokens if config.head == "all" else 1)
        self.head = nn.Sequential(nn.Linear(inputs, config.hidden), nn.GELU(), nn.Linear(config.hidden, TASKS))

    def tokens(self, batch: BehaviourBatch) -> Tokens:
        """S-tokens of a batch's requests."""
        return self.sequence_tokens(self.encoder, batch)

    def cached(self) -> bool:
        """Whether the S side runs once per request."""
        return self.config.cache and self.config.mask != "bidirectional"

    def prepare(self, batch: BehaviourBatch) -> RequestState:
        """The S pass, once per request: fields and, per layer, the keys and values that candidates read."""
        fields, tokens = self.dropout(request_fields(self.encoder, batch)), self.tokens(batch)
        if not self.cached():
            return RequestState(fields, (), tokens)
        return RequestState(fields, self.sequence_keys(tokens.x, tokens.mask), None)

    def sequence_keys(self, x: Tensor, mask: Tensor) -> tuple[RequestKeys, ...]:
        """Keys of every layer from S-tokens x [R, L_S, D]."""
        keys = []
        for layer in self.layers:
            x, found = layer.sequence(x, mask)
            mask = mask[:, mask.shape[1] - x.shape[1] :]
            keys.append(found)
        return tuple(keys)

    def score(self, state: RequestState, batch: BehaviourBatch) -> Tensor:
        """Logits [P, 3] of the batch's candidates for prepared requests."""
        x = self.candidate_tokens(state.fields, batch)
        if state.tokens is not None:
            return self.whole(state.tokens, x, batch.request_of)
        groups = request_groups(batch.request_of, len(state.fields))
        for layer, keys in zip(self.layers, state.keys, strict=True):
            x = layer.candidates(x, keys, batch.request_of, groups)
        return self.logits(x)

    def candidate_tokens(self, fields: Tensor, batch: BehaviourBatch) -> Tensor:
        """NS-tokens [P, T, D]."""
        pair = self.encoder.pairs(batch)
        own = self.dropout(torch.cat([pair.candidate, pair.cross], dim=1))  # (P, 5w)
        return self.ns_tokens(fields, own, batch.request_of)

    def whole(self, tokens: Tokens, x: Tensor, request_of: Tensor) -> Tensor:
        """Logits [P, 3] from the list [S; NS] of every pair: what caching is compared with."""
        mask = tokens.mask[request_of]
        x = torch.cat([tokens.x[request_of], x], dim=1)  # (P, L_S + T, D)
        for layer in self.layers:
            x, mask = layer.whole(x, mask)
        return self.logits(x[:, x.shape[1] - self.config.tokens :])

    def uncached(self, batch: BehaviourBatch) -> Tensor:
        """model(batch) with the S side computed anew for every candidate."""
        fields = self.dropout(request_fields(self.encoder, batch))
        return self.whole(self.tokens(batch), self.candidate_tokens(fields, batch), batch.request_of)

    def logits(self, x: Tensor) -> Tensor:
        """Heads on the NS tokens [P, T, D] of the last layer."""
        x = self.norm(x)
        return self.head(x.flatten(1) if self.config.head == "all" else x[:, -1])

    def forward(self, batch: BehaviourBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def dense_params(self) -> int:
        """Parameters behind tables and field projections."""
        return sum(p.numel() for name, p in self.named_parameters() if not name.startswith("encoder."))

    def cache_bytes(self, element: int = 4) -> int:
        """Keys and values kept per user, L_S tokens long."""
        return 2 * element * self.config.width * sum((self.config.length, *self.config.kept[:-1]))

    def flops(self, pairs: int) -> int:
        """Forward matrix FLOPs of the layers for one request with `pairs` candidates, cached."""
        total, length, c = 0, self.config.length, self.config
        for layer in self.layers:
            kept, width, tokens = layer.kept, c.width, c.tokens
            rows, keys = pairs * tokens, length + tokens
            total += 2 * width * width * (2 * length + 2 * kept + 4 * rows)  # K,V of all, Q and output of emitted rows
            total += 4 * width * (kept * length + rows * keys)  # scores and weighted sums
            total += layer.ffn.flops(kept, pairs)
            length = kept
        return total
