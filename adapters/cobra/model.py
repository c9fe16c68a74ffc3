"""COBRA (arXiv:2503.02453): an item is a coarse semantic id and a dense vector; a causal decoder writes first the id of
the next item, then, knowing the id, its vector.

    S_1:t = [BOS, ID_1, v_1, .., ID_t, v_t]
    P(ID_t+1, v_t+1 | S_1:t) = P(ID_t+1 | S_1:t) P(v_t+1 | ID_t+1, S_1:t)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.cobra.text_encoder import PackedTexts, TextBatch, TextEncoder
from auto_research.blocks.branch_cache import OwnCache, Prompt
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDDecoder
from auto_research.runtime.precision import float32_region

EPS = 1e-6


@dataclass(frozen=True)
class CobraConfig:
    """width .. dropout: of decoder and text encoder.  length: items of a history.  temperature: tau_d.  dense_weight: lambda.

    ids, dense: the two kinds of tokens (wo_id, wo_dense take one away).  frozen: v is a constant.  parallel: vhat does
    not know the id.  finetuned: the pretrained encoder behind the word-piece states is trained too, its first
    text_layers layers (None: all).
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 256
    dropout: float = 0.1
    length: int = 20
    temperature: float = 0.1
    dense_weight: float = 1.0
    ids: bool = True
    dense: bool = True
    frozen: bool = False
    parallel: bool = False
    finetuned: bool = False
    text_layers: int | None = None

    def __post_init__(self) -> None:
        if not (self.ids or self.dense):
            raise ValueError("an item needs an id, a vector, or both")
        if self.finetuned and (self.frozen or not self.dense):
            raise ValueError("an encoder that is trained needs vectors that are")


class CobraBatch(NamedTuple):
    """Windows of m items: items int64[B, m] (0 = padding on the left), index int64[B, m] of each in the distinct items of
    the batch (row 0 of them is the padding item), row and column int64[T] of the targets, and the texts of the distinct
    items [N] or None."""

    items: Tensor
    index: Tensor
    row: Tensor
    column: Tensor
    text: TextBatch | None

    def to(self, device: torch.device) -> CobraBatch:
        return CobraBatch(*(None if part is None else part.to(device) for part in self))

    @classmethod
    def of(cls, items: np.ndarray, target: np.ndarray, texts: PackedTexts | None) -> CobraBatch:
        """items int64[B, n] and what followed each of them, target int64[B, n] (0 = not trained).

        Distinct items and targets are found on the CPU: their number is a shape, for which a device would have to wait.
        """
        joined = np.concatenate([items, target[:, -1:]], axis=1)
        distinct, index = np.unique(np.append(0, joined), return_inverse=True)
        trained = np.concatenate([np.zeros_like(items[:, :1]), target], axis=1) > 0
        arrays = (joined, index.reshape(-1)[1:].reshape(joined.shape), *np.nonzero(trained))
        return cls(*map(torch.from_numpy, arrays), None if texts is None else texts.batch(distinct))


class CascadeDecoder(SIDDecoder):
    """The causal stack. An item takes L id tokens (config.ids) and one vector (config.dense); a BOS stands in front.

    An item's place counts so that the item to come has place `length`, however short the history is.
    """

    def __init__(self, vocab: SIDVocab, config: CobraConfig):
        sizes = SIDConfig(
            config.width, config.heads, 0, config.layers, config.hidden, config.dropout, head="level", positions=0,
            start="prompt",
        )  # fmt: skip
        super().__init__(vocab, sizes)
        self.choice = config
        self.ids = vocab.levels if config.ids else 0
        self.per_item = self.ids + config.dense
        std = sizes.std
        self.bos = nn.Parameter(torch.randn(config.width) * std)
        self.place = nn.Parameter(torch.randn(config.length + 1, config.width) * std)
        self.kind = nn.Parameter(torch.randn(self.per_item, config.width) * std)
        if not config.ids:
            self.embedding = self.heads = None

    def sequence(self, tokens: Tensor, vectors: Tensor | None, mask: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Input float[B, 1 + m s, D] and its mask: id tokens int64[B, m, L], vectors [B, m, D], mask bool[B, m]; `first`
        is the place of the first item."""
        parts = [self.embedding(tokens)] if self.ids else []
        parts += [vectors.unsqueeze(2)] if self.choice.dense else []
        x = torch.cat(parts, dim=2) + self.kind + self.place[first : first + mask.shape[1]].unsqueeze(1)
        x = torch.cat([self.bos.expand(len(x), 1, -1), x.flatten(1, 2)], dim=1)
        return x, F.pad(mask.repeat_interleave(self.per_item, dim=1), (1, 0), value=True)

    def spell(self, tokens: Tensor, ctx: Prompt, own: OwnCache | None = None, **options) -> tuple[Tensor, OwnCache]:
        """As SIDDecoder; id tokens int64[B, w, T] of the item to come get its place and their level."""
        if not tokens.is_floating_point():
            known = 0 if own is None else own.length
            tokens = self.embedding(tokens) + self.kind[known : known + tokens.shape[2]] + self.place[-1]
        return super().spell(tokens, ctx, own, **options)


class Cobra(nn.Module):
    """Decoder, text encoder and dense head; `sid` is what beam searches spell with.

    table: cells (items share an id) or, without vectors, ids of single items.  texts: None without vectors.
    pretrained: the encoder of config.finetuned.
    """

    def __init__(
        self, table: SIDTable, config: CobraConfig, texts: PackedTexts | None, pretrained: nn.Module | None = None
    ):
        super().__init__()
        vocab = SIDVocab.of(table)
        self.config, self.texts = config, texts
        self.sid = CascadeDecoder(vocab, config)
        self.register_buffer("tokens", torch.from_numpy(vocab.item_tokens(table)), persistent=False)
        self.register_buffer("codes", torch.from_numpy(table.codes.copy()), persistent=False)
        self.text = self.dense_head = None
        self.catalogue: Tensor | None = None
        if config.dense:
            dropout = 0.0 if config.frozen else config.dropout  # a constant has no noise
            self.text = TextEncoder(texts, config.width, config.heads, config.hidden, dropout, pretrained)
            self.text.requires_grad_(not config.frozen)
            self.dense_head = nn.Linear(config.width, config.width)

    def vectors(self, text: TextBatch) -> Tensor:
        """v float[N, D]."""
        v = self.text(text)
        return v.detach() if self.config.frozen else v

    @torch.no_grad()
    def index(self) -> Tensor | None:
        """Encode the whole catalogue again, float[n_items + 1, D], for `context` and the search; None without vectors."""
        if self.config.dense:
            self.eval()
            every = self.texts.batch(np.arange(self.texts.n_items + 1))
            self.catalogue = self.vectors(every.to(self.tokens.device))
        return self.catalogue

    def context(self, items: Tensor, user: Tensor | None = None) -> Prompt:
        """Prompt of histories items int64[B, n <= length]; the vectors are those of the last `index`."""
        vectors = self.catalogue[items] if self.config.dense else None
        x, mask = self.sid.sequence(self.tokens[items], vectors, items > 0, self.config.length - items.shape[1])
        return self.sid(x, mask=mask)[1]

    def expected(self, ctx: Prompt, codes: Tensor) -> Tensor:
        """vhat float[B, w, D] of the item to come for each id int64[B, w, L] (ids ignored where vhat does not know them)."""
        if self.config.parallel or not self.config.ids:
            return self.dense_head(ctx.last).unsqueeze(1).expand(-1, codes.shape[1], -1)
        return self.dense_head(self.sid.spell(codes + self.sid.offset, ctx)[0][:, :, -1])

    def states(self, batch: CobraBatch, vectors: Tensor | None) -> Tensor:
        """Decoder states [B, 1 + m s, D] of whole windows; vectors [N, D] of the distinct items."""
        own = vectors[batch.index] if self.config.dense else None
        first = self.config.length + 1 - batch.items.shape[1]
        x, mask = self.sid.sequence(self.tokens[batch.items], own, batch.items > 0, first)
        return self.sid(x, mask=mask)[0]

    def losses(self, batch: CobraBatch, vectors: Tensor | None = None) -> dict[str, Tensor]:
        """L_sparse, L_dense (means over targets) and their sum. vectors: [N, D] of the distinct items, default encoded."""
        if vectors is None and self.config.dense:
            vectors = self.vectors(batch.text)
        states = self.states(batch, vectors)
        row, column = batch.row, batch.column
        before = column * self.sid.per_item  # the last token that knows nothing of the target
        zero = states.new_zeros(())
        terms = {"sparse": zero, "dense": zero}
        if self.config.ids:
            codes = self.codes[batch.items[row, column]]
            for level in range(self.sid.ids):
                logits = self.sid.logits(states[row, before + level], level)
                terms["sparse"] = terms["sparse"] + F.cross_entropy(logits.float(), codes[:, level])
        if self.config.dense:
            known = 0 if self.config.parallel else self.sid.ids
            vhat = self.dense_head(states[row, before + known])
            terms["dense"] = info_nce(vhat, vectors[1:], batch.index[row, column] - 1, self.config.temperature)
        return terms | {"loss": terms["sparse"] + self.config.dense_weight * terms["dense"]}

    def training_loss(self, batch: CobraBatch) -> Tensor:
        return self.losses(batch)["loss"]


def unit(x: Tensor) -> Tensor:
    """Rows of length 1 in float32."""
    return F.normalize(x.float(), dim=-1, eps=EPS)


def info_nce(vhat: Tensor, vectors: Tensor, index: Tensor, temperature: float) -> Tensor:
    """Mean of - log softmax_j(cos(vhat_t, v_j) / tau)[index_t]; vhat [T, D], vectors [N, D] of distinct items."""
    with float32_region(vhat.device):
        return F.cross_entropy(unit(vhat) @ unit(vectors).t() / temperature, index)
