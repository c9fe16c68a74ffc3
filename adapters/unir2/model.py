"""UniR2 (arXiv:2607.24439): recall and multi-objective ranking in one decoder-only sequence.

    seq = [u_1 .. u_P, BOS, e(c_1) .. e(c_L), f_1 .. f_R]
    generation query: the prefix and the codes before it;  ranking query: last prefix token, all code states, all f
    X_rank = sg(W_X h) + B_X A_X h',  X in {Q, K, V};  h' = sg(h) for prefix and codes, h for ranking tokens
    L = L_gen + mu sum_t BCE(y_t, tower_t),  score = alpha log p(s_v | u) / L + sum_t w_t log p_t

Shapes: B requests, P prefix tokens, w branches (candidates), L code levels, R ranking tokens, D width, H heads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.unir2.events import Requests
from adapters.unir2.features import RANKING_TOKENS, START_SCALE, ItemFacts, PrefixTokens, RankingTokens
from adapters.unir2.generator import Context, Generator, Trajectory
from auto_research.blocks.beam_search import Beams, constrained_beam
from auto_research.blocks.biased_transformer import BiasedBlock
from auto_research.blocks.lora import LowRank, detached_linear
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDStep
from auto_research.runtime.precision import float32_region

TASKS = ("click", "longview", "gift")
THRESHOLDS = (3, 4, 5)
GENERATED = 3  # lowest rating of an event that is generated
TOWER = 64
READS = ("state", "prefix", "causal")


@dataclass(frozen=True)
class UniR2Config:
    """Sizes and switches.

    generation, ranking: which branch exists.  stop: ranking leaves the weights of the trunk and what it reads alone.
    lora: low-rank updates of its own, of rank `rank`.  copy: layers of its own, in place of shared ones.
    reads: what ranking tokens read of the prefix: its last state, all of it, or all of it with a causal order among the
    ranking tokens too.  trajectory: False hides the code states from them.
    """

    width: int = 64
    heads: int = 4
    layers: int = 3
    hidden: int = 256
    dropout: float = 0.1
    history: int = 30
    rank: int = 8
    generation: bool = True
    ranking: bool = True
    stop: bool = True
    lora: bool = True
    copy: bool = False
    reads: str = "state"
    trajectory: bool = True

    def __post_init__(self) -> None:
        if self.reads not in READS or not (self.generation or self.ranking):
            raise ValueError(f"unknown reads {self.reads!r}, or neither generation nor ranking")

    def trunk(self) -> SIDConfig:
        return SIDConfig(
            self.width, self.heads, 0, self.layers, self.hidden, self.dropout, norm="rms", ffn="gelu", head="level",
            positions=0, std=START_SCALE,
        )  # fmt: skip


class RankingLayer(nn.Module):
    """One layer as the ranking branch sees it: the generator's weights, detached, and its own low-rank updates.

    Holds no weight of the layer itself; `block` is handed in.
    """

    def __init__(self, block: BiasedBlock, config: UniR2Config):
        super().__init__()
        width, rank = config.width, config.rank
        self.stop, self.heads = config.stop, block.heads
        self.own = copy.deepcopy(block) if config.copy else None
        self.lora = config.lora and not config.copy
        if self.lora:
            self.query, self.key, self.value = (LowRank(width, width, rank) for _ in range(3))
            self.out = LowRank(width, width, rank)
            self.up, self.down = LowRank(width, config.hidden, rank), LowRank(config.hidden, width, rank)

    def project(self, block: BiasedBlock, x: Tensor) -> Tensor:
        """q, k, v [.., 3 D] of normed inputs: sg(W x) + B A x."""
        return self._updated(block.qkv(x), x, ("query", "key", "value"))

    def remember(self, block: BiasedBlock, x: Tensor) -> Tensor:
        """k, v [.., 2 D] of normed inputs of prefix or codes, which are only read: sg(W x) + B A sg(x)."""
        x, width = x.detach() if self.stop else x, x.shape[-1]
        return self._updated(F.linear(x, block.qkv.weight[width:], block.qkv.bias[width:]), x, ("key", "value"))

    def _updated(self, base: Tensor, x: Tensor, updates: tuple[str, ...]) -> Tensor:
        if self.stop and self.own is None:
            base = base.detach()
        return base + torch.cat([getattr(self, name)(x) for name in updates], dim=-1) if self.lora else base

    def _linear(self, linear: nn.Linear, update: str, x: Tensor) -> Tensor:
        """W x + b with detached weights (the gradient reaches x), and the update."""
        base = detached_linear(linear, x) if self.stop and self.own is None else linear(x)
        return base + getattr(self, update)(x) if self.lora else base

    def forward(self, block: BiasedBlock, x: Tensor, prefix: Tensor, codes: Tensor | None, visible: Tensor) -> Tensor:
        """Ranking tokens x [B w, R, D]; normed inputs of what they read: prefix [B, P, D], codes [B w, t, D] or None.

        visible: bool[B w, R, P + t + R].
        """
        shared = self.own is None
        block = block if shared else self.own
        stop = self.stop and shared
        own = self.project(block, scaled(block.norm_attention, x, stop))
        read = [self.remember(block, prefix).repeat_interleave(len(x) // len(prefix), dim=0)]
        read += [] if codes is None else [self.remember(block, codes)]

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B w, H, .., dh)

        width = x.shape[2]
        keys_values = torch.cat([*read, own[..., width:]], dim=1)
        q, k, v = heads(own[..., :width]), heads(keys_values[..., :width]), heads(keys_values[..., width:])
        seen = F.scaled_dot_product_attention(q.contiguous(), k, v, attn_mask=visible.unsqueeze(1))
        seen = seen.transpose(1, 2).flatten(2).to(x.dtype)
        x = x + block.dropout(self._linear(block.out, "out", seen))
        first, activation, second = block.ffn
        inner = activation(self._linear(first, "up", scaled(block.norm_ffn, x, stop)))
        return x + block.dropout(self._linear(second, "down", inner))


def scaled(norm: nn.RMSNorm, x: Tensor, stop: bool) -> Tensor:
    """RMSNorm whose scale is read, but not trained, with `stop`."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.detach() if stop else norm.weight, norm.eps)


class RankingBranch(nn.Module):
    """Ranking tokens through all layers, and one tower per task."""

    def __init__(self, generator: Generator, facts: ItemFacts, config: UniR2Config):
        super().__init__()
        self.config = config
        self.tokens = RankingTokens(facts, config.width)
        self.layers = nn.ModuleList(RankingLayer(block, config) for block in generator.trunk.blocks)
        self.norm = nn.RMSNorm(config.width) if config.copy else None
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(RANKING_TOKENS * config.width, TOWER), nn.GELU(), nn.Linear(TOWER, 1))
            for _ in TASKS
        )

    def forward(self, generator: Generator, ctx: Context, made: Trajectory | None, x: Tensor) -> Tensor:
        """Logits float32 [B, w, tasks] of ranking tokens x [B, w, R, D]; made: None without code states."""
        states = self.states(generator, ctx, made, x)
        logits = torch.cat([tower(states.flatten(2)) for tower in self.towers], dim=2)
        return logits.float()

    def states(self, generator: Generator, ctx: Context, made: Trajectory | None, x: Tensor) -> Tensor:
        """Final ranking tokens [B, w, R, D]."""
        batch, width, count, _ = x.shape
        x = x.flatten(0, 1)
        made = made if self.config.trajectory else None
        visible = self.visible(ctx, made, width, count)
        for n, (layer, block) in enumerate(zip(self.layers, generator.trunk.blocks, strict=True)):
            x = layer(block, x, self._prefix(ctx, n), None if made is None else made.inputs[n].flatten(0, 1), visible)
        x = scaled(generator.trunk.norm, x, self.config.stop) if self.norm is None else self.norm(x)
        return x.unflatten(0, (batch, width))

    def _prefix(self, ctx: Context, layer: int) -> Tensor:
        """Normed inputs [B, P, D], or [B, 1, D] of the newest token, of the prefix that ranking tokens read."""
        prefix = ctx.inputs[layer]
        if self.config.reads == "state":
            return prefix[torch.arange(len(prefix), device=prefix.device), ctx.newest].unsqueeze(1)
        return prefix

    def visible(self, ctx: Context, made: Trajectory | None, width: int, count: int) -> Tensor:
        """M_rank bool [B w, R, S + R]: S are the prefix columns that are read at all, and the code states, if any."""
        batch = len(ctx.mask)
        read = ctx.mask if self.config.reads != "state" else ctx.mask.new_ones(batch, 1)
        if made is not None:
            read = torch.cat([read, ctx.mask.new_ones(batch, made.length)], dim=1)
        read = read.repeat_interleave(width, dim=0)  # (B w, S)
        own = torch.ones(count, count, dtype=torch.bool, device=read.device)
        if self.config.reads == "causal":
            own = own.tril()
        return torch.cat([read.unsqueeze(1).expand(-1, count, -1), own.expand(len(read), -1, -1)], dim=2)


def generation_loss(logp: Tensor, rating: Tensor) -> Tensor:
    """L_gen of log p [B, w, L] of the codes: mean over levels, and over the events with ratings [B, w] of at least 3."""
    with float32_region(logp.device):
        wanted = (rating >= GENERATED).float()
        return -(logp.float().mean(2) * wanted).sum() / wanted.sum().clamp(min=1)


class Served(NamedTuple):
    """Items int64[B, w] of a beam in its order (0 = none), logp float32[B, w] and task logits [B, w, tasks] or None."""

    item: Tensor
    logp: Tensor
    tasks: Tensor | None


class Retrieved(NamedTuple):
    """Items int64[B, w] in order (0 = none) and logp float32[B, w], and what was made on the way to them."""

    item: Tensor
    logp: Tensor
    ctx: Context | None = None
    beams: Beams | None = None


class UniR2(nn.Module):
    """`read` once, `outputs` in training, `retrieve` and `rank_found` in serving."""

    def __init__(self, config: UniR2Config, table: SIDTable, facts: ItemFacts):
        super().__init__()
        self.config, self.sid = config, table
        self.prefix = PrefixTokens(facts, config.history, config.width)
        self.generator = Generator(SIDVocab.of(table), config.trunk())
        if config.ranking:
            self.ranking = RankingBranch(self.generator, facts, config)
        if not config.generation:  # a ranker alone spells no code
            generator = self.generator
            for unused in (generator.embedding.weight, generator.place, *generator.heads.parameters()):
                unused.requires_grad_(False)
            if config.stop or config.trajectory:
                raise ValueError("ranking without generation trains its own trunk and reads no code states")
        self.register_buffer("codes", torch.from_numpy(table.codes.copy()), persistent=False)
        self.trie = PrefixTrie.of(table)

    def _apply(self, fn, recurse: bool = True):
        moved = super()._apply(fn, recurse)
        self.trie = self.trie.to(self.codes.device)
        return moved

    def read(self, request: Requests) -> Context:
        """The user prefix, once per request."""
        return self.generator.read(*self.prefix(request))

    def paths(
        self, request: Requests, ctx: Context, item: Tensor, own: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """log p of every code float32 [B, w, L] and task logits [B, w, tasks] of items int64 [B, w], teacher-forced.

        Either is None where there is no such branch.  own: ratings of train rows, as `RankingTokens` has them.
        """
        if not self.config.generation:
            return None, self.ranking(self.generator, ctx, None, self.ranking.tokens(request, item, own))
        codes = self.codes[item]
        states, made = self.generator.whole(codes, ctx)
        logp = self.generator.logprob(states, codes)
        if not self.config.ranking:
            return logp, None
        return logp, self.ranking(self.generator, ctx, made, self.ranking.tokens(request, item, own))

    def outputs(self, batch) -> tuple[Tensor | None, Tensor | None]:
        """L_gen and the task logits [B, 2, tasks] of a `RowBatch`; None where there is no such branch."""
        ctx = self.read(batch.request)
        logp, tasks = self.paths(batch.request, ctx, batch.item, batch.own)
        if logp is None:
            return None, tasks
        logp, rating = logp[:, :1], batch.rating.unsqueeze(1)
        if batch.inside.shape[1]:
            within = self.inside_logprob(batch.request, ctx, batch.inside)
            logp = torch.cat([logp, within], dim=1)
            rating = torch.cat([rating, batch.request.rating.gather(1, batch.inside)], dim=1)
        return generation_loss(logp, rating), tasks

    def inside_logprob(self, request: Requests, ctx: Context, column: Tensor) -> Tensor:
        """log p [B, K, L] of the events at columns int64 [B, K] of the prefix itself, each given what stands before it.

        The prefix is causal, so this is what a prefix that ends there would give, but for its places.
        """
        codes = self.codes[request.item.gather(1, column)]
        profile = ctx.mask.shape[1] - request.item.shape[1]
        visible = torch.arange(ctx.mask.shape[1], device=column.device) < (column + profile).unsqueeze(2)
        states, _ = self.generator.spell(self.generator.target_tokens(codes), ctx, visible=visible)
        return self.generator.logprob(states, codes)

    def rank(self, request: Requests, item: Tensor) -> Tensor:
        """Task logits [B, w, tasks] of items int64 [B, w]."""
        return self.paths(request, self.read(request), item)[1]

    @torch.no_grad()
    def catalogue(self, request: Requests, chunk: int = 256) -> tuple[Tensor, Tensor | None]:
        """log p(s_v | u) [B, I + 1] (column 0 -inf) and task logits [B, I + 1, tasks] of every item.

        log p is 0 without generation: all items are alike to it.
        """
        return self._catalogue(request, self.read(request), chunk)

    def _catalogue(self, request: Requests, ctx: Context, chunk: int = 256) -> tuple[Tensor, Tensor | None]:
        items = torch.arange(len(self.codes), device=self.codes.device).expand(len(request.item), -1)
        parts = [self.paths(request, ctx, part) for part in items.split(chunk, dim=1)]
        if self.config.generation:
            logp = torch.cat([logp.sum(2) for logp, _ in parts], dim=1)
        else:
            logp = torch.zeros(items.shape, device=items.device)
        logp[:, 0] = -torch.inf
        return logp, torch.cat([tasks for _, tasks in parts], dim=1) if self.config.ranking else None

    @torch.no_grad()
    def retrieve(self, request: Requests, seen: Tensor, *, width: int) -> Retrieved:
        """A beam of `width` unseen items; a ranker alone finds those of the largest product of chances."""
        ctx = self.read(request)
        if not self.config.generation:
            logp, tasks = self._catalogue(request, ctx)
            chance = F.logsigmoid(tasks.float()).sum(2) + logp
            best, item = chance.scatter(1, seen, -torch.inf).topk(min(width, chance.shape[1]), dim=1)
            return Retrieved(item.masked_fill(best == -torch.inf, 0), logp.gather(1, item), ctx)
        beams = constrained_beam(SIDStep(self.generator), ctx, self.trie, width, alive=self.trie.alive(seen))
        leaf = beams.leaf[..., 0]
        return Retrieved(self.trie.group[leaf.clamp(min=0), 0].masked_fill(leaf < 0, 0), beams.logp, ctx, beams)

    @torch.no_grad()
    def rank_found(self, request: Requests, found: Retrieved) -> Tensor | None:
        """Task logits [B, w, tasks] from the very states the beam made; None without ranking."""
        if not self.config.ranking:
            return None
        made = None
        if self.config.trajectory:
            own = found.beams.state[1].reorder(found.beams.parent)
            last = (found.beams.codes[..., -1:] + self.generator.offset[-1]).clamp(min=0)
            _, made = self.generator.spell(last, found.ctx, own)
        return self.ranking(self.generator, found.ctx, made, self.ranking.tokens(request, found.item))

    def serve(self, request: Requests, seen: Tensor, *, width: int) -> Served:
        """`retrieve`, then `rank_found`."""
        found = self.retrieve(request, seen, width=width)
        return Served(found.item, found.logp, self.rank_found(request, found))
