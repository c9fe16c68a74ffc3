"""DCN-V2 (arXiv:2008.13535), stacked: three full-rank cross layers, then an MLP, on the encoded request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from auto_research.baselines.ranker_input import RankerInput, RequestState
from auto_research.blocks.cross_network import CrossNetwork
from auto_research.blocks.dropout import Dropout
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.experiment.contract import Measurement
from auto_research.train.ctr import RequestBudget, load_requests, train_ctr

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

TASKS = 3
FIELD, LAYERS, HIDDEN, DROPOUT = 16, 3, 256, 0.2


class DCNv2(nn.Module):
    """model(batch) -> logits [P, 3]; MLP E -> hidden -> hidden -> 3 after `layers` cross layers.

    sequences: windows of a `BehaviourBatch` ('liked', 'other'), each with its own means and attention; none: the
    whole history of a `RequestBatch`.
    """

    def __init__(
        self,
        vocab: dict[str, int],
        item_genres: Tensor,
        *,
        history: int = 50,
        field: int = FIELD,
        layers: int = LAYERS,
        hidden: int = HIDDEN,
        dropout: float = DROPOUT,
        sequences: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.input = RankerInput(vocab, item_genres, sequences=sequences, field=field, history=history)
        self.dropout = Dropout(dropout)
        self.cross = CrossNetwork(self.input.width, layers)
        self.mlp = nn.Sequential(
            *(nn.Linear(self.input.width, hidden), nn.GELU(), Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.GELU(), Dropout(dropout)),
            nn.Linear(hidden, TASKS),
        )

    def prepare(self, batch: RequestBatch) -> RequestState:
        return self.input.prepare(batch)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        return self.mlp(self.cross(self.dropout(self.input.score(state, batch))))

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def dense_params(self) -> int:
        """Parameters of cross layers and MLP, tables and field projections left out."""
        return sum(p.numel() for part in (self.cross, self.mlp) for p in part.parameters())


def matched_hidden(target: int, width: int, layers: int = LAYERS) -> int:
    """MLP width w for which `layers` cross layers of `width` and width -> w -> w -> 3 hold about `target` parameters.

    Solves w^2 + (width + 2 + 3) w + 3 = target - layers (width^2 + width). Raises ValueError when the cross layers alone
    reach the target.
    """
    left = target - layers * (width**2 + width) - TASKS
    if left <= 0:
        raise ValueError(
            f"{layers} cross layers of width {width} already hold {target - left} parameters, not {target}"
        )
    linear = width + 2 + TASKS
    return max(1, round((math.sqrt(linear**2 + 4 * left) - linear) / 2))


def run(
    ctx: Context,
    *,
    device: torch.device,
    table: RequestTable | None = None,
    match_params: int | None = None,
    sequences: Sequence[str] = (),
    **overrides: Any,
) -> Measurement:
    """Tune, train and measure.

    match_params: dense parameter count to meet (within 5%) by the MLP's width; else `hidden` of overrides or budget.
    sequences: windows of a `BehaviourTable`, which `table` then has to be.
    Reads `dropout`, `field`, `cross_layers`, `cross_hidden` of the budget besides RequestBudget.
    """
    table = table or load_requests(ctx)
    dropout = overrides.pop("dropout", ctx.budget.get("dropout", DROPOUT))
    field = overrides.pop("field", ctx.budget.get("field", FIELD))
    layers = overrides.pop("layers", ctx.budget.get("cross_layers", LAYERS))
    hidden = overrides.pop("hidden", ctx.budget.get("cross_hidden", HIDDEN))
    history = RequestBudget.of(ctx.budget, **overrides).history
    genres = torch.from_numpy(table.item_genres)
    if match_params is not None:
        width = RankerInput(table.vocab, genres, sequences=sequences, field=field, history=history).width
        hidden = matched_hidden(match_params, width, layers)

    def build(_: dict[str, Any]) -> nn.Module:
        sizes = {"history": history, "field": field, "layers": layers, "hidden": hidden, "dropout": dropout}
        return DCNv2(table.vocab, genres, sequences=sequences, **sizes)

    measured = train_ctr(ctx, build, device=device, table=table, **overrides)
    measured.extra["mlp_width"] = hidden
    return measured
