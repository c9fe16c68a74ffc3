"""Item-based nearest neighbours: cosine similarity of item columns, the k nearest of each history item vote."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import sparse

from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Measure, measure_next_item, validation_metrics
from auto_research.experiment.contract import Measurement
from auto_research.train.next_item import load_sequences
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

TRIALS = tuple({"neighbours": k, "shrink": s} for k in (20, 50, 100, 200) for s in (0.0, 20.0))


def interaction_matrix(sequences: LeaveTwoOut) -> sparse.csr_matrix:
    """Binary users x items matrix of train events, float64 [U, n_items + 1]."""
    rows = np.repeat(np.arange(len(sequences)), np.diff(sequences.train_starts))
    shape = (len(sequences), sequences.n_items + 1)
    matrix = sparse.csr_matrix((np.ones(len(rows)), (rows, sequences.train_items)), shape=shape)
    matrix.data[:] = 1.0  # an item seen twice counts once
    return matrix


def history_matrix(sequences: LeaveTwoOut, split: str, positions: np.ndarray) -> sparse.csr_matrix:
    """Binary histories before the split's targets, float64 [B, n_items + 1]."""
    histories = [sequences.history(split, int(i)) for i in positions]
    rows = np.repeat(np.arange(len(positions)), [len(h) for h in histories])
    columns = np.concatenate(histories)
    matrix = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(positions), sequences.n_items + 1))
    matrix.data[:] = 1.0
    return matrix


def cosine_neighbours(matrix: sparse.csr_matrix, neighbours: int, shrink: float) -> np.ndarray:
    """s_ij = n_ij / (sqrt(n_i n_j) + shrink), zero diagonal, only the `neighbours` largest of each row kept; [V, V]."""
    together = (matrix.T @ matrix).toarray()
    count = together.diagonal().copy()
    norm = np.sqrt(np.outer(count, count)) + shrink
    similarity = np.divide(together, norm, out=np.zeros_like(together), where=norm > 0)
    np.fill_diagonal(similarity, 0.0)
    if neighbours < len(similarity):
        floor = -np.partition(-similarity, neighbours - 1, axis=1)[:, neighbours - 1 : neighbours]
        similarity[similarity < floor] = 0.0
    return similarity


def run(ctx: Context, *, device: torch.device, measure: Measure = measure_next_item) -> Measurement:
    """Choose neighbourhood size and shrinkage by validation ndcg@10, then measure. CPU only, `device` is not used.

    measure: (scorer, sequences) -> Measurement, where an adapter wants further metrics.
    """
    sequences = load_sequences(ctx)
    matrix = interaction_matrix(sequences)

    def fit(hyperparameters: dict, _) -> Trained:
        started = time.perf_counter()
        similarity = cosine_neighbours(matrix, int(hyperparameters["neighbours"]), float(hyperparameters["shrink"]))
        scorer = linear_scorer(sequences, similarity)
        seconds = time.perf_counter() - started
        return Trained(scorer, validation_metrics(scorer, sequences), cost={"seconds": seconds})

    return choose_and_measure(ctx, fit, TRIALS, sequences, measure)


def linear_scorer(sequences: LeaveTwoOut, weights: np.ndarray):
    """Scores = history row times weights [V, V]."""
    return lambda split, positions: history_matrix(sequences, split, positions) @ weights


def choose_and_measure(
    ctx: Context, fit, trials, sequences: LeaveTwoOut, measure: Measure = measure_next_item
) -> Measurement:
    """Best trial by validation ndcg@10 and its test measurement."""
    best, records = best_of_trials(ctx, fit, "ndcg@10", trials=trials)
    measured = measure(best.model, sequences)
    measured.validation, measured.hyperparameters, measured.trials = best.validation, best.hyperparameters, records
    measured.cost |= best.cost
    return measured
