"""EASE (arXiv:1905.03375): the closed-form linear autoencoder with a zero diagonal.

P = (X^T X + lambda I)^-1,   B_ij = -P_ij / P_jj for i != j,   B_jj = 0,   scores = X B
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import linalg, sparse

from auto_research.baselines.itemknn import choose_and_measure, interaction_matrix, linear_scorer
from auto_research.evaluate.next_item import Measure, measure_next_item, validation_metrics
from auto_research.experiment.contract import Measurement
from auto_research.train.next_item import load_sequences
from auto_research.train.tuning import Trained

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

TRIALS = tuple({"lambda": value} for value in (100.0, 150.0, 200.0, 300.0))


def ease_weights(matrix: sparse.csr_matrix, strength: float) -> np.ndarray:
    """B [V, V] of a binary users x items matrix, float64. `strength` is lambda > 0."""
    gram = (matrix.T @ matrix).toarray()
    gram[np.diag_indices_from(gram)] += strength
    inverse = linalg.inv(gram, overwrite_a=True, check_finite=False)
    weights = inverse / -np.diag(inverse)[None, :]
    np.fill_diagonal(weights, 0.0)
    return weights


def run(ctx: Context, *, device: torch.device, measure: Measure = measure_next_item) -> Measurement:
    """Choose lambda by validation ndcg@10, then measure. CPU only, `device` is not used.

    measure: (scorer, sequences) -> Measurement, where an adapter wants further metrics.
    """
    sequences = load_sequences(ctx)
    matrix = interaction_matrix(sequences)

    def fit(hyperparameters: dict, _) -> Trained:
        started = time.perf_counter()
        scorer = linear_scorer(sequences, ease_weights(matrix, float(hyperparameters["lambda"])))
        seconds = time.perf_counter() - started
        return Trained(scorer, validation_metrics(scorer, sequences), cost={"seconds": seconds})

    return choose_and_measure(ctx, fit, TRIALS, sequences, measure)
