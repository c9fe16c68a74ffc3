"""Test measurement of generators: lists, sessions, rewards, costs, and what alignment did."""

from typing import Any

import numpy as np
import torch

from adapters.onerec.alignment import divergence
from adapters.onerec.decoding import Decoder, Ranking
from adapters.onerec.evaluation import add_units, code_entropy, list_contributions, measure, session_values
from adapters.onerec.reward import GATE, RewardConfig, RewardModel, held_out_users, rewards
from adapters.onerec.sessions import SessionSplit
from adapters.onerec.training import NTP, Trainer, history_of, load_weights
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Measurement
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.seeds import torch_generator
from auto_research.train.fitting import settings
from auto_research.train.tuning import Trained

KL_SAMPLES = 4


def generator_lists(trainer: Trainer, decoder: Decoder, split: str, positions: np.ndarray) -> Ranking:
    data = trainer.data
    return decoder.lists(history_of(data, split, positions, trainer.config.history), data.seen(split, positions))


def load_judge(ctx: Context, data: SessionSplit, device: torch.device) -> tuple[RewardModel, dict[str, Any]]:
    judge = RewardModel(data.n_items, settings(RewardConfig, ctx))
    facts = load_weights(judge, ctx.artifact("reward"))
    return judge.to(device).eval().requires_grad_(False), facts


def judge_sessions(
    ctx: Context,
    measured: Measurement,
    data: SessionSplit,
    device: torch.device,
    sessions: np.ndarray,
    logp: np.ndarray | None = None,
) -> None:
    """Adds rewards of the test sessions int64[U, N, m], of which the first is the answer, and the gate.

    logp: float[U, N], with the largest rewards among the sessions that are finite in it.
    """
    judge, facts = load_judge(ctx, data, device)
    everyone = np.arange(len(data))
    history = history_of(data, "test", everyone, ctx.budget.history)
    judged = rewards(judge, history, sessions, device).astype(np.float64)  # (U, N, 4)
    best = None
    if logp is not None:
        every = np.concatenate([judged, judged.mean(2, keepdims=True)], axis=2)  # (U, N, 5)
        best = largest(every, np.isfinite(logp))
    values = session_values(sessions[:, 0], data.interactions.item_genres, judged[:, 0], best)
    add_units(measured, data.users, values)
    measured.extra["reward_of_held_out_users"] = float(values["mean_reward"][held_out_users(data)].mean())
    gate = facts["rm_pairwise_accuracy"]
    measured.metrics["rm_pairwise_accuracy"] = gate
    if gate < GATE:
        measured.notes.append(f"reward model below gate: pairwise accuracy {gate:.3f} on held-out users, {GATE} wanted")


def largest(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """[U, ..] maximum over the N sessions of values [U, N, ..] that are real bool[U, N]; the first always is."""
    real = real | (np.arange(real.shape[1]) == 0)
    return np.where(real.reshape(*real.shape, *[1] * (values.ndim - 2)), values, -np.inf).max(1)


def measure_generator(trainer: Trainer, best: Trained, trials: list[dict]) -> Measurement:
    """Test measurement of a trained generator; lists, sessions, rewards, costs."""
    ctx, data, device, model = trainer.ctx, trainer.data, trainer.device, best.model.eval()
    decoder = trainer.decoder(model)
    ctx.observe(
        "trained",
        model=model,
        data=data,
        score=lambda data, split, positions: decoder.opening_scores(data, split, positions),
        validation=best.validation,
    )
    made: list[Ranking] = []

    def lister(split: str, positions: np.ndarray) -> np.ndarray:
        made.append(generator_lists(trainer, decoder, split, positions))
        return made[-1].items

    model.reset_load()
    measured, lists = measure(lister, data)
    load, (ranking,) = model.load_entropy(), made
    if decoder.m > 1:
        judge_sessions(ctx, measured, data, device, ranking.sessions.items, ranking.sessions.logp)
        by_first = list_contributions(ranking.first_beam(), data.targets("test"))
        measured.extra["first_beam"] = {name: float(v.mean()) for name, v in by_first.items()}
    else:
        judge_sessions(ctx, measured, data, device, lists[:, None, : data.size])
    measured.extra["slots_beyond_the_sessions"] = float(ranking.open.mean())
    measured.metrics["code_entropy"] = code_entropy(lists, trainer.table.codes)
    measured.metrics[NTP] = best.validation[NTP]
    measured.validation, measured.curve = best.validation, best.curve
    measured.hyperparameters, measured.trials = best.hyperparameters, trials
    measured.cost |= best.cost | costs(trainer, decoder) | {"expert_load_entropy": load}
    measured.extra["codes"] = trainer.table.statistics()
    return measured


@torch.no_grad()
def costs(trainer: Trainer, decoder: Decoder) -> dict[str, float]:
    """Parameters, FLOPs of one context's decoding pass, and milliseconds of one context's beams."""
    data, model, one = trainer.data, decoder.model, np.zeros(1, dtype=np.int64)
    history = history_of(data, "test", one, trainer.config.history)
    seen = data.seen("test", one)
    work = lambda: decoder.sessions(history, seen)  # noqa: E731
    return {
        "params": count_params(model),
        "params_total": count_params(model),
        "params_active": model.active_params(),
        "flops": float(flops_of(work)),
        "session_ms": 1e3 * median_seconds(work, trainer.device, 1, 3),
    }


def alignment_facts(trainer: Trainer, before, after, judge, rounds: list[dict], start: float) -> dict[str, Any]:
    """Reward of the best test session before and after, of users with no pair and no training row of the reward model;
    KL(after || before) of the served policies per session."""
    ctx, data, device = trainer.ctx, trainer.data, trainer.device
    positions = np.flatnonzero(held_out_users(data))
    history = history_of(data, "test", positions, trainer.config.history)
    seen = data.seen("test", positions)
    found = {}
    for name, model in (("before", before), ("after", after)):
        made = trainer.decoder(model).sessions(history, seen)
        total = rewards(judge, history, made.items, device).mean(2)
        found[f"mean_reward_{name}"], found[f"max_reward_{name}"] = (
            float(total[:, 0].mean()),
            float(largest(total, np.isfinite(made.logp)).mean()),
        )
    noise = torch_generator("cpu", "kl", ctx.seed)
    decoder = trainer.decoder(after)
    sampled = decoder.samples(history, seen, KL_SAMPLES, noise).items
    return found | {
        "held_out_users": len(positions),
        "kl_to_sft": divergence(decoder, before, history, seen, sampled),
        "ntp_before": start,
        "rounds": rounds,
    }
