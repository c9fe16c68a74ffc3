"""Stages of Gryphon-v2: tokenizer, teacher and generator warm-up as artifacts, then one arm per way to rank.

What makes an arm differ is its `switch` in card.yaml (fields of GryphonConfig and JointRule, and the tokenizer); sizes
are in the budget. `separate: matched` is a cascade with as many parameters, `separate: true` one with encoders of the
same size. Arms with the shape of the warm-up begin from it; others warm up for as many steps with its hyperparameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse

from adapters.gryphon_v2.evaluation import (
    CHUNK,
    Scorer,
    add_beam_order,
    add_units,
    agreement,
    gryphon_lister,
    gryphon_scorer,
    measured,
    pair_accuracy,
    score_lister,
    serving_cost,
    teacher_scorer,
)
from adapters.gryphon_v2.events import FeedbackSplit
from adapters.gryphon_v2.model import Gryphon, GryphonConfig, matched_config
from adapters.gryphon_v2.stages import (
    SELECTION,
    build_table,
    joint_batch_flops,
    load_teacher,
    load_warm_up,
    positive_sequences,
    sasrec_scorer,
    save_teacher,
    save_warm_up,
    train_joint,
    train_teacher,
    warm_up_curve,
    warm_up_model,
)
from adapters.gryphon_v2.training import JointRule
from auto_research.baselines.linear_floor import choose, known_items
from auto_research.baselines.sasrec import fit_split
from auto_research.blocks.preference import weights_hash
from auto_research.blocks.residual_kmeans import code_statistics
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.data.titles import load_title_vectors
from auto_research.evaluate.next_list import split_lists, validation_lists
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import study
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.devices import device_for
from auto_research.runtime.errors import ConfigError, RunFailure
from auto_research.runtime.files import write_json
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import load_split, settings
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

experiment = Experiment("gryphon-v2")

CAPS = (10, 100, 1000)


def load_data(ctx: Context) -> FeedbackSplit:
    return load_split(ctx, FeedbackSplit.build)


def load_text(ctx: Context) -> torch.Tensor:
    return torch.from_numpy(load_title_vectors(ctx.data("titles")))


def tokenizer_stage(ctx: Context) -> None:
    """Semantic ids without a suffix, so that items may share one."""
    device_for(ctx.device)
    data, switch = load_data(ctx), ctx.switch or {}
    sizes = list(ctx.budget[switch.get("sizes", "codes")])
    mode = switch.get("mode", "group")
    table = build_table(data, load_text(ctx).numpy(), sizes, seed=ctx.seed, mode=mode)
    table.save(ctx.out)
    write_json(ctx.out / "statistics.json", table.statistics() | code_statistics(table.codes[1:], table.sizes))


@experiment.artifact
def tokenizer(ctx: Context) -> None:
    tokenizer_stage(ctx)


@experiment.artifact
def tokenizer_stress(ctx: Context) -> None:
    tokenizer_stage(ctx)


@experiment.artifact
def teacher(ctx: Context) -> None:
    """Train and freeze the teacher; its quality is that on the validation targets and what is logged from them on."""
    device = device_for(ctx.device)
    data, text = load_data(ctx), load_text(ctx)
    trained = train_teacher(ctx, data, text, device)
    score = teacher_scorer(trained.model, data, device)
    some = data.restrict(ctx.budget.teacher_users)
    some_score = teacher_scorer(trained.model, some, device)
    recall = split_lists(score_lister(some_score, some, 10), some, "valid", chunk=CHUNK).recall(10)
    quality = {
        "weighted_pair_accuracy": float(pair_accuracy(score, data, "valid")[1].mean()),
        "recall@10": float(recall.mean()),
        "recall_users": len(some),
        "last_loss": trained.curve[-1]["loss"],
    }
    save_teacher(ctx.out, trained.model, {"validation": quality, "params": count_params(trained.model)})


@experiment.artifact
def warm_up(ctx: Context) -> None:
    """The generator after L_NTP alone, from which most arms begin."""
    device = device_for(ctx.device)
    seed_everything(ctx.seed)
    model = bare_generator(ctx, load_text(ctx), device)
    trained = warm_up_model(ctx, model, ctx.budget.trials[0], load_data(ctx), device, ctx.state)
    save_warm_up(ctx.out, model, warm_up_curve(trained))


def bare_generator(ctx: Context, text: torch.Tensor, device: torch.device) -> Gryphon:
    """A generator without a ranking module, in the shape of the shared warm-up, with fresh weights."""
    config = settings(GryphonConfig, ctx, ranker=False, separate=False, decoder="sid")
    return Gryphon(config, SIDTable.load(ctx.artifact("tokenizer")), text).to(device)


class Student:
    """What one arm trains, measures and times."""

    def __init__(self, ctx: Context, device: torch.device):
        self.ctx, self.device = ctx, device
        self.data, self.text = load_data(ctx), load_text(ctx)
        switch = ctx.switch or {}
        self.rule = settings(JointRule, ctx)
        self.tokenizer = switch.get("tokenizer", "tokenizer")
        self.table = SIDTable.load(ctx.artifact(self.tokenizer))
        self.config = settings(GryphonConfig, ctx, ranker=self.rule.ranking != "none", separate=False)
        self.shared = self.config
        separate = switch.get("separate", False)
        if separate == "matched":
            self.config = matched_config(self.config, self.table, self.text)
        elif isinstance(separate, bool):
            self.config = replace(self.config, separate=separate)
        else:
            raise ConfigError(f"separate: {separate!r}; known: true, false, matched")
        self.own_warm_up = self.config.separate or self.tokenizer != "tokenizer" or self.config.decoder != "sid"
        self.warm_up: list[dict[str, float]] = []
        self.teacher, self.teacher_facts = None, {}
        if self.rule.ranking == "distill":
            self.teacher, self.teacher_facts = load_teacher(ctx.artifact("teacher"), self.text, device)
        self.serving = {"width": ctx.budget.beam, "count": ctx.budget.cap}

    def train(self, hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(self.ctx.seed)
        model = Gryphon(self.config, self.table, self.text).to(self.device)
        if self.own_warm_up:
            # trained once for all trials, with the hyperparameters of the shared warm-up
            folder, first = self.ctx.state.child("warm-up"), self.ctx.budget.trials[0]
            warmed = warm_up_model(self.ctx, model, first, self.data, self.device, folder, observed=True)
            self.warm_up = warm_up_curve(warmed)
        else:
            self.warm_up = load_warm_up(self.ctx.artifact("warm_up"), model)
        return train_joint(
            self.ctx,
            model,
            self.rule,
            hyperparameters,
            self.data,
            self.device,
            state.child("joint"),
            teacher=self.teacher,
            lister=gryphon_lister(model, self.data, self.device, **self.serving),
        )

    def measure(self, best: Trained, trials: list[dict], *, judge: str = "own") -> Measurement:
        """Test measurement; judge 'teacher' lets the teacher order the candidates and the logged events.

        A judge's validation is of its own lists (the student is chosen by the student's), and it has no serving cost.
        """
        model, data, device = best.model.eval(), self.data, self.device
        score = gryphon_scorer(model, data, device)
        lister = gryphon_lister(model, data, device, **self.serving)
        self.ctx.observe(
            "trained",
            model=model,
            data=data,
            score=lambda data, split, positions: gryphon_scorer(model, data, device)(
                positions, data.cut(split)[positions], None
            ),
            validation=best.validation,
        )
        if judge == "teacher":
            score = teacher_scorer(self.teacher, data, device)
            lister = gryphon_lister(model, data, device, **self.serving, order="judge", judge=score)
        found = measured(lister, score, data, self.serving["count"])
        add_beam_order(found, gryphon_lister(model, data, device, **self.serving, order="beam"), data)
        self._agreement(found, model, judge)
        found.hyperparameters, found.trials = best.hyperparameters, trials
        found.cost |= best.cost | {"params": count_params(model)}
        if judge == "teacher":
            found.validation = validation_lists(lister, data)
            found.cost["params"] += self.teacher_facts["params"]
        else:
            found.validation, found.curve = best.validation, best.curve
            found.cost |= serving_cost(model, data, device, **self.serving)
        found.extra |= {"semantic_ids": self.table.statistics(), "warm_up": self.warm_up}
        return found

    def _agreement(self, found: Measurement, model: Gryphon, judge: str) -> None:
        if self.teacher is None:
            return
        if weights_hash(self.teacher) != self.teacher_facts["hash"]:
            raise RunFailure(f"{self.ctx.stage}: the frozen teacher changed while the student trained")
        found.extra["teacher"] = {name: self.teacher_facts[name] for name in ("hash", "validation", "params")}
        if judge == "own":
            generator = bare_generator(self.ctx, self.text, self.device)
            load_warm_up(self.ctx.artifact("warm_up"), generator)
            pools = {"width": self.rule.rollout_beam, "count": self.rule.rollout_items}
            add_units(found, agreement(model, self.teacher, generator, self.data, self.device, **pools))

    def versus_cascade(self, model: Gryphon) -> dict[str, Any]:
        """FLOPs and milliseconds of a request at several caps, beside a cascade with as many parameters (untrained)."""
        seed_everything(self.ctx.seed)
        cascade = Gryphon(matched_config(self.shared, self.table, self.text), self.table, self.text).to(self.device)
        flops, times = {}, {}
        for name, one in (("one encoder", model), ("cascade", cascade)):
            costs = [
                (cap, serving_cost(one, self.data, self.device, width=self.serving["width"], count=cap)) for cap in CAPS
            ]
            flops[name] = [(cap, cost["flops"]) for cap, cost in costs]
            times[name] = [(cap, cost["request_ms"]) for cap, cost in costs]
        x = f"candidate slots of a request, beam {self.serving['width']}"
        return {"flops_per_request": study(x, "FLOPs", flops), "request_ms": study(x, "milliseconds", times)}


def run_student(ctx: Context, device: torch.device, *, judge: str = "own") -> Measurement:
    student = Student(ctx, device)
    best, trials = best_of_trials(ctx, student.train, SELECTION)
    found = student.measure(best, trials, judge=judge)
    if student.rule.ranking == "distill" and judge == "own":
        found.cost |= joint_batch_flops(ctx, best.model, student.rule, student.data, device, student.teacher)
    if (ctx.switch or {}).get("studies"):
        found.extra["studies"] = student.versus_cascade(best.model)
        times = found.extra["studies"]["request_ms"]["lines"]
        found.cost["speedup_over_cascade"] = times["cascade"][1][1] / times["one encoder"][1][1]
    return found


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    device = device_for(ctx.device)
    data, cap = load_data(ctx), ctx.budget.cap

    def lister(model):
        return score_lister(sasrec_scorer(model, data, device), data, cap)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        def validate(model) -> dict[str, float]:
            return validation_lists(lister(model), data)

        sizes = ctx.budget.sasrec
        return fit_split(ctx, positive_sequences(data), hyperparameters, state, validate, device=device, **sizes)

    best, trials = best_of_trials(ctx, run, SELECTION, trials=ctx.budget.sasrec_trials)
    model = best.model.eval()
    ctx.observe(
        "trained",
        model=model,
        data=data,
        score=lambda data, split, positions: sasrec_scorer(model, data, device)(
            positions, data.cut(split)[positions], None
        ),
        validation=best.validation,
    )
    score = sasrec_scorer(model, data, device)
    found = measured(lister(model), score, data, cap)
    found.validation, found.curve = best.validation, best.curve
    found.hyperparameters, found.trials = best.hyperparameters, trials
    one = np.zeros(1, dtype=np.int64), data.test_target[:1]
    found.cost |= best.cost | {"params": count_params(model), "flops": float(flops_of(lambda: score(*one, None)))}
    return found


@experiment.arm
def gr_beam(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def cascade(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def label_training(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def gryphon_v1(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def impression_only(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def rollout_only(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def gryphon_v2(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def gryphon_v2_stress(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device))


@experiment.arm
def teacher_upper_bound(ctx: Context) -> Measurement:
    return run_student(ctx, device_for(ctx.device), judge="teacher")


# Floors


def floor_scorer(data: FeedbackSplit, scores_of) -> Scorer:
    """scores_of: known items, sparse [B, n_items + 1] -> scores [B, n_items + 1]."""

    def score(positions: np.ndarray, stop: np.ndarray, item: np.ndarray | None = None) -> np.ndarray:
        scores = scores_of(known_items(data.interactions, data.first[positions], stop, True))
        return scores if item is None else np.take_along_axis(scores, item, axis=1)

    return score


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    device_for(ctx.device)
    data = load_data(ctx)
    counts = data.popularity().astype(np.float64)
    score = floor_scorer(data, lambda known: np.tile(counts, (known.shape[0], 1)))
    lister = score_lister(score, data, ctx.budget.cap)
    found = measured(lister, score, data, ctx.budget.cap)
    found.validation = validation_lists(lister, data)
    return found


def linear_floor(ctx: Context, kind: str) -> Measurement:
    """EASE or item neighbours, fitted on train rows, over all known items or the positive ones (chosen by validation)."""
    data = load_data(ctx)
    table, cap = data.interactions, ctx.budget.cap

    def scorer(linear) -> Scorer:
        def score(positions: np.ndarray, stop: np.ndarray, item: np.ndarray | None = None) -> np.ndarray:
            scores = linear(stop, positions)
            return scores if item is None else np.take_along_axis(scores, item, axis=1)

        return score

    def history(stop: np.ndarray, positions: np.ndarray, everything: bool) -> sparse.csr_matrix:
        return known_items(table, data.first[positions], stop, everything)

    return choose(
        ctx,
        kind,
        train=lambda everything: known_items(table, data.first, data.train_stop, everything),
        history=history,
        validate=lambda linear: validation_lists(score_lister(scorer(linear), data, cap), data),
        measure=lambda linear: measured(score_lister(scorer(linear), data, cap), scorer(linear), data, cap),
    )


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "itemknn")


@experiment.arm
def ease(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "ease")
