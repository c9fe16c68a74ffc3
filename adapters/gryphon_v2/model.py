"""Gryphon-v2 (arXiv:2608.06213): one history encoder for a generator of semantic ids and for a ranker of items.

    H = Enc(events)                                                     once per request
    L_NTP = - sum_l log p(c_l | c_<l, H)                                decoder over the semantic id of the next positive
    a_i = E(i) + T text_i + sum_l e_l(c_l(i)),   s(u, i) = w . LN(x + FFN(x)),  x = a_i + CrossAttn(a_i, H, H)
    list = top10 of s(u, i) over the items of the semantic ids that a beam returns

Shapes: B requests, n events, C candidates, I items, D width, L code levels.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adapters.gryphon_v2.events import EventWindow
from auto_research.blocks.beam_search import constrained_beam
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.blocks.branch_cache import Memory
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.request_attention import RequestCrossAttention, RequestKeys
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDSeq2Seq, SIDStep, sid_loss
from auto_research.data.prefix import LOG_BUCKETS
from auto_research.metrics.cost import count_params
from auto_research.runtime.precision import float32_region

START_SCALE = 0.08
RATINGS = 6
NEVER = -torch.inf


@dataclass(frozen=True)
class GryphonConfig:
    """Sizes and switches.

    history: events read.  hidden: inner width of feed-forward layers.  ranker: False leaves out the ranking module.
    separate: the ranking module has tables and an encoder of its own (a cascade).  decoder: sid, or dot (a retriever
    h_last . x_i in place of the generator).
    """

    width: int = 64
    heads: int = 4
    encoder_layers: int = 2
    layers: int = 2
    hidden: int = 256
    dropout: float = 0.2
    history: int = 50
    ranker: bool = True
    separate: bool = False
    decoder: str = "sid"

    def __post_init__(self) -> None:
        if self.decoder not in ("sid", "dot"):
            raise ValueError(f"unknown decoder {self.decoder!r}")

    def generator(self) -> SIDConfig:
        dot = self.decoder == "dot"
        return SIDConfig(
            self.width, self.heads, self.encoder_layers, 0 if dot else self.layers, self.hidden, self.dropout,
            ffn="gelu", head="tied" if dot else "level", history=self.history, std=START_SCALE,
        )  # fmt: skip


class ItemTable(nn.Module):
    """E(i) + T text_i for the whole catalogue: [I + 1, D], row 0 (padding) zero."""

    def __init__(self, text: Tensor, width: int):
        super().__init__()
        self.register_buffer("text", text.float(), persistent=False)
        self.item = nn.Embedding(len(text), width)
        self.project = nn.Linear(text.shape[1], width, bias=False)
        nn.init.normal_(self.item.weight, std=START_SCALE)
        self.register_buffer("real", (torch.arange(len(text)) > 0).unsqueeze(1), persistent=False)

    def forward(self) -> Tensor:
        return (self.item.weight + self.project(self.text)) * self.real


class EventTokens(nn.Module):
    """Token of an event: item + rating + log2 gap + place counted from the newest; [B, n, D]."""

    def __init__(self, history: int, width: int):
        super().__init__()
        self.rating, self.gap = nn.Embedding(RATINGS, width), nn.Embedding(LOG_BUCKETS, width)
        self.position = nn.Parameter(torch.randn(history, width) * START_SCALE)
        for table in (self.rating, self.gap):
            nn.init.normal_(table.weight, std=START_SCALE)

    def forward(self, items: Tensor, window: EventWindow) -> Tensor:
        x = items[window.item] + self.rating(window.rating) + self.gap(window.gap)
        return x + self.position[-x.shape[1] :]


class RankingModule(nn.Module):
    """s(u, i) of candidate tokens that read H and not each other."""

    def __init__(self, config: GryphonConfig):
        super().__init__()
        width = config.width
        self.norm_query = nn.LayerNorm(width)
        self.cross = RequestCrossAttention(width, heads=config.heads)
        self.norm_ffn, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, config.hidden), nn.GELU(), nn.Linear(config.hidden, width))
        self.out = nn.Linear(width, 1)

    def forward(self, token: Tensor, keys: RequestKeys) -> Tensor:
        """token [B, C, D] -> float32 [B, C]."""
        batch, count, _ = token.shape
        request_of = torch.arange(batch, device=token.device).repeat_interleave(count)
        flat = token.flatten(0, 1).unsqueeze(1)  # (B C, 1, D)
        x = flat + self.cross.attend(self.norm_query(flat), keys, request_of)
        x = self.norm(x + self.ffn(self.norm_ffn(x)))
        return self.out(x).float().view(batch, count)


class Encoded(NamedTuple):
    """What one request gives: memory of the decoder, keys of the ranking module, item vectors [I + 1, D] of both."""

    memory: Memory
    keys: RequestKeys | None
    items: Tensor
    ranked: Tensor


class Served(NamedTuple):
    """Candidates int64[B, C] in the order of their semantic ids (0 = none), their scores, and the ranked top list."""

    candidates: Tensor
    scores: Tensor
    top: Tensor


class Gryphon(nn.Module):
    """`encode` once; `generation_loss`, `candidates`, `rank` and `serve` read what it gives."""

    def __init__(self, config: GryphonConfig, table: SIDTable, text: Tensor):
        super().__init__()
        self.config = config
        self.table = ItemTable(text, config.width)
        self.events = EventTokens(config.history, config.width)
        vocab = SIDVocab.of(table)
        self.generator = SIDSeq2Seq(vocab, config.generator())
        self._freeze_unused()
        self.register_buffer("codes", torch.from_numpy(table.codes.copy()), persistent=False)
        self.register_buffer("tokens", torch.from_numpy(vocab.item_tokens(table)), persistent=False)
        self.sid, self.trie = table, PrefixTrie.of(table)
        if config.ranker:
            self.ranker = RankingModule(config)
        if config.ranker and config.separate:
            stack = BiasedConfig(
                config.width, config.heads, config.encoder_layers, config.hidden, dropout=config.dropout, times=0
            )
            self.own_table, self.own_events = ItemTable(text, config.width), EventTokens(config.history, config.width)
            self.own_encoder, self.own_dropout = BiasedTransformer(stack), Dropout(config.dropout)
            self.own_codes = nn.Embedding(vocab.size, config.width)
            nn.init.normal_(self.own_codes.weight, std=START_SCALE)

    def _freeze_unused(self) -> None:
        """Parts of the generator that events given as states (and a retriever) never read are no parameters."""
        unused = [self.generator.slot, self.generator.level, self.generator.front]
        if self.config.decoder == "dot":
            unused += [self.generator.target, *self.generator.norm.parameters()]
        for parameter in unused:
            parameter.requires_grad_(False)

    def _apply(self, fn, recurse: bool = True):
        moved = super()._apply(fn, recurse)
        self.trie = self.trie.to(self.codes.device)
        return moved

    def encode(self, window: EventWindow, *, rank: bool = True) -> Encoded:
        """H of B histories and the item vectors. rank: False where only the generator is needed."""
        items = self.table()
        memory = self.generator.encode(self.events(items, window), window.mask)
        if not (rank and self.config.ranker):
            return Encoded(memory, None, items, items)
        if not self.config.separate:
            return Encoded(memory, self.ranker.cross.keys_values(memory.states, memory.mask), items, items)
        ranked = self.own_table()
        states = self.own_encoder(self.own_dropout(self.own_events(ranked, window)), window.mask, visible=_all(window))
        return Encoded(memory, self.ranker.cross.keys_values(states, window.mask), items, ranked)

    def rows(self, encoded: Encoded, count: int) -> Encoded:
        """The first `count` requests."""
        memory, keys = encoded.memory, encoded.keys
        cut = Memory(
            memory.states[:count], memory.mask[:count], tuple(k[:count] for k in memory.keys),
            tuple(v[:count] for v in memory.values),
        )  # fmt: skip
        return encoded._replace(memory=cut, keys=keys and RequestKeys(*(x[:count] for x in keys)))

    def generation_loss(self, encoded: Encoded, target: Tensor) -> Tensor:
        """L_NTP, the mean over items int64[B, K] (0 = none); of a retriever the cross entropy over the catalogue."""
        if self.config.decoder == "dot":
            with float32_region(target.device):
                logits = self.retrieval_scores(encoded)[:, 1:].unsqueeze(1).expand(-1, target.shape[1], -1)
                return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten() - 1, ignore_index=-1)
        return sid_loss(self.generator, encoded.memory, self.codes[target], mask=target > 0)

    def retrieval_scores(self, encoded: Encoded) -> Tensor:
        """h_last . x_i, float32 [B, I + 1]."""
        return encoded.memory.states[:, -1].float() @ encoded.items.float().t()

    def rank(self, encoded: Encoded, item: Tensor) -> Tensor:
        """s(u, i) float32 [B, C] of items int64 [B, C]."""
        codes = self.own_codes if self.config.separate else self.generator.embedding
        token = encoded.ranked[item] + codes(self.tokens[item]).sum(2)
        return self.ranker(token, encoded.keys)

    @torch.no_grad()
    def candidates(self, encoded: Encoded, seen: Tensor, width: int, count: int) -> Tensor:
        """int64 [B, count] unseen items of the `width` best semantic ids in their order, 0 where there are no more."""
        if self.config.decoder == "dot":
            scores = self.retrieval_scores(encoded).scatter(1, seen, NEVER)
            scores[:, 0] = NEVER
            value, item = scores.topk(min(width, count, scores.shape[1]), dim=1)
            item = torch.where(value > NEVER, item, 0)
            return nn.functional.pad(item, (0, count - item.shape[1]))
        alive = self.trie.alive(seen)
        beams = constrained_beam(SIDStep(self.generator), encoded.memory, self.trie, width, alive=alive)
        return self.trie.expand(beams.leaf[..., 0], count, seen=seen)

    @torch.no_grad()
    def serve(self, window: EventWindow, seen: Tensor, *, width: int, count: int, top: int = 10) -> Served:
        """Generate and rank; without a ranking module the order of the beam stands."""
        encoded = self.encode(window)
        item = self.candidates(encoded, seen, width, count)
        if self.config.ranker:
            scores = self.rank(encoded, item).masked_fill(item == 0, NEVER)
        else:
            scores = -torch.arange(count, device=item.device).float().expand(len(item), -1)
            scores = scores.masked_fill(item == 0, NEVER)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :top]
        return Served(item, scores, item.gather(1, order))


def _all(window: EventWindow) -> Tensor:
    """Every event reads every real event: bool [B, n, n]."""
    return window.mask.unsqueeze(1).expand(-1, window.mask.shape[1], -1)


def rollout(model: Gryphon, window: EventWindow, seen: Tensor, *, width: int, count: int) -> Tensor:
    """C_rollout int64 [B, count] of the current generator, dropout off, without gradient or a draw of any generator."""
    mode = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model.candidates(model.encode(window, rank=False), seen, width, count)
    finally:
        model.train(mode)


def merged_pool(*parts: Tensor) -> Tensor:
    """Union of int64 [B, K] item lists: [B, sum K], 0 where an item stood in an earlier column."""
    pool = torch.cat(parts, dim=1)
    same = pool.unsqueeze(2) == pool.unsqueeze(1)  # (B, K, K)
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=pool.device).tril(-1)
    return pool.masked_fill((same & earlier).any(2), 0)


def distillation(student: Tensor, teacher: Tensor, pool: Tensor) -> Tensor:
    """Mean over the items of all pools of |s - s_T|; float32, 0 without items."""
    with float32_region(student.device):
        real = (pool > 0).float()
        return ((student.float() - teacher.float()).abs() * real).sum() / real.sum().clamp(min=1)


def matched_config(config: GryphonConfig, table: SIDTable, text: np.ndarray | Tensor) -> GryphonConfig:
    """The cascade (two encoders, two sets of tables) with as many parameters as `config`: narrower, then the inner width."""
    text = torch.as_tensor(text)

    def made(width: int) -> GryphonConfig:
        return replace(config, width=width, separate=True, hidden=width * config.hidden // config.width)

    def size(one: GryphonConfig) -> int:
        return count_params(Gryphon(one, table, text))

    goal = size(config)
    widths = range(config.heads, config.width + 1, config.heads)
    above = bisect_left(widths, goal, key=lambda width: size(made(width)))  # the narrowest that is as large
    near = widths[max(above - 1, 0) : above + 1]
    best = min(map(made, near), key=lambda one: abs(size(one) - goal))
    step = replace(best, hidden=best.hidden + 1)
    missing = round((goal - size(best)) / (size(step) - size(best)))
    return replace(best, hidden=max(config.heads, best.hidden + missing))
