"""Training, export and reading of specialists.

An artifact holds one folder per specialist: tower.safetensors, vectors.safetensors (one vector per request of any split,
from events strictly before it) and facts.json, which has the tower's configuration as well.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from adapters.mosaic.data import MosaicTable, rated_labels
from adapters.mosaic.downstream import CoTraining
from adapters.mosaic.relations import RisingPenalty, random_group, seen_classes, spearman, task_groups
from adapters.mosaic.towers import Catalogue, JointTower, TowerConfig, build_tower
from adapters.mosaic.upstream import UpstreamConfig, UpstreamModel, upstream_model
from auto_research.evaluate.ctr import model_scorer, rated_batches, rated_metrics, score_rated
from auto_research.experiment.context import Context
from auto_research.runtime.files import write_json
from auto_research.runtime.seeds import seed_everything
from auto_research.train.ctr import SELECTION, EpochBatches, RequestBudget, training_loss
from auto_research.train.loop import Fitted, Plan, fit
from auto_research.train.optimizer import adamw

UPSTREAM_ROWS, DOWNSTREAM_ROWS = (0.0, 0.5), (0.5, 0.8)
EXPORT_AT_ONCE = 512


@dataclass(frozen=True)
class Deployed:
    """A frozen specialist: tower in evaluation mode, vectors float32[n_requests, D] (0 outside the splits).

    facts: of its training, with its configuration under "tower".
    """

    name: str
    tower: nn.Module
    vectors: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)


def tower_config(ctx: Context, **changes: Any) -> TowerConfig:
    """Sizes from the budget; `changes` win."""
    names = {f.name for f in fields(TowerConfig)}
    return TowerConfig(**({name: ctx.budget[name] for name in ctx.budget if name in names} | changes))


def tower_budget(ctx: Context) -> RequestBudget:
    """The request budget with the step cap of towers, where the tier has one."""
    steps = ctx.budget.get("tower_steps")
    return RequestBudget.of(ctx.budget, **({} if steps is None else {"steps": steps}))


def mined_groups(table: MosaicTable, mode: str, seed: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """(tasks, classes seen) of every group of upstream rows. mode: none | mined | random (same size, ablation)."""
    if mode == "none":
        return []
    labels = rated_labels(table)
    groups = task_groups(spearman(labels))
    if mode == "random":
        labels = np.column_stack([labels, np.ones(len(labels), dtype=np.int64)])  # engage, constant on rated rows
        groups = [random_group(group, labels.shape[1], seed) for group in groups]
    return [(group, seen_classes(labels, group)) for group in groups]


def train_specialist(
    ctx: Context,
    kind: str,
    table: MosaicTable,
    catalogue: Catalogue,
    deployed: list[Deployed],
    device: torch.device,
    *,
    towers: TowerConfig,
    config: UpstreamConfig,
    mrm: str = "none",
    cotrain_rows: bool = True,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train one specialist in its own loop and return its tower, frozen, with the facts of its training.

    deployed: those in use already; the redundancy loss reads their exported vectors, and beside them only epochs with a
    full lambda are exported, whether or not there is a redundancy loss. The CoTrain tower trains with a downstream model
    on downstream rows, all others (and CoTrain with cotrain_rows False) upstream on earlier rows.
    """
    downstream = kind == "cotrain" and cotrain_rows
    rows = table.between(*(DOWNSTREAM_ROWS if downstream else UPSTREAM_ROWS))
    groups = [] if downstream else mined_groups(rows, mrm, ctx.seed)
    penalised = bool(deployed) and config.redundancy != "none"
    if penalised:
        rows = rows.reading(np.stack([one.vectors for one in deployed], axis=1))
    seed_everything(ctx.seed)
    if downstream:
        sizes = {"field": towers.field, "layers": ctx.budget.get("cross_layers", 3), "hidden": ctx.budget.cross_hidden}
        model = CoTraining(build_tower(kind, towers, catalogue), towers.user_width, config, catalogue, **sizes)
    else:
        model = upstream_model(kind, towers, config, catalogue, groups)
    model = model.to(device)
    fitted = _fit(ctx, model, rows, device, kind, beside=bool(deployed))
    facts = {
        "validation": fitted.validation,
        "best_epoch": fitted.best_epoch,
        "steps": fitted.steps,
        "tower_params": sum(p.numel() for p in model.tower.parameters()),
        "groups": [list(group) for group, _ in groups],
        "classes": [len(classes) for _, classes in groups],
        "redundancy": config.redundancy if penalised else "none",
        "penalty": float(model.penalty) if penalised else 0.0,  # lambda at the exported epoch
    }
    return model.tower.requires_grad_(False).eval(), facts


def train_jointly(
    ctx: Context,
    kinds: list[str],
    table: MosaicTable,
    catalogue: Catalogue,
    device: torch.device,
    *,
    towers: TowerConfig,
    config: UpstreamConfig,
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Ablation: the specialists of `kinds` as one model on upstream rows; (towers by kind, frozen, facts)."""
    seed_everything(ctx.seed)
    joint = JointTower(kinds, towers, catalogue)
    model = UpstreamModel(joint, len(kinds) * towers.user_width, config, catalogue, field=towers.field).to(device)
    fitted = _fit(ctx, model, table.between(*UPSTREAM_ROWS), device, "joint")
    facts = {"validation": fitted.validation, "best_epoch": fitted.best_epoch, "steps": fitted.steps}
    return dict(joint.requires_grad_(False).eval().towers.items()), facts


def _fit(
    ctx: Context, model: RisingPenalty, table: MosaicTable, device: torch.device, name: str, *, beside: bool = False
) -> Fitted:
    budget, trial = tower_budget(ctx), ctx.budget.get("tower_trial", {"learning_rate": 1e-3, "weight_decay": 1e-4})
    validation = rated_batches(table, "valid", history=budget.history)

    def after(model: nn.Module, step: int, total: int) -> None:
        model.after_step(step, total)
        ctx.observe("step", model=model, step=step)

    def validate(model: RisingPenalty) -> dict[str, float]:
        values = rated_metrics(score_rated(model_scorer(model, device), validation))
        return values | {"choice": model.choice(values[SELECTION], beside)}

    return fit(
        model,
        adamw(model, trial["learning_rate"], trial.get("weight_decay", 0.0)),
        Plan(budget.epochs, budget.steps, budget.clip, key="choice", patience=budget.patience),
        batches=lambda epoch: EpochBatches(table, budget, ctx.seed, epoch, device),
        loss=lambda model, batch: training_loss(model, batch),
        validate=validate,
        state=ctx.state.child(name.replace("_", "-")),
        on_step=after,
        progress=ctx.progress,
    )


@torch.no_grad()
def export_vectors(tower: nn.Module, table: MosaicTable, history: int, device: torch.device) -> np.ndarray:
    """float32[n_requests, D]: the tower's vector at every request of train, validation and test."""
    requests = np.sort(np.concatenate([table.requests(split) for split in ("train", "valid", "test")]))
    tower.eval()
    found = None
    for start in range(0, len(requests), EXPORT_AT_ONCE):
        chosen = requests[start : start + EXPORT_AT_ONCE]
        u = tower(table.batch(chosen, history=history).to(device)).float().cpu().numpy()
        if found is None:
            found = np.zeros((table.n_requests, u.shape[1]), dtype=np.float32)
        found[chosen] = u
    return found


def save_specialist(
    folder: Path, tower: nn.Module, vectors: np.ndarray, facts: dict[str, Any], config: TowerConfig
) -> None:
    """Write one specialist below an artifact's folder; vectors only where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in tower.state_dict().items()}
    save_file(weights, folder / "tower.safetensors")
    requests = np.flatnonzero(vectors.any(axis=1))
    stored = {"requests": torch.from_numpy(requests), "vectors": torch.from_numpy(vectors[requests])}
    save_file(stored | {"count": torch.tensor([len(vectors)])}, folder / "vectors.safetensors")
    write_json(folder / "facts.json", facts | {"tower": asdict(config)})


def load_specialist(folder: Path, kind: str, catalogue: Catalogue, device: torch.device | str = "cpu") -> Deployed:
    """A deployed specialist, frozen, built as it was saved."""
    facts = json.loads((folder / "facts.json").read_text())
    tower = build_tower(kind, TowerConfig(**facts["tower"]), catalogue)
    tower.load_state_dict(load_file(folder / "tower.safetensors"))
    stored = load_file(folder / "vectors.safetensors")
    vectors = np.zeros((int(stored["count"]), stored["vectors"].shape[1]), dtype=np.float32)
    vectors[stored["requests"].numpy()] = stored["vectors"].numpy()
    return Deployed(kind, tower.requires_grad_(False).eval().to(device), vectors, facts)


def widened(config: TowerConfig, factor: int) -> TowerConfig:
    """The single wide specialist: as wide as the whole fleet together."""
    return replace(config, user_width=factor * config.user_width)
