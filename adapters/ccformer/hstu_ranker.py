"""The baseline of CCFormer's speed claim: HSTU blocks over fused event tokens with the target appended (arXiv:2402.17152).

    x_j = W_e [item; content; rating; gap],  x_target = W_t [candidate; cross; user; context; statistics]
    U, V, Q, K = SiLU(W x), A = SiLU(Q K^T + rab) / n, y = W_o (LayerNorm(A V) * U) + x

The targets of a request are rows behind one shared sequence and never see each other. The time table takes the event's age
as of the request in log2 buckets; between two events it takes the lower edges of their buckets.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapters.ccformer.titles import TitledEncoder
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.hstu import Hstu, HstuConfig
from auto_research.blocks.request_encoder import embedding
from auto_research.data.behaviours import BehaviourBatch
from auto_research.data.prefix import LOG_BUCKETS

TASKS = 3


@dataclass(frozen=True)
class HstuRankerConfig:
    """width D (a multiple of heads), layers, heads, tower."""

    width: int = 112
    layers: int = 3
    heads: int = 4
    tower: int = 128
    field: int = 16
    history: int = 64
    dropout: float = 0.2


class HstuState(NamedTuple):
    """Keys and values of all layers, mask bool[R, L], event times int64[R, L], fields of the request [R, 9 w]."""

    cache: list[tuple[Tensor, Tensor]]
    mask: Tensor
    time: Tensor
    fields: Tensor


class HstuRanker(nn.Module):
    """model(batch) -> logits [P, 3]; batches of a `BehaviourTable`."""

    def __init__(self, config: HstuRankerConfig, vocab: dict[str, int], item_genres: Tensor, titles: Tensor):
        super().__init__()
        self.config = c = config
        self.encoder = TitledEncoder(vocab, item_genres, titles, field=c.field)
        self.gap = embedding(LOG_BUCKETS, c.field // 2)
        self.event = nn.Linear(3 * c.field, c.width)
        self.target = nn.Linear(self.encoder.request_width + self.encoder.pair_width, c.width)
        self.trunk = Hstu(
            HstuConfig(c.width, c.heads, c.layers, positions=c.history + 1, times=LOG_BUCKETS, dropout=c.dropout)
        )
        self.norm = nn.LayerNorm(c.width)
        self.tower = nn.Sequential(
            nn.Linear(c.width, c.tower), nn.SiLU(), Dropout(c.dropout), nn.Linear(c.tower, TASKS)
        )
        self.dropout = Dropout(c.dropout)

    def prepare(self, batch: BehaviourBatch) -> HstuState:
        e = self.encoder
        rating = torch.cat([e.rating(batch.hist_rating), self.gap(batch.hist_gap)], dim=2)
        events = torch.cat([e.look_up(batch.hist_item), rating], dim=2)  # (R, L, 3w)
        context = [e.tables[name](getattr(batch, name)) for name in (*e.user_fields, "hour", "weekday", "gap")]
        time = 1 - 2**batch.hist_age  # lower edge of the age bucket, seconds before the request
        cache = self.trunk.cache(self.event(self.dropout(events)), batch.hist_mask, time=time)
        return HstuState(
            cache, batch.hist_mask, time, torch.cat([*context, e.user_statistics(batch.user_stats)], dim=1)
        )

    def score(self, state: HstuState, batch: BehaviourBatch) -> Tensor:
        p, request_of = self.encoder.pairs(batch), batch.request_of
        x = self.target(self.dropout(torch.cat([p.candidate, p.cross, state.fields[request_of]], dim=1)))
        now = state.time.new_zeros(len(state.mask))
        x = self.trunk.candidates(x, state.cache, state.mask, request_of, time=state.time, now=now)
        return self.tower(self.norm(x))

    def forward(self, batch: BehaviourBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def dense_params(self) -> int:
        """Parameters besides embedding tables and field projections."""
        return sum(p.numel() for p in self.parameters()) - sum(p.numel() for p in self.encoder.parameters())


def matched_width(target: int, config: HstuRankerConfig) -> int:
    """The multiple of `heads` whose dense parameters come closest to `target`."""
    c = config

    def dense(d: int) -> int:
        layer = 4 * d * d + 4 * d + d * d + d + 4 * d + (c.history + 1 + LOG_BUCKETS) * c.heads
        ends = (3 * c.field + 1) * d + (14 * c.field + 1) * d + 2 * d + (d + 1) * c.tower + (c.tower + 1) * TASKS
        return c.layers * layer + ends + LOG_BUCKETS * c.field // 2

    return min(range(c.heads, 1025, c.heads), key=lambda d: abs(dense(d) - target))
