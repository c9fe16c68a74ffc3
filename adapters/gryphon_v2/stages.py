"""Training stages: tokenizer, teacher, generator warm-up and the joint stage, and what is kept of them on disk."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.gryphon_v2.batches import BatchRule, CutBatches
from adapters.gryphon_v2.evaluation import Scorer, gryphon_lister
from adapters.gryphon_v2.events import FeedbackSplit
from adapters.gryphon_v2.model import Gryphon
from adapters.gryphon_v2.teacher import Teacher, TeacherConfig
from adapters.gryphon_v2.training import JointLoss, JointRule
from auto_research.baselines.sasrec import SASRec, newest_scores
from auto_research.blocks.preference import frozen_reference, weights_hash
from auto_research.blocks.residual_kmeans import rq_kmeans
from auto_research.blocks.semantic_ids import SIDTable, require_hash, resolve_collisions
from auto_research.data.item_vectors import item_cf_vectors, text_and_cf_vectors
from auto_research.data.prefix import LIKE_RATING
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_list import Lister, validation_lists
from auto_research.experiment.context import Context
from auto_research.metrics.cost import flops_of
from auto_research.runtime.errors import CorruptFile
from auto_research.runtime.files import read_json, write_json
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model, settings
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained

SELECTION = "ndcg@10"
SCALE_BATCHES = 8


def build_table(
    data: FeedbackSplit, text: np.ndarray, sizes: list[int], *, seed: int, mode: str = "group", text_width: int = 48
) -> SIDTable:
    """Residual k-means of [text PCA-48, train co-occurrence SVD-16]; items may share an id unless mode is 'suffix'."""
    vectors = text_and_cf_vectors(text, item_cf_vectors(data.train_items(), data.n_items), text_width=text_width)
    codes = rq_kmeans(vectors[1:], sizes, seed=seed).codes
    return resolve_collisions(codes, sizes, mode, popularity=data.popularity())


def stage_budget(ctx: Context, steps: int, validate_every: int = 1) -> FitBudget:
    """`steps` in epochs of the budget's `epoch_steps`, with a validation after every `validate_every` of them."""
    every = min(ctx.budget.epoch_steps, steps)
    epochs = -(-steps // every)
    return FitBudget(epochs=epochs, steps=steps, patience=None, warmup=ctx.budget.warmup, validate_every=validate_every)


def batches_of(ctx: Context, data: FeedbackSplit, rule: BatchRule, device: torch.device, name: str) -> CutBatches:
    return CutBatches(data, rule, ctx.seed, ctx.budget.epoch_steps, device, name)


def train_teacher(ctx: Context, data: FeedbackSplit, text: Tensor, device: torch.device) -> Trained:
    """Fixed number of steps of L_T, then mean and deviation of its scores on train cuts."""
    seed_everything(ctx.seed)
    config = TeacherConfig(**ctx.budget.teacher)
    teacher = Teacher(config, text).to(device)
    size = ctx.budget.teacher_batch
    rule = settings(
        BatchRule, ctx, history=1, long_history=config.long_history, batch=size, rollout_users=size, rollout_items=1
    )
    source = batches_of(ctx, data, rule, device, "teacher")
    trained = fit_model(
        ctx,
        teacher,
        ctx.budget.trials[0],
        ctx.state,
        budget=stage_budget(ctx, ctx.budget.teacher_steps),
        batches=source.epoch,
        loss=lambda model, batch: model.loss(batch, ctx.budget.get("next_positives", 1)),
        validate=lambda model: {},
        key=None,
        observed=False,
    )
    teacher.eval()
    with torch.no_grad():
        scores = []
        for step in range(min(SCALE_BATCHES, ctx.budget.teacher_steps)):
            batch = source.at(step)
            item = torch.cat([batch.event, batch.negative], dim=1)
            scores.append(teacher.score(teacher.read(batch.long), item)[item > 0])
        teacher.set_scale(torch.cat(scores))
    return trained


def save_teacher(folder: Path, teacher: Teacher, facts: dict[str, Any]) -> None:
    """teacher.safetensors and teacher.json (sizes, hash of the weights, quality)."""
    _save(folder, "teacher", teacher)
    write_json(folder / "teacher.json", {"config": asdict(teacher.config), "hash": weights_hash(teacher), **facts})


def load_teacher(folder: Path, text: Tensor, device: torch.device) -> tuple[Teacher, dict[str, Any]]:
    """The frozen teacher and teacher.json. CorruptFile when its weights are not those that were saved."""
    facts = read_json(folder / "teacher.json")
    teacher = Teacher(TeacherConfig(**facts["config"]), text)
    teacher.load_state_dict(load_file(folder / "teacher.safetensors"))
    if weights_hash(teacher) != facts["hash"]:
        raise CorruptFile(f"{folder}: the weights of the teacher are not those of teacher.json; build it again")
    return teacher.requires_grad_(False).eval().to(device), facts


def _save(folder: Path, name: str, model: torch.nn.Module) -> None:
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    save_file(weights, folder / f"{name}.safetensors")


def warm_up_model(
    ctx: Context, model: Gryphon, hyperparameters: dict[str, Any], data: FeedbackSplit, device: torch.device,
    state: StateFolder, *, observed: bool = False,
) -> Trained:  # fmt: skip
    """L_NTP alone for the budget's `warm_up_steps`; the last weights stand. Validated in the order of the beam."""
    source = batches_of(ctx, data, settings(BatchRule, ctx, long_history=1, rollout_users=1), device, "warm-up")
    lister = gryphon_lister(model, data, device, width=ctx.budget.beam, count=ctx.budget.cap, order="beam")
    seed_everything(ctx.seed)  # the same dropout whatever was built beside the generator
    return fit_model(
        ctx,
        model,
        hyperparameters,
        state,
        budget=stage_budget(ctx, ctx.budget.warm_up_steps, ctx.budget.get("warm_up_validate_every", 1)),
        batches=source.epoch,
        loss=JointLoss(settings(JointRule, ctx, ranking="none")),
        validate=lambda model: validation_lists(lister, data),
        key=None,
        observed=observed,
    )


def warm_up_curve(trained: Trained) -> list[dict[str, float]]:
    """step, loss and validation ndcg@10 of the validated epochs."""
    return [{key: row[key] for key in ("step", "loss", SELECTION)} for row in trained.curve if SELECTION in row]


def save_warm_up(folder: Path, model: Gryphon, curve: list[dict[str, float]]) -> None:
    """generator.safetensors, and the semantic ids it was trained on with its curve."""
    _save(folder, "generator", model)
    facts = {"semantic_ids": model.sid.content_hash, "hash": weights_hash(model), "curve": curve}
    write_json(folder / "generator.json", facts)


def load_warm_up(folder: Path, model: Gryphon) -> list[dict[str, float]]:
    """Put the weights of the warm-up into a model of the same sizes; parts it does not have keep their start.

    Returns the curve of the warm-up. Raises ConfigError when it was trained on other semantic ids.
    """
    facts = read_json(folder / "generator.json")
    require_hash(facts["semantic_ids"], model.sid.content_hash, str(folder))
    missing, unexpected = model.load_state_dict(load_file(folder / "generator.safetensors"), strict=False)
    if unexpected or any(not name.startswith("ranker.") for name in missing):
        raise CorruptFile(f"{folder}: the warm-up is of another model; build it again")
    return facts["curve"]


def train_joint(
    ctx: Context,
    model: Gryphon,
    rule: JointRule,
    hyperparameters: dict[str, Any],
    data: FeedbackSplit,
    device: torch.device,
    state: StateFolder,
    *,
    teacher: Teacher | None,
    lister: Lister,
) -> Trained:
    """L_NTP and the arm's ranking loss; the best epoch by validation ndcg@10 of the arm's own lists stands."""
    start = frozen_reference(model) if rule.pool == "static" else None
    source = batches_of(ctx, data, batch_rule(ctx, rule), device, "joint")
    seed_everything(ctx.seed)
    return fit_model(
        ctx,
        model,
        hyperparameters,
        state,
        budget=stage_budget(ctx, ctx.budget.joint_steps),
        batches=source.epoch,
        loss=JointLoss(rule, teacher, start),
        validate=lambda _: validation_lists(lister, data),
        key=SELECTION,
    )


def batch_rule(ctx: Context, rule: JointRule) -> BatchRule:
    """The teacher's histories are read only where there is a teacher."""
    long = ctx.budget.teacher["long_history"] if rule.ranking == "distill" else 1
    return settings(BatchRule, ctx, long_history=long)


def joint_batch_flops(
    ctx: Context, model: Gryphon, rule: JointRule, data: FeedbackSplit, device: torch.device, teacher: Teacher
) -> dict[str, float]:
    """FLOPs of a joint step and the shares of them that making the pools and asking the teacher take."""
    model = copy.deepcopy(model).train()
    loss = JointLoss(rule, teacher, model if rule.pool == "static" else None)
    batch = batches_of(ctx, data, batch_rule(ctx, rule), device, "joint").at(0)
    step = flops_of(lambda: loss(model, batch).backward())
    pool = loss.pool(model, batch)
    rollout = flops_of(lambda: loss.pool(model, batch))
    taught = flops_of(lambda: loss.taught(batch, pool))
    return {"step_flops": float(step), "rollout_flop_share": rollout / step, "teacher_flop_share": taught / step}


def positive_sequences(data: FeedbackSplit) -> LeaveTwoOut:
    """Positive train items of every user, in the form that windows are cut from."""
    items = data.train_items(positive=True)
    starts = np.concatenate([[0], np.cumsum([len(x) for x in items])]).astype(np.int64)
    targets = data.target("valid"), data.target("test")
    joined, data_set = np.concatenate(items), data.interactions
    return LeaveTwoOut(data_set.n_users, data.n_items, data.users, joined, starts, *targets, data_set.dataset)


def sasrec_scorer(model: SASRec, data: FeedbackSplit, device: torch.device) -> Scorer:
    """Scores after the newest positive before the stop."""
    table = data.interactions

    def score(positions: np.ndarray, stop: np.ndarray, item: np.ndarray | None = None) -> np.ndarray:
        rows = [np.arange(data.first[position], end) for position, end in zip(positions, stop, strict=True)]
        liked = [table.item[r[table.rating[r] >= LIKE_RATING]] for r in rows]
        scores = newest_scores(model, liked, device)
        return scores if item is None else np.take_along_axis(scores, item, axis=1)

    return score
