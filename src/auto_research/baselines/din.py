"""A small tuned DIN (arXiv:1706.06978) as baseline: 16-wide fields, target attention over the last events, Dice.

The card `din` has the paper's whole mechanism and its ablations; this is the yardstick other cards compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from auto_research.blocks.activation_unit import AttentionPooling
from auto_research.blocks.dice import Dice
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_encoder import RequestEncoder, RequestFeatures
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.experiment.contract import Measurement
from auto_research.train.ctr import RequestBudget, load_requests, train_ctr

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

TASKS = 3
FIELD, HIDDEN, UNIT_HIDDEN, DROPOUT = 16, (200, 80), (32, 16), 0.2  # the paper's unit is 80-40, at five times the cost


class DIN(nn.Module):
    """model(batch) -> logits [P, 3]:  MLP([v_U; v; v_U * v; the other fields]) with v_U from unnormalised attention."""

    def __init__(
        self,
        vocab: dict[str, int],
        item_genres: Tensor,
        *,
        history: int = 50,
        field: int = FIELD,
        hidden: tuple[int, int] = HIDDEN,
        unit_hidden: tuple[int, int] = UNIT_HIDDEN,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=field)
        self.attention = AttentionPooling(self.encoder.event_width, longest=history, hidden=unit_hidden)
        self.known = 2 * field  # item and genres are part of v
        inputs = 3 * self.encoder.event_width + self.encoder.request_width + self.encoder.pair_width - self.known
        self.mlp = nn.Sequential(
            *(Dropout(dropout), nn.Linear(inputs, hidden[0]), Dice(hidden[0])),
            *(Dropout(dropout), nn.Linear(hidden[0], hidden[1]), Dice(hidden[1])),
            *(Dropout(dropout), nn.Linear(hidden[1], TASKS)),
        )

    def prepare(self, batch: RequestBatch) -> RequestFeatures:
        return self.encoder.request(batch)

    def score(self, request: RequestFeatures, batch: RequestBatch) -> Tensor:
        pair = self.encoder.pairs(batch)
        pooled = self.attention(request.events, request.mask, pair.key, batch.request_of)  # (P, d)
        rest = pair.candidate[:, self.known :]  # decade, popularity
        fields = [request.flat()[batch.request_of], rest, pair.cross]
        return self.mlp(torch.cat([pooled, pair.key, pooled * pair.key, *fields], dim=1))

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)


def run(ctx: Context, *, device: torch.device, table: RequestTable | None = None, **overrides: Any) -> Measurement:
    """Tune, train and measure. Reads `dropout`, `field`, `hidden` of the budget besides RequestBudget."""
    table = table or load_requests(ctx)
    dropout = overrides.pop("dropout", ctx.budget.get("dropout", DROPOUT))
    field = overrides.pop("field", ctx.budget.get("field", FIELD))
    hidden = tuple(overrides.pop("hidden", ctx.budget.get("hidden", HIDDEN)))
    history = RequestBudget.of(ctx.budget, **overrides).history

    def build(_: dict[str, Any]) -> nn.Module:
        return DIN(
            table.vocab,
            torch.from_numpy(table.item_genres),
            history=history,
            field=field,
            hidden=hidden,
            dropout=dropout,
        )

    return train_ctr(ctx, build, device=device, table=table, **overrides)
