"""The generator of UniR2: prefix and code tokens in one causal stack that keeps what a ranking branch reads of it.

Shapes: B requests, P prefix tokens, w branches (beams, candidates), L code levels, T tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.biased_transformer import BiasedTransformer, KeyValueCache
from auto_research.blocks.branch_cache import OwnCache, branch_attention
from auto_research.blocks.semantic_ids import SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDModel


class Context(NamedTuple):
    """A read prefix: keys and values of every layer, and per layer the normed inputs [B, P, D] of its tokens.

    newest: int64[B] place of the last real token.
    """

    shared: KeyValueCache
    inputs: tuple[Tensor, ...]
    newest: Tensor

    @property
    def mask(self) -> Tensor:
        return self.shared.mask


class Trajectory(NamedTuple):
    """Code tokens of the branches: keys and values, and per layer their normed inputs [B, w, t, D]."""

    own: OwnCache
    inputs: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        return self.own.length

    @property
    def keys(self) -> tuple[Tensor, ...]:
        return self.own.keys

    @property
    def values(self) -> tuple[Tensor, ...]:
        return self.own.values

    def reorder(self, parent: Tensor) -> Trajectory:
        """Branch c continues branch parent[b, c]."""
        index = parent[:, :, None, None]
        moved = tuple(x.gather(1, index.expand(-1, -1, *x.shape[2:])) for x in self.inputs)
        return Trajectory(self.own.reorder(parent), moved)


class Generator(SIDModel):
    """Decoder over prefix and codes that also keeps what a ranking branch reads: the normed inputs of its layers."""

    def __init__(self, vocab: SIDVocab, config: SIDConfig):
        super().__init__(vocab, config)
        self.trunk = BiasedTransformer(config.stack(config.layers, "none"))
        self.place = nn.Parameter(torch.randn(vocab.levels + 1, config.width) * config.std)

    def read(self, x: Tensor, mask: Tensor) -> Context:
        """Prefix tokens [B, P, D], causal among themselves; they never see a code or a ranking token."""
        batch, length, _ = x.shape
        x = self.dropout(x)
        position = torch.arange(length, device=x.device).expand(batch, -1)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        visible = (causal & mask.unsqueeze(1)) | torch.eye(length, dtype=torch.bool, device=x.device)
        keys, values, inputs = [], [], []
        for block in self.trunk.blocks:
            inputs.append(block.norm_attention(x))
            q, k, v = block.project(x, position)
            keys.append(k), values.append(v)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1)))
        newest = (mask.long() * torch.arange(1, length + 1, device=mask.device)).argmax(1)
        return Context(KeyValueCache(tuple(keys), tuple(values), mask, position, None), tuple(inputs), newest)

    def spell(
        self, tokens: Tensor, ctx: Context, own: Trajectory | None = None, *, visible: Tensor | None = None
    ) -> tuple[Tensor, Trajectory]:
        """States [B, w, T, D] of code tokens int64 [B, w, T] of the branches, and the longer trajectory.

        visible: bool [B, w, P], what of the prefix each branch may read beyond the padding mask.
        """
        known = 0 if own is None else own.length
        batch, width, length = tokens.shape
        x = self.dropout(self.embedding(tokens) + self.place[known : known + length]).flatten(0, 1)
        position = torch.arange(known + length, device=tokens.device).expand(batch * width, -1)
        readable = ctx.mask.unsqueeze(1) if visible is None else visible & ctx.mask.unsqueeze(1)
        keys, values, inputs = [], [], []
        for n, block in enumerate(self.trunk.blocks):
            inputs.append(block.norm_attention(x).unflatten(0, (batch, width)))
            q, k, v = block.project(x, position[:, known:])
            if own is not None:
                k = torch.cat([own.keys[n].flatten(0, 1), k], dim=2)
                v = torch.cat([own.values[n].flatten(0, 1), v], dim=2)
                inputs[-1] = torch.cat([own.inputs[n], inputs[-1]], dim=2)
            x = block.finish(x, branch_attention(block, q, k, v, ctx.shared, n, readable, position))
            keys.append(k.unflatten(0, (batch, width))), values.append(v.unflatten(0, (batch, width)))
        made = Trajectory(OwnCache(tuple(keys), tuple(values)), tuple(inputs))
        return self.trunk.norm(x).unflatten(0, (batch, width)), made

    def whole(self, codes: Tensor, ctx: Context) -> tuple[Tensor, Trajectory]:
        """States and trajectory of [BOS, c_1 .. c_L], L + 1 tokens, of codes int64 [B, w, L]."""
        last = torch.where(codes[..., -1:] < 0, self.vocab.pad, codes[..., -1:] + self.offset[-1])
        return self.spell(torch.cat([self.target_tokens(codes), last], dim=2), ctx)

    def logprob(self, states: Tensor, codes: Tensor) -> Tensor:
        """float32 [B, w, L] log p of the codes out of the states of `whole`."""
        parts = []
        for level in range(self.vocab.levels):
            logp = self.logits(states[:, :, level], level).float().log_softmax(-1)
            parts.append(logp.gather(-1, codes[..., level : level + 1].clamp(min=0)).squeeze(-1))
        return torch.stack(parts, dim=2)
