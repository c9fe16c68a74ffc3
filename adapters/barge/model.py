"""BARGE (arXiv:2607.21028): two semantic ids per item, item structure restored in the encoder, paths re-ranked.

    x_l^(i)    = MLP([E^A_l(c^A_il) ; E^B_l(c^B_il)]) + level_l + slot_i           L' tokens per item
    z^(i)      = LN(CrossAttn(q, X^(i), X^(i)));   zhat = MLP(z)
    xhat_l^(i) = x_l^(i) + sigmoid(W_g [x_l^(i) ; zhat^(i)] + b_g) * zhat^(i)      item-context-aware attention
    L          = L_NTP^A + L_NTP^B + w sum_{c,l} L_HPR^{c,l} / (L' - 1)

One encoder, two decoders. All items of a window are targets: the encoder is open inside an item and causal between
items, and what follows item t is spelled from items <= t.

Shapes: B windows, n items, L' codes, N targets, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.biased_transformer import BiasedTransformer
from auto_research.blocks.branch_cache import Memory, OwnCache
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDSeq2Seq
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.precision import float32_region
from auto_research.train.sid import SIDBatch

START_TAU, LOWEST_TAU, HIGHEST_TAU = 0.1, 0.03, 1.0
NO_NEGATIVE = -1e4


@dataclass(frozen=True)
class BargeConfig:
    """layers: of each of the two decoders.  length: items of a history.

    ica: item-context-aware attention.  hpr: weight of the path loss, 0 builds no towers.  fused: one token for the two
    codes of a level, else one each (concat_tokens).  disliked: the user's items of low rating are further negatives.
    """

    width: int = 64
    heads: int = 4
    encoder_layers: int = 2
    layers: int = 1
    hidden: int = 256
    dropout: float = 0.1
    length: int = 20
    ica: bool = True
    hpr: float = 0.1
    fused: bool = True
    disliked: bool = False

    def sid(self) -> SIDConfig:
        """Sizes of a decoder; its slots are those of the targets."""
        return SIDConfig(
            self.width, self.heads, 0, self.layers, self.hidden, self.dropout, history=self.length, prefix=0
        )


class ItemContextAttention(nn.Module):
    """Tokens of items [M, T, D] -> the same with their item's context written back; items never meet."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.to_query, self.to_pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        for layer in (self.to_pair, self.out):  # the norm would make a usual bias the summary of every item
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gate = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        zhat = self.mlp(self.summary(x)).unsqueeze(1).expand_as(x)
        return x + torch.sigmoid(self.gate(torch.cat([x, zhat], dim=2))) * zhat

    def summary(self, x: Tensor) -> Tensor:
        """z [M, D]: what one learned query reads from the tokens of its item."""
        k, v = self.to_pair(x).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (M, H, T, dh)
        q = self.to_query(self.query).view(1, self.heads, 1, -1).expand(len(x), -1, -1, -1)
        read = F.scaled_dot_product_attention(q.to(k.dtype), k, v).flatten(1)
        return self.norm(self.out(read))


class PathReranker(nn.Module):
    """Two towers and a temperature per level: u = unit(W_ctx^l h_0), v = unit(W_path^l p^(l))."""

    def __init__(self, width: int, levels: int):
        super().__init__()
        self.levels = levels
        self.context = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(levels))
        self.path = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(levels))
        self.log_tau = nn.Parameter(torch.full((levels,), math.log(START_TAU)))

    def tau(self) -> Tensor:
        """float32[levels] in [.03, 1]."""
        return self.log_tau.float().clamp(math.log(LOWEST_TAU), math.log(HIGHEST_TAU)).exp()

    def u(self, level: int, h: Tensor) -> Tensor:
        """Unit vectors float32 of contexts [.., D]."""
        return _unit(self.context[level](h))

    def v(self, level: int, path: Tensor) -> Tensor:
        """Unit vectors float32 of path embeddings [.., D]."""
        return _unit(self.path[level](path))

    def loss(
        self,
        h: Tensor,
        paths: Tensor,
        codes: Tensor,
        user: Tensor,
        further: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """sum_l L_HPR^l of contexts h [N, D], path embeddings [N, levels, D] of codes int64 [N, >= levels].

        user: int64[N]; what a user takes at one step is no negative of the same user at another.
        further: path embeddings [N, M, levels, D], codes [N, M, >= levels] and bool[N, M] of more negatives of a row.
        """
        total = h.new_zeros((), dtype=torch.float32)
        same = torch.ones(len(h), len(h), dtype=torch.bool, device=h.device)
        own = user[:, None] == user[None, :]
        worse_same = None if further is None else torch.ones_like(further[2])
        for level, tau in enumerate(self.tau()):
            same = same & (codes[:, None, level] == codes[None, :, level])
            u, v = self.u(level, h), self.v(level, paths[:, level])
            worse = None
            if further is not None:
                worse_same = worse_same & (further[1][..., level] == codes[:, None, level])
                worse = (self.v(level, further[0][:, :, level]), further[2] & ~worse_same)
            total = total + path_contrast(u, v, tau, same | own, worse)
        return total


def path_contrast(
    u: Tensor, v: Tensor, tau: Tensor | float, same: Tensor, worse: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """(CE(U V^T / tau, I) + CE(V U^T / tau, I)) / 2, scalar; pairs in same bool[N, N] are no negatives.

    worse: unit vectors [N, M, D] and bool[N, M], more columns of the first term.
    """
    with float32_region(u.device):
        own = torch.eye(len(u), dtype=torch.bool, device=u.device)
        scores = (u @ v.t() / tau).masked_fill(same & ~own, NO_NEGATIVE)
        target = torch.arange(len(u), device=u.device)
        forward = scores
        if worse is not None:
            more = (worse[0] @ u.unsqueeze(2)).squeeze(2) / tau
            forward = torch.cat([scores, more.masked_fill(~worse[1], NO_NEGATIVE)], dim=1)
        return (F.cross_entropy(forward, target) + F.cross_entropy(scores.t(), target)) / 2


class Channel(SIDSeq2Seq):
    """Decoder, token table and path reranker of one semantic id; the encoder half is the model's own.

    Its slots tell the decoder which item of a window it follows; without one a target follows the newest.
    """

    def __init__(self, table: SIDTable, vocab: SIDVocab, config: BargeConfig):
        super().__init__(vocab, config.sid())
        self.encoder = self.level = self.front = None
        self.reranker = PathReranker(config.width, vocab.levels - 1) if config.hpr else None
        self.register_buffer("tokens", torch.from_numpy(vocab.item_tokens(table)), persistent=False)
        self.register_buffer("codes", torch.from_numpy(table.codes.copy()), persistent=False)

    def spell(self, tokens: Tensor, ctx: Memory, own: OwnCache | None = None, **options) -> tuple[Tensor, OwnCache]:
        return self.decode(tokens, ctx, own, **{"extra": self.slot[0], **options})

    def ntp_loss(self, states: Tensor, codes: Tensor) -> Tensor:
        """L_NTP of states [N, L', D] and codes [N, L']: mean over targets and codes of - log p."""
        return F.cross_entropy(self.logits(states, 0).float().flatten(0, 1), (codes + self.offset).flatten())

    def paths(self, codes: Tensor) -> Tensor:
        """p^(1) .. p^(l) of codes int64 [.., l]: [.., l, D], p^(l) = sum_{j <= l} E(c_j)."""
        return self.embedding(codes.clamp(min=0) + self.offset[: codes.shape[-1]]).cumsum(-2)

    def opening(self, memory: Memory) -> Tensor:
        """h_0 [B, D]: the decoder's state at BOS."""
        bos = torch.full((len(memory.mask), 1, 1), self.vocab.bos, device=memory.mask.device)
        return self.spell(bos, memory)[0][:, 0, 0]


class Barge(nn.Module):
    """Histories int64[B, n] (left-padded with 0, newest last) -> one memory per channel; see the module's text.

    tables: semantic ids of the two channels, with equally many levels.  disliked: int64[n_users + 1, M] items that are
    negatives of a user's paths, 0 = none; needed where config.disliked says so.
    """

    def __init__(self, tables: Sequence[SIDTable], config: BargeConfig, disliked: Tensor | None = None):
        super().__init__()
        if len({table.levels for table in tables}) != 1:
            raise ConfigError("the channels of a model must have equally many levels")
        if config.disliked and disliked is None:
            raise ConfigError("disliked items are asked for but not given")
        self.config, width = config, config.width
        self.channels = nn.ModuleList(Channel(table, SIDVocab.of(table), config) for table in tables)
        self.levels = tables[0].levels
        self.per_item = self.levels if config.fused else self.levels * len(tables)
        std = config.sid().std
        self.slot = nn.Parameter(torch.randn(config.length, width) * std)
        self.level = nn.Parameter(torch.randn(self.per_item, width) * std)
        if config.fused:
            self.fuse = nn.Sequential(nn.Linear(len(tables) * width, width), nn.GELU(), nn.Linear(width, width))
            for layer in (self.fuse[0], self.fuse[2]):  # usual biases are as large as what comes of the codes
                nn.init.xavier_normal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        self.ica = ItemContextAttention(width, config.heads) if config.ica else None
        self.encoder = BiasedTransformer(config.sid().stack(config.encoder_layers, "none"))
        self.dropout = Dropout(config.dropout)
        if config.disliked:
            self.register_buffer("disliked", disliked, persistent=False)

    @property
    def sid(self) -> Channel:
        """The first channel: its table is the one that `train.sid` checks."""
        return self.channels[0]

    def item_tokens(self, items: Tensor) -> Tensor:
        """Encoder input [B, n, T, D] of items [B, n]; zero for padding."""
        parts = [channel.embedding(channel.tokens[items]) for channel in self.channels]  # each (B, n, L', D)
        x = self.fuse(torch.cat(parts, dim=3)) if self.config.fused else torch.cat(parts, dim=2)
        x = x + self.level + self.slot[_back(items)].unsqueeze(1)
        if self.ica is not None:
            x = self.ica(x.flatten(0, 1).contiguous()).view_as(x)
        return x * (items > 0)[..., None, None]

    def context(self, items: Tensor, user: Tensor | None = None) -> tuple[Memory, ...]:
        """What each channel's decoder reads."""
        place = self._place(items)
        mask = (items > 0).repeat_interleave(self.per_item, dim=1)
        visible = (place <= place.unsqueeze(1)).expand(len(items), -1, -1)
        states = self.encoder(self.dropout(self.item_tokens(items).flatten(1, 2)), mask, visible=visible)
        return tuple(channel.remember(states, mask) for channel in self.channels)

    def training_loss(self, batch: SIDBatch) -> Tensor:
        """L of windows: every real target of the batch counts once."""
        memories = self.context(batch.items)
        real = batch.target > 0
        columns = torch.arange(batch.items.shape[1], device=real.device)
        visible = (self._place(batch.items) <= columns.unsqueeze(1)).expand(len(real), -1, -1)  # (B, n, S)
        user = batch.user.unsqueeze(1).expand_as(real)[real]  # (N,)
        further = self.disliked[user] if self.config.disliked else None  # (N, M)
        loss = 0.0
        for channel, memory in zip(self.channels, memories, strict=True):
            codes = channel.codes[batch.target]
            extra = channel.slot[_back(batch.items)].unsqueeze(1)
            states, _ = channel.spell(channel.target_tokens(codes), memory, visible=visible, extra=extra)
            states, codes = states[real], codes[real]  # (N, L', D), (N, L')
            loss = loss + channel.ntp_loss(states, codes)
            if channel.reranker is not None:
                loss = loss + self.config.hpr * self._path_loss(channel, states[:, 0], codes, user, further)
        return loss

    def _path_loss(self, channel: Channel, h: Tensor, codes: Tensor, user: Tensor, further: Tensor | None) -> Tensor:
        levels, worse = channel.reranker.levels, None
        if further is not None:
            other = channel.codes[further]  # (N, M, L')
            worse = (channel.paths(other[..., :levels]), other, further > 0)
        return channel.reranker.loss(h, channel.paths(codes[:, :levels]), codes, user, worse) / levels

    def _place(self, items: Tensor) -> Tensor:
        """int64[S]: item column of every source token."""
        return torch.arange(items.shape[1], device=items.device).repeat_interleave(self.per_item)


def _back(items: Tensor) -> Tensor:
    """Slots of the columns of items, 0 = newest."""
    return torch.arange(items.shape[1] - 1, -1, -1, device=items.device)


def _unit(x: Tensor) -> Tensor:
    with float32_region(x.device):
        return F.normalize(x.float(), dim=-1, eps=1e-6)
