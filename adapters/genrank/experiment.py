"""Stages of GenRank: floors, a discriminative ranker, organisation by bias, and the ablations of sample and mask.

What makes an arm differ from `genrank` is its `switch` in card.yaml; sizes are in the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from adapters.genrank.efficiency import HISTORIES, efficiency_studies
from adapters.genrank.model import GenRank, GenRankConfig
from adapters.genrank.training import train_windows
from adapters.genrank.windows import WindowTable
from auto_research.baselines import dcnv2 as dcnv2_baseline
from auto_research.baselines.floors import request_floors
from auto_research.evaluate.serving import TIMED
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("genrank")
request_floors(experiment)

SPLIT_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."


def warm_up(steps: int) -> Callable[[int, int], float]:
    """Linear warm-up, then constant: (step, total) -> factor."""
    return lambda step, total: min(1.0, (step + 1) / max(1, steps))


def inspect(model: nn.Module, table: WindowTable, *, ctx: Context, device: torch.device) -> dict[str, Any]:
    """Cost of training and serving over the history's length."""
    studies = efficiency_studies(
        model,
        table,
        device=device,
        histories=ctx.budget.get("study_histories", HISTORIES),
        timed=ctx.budget.get("timed", TIMED),
    )
    return {"studies": studies}


def train(ctx: Context) -> Measurement:
    device, table, config = device_for(ctx.device), WindowTable.of(load_requests(ctx)), ctx.configured(GenRankConfig)
    measured = train_windows(
        ctx,
        lambda: GenRank(config, table.vocab, torch.as_tensor(table.item_genres)),
        device=device,
        table=table,
        history=config.window - 1,
        schedule=warm_up(ctx.budget.get("warmup", 100)),
        inspect=partial(inspect, ctx=ctx, device=device),
    )
    measured.notes.append(SPLIT_NOTE)
    return measured


@experiment.arm
def dcnv2_din(ctx: Context) -> Measurement:
    overrides = {"epochs": ctx.budget.request_epochs, "patience": ctx.budget.request_patience}
    measured = dcnv2_baseline.run(ctx, device=device_for(ctx.device), **overrides)
    measured.notes.append(SPLIT_NOTE)
    return measured


@experiment.arm
def interleaved_rab(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def interleaved_alibi(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def action_rab(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def genrank(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def genrank_pointwise_samples(ctx: Context) -> Measurement:
    device, table, config = device_for(ctx.device), WindowTable.of(load_requests(ctx)), ctx.configured(GenRankConfig)
    measured = train_ctr(
        ctx,
        lambda hyperparameters: GenRank(config, table.vocab, torch.as_tensor(table.item_genres)),
        device=device,
        table=table,
        schedule=warm_up(ctx.budget.get("warmup", 100)),
        history=config.window - 1,
        epochs=ctx.budget.request_epochs,
        patience=ctx.budget.request_patience,
    )
    measured.notes.append(SPLIT_NOTE)
    return measured


@experiment.arm
def genrank_no_mask(ctx: Context) -> Measurement:
    return train(ctx)
