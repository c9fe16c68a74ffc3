"""Test measurement of generators: lists, sessions, rewards, costs, and what alignment did."""

from typing import Any

import numpy as np
import torch

from adapters.onerec.alignment import AlignmentConfig, contexts, divergence
from adapters.onerec.decoding import Decoder, Sessions, first_beam_list
from adapters.onerec.evaluation import add_units, code_entropy, list_contributions, measure, session_values
from adapters.onerec.reward import GATE, RewardConfig, RewardModel, gate_users, rewards
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


def generator_lists(trainer: Trainer, decoder: Decoder, split: str, positions: np.ndarray):
    data = trainer.data
    return decoder.lists(history_of(data, split, positions, trainer.config.history), data.seen(split, positions))


def load_judge(ctx: Context, data: SessionSplit, device: torch.device) -> tuple[RewardModel, dict[str, Any]]:
    judge = RewardModel(data.n_items, settings(RewardConfig, ctx))
    facts = load_weights(judge, ctx.artifact("reward"))
    return judge.to(device).eval().requires_grad_(False), facts


def judge_sessions(
    ctx: Context, measured: Measurement, data: SessionSplit, device: torch.device, sessions: np.ndarray, several: bool
) -> np.ndarray:
    """Adds rewards of the test sessions int64[U, N, m] (the first is the answer) and the gate; R float[U] of the first."""
    judge, facts = load_judge(ctx, data, device)
    everyone = np.arange(len(data))
    history = history_of(data, "test", everyone, ctx.budget.history)
    judged = rewards(judge, history, sessions, device).astype(np.float64)  # (U, N, 4)
    best = np.concatenate([judged.max(1), judged.mean(2).max(1)[:, None]], axis=1) if several else None
    values = session_values(sessions[:, 0], data.interactions.item_genres, judged[:, 0], best)
    add_units(measured, data.users, values)
    gate = facts["validation"]["rm_pairwise_accuracy"]
    measured.metrics["rm_pairwise_accuracy"] = gate
    if gate < GATE:
        measured.notes.append(f"reward model below gate: pairwise accuracy {gate:.3f} on held-out users, {GATE} wanted")
    return values["mean_reward"]


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
    found: dict[str, Any] = {}

    def lister(split: str, positions: np.ndarray) -> np.ndarray:
        lists, found["sessions"], found["open"] = generator_lists(trainer, decoder, split, positions)
        return lists

    model.reset_load()
    measured, lists = measure(lister, data)
    load = model.load_entropy()
    sessions: Sessions = found["sessions"]
    answers = sessions.items if decoder.m > 1 else lists[:, None, : data.size]
    first = judge_sessions(ctx, measured, data, device, answers, decoder.m > 1)
    measured.extra["reward_of_held_out_users"] = float(first[gate_users(data)].mean())
    measured.extra["slots_beyond_the_sessions"] = float(found["open"].mean())
    if decoder.m > 1:
        by_first = list_contributions(first_beam_list(sessions), data.targets("test"))
        measured.extra["first_beam"] = {name: float(v.mean()) for name, v in by_first.items()}
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
    KL(after || before) per session on their sampled sessions."""
    ctx, data, device = trainer.ctx, trainer.data, trainer.device
    positions = np.flatnonzero(gate_users(data))
    history = history_of(data, "test", positions, trainer.config.history)
    seen = data.seen("test", positions)
    found = {}
    for name, model in (("before", before), ("after", after)):
        made = trainer.decoder(model).sessions(history, seen)
        total = rewards(judge, history, made.items, device).mean(2)
        found[f"mean_reward_{name}"], found[f"max_reward_{name}"] = (
            float(total[:, 0].mean()),
            float(total.max(1).mean()),
        )
    noise = torch_generator("cpu", "kl", ctx.seed)
    sampled = trainer.decoder(after).samples(history, seen, KL_SAMPLES, noise).items
    config = settings(AlignmentConfig, ctx)
    return found | {
        "held_out_users": len(positions),
        "kl_to_sft": divergence(after, before, history, sampled),
        "ntp_before": start,
        "contexts": len(contexts(data, config, ctx.seed)[0]),
        "rounds": rounds,
    }
