"""How much the order inside a second decides the numbers: next-item baselines under two orders of the same ratings.

canonical: (user, timestamp, hash); item-id: (user, timestamp, item id). Half of the consecutive ratings of
MovieLens-100K share their second, and item ids follow release date and popularity, so the second order leaks.
Prints a table and writes it as JSON. A new model is one function LeaveTwoOut -> metrics in MODELS.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from auto_research.baselines.ease import ease_weights
from auto_research.baselines.itemknn import interaction_matrix, linear_scorer
from auto_research.data.interactions import Interactions, load_interactions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import measure_next_item, validation_metrics
from auto_research.runtime.errors import guard
from auto_research.runtime.files import write_json
from auto_research.runtime.paths import results_dir

STRENGTHS = (100.0, 150.0, 200.0, 300.0)


def item_id_order(data: Interactions) -> Interactions:
    """The same ratings ordered by (user, timestamp, item id)."""
    order = np.lexsort((data.item, data.timestamp, data.user))
    return data.edited(item=data.item[order], rating=data.rating[order])


def popularity(split: LeaveTwoOut) -> dict[str, float]:
    """Test metrics of train counts."""
    counts = split.popularity().astype(np.float64)
    return measure_next_item(lambda _, positions: np.tile(counts, (len(positions), 1)), split).metrics


def ease(split: LeaveTwoOut) -> dict[str, float]:
    """Test metrics of EASE with lambda chosen by validation ndcg@10."""
    matrix = interaction_matrix(split)
    scorers = [linear_scorer(split, ease_weights(matrix, strength)) for strength in STRENGTHS]
    return measure_next_item(max(scorers, key=lambda s: validation_metrics(s, split)["ndcg@10"]), split).metrics


MODELS = {"popularity": popularity, "ease": ease}


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=results_dir() / "data/movielens-100k/canonical")
    parser.add_argument("--out", type=Path, default=results_dir() / "benchmarks/order_leak.json")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    options = parser.parse_args()
    data = load_interactions(options.data)
    same = (data.user[1:] == data.user[:-1]) & (data.timestamp[1:] == data.timestamp[:-1])
    orders = {"canonical": data, "item-id": item_id_order(data)}
    rows = []
    for order, interactions in orders.items():
        split = LeaveTwoOut.build(interactions)
        for name in options.models:
            metrics = MODELS[name](split)
            rows.append({"order": order, "model": name, **metrics})
            print(f"{order:10} {name:11} ndcg@10 {metrics['ndcg@10']:.4f}  hit@10 {metrics['hit@10']:.4f}")
    write_json(options.out, {"shared_second": float(same.mean()), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
