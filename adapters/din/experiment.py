"""Stages of DIN: floors, the paper's baselines, and its attention, Dice and regularisation one after another.

What makes an arm differ is its `switch` in card.yaml; sizes are in the budget. `split: user` in the budget takes the
paper's split over users and drops the user fields.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adapters.din.model import DIN, DINConfig, LogisticRegression
from adapters.din.user_split import split_by_user
from auto_research.baselines.floors import request_floors
from auto_research.data.requests import RequestTable
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for
from auto_research.runtime.errors import ConfigError
from auto_research.train.ctr import RequestBudget, load_requests, train_ctr
from auto_research.train.optimizer import exponential

experiment = Experiment("din")
request_floors(experiment)

HALF_EPOCH_DECAY = 0.9
TUNED = ("mba", "plain_l2")  # fields of DINConfig that a trial may set
CASE_USERS, CASE_EVENTS = 20, 5
AT_ONCE = 4096
LEAKAGE_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."
USER_SPLIT_NOTE = "Split by user (60% train, 10% validation, 30% test users); user id and user fields are not used."


def table_of(ctx: Context) -> tuple[RequestTable, bool]:
    """The request table, and whether it is split by user."""
    kind = ctx.budget.get("split", "time")
    if kind not in ("time", "user"):
        raise ConfigError(f"din: split {kind!r} is not one of time, user")
    table = load_requests(ctx)
    return (split_by_user(table), True) if kind == "user" else (table, False)


def config_of(ctx: Context, by_user: bool, hyperparameters: dict[str, Any]) -> DINConfig:
    """Sizes from the budget, switches from the arm, lambda from the trial; no user fields when users are split."""
    tuned = {name: hyperparameters[name] for name in TUNED if name in hyperparameters}
    return ctx.configured(DINConfig, **tuned, **({"user_fields": ()} if by_user else {}))


def half_epoch_decay(steps: int) -> Callable[[int, int], float]:
    """0.9 per half epoch of `steps` optimizer steps: (step, total) -> learning-rate factor."""
    return exponential(HALF_EPOCH_DECAY, every=max(1, steps // 2))


def train_occurrences(table: RequestTable, history: int) -> dict[str, Tensor]:
    """n_j of mini-batch-aware regularisation: rated candidates and history slots of the train requests.

    item int64[n_items + 1]; user_id and zip count rated candidates. Sampled negatives are not counted.
    """
    vocab, requests = table.vocab, table.requests("train")
    counts = {name: torch.zeros(vocab[name], dtype=torch.int64) for name in ("item", "user_id", "zip")}
    for start in range(0, len(requests), AT_ONCE):
        batch = table.batch(requests[start : start + AT_ONCE], history=history)
        seen = {
            "item": torch.cat([batch.item, batch.hist_item[batch.hist_mask]]),
            "user_id": batch.user_id[batch.request_of],
            "zip": batch.zip[batch.request_of],
        }
        for name, ids in seen.items():
            counts[name] += torch.bincount(ids, minlength=vocab[name])
    return counts


def run(ctx: Context, device: torch.device, model_of) -> Measurement:
    """Train one arm. model_of: (table, by_user, hyperparameters) -> model."""
    table, by_user = table_of(ctx)
    steps = -(-len(table.requests("train")) // RequestBudget.of(ctx.budget).batch)
    measured = train_ctr(
        ctx,
        lambda hyperparameters: model_of(table, by_user, hyperparameters),
        device=device,
        table=table,
        schedule=half_epoch_decay(steps),
        inspect=lambda model, table: case_study(model, table, device),
    )
    measured.notes.append(USER_SPLIT_NOTE if by_user else LEAKAGE_NOTE)
    return measured


def train(ctx: Context) -> Measurement:
    def model_of(table: RequestTable, by_user: bool, hyperparameters: dict[str, Any]) -> nn.Module:
        config = config_of(ctx, by_user, hyperparameters)
        counts = train_occurrences(table, config.history) if config.mba else None
        return DIN(config, table.vocab, table.item_genres, counts)

    return run(ctx, device_for(ctx.device), model_of)


@torch.no_grad()
def case_study(model: nn.Module, table: RequestTable, device: torch.device) -> dict[str, Any]:
    """Films with the largest weights for one liked test item of 20 users; nothing for models without attention."""
    if not isinstance(model, DIN) or model.config.pooling not in ("attention", "softmax"):
        return {}
    tasks, titles = table.catalogue_tasks("test", CASE_USERS), table.interactions.item_title
    cases = []
    for user, request, target in zip(tasks.user, tasks.request, tasks.target, strict=True):
        batch = table.score_batch(int(request), np.array([target]), history=model.config.history)
        weights = model.attention_weights(batch.to(device))[0].cpu()
        strongest = (
            weights.abs().masked_fill(~batch.hist_mask[0], -1).topk(min(CASE_EVENTS, int(batch.hist_mask.sum())))
        )
        films = [
            {"film": titles[int(batch.hist_item[0, j])], "weight": float(weights[j])}
            for j in strongest.indices.tolist()
        ]
        cases.append({"user": int(user), "candidate": titles[int(target)], "history": films})
    return {"attention": cases}


@experiment.arm
def logistic_regression(ctx: Context) -> Measurement:
    def model_of(table: RequestTable, by_user: bool, hyperparameters: dict[str, Any]) -> nn.Module:
        fields = config_of(ctx, by_user, hyperparameters).user_fields
        return LogisticRegression(table.vocab, table.item_genres, fields)

    return run(ctx, device_for(ctx.device), model_of)


@experiment.arm
def base_mean_pool(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def wide_deep(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_sum_pool(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_prelu(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_softmax(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_dice(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_full(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_plain_l2(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_ids_only(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_no_product(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def base_user_split(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def din_user_split(ctx: Context) -> Measurement:
    return train(ctx)
