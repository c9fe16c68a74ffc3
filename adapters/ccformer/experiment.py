"""Stages of CCFormer: floors, HSTU and DCN-V2 with the same title vectors, the model, and what becomes of it without its parts.

What makes an arm differ from `ccformer` is its `switch` in card.yaml; sizes are in the budget. HSTU's width is solved so that
its dense parameters are CCFormer's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adapters.ccformer.hstu_ranker import HstuRanker, HstuRankerConfig, matched_width
from adapters.ccformer.model import CCFormer, CCFormerConfig
from adapters.ccformer.titles import TitledEncoder
from auto_research.baselines.dcnv2 import DCNv2
from auto_research.baselines.floors import request_floors
from auto_research.data.behaviours import BehaviourTable
from auto_research.data.requests import RequestTable
from auto_research.data.titles import load_title_vectors
from auto_research.evaluate.history import CANDIDATES, STEP_REQUESTS, candidate_cost, step_milliseconds
from auto_research.evaluate.serving import serving_studies
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import ONLY, Study, study
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("ccformer")
request_floors(experiment)

SPLIT_NOTE = (
    "Split per user by time: item parameters may have seen later ratings of other users; requests with fewer than five "
    "earlier ratings are not scored."
)
Build = Callable[[dict[str, int], Tensor, Tensor], nn.Module]


def hstu_config(ctx: Context, titles: Tensor) -> HstuRankerConfig:
    """HSTU as large as the CCFormer of this budget."""
    c = ctx.configured(CCFormerConfig)
    sizes = {"heads": c.heads, "tower": c.tower, "field": c.field, "history": c.history, "dropout": c.dropout}
    config = HstuRankerConfig(layers=ctx.budget.hstu_layers, **sizes)
    return replace(config, width=matched_width(dense_size(c, titles.shape[1]), config))


def dense_size(config: CCFormerConfig, title_width: int) -> int:
    """Dense parameters of CCFormer at these sizes; tables and field projections do not count."""
    vocab = dict.fromkeys(("user_id", "age", "gender", "occupation", "zip", "hour", "weekday", "gap"), 1)
    vocab |= dict.fromkeys(("item", "decade", "hist_rating", "hist_age"), 1)
    with torch.random.fork_rng(devices=[]):
        return CCFormer(config, vocab, torch.zeros(1, 1), torch.zeros(1, title_width)).dense_params()


def run(ctx: Context, device: torch.device, model_of: Callable[[Tensor], Build], studies: bool = False) -> Measurement:
    """Train and measure one arm. model_of: titles -> (vocab, item_genres, titles) -> model."""
    table = BehaviourTable.of(load_requests(ctx))
    titles = torch.from_numpy(load_title_vectors(ctx.data("titles")))
    make = model_of(titles)

    def build(_: dict[str, Any]) -> nn.Module:
        return make(table.vocab, torch.as_tensor(table.item_genres), titles)

    def inspect(model: nn.Module, table: RequestTable) -> dict[str, Any]:
        return costs(model, table, device, ctx.budget, studies)

    measured = train_ctr(ctx, build, device=device, table=table, inspect=inspect)
    measured.cost |= measured.extra.pop("efficiency")
    measured.notes.append(SPLIT_NOTE)
    return measured


def costs(model: nn.Module, table: RequestTable, device: torch.device, budget, studies: bool) -> dict[str, Any]:
    """Dense parameters and tokens per layer, and the studies where they are asked for."""
    extra: dict[str, Any] = {"efficiency": {"dense_params": model.dense_params()}}
    if isinstance(model, (CCFormer, HstuRanker)):
        extra["tokens_per_layer"] = tokens_entering(model.config, budget.history)
    if studies:
        found = serving_studies(
            model, table, device=device, history=budget.history, candidates=budget.serving, timed=budget.timed
        )
        extra["studies"] = found | length_studies(model, table, device, budget.lengths)
    return extra


def length_studies(model: nn.Module, table: RequestTable, device: torch.device, lengths) -> dict[str, Study]:
    """Over history length: tokens encoded, FLOPs and bytes kept per candidate, milliseconds of a training step."""
    flops, kept, step, tokens = [], [], [], []
    for length in lengths:
        cost = candidate_cost(model, table, device=device, history=length)
        flops.append((length, cost.flops))
        kept.append((length, cost.saved_bytes))
        step.append((length, step_milliseconds(model, table, device=device, history=length)))
        tokens.append((length, sum(tokens_entering(model.config, length))))
    x = "history events"
    return {
        "tokens": study(x, "history tokens entering a layer, summed over layers", {ONLY: tokens}),
        "flops_per_candidate": study(x, f"FLOPs, {CANDIDATES} candidates", {ONLY: flops}),
        "saved_bytes_per_candidate": study(x, f"bytes kept for backward, {CANDIDATES} candidates", {ONLY: kept}),
        "train_step_ms": study(x, f"milliseconds, {STEP_REQUESTS} requests", {ONLY: step}),
    }


def tokens_entering(config: CCFormerConfig | HstuRankerConfig, history: int) -> list[int]:
    """History tokens that enter each layer; an event is one token per stream."""
    if isinstance(config, HstuRankerConfig):
        return [history] * config.layers
    return [config.stream_count * length for length in config.lengths(history)[:-1]]


def train(ctx: Context, device: torch.device, studies: bool = False) -> Measurement:
    config = ctx.configured(CCFormerConfig)
    return run(ctx, device, lambda _: lambda *inputs: CCFormer(config, *inputs), studies)


@experiment.arm
def din_dcnv2(ctx: Context) -> Measurement:
    budget = ctx.budget

    def build(vocab: dict[str, int], item_genres: Tensor, titles: Tensor) -> nn.Module:
        sizes = {"history": budget.history, "hidden": budget.cross_hidden, "field": budget.field}
        return TitledDCNv2(vocab, item_genres, titles, dropout=budget.dropout, **sizes)

    return run(ctx, device_for(ctx.device), lambda _: build)


class TitledDCNv2(DCNv2):
    """The shared DCN-V2 baseline (DIN attention and two means as input) with title vectors in its item content."""

    def __init__(self, vocab: dict[str, int], item_genres: Tensor, titles: Tensor, *, field: int, **sizes: Any):
        super().__init__(vocab, item_genres, field=field, **sizes)
        self.input.encoder = TitledEncoder(vocab, item_genres, titles, field=field)


@experiment.arm
def hstu_ranker(ctx: Context) -> Measurement:
    def model_of(titles: Tensor) -> Build:
        config = hstu_config(ctx, titles)
        return lambda *inputs: HstuRanker(config, *inputs)

    return run(ctx, device_for(ctx.device), model_of, studies=True)


@experiment.arm
def ccformer(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), studies=True)


@experiment.arm
def fused_fields(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def fused_narrow(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def no_compression(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), studies=True)


@experiment.arm
def truncate_recent(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def ccformer_long(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))
