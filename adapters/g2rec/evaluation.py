"""Metrics of G2Rec: the full catalogue, and the paper's one positive among 99 uniform negatives."""

from __future__ import annotations

import numpy as np

from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Scorer, measure_next_item
from auto_research.evaluate.next_list import Lists
from auto_research.experiment.contract import Measurement
from auto_research.runtime.seeds import stable_rng

NEGATIVES = 99


def sampled_negatives(sequences: LeaveTwoOut) -> np.ndarray:
    """int64[U, 99] items of the catalogue that a user has not rated and that are not the test target, the same for all
    seeds and arms; 0 where a user has fewer."""
    drawn = np.zeros((len(sequences), NEGATIVES), dtype=np.int64)
    for row, user in enumerate(sequences.users.tolist()):
        known = np.append(sequences.history("test", row), sequences.test_target[row])
        able = np.setdiff1d(np.arange(1, sequences.n_items + 1), known)
        chosen = stable_rng("sampled-99", sequences.dataset, user).permutation(able)[:NEGATIVES]
        drawn[row, : len(chosen)] = chosen
    return drawn


def measure(score: Scorer, sequences: LeaveTwoOut) -> Measurement:
    """`measure_next_item` with ndcg and recall at 5 and 10, and sampled99_{ndcg@5, ndcg@10, hit@10, mrr}."""
    negatives, sampled = sampled_negatives(sequences), np.zeros(len(sequences))

    def watched(split: str, positions: np.ndarray) -> np.ndarray:
        scores = np.asarray(score(split, positions))
        own = scores[np.arange(len(positions)), sequences.test_target[positions]][:, None]
        other = np.take_along_axis(scores, negatives[positions], axis=1)
        sampled[positions] = 1 + (~(other < own) & (negatives[positions] > 0)).sum(1)
        return scores

    def among_sampled(lists: Lists) -> dict[str, np.ndarray]:
        drawn = lists._replace(ranks=sampled)
        values = {f"sampled99_ndcg@{k}": drawn.ndcg(k) for k in (5, 10)}
        return values | {"sampled99_hit@10": drawn.recall(10), "sampled99_mrr": 1.0 / sampled}

    return measure_next_item(watched, sequences, at=(5, 10), also=among_sampled)
