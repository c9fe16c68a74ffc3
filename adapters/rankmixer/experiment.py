"""Stages of RankMixer: floors and baselines, the dense and sparse models, and their ablations.

What makes an arm differ from `rankmixer_dense` is its `switch` in card.yaml; sizes are in the budget.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from adapters.rankmixer.cross_ranker import CrossRanker, matched_sizes
from adapters.rankmixer.model import RankMixer, RankMixerConfig
from auto_research.baselines import din as din_baseline
from auto_research.baselines.floors import request_floors
from auto_research.blocks.token_mixing import UniMixer
from auto_research.data.requests import RequestTable
from auto_research.evaluate.serving import flop_rates
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import Study
from auto_research.runtime.devices import device_for, synchronize
from auto_research.train.ctr import load_requests, train_ctr

experiment = Experiment("rankmixer")
request_floors(experiment)

WARM_UP, TIMED = 5, 5
TIMED_PAIRS = 1024
INSPECTED_REQUESTS = 256
SERVING_TOLERANCE = 1e-3  # of a float32 logit; TF32 products differ by more than 1e-5
CROSS_LAYERS = 3
SPLIT_NOTE = (
    "Split per user by time: item parameters may have seen later ratings of other users; history-free requests "
    "(fewer than five earlier ratings) are not scored."
)


def train(ctx: Context, rated: bool = False) -> Measurement:
    """rated: measure FLOP/s at several widths."""
    device, table, config = device_for(ctx.device), load_requests(ctx), ctx.configured(RankMixerConfig)

    def build(hyperparameters: dict[str, Any]) -> nn.Module:
        return RankMixer(config, table.vocab, table.item_genres)

    peak = partial(matmul_rate, device, ctx.budget.get("peak_matmul", 2048))

    def look(model: RankMixer, table: RequestTable) -> dict[str, Any]:
        found = efficiency(model, table, device=device, peak=peak)
        if rated:
            found["studies"] = rates(ctx, device, lambda c: RankMixer(c, table.vocab, table.item_genres), config)
        return found

    return finish(train_ctr(ctx, build, device=device, table=table, inspect=look))


def rates(
    ctx: Context, device: torch.device, build: Callable[[RankMixerConfig], nn.Module], config: RankMixerConfig
) -> dict[str, Study]:
    """FLOP/s by parameters behind the input vector, over the budget's `rate_widths`."""
    return flop_rates(
        lambda width: build(replace(config, width=width)),
        lambda model: model.after_input(torch.zeros(TIMED_PAIRS, model.input.width, device=device)),
        ctx.budget["rate_widths"],
        device=device,
        timed=TIMED,
    )


def finish(measured: Measurement) -> Measurement:
    measured.cost |= measured.extra.pop("efficiency", {})
    measured.notes.append(SPLIT_NOTE)
    return measured


@lru_cache(maxsize=4)
def matmul_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a float32 product of two size x size matrices, best of a few."""
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return 2 * size**3 / best_seconds(lambda: a @ b, device)


def best_seconds(work, device: torch.device) -> float:
    """Shortest of `TIMED` runs after `WARM_UP` runs; the device is synchronised around the clock."""
    for _ in range(WARM_UP):
        work()
    shortest = float("inf")
    for _ in range(TIMED):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


@torch.no_grad()
def efficiency(model: RankMixer, table: RequestTable, *, device: torch.device, peak) -> dict[str, Any]:
    """Active-expert ratio per block and token, FLOPs per pair, MFU proxy, and the equality of sparse serving."""
    e = torch.randn(TIMED_PAIRS, model.input.width, device=device)
    seconds = best_seconds(lambda: model.after_input(e), device)
    dense = model.flops(TIMED_PAIRS)
    numbers = {
        "dense_params": model.dense_params(),
        "stack_flops_per_pair": dense / TIMED_PAIRS,
        "mfu_proxy": dense / seconds / peak(),
        "stack_pairs_per_s": TIMED_PAIRS / seconds,
    }
    extra: dict[str, Any] = {"efficiency": numbers}
    requests = table.requests("test")
    requests = requests[:: max(1, len(requests) // INSPECTED_REQUESTS)]  # sorted by user: a head would be a few users
    batch = table.batch(requests, history=model.config.history).to(device)
    logits = model(batch)
    if ratio := model.active_ratio():
        served = copy.deepcopy(model).export()
        numbers["active_expert_ratio"] = sum(map(sum, ratio)) / sum(map(len, ratio))
        numbers["serving_flops_per_pair"] = _serving_flops(model, ratio)
        numbers["serving_params"] = sum(p.numel() for p in served.parameters())
        extra["active_expert_ratio"] = ratio  # [block][token]
        difference = float((served(batch) - logits).abs().max())
        if difference > SERVING_TOLERANCE:
            raise RuntimeError(f"sparse serving differs from the dense computation by {difference:.2g}")
        extra["serving_difference"] = difference
        seconds = {m: best_seconds(lambda m=m: m(batch), device) for m in (model, served)}
        numbers["dense_pairs_per_s"], numbers["serving_pairs_per_s"] = (batch.pairs() / s for s in seconds.values())
        extra["penalty_weight"] = float(model.controller.weight)
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, UniMixer)]
    if mixers:
        extra["sinkhorn_row_error"] = [mixer.row_error() for mixer in mixers]
    return extra


def _serving_flops(model: RankMixer, ratio: list[list[float]]) -> float:
    """Forward FLOPs per pair when closed experts are skipped."""
    skipped = sum(
        block.channel.experts.flops(1) * (1 - sum(shares) / len(shares))
        for block, shares in zip(model.blocks, ratio, strict=True)
    )
    return model.flops(1) - skipped


@experiment.arm
def din(ctx: Context) -> Measurement:
    return din_baseline.run(ctx, device=device_for(ctx.device))


@experiment.arm
def dcnv2_matched(ctx: Context) -> Measurement:
    device, table, config = device_for(ctx.device), load_requests(ctx), ctx.configured(RankMixerConfig)

    def ranker(config: RankMixerConfig) -> CrossRanker:
        reference = RankMixer(config, table.vocab, table.item_genres)
        rank, hidden = matched_sizes(reference.dense_params(), reference.input.width, CROSS_LAYERS)
        return CrossRanker(config, table.vocab, table.item_genres, layers=CROSS_LAYERS, rank=rank, hidden=hidden)

    def look(model: CrossRanker, table: RequestTable) -> dict[str, Any]:
        target = RankMixer(config, table.vocab, table.item_genres).dense_params()
        sizes = {"dense_params": model.dense_params(), "rankmixer_dense_params": target}
        return {"efficiency": sizes, "studies": rates(ctx, device, ranker, config)}

    return finish(train_ctr(ctx, lambda hyperparameters: ranker(config), device=device, table=table, inspect=look))


@experiment.arm
def attention_tokens(ctx: Context) -> Measurement:
    return train(ctx, rated=True)


@experiment.arm
def shared_ffn(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def shared_ffn_matched(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def no_mixing(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def rankmixer_dense(ctx: Context) -> Measurement:
    return train(ctx, rated=True)


@experiment.arm
def rankmixer_smoe_dtsi(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def rankmixer_smoe_dtsi_rho025(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def smoe_single_router(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def smoe_topk(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def shared_tokenizer(ctx: Context) -> Measurement:
    return train(ctx)


@experiment.arm
def concat_head(ctx: Context) -> Measurement:
    return train(ctx)
