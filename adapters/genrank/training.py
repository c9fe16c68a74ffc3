"""Training on windows; tuning, validation, test rows and full catalogue are those of `train_ctr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adapters.genrank.windows import EpochWindows, WindowTable
from auto_research.evaluate.ctr import measure_requests, model_scorer, rated_batches, rated_metrics, score_rated
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Measurement
from auto_research.metrics.cost import count_params
from auto_research.runtime.seeds import seed_everything
from auto_research.train.ctr import SELECTION, RequestBudget, pair_flops, request_scorer, training_loss
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials


def train_windows(
    ctx: Context,
    build: Callable[[], nn.Module],
    *,
    device: torch.device,
    table: WindowTable,
    history: int,
    schedule: Callable[[int, int], float],
    inspect: Callable[[nn.Module, WindowTable], dict[str, Any]],
) -> Measurement:
    """Tune, train and measure one window arm. `batch` of the budget is requests; `windows` are the windows of a step.

    history: most events before a request, n - 1; validation and test requests start where the windows of n do.
    """
    budget = RequestBudget.of(ctx.budget, history=history)
    windows = table.train_windows(ctx.budget.window)
    validation = rated_batches(table, "valid", history=history)

    def batches(epoch: int) -> EpochWindows:
        return EpochWindows(
            table,
            windows,
            batch=ctx.budget.windows,
            negatives=budget.negatives,
            seed=ctx.seed,
            epoch=epoch,
            device=device,
        )

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        model = build().to(device)
        optimizer = adamw(model, hyperparameters["learning_rate"], hyperparameters["weight_decay"])
        fitted = fit(
            model,
            optimizer,
            Plan(budget.epochs, budget.steps, budget.clip, key=SELECTION, patience=budget.patience),
            batches=batches,
            loss=training_loss,
            validate=lambda model: rated_metrics(score_rated(model_scorer(model, device), validation)),
            state=state,
            schedule=schedule,
            on_step=lambda model, step, total: ctx.observe("step", model=model, step=step),
            progress=ctx.progress,
        )
        cost = {"seconds": fitted.seconds, "train_seconds": fitted.train_seconds, "steps": fitted.steps}
        return Trained(model, fitted.validation, curve=fitted.history, cost=cost | {"best_epoch": fitted.best_epoch})

    trained, trials = best_of_trials(ctx, run, SELECTION, race=True)
    model = trained.model.eval()
    score = request_scorer(model, device, history)
    ctx.observe("trained", model=model, data=table, score=score, validation=trained.validation)
    measured = measure_requests(
        model_scorer(model, device),
        table,
        device=device,
        history=history,
        chunk=budget.chunk,
        catalogue_users=budget.catalogue_users,
        progress=ctx.progress,
    )
    measured.validation, measured.curve, measured.trials = trained.validation, trained.curve, trials
    measured.hyperparameters = trained.hyperparameters
    measured.cost |= trained.cost | {"params": count_params(model), "flops": pair_flops(model, table, budget, device)}
    measured.extra |= inspect(model, table)
    return measured
