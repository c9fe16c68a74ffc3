"""SASRec (arXiv:1808.09781) trained with the full softmax: causal Transformer, every position a training example.

Differences from the paper: cross entropy over the whole catalogue instead of one sampled negative, pre-norm blocks with
GELU, windows over the whole history instead of its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.blocks.causal_transformer import CausalTransformer, TransformerConfig
from auto_research.blocks.dropout import Dropout
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Measure, measure_next_item
from auto_research.experiment.contract import Measurement
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model
from auto_research.train.next_item import (
    BETAS,
    SELECTION,
    EpochWindows,
    NextItemBudget,
    next_item_loss,
    train_next_item,
)
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

START_SCALE = 0.02
SIZES = {"width": 64, "layers": 2, "heads": 2, "dropout": 0.3}
RECIPE = {
    "length": 64,
    "batch": 16,
    "epochs": 30,
    "patience": 10,
    "warmup": 100,
    "validate_every": 2,
    "trials": [{"learning_rate": 2e-3, "weight_decay": 0.0}],
}


class SASRec(nn.Module):
    """items int64[B, L], left-padded -> hidden [B, L, D]; the item table is shared between input and output.

    Position embeddings count from the newest event, so a shorter window uses the last of them.
    """

    def __init__(self, n_items: int, length: int, config: TransformerConfig) -> None:
        super().__init__()
        self.item = nn.Embedding(n_items + 1, config.width, padding_idx=0)
        self.position = nn.Parameter(torch.empty(length, config.width))
        self.dropout = Dropout(config.dropout)
        self.trunk = CausalTransformer(config)
        nn.init.normal_(self.item.weight, std=START_SCALE)
        nn.init.normal_(self.position, std=START_SCALE)
        with torch.no_grad():
            self.item.weight[0].zero_()

    def item_table(self) -> Tensor:
        return self.item.weight  # (I + 1, D)

    def forward(self, items: Tensor) -> Tensor:
        scale = math.sqrt(self.trunk.config.width)
        x = self.item(items) * scale + self.position[-items.shape[1] :]  # (B, L, D)
        return self.trunk(self.dropout(x), items > 0)


def fit_split(
    ctx: Context,
    sequences: LeaveTwoOut,
    hyperparameters: dict[str, Any],
    state: StateFolder,
    validate: Callable[[nn.Module], dict[str, float]],
    *,
    device: torch.device,
    key: str = SELECTION,
    **overrides: Any,
) -> Trained:
    """SASRec on the train items of an adapter's own split; `sequences` are read for their train part only.

    Sizes and training come from overrides, else the tuned RECIPE (the budget's keys mean other arms' sizes there).
    """
    seed_everything(ctx.seed)
    settings = {**SIZES, **RECIPE, **overrides}
    budget = NextItemBudget.of(settings)
    model = SASRec(sequences.n_items, budget.length, TransformerConfig(**{name: settings[name] for name in SIZES}))
    return fit_model(
        ctx,
        model.to(device),
        hyperparameters,
        state,
        budget=FitBudget.of(vars(budget)),
        batches=lambda epoch: EpochWindows(sequences, budget, ctx.seed, epoch, device),
        loss=next_item_loss,
        validate=validate,
        key=key,
        betas=BETAS,
    )


@torch.no_grad()
def newest_scores(model: SASRec, histories: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """Scores float32[B, n_items + 1] after the newest item of histories, B int arrays of item ids."""
    length = len(model.position)
    window = np.zeros((len(histories), length), dtype=np.int64)
    for row, items in enumerate(histories):
        items = items[-length:]
        window[row, length - len(items) :] = items
    model.eval()
    hidden = model(torch.from_numpy(window).to(device))[:, -1].float()
    return (hidden @ model.item_table().float().t()).cpu().numpy()


def run(ctx: Context, *, device: torch.device, measure: Measure = measure_next_item, **overrides: Any) -> Measurement:
    """Tune, train and measure SASRec.

    measure: (scorer, sequences) -> Measurement, where an adapter wants further metrics.
    Sizes (SIZES) and training (NextItemBudget, trials) come from overrides, else the budget, else the tuned RECIPE.
    """
    settings = {**SIZES, **RECIPE, **ctx.budget, **overrides}
    config = TransformerConfig(**{name: settings[name] for name in SIZES})
    budget = NextItemBudget.of(settings)

    def build(_: dict[str, Any], sequences: LeaveTwoOut) -> nn.Module:
        return SASRec(sequences.n_items, budget.length, config)

    return train_next_item(ctx, build, device=device, measure=measure, trials=settings["trials"], **vars(budget))
