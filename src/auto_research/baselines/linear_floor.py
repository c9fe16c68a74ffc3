"""Linear floors of an adapter that has its own split: scores = known items times a [V, V] matrix, chosen by validation.

Weights are `ease.ease_weights` or `itemknn.cosine_neighbours` of the known items of all users, over everything rated or
over the liked items alone (`inputs` of a trial).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from auto_research.baselines.ease import ease_weights
from auto_research.baselines.itemknn import cosine_neighbours
from auto_research.data.interactions import Interactions
from auto_research.data.prefix import LIKE_RATING
from auto_research.experiment.contract import Measurement
from auto_research.train.tuning import Trained, best_of_trials

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

Scorer = Callable[[str, np.ndarray], np.ndarray]
INPUTS = ("positive", "all")
KNN_TRIALS = tuple({"neighbours": k, "inputs": inputs} for k in (50, 100, 200) for inputs in INPUTS)
EASE_TRIALS = tuple({"lambda": value, "inputs": inputs} for value in (200.0, 400.0, 800.0) for inputs in INPUTS)
KNN_SHRINK = 20.0


def known_items(data: Interactions, start: np.ndarray, stop: np.ndarray, everything: bool) -> sparse.csr_matrix:
    """Binary float64[B, n_items + 1] of the items in rows [start_b, stop_b), or of the liked ones among them."""
    rows = [np.arange(a, b) for a, b in zip(start, stop, strict=True)]
    if not everything:
        rows = [r[data.rating[r] >= LIKE_RATING] for r in rows]
    owner = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    matrix = sparse.csr_matrix(
        (np.ones(len(owner)), (owner, data.item[np.concatenate(rows)])), shape=(len(rows), data.n_items + 1)
    )
    matrix.data[:] = 1.0
    return matrix


def choose(
    ctx: Context,
    kind: str,
    *,
    train: Callable[[bool], sparse.csr_matrix],
    history: Callable[[str, np.ndarray, bool], sparse.csr_matrix],
    validate: Callable[[Scorer], dict[str, float]],
    measure: Callable[[Scorer], Measurement],
    key: str = "ndcg@10",
) -> Measurement:
    """Measure the best linear floor of a kind, 'ease' or 'itemknn'; the budget's `floor_trials` caps the trials.

    train: everything -> the matrix that weights are fitted on.  history: (split, positions, everything) -> known items.
    """

    def fit(hyperparameters: dict[str, Any], _) -> Trained:
        began = time.perf_counter()
        everything = hyperparameters["inputs"] == "all"
        matrix = train(everything)
        if kind == "ease":
            weights = ease_weights(matrix, hyperparameters["lambda"])
        else:
            weights = cosine_neighbours(matrix, hyperparameters["neighbours"], KNN_SHRINK)

        def score(split: str, positions: np.ndarray) -> np.ndarray:
            return history(split, positions, everything) @ weights

        seconds = time.perf_counter() - began
        return Trained(score, validate(score), cost={"seconds": seconds})

    trials = (EASE_TRIALS if kind == "ease" else KNN_TRIALS)[: ctx.budget.get("floor_trials")]
    best, records = best_of_trials(ctx, fit, key, trials=trials)
    measured = measure(best.model)
    measured.validation, measured.hyperparameters, measured.trials = best.validation, best.hyperparameters, records
    measured.cost |= best.cost
    return measured
