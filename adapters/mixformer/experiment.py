"""Stages of MixFormer: floors, the stacked baseline, the plain and the decoupled model, ablations and the scaling study.

What makes an arm differ from `mixformer` is its `switch` in card.yaml; sizes are in the budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from adapters.mixformer.model import MixFormer, MixFormerConfig
from adapters.mixformer.stacked import Stacked
from auto_research.baselines import dcnv2 as dcnv2_baseline
from auto_research.baselines.floors import request_floors
from auto_research.blocks.rankmixer_block import matched_width
from auto_research.data.requests import RequestTable
from auto_research.evaluate.serving import candidates_of, flop_rates, serving_studies
from auto_research.experiment.context import Budget, Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import Study, study
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("mixformer")
request_floors(experiment)

CANDIDATES = (1, 32, 1682)
ALL_HEADS = "all heads per candidate"
CHECKED_TASKS = 8
RATED_PAIRS = 1024
SUMMED = ("seconds", "train_seconds", "tuning_seconds")
SPLIT_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."


def matched_stacked(config: MixFormerConfig, vocab: dict[str, int], item_genres: Any) -> Stacked:
    """The stacked model with MixFormer's dense parameter count, met by the hidden width of its RankMixer blocks."""
    target = MixFormer(config, vocab, item_genres).dense_params()
    hidden = matched_width(target, lambda hidden: Stacked(config, vocab, item_genres, hidden))
    return Stacked(config, vocab, item_genres, hidden)


def train(ctx: Context, device: torch.device, model_of: Any = MixFormer, studies: bool = False) -> Measurement:
    """model_of: (config, vocab, item_genres) -> model.  studies: measure what serving one request costs."""
    table, config = load_requests(ctx), ctx.configured(MixFormerConfig)

    def build(hyperparameters: dict[str, Any]) -> nn.Module:
        return model_of(config, table.vocab, table.item_genres)

    timed = ctx.budget.get("timed", 20) if studies else None

    def look(model: nn.Module, table: RequestTable) -> dict[str, Any]:
        extra = inspect(model, table, device=device, history=config.history, timed=timed)
        if timed is not None:
            extra["studies"] |= rates(ctx, device, model_of, config, table, timed)
        return extra

    measured = train_ctr(ctx, build, device=device, table=table, inspect=look)
    measured.cost["dense_params"] = measured.extra.pop("dense_params")
    measured.notes.append(SPLIT_NOTE)
    return measured


def inspect(
    model: nn.Module, table: RequestTable, *, device: torch.device, history: int, timed: int | None
) -> dict[str, Any]:
    """Sizes; for a served arm the cost of a request, for the decoupled one also without the cached user heads."""
    extra: dict[str, Any] = {"dense_params": model.dense_params()}
    if timed is None:
        return extra
    clock = {"warm_up": min(5, timed), "timed": timed}
    decoupled = isinstance(model, MixFormer) and model.config.decoupled
    extra["studies"] = serving_studies(
        model,
        table,
        device=device,
        history=history,
        candidates=CANDIDATES,
        also={ALL_HEADS: model.recompute} if decoupled else None,
        **clock,
    )
    if decoupled:
        extra["serving_difference"] = serving_difference(model, table, device=device, history=history)
    return extra


def rates(
    ctx: Context, device: torch.device, model_of: Any, config: MixFormerConfig, table: RequestTable, timed: int
) -> dict[str, Study]:
    """FLOP/s that scoring RATED_PAIRS candidates reaches, by dense parameters, over the budget's `rate_widths`."""
    batch = candidates_of(table, RATED_PAIRS, history=config.history, device=device)
    return flop_rates(
        lambda width: model_of(replace(config, width=width), table.vocab, table.item_genres),
        lambda model: model(batch),
        ctx.budget["rate_widths"],
        device=device,
        warm_up=min(5, timed),
        timed=timed,
    )


@torch.no_grad()
def serving_difference(model: MixFormer, table: RequestTable, *, device: torch.device, history: int) -> float:
    """Largest difference of logits between cached user heads and `recompute`: whole catalogue, several test users."""
    tasks = table.catalogue_tasks("test", CHECKED_TASKS)
    items, largest = np.arange(1, table.interactions.n_items + 1), 0.0
    for request in tasks.request:
        batch = table.score_batch(int(request), items, history=history).to(device)
        largest = max(largest, float((model.recompute(batch) - model(batch)).abs().max()))
    return largest


def scaling(ctx: Context, device: torch.device, model_of: Any = MixFormer) -> Measurement:
    """One model per cell (width D, history L) of the budget; the measurement is that of the last cell, its times are sums."""
    cells, lines, spent = [], {}, dict.fromkeys(SUMMED, 0.0)
    for width, history in ctx.budget["cells"]:
        budget = Budget({**ctx.budget, "width": width, "history": history})
        cell = replace(ctx, budget=budget, state=ctx.state.child(f"cell-{width}-{history}"))
        measured = train(cell, device, model_of)
        spent = {name: seconds + measured.cost[name] for name, seconds in spent.items()}
        flops = measured.cost["flops"]
        lines.setdefault(f"L {history}", []).append((flops / 1e6, measured.metrics["auc"]))
        values = {"auc": measured.metrics["auc"], "validation_auc": measured.validation["auc"], "flops": flops}
        cells.append({"width": width, "history": history, "dense_params": measured.cost["dense_params"]} | values)
    lines = {label: sorted(points) for label, points in lines.items()}
    measured.cost |= spent
    measured.notes.append(
        f"The row shows the last of {len(cells)} cells (D={width}, L={history}); its seconds are those of all cells."
    )
    by_flops = study("million FLOPs per pair", "test AUC", lines, log=False)
    measured.extra |= {"cells": cells, "studies": {"auc_by_flops": by_flops}}
    return measured


@experiment.arm
def din_dcnv2(ctx: Context) -> Measurement:
    measured = dcnv2_baseline.run(ctx, device=device_for(ctx.device))
    measured.notes.append(SPLIT_NOTE)
    return measured


@experiment.arm
def stacked(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), matched_stacked, studies=True)


@experiment.arm
def mixformer(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), studies=True)


@experiment.arm
def ui_mixformer(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), studies=True)


@experiment.arm
def static_sequence(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def no_head_mixing(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def scaling_stacked(ctx: Context) -> Measurement:
    return scaling(ctx, device_for(ctx.device), matched_stacked)


@experiment.arm
def scaling_mixformer(ctx: Context) -> Measurement:
    return scaling(ctx, device_for(ctx.device))
