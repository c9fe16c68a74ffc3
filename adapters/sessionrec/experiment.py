"""Stages of SessionRec: floors, item-level Transformers, and sessions with each part taken away.

What makes an arm differ is its `switch` in card.yaml; sizes are in the budget. Evaluation is the same for all arms: the
60 s sessions of `SessionSplit`, whatever an arm takes as a token.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from adapters.sessionrec.batches import Draws, EpochBatches, take
from adapters.sessionrec.evaluation import Scorer, measure, validation_metrics
from adapters.sessionrec.model import SessionRec, SessionRecConfig
from adapters.sessionrec.sessions import SessionSplit, TokenRule, TokenSequences, token_sequences
from auto_research.baselines.linear_floor import choose, known_items
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import study
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.devices import device_for
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model, load_split, settings
from auto_research.train.next_item import BETAS
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

experiment = Experiment("sessionrec")

SELECTION = "ndcg@10"
STUDY_EVENTS = (50, 100, 200)
WARM_UP, TIMED = 1, 5
SERVED = 20


def rule_of(ctx: Context) -> TokenRule:
    return settings(TokenRule, ctx)


def build_model(ctx: Context, data: SessionSplit, rule: TokenRule, hyperparameters: dict[str, Any]) -> SessionRec:
    tuned = {name: hyperparameters[name] for name in ("alpha",) if name in hyperparameters}
    table, switch = data.interactions, ctx.switch or {}
    config = settings(SessionRecConfig, ctx, **{**tuned, **switch, "tokens": rule.longest})
    genres, decade = torch.as_tensor(table.item_genres), torch.as_tensor(table.item_decade)
    return SessionRec(config, genres, decade, table.vocab["decade"])


def target_share(sequences: TokenSequences, n_items: int) -> Tensor:
    """f_i: how often an item is a positive of the training targets; float32[n_items + 1], sums to 1."""
    count = np.bincount(sequences.pos[sequences.pos > 0], minlength=n_items + 1)
    return torch.from_numpy(count / max(count.sum(), 1)).float()


def model_scorer(model: SessionRec, data: SessionSplit, rule: TokenRule, device: torch.device) -> Scorer:
    """Scores after the newest token; the token sequences of a split are made once."""
    made: dict[str, TokenSequences] = {}

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        if split not in made:
            made[split] = token_sequences(data, rule, split)
        model.eval()
        with torch.no_grad():
            return model(take(made[split], positions, data.n_items).to(device)).cpu().numpy()

    return score


def optimizer_of(model: SessionRec, hyperparameters: dict[str, Any]) -> torch.optim.Optimizer:
    return adamw(model, hyperparameters["learning_rate"], hyperparameters.get("weight_decay", 0.0), betas=BETAS)


def train(ctx: Context, device: torch.device) -> Measurement:
    """Tune, train and measure one arm."""
    data, rule = load_split(ctx, SessionSplit.build), rule_of(ctx)
    sequences = token_sequences(data, rule, "valid", targets=True)
    draws, budget = settings(Draws, ctx), FitBudget.of(ctx.budget)
    share = target_share(sequences, data.n_items).to(device)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        model = build_model(ctx, data, rule, hyperparameters).to(device)
        score = model_scorer(model, data, rule, device)
        return fit_model(
            ctx,
            model,
            hyperparameters,
            state,
            budget=budget,
            batches=lambda epoch: EpochBatches(
                sequences, data.n_items, ctx.budget.batch, draws, ctx.seed, epoch, device
            ),
            loss=lambda model, batch: model.loss(batch, share),
            validate=lambda _: validation_metrics(score, data),
            key=SELECTION,
            optimizer=optimizer_of(model, hyperparameters),
        )

    best, trials = best_of_trials(ctx, run, SELECTION, race=True)
    model = best.model.eval()
    ctx.observe(
        "trained",
        model=model,
        data=data,
        score=lambda data, split, positions: model_scorer(model, data, rule, device)(split, positions),
        validation=best.validation,
    )
    measured = measure(model_scorer(model, data, rule, device), data)
    measured.validation, measured.curve = best.validation, best.curve
    measured.hyperparameters, measured.trials = best.hyperparameters, trials
    step_ms = train_step_ms(model, best.hyperparameters, sequences, draws, share, ctx.budget.batch)
    measured.cost |= best.cost | {"train_step_ms": step_ms, "tokens_per_user": len(sequences.gap) / len(sequences)}
    measured.cost |= serving_costs(model, data, rule, device)
    measured.extra = {
        "sessions": data.counts(),
        "temperature": model.temperature(torch.ones(())).reciprocal().item(),
        "studies": studies(model, data, rule, device),
    }
    return measured


def train_step_ms(
    model: SessionRec,
    hyperparameters: dict[str, Any],
    sequences: TokenSequences,
    draws: Draws,
    share: Tensor,
    batch: int,
) -> float:
    """Milliseconds of an optimizer step over the first batch of the first epoch; the model itself stays as it is."""
    trained = deepcopy(model).train()
    optimizer = optimizer_of(trained, hyperparameters)
    users = EpochBatches(sequences, len(share) - 1, batch, draws, 0, 0, share.device)[0]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        trained.loss(users, share).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()

    return 1e3 * median_seconds(step, share.device, WARM_UP, TIMED)


def serving_costs(model: SessionRec, data: SessionSplit, rule: TokenRule, device: torch.device) -> dict[str, float]:
    """Parameters, and milliseconds and operations of one query: encoder, dot products and top-k, item vectors stored."""
    user = np.zeros(1, dtype=np.int64)
    batch = take(token_sequences(data, rule, "test", user), user, data.n_items).to(device)
    seen = torch.zeros(1, data.n_items + 1, dtype=torch.bool, device=device)
    seen[0, torch.from_numpy(data.seen("test", user)[0]).to(device)] = True
    items, candidates = model.export()

    def serve() -> Tensor:
        return model.retrieve(batch, items, candidates, seen, SERVED)

    return {
        "params": count_params(model),
        "flops": float(flops_of(serve)),
        "query_ms": 1e3 * median_seconds(serve, device, WARM_UP, TIMED),
    }


@torch.no_grad()
def studies(model: SessionRec, data: SessionSplit, rule: TokenRule, device: torch.device) -> dict[str, Any]:
    """Tokens and operations of one encoded query by length of the history, for the user with most events."""
    longest = np.array([int(np.argmax(data.test[:, 0] - data.first))])
    tokens, flops = [], []
    items, _ = model.export()
    for events in STUDY_EVENTS:
        if events > rule.events:
            break
        sequences = token_sequences(data, replace(rule, events=events), "test", longest)
        batch = take(sequences, np.zeros(1, dtype=np.int64), data.n_items).to(device)
        tokens.append((events, batch.tokens))
        flops.append((events, flops_of(lambda batch=batch: model.queries(batch, items))))
    x = "newest events of the user"
    return (
        {}
        if not tokens
        else {
            "tokens_per_query": study(x, "tokens", {"": tokens}),
            "flops_per_query": study(x, "FLOPs", {"": flops}),
        }
    )


def linear_floor(ctx: Context, kind: str) -> Measurement:
    """EASE or item neighbours over the items of the sessions before the target session."""
    data = load_split(ctx, SessionSplit.build)

    def history(split: str, positions: np.ndarray, everything: bool) -> sparse.csr_matrix:
        return known_items(data.interactions, data.first[positions], data.target(split)[positions, 0], everything)

    return choose(
        ctx,
        kind,
        train=lambda everything: history("valid", np.arange(len(data)), everything),
        history=history,
        validate=lambda score: validation_metrics(score, data),
        measure=lambda score: measure(score, data),
    )


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    device_for(ctx.device)
    data = load_split(ctx, SessionSplit.build)
    counts = data.popularity(positive=True).astype(np.float64)
    return measure(lambda split, positions: np.tile(counts, (len(positions), 1)), data)


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "itemknn")


@experiment.arm
def ease(ctx: Context) -> Measurement:
    device_for(ctx.device)
    return linear_floor(ctx, "ease")


@experiment.arm
def sasrec_items(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def sasrec_next_session(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def sessionrec_transformer(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def sessionrec_hstu(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def single_positive(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def no_rank_loss(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def time_blind_sessions(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))
