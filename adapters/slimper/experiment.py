"""Stages of SlimPer: floors and baselines, the Transformer it replaces, the model, its ablations, and both on long histories.

What makes an arm differ from `slimper` is its `switch` in card.yaml; sizes are in the budget. The Transformer's feed-forward
width is solved so that its dense parameters equal SlimPer's.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from adapters.slimper.model import FIELD_TOKENS, SlimPer, SlimPerConfig, dense_params
from adapters.slimper.transformer import FullTransformer, TransformerConfig, matched_hidden
from auto_research.baselines import din as din_baseline
from auto_research.baselines.floors import request_floors
from auto_research.data.requests import RequestTable
from auto_research.evaluate.history import CANDIDATES, STEP_REQUESTS, candidate_cost, step_milliseconds
from auto_research.evaluate.serving import candidates_of, median_seconds, serving_studies
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import ONLY, Study, study
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("slimper")

COPIED = "user tokens copied per candidate"
SPLIT_NOTE = (
    "Split per user by time: item parameters may have seen later ratings of other users; requests with fewer than five "
    "earlier ratings are not scored."
)


def transformer_config(ctx: Context, layers: int | None = None) -> TransformerConfig:
    """The matched 6-layer Transformer; `layers` shortens it without widening it."""
    c = ctx.configured(SlimPerConfig)
    config = TransformerConfig(
        width=ctx.budget.transformer_width,
        layers=ctx.budget.transformer_layers,
        heads=ctx.budget.transformer_heads,
        user_width=c.user_width,
        head=c.head,
        field=c.field,
        dropout=c.dropout,
    )
    config = replace(config, hidden=matched_hidden(size_of(c), 5 * c.field, config))
    return config if layers is None else replace(config, layers=layers)


def size_of(config: SlimPerConfig, genres: int = 19) -> int:
    """Dense parameters of SlimPer at these sizes; tables and field projections do not count."""
    vocab = dict.fromkeys(("user_id", "age", "gender", "occupation", "zip", "hour", "weekday", "gap"), 1)
    vocab |= dict.fromkeys(("item", "decade", "hist_rating", "hist_age"), 1)
    with torch.random.fork_rng(devices=[]):
        return dense_params(SlimPer(config, vocab, torch.zeros(1, genres)))


def run(ctx: Context, device: torch.device, model_of, studies: bool = False) -> Measurement:
    """Train and measure one arm. model_of: (vocab, item_genres) -> model; studies: cost over history length and candidates."""
    table = load_requests(ctx)

    def build(_: dict[str, Any]) -> nn.Module:
        return model_of(table.vocab, torch.as_tensor(table.item_genres))

    inspect = partial(costs, device=device, budget=ctx.budget, studies=studies)
    return finish(train_ctr(ctx, build, device=device, table=table, inspect=inspect))


def finish(measured: Measurement) -> Measurement:
    """Adds normalised entropy, logloss over the entropy of the test base rate; left out where all labels are alike."""
    measured.cost |= measured.extra.pop("efficiency", {})
    rate = float(np.mean(measured.rows.label))
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    if entropy:
        measured.metrics["ne"] = measured.metrics["logloss"] / entropy
    measured.notes.append(SPLIT_NOTE)
    return measured


def costs(model: nn.Module, table: RequestTable, *, device: torch.device, budget, studies: bool) -> dict[str, Any]:
    """Parameters, memory and time at the arm's own history, and the studies where they are asked for.

    saved_activation_bytes: kept for backward per candidate of one request. request_ms: the most candidates of `serving`.
    """
    history = budget.history
    batch = candidates_of(table, max(budget.serving), history=history, device=device)
    with torch.no_grad():
        seconds = median_seconds(partial(model.eval(), batch), device, timed=budget.timed)
    extra: dict[str, Any] = {
        "efficiency": {
            "dense_params": dense_params(model),
            "unshared_attention_score_elements": model.score_elements(history + FIELD_TOKENS),
            "saved_activation_bytes": candidate_cost(model, table, device=device, history=history).saved_bytes,
            "request_ms": 1e3 * seconds,
        }
    }
    if studies:
        found = serving_studies(
            model, table, device=device, history=history, candidates=budget.serving, timed=budget.timed
        )
        extra["studies"] = found | length_studies(model, table, device=device, lengths=budget.lengths)
    return extra


def variants(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model as it is, and with user tensors copied per candidate (same weights, same logits)."""
    other = copy.copy(model)
    other.config = replace(model.config, storage="candidate")
    yield from ((ONLY, model), (COPIED, other))


def length_studies(model: nn.Module, table: RequestTable, *, device: torch.device, lengths) -> dict[str, Study]:
    """Per candidate over history length: FLOPs, bytes kept for backward, attention scores; and a train step's milliseconds."""
    flops: dict[str, list] = {}
    kept: dict[str, list] = {}
    step: list[tuple[int, float]] = []
    for length in lengths:
        for label, variant in variants(model):
            cost = candidate_cost(variant, table, device=device, history=length, candidates=CANDIDATES)
            flops.setdefault(label, []).append((length, cost.flops))
            kept.setdefault(label, []).append((length, cost.saved_bytes))
        step.append((length, step_milliseconds(model, table, device=device, history=length, requests=STEP_REQUESTS)))
    x = "history events"
    scores = [(length, model.score_elements(length + FIELD_TOKENS)) for length in lengths]
    return {
        "flops_per_candidate": study(x, f"FLOPs, {CANDIDATES} candidates", flops),
        "saved_bytes_per_candidate": study(x, f"bytes kept for backward, {CANDIDATES} candidates", kept),
        "attention_scores": study(x, "attention scores per candidate and head, nothing shared", {ONLY: scores}),
        "train_step_ms": study(x, f"milliseconds, {STEP_REQUESTS} requests", {ONLY: step}),
    }


def train(ctx: Context, device: torch.device, studies: bool = False) -> Measurement:
    return run(ctx, device, partial(SlimPer, ctx.configured(SlimPerConfig)), studies)


def train_transformer(
    ctx: Context, device: torch.device, layers: int | None = None, studies: bool = True
) -> Measurement:
    return run(ctx, device, partial(FullTransformer, transformer_config(ctx, layers)), studies)


request_floors(experiment, finish)


@experiment.arm
def din_mlp(ctx: Context) -> Measurement:
    return finish(din_baseline.run(ctx, device=device_for(ctx.device), hidden=ctx.budget.din_hidden))


@experiment.arm
def full_sequence_transformer(ctx: Context) -> Measurement:
    return train_transformer(ctx, device_for(ctx.device))


@experiment.arm
def transformer_3layer(ctx: Context) -> Measurement:
    return train_transformer(ctx, device_for(ctx.device), layers=ctx.configured(SlimPerConfig).layers)


@experiment.arm
def transformer_long(ctx: Context) -> Measurement:
    return train_transformer(ctx, device_for(ctx.device), studies=False)


@experiment.arm
def slimper(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), studies=True)


@experiment.arm
def slimper_long(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def no_match(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def select_once(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))
