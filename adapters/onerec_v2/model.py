"""OneRec-V2's lazy decoder, and the two generators it is compared with, over one kind of context features.

    C = MLP(tokens) in R[B, T, S_kv L_kv, G_kv, d_head]
    k_j = RMSNorm(C[:, :, S_kv j]),  v_j = RMSNorm(C[:, :, S_kv j + 1])  or  v_j = k_j with S_kv = 1
    h <- h + W_o Attn(W_q RMSNorm(h), k_{j(l)}, v_{j(l)});  h <- h + SelfAttn(RMSNorm(h));  h <- h + FFN(RMSNorm(h))
    j(l) = floor(l L_kv / N_layer)

Layers never write to the context and have no projections of it, so it is made once for all layers and all beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.onerec_v2.events import GAPS, RATINGS, ContextBatch
from auto_research.blocks.branch_cache import OwnCache
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.private_projection import SwiGLU
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDDecoder, SIDModel, SIDSeq2Seq, token_logprob

USER_TOKENS = 4
ITEM_WIDTH, CODE_WIDTH, GENRE_WIDTH, SMALL_WIDTH = 32, 16, 16, 8
KINDS = ("lazy", "encoder_decoder", "classic")


@dataclass(frozen=True)
class OneRecV2Config:
    """kind: 'lazy', 'encoder_decoder' (half the layers each side) or 'classic' (one causal stack).

    sets L_kv (0: one for each layer) and per_set S_kv (1: K = V): pairs of keys and values.  groups G_kv of the context's heads; heads H_q.
    hidden: of the SwiGLU.  feature_hidden: of the MLP over event features.  user_slots: hashed users.
    """

    kind: str = "lazy"
    width: int = 64
    heads: int = 4
    layers: int = 4
    hidden: int = 172
    head_width: int = 16
    sets: int = 1
    per_set: int = 1
    groups: int = 2
    feature_hidden: int = 64
    history: int = 50
    user_slots: int = 1024
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.sets == 0:
            object.__setattr__(self, "sets", self.layers)
        if self.kind not in KINDS or self.per_set not in (1, 2):
            raise ValueError(f"unknown kind {self.kind!r} or S_kv {self.per_set}")
        if self.heads % self.groups or not 1 <= self.sets <= self.layers:
            raise ValueError(f"{self.heads} heads in {self.groups} groups, {self.sets} sets for {self.layers} layers")

    @property
    def context_width(self) -> int:
        """d_ctx = S_kv L_kv G_kv d_head for the lazy decoder, else the model's width."""
        return self.per_set * self.sets * self.groups * self.head_width if self.kind == "lazy" else self.width


class ContextFeatures(nn.Module):
    """Context tokens [B, 4 + n, d_ctx] of user fields and events; every kind of token has its own MLP."""

    def __init__(self, config: OneRecV2Config, table: SIDTable, genres: Tensor, fields: tuple[int, int, int]):
        super().__init__()
        items, levels = table.n_items + 1, table.levels
        self.item = nn.Embedding(items, ITEM_WIDTH)
        self.code = nn.ModuleList(nn.Embedding(size + 1, CODE_WIDTH) for size in table.sizes)
        self.genre = nn.Linear(genres.shape[1], GENRE_WIDTH, bias=False)
        self.rating = nn.Embedding(RATINGS, SMALL_WIDTH)
        self.gap = nn.Embedding(GAPS, SMALL_WIDTH)
        self.recency = nn.Parameter(torch.empty(config.history, SMALL_WIDTH))
        width = ITEM_WIDTH + levels * CODE_WIDTH + GENRE_WIDTH + 3 * SMALL_WIDTH
        self.event = _mlp(width, config)
        self.field = nn.ModuleList(nn.Embedding(size, ITEM_WIDTH) for size in (*fields, config.user_slots))
        self.user = nn.ModuleList(_mlp(ITEM_WIDTH, config) for _ in range(USER_TOKENS))
        for table_of in (self.item, *self.code, self.rating, self.gap, *self.field):
            nn.init.normal_(table_of.weight, std=0.1)
        nn.init.normal_(self.recency, std=0.1)
        self.register_buffer("codes", torch.from_numpy(table.codes + 1), persistent=False)  # 0 is padding
        share = genres / genres.sum(1, keepdim=True).clamp(min=1)
        self.register_buffer("genres", share, persistent=False)
        # The other generators drop what they are given themselves.
        self.dropout = Dropout(config.dropout if config.kind == "lazy" else 0.0)

    def events(self, batch: ContextBatch) -> Tensor:
        """Feature vectors [B, n, 120] of events: item, codes, genres, rating, pause, recency."""
        codes = self.codes[batch.item]  # (B, n, L)
        rows, length = batch.item.shape
        parts = [self.item(batch.item)]
        parts += [code(codes[..., level]) for level, code in enumerate(self.code)]
        parts += [self.genre(self.genres[batch.item]), self.rating(batch.rating), self.gap(batch.gap)]
        return torch.cat([*parts, self.recency[-length:].expand(rows, -1, -1)], dim=-1)

    def forward(self, batch: ContextBatch) -> tuple[Tensor, Tensor]:
        """Tokens [B, 4 + n, d_ctx] and mask bool; the 4 user tokens are always there."""
        users = [
            mlp(table(batch.fields[:, n])) for n, (mlp, table) in enumerate(zip(self.user, self.field, strict=True))
        ]
        tokens = torch.cat([torch.stack(users, dim=1), self.event(self.dropout(self.events(batch)))], dim=1)
        known = batch.item > 0
        return tokens, torch.cat([known.new_ones(len(known), USER_TOKENS), known], dim=1)


def _mlp(inputs: int, config: OneRecV2Config) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, config.feature_hidden), nn.GELU(), nn.Linear(config.feature_hidden, config.context_width)
    )


class LazyContext(NamedTuple):
    """Keys and values [B, G_kv, T, d_head] of every KV set and the mask bool[B, T]; never changed by the decoder."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor

    def bytes(self) -> int:
        """Memory of keys and values; a tensor that is both counts once."""
        return sum({id(t): t.numel() * t.element_size() for t in (*self.keys, *self.values)}.values())


class ContextProcessor(nn.Module):
    """Cuts context tokens [B, T, d_ctx] into normalised keys and values, without any projection."""

    def __init__(self, config: OneRecV2Config):
        super().__init__()
        self.config = config
        self.key_norms = nn.ModuleList(nn.RMSNorm(config.head_width) for _ in range(config.sets))
        self.value_norms = nn.ModuleList(
            nn.RMSNorm(config.head_width) for _ in range(config.sets if config.per_set == 2 else 0)
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> LazyContext:
        c, config = self.config, self.config
        parts = tokens.unflatten(2, (c.per_set * c.sets, c.groups, c.head_width)).permute(2, 0, 3, 1, 4)
        keys = tuple(self.key_norms[j](parts[j * config.per_set]).contiguous() for j in range(config.sets))
        if config.per_set == 1:
            return LazyContext(keys, keys, mask)
        values = tuple(norm(parts[2 * j + 1]).contiguous() for j, norm in enumerate(self.value_norms))
        return LazyContext(keys, values, mask)


class LazyBlock(nn.Module):
    """One layer: attention to the given context, causal attention among the target's tokens, SwiGLU."""

    def __init__(self, config: OneRecV2Config):
        super().__init__()
        width, inside = config.width, config.heads * config.head_width
        self.heads, self.groups = config.heads, config.groups
        self.norm_cross, self.norm_self, self.norm_ffn = (nn.RMSNorm(width) for _ in range(3))
        self.query, self.cross_out = nn.Linear(width, inside, bias=False), nn.Linear(inside, width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.ffn = SwiGLU(width, config.hidden)
        self.dropout = Dropout(config.dropout)

    def cross(self, h: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """h [B, w, t, D] after reading k, v [B, G, T, dh]; query head h reads group floor(h G / H)."""
        batch, width, length, _ = h.shape
        q = self.query(self.norm_cross(h)).reshape(batch, width * length, self.groups, self.heads // self.groups, -1)
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, G, H/G * w t, dh): heads of a group are more queries
        read = F.scaled_dot_product_attention(q.contiguous(), k, v, attn_mask=mask[:, None, None, :])
        read = read.unflatten(2, (self.heads // self.groups, width * length)).permute(0, 3, 1, 2, 4).flatten(2)
        return h + self.dropout(self.cross_out(read.to(h.dtype)).view_as(h))

    def own(self, h: Tensor, cache: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """h after causal attention among the branch's tokens; its keys and values [B, w, H, t, dh], the cached first."""
        batch, width, length, _ = h.shape
        heads = self.qkv.in_features // self.heads
        qkv = self.qkv(self.norm_self(h)).reshape(batch, width, length, 3, self.heads, heads)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)  # (B, w, H, t, dh) each
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=3), torch.cat([cache[1], v], dim=3)
        known = k.shape[3] - length
        causal = torch.ones(length, k.shape[3], dtype=torch.bool, device=h.device).tril(known)
        read = F.scaled_dot_product_attention(*(x.flatten(0, 1).contiguous() for x in (q, k, v)), attn_mask=causal)
        read = read.transpose(1, 2).flatten(2).view_as(h)
        return h + self.dropout(self.out(read.to(h.dtype))), k, v

    def feed(self, h: Tensor) -> Tensor:
        return h + self.dropout(self.ffn(self.norm_ffn(h)))


class LazyDecoder(SIDModel):
    """Spells codes from a LazyContext; heads per level."""

    def __init__(self, vocab: SIDVocab, sizes: SIDConfig, config: OneRecV2Config):
        super().__init__(vocab, sizes)
        self.lazy = config
        self.blocks = nn.ModuleList(LazyBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)

    def kv_set(self, layer: int) -> int:
        """j(l) = floor(l L_kv / N_layer)."""
        return layer * self.lazy.sets // self.lazy.layers

    def spell(
        self, tokens: Tensor, ctx: LazyContext, own: OwnCache | None = None, **options
    ) -> tuple[Tensor, OwnCache]:
        h = self.dropout(self.embedding(tokens))  # (B, w, t, D)
        keys, values = [], []
        for n, block in enumerate(self.blocks):
            j = self.kv_set(n)
            h = block.cross(h, ctx.keys[j], ctx.values[j], ctx.mask)
            h, k, v = block.own(h, None if own is None else (own.keys[n], own.values[n]))
            h = block.feed(h)
            keys.append(k), values.append(v)
        return self.norm(h), OwnCache(tuple(keys), tuple(values))


class OneRecV2(nn.Module):
    """Context features and a generator `sid` of one of the three kinds.

    genres: float32[n_items + 1, G].  fields: sizes of the gender, age and occupation tables, padding included.
    """

    def __init__(self, config: OneRecV2Config, table: SIDTable, genres: Tensor, fields: tuple[int, int, int]):
        super().__init__()
        self.config = config
        vocab = SIDVocab.of(table)
        self.features = ContextFeatures(config, table, genres, fields)
        if config.kind == "lazy":
            self.process = ContextProcessor(config)
            self.sid: SIDModel = LazyDecoder(vocab, _sizes(config), config)
        elif config.kind == "encoder_decoder":
            half = config.layers // 2
            self.sid = SIDSeq2Seq(vocab, _sizes(config, encoder_layers=half, layers=config.layers - half, history=1))
        else:
            self.sid = SIDDecoder(vocab, _sizes(config, layers=config.layers, positions=0))
        self.register_buffer("item_codes", torch.from_numpy(table.codes), persistent=False)

    def read(self, batch: ContextBatch):
        """What the generator starts from, once per context."""
        tokens, mask = self.features(batch)
        if self.config.kind == "lazy":
            return self.process(tokens, mask)
        if self.config.kind == "encoder_decoder":
            return self.sid.encode(tokens, mask)
        return self.sid(tokens, mask=mask)[1]

    def token_logp(self, batch: ContextBatch, target: Tensor) -> Tensor:
        """log p of every code of items int64[B] after their contexts, float32[B, L]; dropout as the mode is."""
        return token_logprob(self.sid, self.read(batch), self.item_codes[target].unsqueeze(1)).squeeze(1)

    def logp(self, batch: ContextBatch, target: Tensor) -> Tensor:
        """log pi(target | context) float32[B]: sum over the codes."""
        return self.token_logp(batch, target).sum(1)


def _sizes(config: OneRecV2Config, **more) -> SIDConfig:
    return SIDConfig(
        width=config.width, heads=config.heads, hidden=config.hidden, dropout=config.dropout, norm="rms",
        ffn="swiglu", head="level", **{"encoder_layers": 0, "layers": config.layers, **more},
    )  # fmt: skip


def lazy_flops(config: OneRecV2Config, sizes: tuple[int, ...], genres: int) -> tuple[int, int]:
    """Forward FLOPs of one training sample of the lazy decoder with a full context: (context part, all).

    Products only, a multiply and an add as two: features and MLPs of n events and 4 user tokens, then for L target
    tokens and every layer W_q, W_o, attention over T keys, self-attention, SwiGLU, and the heads.
    """
    events, levels = config.history, len(sizes)
    width = ITEM_WIDTH + levels * CODE_WIDTH + GENRE_WIDTH + 3 * SMALL_WIDTH
    mlp = config.feature_hidden * config.context_width
    context = 2 * events * (genres * GENRE_WIDTH + width * config.feature_hidden + mlp)
    context += 2 * USER_TOKENS * (ITEM_WIDTH * config.feature_hidden + mlp)
    inside, d = config.heads * config.head_width, config.width
    layer = 2 * levels * (2 * d * inside + 4 * d * d + 3 * d * config.hidden)
    layer += 4 * levels * inside * (USER_TOKENS + events) + 4 * levels * levels * d
    return context, context + config.layers * layer + 2 * d * sum(sizes)
