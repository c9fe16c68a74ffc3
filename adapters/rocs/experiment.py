"""Stages of ROCS: floors, the strong baselines, early interaction without the mask, two towers, ROCS and its variants.

Sizes are in the budget, what makes an arm differ is its `switch` or its model. `rocs`, `full_broadcast` and `rocs_late`
carry the studies of what a request costs over its number of candidates.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adapters.rocs.dense import DenseROCS
from adapters.rocs.layers import ROCSConfig
from adapters.rocs.model import ROCS
from adapters.rocs.towers import LateROCS, TwoTower
from auto_research.baselines import dcnv2 as dcnv2_baseline
from auto_research.baselines.floors import request_floors
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import joint_score
from auto_research.evaluate.serving import CANDIDATES, TIMED, candidates_of, serving_studies
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import study
from auto_research.metrics.cost import saved_bytes
from auto_research.runtime.devices import device_for, synchronize
from auto_research.runtime.seeds import stable_rng
from auto_research.train.ctr import RequestBudget, load_requests, train_ctr, training_loss

experiment = Experiment("rocs")
request_floors(experiment)

DECOMPOSED, BROADCAST = "decomposed", "broadcast"
TOP = 10
STEP_WARM_UP, STEP_TIMED = 5, 5
SPLIT_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."


def train(ctx: Context, device: torch.device, kind: type[nn.Module], inspect: Callable | None = None) -> Measurement:
    """Train one arm; inspect: (model, table, device=, ctx=) -> extra, whose "efficiency" goes to the cost."""
    table, config = load_requests(ctx), ctx.configured(ROCSConfig)

    def build(hyperparameters: dict[str, Any]) -> nn.Module:
        return kind(config, table.vocab, table.item_genres)

    def look(model: nn.Module, table: RequestTable) -> dict[str, Any]:
        found = inspect(model, table, device=device, ctx=ctx) if inspect else {}
        return found | {"efficiency": {"dense_params": model.dense_params()} | found.get("efficiency", {})}

    measured = train_ctr(ctx, build, device=device, table=table, inspect=look)
    measured.cost |= measured.extra.pop("efficiency", {})
    measured.notes.append(SPLIT_NOTE)
    return measured


def request_cost(
    model: nn.Module, table: RequestTable, *, device: torch.device, ctx: Context, label: str = DECOMPOSED
) -> dict[str, Any]:
    """Cost of a request and of a training step, shared and broadcast with the same weights, and their difference."""
    history = RequestBudget.of(ctx.budget).history
    counts = tuple(ctx.budget.get("candidates", CANDIDATES))
    paths = {label: model, BROADCAST: model.broadcast}
    studies = serving_studies(
        model,
        table,
        device=device,
        history=history,
        candidates=counts,
        timed=ctx.budget.get("timed", TIMED),
        label=label,
        also={BROADCAST: model.broadcast},
    )
    sizes = {name: [] for name in paths}
    for count in counts:
        batch = candidates_of(table, count, history=history, device=device)
        for name, rank in paths.items():
            sizes[name].append((count, saved_bytes(partial(rank, batch), without=model)))
    studies["activation_bytes"] = study("candidates of a request", "bytes kept for the backward pass", sizes)
    largest = candidates_of(table, counts[-1], history=history, device=device)
    with torch.no_grad():
        difference = float((model(largest) - model.broadcast(largest)).abs().max())
    efficiency = {"broadcast_difference": difference} | step_ms(model, table, device=device, ctx=ctx, paths=paths)
    return {"studies": studies, "efficiency": efficiency}


def step_ms(model: nn.Module, table: RequestTable, *, device: torch.device, ctx: Context, paths: dict) -> dict:
    """Median milliseconds of forward and backward over one training batch, per path; the paths take turns."""
    budget = RequestBudget.of(ctx.budget)
    rng = stable_rng("rocs-step", ctx.seed)
    requests = rng.permutation(table.requests("train"))[: budget.batch]
    batch = table.batch(requests, history=budget.history, negatives=budget.negatives, rng=rng).to(device)
    spent = {name: [] for name in paths}
    model.train()
    for _ in range(STEP_WARM_UP + STEP_TIMED):
        for name, rank in paths.items():
            synchronize(device)
            started = time.perf_counter()
            training_loss(_Path(rank), batch).backward()
            synchronize(device)
            spent[name].append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
    model.eval()
    return {
        f"step_{name.replace(' ', '_')}_ms": 1e3 * statistics.median(seconds[STEP_WARM_UP:])
        for name, seconds in spent.items()
    }


class _Path(nn.Module):
    """One way of computing a model's logits, seen as a model."""

    def __init__(self, rank: Callable[[RequestBatch], Tensor]) -> None:
        super().__init__()
        self.rank = [rank]  # not a child: the weights belong to the model

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.rank[0](batch)


@torch.no_grad()
def retrieval(model: LateROCS, table: RequestTable, *, device: torch.device, ctx: Context) -> dict[str, Any]:
    """Exact top 10 of the whole catalogue from a table of items computed once, against computing everything anew."""
    history = RequestBudget.of(ctx.budget).history
    tasks = table.catalogue_tasks("test", ctx.budget.get("catalogue_users"))
    decade = torch.as_tensor(np.asarray(table.interactions.item_decade), dtype=torch.int64, device=device)
    items = model.item_table(decade)
    catalogue = np.arange(1, table.interactions.n_items + 1)
    same, largest, spent = 0, 0.0, {"table": 0.0, "anew": 0.0}
    for index, request in enumerate(tasks.request):
        batch = table.score_batch(int(request), catalogue, history=history).to(device)
        if index == 0:  # warm up
            model.score(model.prepare(batch), batch, items), model(batch)
        tops = []
        for name, of_items in (("table", items), ("anew", None)):
            synchronize(device)
            started = time.perf_counter()
            logits = model.score(model.prepare(batch), batch, of_items)
            synchronize(device)
            spent[name] += time.perf_counter() - started
            scores = joint_score(logits.float().cpu().numpy())
            tops.append((np.argsort(-scores, kind="stable")[:TOP], scores))
        same += bool(np.array_equal(np.sort(tops[0][0]), np.sort(tops[1][0])))
        largest = max(largest, float(np.abs(tops[0][1] - tops[1][1]).max()))
    found = serving_studies(
        model,
        table,
        device=device,
        history=history,
        candidates=tuple(ctx.budget.get("candidates", CANDIDATES)),
        timed=ctx.budget.get("timed", TIMED),
        label="items anew",
        also={"items precomputed": lambda batch: model.score(model.prepare(batch), batch, items)},
    )
    count = max(1, len(tasks))
    efficiency = {
        "item_table_bytes": items.numel() * items.element_size(),
        "retrieval_same_top10": same / count,
        "retrieval_difference": largest,
        "retrieval_table_ms": 1e3 * spent["table"] / count,
        "retrieval_anew_ms": 1e3 * spent["anew"] / count,
    }
    return {"studies": found, "efficiency": efficiency}


@experiment.arm
def dcnv2_din(ctx: Context) -> Measurement:
    table, budget = load_requests(ctx), ctx.budget
    measured = dcnv2_baseline.run(ctx, device=device_for(ctx.device), table=table)
    sizes = {
        "field": budget.get("field", dcnv2_baseline.FIELD),
        "layers": budget.get("cross_layers", dcnv2_baseline.LAYERS),
    }
    genres = torch.as_tensor(table.item_genres)
    model = dcnv2_baseline.DCNv2(table.vocab, genres, hidden=measured.extra["mlp_width"], **sizes)
    measured.cost["dense_params"] = model.dense_params()
    return measured


@experiment.arm
def full_broadcast(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), DenseROCS, partial(request_cost, label="sequence once"))


@experiment.arm
def two_tower(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), TwoTower)


@experiment.arm
def rocs(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), ROCS, request_cost)


@experiment.arm
def rocs_no_dca(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), ROCS)


@experiment.arm
def rocs_no_request_head(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), ROCS)


@experiment.arm
def rocs_late(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device), LateROCS, retrieval)
