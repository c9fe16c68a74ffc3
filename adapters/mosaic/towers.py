"""The specialists of Mosaic (arXiv:2607.24015): user towers batch -> u [R, D_u] that never see a candidate.

memorization  u = W [E_user; mean E_media(last 20 liked); mean E_author(last 20 liked)]
dense_heavy   6 tokens -> self-attention -> 2 Wukong layers -> Linear
sequential    u = TransformerMoE(BOS, x_1..x_L)_L
cotrain       u = MLP([mean of events; mean of the last 10 events])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.mosaic.data import MosaicBatch, item_authors
from auto_research.blocks.behaviour_events import window_events
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer, KeyValueCache
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.relu_moe import TopKMoE
from auto_research.blocks.request_attention import NullEvent
from auto_research.blocks.request_encoder import ItemTables, embedding
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.blocks.wukong import WukongLayer
from auto_research.data.behaviours import EventWindow
from auto_research.data.requests import RequestTable

SPECIALISTS = ("memorization", "dense_heavy", "sequential", "cotrain")
LIKED = 20
NEWEST = 10
DENSE_TOKENS = 6
DEMOGRAPHICS = ("age", "gender", "occupation", "zip")


@dataclass(frozen=True)
class TowerConfig:
    """Sizes and the ablations inside towers.

    user_width D_u of an exported vector; sequence L: events that the sequential tower reads, of the history that all
    towers get; token_width: width of a dense token and of the id tables.
    user_table: False drops the user_id table (memorization). dense: wukong | mlp. ffn: moe | dense (sequential).
    """

    user_width: int = 64
    sequence: int = 128
    field: int = 16
    token_width: int = 32
    layers: int = 2
    heads: int = 2
    experts: int = 4
    expansion: int = 2
    hidden: int = 128
    user_table: bool = True
    dense: str = "wukong"
    ffn: str = "moe"
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.dense not in ("wukong", "mlp") or self.ffn not in ("moe", "dense"):
            raise ValueError(f"unknown dense {self.dense!r} or ffn {self.ffn!r}")


@dataclass(frozen=True)
class Catalogue:
    """What towers know about items and fields: vocab, item_genres and item_author [n + 1, ...], titles [n + 1, 384]."""

    vocab: dict[str, int]
    item_genres: np.ndarray
    item_author: np.ndarray
    authors: int
    titles: np.ndarray

    @classmethod
    def of(cls, table: RequestTable, titles: np.ndarray) -> Catalogue:
        author, authors = item_authors(table.interactions)
        return cls(table.vocab, table.item_genres, author, authors, titles)


class MemorizationTower(nn.Module):
    """Ids only: user table, and means over the last liked items of a media and an author table."""

    def __init__(self, config: TowerConfig, catalogue: Catalogue):
        super().__init__()
        d = config.token_width
        self.user = embedding(catalogue.vocab["user_id"], 2 * d) if config.user_table else None
        self.media, self.author = embedding(catalogue.vocab["item"], d, True), embedding(catalogue.authors, d, True)
        self.register_buffer("item_author", torch.from_numpy(catalogue.item_author), persistent=False)
        self.out = nn.Linear((4 if config.user_table else 2) * d, config.user_width, bias=False)
        self.dropout = Dropout(config.dropout)

    def forward(self, batch: MosaicBatch) -> Tensor:
        items, mask = batch.liked_item[:, -LIKED:], batch.liked_mask[:, -LIKED:]
        parts = [masked_mean(self.media(items), mask), masked_mean(self.author(self.item_author[items]), mask)]
        if self.user is not None:
            parts.insert(0, self.user(batch.user_id))
        return self.out(self.dropout(torch.cat(parts, dim=1)))


class LikedTitles(nn.Module):
    """Mean and last-10 mean of the frozen title vectors of liked items: batch -> [R, 2, 384]."""

    def __init__(self, titles: np.ndarray):
        super().__init__()
        self.register_buffer("titles", torch.as_tensor(titles, dtype=torch.float32), persistent=False)

    @property
    def width(self) -> int:
        return self.titles.shape[1]

    @torch.no_grad()
    def forward(self, batch: MosaicBatch) -> Tensor:
        means = []
        for count in (batch.liked_item.shape[1], NEWEST):
            mask = batch.liked_mask[:, -count:].float()
            share = mask / mask.sum(1, keepdim=True).clamp(min=1)
            row = torch.zeros(len(mask), len(self.titles), device=mask.device)
            row = row.scatter_add(1, batch.liked_item[:, -count:], share)  # (R, items): one product, no [R, L, 384]
            means.append(row @ self.titles)
        return torch.stack(means, dim=1)


class DenseTower(nn.Module):
    """User statistics, two title means and demographics as six tokens; `mlp` is one network on their concatenation."""

    def __init__(self, config: TowerConfig, catalogue: Catalogue):
        super().__init__()
        d = config.token_width
        self.titles = LikedTitles(catalogue.titles)
        self.tables = nn.ModuleDict({name: embedding(catalogue.vocab[name], config.field) for name in DEMOGRAPHICS})
        self.statistics = nn.Linear(3 + catalogue.item_genres.shape[1], d)
        self.all_titles, self.new_titles = nn.Linear(self.titles.width, d), nn.Linear(self.titles.width, d)
        self.demographics = nn.ModuleList([nn.Linear(2 * config.field, d), *(nn.Linear(config.field, d) for _ in "oz")])
        self.dropout = Dropout(config.dropout)
        self.mlp = config.dense == "mlp"
        if self.mlp:
            layers = [nn.Linear(DENSE_TOKENS * d, config.hidden), nn.SiLU(), Dropout(config.dropout)]
            self.network = nn.Sequential(*layers, nn.Linear(config.hidden, config.user_width))
            return
        self.norm, self.qkv, self.mix = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads = config.heads
        sizes = [(DENSE_TOKENS, 4), (8, 4)]
        self.layers = nn.ModuleList(WukongLayer(d, m, n, config.hidden, config.dropout) for m, n in sizes)
        self.out = nn.Linear(8 * d, config.user_width)

    def tokens(self, batch: MosaicBatch) -> Tensor:
        """[R, 6, d]: statistics, all titles, new titles, age and gender, occupation, zip."""
        titles = self.dropout(self.titles(batch))
        age, gender, occupation, area = (self.tables[name](getattr(batch, name)) for name in DEMOGRAPHICS)
        fields = [torch.cat([age, gender], dim=1), occupation, area]
        parts = [self.statistics(batch.user_stats), self.all_titles(titles[:, 0]), self.new_titles(titles[:, 1])]
        parts += [layer(self.dropout(x)) for layer, x in zip(self.demographics, fields, strict=True)]
        return torch.stack(parts, dim=1)

    def forward(self, batch: MosaicBatch) -> Tensor:
        x = self.tokens(batch)
        if self.mlp:
            return self.network(x.flatten(1))
        rows, count, d = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(rows, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, count, d)
        x = x + self.mix(read)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.flatten(1))


class MoEFeedForward(nn.Module):
    """Four experts, the two best by softmax renormalised: [..., D] -> [..., D]; keeps its load-balance loss."""

    def __init__(self, width: int, experts: int, expansion: int):
        super().__init__()
        self.moe = TopKMoE(1, width, experts, expansion)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x.reshape(1, -1, x.shape[-1])).reshape(x.shape)


class EventTables(ItemTables):
    """The tables of an event, as `RequestEncoder` has them: item w, genres w, rating w/2, age w/2."""

    def __init__(self, field: int, catalogue: Catalogue):
        super().__init__()
        genres = torch.as_tensor(catalogue.item_genres, dtype=torch.float32)
        self.register_buffer("item_genres", genres, persistent=False)
        self.item, self.genres = embedding(catalogue.vocab["item"], field, True), nn.Linear(genres.shape[1], field)
        self.rating = embedding(catalogue.vocab["hist_rating"], field // 2, True)
        self.event_age = embedding(catalogue.vocab["hist_age"], field // 2)


class SequentialTower(nn.Module):
    """Causal pre-norm Transformer over BOS and the last L events; u is the state of the newest event.

    `targets(states, batch)` gives the isolated candidate rows of the two auxiliary heads (like, engage): [P, 2].
    """

    def __init__(self, config: TowerConfig, catalogue: Catalogue):
        super().__init__()
        c, d, self.length = config, config.user_width, config.sequence
        self.encoder = EventTables(c.field, catalogue)
        self.events, self.target = nn.Linear(3 * c.field, d), nn.Linear(2 * c.field, d)
        self.bos, self.dropout = NullEvent(d), Dropout(c.dropout)
        sizes = BiasedConfig(d, c.heads, c.layers, c.expansion * d, "relative", dropout=c.dropout, times=0)
        self.transformer = BiasedTransformer(sizes)
        if c.ffn == "moe":
            for block in self.transformer.blocks:
                block.ffn = MoEFeedForward(d, c.experts, c.expansion)
        self.auxiliary = nn.Linear(d, 2)

    def states(self, batch: MosaicBatch) -> tuple[Tensor, KeyValueCache]:
        """u [R, D_u] and what candidates read."""
        window = EventWindow(*(field[:, -self.length :] for field in batch.window("hist")))
        x = self.events(window_events(self.encoder, window))
        x, mask = self.bos(self.dropout(x), window.mask)
        hidden, cache = self.transformer.prefill(x, mask)
        some = window.mask[:, -1:]  # left-padded: the newest event is last, if there is any
        return torch.where(some, hidden[:, -1], hidden[:, 0]), cache

    def forward(self, batch: MosaicBatch) -> Tensor:
        return self.states(batch)[0]

    def targets(self, cache: KeyValueCache, batch: MosaicBatch) -> Tensor:
        """Logits [P, 2] of like and engage at isolated target tokens."""
        x = self.target(self.encoder.look_up(batch.item))
        return self.auxiliary(self.transformer.candidates(x, cache, batch.request_of))

    def take_balance(self) -> Tensor:
        """Load-balance loss summed over the layers of the last pass in training, once; 0 with a dense network."""
        layers = [b.ffn.moe for b in self.transformer.blocks if isinstance(b.ffn, MoEFeedForward)]
        if not layers:
            return self.auxiliary.weight.new_zeros(())
        return torch.stack([layer.take_balance() for layer in layers]).sum()


class PooledTower(nn.Module):
    """CoTrain: mean of all and of the last 10 events -> MLP hidden - D_u."""

    def __init__(self, config: TowerConfig, catalogue: Catalogue):
        super().__init__()
        self.encoder = EventTables(config.field, catalogue)
        width = 6 * config.field
        layers = [Dropout(config.dropout), nn.Linear(width, config.hidden), nn.SiLU(), Dropout(config.dropout)]
        self.network = nn.Sequential(*layers, nn.Linear(config.hidden, config.user_width))

    def forward(self, batch: MosaicBatch) -> Tensor:
        events = window_events(self.encoder, batch.window("hist"))
        new = slice(max(0, events.shape[1] - NEWEST), None)
        means = [masked_mean(events, batch.hist_mask), masked_mean(events[:, new], batch.hist_mask[:, new])]
        return self.network(torch.cat(means, dim=1))


class JointTower(nn.Module):
    """Ablation: several specialists, the sequential one among them, in one model.

    batch -> their vectors side by side [R, K D_u]; states, targets and balance as those of the sequential specialist.
    """

    def __init__(self, kinds: Sequence[str], config: TowerConfig, catalogue: Catalogue):
        super().__init__()
        self.towers = nn.ModuleDict({kind: TOWERS[kind](config, catalogue) for kind in kinds})

    def forward(self, batch: MosaicBatch) -> Tensor:
        return self.states(batch)[0]

    def states(self, batch: MosaicBatch) -> tuple[Tensor, KeyValueCache]:
        """Vectors [R, K D_u] and what candidates read."""
        last, cache = self.towers["sequential"].states(batch)
        parts = [last if kind == "sequential" else tower(batch) for kind, tower in self.towers.items()]
        return torch.cat(parts, dim=1), cache

    def targets(self, cache: KeyValueCache, batch: MosaicBatch) -> Tensor:
        """Logits [P, 2] of the auxiliary heads."""
        return self.towers["sequential"].targets(cache, batch)

    def take_balance(self) -> Tensor:
        """Load-balance loss of the last pass in training."""
        return self.towers["sequential"].take_balance()


TOWERS = {
    "memorization": MemorizationTower,
    "dense_heavy": DenseTower,
    "sequential": SequentialTower,
    "cotrain": PooledTower,
}


def build_tower(kind: str, config: TowerConfig, catalogue: Catalogue) -> nn.Module:
    """An untrained specialist by name."""
    return TOWERS[kind](config, catalogue)
