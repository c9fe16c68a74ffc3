"""The request-table protocol: train a ranker on (engage, like, love) and measure it. Cards rankmixer and din, `protocol`.

A model takes a RequestBatch (R requests, P flat pairs) and returns logits [P, 3] for engage, like, love. It may have:

    param_groups(weight_decay) -> list      optimizer groups (default: matrices decay, vectors do not)
    training_logits(batch) -> list          several [P, 3] whose losses are added (two passes of DTSI)
    extra_loss() -> Tensor                  added after the forward pass
    training_loss(batch, task_loss) -> Tensor   replaces all of that; task_loss(logits) is the protocol's loss
    on_gradient(batch)                      after backward, before clipping (mini-batch-aware regularisation)
    after_step(step, total)                 after the optimizer step, step from 1 (annealing, controllers)

Budget of a card: history 50, negatives 3, batch 256 (requests), epochs 8, patience 2, clip 1.0, chunk 256 (pairs scored
at once); optional steps, users, test_rows, catalogue_users; trials [{learning_rate, weight_decay}].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import (
    measure_requests,
    model_scorer,
    rated_batches,
    rated_metrics,
    score_rated,
)
from auto_research.experiment.contract import Measurement
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.precision import float32_region
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

SELECTION = "auc"
LOVE_WEIGHT = 0.5
WARMED_PAIRS = 64


@dataclass(frozen=True)
class RequestBudget:
    """The parts of a budget this protocol reads; see the module's text."""

    history: int = 50
    negatives: int = 3
    batch: int = 256
    epochs: int = 8
    patience: int | None = 2
    clip: float | None = 1.0
    chunk: int = 256
    steps: int | None = None
    users: int | None = None
    test_rows: int | None = None
    catalogue_users: int | None = None

    @classmethod
    def of(cls, budget: Mapping[str, Any], **overrides: Any) -> RequestBudget:
        """From a card's budget; `overrides` win, other keys of the budget are left alone."""
        values = {f.name: budget[f.name] for f in fields(cls) if f.name in budget}
        return cls(**(values | overrides))


@lru_cache(maxsize=2)
def _table(folder: str, modified_ns: int) -> RequestTable:
    return RequestTable.load(folder)


def load_requests(ctx: Context) -> RequestTable:
    """The prepared request table, cut to the budget's `users` and `test_rows`. Loaded once per process."""
    folder = Path(ctx.data("requests"))
    table = _table(str(folder.resolve()), (folder / "manifest.json").stat().st_mtime_ns)
    budget = RequestBudget.of(ctx.budget)
    if budget.users is None and budget.test_rows is None:
        return table
    return table.restrict(budget.users or table.interactions.n_users, budget.test_rows)


class EpochBatches:
    """Batches of one epoch, built when asked for; the same for every arm with this seed.

    Order and negatives are functions of (seed, epoch, index), so training can stop and go on anywhere.
    """

    def __init__(self, table: RequestTable, budget: RequestBudget, seed: int, epoch: int, device: torch.device) -> None:
        self.table, self.budget, self.seed, self.epoch, self.device = table, budget, seed, epoch, device
        requests = table.requests("train")
        self.order = requests[stable_rng("request-order", seed, epoch).permutation(len(requests))]

    def __len__(self) -> int:
        return -(-len(self.order) // self.budget.batch)

    def __getitem__(self, index: int) -> RequestBatch:
        size = self.budget.batch
        batch = self.table.batch(
            self.order[index * size : (index + 1) * size],
            history=self.budget.history,
            negatives=self.budget.negatives,
            rng=stable_rng("negatives", self.seed, self.epoch, index),
        )
        return batch.to(self.device)


def request_loss(logits: Tensor, batch: RequestBatch) -> Tensor:
    """BCE(engage) over all pairs + BCE(like) + 0.5 BCE(love) over rated pairs; logits [P, 3], float32 inside."""
    with float32_region(logits.device):
        logits = logits.float()
        rated = batch.rated.float()
        share = rated / rated.sum().clamp(min=1)
        engage = F.binary_cross_entropy_with_logits(logits[:, 0], batch.engage)
        like = F.binary_cross_entropy_with_logits(logits[:, 1], batch.like, reduction="none")
        love = F.binary_cross_entropy_with_logits(logits[:, 2], batch.love, reduction="none")
        return engage + ((like + LOVE_WEIGHT * love) * share).sum()


def training_loss(model: nn.Module, batch: RequestBatch) -> Tensor:
    """The loss of one batch under the model contract above."""
    task_loss = partial(request_loss, batch=batch)
    if hasattr(model, "training_loss"):
        return model.training_loss(batch, task_loss)
    passes = model.training_logits(batch) if hasattr(model, "training_logits") else [model(batch)]
    loss = task_loss(passes[0])
    for logits in passes[1:]:
        loss = loss + task_loss(logits)
    return loss + model.extra_loss() if hasattr(model, "extra_loss") else loss


def train_ctr(
    ctx: Context,
    build: Callable[[dict[str, Any]], nn.Module],
    *,
    device: torch.device,
    table: RequestTable | None = None,
    extra_loss: Callable[[nn.Module, RequestBatch], Tensor] | None = None,
    on_step: Callable[[nn.Module, int, int], None] | None = None,
    schedule: Callable[[int, int], float] | None = None,
    inspect: Callable[[nn.Module, RequestTable], dict[str, Any]] | None = None,
    **overrides: Any,
) -> Measurement:
    """Tune, train and measure one arm on the request table.

    Parameters
    ----------
    build: hyperparameters of the trial -> model on CPU; called right after seeding, so initial weights depend on the
        seed alone.
    device: from `device_for(ctx.device)` in the adapter's own file.
    extra_loss: (model, batch) -> scalar added to the loss.
    on_step: (model, step, total) after every step.  schedule: (step, total) -> learning-rate factor.
    inspect: (trained model in eval mode, table) -> values for `Measurement.extra`.
    overrides: fields of RequestBudget that beat the card's budget.

    Selection uses the validation AUC of the like head only; test rows are read once, for the chosen model.
    """
    table = table or load_requests(ctx)
    budget = RequestBudget.of(ctx.budget, **overrides)
    validation = rated_batches(table, "valid", history=budget.history)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        return _train_once(
            ctx, build, hyperparameters, state, budget, table, validation, device, extra_loss, on_step, schedule
        )

    trained, trials = best_of_trials(ctx, run, SELECTION, race=True)
    model = trained.model.eval()
    ctx.observe(
        "trained",
        model=model,
        data=table,
        score=request_scorer(model, device, budget.history),
        validation=trained.validation,
    )
    measured = measure_requests(
        model_scorer(model, device),
        table,
        device=device,
        history=budget.history,
        chunk=budget.chunk,
        catalogue_users=budget.catalogue_users,
        progress=ctx.progress,
    )
    measured.validation = trained.validation
    measured.curve = trained.curve
    measured.hyperparameters = trained.hyperparameters
    measured.trials = trials
    measured.cost |= trained.cost | {"params": count_params(model), "flops": pair_flops(model, table, budget, device)}
    if inspect:
        measured.extra |= inspect(model, table)
    return measured


def _train_once(
    ctx, build, hyperparameters, state, budget, table, validation, device, extra_loss, on_step, schedule
) -> Trained:
    seed_everything(ctx.seed)
    model = build(hyperparameters).to(device)
    optimizer = adamw(model, hyperparameters.get("learning_rate", 1e-3), hyperparameters.get("weight_decay", 0.0))

    def loss(model: nn.Module, batch: RequestBatch) -> Tensor:
        value = training_loss(model, batch)
        return value + extra_loss(model, batch) if extra_loss else value

    def after(model: nn.Module, step: int, total: int) -> None:
        if hasattr(model, "after_step"):
            model.after_step(step, total)
        if on_step:
            on_step(model, step, total)
        ctx.observe("step", model=model, step=step)

    fitted = fit(
        model,
        optimizer,
        Plan(budget.epochs, budget.steps, budget.clip, key=SELECTION, patience=budget.patience),
        batches=lambda epoch: EpochBatches(table, budget, ctx.seed, epoch, device),
        loss=loss,
        validate=lambda model: rated_metrics(score_rated(model_scorer(model, device), validation)),
        state=state,
        schedule=schedule,
        on_gradient=(lambda model, batch: model.on_gradient(batch)) if hasattr(model, "on_gradient") else None,
        on_step=after,
        progress=ctx.progress,
    )
    cost = {"seconds": fitted.seconds, "train_seconds": fitted.train_seconds, "steps": fitted.steps}
    return Trained(model, fitted.validation, curve=fitted.history, cost=cost | {"best_epoch": fitted.best_epoch})


def request_scorer(
    model: nn.Module, device: torch.device, history: int
) -> Callable[[RequestTable, int, np.ndarray], np.ndarray]:
    """(table, request, items int64[P]) -> logits float32[P, 3] of arbitrary candidates as of the request's time."""
    score = model_scorer(model, device)
    return lambda table, request, items: score(table.score_batch(request, items, history=history)).float().cpu().numpy()


def pair_flops(model: nn.Module, table: RequestTable, budget: RequestBudget, device: torch.device) -> float:
    """Forward floating-point operations per candidate pair when one request is scored with 64 candidates."""
    request = int(table.requests("test")[-1])
    items = np.arange(1, min(WARMED_PAIRS, table.interactions.n_items) + 1)
    batch = table.score_batch(request, items, history=budget.history).to(device)
    with torch.no_grad():
        return flops_of(lambda: model.eval()(batch)) / batch.pairs()
