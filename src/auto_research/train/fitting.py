"""Train one model of an adapter that has its own split: `fit` with the usual optimizer, schedule and observation.

The request table and leave-two-out have `train_ctr` and `train_next_item`. An adapter with batches of its own calls
`fit_model` from the function it gives to `best_of_trials`, once for each stage of its training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from auto_research.data.interactions import Interactions, load_interactions
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw, warmup_cosine
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained

if TYPE_CHECKING:
    from auto_research.experiment.context import Context


@dataclass(frozen=True)
class FitBudget:
    """The parts of a card's budget that training reads. epochs: cap.  patience: validations.  warmup: steps."""

    epochs: int = 100
    patience: int | None = 10
    clip: float | None = 1.0
    warmup: int = 50
    validate_every: int = 1
    steps: int | None = None

    @classmethod
    def of(cls, budget: Mapping[str, Any], **overrides: Any) -> FitBudget:
        """From a card's budget; `overrides` win, other keys of the budget are left alone."""
        return cls(**({f.name: budget[f.name] for f in fields(cls) if f.name in budget} | overrides))


@lru_cache(maxsize=2)
def _split(build: Callable[[Interactions], Any], folder: str, modified_ns: int) -> Any:
    return build(load_interactions(folder))


def load_split(ctx: Context, build: Callable[[Interactions], Any]) -> Any:
    """build(canonical interactions), cut to the budget's `users` by its `restrict`. Built once per process."""
    folder = Path(ctx.data("canonical"))
    data = _split(build, str(folder.resolve()), (folder / "manifest.json").stat().st_mtime_ns)
    users = ctx.budget.get("users")
    return data.restrict(users) if users else data


def settings(kind: type, ctx: Context, **more: Any) -> Any:
    """The dataclass `kind` from budget, the arm's switch and `more`, each beating the one before.

    Unlike `ctx.configured`, keys of the switch that belong to another dataclass are left alone.
    """
    values = {**ctx.budget, **(ctx.switch or {}), **more}
    return kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})


def fit_model(
    ctx: Context,
    model: nn.Module,
    hyperparameters: Mapping[str, Any],
    state: StateFolder,
    *,
    budget: FitBudget,
    batches: Callable[[int], Sequence],
    loss: Callable[[nn.Module, Any], Tensor],
    validate: Callable[[nn.Module], dict[str, float]],
    key: str,
    higher_is_better: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    observed: bool = True,
) -> Trained:
    """Train `model`, already on its device and seeded for, to its best epoch by validation `key`.

    batches, loss, validate: as `train.loop.fit`.  optimizer: default AdamW with the trial's learning_rate, its
    weight_decay and `betas`; the rate is warmed up and falls along a half cosine over the planned steps.  observed: False for models
    beside the arm's own.
    """

    def seen(model: nn.Module, step: int, total: int) -> None:
        if observed:
            ctx.observe("step", model=model, step=step)

    if optimizer is None:
        rate, decay = hyperparameters["learning_rate"], hyperparameters.get("weight_decay", 0.0)
        optimizer = adamw(model, rate, decay, betas=betas)
    plan = Plan(
        budget.epochs,
        budget.steps,
        budget.clip,
        key=key,
        higher_is_better=higher_is_better,
        patience=budget.patience,
        validate_every=budget.validate_every,
    )
    fitted = fit(
        model,
        optimizer,
        plan,
        batches=batches,
        loss=loss,
        validate=validate,
        state=state,
        schedule=warmup_cosine(budget.warmup),
        on_step=seen,
        progress=ctx.progress,
    )
    cost = {"seconds": fitted.seconds, "train_seconds": fitted.train_seconds, "steps": fitted.steps}
    return Trained(model, fitted.validation, curve=fitted.history, cost=cost | {"best_epoch": fitted.best_epoch})
