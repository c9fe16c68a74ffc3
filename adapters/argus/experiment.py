"""Stages of ARGUS: floors, a SASRec of the same size, pre-training with each loss, and two-tower fine-tuning.

What makes an arm differ is its `switch` in card.yaml; sizes are in the budget.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse

from adapters.argus.evaluation import (
    Scorer,
    feedback_and_nip,
    last_places,
    model_scorer,
    ndcg,
    pair_accuracy,
    reranked,
    retrieval,
    tower_scorer,
)
from adapters.argus.events import DAY, DELAYS, EventBatch, EventSplit, target_windows
from adapters.argus.model import Argus, ArgusConfig
from adapters.argus.training import BatchRule, EpochWindows, proposal
from auto_research.baselines.linear_floor import choose, known_items
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement, Units
from auto_research.experiment.studies import study
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.devices import device_for
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model, load_split, settings
from auto_research.train.next_item import BETAS
from auto_research.train.optimizer import AdamW
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

experiment = Experiment("argus")

ENCODER_RATE = 0.1  # of the learning rate, while the towers are fitted onto a pre-trained encoder
RECENT_DAYS = 30
PAIRS = 32
SERVED = 64  # users whose vectors are timed together


def build_model(config: ArgusConfig, data: EventSplit, device: torch.device) -> Argus:
    table = data.interactions
    genres, decade = torch.as_tensor(table.item_genres), torch.as_tensor(table.item_decade)
    return Argus(config, genres, decade, table.vocab["decade"]).to(device)


class Trainer:
    """Pre-training and fine-tuning of one arm's models on one device."""

    def __init__(self, ctx: Context, device: torch.device):
        self.ctx, self.device, self.data = ctx, device, load_split(ctx, EventSplit.build)
        self.rule = settings(BatchRule, ctx)
        self.log_q = proposal(self.data, self.rule, ctx.seed).to(device)

    def batches(self, rule: BatchRule):
        return lambda epoch: EpochWindows(self.data, rule, self.ctx.seed, epoch, self.device)

    def validation(self, model: Argus) -> dict[str, float]:
        """ndcg@10 of a model that retrieves, feedback_ne of one that only judges."""
        if model.config.nip:
            return {"ndcg@10": ndcg(model_scorer(model, self.data, self.device), self.data, "valid")}
        return {"feedback_ne": feedback_and_nip(model, self.data, "valid", self.device)["feedback_ne"]}

    def pretrain(self, model: Argus, hyperparameters: dict, state: StateFolder, **budget: Any) -> Trained:
        """L_NIP + L_FP over all train positions."""
        observed = budget.pop("observed", True)
        return fit_model(
            self.ctx,
            model,
            hyperparameters,
            state,
            budget=FitBudget.of(self.ctx.budget, **budget),
            batches=self.batches(self.rule),
            loss=lambda model, batch: model.loss(batch, self.log_q),
            validate=self.validation,
            key="ndcg@10" if model.config.nip else "feedback_ne",
            higher_is_better=model.config.nip,
            betas=BETAS,
            observed=observed,
        )

    def tune(
        self,
        model: Argus,
        hyperparameters: dict,
        state: StateFolder,
        encoder_rate: float,
        epochs: int,
        steps: int | None = None,
    ) -> Trained:
        """Two towers by pairwise loss; the encoder trains at `encoder_rate` of the learning rate (0: not at all)."""
        return fit_model(
            self.ctx,
            model,
            hyperparameters,
            state,
            budget=FitBudget.of(self.ctx.budget, epochs=epochs, steps=steps),
            batches=self.batches(replace(self.rule, pairs=PAIRS)),
            loss=lambda model, batch: model.tuning_loss(batch, self.log_q),
            validate=lambda model: {
                "pair_accuracy": float(pair_accuracy(model, self.data, "valid", self.device)[1].mean()),
                "ndcg@10": self.validation(model)["ndcg@10"],
            },
            key="pair_accuracy",
            optimizer=tower_optimizer(model, hyperparameters, encoder_rate),
        )


def tower_optimizer(model: Argus, hyperparameters: dict[str, Any], encoder_rate: float) -> AdamW:
    """AdamW with the towers at the learning rate and everything else at `encoder_rate` of it."""
    rate, decay = hyperparameters["learning_rate"], hyperparameters.get("weight_decay", 0.0)
    groups: dict[tuple[bool, bool], list] = {}
    for name, parameter in model.named_parameters():
        tower = name.startswith(("user_tower", "object_tower"))
        if not tower and not encoder_rate:
            parameter.requires_grad_(False)
        if parameter.requires_grad:
            groups.setdefault((tower, parameter.ndim >= 2), []).append(parameter)
    return AdamW(
        [
            {"params": params, "lr": rate * (1 if tower else encoder_rate), "weight_decay": decay if matrix else 0.0}
            for (tower, matrix), params in groups.items()
        ],
        betas=BETAS,
    )


def train(ctx: Context, device: torch.device) -> Measurement:
    """Pre-train one arm and measure it; with `scaling` in switch and budget also at other sizes."""
    trainer = Trainer(ctx, device)
    config = settings(ArgusConfig, ctx)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        return trainer.pretrain(build_model(config, trainer.data, device), hyperparameters, state)

    key = "ndcg@10" if config.nip else "feedback_ne"
    best, trials = best_of_trials(ctx, run, key, higher_is_better=config.nip, race=True)
    measured = measured_model(ctx, trainer, best, trials)
    if (ctx.switch or {}).get("scaling") and ctx.tuned is None:  # studies are read from the tuning seed
        measured.extra["studies"] = scaling(ctx, trainer, best.hyperparameters)
    return measured


def fine_tune(ctx: Context, device: torch.device) -> Measurement:
    """Pre-train as arm argus, then fit the two towers; with `scratch` only that, for the epochs of both.

    The feedback head rests while the towers are fitted.
    """
    trainer, switch, budget = Trainer(ctx, device), ctx.switch or {}, ctx.budget
    scratch = switch.get("scratch", False)
    epochs, steps = budget.tune_epochs, budget.get("tune_steps")
    if scratch:
        epochs, steps = epochs + budget.epochs, None if steps is None else steps + budget.steps
    config = settings(ArgusConfig, ctx, tower=True, **({"fp": False} if scratch else {}))

    def pretrained(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        first = build_model(replace(config, tower=False), trainer.data, device)
        return trainer.pretrain(first, hyperparameters, state)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        before = None if scratch else pretrained(hyperparameters, state.child("pretrain"))
        seed_everything(ctx.seed)
        model = build_model(config, trainer.data, device)
        if before:
            model.load_state_dict(before.model.state_dict(), strict=False)
            model.judge.requires_grad_(False)
        encoder_rate = 1.0 if scratch else 0.0 if switch.get("frozen") else ENCODER_RATE
        tuned = trainer.tune(model, hyperparameters, state.child("tune"), encoder_rate, epochs, steps)
        for name in ("seconds", "train_seconds", "steps") if before else ():
            tuned.cost[f"pretrain_{name}"] = before.cost[name]
            tuned.cost[name] += before.cost[name]
        return tuned

    best, trials = best_of_trials(ctx, run, "pair_accuracy")
    measured = measured_model(ctx, trainer, best, trials)
    measured.extra["serving"] = serving(best.model, trainer.data, device)
    return measured


def measured_model(ctx: Context, trainer: Trainer, best: Trained, trials: list[dict]) -> Measurement:
    """Test measurement of a trained model."""
    model, data, device = best.model.eval(), trainer.data, trainer.device
    ctx.observe(
        "trained",
        model=model,
        data=data,
        score=lambda data, split, positions: model_scorer(model, data, device)(split, positions),
        validation=best.validation,
    )
    measured = retrieval(model_scorer(model, data, device), data)
    users, accuracy = pair_accuracy(model, data, "test", device)
    measured.metrics |= feedback_and_nip(model, data, "test", device) | {"pair_accuracy": float(accuracy.mean())}
    measured.units["pair_accuracy"] = Units("user", users, accuracy)
    measured.validation, measured.curve = best.validation, best.curve
    measured.hyperparameters, measured.trials = best.hyperparameters, trials
    measured.cost |= best.cost | costs(model, data, device) | {"params": count_params(model, trainable_only=False)}
    return measured


@torch.no_grad()
def costs(model: Argus, data: EventSplit, device: torch.device) -> dict[str, float]:
    """Events a second (encoding); user vectors a second, FLOPs of one and bytes to store it.

    A user vector is that of the user tower, else the next-item query, else the state.
    """
    users = np.arange(min(SERVED, len(data)))
    batch, single = (target_windows(data, "test", u, model.config.context).to(device) for u in (users, users[:1]))
    encoding = median_seconds(lambda: model.encode(batch), device, 1, 3)
    vectors = median_seconds(lambda: user_vectors(model, batch), device, 1, 3)
    return {
        "flops": float(flops_of(lambda: user_vectors(model, single))),
        "user_vectors_per_s": len(users) / vectors,
        "events_per_s": int(batch.mask.sum()) / encoding,
        "bytes_per_user": 4.0 * model.config.width,
    }


def user_vectors(model: Argus, batch: EventBatch) -> torch.Tensor:
    """What is stored or looked up with for the last event of every window, [B, D]."""
    done, at = model.encode(batch), last_places(batch)
    if model.config.tower:
        return model.user_vectors(done, batch, at)
    return model.queries(done, at) if model.config.nip else done.for_feedback.flatten(0, 1)[at]


def serving(model: Argus, data: EventSplit, device: torch.device) -> dict[str, Any]:
    """Lists from stored vectors, re-ranked by p(like), and what stale user vectors cost."""
    found: dict[str, Any] = {
        "ndcg@10_of_towers_by_delay": {
            delay: ndcg(tower_scorer(model, data, device, delay), data, "test") for delay in DELAYS
        }
    }
    if model.config.fp:
        retrieved = model_scorer(model, data, device)
        found["ndcg@10_reranked_by_like"] = ndcg(reranked(retrieved, model, data, device), data, "test")
    found["pair_accuracy_by_delay"] = {
        delay: float(pair_accuracy(model, data, "test", device, delay)[1].mean()) for delay in DELAYS
    }
    return found


def scaling(ctx: Context, trainer: Trainer, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """nip_loss, feedback_ne and pair_accuracy by parameters: the budget's `scaling` sizes (width, layers)."""
    points: dict[str, list[tuple[float, float]]] = {}
    for number, (width, layers) in enumerate(ctx.budget.scaling):
        seed_everything(ctx.seed)
        config = settings(ArgusConfig, ctx, width=width, layers=layers)
        state = ctx.state.child(f"scaling-{number}")
        model = build_model(config, trainer.data, trainer.device)
        budget = {"epochs": ctx.budget.scaling_epochs, "steps": ctx.budget.get("scaling_steps")}
        model = trainer.pretrain(model, hyperparameters, state, observed=False, **budget).model
        found = feedback_and_nip(model, trainer.data, "test", trainer.device)
        found["pair_accuracy"] = float(pair_accuracy(model, trainer.data, "test", trainer.device)[1].mean())
        for name, value in found.items():
            points.setdefault(name, []).append((count_params(model), value))
    return {f"{name}_by_size": study("parameters", name, {"": found}) for name, found in points.items()}


def recent_counts(data: EventSplit, split: str, positions: np.ndarray) -> np.ndarray:
    """Train events of every item in the 30 days before each target, float64[B, n_items + 1]."""
    table = data.interactions
    rows = np.flatnonzero(data.index.train_row & np.isin(table.user, data.everyone))
    rows = rows[np.argsort(table.timestamp[rows], kind="stable")]
    time, item = table.timestamp[rows], table.item[rows]
    now = table.timestamp[data.cut(split)[positions]]
    first, last = np.searchsorted(time, now - RECENT_DAYS * DAY), np.searchsorted(time, now)
    return np.stack(
        [
            np.bincount(item[a:b], minlength=data.n_items + 1).astype(np.float64)
            for a, b in zip(first, last, strict=True)
        ]
    )


def linear_floor(ctx: Context, kind: str) -> Measurement:
    """EASE or item neighbours, fitted on the train part, scored from everything before the target."""
    data = load_split(ctx, EventSplit.build)
    table = data.interactions
    train = np.concatenate([[0], np.cumsum(data.index.train_row)])
    first, last = data.starts[data.everyone], data.starts[data.everyone + 1]

    def history(split: str, positions: np.ndarray, everything: bool) -> sparse.csr_matrix:
        return known_items(table, data.starts[data.users[positions]], data.cut(split)[positions], everything)

    return choose(
        ctx,
        kind,
        train=lambda everything: known_items(table, first, first + train[last] - train[first], everything),
        history=history,
        validate=lambda score: {"ndcg@10": ndcg(score, data, "valid")},
        measure=lambda score: retrieval(score, data),
    )


def floor(ctx: Context, score_of) -> Measurement:
    """A floor without parameters. score_of: data -> scorer."""
    device_for(ctx.device)
    data = load_split(ctx, EventSplit.build)
    score: Scorer = score_of(data)
    measured = retrieval(score, data)
    measured.validation = {"ndcg@10": ndcg(score, data, "valid")}
    return measured


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    return floor(
        ctx, lambda data: lambda split, positions: np.tile(data.popularity().astype(np.float64), (len(positions), 1))
    )


@experiment.arm
def popularity_recent(ctx: Context) -> Measurement:
    return floor(ctx, lambda data: lambda split, positions: recent_counts(data, split, positions))


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "itemknn")


@experiment.arm
def ease(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "ease")


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def nip_only(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def fp_only(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def argus(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def argus_reversed(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def argus_ft(ctx: Context) -> Measurement:
    return fine_tune(ctx, device_for(ctx.device))


@experiment.arm
def ft_scratch(ctx: Context) -> Measurement:
    return fine_tune(ctx, device_for(ctx.device))
