"""GenRank (arXiv:2505.04180): items are given, actions are generated; one token per event, masked-action candidates.

    h_event = Item(i) + Act(a) + Pos + Req + Time            h_cand = Item(i) + MASK + Pos + Req + Time
    events read the profile token U, themselves and strictly earlier seconds
    candidates of request g read U, events before t_g and themselves; nothing reads a candidate
    A_k = softmax(q k^T / sqrt(d_h) - m_k (pos_q - pos_k) + mask),   m_k = 2^(-8 k / H)

`interleaved` is HSTU's organisation with the same blocks: item and action tokens in turn, the action read out at the
candidate's item token. Shapes: B windows of n events, R requests, P candidates, S = 1 + n or 1 + 2n keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.genrank.windows import ORDINALS, WindowBatch
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer, KeyValueCache
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.pairs import from_grid, to_grid
from auto_research.blocks.request_encoder import START_SCALE, USER_FIELDS, embedding
from auto_research.blocks.request_groups import collect, request_groups, spread
from auto_research.data.prefix import LIKE_RATING, LOG_BUCKETS, LOVE_RATING

TASKS = 3  # engage, like, love
PREFIX = -1  # position of U: at distance 0 from everything
CHOICES = {
    "organisation": ("action", "interleaved"),
    "bias": ("alibi", "relative"),
    "inputs": ("all", "position"),
    "items": ("full", "id"),
    "candidates": ("isolated", "together"),
}


@dataclass(frozen=True)
class GenRankConfig:
    """Sizes: width D, heads H, layers, window n, FFN expansion; dropout on the embedded fields and after the FFN.

    Switches: organisation action | interleaved; bias alibi | relative (learned tables of 128 position and 32 time
    distances); inputs all | position (no Req, no Time); items full | id; candidates isolated | together (those of one
    request read each other).
    """

    field: int = 16
    width: int = 64
    heads: int = 4
    layers: int = 3
    window: int = 96
    expansion: int = 4
    dropout: float = 0.2
    organisation: str = "action"
    bias: str = "alibi"
    inputs: str = "all"
    items: str = "full"
    candidates: str = "isolated"

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")

    @property
    def per_event(self) -> int:
        """Tokens of an event."""
        return 2 if self.organisation == "interleaved" else 1


class ItemTokens(nn.Module):
    """Item(i) = W [id; genres; decade; popularity at that time] + b, or W id + b: [..., D]; dropout on W's input."""

    def __init__(
        self, vocab: dict[str, int], item_genres: Tensor, field: int, width: int, items: str, dropout: float = 0.0
    ):
        super().__init__()
        self.full = items == "full"
        self.item = embedding(vocab["item"], field, padding=True)
        genres = torch.as_tensor(item_genres, dtype=torch.float32)
        self.register_buffer("item_genres", genres, persistent=False)
        if self.full:
            self.genres = nn.Linear(genres.shape[1], field)
            self.decade = embedding(vocab["decade"], field)
            self.popularity = nn.Linear(2, field)
        self.dropout = Dropout(dropout)
        self.out = nn.Linear(field * (4 if self.full else 1), width)

    def forward(self, item: Tensor, decade: Tensor, popularity: Tensor) -> Tensor:
        if not self.full:
            return self.out(self.dropout(self.item(item)))
        genres = F.embedding(item, self.genres(self.item_genres))
        parts = [self.item(item), genres, self.decade(decade), self.popularity(popularity)]
        return self.out(self.dropout(torch.cat(parts, dim=-1)))


class ActionTokens(nn.Module):
    """Act(a): embeddings of the rating (1..5), of the like bit and of the love bit, summed."""

    def __init__(self, width: int):
        super().__init__()
        self.rating, self.like, self.love = (embedding(rows, width) for rows in (6, 2, 2))

    def forward(self, rating: Tensor) -> Tensor:
        like, love = (rating >= LIKE_RATING).long(), (rating >= LOVE_RATING).long()
        return self.rating(rating) + self.like(like) + self.love(love)


class PlaceTokens(nn.Module):
    """Pos + Req + Time of a token: position in the window, ordinal of its second, log2 seconds since the one before."""

    def __init__(self, window: int, width: int, inputs: str):
        super().__init__()
        self.position = embedding(window + 1, width)
        everything = inputs == "all"
        self.ordinal = embedding(ORDINALS, width) if everything else None
        self.gap = embedding(LOG_BUCKETS, width) if everything else None

    def forward(self, position: Tensor, ordinal: Tensor, gap: Tensor) -> Tensor:
        x = self.position(position.clamp(max=self.position.num_embeddings - 1))
        return x if self.ordinal is None else x + self.ordinal(ordinal) + self.gap(gap)


class GenRank(nn.Module):
    """The ranker: model(batch) -> logits [P, 3] for engage, like, love. Takes batches of a `WindowTable`.

    `prepare` prefills keys and values of the windows once, `score` runs one masked row per candidate against them.
    """

    def __init__(self, config: GenRankConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        width = config.width
        self.dropout = Dropout(config.dropout)
        self.item = ItemTokens(vocab, item_genres, config.field, width, config.items, config.dropout)
        self.action = ActionTokens(width)
        self.place = PlaceTokens(config.window, width, config.inputs)
        self.mask = nn.Parameter(torch.randn(width) * START_SCALE) if config.organisation == "action" else None
        self.profile = nn.ModuleDict({name: embedding(vocab[name], config.field) for name in USER_FIELDS})
        self.user = nn.Linear(len(USER_FIELDS) * config.field, width)
        sizes = {"width": width, "heads": config.heads, "layers": config.layers, "hidden": config.expansion * width}
        self.transformer = BiasedTransformer(
            BiasedConfig(**sizes, bias=config.bias, dropout=config.dropout, attention_dropout=0.0)
        )
        self.head = nn.Linear(width, TASKS)

    # Tokens

    def event_tokens(self, batch: WindowBatch) -> Tensor:
        """U and the events of every window, [B, S, D]."""
        first = torch.searchsorted(batch.window_of, torch.arange(len(batch.event_item), device=batch.window_of.device))
        fields = torch.cat([self.profile[name](getattr(batch, name)[first]) for name in USER_FIELDS], dim=1)
        item = self.item(batch.event_item, batch.event_decade, batch.event_popularity)
        place = self.place(batch.event_position, batch.event_ordinal, batch.event_gap)
        action = self.action(batch.event_rating)
        if self.config.organisation == "interleaved":
            events = torch.stack([item + place, action + place], dim=2).flatten(1, 2)  # i1, a1, i2, a2, ...
        else:
            events = item + action + place
        return torch.cat([self.user(self.dropout(fields)).unsqueeze(1), events], dim=1)

    def candidate_tokens(self, batch: WindowBatch) -> Tensor:
        """Candidates without an action, [P, D]."""
        place = self.place(batch.position, batch.ordinal, batch.gap)  # (R, D)
        x = self.item(batch.item, batch.decade, batch.popularity) + place[batch.request_of]
        return x if self.mask is None else x + self.mask

    def keys(self, batch: WindowBatch) -> tuple[Tensor, Tensor, Tensor]:
        """mask bool, position and second, each [B, S], of U and the events."""

        def with_prefix(x: Tensor, prefix: int | bool) -> Tensor:
            return F.pad(x.repeat_interleave(self.config.per_event, dim=1), (1, 0), value=prefix)

        time = with_prefix(batch.event_time, 0)
        return with_prefix(batch.event_mask, True), with_prefix(batch.event_position, PREFIX), time

    def event_visible(self, batch: WindowBatch) -> Tensor:
        """bool[B, S, S]: U and strictly smaller seconds; an action token also its own item token."""
        _, position, time = self.keys(batch)
        visible = time.unsqueeze(1) < time.unsqueeze(2)  # U has second 0
        visible[:, 0] = False
        if self.config.organisation == "interleaved":
            own = position.unsqueeze(1) == position.unsqueeze(2)
            visible = visible | own.tril()
        return visible

    def candidate_visible(self, batch: WindowBatch) -> Tensor:
        """bool[P, S]: U and events before the candidate's second."""
        mask, _, time = self.keys(batch)
        window = batch.window_of
        return (mask[window] & (time[window] < batch.time.unsqueeze(1)))[batch.request_of]

    # Serving and training

    def prepare(self, batch: WindowBatch) -> KeyValueCache:
        """Keys and values of the windows' events; no event depends on a candidate."""
        mask, position, time = self.keys(batch)
        visible = self.event_visible(batch)
        return self.transformer.cache(self.event_tokens(batch), mask, position=position, time=time, visible=visible)

    def score(self, cache: KeyValueCache, batch: WindowBatch) -> Tensor:
        """Logits [P, 3], one row per candidate against the cache."""
        x, visible = self.candidate_tokens(batch), self.candidate_visible(batch)
        if self.config.candidates == "together":
            return self.head(self._together(x, cache, batch))
        states = self.transformer.candidates(
            x,
            cache,
            batch.window_of[batch.request_of],
            position=batch.position[batch.request_of],
            time=batch.time[batch.request_of],
            pair_mask=visible,
        )
        return self.head(states)

    def forward(self, batch: WindowBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def _together(self, x: Tensor, cache: KeyValueCache, batch: WindowBatch) -> Tensor:
        """Candidate rows [P, D] that also read the other candidates of their request (ablation)."""
        where, when = batch.position.unsqueeze(1), batch.time.unsqueeze(1)  # (R, 1)
        window = batch.window_of
        visible = cache.mask[window] & (cache.time[window] < when)  # (R, S)
        groups = request_groups(batch.request_of, len(window))
        for block, k, v in zip(self.transformer.blocks, cache.keys, cache.values, strict=True):
            q, own_k, own_v = (part.squeeze(2) for part in block.project(x.unsqueeze(1), where))  # (P, H, dh)
            bias = block.bias(where, cache.position[window], when, cache.time[window])  # (R, H, 1, S)
            own_bias = block.bias(where, where, when, when)  # (R, H, 1, 1)
            read = torch.zeros_like(q)
            for g in groups:
                grid_q, grid_k, grid_v = (spread(part[g.pairs], g).transpose(1, 2) for part in (q, own_k, own_v))
                rows = window[g.rows]
                filled = spread(torch.ones_like(g.row, dtype=torch.bool), g)  # (r, J)
                seen = torch.cat([visible[g.rows], filled], dim=1)[:, None, None]
                both = torch.cat([bias[g.rows], own_bias[g.rows].expand(-1, -1, -1, g.width)], dim=3)
                part = F.scaled_dot_product_attention(
                    grid_q,
                    torch.cat([k[rows], grid_k], dim=2),
                    torch.cat([v[rows], grid_v], dim=2),
                    attn_mask=both.masked_fill(~seen, -torch.inf),
                )  # (r, H, J, dh)
                read = read.index_copy(0, g.pairs, collect(part.transpose(1, 2), g))
            x = block.finish(x.unsqueeze(1), read.unsqueeze(2)).squeeze(1)
        return self.transformer.norm(x)

    # Reference and cost

    def full(self, batch: WindowBatch) -> tuple[Tensor, Tensor]:
        """Logits [P, 3] and event states [B, S, D] from one list of 1 + n + m tokens per window and its boolean mask."""
        owner = batch.window_of[batch.request_of]
        windows = len(batch.event_item)
        mask, position, time = self.keys(batch)
        own, filled = to_grid(self.candidate_tokens(batch), owner, windows)  # (B, m, D)
        places = (batch.position[batch.request_of], batch.time[batch.request_of], batch.request_of + 1)
        at, when, request = (to_grid(place, owner, windows)[0] for place in places)
        events, candidates = mask.shape[1], filled.shape[1]
        visible = mask.new_zeros(windows, events + candidates, events + candidates)
        visible[:, :events, :events] = self.event_visible(batch)
        visible[:, events:, :events] = time.unsqueeze(1) < when.unsqueeze(2)
        if self.config.candidates == "together":
            visible[:, events:, events:] = request.unsqueeze(1) == request.unsqueeze(2)
        states = self.transformer(
            torch.cat([self.event_tokens(batch), own], dim=1),
            torch.cat([mask, filled], dim=1),
            position=torch.cat([position, at], dim=1),
            time=torch.cat([time, when], dim=1),
            visible=visible,
        )
        return self.head(from_grid(states[:, events:], owner)), states[:, :events]

    def tokens(self, batch: WindowBatch) -> int:
        """Tokens of a batch without padding: per window 1 + n + m, or 1 + 2n + m interleaved."""
        windows, events = len(batch.event_item), int(batch.event_mask.sum())
        return windows + self.config.per_event * events + batch.pairs()

    def param_groups(self, weight_decay: float) -> list[dict]:
        """Relative tables are [distance, heads]: they do not decay, like other biases."""
        plain = [p for n, p in self.named_parameters() if p.ndim >= 2 and ".bias." not in n]
        rest = [p for n, p in self.named_parameters() if p.ndim < 2 or ".bias." in n]
        return [{"params": plain, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
