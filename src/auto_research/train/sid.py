"""Train a generator of semantic ids on leave-two-out sequences, choose it by beam search, measure the lists it gives.

A generator is a `SIDModel`, or a module whose attribute `sid` is one, with

    context(items int64[B, n], user int64[B]) -> ctx    items left-padded with 0, newest last; what `SIDStep` starts from
    training_loss(batch: SIDBatch) -> scalar            optional; default: the last target of every row

Rows are either windows, in which every item is followed by a target, or cuts, (history, next item), as in TIGER.

Budget of a card: length 50 (items of a history), batch (windows of that length, or cuts), cuts false, round 150 (steps
the loop calls an epoch when rows are cuts), epochs, steps, patience, validate_every, clip, warmup, users;
validation_users (None: all), validation_beam 20, beam 50; trials [{learning_rate, weight_decay}].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable, require_hash
from auto_research.blocks.sid_models import SIDModel, SIDStep, sid_loss
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Scorer
from auto_research.evaluate.next_list import Lister, Lists, measure_next_list, validation_lists
from auto_research.experiment.contract import Measurement
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.train.fitting import FitBudget, fit_model
from auto_research.train.next_item import EpochWindows, NextItemBudget, load_sequences, recent_items
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

SELECTION = "ndcg@10"
LIST = 10
CHUNK = 256


@dataclass(frozen=True)
class SIDBudget(FitBudget):
    """The parts of a budget this protocol reads; see the module's text."""

    epochs: int = 24
    patience: int | None = 4
    warmup: int = 100
    validate_every: int = 2
    length: int = 50
    batch: int = 8
    cuts: bool = False
    round: int = 150
    validation_users: int | None = None
    validation_beam: int = 20
    beam: int = 50


class SIDBatch(NamedTuple):
    """Histories items int64[B, n], what followed each item, target int64[B, n] (0 = not trained), user ids int64[B]."""

    items: Tensor
    target: Tensor
    user: Tensor

    def to(self, device: torch.device) -> SIDBatch:
        return SIDBatch(*(tensor.to(device) for tensor in self))


class SIDWindows:
    """One pass in which every train event but a user's first is a target once, in windows (`EpochWindows`)."""

    def __init__(self, sequences: LeaveTwoOut, budget: SIDBudget, seed: int, epoch: int, device: torch.device):
        windows = NextItemBudget(length=budget.length, batch=budget.batch)
        self.windows = EpochWindows(sequences, windows, seed, epoch, device)
        self.sequences, self.device = sequences, device

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> SIDBatch:
        first = self.windows.start[self.windows.groups[index]]
        owner = np.searchsorted(self.sequences.train_starts, first, side="right") - 1
        user = torch.from_numpy(self.sequences.users[owner]).to(self.device)
        return SIDBatch(*self.windows[index], user)


class SIDCuts:
    """`round` steps of seeded passes over all pairs (up to `length` items of a user, the next item)."""

    def __init__(self, sequences: LeaveTwoOut, budget: SIDBudget, seed: int, epoch: int, device: torch.device):
        self.sequences, self.budget, self.seed, self.epoch, self.device = sequences, budget, seed, epoch, device
        self.first = np.repeat(sequences.train_starts[:-1], np.diff(sequences.train_starts))
        self.rows = np.flatnonzero(np.arange(len(self.first)) > self.first)

    def __len__(self) -> int:
        return self.budget.round

    def __getitem__(self, index: int) -> SIDBatch:
        size = min(self.budget.batch, len(self.rows))
        number, part = divmod(self.epoch * self.budget.round + index, len(self.rows) // size)
        row = self.rows[_shuffled(self.seed, number, len(self.rows))[part * size : (part + 1) * size]]
        source = row[:, None] + np.arange(-self.budget.length, 0)
        inside = source >= self.first[row][:, None]
        items = np.where(inside, self.sequences.train_items[np.where(inside, source, 0)], 0)
        target = np.zeros_like(items)
        target[:, -1] = self.sequences.train_items[row]
        owner = np.searchsorted(self.sequences.train_starts, row, side="right") - 1
        batch = SIDBatch(*map(torch.from_numpy, (items, target, self.sequences.users[owner])))
        return batch.to(self.device)


@lru_cache(maxsize=2)
def _shuffled(seed: int, number: int, rows: int) -> np.ndarray:
    return stable_rng("cuts", seed, number).permutation(rows)


def sid_batches(
    sequences: LeaveTwoOut, budget: SIDBudget, seed: int, device: torch.device
) -> Callable[[int], Sequence[SIDBatch]]:
    """epoch -> batches, windows or cuts as the budget says."""
    kind = SIDCuts if budget.cuts else SIDWindows
    return lambda epoch: kind(sequences, budget, seed, epoch, device)


def spelling(model: nn.Module) -> SIDModel:
    """The part of a generator that spells codes: the model itself or its `sid`."""
    return model if isinstance(model, SIDModel) else model.sid


def generator_loss(model: nn.Module, batch: SIDBatch, codes: Tensor) -> Tensor:
    """The model's own loss, or - log p of the last target's codes; codes int64[n_items + 1, L]."""
    if hasattr(model, "training_loss"):
        return model.training_loss(batch)
    ctx = model.context(batch.items, batch.user)
    return sid_loss(spelling(model), ctx, codes[batch.target[:, -1]].unsqueeze(1))


def seen_items(sequences: LeaveTwoOut, split: str, positions: np.ndarray) -> np.ndarray:
    """int64[B, S] everything before the target of each user, padded with 0."""
    histories = [sequences.history(split, int(position)) for position in positions]
    seen = np.zeros((len(histories), max(map(len, histories), default=0)), dtype=np.int64)
    for row, history in zip(seen, histories, strict=True):
        row[: len(history)] = history
    return seen


def read_history(
    model: nn.Module, sequences: LeaveTwoOut, split: str, positions: np.ndarray, length: int, device: torch.device
) -> Any:
    """The model's ctx of users before their target, in evaluation mode without a graph."""
    model.eval()
    items = torch.from_numpy(recent_items(sequences, split, positions, length)).to(device)
    user = torch.from_numpy(sequences.users[positions]).to(device)
    with torch.no_grad():
        return model.context(items, user)


def beam_lister(
    model: nn.Module,
    sequences: LeaveTwoOut,
    trie: PrefixTrie,
    *,
    width: int,
    length: int,
    device: torch.device,
    count: int = LIST,
    inventory: Tensor | None = None,
    **options: Any,
) -> Lister:
    """Lister of the `count` best unseen items by constrained beam search; options go to `constrained_beam`.

    trie: on `device`.  inventory: bool[n_items + 1] items that may be offered at all (None: every item).  Items of a
    shared semantic id follow each other, the most popular first.
    """

    def answer(split: str, positions: np.ndarray) -> np.ndarray:
        ctx = read_history(model, sequences, split, positions, length, device)
        seen = torch.from_numpy(seen_items(sequences, split, positions)).to(device)
        offered = None if inventory is None else inventory.expand(len(positions), -1)
        alive = trie.alive(seen, inventory=offered)
        beams = constrained_beam(SIDStep(spelling(model)), ctx, trie, width, alive=alive, **options)
        return trie.expand(beams.leaf[..., 0], count, seen=seen, inventory=offered).cpu().numpy()

    return answer


def sid_scorer(
    model: nn.Module, sequences: LeaveTwoOut, table: SIDTable, *, length: int, device: torch.device
) -> Scorer:
    """Scorer by log-probability of every item's semantic id, teacher-forced: the oracle, slow."""

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        ctx = read_history(model, sequences, split, positions, length, device)
        return exhaustive_sid_scores(spelling(model), ctx, table).cpu().numpy()

    return score


def fit_sid(
    ctx: Context,
    build: Callable[[dict[str, Any], LeaveTwoOut], nn.Module],
    *,
    table: SIDTable,
    device: torch.device,
    sequences: LeaveTwoOut | None = None,
    budget: SIDBudget | None = None,
    batches: Callable[[int], Sequence] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    validate: Callable[[nn.Module], dict[str, float]] | None = None,
    scorer: Callable[[nn.Module, LeaveTwoOut], Scorer] | None = None,
    trials: Sequence[dict[str, Any]] | None = None,
    inventory: Tensor | None = None,
    observed: bool = True,
) -> tuple[Trained, list[dict[str, Any]]]:
    """Tune and train; the chosen model in evaluation mode and a record per trial. The test targets are not read.

    build: (hyperparameters of the trial, sequences) -> generator on CPU, called right after seeding.
    batches, loss, validate: instead of `sid_batches`, `generator_loss` and beam search on the validation targets;
    `validate` must give ndcg@10.  scorer: of a model on a split, shown to the observer instead of `sid_scorer`.
    inventory: as in `beam_lister`, for validation.  observed: show steps and the trained model to `ctx.observe`.
    Raises ConfigError when the generator spells other semantic ids than those of `table`.
    """
    sequences = sequences or load_sequences(ctx)
    budget = budget or SIDBudget.of(ctx.budget)
    trie = PrefixTrie.of(table, device)
    codes = torch.from_numpy(table.codes).to(device)

    def checked(model: nn.Module) -> dict[str, float]:
        lister = beam_lister(
            model,
            sequences,
            trie,
            width=budget.validation_beam,
            length=budget.length,
            device=device,
            inventory=inventory,
        )
        return validation_lists(lister, sequences, users=budget.validation_users, chunk=CHUNK)

    def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
        seed_everything(ctx.seed)
        model = build(hyperparameters, sequences)
        require_hash(spelling(model).vocab.table_hash, table.content_hash, "the generator")
        return fit_model(
            ctx,
            model.to(device),
            hyperparameters,
            state,
            budget=budget,
            batches=batches or sid_batches(sequences, budget, ctx.seed, device),
            loss=loss or (lambda model, batch: generator_loss(model, batch, codes)),
            validate=validate or checked,
            key=SELECTION,
            observed=observed,
        )

    trained, records = best_of_trials(ctx, run, SELECTION, trials=trials)
    model = trained.model.eval()
    if observed:

        def score(data: LeaveTwoOut, split: str, positions: np.ndarray) -> np.ndarray:
            shown = scorer(model, data) if scorer else None
            shown = shown or sid_scorer(model, data, table, length=budget.length, device=device)
            return shown(split, positions)

        ctx.observe("trained", model=model, data=sequences, score=score, validation=trained.validation)
    return trained, records


def measure_sid(
    trained: Trained,
    records: list[dict[str, Any]],
    sequences: LeaveTwoOut,
    table: SIDTable,
    budget: SIDBudget,
    *,
    device: torch.device,
    at: tuple[int, ...] = (5,),
    also: Callable[[Lists], dict[str, np.ndarray]] | None = None,
    lister: Lister | None = None,
    inventory: Tensor | None = None,
) -> Measurement:
    """Test metrics of the lists of a trained generator (default: beam search of the budget's width) and its costs.

    at, also: as in `measure_next_list`.  inventory: as in `beam_lister`.  cost: params, flops, user_beam_ms (wall time of
    encoding, beam search and cleaning of lists by batches of users, over their number), and what training took.
    """
    model, trie = trained.model, PrefixTrie.of(table, device)
    width, count = budget.beam, max(LIST, *at) if at else LIST
    lister = lister or beam_lister(
        model,
        sequences,
        trie,
        width=max(width, count),
        length=budget.length,
        device=device,
        count=count,
        inventory=inventory,
    )
    measured = measure_next_list(lister, sequences, at=at, also=also, chunk=CHUNK)
    measured.validation, measured.curve = trained.validation, trained.curve
    measured.hyperparameters, measured.trials = trained.hyperparameters, records
    one = np.zeros(1, dtype=np.int64)
    measured.cost |= trained.cost | {
        "params": count_params(model),
        "flops": float(flops_of(lambda: lister("test", one))),
        "user_beam_ms": 1e3 / measured.cost["users_per_s"],
    }
    return measured


def train_sid(
    ctx: Context,
    build: Callable[[dict[str, Any], LeaveTwoOut], nn.Module],
    *,
    table: SIDTable,
    device: torch.device,
    at: tuple[int, ...] = (5,),
    also: Callable[[Lists], dict[str, np.ndarray]] | None = None,
    **options: Any,
) -> Measurement:
    """`fit_sid` with its options and `measure_sid`: a whole arm."""
    sequences = options.pop("sequences", None) or load_sequences(ctx)
    budget = options.pop("budget", None) or SIDBudget.of(ctx.budget)
    trained, records = fit_sid(ctx, build, table=table, device=device, sequences=sequences, budget=budget, **options)
    return measure_sid(trained, records, sequences, table, budget, device=device, at=at, also=also)
