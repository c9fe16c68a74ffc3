"""Tokens of prefix and candidate: profile and events of a request, and the four ranking tokens of an item.

The tables of the ranking tokens belong to the ranking loss alone. All item statistics come from train rows; a row that is
itself trained on sees them without its own rating.
Shapes: B requests, n events, w candidates of each, G genres, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adapters.unir2.events import Requests, UnifiedSplit
from auto_research.data.prefix import LOG_BUCKETS
from auto_research.runtime.precision import float32_region

START_SCALE = 0.08
RATINGS = 6
RANKING_TOKENS = 4
DECILES, MEAN_BUCKETS = 11, 10  # 0 is padding, and an item without train rows


class ItemFacts(NamedTuple):
    """genres float32[I + 1, G]; decade int64[I + 1]; decades, profile: sizes of the tables of decade and profile.

    decile, mean: int64[I + 1, 6], column 0 of all train rows, column r without one of them that was rated r.
    """

    genres: Tensor
    decade: Tensor
    decile: Tensor
    mean: Tensor
    decades: int
    profile: tuple[int, int, int, int]


def item_facts(data: UnifiedSplit, hashed: int) -> ItemFacts:
    """Genres, decade, popularity decile 1..10 (ties share one) and mean train rating in half stars 1..9, 0 without."""
    table, rows = data.interactions, data.known_rows
    popularity = data.popularity()
    total = np.bincount(table.item[rows], weights=table.rating[rows], minlength=data.n_items + 1)
    ordered = np.sort(popularity[popularity > 0])
    without = np.arange(RATINGS)
    count = popularity[:, None] - (without > 0)  # (I + 1, 6)
    decile = 1 + np.searchsorted(ordered, count, side="left") * 10 // max(1, len(ordered))
    mean = np.clip(np.rint(2 * (total[:, None] - without) / np.maximum(count, 1)) - 1, 1, MEAN_BUCKETS - 1)
    known = [np.where(count > 0, x, 0).astype(np.int64) for x in (np.minimum(decile, DECILES - 1), mean)]
    sizes = table.vocab
    return ItemFacts(
        torch.from_numpy(table.item_genres.astype(np.float32)),
        torch.from_numpy(table.item_decade.astype(np.int64)),
        torch.from_numpy(known[0]),
        torch.from_numpy(known[1]),
        sizes["decade"],
        (sizes.get("gender", 1), sizes.get("age", 1), sizes.get("occupation", 1), hashed),
    )


def table_of(rows: int, width: int) -> nn.Embedding:
    made = nn.Embedding(rows, width)
    nn.init.normal_(made.weight, std=START_SCALE)
    return made


def mean_genres(genres: Tensor) -> Tensor:
    """Multi-hot rows divided by their number of genres, so that a product with a table is the mean of its rows."""
    return genres / genres.sum(1, keepdim=True).clamp(min=1)


class PrefixTokens(nn.Module):
    """[B, 4 + n, D]: profile tokens, then item + mean genre + rating + gap + place counted from the newest."""

    def __init__(self, facts: ItemFacts, history: int, width: int):
        super().__init__()
        self.register_buffer("genres", mean_genres(facts.genres), persistent=False)
        self.profile = nn.ModuleList(table_of(rows, width) for rows in facts.profile)
        self.item = table_of(len(facts.genres), width)
        self.genre = nn.Linear(facts.genres.shape[1], width, bias=False)
        self.rating, self.gap = table_of(RATINGS, width), table_of(LOG_BUCKETS, width)
        self.kind = nn.Parameter(torch.randn(len(facts.profile), width) * START_SCALE)
        self.place = nn.Parameter(torch.randn(history, width) * START_SCALE)

    def forward(self, request: Requests) -> tuple[Tensor, Tensor]:
        """Tokens and their mask bool[B, 4 + n]."""
        who = torch.stack([table(request.profile[:, k]) for k, table in enumerate(self.profile)], dim=1) + self.kind
        events = self.item(request.item) + self.genre(self.genres[request.item])
        events = events + self.rating(request.rating) + self.gap(request.gap) + self.place[-request.item.shape[1] :]
        mask = torch.cat([request.mask.new_ones(who.shape[:2]), request.mask], dim=1)
        return torch.cat([who, events], dim=1), mask


def cross_scalars(genres: Tensor, request: Requests, item: Tensor) -> Tensor:
    """float32 [B, w, 3] of candidates int64 [B, w] against the events of the request that share a genre with them:

    log1p of their number, log1p of the hours since the newest (log1p of a year without one), their mean rating (0).
    """
    with float32_region(item.device):
        shared = (genres[item] @ genres[request.item].transpose(1, 2) > 0) & request.mask.unsqueeze(1)  # (B, w, n)
        count = shared.sum(2).float()
        hours = request.hours.unsqueeze(1).masked_fill(~shared, 24.0 * 365).amin(2).clamp(max=24.0 * 365)
        rating = (request.rating.float().unsqueeze(1) * shared).sum(2) / count.clamp(min=1)
        return torch.stack([count.log1p(), hours.log1p(), rating], dim=2)


class RankingTokens(nn.Module):
    """The R = 4 tokens of a candidate [B, w, 4, D]: id, genres and decade, popularity and rating, cross features."""

    def __init__(self, facts: ItemFacts, width: int):
        super().__init__()
        for name in ("genres", "decade", "decile", "mean"):
            self.register_buffer(f"of_{name}", getattr(facts, name), persistent=False)
        self.item = table_of(len(facts.genres), width)
        self.genre, self.decade = nn.Linear(facts.genres.shape[1], width, bias=False), table_of(facts.decades, width)
        self.decile, self.mean = table_of(DECILES, width), table_of(MEAN_BUCKETS, width)
        self.cross = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, width))
        self.kind = nn.Parameter(torch.randn(RANKING_TOKENS, width) * START_SCALE)

    def forward(self, request: Requests, item: Tensor, own: Tensor | None = None) -> Tensor:
        """own: int64[B, w] rating of the train row that the candidate is, 0 where it is none (default: nowhere)."""
        genres = mean_genres(self.of_genres)
        own = torch.zeros_like(item) if own is None else own
        tokens = [
            self.item(item),
            self.genre(genres[item]) + self.decade(self.of_decade[item]),
            self.decile(self.of_decile[item, own]) + self.mean(self.of_mean[item, own]),
            self.cross(cross_scalars(self.of_genres, request, item)),
        ]
        return torch.stack(tokens, dim=2) + self.kind
