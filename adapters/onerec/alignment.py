"""Iterative preference alignment: the model makes sessions, the reward picks a pair of them, DPO pulls them apart.

    L_DPO = - log sigmoid( beta log[M_{t+1}(S_w|H) / M_t(S_w|H)] - beta log[M_{t+1}(S_l|H) / M_t(S_l|H)] )
    L = L_NTP + lambda L_DPO,   S_w = argmax R, S_l = argmin R over the N sessions M_t made by beam search

A step descends L / (m L'), which leaves the supervised part on the scale it was trained at. Both sessions are the model's own (self-hard). Round t starts from M_t and M_t is its reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.onerec.decoding import Decoder, chunks
from adapters.onerec.model import SessionGenerator
from adapters.onerec.reward import RewardModel, held_out_users, rewards
from adapters.onerec.sessions import SessionBatch, SessionSplit, SessionSteps, Steps, histories
from auto_research.blocks.preference import dpo, dpo_margin, frozen_reference, k3, weights_hash
from auto_research.blocks.sid_models import sequence_logprob, without_dropout
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

MIN_GAP = 1e-3
LARGEST_RISE = 1.03


@dataclass(frozen=True)
class AlignmentConfig:
    """rounds T share align_steps; share r_DPO of the training users a round, at least contexts (share 0: none at all);
    candidates N; pairs: 'reward' or 'random'; ntp False: L_DPO alone and no stop; check_steps between looks at L_NTP.
    """

    rounds: int = 2
    align_steps: int = 120
    check_steps: int = 20
    share: float = 0.01
    contexts: int = 96
    candidates: int = 16
    pair_batch: int = 16
    beta: float = 0.1
    weight: float = 0.5
    rate: float = 1e-4
    pairs: str = "reward"
    ntp: bool = True

    def steps_of(self, number: int) -> int:
        """Steps of round `number` (from 0)."""
        return self.align_steps * (number + 1) // self.rounds - self.align_steps * number // self.rounds


class Pairs(NamedTuple):
    """history int64[P, n], winner and loser int64[P, m] items, their R float[P], and users int64[P] (positions).

    contexts: how many the pairs were looked for in.
    """

    history: np.ndarray
    winner: np.ndarray
    loser: np.ndarray
    won: np.ndarray
    lost: np.ndarray
    users: np.ndarray
    contexts: int


class PairBatch(NamedTuple):
    """history int64[P, n], sessions int64[P, 2, m] (winner, loser), reference float32[P, 2] of M_t."""

    history: Tensor
    sessions: Tensor
    reference: Tensor


class RoundBatch(NamedTuple):
    """One step: ordinary sessions, and pairs (None without preference)."""

    ordinary: SessionBatch
    pairs: PairBatch | None


def contexts(data: SessionSplit, config: AlignmentConfig, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """First rows and user positions int64[C] of train sessions to align on: one of each chosen user with a history.

    Every round draws its own. Users held out for rewards are never chosen.
    """
    start, owner = data.windows()
    usable = (start > data.first[owner]) & ~held_out_users(data)[owner]
    start, owner = start[usable], owner[usable]
    users = np.unique(owner)
    wanted = 0 if config.share == 0 else min(len(users), max(round(config.share * len(users)), config.contexts))
    rng = stable_rng("alignment-contexts", seed, number)
    chosen = np.sort(rng.permutation(users)[:wanted])
    low, high = np.searchsorted(owner, chosen), np.searchsorted(owner, chosen, side="right")
    rows = low + (rng.random(len(chosen)) * (high - low)).astype(np.int64)
    return start[rows], owner[rows]


def make_pairs(
    decoder: Decoder, judge: RewardModel, data: SessionSplit, config: AlignmentConfig, seed: int, number: int
) -> Pairs:
    """Winner and loser of every context of round `number`; contexts whose rewards differ by less than 1e-3 are left out
    (with random pairs: those with one session)."""
    start, owner = contexts(data, config, seed, number)
    length = decoder.model.settings.history
    history = histories(data, start, owner, length)
    seen = [data.interactions.item[data.first[u] : row].astype(np.int64) for u, row in zip(owner, start, strict=True)]
    made = decoder.sessions(history, seen, config.candidates)
    total = rewards(judge, history, made.items, decoder.device).mean(2).astype(np.float64)  # (C, N)
    real = np.isfinite(made.logp)
    if config.pairs == "random":
        rng = stable_rng("random-pairs", seed, number)
        order = np.where(real, rng.random(real.shape), np.inf).argsort(1)
        best, worst = order[:, 0], order[:, 1]
        keep = real.sum(1) > 1
    else:
        best, worst = np.where(real, total, -np.inf).argmax(1), np.where(real, total, np.inf).argmin(1)
        row = np.arange(len(total))
        keep = total[row, best] - total[row, worst] >= MIN_GAP
    row = np.flatnonzero(keep)
    best, worst = best[row], worst[row]
    return Pairs(
        history[row], made.items[row, best], made.items[row, worst], total[row, best], total[row, worst], owner[row],
        len(total),
    )  # fmt: skip


def log_sessions(
    model: SessionGenerator, history: Tensor, sessions: Tensor, choices: list[Tensor] | None = None
) -> Tensor:
    """log M(S | H) float32[B, w] without dropout; history int64[B, n], sessions int64[B, w, m].

    choices: of `Decoder.choices`, the served policy instead of the softmax over the vocabulary.
    """
    codes = model.item_codes[sessions].flatten(2)
    with without_dropout(model):
        memory = model.read(history)
    return sequence_logprob(model, memory, codes, choices)


def on_device(pairs: Pairs, reference: SessionGenerator, device: torch.device) -> PairBatch:
    """All pairs with the frozen reference's log-probabilities."""
    history = torch.from_numpy(pairs.history).to(device)
    sessions = torch.from_numpy(np.stack([pairs.winner, pairs.loser], axis=1)).to(device)
    with torch.no_grad():
        logp = torch.cat(
            [
                log_sessions(reference, h, s)
                for h, s in zip(history.split(64), sessions.split(64), strict=True)
            ]
        )  # fmt: skip
    return PairBatch(history, sessions, logp)


def pair_terms(model: SessionGenerator, batch: PairBatch, beta: float) -> tuple[Tensor, Tensor]:
    """L_DPO and its margin float32[P]."""
    logp = log_sessions(model, batch.history, batch.sessions)
    values = (logp[:, 0], logp[:, 1], batch.reference[:, 0], batch.reference[:, 1], beta)
    return dpo(*values), dpo_margin(*values)


def round_loss(model: SessionGenerator, batch: RoundBatch, config: AlignmentConfig) -> Tensor:
    """(L_NTP + lambda L_DPO) / (m L') and the balance loss; without pairs or without ntp what is left of it."""
    loss = model.loss(batch.ordinary) if config.ntp else 0.0 * model.embedding.weight.sum()
    if batch.pairs is not None:
        preference = pair_terms(model, batch.pairs, config.beta)[0].mean()
        loss = loss + config.weight / model.codes_of(batch.pairs.sessions) * preference
    return loss


class Guard:
    """Validation of a round: looks so far while L_NTP has stayed within 3 percent of its start, -1 from then on.

    The loop keeps the weights of the largest value, so that a round ends with the last look inside the bound.
    """

    def __init__(self, measure: Callable[[], float], start: float, active: bool):
        self.measure, self.bound, self.active = measure, LARGEST_RISE * start, active
        self.looks, self.left = 0, False

    def __call__(self, _) -> dict[str, float]:
        self.looks += 1
        loss = self.measure()
        self.left |= self.active and loss > self.bound
        return {"ntp_val_loss": loss, "looks_inside": float(-1 if self.left else self.looks)}

    def state_dict(self) -> dict[str, Any]:
        return {"looks": self.looks, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.looks, self.left = state["looks"], state["left"]


class RoundSteps:
    """Batches of one round: ordinary sessions and a seeded cycle through the pairs."""

    def __init__(self, ordinary: SessionSteps, pairs: PairBatch | None, config: AlignmentConfig, seed: tuple):
        self.ordinary, self.pairs, self.config, self.seed = ordinary, pairs, config, seed

    def epoch(self, number: int) -> Steps:
        each = self.config.check_steps
        return Steps(each, lambda index: self.at(number * each + index))

    def at(self, step: int) -> RoundBatch:
        chosen = None
        if self.pairs is not None:
            count = len(self.pairs.history)
            size = min(self.config.pair_batch, count)
            passes = max(1, count // size)
            number, part = divmod(step, passes)
            rows = stable_rng("pair-order", *self.seed, number).permutation(count)[part * size : (part + 1) * size]
            index = torch.from_numpy(rows).to(self.pairs.history.device)
            chosen = PairBatch(*(x[index] for x in self.pairs))
        return RoundBatch(self.ordinary.at(step), chosen)


def align(
    ctx: Context,
    model: SessionGenerator,
    decoder: Decoder,
    judge: RewardModel,
    data: SessionSplit,
    config: AlignmentConfig,
    state: StateFolder,
    *,
    batch: int,
    validate: Callable[[], float],
) -> tuple[list[dict[str, Any]], list[dict], dict[str, float]]:
    """All rounds, in place; facts of every round, the curve, and cost. decoder decodes with `model`."""
    facts, curve = [], []
    cost = {"seconds": 0.0, "train_seconds": 0.0, "steps": 0}
    for number in range(config.rounds):
        seed = (ctx.seed, number)
        seed_everything(ctx.seed)
        reference = frozen_reference(model)
        start = validate()
        pairs = make_pairs(decoder, judge, data, config, ctx.seed, number) if config.share else None
        batches = on_device(pairs, reference, decoder.device) if pairs and len(pairs.users) else None
        ordinary = SessionSteps(
            data, batch=batch, epoch_steps=config.check_steps, history=model.settings.history,
            seed=("round", *seed), device=decoder.device,
        )  # fmt: skip
        guard = Guard(validate, start, config.ntp)
        steps = config.steps_of(number)
        looks = -(-steps // config.check_steps)
        fitted = fit(
            model,
            adamw(model, config.rate, 0.0),
            Plan(looks, steps, 1.0, key="looks_inside", patience=1),
            batches=RoundSteps(ordinary, batches, config, seed).epoch,
            loss=partial(round_loss, config=config),
            state=state.child(f"round-{number}"),
            validate=guard,
            on_step=lambda model, step, total: ctx.observe("step", model=model, step=step),
            progress=ctx.progress,
            extras={"guard": guard},
        )
        stopped = fitted.validation["looks_inside"] < 0
        if stopped:  # not even the first look was inside the bound
            model.load_state_dict(reference.state_dict())
        facts.append(
            {"round": number + 1, "reference": weights_hash(reference), "pairs": len(pairs.users) if pairs else 0,
             "contexts": pairs.contexts if pairs else 0,
             "reward_gap": float((pairs.won - pairs.lost).mean()) if batches else 0.0,
             "ntp_start": start, "ntp_end": start if stopped else fitted.validation["ntp_val_loss"],
             "steps": fitted.steps, "kept_looks": fitted.best_epoch if not stopped else 0}
            | margin_facts(model, batches, config.beta)
        )  # fmt: skip
        curve += [{**entry, "epoch": len(curve) + 1 + i, "round": number + 1} for i, entry in enumerate(fitted.history)]
        for name in cost:
            cost[name] += getattr(fitted, name)
    return facts, curve, cost


@torch.no_grad()
def margin_facts(model: SessionGenerator, batch: PairBatch | None, beta: float) -> dict[str, float]:
    """Mean margin of the pairs, and how far winner and loser moved in log-probability."""
    if batch is None:
        return {}
    logp = log_sessions(model, batch.history, batch.sessions)
    loss, margin = (x.mean() for x in pair_terms(model, batch, beta))
    moved = (logp - batch.reference).mean(0)
    return {
        "dpo_loss": float(loss), "dpo_margin": float(margin), "winner_gain": float(moved[0]),
        "loser_gain": float(moved[1]),
    }  # fmt: skip


@torch.no_grad()
def divergence(
    decoder: Decoder, reference: SessionGenerator, history: np.ndarray, seen: list[np.ndarray], sessions: np.ndarray
) -> float:
    """KL(model || reference) of the served policies per session, by k3 on sessions int64[U, N, m] of `decoder.samples`."""
    parts = []
    for rows in chunks(len(history)):
        h, s = (torch.from_numpy(x[rows]).to(decoder.device) for x in (history, sessions))
        choices = decoder.choices(seen[rows], s)
        parts.append(k3(log_sessions(decoder.model, h, s, choices), log_sessions(reference, h, s, choices)))
    return float(torch.cat(parts).mean())
