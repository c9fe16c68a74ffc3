"""Transformers that spell semantic ids: an encoder-decoder and a decoder-only model with one cache contract.

What a request gives is computed once and shared: `Memory` (keys and values of the encoder's states for every decoder
layer) or `Prompt` (keys and values of the prompt). A request then has w branches (beams, candidates, training targets)
of T tokens each; only their own keys and values, `OwnCache`, exist per branch, and only they move when beams do:

    SIDSeq2Seq:  memory = encode(src, mask);            states, own = decode(tokens [B, w, T], memory, own)
    SIDDecoder:  states, prompt = forward(src, mask=..);  states, prompt = forward(tokens [B, w, T], prompt)
    both:        states, own = spell(tokens [B, w, T], ctx, own);   logits(states, level);   SIDStep(model) for a search

With or without cache the states are the same. Pre-norm attention with boolean masks (`BiasedBlock`), no nested tensors.
Codes [B, w, m * L] are spelled as [BOS, c_1 .. c_L] for each of their m items (OneRec, arXiv:2502.18965); a code -1
stands for nothing and counts 0. Sources: TIGER (arXiv:2305.05065), COBRA (arXiv:2503.02453).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.blocks.branch_cache import CrossBlock, Memory, OwnCache, Prompt, branch_attention
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.semantic_ids import SIDVocab


@dataclass(frozen=True)
class SIDConfig:
    """Sizes of a model of semantic ids.

    encoder_layers: 0 for SIDDecoder.  hidden, norm, ffn, bias: as in BiasedConfig (bias: of encoder or decoder-only
    stack).  head: "tied" (token table, softmax over the whole vocabulary) or "level" (a linear head per level).
    history: item slots of an integer source.  prefix: columns in front of them (user token).  items: ids per target.
    positions: longest prompt plus target of a SIDDecoder with learned positions; 0 for none.
    std: spread of token and position tables at the start; 0.02 took about twice the steps to learn rows by heart.
    start: what predicts the first code of a SIDDecoder, a "bos" token or the last state of the "prompt" itself.
    """

    width: int = 64
    heads: int = 4
    encoder_layers: int = 2
    layers: int = 2
    hidden: int | None = None
    dropout: float = 0.1
    norm: str = "layer"
    ffn: str = "relu"
    bias: str = "none"
    head: str = "tied"
    history: int = 50
    prefix: int = 0
    items: int = 1
    positions: int = 256
    std: float = 0.08
    start: str = "bos"

    def __post_init__(self) -> None:
        if self.head not in ("tied", "level") or self.start not in ("bos", "prompt"):
            raise ValueError(f"unknown head {self.head!r} or start {self.start!r}")
        if self.start == "prompt" and self.items > 1:
            raise ValueError("a list of items needs start='bos'")

    def stack(self, layers: int, bias: str) -> BiasedConfig:
        return BiasedConfig(
            self.width, self.heads, layers, self.hidden, bias, self.norm, self.ffn, self.dropout, times=0
        )


class SIDModel(nn.Module):
    """What both models share: token table, heads, layout of targets.  Subclasses define `spell`."""

    def __init__(self, vocab: SIDVocab, config: SIDConfig):
        super().__init__()
        self.vocab, self.config = vocab, config
        self.embedding = nn.Embedding(vocab.size, config.width)
        nn.init.normal_(self.embedding.weight, std=config.std)
        self.heads = nn.ModuleList(
            nn.Linear(config.width, size) for size in (vocab.sizes if config.head == "level" else ())
        )
        self.dropout = Dropout(config.dropout)
        self.register_buffer("offset", torch.from_numpy(vocab.offsets.copy()), persistent=False)

    @property
    def offsets(self) -> list[int]:
        """Column of code 0 of every level in what `logits` gives."""
        return [int(o) for o in self.vocab.offsets] if self.config.head == "tied" else [0] * self.vocab.levels

    def logits(self, states: Tensor, level: int) -> Tensor:
        """Logits [.., V] of the next code at a level: the whole vocabulary (tied) or the codes of the level."""
        return F.linear(states, self.embedding.weight) if self.config.head == "tied" else self.heads[level](states)

    def spell(self, tokens: Tensor, ctx: Any, own: OwnCache | None = None, **options) -> tuple[Tensor, OwnCache]:
        """States [B, w, T, D] of further tokens of the branches of ctx."""
        raise NotImplementedError

    def first_state(self, ctx: Any) -> Tensor | None:
        """State [B, D] that predicts the first code without a BOS token, None where BOS does."""
        return None

    def target_tokens(self, codes: Tensor) -> Tensor:
        """Input tokens of codes int64 [B, w, m * L]: [BOS, c_1 .. c_L] per item, without the last code of all.

        A code past its level is the token of another level that an unconstrained beam has chosen; -1 is PAD.
        """
        batch, width, length = codes.shape
        levels = self.vocab.levels
        shifted = (codes + self.offset.repeat(length // levels)) % self.vocab.size
        tokens = torch.where(codes < 0, self.vocab.pad, shifted)
        bos = tokens.new_full((batch, width, length // levels, 1), self.vocab.bos)
        return torch.cat([bos, tokens.unflatten(2, (-1, levels))], dim=3).flatten(2)[..., :-1]

    def path_logits(self, ctx: Any, codes: Tensor, **options) -> list[Tensor]:
        """Logits [B, w, V] of every code of codes int64 [B, w, m * L] by teacher forcing; options go to `spell`."""
        levels = self.vocab.levels
        tokens, first = self.target_tokens(codes), self.first_state(ctx)
        if first is None:
            states = self.spell(tokens, ctx, **options)[0]
            step = levels + 1
        else:
            states = first[:, None, None].expand(-1, codes.shape[1], -1, -1)
            if levels > 1:
                states = torch.cat([states, self.spell(tokens[..., 1:], ctx, **options)[0]], dim=2)
            step = levels
        return [self.logits(states[:, :, n // levels * step + n % levels], n % levels) for n in range(codes.shape[2])]


class SIDSeq2Seq(SIDModel):
    """Encoder over a history, decoder over codes (TIGER).

    src: int64 [B, S] tokens, `config.prefix` columns and then items of L tokens, newest last, padding on the left; or
    float [B, S, D] states of the caller's own making. mask: bool [B, S].
    """

    def __init__(self, vocab: SIDVocab, config: SIDConfig):
        super().__init__(vocab, config)
        width = config.width
        self.encoder = BiasedTransformer(config.stack(config.encoder_layers, config.bias))
        self.blocks = nn.ModuleList(CrossBlock(config.stack(1, "none")) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width) if config.norm == "layer" else nn.RMSNorm(width)
        self.slot = nn.Parameter(torch.randn(config.history, width) * config.std)
        self.level = nn.Parameter(torch.randn(vocab.levels, width) * config.std)
        self.front = nn.Parameter(torch.randn(config.prefix, width) * config.std)
        self.target = nn.Parameter(torch.randn(config.items * (vocab.levels + 1), width) * config.std)

    def embed_source(self, tokens: Tensor) -> Tensor:
        """[B, S, D]: token + slot of the item, counted from the newest + level; prefix columns have their own."""
        items = tokens.shape[1] - self.config.prefix
        back = torch.arange(items - 1, -1, -1, device=tokens.device)
        levels = self.vocab.levels
        place = self.slot[back // levels] + self.level[levels - 1 - back % levels]
        return self.embedding(tokens) + torch.cat([self.front, place])

    def encode(self, src: Tensor, mask: Tensor, *, visible: Tensor | None = None) -> Memory:
        """visible: bool [B, S, S], True where a row may read a column; default: everything that is not padding."""
        x = src if src.is_floating_point() else self.embed_source(src)
        if visible is None:
            visible = mask.unsqueeze(1).expand(-1, mask.shape[1], -1)
        return self.remember(self.encoder(self.dropout(x), mask, visible=visible), mask)

    def remember(self, states: Tensor, mask: Tensor) -> Memory:
        """Memory of given encoder states [B, S, D]."""
        pairs = [block.remember(states) for block in self.blocks]
        return Memory(states, mask, tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def decode(
        self,
        tokens: Tensor,
        memory: Memory,
        cache: OwnCache | None = None,
        *,
        visible: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> tuple[Tensor, OwnCache]:
        """States [B, w, T, D] of tokens int64 [B, w, T] (or float [B, w, T, D], no position added) and the longer cache.

        visible: bool [B, w, S], what of the memory each branch may read beyond the padding mask (training at every item
        of a window).  extra: float, broadcast to the inputs (item slot of a branch).
        """
        known = 0 if cache is None else cache.length
        x = tokens
        if not x.is_floating_point():
            x = self.embedding(x) + self.target[known : known + x.shape[2]]
        x = self.dropout(x if extra is None else x + extra)
        batch, width, length, _ = x.shape
        readable = memory.mask.unsqueeze(1) if visible is None else visible & memory.mask.unsqueeze(1)
        position = torch.arange(known, known + length, device=x.device).expand(batch * width, -1)
        causal = torch.ones(length, known + length, dtype=torch.bool, device=x.device).tril(known)
        keys, values = [], []
        for n, block in enumerate(self.blocks):
            q, k, v = block.project(x.flatten(0, 1), position)
            if cache is not None:
                k = torch.cat([cache.keys[n].flatten(0, 1), k], dim=2)
                v = torch.cat([cache.values[n].flatten(0, 1), v], dim=2)
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=causal).transpose(1, 2).flatten(2)
            x = x + block.dropout(block.out(read.to(x.dtype))).view_as(x)
            x = block.read(x, memory.keys[n], memory.values[n], readable)
            x = x + block.dropout(block.ffn(block.norm_ffn(x)))
            keys.append(k.unflatten(0, (batch, width))), values.append(v.unflatten(0, (batch, width)))
        return self.norm(x), OwnCache(tuple(keys), tuple(values))

    def spell(self, tokens: Tensor, ctx: Memory, own: OwnCache | None = None, **options) -> tuple[Tensor, OwnCache]:
        return self.decode(tokens, ctx, own, **options)


class SIDDecoder(SIDModel):
    """One causal stack over prompt and codes (COBRA, PLUM, UniR2).

    A prompt is int64 [B, P] tokens or float [B, P, D] states; branches are int64 [B, w, T] or float [B, w, T, D].
    Learned positions (config.positions > 0) are added to integer input only.
    """

    def __init__(self, vocab: SIDVocab, config: SIDConfig):
        super().__init__(vocab, config)
        self.trunk = BiasedTransformer(config.stack(config.layers, config.bias))
        self.position = (
            nn.Parameter(torch.randn(config.positions, config.width) * config.std) if config.positions else None
        )

    def forward(
        self,
        tokens: Tensor,
        cache: Prompt | None = None,
        *,
        mask: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, Prompt]:
        """Without cache: states [B, P, D] of a prompt, padding on either side, visible bool [B, P, P] (default causal).

        With a cache: states [B, w, T, D] of branches that continue it; visible bool [B, w, P], what of the prompt each
        branch may read beyond the padding mask. The cache returned is the longer one.
        """
        if cache is not None:
            states, own = self.spell(tokens, cache, cache.own, visible=visible)
            return states, cache._replace(own=own)
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        position = (mask.long().cumsum(1) - 1).clamp(min=0)
        states, shared = self.trunk.prefill(self._embed(tokens, position), mask, position=position, visible=visible)
        newest = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
        return states, Prompt(shared, states[torch.arange(len(states), device=mask.device), newest])

    def first_state(self, ctx: Prompt) -> Tensor | None:
        return ctx.last if self.config.start == "prompt" else None

    def spell(
        self, tokens: Tensor, ctx: Prompt, own: OwnCache | None = None, *, visible: Tensor | None = None
    ) -> tuple[Tensor, OwnCache]:
        known = 0 if own is None else own.length
        batch, width, length = tokens.shape[:3]
        start = ctx.mask.sum(1).view(batch, 1, 1)  # (B, 1, 1)
        position = start + torch.arange(known + length, device=tokens.device)
        position = position.expand(-1, width, -1).flatten(0, 1)  # (B * w, t)
        x = self._embed(tokens.flatten(0, 1), position[:, known:])
        readable = ctx.mask.unsqueeze(1) if visible is None else visible & ctx.mask.unsqueeze(1)
        keys, values = [], []
        for n, block in enumerate(self.trunk.blocks):
            q, k, v = block.project(x, position[:, known:])
            if own is not None:
                k = torch.cat([own.keys[n].flatten(0, 1), k], dim=2)
                v = torch.cat([own.values[n].flatten(0, 1), v], dim=2)
            x = block.finish(x, branch_attention(block, q, k, v, ctx.shared, n, readable, position))
            keys.append(k.unflatten(0, (batch, width))), values.append(v.unflatten(0, (batch, width)))
        return self.trunk.norm(x).unflatten(0, (batch, width)), OwnCache(tuple(keys), tuple(values))

    def _embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        if tokens.is_floating_point():
            return self.dropout(tokens)
        x = self.embedding(tokens)
        return self.dropout(x if self.position is None else x + self.position[position])


class SIDStep:
    """Step function of a model for `beam_search`; the state it is given first is the ctx (Memory or Prompt).

    cache=False spells every path from its start again, to check the cache.
    """

    def __init__(self, model: SIDModel, *, cache: bool = True):
        self.model, self.cache, self.offsets = model, cache, model.offsets

    def __call__(self, codes: Tensor | None, parent: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        model, levels = self.model, self.model.vocab.levels
        ctx, own = (state, None) if codes is None else state
        position = 0 if codes is None else codes.shape[2]
        first = model.first_state(ctx)
        if codes is None and first is not None:
            return model.logits(first.unsqueeze(1), 0), (ctx, None)
        if codes is None:
            codes = torch.empty(len(ctx.mask), 1, 0, dtype=torch.int64, device=ctx.mask.device)
        rounds = position // levels + 1  # items begun
        padded = F.pad(codes, (0, rounds * levels - position), value=0)
        tokens = model.target_tokens(padded)[..., (first is not None) : position + rounds]
        if own is not None:
            own = own.reorder(parent)
            tokens = tokens[..., own.length :]
        states, own = model.spell(tokens, ctx, own)
        return model.logits(states[:, :, -1], position % levels), (ctx, own if self.cache else None)


def token_logprob(model: SIDModel, ctx: Any, codes: Tensor, masks: Sequence[Tensor] | None = None, **options) -> Tensor:
    """float32 [B, w, m * L] log p of every code of codes int64 [B, w, m * L]; 0 where the code is -1.

    masks: of `PrefixTrie.path_masks`, one bool [B, w, K_l] per code: the policy is renormalised over them.
    """
    parts, offsets, levels = [], model.offsets, model.vocab.levels
    for n, logits in enumerate(model.path_logits(ctx, codes, **options)):
        code, start = codes[..., n].clamp(min=0), offsets[n % levels]
        logits = logits.float()
        if masks is not None:
            logits = logits[..., start : start + masks[n].shape[-1]].masked_fill(~masks[n], -torch.inf)
            start = 0
        chosen = logits.gather(-1, ((code + start) % logits.shape[-1]).unsqueeze(-1)).squeeze(-1)
        parts.append(torch.where(codes[..., n] < 0, 0.0, chosen - logits.logsumexp(-1)))
    return torch.stack(parts, dim=-1)


def path_logprob(model: SIDModel, ctx: Any, codes: Tensor, masks: Sequence[Tensor] | None = None, **options) -> Tensor:
    """float32 [B, w] log p of whole paths int64 [B or 1, w, m * L], as the model is (dropout in training mode)."""
    codes = codes.expand(len(ctx.mask), -1, -1)
    return token_logprob(model, ctx, codes, masks, **options).sum(-1)


def sid_loss(model: SIDModel, ctx: Any, codes: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    """Teacher-forced loss: mean over paths (those in mask bool [B, w]) of - sum_l log p(c_l | c_<l, ctx)."""
    logp = path_logprob(model, ctx, codes, **options)
    if mask is None:
        return -logp.mean()
    return -torch.where(mask, logp, 0.0).sum() / mask.sum().clamp(min=1)


def sequence_logprob(model: SIDModel, ctx: Any, codes: Tensor, masks: Sequence[Tensor] | None = None) -> Tensor:
    """float32 [B] log p of one sequence each, int64 [B, m * L], or [B, w] of [B, w, m * L]; dropout off, with gradient.

    For ratios of policies: ctx must have been encoded without dropout as well (`without_dropout`).
    """
    single = codes.dim() == 2
    with without_dropout(model):
        logp = path_logprob(model, ctx, codes.unsqueeze(1) if single else codes, masks)
    return logp.squeeze(1) if single else logp


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored behind; gradients are left as they are."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
