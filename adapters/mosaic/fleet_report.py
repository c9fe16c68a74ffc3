"""What is measured about a fleet behind a trained downstream model: surfaces, zero-out, staleness, redundancy, serving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from adapters.mosaic.data import SURFACES, MosaicTable, item_surfaces
from adapters.mosaic.downstream import Downstream
from adapters.mosaic.relations import mean_cosine, predictability
from auto_research.data.requests import RequestTable
from auto_research.evaluate.ctr import RatedScores, model_scorer, rated_batches, score_rated
from auto_research.evaluate.serving import TIMED, WARM_UP, median_seconds
from auto_research.experiment.contract import Measurement
from auto_research.metrics.ctr import row_logloss
from auto_research.runtime.errors import RunFailure

TIMED_REQUESTS = 256
CACHE_TOLERANCE = 1e-5


def normalised_entropy(label: np.ndarray, score: np.ndarray) -> float:
    """Logloss divided by the entropy of the base rate of the same rows; 1 is a constant prediction. 0 labels of a kind: 1."""
    rate = float(np.mean(label))
    if rate in (0.0, 1.0):
        return 1.0
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return float(row_logloss(label, score).mean() / entropy)


def test_items(table: RequestTable) -> np.ndarray:
    """int64 items of the rated test rows in the order of `measure_requests`."""
    requests, index = table.requests("test"), table.index
    size = index.stop[requests] - index.start[requests]
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    return table.interactions.item[np.repeat(index.start[requests], size) + within].astype(np.int64)


def add_surfaces(measured: Measurement, table: RequestTable) -> Measurement:
    """Per-surface AUC and NE, their means over surfaces, and NE over all rows."""
    from sklearn.metrics import roc_auc_score

    label, score = np.asarray(measured.rows.label), np.asarray(measured.rows.score)
    surface = item_surfaces(table.item_genres, table.genre_names)[test_items(table)]
    measured.metrics["ne"] = normalised_entropy(label, score)
    aucs, entropies = {}, {}
    for position, name in enumerate(SURFACES):
        rows = surface == position
        if len(np.unique(label[rows])) == 2:
            aucs[f"auc_{name}"] = float(roc_auc_score(label[rows], score[rows]))
            entropies[f"ne_{name}"] = normalised_entropy(label[rows], score[rows])
    measured.metrics |= aucs | entropies
    if aucs:
        measured.metrics["mean_surface_auc"] = float(np.mean(list(aucs.values())))
        measured.metrics["mean_surface_ne"] = float(np.mean(list(entropies.values())))
    return measured


def zero_out(
    model: Downstream, table: MosaicTable, means: np.ndarray, history: int, device: torch.device
) -> list[float]:
    """dNE of every specialist: NE with its vector replaced by means[k], minus NE; no retraining."""
    batches, score = rated_batches(table, "test", history=history), model_scorer(model, device)

    def entropy(changed: list) -> float:
        rows: RatedScores = score_rated(score, changed)
        return normalised_entropy(rows.label, rows.score)

    plain, found = entropy(batches), []
    for k, mean in enumerate(means):
        changed = []
        for batch in batches:
            vectors = batch.vectors.clone()
            vectors[:, k] = torch.from_numpy(mean)
            changed.append(replace(batch, vectors=vectors))
        found.append(entropy(changed) - plain)
    return found


def fleet_report(
    model: Downstream,
    table: MosaicTable,
    names: list[str],
    history: int,
    device: torch.device,
    *,
    timing: tuple[int, int] = (WARM_UP, TIMED),
) -> dict[str, Any]:
    """extra of an arm with exported vectors; its "metrics" and "cost" are moved by the caller. table: reading a cache.

    timing: warm-up and timed runs.
    """
    from sklearn.metrics import roc_auc_score

    vectors, train, test = table.vectors, table.requests("train"), table.requests("test")
    means = vectors[train].astype(np.float64).mean(axis=0).astype(np.float32)  # (K, D)
    lost = zero_out(model, table, means, history, device)
    stale_table = table.reading(vectors, stale=True)
    stale = score_rated(model_scorer(model, device), rated_batches(stale_table, "test", history=history))
    metrics = {"zero_out_dne": float(np.mean(lost)), "stale_auc": float(roc_auc_score(stale.label, stale.score))}
    extra: dict[str, Any] = {"zero_out": dict(zip(names, lost, strict=True))}
    if len(names) > 1:
        metrics["redundancy_cosine"] = mean_cosine(vectors[test])
        metrics["redundancy_cosine_squared"] = mean_cosine(vectors[test], squared=True)
        user, chosen = table.request_user[test], vectors[test]
        old = [chosen[:, :k].reshape(len(test), -1) for k in range(1, len(names))]
        scores = [predictability(chosen[:, k], before, user) for k, before in enumerate(old, start=1)]
        metrics["redundancy_r2"] = float(np.mean(scores))
        extra["redundancy_r2"] = dict(zip(names[1:], scores, strict=True))
    return extra | {"metrics": metrics, "cost": serving_cost(model, table, names, history, device, timing)}


@torch.no_grad()
def serving_cost(
    model: Downstream,
    table: MosaicTable,
    names: list[str],
    history: int,
    device: torch.device,
    timing: tuple[int, int] = (WARM_UP, TIMED),
) -> dict[str, Any]:
    """Cached against recomputed downstream logits, and the speed of both and of the export, batches included.

    Raises RunFailure where the two logits differ by more than 1e-5 (of the largest logit, if that is above 1) on CPU.
    """
    chosen = table.requests("test")[:TIMED_REQUESTS]
    batch = table.batch(chosen, history=history).to(device)
    fresh = replace(batch, vectors=None)
    model.eval()
    cached, recomputed = model(batch), model(fresh)
    difference = float((cached - recomputed).abs().max())
    allowed = CACHE_TOLERANCE * max(1.0, float(recomputed.abs().max()))
    if device.type == "cpu" and difference > allowed:
        raise RunFailure(f"cached logits differ from recomputed ones by {difference:.2e}, more than {allowed:.2e}")

    def export() -> None:
        model.vectors(replace(table.batch(chosen, history=history).to(device), vectors=None))

    cost: dict[str, Any] = {
        "cache_difference": difference,
        "bytes_per_user": int(table.vectors.shape[1] * table.vectors.shape[2] * 4),
        "cached_pairs_per_s": batch.pairs() / median_seconds(lambda: model(batch), device, *timing),
        "uncached_pairs_per_s": batch.pairs() / median_seconds(lambda: model(fresh), device, *timing),
        "export_requests_per_s": len(chosen) / median_seconds(export, device, *timing),
    }
    for name, tower in zip(names, model.fleet, strict=True):
        cost[f"params_{name}"] = sum(p.numel() for p in tower.parameters())
    return cost
