"""Stages of OneTrans: floors, the two late-fusion baselines, the model and its ablations.

What makes an arm differ from `onetrans` is its `switch` in card.yaml; sizes are in the budget. Besides quality every
cached model reports what caching and the pyramid save: across candidates, and from request to request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from adapters.onetrans.late_fusion import matched
from adapters.onetrans.model import OneTrans, OneTransConfig, score_elements
from adapters.onetrans.replay import growth_studies, replay
from adapters.onetrans.tokens import SEQUENCES
from auto_research.baselines.dcnv2 import HIDDEN, DCNv2
from auto_research.baselines.floors import request_floors
from auto_research.data.behaviours import BehaviourTable
from auto_research.evaluate.ctr import model_scorer, rated_batches
from auto_research.evaluate.serving import CANDIDATES, TIMED, serving_studies
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("onetrans")
request_floors(experiment)

LOVE = 2
SPLIT_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."


def love_auc(model: nn.Module, table: BehaviourTable, device: torch.device, history: int) -> float:
    """AUC of the love head (the paper's CVR) on the rated test rows."""
    from sklearn.metrics import roc_auc_score

    score, batches = model_scorer(model, device), rated_batches(table, "test", history=history)
    logits = np.concatenate([score(batch)[:, LOVE].float().cpu().numpy() for batch in batches])
    label = np.concatenate([batch.love.numpy() for batch in batches]) > 0.5
    return float(roc_auc_score(label, logits))


def warm_up(steps: int) -> Callable[[int, int], float]:
    """Linear warm-up, then constant: (step, total) -> factor."""
    return lambda step, total: min(1.0, (step + 1) / max(1, steps))


def inspect(model: nn.Module, table: BehaviourTable, *, ctx: Context, device: torch.device) -> dict[str, Any]:
    """Love AUC, and for OneTrans the cost of a request, of the cache and of replayed requests."""
    history = ctx.budget.history
    extra: dict[str, Any] = {"love_auc": love_auc(model, table, device, history), "studies": {}}
    candidates = ctx.budget.get("serving_candidates", CANDIDATES)
    timed = ctx.budget.get("timed", TIMED)
    uncached = {"no cache": model.uncached} if isinstance(model, OneTrans) else None
    extra["studies"] |= serving_studies(
        model, table, device=device, history=history, candidates=candidates, timed=timed, also=uncached
    )
    if not isinstance(model, OneTrans):
        return extra
    config = model.config
    extra["efficiency"] = {
        "kv_cache_bytes": model.cache_bytes(),
        "score_elements": score_elements(config.kept, config.length, config.tokens),
        "dense_params": model.dense_params(),
    }
    if config.positions == "oldest":
        extra["cross_request"] = replay(model, table, device=device, users=ctx.budget.get("replay_users", 50))
        extra["studies"] |= growth_studies(model, table, device=device, timed=timed)
    return extra


def run(ctx: Context, build) -> Measurement:
    """Train, measure and inspect. build: (config, table) -> model."""
    device, table, config = (
        device_for(ctx.device),
        BehaviourTable.of(load_requests(ctx)),
        ctx.configured(OneTransConfig),
    )
    measured = train_ctr(
        ctx,
        lambda hyperparameters: build(config, table),
        device=device,
        table=table,
        schedule=warm_up(ctx.budget.get("warmup", 50)),
        inspect=partial(inspect, ctx=ctx, device=device),
    )
    return finish(measured)


def finish(measured: Measurement) -> Measurement:
    measured.metrics["love_auc"] = measured.extra.pop("love_auc")
    costs = measured.extra.pop("efficiency", {})
    measured.cost |= costs
    if costs:
        measured.notes.append(
            f"keys and values of a user: {costs['kv_cache_bytes']:,} bytes; {costs['score_elements']:,} attention "
            "scores a head and user with one candidate"
        )
    if replayed := measured.extra.get("cross_request"):
        measured.notes.append(
            f"replay of {replayed['requests']} requests: {replayed['kept']:.0%} of those with a predecessor reused its "
            f"keys and values, {replayed['kept_flops']:,.0f} instead of {replayed['cold_flops']:,.0f} FLOPs of the "
            f"sequence side, logits within {replayed['largest_difference']:.1e}"
        )
    measured.notes.append(SPLIT_NOTE)
    return measured


def train(ctx: Context) -> Measurement:
    return run(ctx, lambda config, table: OneTrans(config, table.vocab, torch.as_tensor(table.item_genres)))


@experiment.arm
def dcnv2_din(ctx: Context) -> Measurement:
    def build(config: OneTransConfig, table: BehaviourTable) -> nn.Module:
        return DCNv2(
            table.vocab,
            torch.as_tensor(table.item_genres),
            history=config.history,
            field=config.field,
            hidden=ctx.budget.get("cross_hidden", HIDDEN),
            dropout=config.dropout,
            sequences=SEQUENCES,
        )

    return run(ctx, build)


@experiment.arm
def encode_then_interact(ctx: Context) -> Measurement:
    return run(ctx, lambda config, table: matched(config, table.vocab, torch.as_tensor(table.item_genres)))


@experiment.arm
def onetrans(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def shared_params(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def no_pyramid(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def ns_isolated(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def oldest_positions(ctx: Context) -> Measurement:
    return train(ctx)
