"""Train a sequence model on next-item prediction: every position predicts its successor over the full catalogue.

A model takes items int64[B, L] (0 = padding, left-padded, newest last) and returns hidden states [B, L, D]; its
`item_table()` [n_items + 1, D] turns them into scores. It may have `training_loss(batch) -> Tensor` and
`param_groups(weight_decay)`.

Budget of a card: length 64 (events), batch 64 (windows of that length), epochs, patience, clip 1.0, warmup (steps),
validate_every (epochs); optional steps, users; trials [{learning_rate, weight_decay}].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.blocks.softmax_loss import linear_cross_entropy
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Measure, Scorer, measure_next_item, validation_metrics
from auto_research.experiment.contract import Measurement
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw, warmup_cosine
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

SELECTION = "ndcg@10"
BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class NextItemBudget:
    """The parts of a budget this protocol reads; see the module's text."""

    length: int = 64
    batch: int = 64
    epochs: int = 100
    patience: int | None = 10
    clip: float | None = 1.0
    warmup: int = 100
    validate_every: int = 2
    steps: int | None = None
    users: int | None = None

    @classmethod
    def of(cls, budget: Mapping[str, Any], **overrides: Any) -> NextItemBudget:
        """From a card's budget; `overrides` win, other keys of the budget are left alone."""
        values = {f.name: budget[f.name] for f in fields(cls) if f.name in budget}
        return cls(**(values | overrides))


class WindowBatch(NamedTuple):
    """Windows of sequences: items int64[B, L] and what followed each of them, target int64[B, L]; 0 = padding."""

    items: Tensor
    target: Tensor

    def to(self, device: torch.device) -> WindowBatch:
        return WindowBatch(self.items.to(device), self.target.to(device))


@lru_cache(maxsize=2)
def _sequences(folder: str, modified_ns: int) -> LeaveTwoOut:
    return LeaveTwoOut.load(folder)


def load_sequences(ctx: Context) -> LeaveTwoOut:
    """The prepared sequences, cut to the budget's `users`. Loaded once per process."""
    folder = Path(ctx.data("sequences"))
    sequences = _sequences(str(folder.resolve()), (folder / "manifest.json").stat().st_mtime_ns)
    users = ctx.budget.get("users")
    return sequences.restrict(users) if users else sequences


class EpochWindows:
    """Windows of one epoch in which every train event but a user's first is a target exactly once.

    Each sequence is cut into windows of `length` targets at an offset drawn anew for the epoch. Windows of like length
    share a batch, so padding is rare; a batch holds at most batch * length positions. A function of (seed, epoch).
    """

    def __init__(self, sequences: LeaveTwoOut, budget: NextItemBudget, seed: int, epoch: int, device: torch.device):
        self.items, self.length, self.device = sequences.train_items, budget.length, device
        rng = stable_rng("windows", seed, epoch)
        self.start, self.size = cut_windows(sequences.train_starts, budget.length, rng)
        order = np.argsort(self.size + rng.random(len(self.size)), kind="stable")
        groups = _group(self.size[order], budget.batch * budget.length)
        self.groups = [order[a:b] for a, b in groups]
        self.groups = [self.groups[i] for i in rng.permutation(len(self.groups))]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> WindowBatch:
        group = self.groups[index]
        size = self.size[group]
        width = int(size.max())
        column = np.arange(width)[None, :] - (width - size)[:, None]  # left padding
        valid = column >= 0
        row = np.where(valid, self.start[group][:, None] + column, 0)
        last = len(self.items) - 1
        items = np.where(valid, self.items[row], 0)
        target = np.where(valid, self.items[np.minimum(row + 1, last)], 0)
        return WindowBatch(torch.from_numpy(items), torch.from_numpy(target)).to(self.device)


def cut_windows(starts: np.ndarray, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """First row and number of inputs of windows, int64[W] each, for sequences at rows [starts[u], starts[u + 1]).

    A sequence of n events has n - 1 inputs with a successor. They are cut every `length` inputs, counted from a random
    offset, so that the first and last window of a sequence may be shorter.
    """
    inputs = np.maximum(np.diff(starts) - 1, 0)
    offset = rng.integers(0, length, len(inputs))  # inputs missing from the first window
    count = np.where(inputs > 0, -(-(inputs + offset) // length), 0)
    owner = np.repeat(np.arange(len(inputs)), count)
    which = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    first = np.maximum(which * length - offset[owner], 0)
    stop = np.minimum((which + 1) * length - offset[owner], inputs[owner])
    return starts[:-1][owner] + first, stop - first


def _group(sizes: np.ndarray, positions: int) -> list[tuple[int, int]]:
    """Consecutive ranges of ascending sizes whose padded area stays within `positions` (or hold one window)."""
    ranges, begin = [], 0
    for end, size in enumerate(sizes.tolist()):
        if end > begin and (end - begin + 1) * size > positions:
            ranges.append((begin, end))
            begin = end
    return [*ranges, (begin, len(sizes))]


def recent_items(sequences: LeaveTwoOut, split: str, positions: np.ndarray, length: int) -> np.ndarray:
    """int64[B, length] the last events before the target, left-padded with 0."""
    window = np.zeros((len(positions), length), dtype=np.int64)
    for row, position in enumerate(positions):
        history = sequences.history(split, int(position))[-length:]
        window[row, length - len(history) :] = history
    return window


def next_item_loss(model: nn.Module, batch: WindowBatch) -> Tensor:
    """Mean cross entropy over the full catalogue at all real positions."""
    if hasattr(model, "training_loss"):
        return model.training_loss(batch)
    hidden = model(batch.items)  # (B, L, D)
    real = batch.target > 0
    return linear_cross_entropy(hidden[real], model.item_table(), batch.target[real], first=1)


def model_scorer(model: nn.Module, sequences: LeaveTwoOut, length: int, device: torch.device) -> Scorer:
    """Scorer of a model from the newest position of the last `length` events."""

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        model.eval()
        items = torch.from_numpy(recent_items(sequences, split, positions, length)).to(device)
        with torch.no_grad():
            return (model(items)[:, -1].float() @ model.item_table().float().t()).cpu().numpy()

    return score


def train_next_item(
    ctx: Context,
    build: Callable[[dict[str, Any], LeaveTwoOut], nn.Module],
    *,
    device: torch.device,
    sequences: LeaveTwoOut | None = None,
    on_step: Callable[[nn.Module, int, int], None] | None = None,
    schedule: Callable[[int, int], float] | None = None,
    trials: Sequence[dict[str, Any]] | None = None,
    measure: Measure = measure_next_item,
    **overrides: Any,
) -> Measurement:
    """Tune, train and measure one sequence model; selection by validation ndcg@10, test read once.

    Parameters
    ----------
    build: (hyperparameters of the trial, sequences) -> model on CPU, called right after seeding.
    device: from `device_for(ctx.device)` in the adapter's own file.
    schedule: learning-rate factor, default warm-up and cosine over the planned steps.
    trials: default the budget's.  measure: of the chosen model's scorer.  overrides: fields of NextItemBudget that beat the card's budget.
    """
    sequences = sequences or load_sequences(ctx)
    budget = NextItemBudget.of(ctx.budget, **overrides)
    schedule = schedule or warmup_cosine(budget.warmup)

    def after(model: nn.Module, step: int, total: int) -> None:
        if on_step:
            on_step(model, step, total)
        ctx.observe("step", model=model, step=step)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        model = build(hyperparameters, sequences).to(device)
        score = model_scorer(model, sequences, budget.length, device)
        fitted = fit(
            model,
            adamw(model, hyperparameters["learning_rate"], hyperparameters.get("weight_decay", 0.0), betas=BETAS),
            Plan(
                budget.epochs,
                budget.steps,
                budget.clip,
                key=SELECTION,
                patience=budget.patience,
                validate_every=budget.validate_every,
            ),
            batches=lambda epoch: EpochWindows(sequences, budget, ctx.seed, epoch, device),
            loss=next_item_loss,
            validate=lambda _: validation_metrics(score, sequences),
            state=state,
            schedule=schedule,
            on_step=after,
            progress=ctx.progress,
        )
        cost = {"seconds": fitted.seconds, "train_seconds": fitted.train_seconds, "steps": fitted.steps}
        return Trained(model, fitted.validation, curve=fitted.history, cost=cost | {"best_epoch": fitted.best_epoch})

    trained, trials = best_of_trials(ctx, run, SELECTION, trials=trials, race=True)
    model = trained.model.eval()
    ctx.observe(
        "trained",
        model=model,
        data=sequences,
        score=lambda data, split, positions: model_scorer(model, data, budget.length, device)(split, positions),
        validation=trained.validation,
    )
    measured = measure(model_scorer(trained.model, sequences, budget.length, device), sequences)
    measured.validation, measured.curve = trained.validation, trained.curve
    measured.hyperparameters, measured.trials = trained.hyperparameters, trials
    measured.cost |= trained.cost | {
        "params": count_params(trained.model),
        "flops": sequence_flops(trained.model, sequences, budget.length, device),
    }
    return measured


def sequence_flops(model: nn.Module, sequences: LeaveTwoOut, length: int, device: torch.device) -> float:
    """Forward floating-point operations to score the whole catalogue for one user."""
    score = model_scorer(model, sequences, length, device)
    return float(flops_of(lambda: score("test", np.zeros(1, dtype=np.int64))))
