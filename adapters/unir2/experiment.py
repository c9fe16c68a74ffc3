"""Stages of UniR2: semantic ids as an artifact, cascades that encode the user twice, and the unified sequence.

What makes an arm differ is its `switch` in card.yaml (fields of UniR2Config, and `model` for the cascades).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn

from adapters.unir2.evaluation import (
    CHUNK,
    GENERATION_ORDER,
    Server,
    Weights,
    add_user_units,
    code_accuracy,
    ranked_rows,
    ranking_metrics,
    serving_cost,
)
from adapters.unir2.events import UnifiedSplit
from adapters.unir2.features import ItemFacts, item_facts
from adapters.unir2.model import UniR2, UniR2Config
from adapters.unir2.training import BatchRule, LossWeights, RowBatches, conflict, joint_loss
from adapters.unir2.two_stage import DinConfig, SasrecDin, TwoStage, matched_din
from auto_research.baselines.linear_floor import choose, known_items
from auto_research.baselines.sasrec import fit_split, newest_scores
from auto_research.blocks.residual_kmeans import rq_kmeans
from auto_research.blocks.semantic_ids import SIDTable, permuted_codes, resolve_collisions
from auto_research.data.item_vectors import item_cf_vectors, text_and_cf_vectors
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.titles import load_title_vectors
from auto_research.evaluate.next_list import Lister, measure_next_list, validation_lists
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.metrics.cost import count_params, flops_of
from auto_research.metrics.ranking import top_items
from auto_research.runtime.devices import device_for
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import write_json
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model, load_split, settings
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

experiment = Experiment("unir2")

SELECTION = "ndcg@10"
RANKING_SELECTION = "auc_longview"  # of a ranker alone


def load_data(ctx: Context) -> UnifiedSplit:
    return load_split(ctx, UnifiedSplit.build)


def build_table(data: UnifiedSplit, text: np.ndarray, sizes: list[int], *, seed: int, text_width: int = 48) -> SIDTable:
    """Residual k-means of [text PCA-48, train co-occurrence SVD-16] and a suffix, so that every item has its own id."""
    vectors = text_and_cf_vectors(text, item_cf_vectors(data.train_items(), data.n_items), text_width=text_width)
    return resolve_collisions(rq_kmeans(vectors[1:], sizes, seed=seed).codes, sizes, "suffix")


def random_table(table: SIDTable, *, seed: int) -> SIDTable:
    """The control without meaning: the same tuples and collisions, given to other items; every level keeps its size."""
    codes = permuted_codes(table.codes[1:, :-1], seed=seed)
    return resolve_collisions(codes, table.sizes[:-1], "suffix", suffix_size=table.sizes[-1])


@experiment.artifact
def tokenizer(ctx: Context) -> None:
    device_for(ctx.device)
    data, text = load_data(ctx), load_title_vectors(ctx.data("titles"))
    table = build_table(data, text, list(ctx.budget.codes), seed=ctx.seed)
    table.save(ctx.out)
    write_json(ctx.out / "statistics.json", table.statistics())


def semantic_ids(table: SIDTable, kind: str, seed: int) -> SIDTable:
    """Option `semantic`: kmeans as they are, or the random control of the same sizes."""
    if kind not in ("kmeans", "random"):
        raise ConfigError(f"unknown semantic ids {kind!r}; known: kmeans, random")
    return table if kind == "kmeans" else random_table(table, seed=seed)


class Arm:
    """Data, sizes and model of one trained arm."""

    def __init__(self, ctx: Context, device: torch.device):
        self.ctx, self.device, self.data = ctx, device, load_data(ctx)
        self.rule = settings(BatchRule, ctx)
        self.facts: ItemFacts = item_facts(self.data, self.rule.hashed)
        switch = {**ctx.budget, **(ctx.switch or {})}
        self.table = semantic_ids(SIDTable.load(ctx.artifact("tokenizer")), switch.get("semantic", "kmeans"), ctx.seed)
        self.config = settings(UniR2Config, ctx)
        self.kind = switch.get("model", "unified")

    def build(self) -> nn.Module:
        if self.kind == "unified":
            return UniR2(self.config, self.table, self.facts)
        if self.kind == "two_stage":
            generator = replace(self.config, ranking=False)
            ranker = replace(self.config, generation=False, stop=False, lora=False, reads="prefix", trajectory=False)
            return TwoStage(UniR2(generator, self.table, self.facts), UniR2(ranker, self.table, self.facts))
        goal = count_params(UniR2(settings(UniR2Config, self.ctx), self.table, self.facts))
        sizes = settings(DinConfig, self.ctx, heads=2, layers=2, inner=self.config.hidden)
        return SasrecDin(self.facts, matched_din(goal, self.facts, sizes))

    @property
    def levels(self) -> int:
        """What log p is divided by: code levels of a generator, 1 for an item-id softmax."""
        return 1 if self.kind == "din" else self.table.levels

    @property
    def generates(self) -> bool:
        """Whether codes are spelled; without, the epoch is chosen by ranking."""
        return self.kind != "din" and self.config.generation

    @property
    def selection(self) -> str:
        return RANKING_SELECTION if self.kind == "unified" and not self.config.generation else SELECTION

    def server(self, model: nn.Module, data: UnifiedSplit | None = None, *, keep: bool = False) -> Server:
        data, width = data or self.data, self.ctx.budget.beam
        return Server(model, data, self.device, self.rule, width=width, levels=self.levels, keep=keep)

    def ranked(self, model: nn.Module, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return ranked_rows(model, self.data, split, self.device, self.rule, self.ctx.budget.get("test_rows"))

    def train(self, hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(self.ctx.seed)
        model = self.build().to(self.device)
        budget = self.ctx.budget
        every = min(budget.epoch_steps, budget.steps)
        source = RowBatches(self.data, self.rule, self.ctx.seed, every, self.device)
        lister = self.server(model).lister(GENERATION_ORDER)
        weights = settings(LossWeights, self.ctx)
        by_ranking = self.selection == RANKING_SELECTION

        def validate(model: nn.Module) -> dict[str, float]:
            return ranking_metrics(*self.ranked(model, "valid")) if by_ranking else validation_lists(lister, self.data)

        plan = {"epochs": -(-budget.steps // every), "steps": budget.steps, "validate_every": 1}
        return fit_model(
            self.ctx,
            model,
            hyperparameters,
            state,
            budget=FitBudget.of(budget, **plan),
            batches=source.epoch,
            loss=lambda model, batch: joint_loss(model, batch, weights),
            validate=validate,
            key=self.selection,
        )


def train(ctx: Context, device: torch.device) -> Measurement:
    """Train one arm, choose its score weights on validation targets, measure recall and ranking."""
    arm = Arm(ctx, device)
    best, trials = best_of_trials(ctx, arm.train, arm.selection)
    model, server = best.model.eval(), arm.server(best.model, keep=True)
    weights, ranking, chosen = server.choose_weights()

    def score(data: UnifiedSplit, split: str, positions: np.ndarray) -> np.ndarray:
        return arm.server(model, data).catalogue_scores(split, positions, weights)

    def add_order(name: str, order: Weights) -> None:
        other = measure_next_list(server.lister(order), arm.data, chunk=CHUNK)
        found.metrics[f"{name}_order_ndcg@10"] = other.metrics["ndcg@10"]
        found.units[f"{name}_order_ndcg@10"] = other.units["ndcg@10"]

    ctx.observe("trained", model=model, data=arm.data, score=score, validation=best.validation)
    found = measure_next_list(server.lister(weights), arm.data, at=(10,), chunk=CHUNK)
    found.extra = {"score_weights": weights.named(), "validation_ndcg@10": chosen}
    add_order("generation", GENERATION_ORDER)
    if ranking is not None:
        found.extra["ranking_weights"] = ranking.named()
        add_order("ranking", ranking)
        rows = arm.ranked(model, "test")
        found.metrics |= ranking_metrics(*rows)
        add_user_units(found, *rows)
    if arm.generates:
        found.metrics |= code_accuracy(getattr(model, "recall", model), arm.data, server)
    if arm.kind == "unified" and arm.config.generation and arm.config.ranking:
        found.extra["gradient_conflict"] = probe(arm, model)
    found.validation, found.curve = best.validation, best.curve
    found.hyperparameters, found.trials = best.hyperparameters, trials
    found.cost |= best.cost | serving_cost(server)
    return found


def probe(arm: Arm, model: UniR2) -> dict[str, float]:
    """Gradients of the two losses on the trunk's weights, over one batch of train rows, dropout off."""
    batch = RowBatches(arm.data, arm.rule, arm.ctx.seed, 1, arm.device).at(0)
    model.zero_grad(set_to_none=True)
    return conflict(model.eval(), batch, [p for p in model.generator.trunk.parameters() if p.ndim == 2])


@experiment.arm
def sasrec_plus_din(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def gr_plus_ranker(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def unir2_no_sg(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def unir2_no_trajectory(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def unir2_gen_only(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def unir2_random_sid(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def unir2(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


# Floors: fitted on the same train rows, read everything before the target


def score_lister(score: Callable[[str, np.ndarray], np.ndarray], data: UnifiedSplit, length: int) -> Lister:
    """The `length` best unseen items, as many as a beam of the other arms, so that mrr looks as far down."""

    def lists(split: str, positions: np.ndarray) -> np.ndarray:
        return top_items(score(split, positions), [data.history(split, int(i)) for i in positions], length)

    return lists


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    device_for(ctx.device)
    data = load_data(ctx)
    counts = data.popularity().astype(np.float64)
    lister = score_lister(lambda split, positions: np.tile(counts, (len(positions), 1)), data, ctx.budget.beam)
    found = measure_next_list(lister, data, at=(10,), chunk=CHUNK)
    found.validation = validation_lists(lister, data)
    return found


def linear_floor(ctx: Context, kind: str) -> Measurement:
    data = load_data(ctx)
    table, first = data.interactions, data.starts[data.everyone]
    counts = np.concatenate([[0], np.cumsum(data.train_row)])
    stop = first + counts[data.starts[data.everyone + 1]] - counts[first]  # train rows come first

    def history(split: str, positions: np.ndarray, everything: bool) -> sparse.csr_matrix:
        return known_items(table, data.starts[data.users[positions]], data.cut(split)[positions], everything)

    return choose(
        ctx,
        kind,
        train=lambda everything: known_items(table, first, stop, everything),
        history=history,
        validate=lambda score: validation_lists(score_lister(score, data, ctx.budget.beam), data),
        measure=lambda score: measure_next_list(
            score_lister(score, data, ctx.budget.beam), data, at=(10,), chunk=CHUNK
        ),
    )


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "itemknn")


@experiment.arm
def ease(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "ease")


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    device = device_for(ctx.device)
    data = load_data(ctx)
    items = data.train_items()
    starts = np.concatenate([[0], np.cumsum([len(x) for x in items])]).astype(np.int64)
    nothing = np.zeros(len(items), dtype=np.int64)  # targets are the split's, not of these sequences
    sequences = LeaveTwoOut(
        data.interactions.n_users, data.n_items, data.everyone, np.concatenate(items), starts, nothing, nothing
    )

    def scorer(model: nn.Module, data: UnifiedSplit):
        return lambda split, positions: newest_scores(model, [data.history(split, int(i)) for i in positions], device)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        def validate(model: nn.Module) -> dict[str, float]:
            return validation_lists(score_lister(scorer(model, data), data, ctx.budget.beam), data)

        return fit_split(ctx, sequences, hyperparameters, state, validate, device=device, **ctx.budget.sasrec)

    best, trials = best_of_trials(ctx, run, SELECTION, trials=ctx.budget.sasrec_trials)
    model = best.model.eval()
    ctx.observe(
        "trained",
        model=model,
        data=data,
        score=lambda data, split, positions: scorer(model, data)(split, positions),
        validation=best.validation,
    )
    score = scorer(model, data)
    found = measure_next_list(score_lister(score, data, ctx.budget.beam), data, at=(10,), chunk=CHUNK)
    found.validation, found.curve = best.validation, best.curve
    found.hyperparameters, found.trials = best.hyperparameters, trials
    one = np.zeros(1, dtype=np.int64)
    found.cost |= best.cost | {"params": count_params(model), "flops": float(flops_of(lambda: score("test", one)))}
    return found
