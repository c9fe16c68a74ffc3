"""Stages of Mosaic: artifacts train and export specialists, arms train the three downstream rankers on frozen vectors.

Artifacts: the fleet without extras, with mined composite labels (MRM), and with each redundancy loss (CRL); what a later
fleet shares with an earlier one is read from it (`reuse`). Which vectors an arm reads is its `fleet`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from adapters.mosaic.data import MosaicTable, item_surfaces
from adapters.mosaic.downstream import Downstream
from adapters.mosaic.fleet import (
    DOWNSTREAM_ROWS,
    Deployed,
    export_vectors,
    load_specialist,
    save_specialist,
    tower_budget,
    tower_config,
    train_jointly,
    train_specialist,
    widened,
)
from adapters.mosaic.fleet_report import add_surfaces, fleet_report
from adapters.mosaic.towers import Catalogue
from adapters.mosaic.upstream import UpstreamConfig
from auto_research.baselines import bias as bias_baseline
from auto_research.baselines import gbdt as gbdt_baseline
from auto_research.baselines import popularity as popularity_baseline
from auto_research.data.titles import load_title_vectors
from auto_research.evaluate.serving import TIMED, WARM_UP
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for
from auto_research.train.ctr import RequestBudget, load_requests, train_ctr

experiment = Experiment("mosaic")

SPLIT_NOTE = "Split per user by time: item parameters may have seen later ratings of other users."


def tables(ctx: Context) -> tuple[MosaicTable, Catalogue]:
    table = MosaicTable.of(load_requests(ctx))
    return table, Catalogue.of(table, load_title_vectors(ctx.data("titles")))


def specialists(ctx: Context) -> None:
    """Train the specialists of `kinds` in order, each beside those before it, and export them."""
    device, switch = device_for(ctx.device), ctx.switch
    table, catalogue = tables(ctx)
    towers = widened(tower_config(ctx, **switch.get("tower", {})), switch.get("widen", 1))
    config = UpstreamConfig(switch.get("redundancy", "none"), ctx.budget.get("redundancy_weight", 0.05))
    config = replace(config, dropout=towers.dropout, hidden=tuple(ctx.budget.interaction))
    if switch.get("joint"):
        sizes = {"towers": towers, "config": config}
        trained, facts = train_jointly(ctx, switch["kinds"], table, catalogue, device, **sizes)
        for kind, tower in trained.items():
            vectors = export_vectors(tower, table, tower_budget(ctx).history, device)
            save_specialist(ctx.out / kind, tower, vectors, facts, towers)
        return
    deployed: list[Deployed] = []
    for kind in switch["kinds"]:
        if kind in switch.get("reuse", {}):
            deployed.append(load_specialist(ctx.artifact(switch["reuse"][kind]) / kind, kind, catalogue))
            continue
        options = {"mrm": switch.get("mrm", "none"), "cotrain_rows": not switch.get("cotrain_upstream", False)}
        tower, facts = train_specialist(
            ctx, kind, table, catalogue, deployed, device, towers=towers, config=config, **options
        )
        vectors = export_vectors(tower, table, tower_budget(ctx).history, device)
        save_specialist(ctx.out / kind, tower, vectors, facts, towers)
        deployed.append(Deployed(kind, tower, vectors))


def fleet_of(ctx: Context, catalogue: Catalogue) -> list[Deployed]:
    """The specialists an arm reads, by kind: artifact."""
    chosen = (ctx.switch or {}).get("fleet", {})
    return [load_specialist(Path(ctx.artifact(artifact)) / kind, kind, catalogue) for kind, artifact in chosen.items()]


def downstream(ctx: Context) -> Measurement:
    """Train the rankers of the three surfaces on frozen, exported vectors."""
    device, switch = device_for(ctx.device), ctx.switch or {}
    table, catalogue = tables(ctx)
    fleet = fleet_of(ctx, catalogue)
    rows = table if switch.get("rows") == "all" else table.between(*DOWNSTREAM_ROWS)
    if fleet:
        rows = rows.reading(np.stack([one.vectors for one in fleet], axis=1))
    surface = item_surfaces(table.item_genres, table.genre_names)
    width = fleet[0].vectors.shape[1] if fleet else 0
    history = RequestBudget.of(ctx.budget).history

    def build(hyperparameters: dict[str, Any]) -> nn.Module:
        sizes = {
            "field": ctx.budget.field,
            "layers": ctx.budget.get("cross_layers", 3),
            "hidden": ctx.budget.cross_hidden,
            "dropout": ctx.budget.dropout,
        }
        towers = [one.tower for one in fleet]
        return Downstream(catalogue, surface, towers, width=width, titles=switch.get("titles", False), **sizes)

    def look(model: Downstream, table: MosaicTable) -> dict[str, Any]:
        if not fleet:
            return {}
        timing = (1, 3) if ctx.tier == "tiny" else (WARM_UP, TIMED)
        report = fleet_report(model, table, [one.name for one in fleet], history, device, timing=timing)
        return report | {"towers": {one.name: one.facts for one in fleet}}

    measured = train_ctr(ctx, build, device=device, table=rows, inspect=look)
    measured.metrics |= measured.extra.pop("metrics", {})
    measured.cost |= measured.extra.pop("cost", {})
    measured.notes.append(SPLIT_NOTE)
    return add_surfaces(measured, table)


def _register(names: list[str], function, decorate) -> None:
    """Stages that differ by their switch in card.yaml only."""
    for name in names:

        def stage(ctx: Context):
            return function(ctx)

        stage.__name__ = name
        decorate(stage)


_register(
    ["towers_plain", "towers_mrm", "towers_signed", "towers_squared", "towers_joint", "tower_wide"],
    specialists,
    experiment.artifact,
)


def floor(ctx: Context, measured: Measurement) -> Measurement:
    return add_surfaces(measured, load_requests(ctx))


@experiment.arm
def bias(ctx: Context) -> Measurement:
    return floor(ctx, bias_baseline.run(ctx, device=device_for(ctx.device)))


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    return floor(ctx, popularity_baseline.run_requests(ctx, device=device_for(ctx.device)))


@experiment.arm
def gbdt(ctx: Context) -> Measurement:
    return floor(ctx, gbdt_baseline.run(ctx, device=device_for(ctx.device)))


_register(
    [
        "single_sequential_wide",
        "no_user_embedding",
        "no_user_embedding_all_rows",
        "fleet_joint",
        "fleet_plain",
        "fleet_mrm",
        "fleet_full_signed",
        "fleet_full_squared",
        "fleet_minus_memorization",
        "fleet_minus_dense",
        "fleet_minus_sequential",
        "fleet_minus_cotrain",
    ],
    downstream,
    experiment.arm,
)
