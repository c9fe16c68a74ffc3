"""Stages of HyFormer: floors, the two baselines, the model with two encoders, and its ablations.

What makes an arm differ from `hyformer` is its `switch` in card.yaml; sizes are in the budget.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from adapters.hyformer.candidate_check import check_candidate_free
from adapters.hyformer.late_fusion import LateFusion
from adapters.hyformer.model import SEQUENCES, HyFormer, HyFormerConfig
from auto_research.baselines import dcnv2 as dcnv2_baseline
from auto_research.baselines.floors import request_floors
from auto_research.blocks.rankmixer_block import matched_width
from auto_research.data.behaviours import BehaviourTable
from auto_research.evaluate.serving import serving_studies
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("hyformer")
request_floors(experiment)

CHECKED_REQUESTS = 16
SPLIT_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."


def behaviours(ctx: Context) -> BehaviourTable:
    return BehaviourTable.of(load_requests(ctx))


def matched_late_fusion(config: HyFormerConfig, vocab: dict[str, int], item_genres: Any) -> LateFusion:
    """Late fusion with the dense parameter count of HyFormer, met by the hidden width of its RankMixer blocks."""
    target = HyFormer(config, vocab, item_genres).dense_params()
    hidden = matched_width(target, lambda hidden: LateFusion(config, vocab, item_genres, hidden))
    return LateFusion(config, vocab, item_genres, hidden)


def train(ctx: Context, model_of: Any = HyFormer, studies: bool = False) -> Measurement:
    """model_of: (config, vocab, item_genres) -> model.  studies: measure what serving one request costs."""
    device, table, config = device_for(ctx.device), behaviours(ctx), ctx.configured(HyFormerConfig)

    def build(hyperparameters: dict[str, Any]) -> nn.Module:
        return model_of(config, table.vocab, table.item_genres)

    look = partial(inspect, device=device, config=config, ctx=ctx if studies else None)
    measured = train_ctr(ctx, build, device=device, table=table, inspect=look)
    measured.cost["dense_params"] = measured.extra.pop("dense_params")
    measured.notes.append(SPLIT_NOTE)
    return measured


def inspect(
    model: nn.Module, table: BehaviourTable, *, device: torch.device, config: HyFormerConfig, ctx: Context | None
) -> dict[str, Any]:
    """Check that the request's part is free of candidates; sizes, and serving cost with and without the cache."""
    requests = table.requests("test")[:CHECKED_REQUESTS]
    check_candidate_free(model, table.batch(requests, history=config.history).to(device))
    extra: dict[str, Any] = {"dense_params": model.dense_params()}
    if ctx is not None:
        timed = ctx.budget.get("timed", 20)
        extra["studies"] = serving_studies(
            model, table, device=device, history=config.history, warm_up=min(5, timed), timed=timed
        )
    return extra


@experiment.arm
def din_dcnv2(ctx: Context) -> Measurement:
    return dcnv2_baseline.run(ctx, device=device_for(ctx.device), table=behaviours(ctx), sequences=SEQUENCES)


@experiment.arm
def longer_then_rankmixer(ctx: Context) -> Measurement:
    return train(ctx, matched_late_fusion, studies=True)


@experiment.arm
def hyformer(ctx: Context) -> Measurement:
    return train(ctx, studies=True)


@experiment.arm
def hyformer_full_enc(ctx: Context) -> Measurement:
    return train(ctx, studies=True)


@experiment.arm
def no_boosting(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def merged_sequence(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def static_queries(ctx: Context) -> Measurement:
    return train(ctx)
