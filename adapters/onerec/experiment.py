"""Stages of OneRec: codes, the session generator (SFT), the reward model, rounds of alignment, and the arms around them.

What makes a stage differ is its `switch` in card.yaml; sizes are in the budget. Every arm answers with a list of ten.
"""

from typing import Any

import numpy as np
import torch
from scipy import sparse

from adapters.onerec.alignment import AlignmentConfig, align
from adapters.onerec.evaluation import Lister, Scorer, measure, score_lister, validation_metrics
from adapters.onerec.measuring import alignment_facts, judge_sessions, load_judge, measure_generator
from adapters.onerec.reward import RewardConfig, RewardModel, RewardRows, pairwise_accuracy
from adapters.onerec.sessions import SessionSplit, Steps, histories
from adapters.onerec.training import NTP, Trainer, history_of, load_data, save_weights, without_clock
from auto_research.baselines.linear_floor import choose, known_items
from auto_research.baselines.sasrec import RECIPE, SIZES, SASRec
from auto_research.blocks.causal_transformer import TransformerConfig
from auto_research.blocks.residual_kmeans import rq_kmeans
from auto_research.blocks.semantic_ids import resolve_collisions
from auto_research.data.item_vectors import item_cf_vectors, text_and_cf_vectors
from auto_research.data.texts import load_text_vectors
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.devices import device_for
from auto_research.runtime.files import read_json, write_json
from auto_research.runtime.seeds import seed_everything, torch_generator
from auto_research.train.fitting import FitBudget, fit_model, settings
from auto_research.train.next_item import BETAS, EpochWindows, NextItemBudget, next_item_loss
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

experiment = Experiment("onerec")

POOL_SAMPLES = 4  # sessions sampled for each user as replacements of the reward model's rows


# Artifacts


def make_codes(ctx: Context) -> None:
    """Residual k-means of text and collaborative vectors, balanced unless the switch says otherwise."""
    data = load_data(ctx)
    text = load_text_vectors(ctx.data("texts"))
    vectors = text_and_cf_vectors(text, item_cf_vectors(data.train_items(), data.n_items))
    switch = ctx.switch or {}
    found = rq_kmeans(vectors[1:], ctx.budget.codes, balanced=switch.get("balanced", True), seed=ctx.seed)
    table = resolve_collisions(found.codes, ctx.budget.codes, "suffix")
    table.save(ctx.out)
    shared = resolve_collisions(found.codes, ctx.budget.codes, "group", popularity=data.popularity).statistics()
    facts = {"rounds": found.rounds, "residual": found.residual, "before_suffix": shared, "hash": table.content_hash}
    write_json(ctx.out / "facts.json", facts)


@experiment.artifact
def codes(ctx: Context) -> None:
    device_for(ctx.device)
    make_codes(ctx)


@experiment.artifact
def codes_plain(ctx: Context) -> None:
    device_for(ctx.device)
    make_codes(ctx)


@experiment.artifact
def sft(ctx: Context) -> None:
    """The supervised session generator that the aligned arms and their controls start from."""
    trainer = Trainer(ctx, device_for(ctx.device))
    best, _ = trainer.tuned()
    save_weights(best.model, ctx.out, table_hash=trainer.table.content_hash, validation=best.validation,
                 hyperparameters=best.hyperparameters, curve=without_clock(best.curve), steps=best.cost["steps"])  # fmt: skip


@experiment.artifact
def reward(ctx: Context) -> None:
    """The reward model with its gate; replacements come from popularity and from the supervised generator."""
    device = device_for(ctx.device)
    trainer = Trainer(ctx, device)
    data, generator = trainer.data, trainer.supervised()
    decoder = trainer.decoder(generator)
    everyone = np.arange(len(data))
    start = data.target_start("valid")
    history = histories(data, start, everyone, generator.settings.history)
    noise = torch_generator("cpu", "reward-pool", ctx.seed)
    pool = decoder.samples(history, data.seen("valid", everyone), POOL_SAMPLES, noise).items.reshape(len(data), -1)
    budget = ctx.budget
    rows = RewardRows(data, pool, history=budget.history, batch=budget.reward_batch, seed=ctx.seed)
    seed_everything(ctx.seed)
    model = RewardModel(data.n_items, settings(RewardConfig, ctx)).to(device)
    each = budget.reward_check
    trained = fit_model(
        ctx,
        model,
        {"learning_rate": budget.reward_rate, "weight_decay": 1e-4},
        ctx.state,
        budget=FitBudget(-(-budget.reward_steps // each), None, 1.0, 20, steps=budget.reward_steps),
        batches=lambda epoch: Steps(each, lambda index: rows.training(epoch * each + index).to(device)),
        loss=lambda model, batch: model.loss(batch),
        validate=lambda model: {"choice": pairwise_accuracy(model, rows, "choice", budget.gate_pairs, device)},
        key="choice",
        observed=False,
    )
    gate = pairwise_accuracy(model, rows, "gate", budget.gate_pairs, device)
    save_weights(model, ctx.out, rm_pairwise_accuracy=gate, validation=trained.validation,
                 curve=without_clock(trained.curve))  # fmt: skip


def train_generator(ctx: Context, device: torch.device) -> Measurement:
    """One arm that trains a generator of its own."""
    trainer = Trainer(ctx, device)
    best, trials = trainer.tuned()
    return measure_generator(trainer, best, trials)


def supervised_arm(ctx: Context, device: torch.device) -> Measurement:
    """The SFT artifact as it is."""
    trainer = Trainer(ctx, device)
    model = trainer.supervised()
    facts = read_json(ctx.artifact("sft") / "facts.json")
    spent = read_json(ctx.artifact("sft") / "manifest.json")["cost"]["seconds"]
    best = Trained(model, facts["validation"], facts["hyperparameters"], facts["curve"])
    best.cost = {"steps": facts["steps"], "sft_seconds": spent}
    return measure_generator(trainer, best, [])


def aligned_arm(ctx: Context, device: torch.device) -> Measurement:
    """Rounds of alignment from the SFT artifact, as the switch says, and what they did to reward and likelihood."""
    trainer = Trainer(ctx, device)
    data, config = trainer.data, settings(AlignmentConfig, ctx)
    model, before = trainer.supervised(), trainer.supervised()
    judge, _ = load_judge(ctx, data, device)
    start = trainer.ntp(model)
    rounds, curve, cost = align(
        ctx, model, trainer.decoder(model), judge, data, config, ctx.state,
        batch=ctx.budget.batch, validate=lambda: trainer.ntp(model),
    )  # fmt: skip
    best = Trained(model, {NTP: trainer.ntp(model)}, {"learning_rate": config.rate}, curve, cost)
    measured = measure_generator(trainer, best, [])
    measured.metrics["dpo_margin"] = rounds[-1].get("dpo_margin", 0.0)
    measured.extra["alignment"] = alignment_facts(trainer, before, model, judge, rounds, start)
    measured.cost["sft_seconds"] = read_json(ctx.artifact("sft") / "manifest.json")["cost"]["seconds"]
    rise = best.validation[NTP] / start - 1
    measured.notes.append(
        f"validation L_NTP {100 * rise:+.1f}% against the supervised model; rounds kept "
        f"{', '.join(str(r['kept_looks']) for r in rounds)} looks"
    )
    measured.notes += pair_notes(rounds, config)
    return measured


def pair_notes(rounds: list[dict[str, Any]], config: AlignmentConfig) -> list[str]:
    """How many pairs every round learned from, and a warning where they are few or none."""
    if not config.share:
        return []
    counts = [(r["round"], r["pairs"], r["contexts"]) for r in rounds]
    notes = ["pairs " + ", ".join(f"{pairs} of {tried} contexts in round {n}" for n, pairs, tried in counts)]
    for n, pairs, tried in counts:
        if pairs == 0:
            notes.append(f"NO PREFERENCE in round {n}: not one pair, its steps had no L_DPO")
        elif 2 * pairs < tried:
            notes.append(f"few pairs in round {n}: {pairs} of {tried} contexts")
    return notes


# Floors and baseline


def linear_floor(ctx: Context, kind: str) -> Measurement:
    """EASE or item neighbours over the items before the target session."""
    data = load_data(ctx)

    def history(split: str, positions: np.ndarray, everything: bool) -> sparse.csr_matrix:
        stop = data.target_start(split)[positions]
        return known_items(data.interactions, data.first[positions], stop, everything)

    return choose(
        ctx,
        kind,
        train=lambda everything: history("valid", np.arange(len(data)), everything),
        history=history,
        validate=lambda score: validation_metrics(score_lister(score, data), data),
        measure=lambda score: measure(score_lister(score, data), data)[0],
    )


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    device_for(ctx.device)
    data = load_data(ctx)
    counts = data.popularity.astype(np.float64)
    lister: Lister = score_lister(lambda split, positions: np.tile(counts, (len(positions), 1)), data)
    measured, _ = measure(lister, data)
    measured.validation = validation_metrics(lister, data)
    return measured


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
    """SASRec trained on next items of the train parts; its list's first items are judged as a session."""
    device, data = device_for(ctx.device), load_data(ctx)
    recipe = {**SIZES, **RECIPE, **ctx.budget.get("sasrec", {})}
    windows, sequences = NextItemBudget.of(recipe), data.sequences()

    def scorer(model: SASRec, data: SessionSplit) -> Scorer:
        @torch.no_grad()
        def score(split: str, positions: np.ndarray) -> np.ndarray:
            model.eval()
            items = torch.from_numpy(history_of(data, split, positions, windows.length)).to(device)
            return (model(items)[:, -1] @ model.item_table().t()).float().cpu().numpy()

        return score

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        config = TransformerConfig(**{name: recipe[name] for name in SIZES})
        model = SASRec(data.n_items, windows.length, config).to(device)
        lister = score_lister(scorer(model, data), data)
        return fit_model(
            ctx,
            model,
            hyperparameters,
            state,
            budget=FitBudget.of(recipe),
            batches=lambda epoch: EpochWindows(sequences, windows, ctx.seed, epoch, device),
            loss=next_item_loss,
            validate=lambda _: validation_metrics(lister, data),
            key="ndcg@10",
            betas=BETAS,
        )

    best, trials = best_of_trials(ctx, run, "ndcg@10", trials=recipe["trials"])
    model = best.model.eval()
    ctx.observe(
        "trained",
        model=model,
        data=data,
        score=lambda data, split, positions: scorer(model, data)(split, positions),
        validation=best.validation,
    )
    score = scorer(model, data)
    measured, lists = measure(score_lister(score, data), data)
    judge_sessions(ctx, measured, data, device, lists[:, None, : data.size])
    measured.validation, measured.curve = best.validation, best.curve
    measured.hyperparameters, measured.trials = best.hyperparameters, trials
    flops = float(flops_of(lambda: score("test", np.zeros(1, dtype=np.int64))))
    measured.cost |= best.cost | {"params": count_params(model), "flops": flops}
    return measured


# Arms


@experiment.arm
def tiger_pointwise(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def onerec_sft(ctx: Context) -> Measurement:
    return supervised_arm(ctx, device_for(ctx.device))


@experiment.arm
def onerec_dense(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def onerec_plain_codes(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def onerec_sft_longer(ctx: Context) -> Measurement:
    return aligned_arm(ctx, device_for(ctx.device))


@experiment.arm
def onerec_random_pairs(ctx: Context) -> Measurement:
    return aligned_arm(ctx, device_for(ctx.device))


@experiment.arm
def onerec_dpo_once(ctx: Context) -> Measurement:
    return aligned_arm(ctx, device_for(ctx.device))


@experiment.arm
def onerec_dpo_without_ntp(ctx: Context) -> Measurement:
    return aligned_arm(ctx, device_for(ctx.device))


@experiment.arm
def onerec_ipa(ctx: Context) -> Measurement:
    return aligned_arm(ctx, device_for(ctx.device))
