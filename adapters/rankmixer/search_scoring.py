"""Fitness of the search: composite of full-catalogue NDCG@10 and AUC of the like head, five slices, user bootstraps.

Three views of the same requests are scored: as they are, with the last four events only, and with the personal fields
missing (the last two for the first `slice_users` tasks only, when the budget says so). Subset slices reuse the first view;
an empty slice is None, never replaced by the full set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from adapters.rankmixer.model import SUMMARIES, RankMixer
from auto_research.baselines.prefix import RECENT
from auto_research.data.requests import CatalogueTasks, RequestBatch, RequestTable
from auto_research.evaluate.ctr import Scorer, joint_score, rank_catalogue, rated_batches, sigmoid, split_pairs
from auto_research.experiment.search import Evaluation
from auto_research.metrics.bootstrap import WeightedAuc
from auto_research.metrics.ctr import row_logloss, user_auc
from auto_research.metrics.ranking import rank_of_target, ranking_metrics, top_items
from auto_research.runtime.errors import NonFinite, RunFailure
from auto_research.runtime.seeds import stable_rng

RECENT_EVENTS = 4
VIEWS = ("overall", "recent_only", "restricted")
LIKE = 1


@dataclass(frozen=True)
class View:
    """Scores of one view: rated rows (user, item int64[N], label bool[N], score float64[N]) and ranks of the tasks."""

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    score: np.ndarray
    rank: np.ndarray
    top: np.ndarray


class ThreeViews:
    """Logits of all three views of a batch."""

    def __init__(self, model: RankMixer) -> None:
        self.model = model.eval()
        encoder = model.input.encoder
        user, request, event, pair = encoder.user_width, encoder.request_width, encoder.event_width, encoder.pair_width
        mask = torch.ones(request + SUMMARIES * event + pair)
        mask[:user] = 0  # user fields
        mask[request - encoder.field : request + SUMMARIES * event] = 0  # user statistics and the sequence
        mask[-encoder.field :] = 0  # cross features
        self.mask = mask.to(next(model.parameters()).device)

    def prepared(self, batch: RequestBatch) -> tuple:
        """Request-level state of the batch as it is and with its last events only."""
        recent = last_events(batch, RECENT_EVENTS)
        return self.model.prepare(batch), self.model.prepare(recent)

    def __call__(self, state: tuple, batch: RequestBatch, views: int = len(VIEWS)) -> list[Tensor]:
        full = self.model.input.score(state[0], batch)
        inputs = [full] if views == 1 else [full, self.model.input.score(state[1], batch), full * self.mask]
        return [self.model.rank(self.model.tokenizer(e)) for e in inputs]


def last_events(batch: RequestBatch, count: int) -> RequestBatch:
    """The batch with its newest `count` history slots only (same logits as masking the others, at less work)."""
    names = ("hist_item", "hist_rating", "hist_age", "hist_mask")
    return replace(batch, **{name: getattr(batch, name)[:, -count:] for name in names})


def score_views(
    scorer: ThreeViews,
    table: RequestTable,
    split: str,
    tasks: CatalogueTasks,
    *,
    history: int,
    chunk: int,
    slice_users: int | None,
    device: torch.device,
    progress: Callable[..., None],
) -> dict[str, View]:
    """Score rated rows and the full catalogue of every task in all views; user-side work is done once per request."""
    rated = rated_batches(table, split, history=history)
    with torch.no_grad():
        logits = [[] for _ in VIEWS]
        for batch in rated:
            batch = batch.to(device)
            for kept, value in zip(logits, scorer(scorer.prepared(batch), batch), strict=True):
                kept.append(value[:, LIKE].float().cpu().numpy())
        placed = [Placed() for _ in VIEWS]
        items = np.arange(1, table.interactions.n_items + 1)
        for number in range(len(tasks)):
            batch = table.score_batch(int(tasks.request[number]), items, history=history).to(device)
            state = scorer.prepared(batch)
            views = len(VIEWS) if slice_users is None or number < slice_users else 1
            parts = [scorer(state, part, views) for part in split_pairs(batch, chunk)]
            for view in range(views):
                placed[view].add(torch.cat([part[view] for part in parts]).float().cpu().numpy(), tasks, number)
            progress(number + 1, len(tasks))
    columns = _columns(rated)
    return {
        name: View(
            *columns,
            sigmoid(np.concatenate(logits[i])),
            np.concatenate(placed[i].ranks),
            np.concatenate(placed[i].tops),
        )
        for i, name in enumerate(VIEWS)
    }


class Placed:
    """Rank and ten best items of one task after the other."""

    def __init__(self) -> None:
        self.ranks: list[np.ndarray] = []
        self.tops: list[np.ndarray] = []

    def add(self, logits: np.ndarray, tasks: CatalogueTasks, number: int) -> None:
        """logits [n_items, 3] of task ``number``; raises NonFinite."""
        scores = np.concatenate([[0.0], joint_score(logits)])[None]
        if np.isnan(scores).any():
            raise NonFinite("a catalogue score is NaN")
        excluded = tasks.excluded[number : number + 1]
        self.ranks.append(rank_of_target(scores, tasks.target[number : number + 1], excluded))
        self.tops.append(top_items(scores, excluded))


def _columns(batches: list[RequestBatch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(
        np.concatenate([getattr(batch, name).numpy() for batch in batches]).astype(kind)
        for name, kind in (("user_of_pair", np.int64), ("item", np.int64), ("like", bool))
    )


def composite(ndcg: float | None, auc: float | None) -> float | None:
    """0.5*NDCG@10 + 0.5*AUC; None when either is missing."""
    return None if ndcg is None or auc is None else 0.5 * ndcg + 0.5 * auc


def evaluate_split(
    scorer: ThreeViews,
    table: RequestTable,
    split: str,
    *,
    history: int,
    users: int | None,
    chunk: int,
    resamples: int,
    slice_users: int | None,
    device: torch.device,
    progress: Callable[..., None],
) -> Evaluation:
    """Fitness, slice metrics, per-user contributions and bootstrap replicates on 'valid' or 'test'."""
    tasks = table.catalogue_tasks(split, users)
    if not len(tasks):
        raise RunFailure(f"no user of the {split} split has a liked item: raise users or evaluation_users")
    views = score_views(
        scorer,
        table,
        split,
        tasks,
        history=history,
        chunk=chunk,
        slice_users=slice_users,
        device=device,
        progress=progress,
    )
    overall = views["overall"]
    ranking, per_user = ranking_metrics(overall.rank, overall.top, table.head_items(), table.interactions.n_items)
    inside = user_auc(overall.user, overall.label, overall.score)
    auc = _auc(overall.label, overall.score)
    metrics: dict[str, float | None] = {
        **ranking,
        "auc": auc,
        "uauc": float(inside.auc.mean()) if len(inside.auc) else None,
        "logloss": float(row_logloss(overall.label, overall.score).mean()),
    }
    metrics |= slice_metrics(views, table, tasks)
    fitness = composite(ranking["ndcg@10"], auc)
    if fitness is None:
        raise RunFailure(f"the {split} rows hold one label only: AUC is undefined")
    slices = [metrics[f"{name}.ndcg@10"] for name in ("long_history", "tail_target", "recent_only", "restricted")]
    known = [value for value in (ranking["ndcg@10"], *slices) if value is not None]
    metrics["public_composite"] = float(np.mean(known))
    return Evaluation(
        fitness=fitness,
        metrics=metrics,
        units={"kind": "user"},
        replicates=bootstrap(overall, tasks.user, per_user["ndcg@10"], fitness, split, resamples),
        contributions={
            "ndcg@10": {"user": tasks.user.tolist(), "value": per_user["ndcg@10"].tolist()},
            "auc": {"user": inside.user.tolist(), "value": inside.auc.tolist()},
        },
    )


def _auc(label: np.ndarray, score: np.ndarray) -> float | None:
    if not np.isfinite(score).all():
        raise NonFinite("a predicted probability is not finite")
    value = WeightedAuc(label, score)(np.ones((1, len(label))))[0] if len(label) else np.nan
    return float(value) if np.isfinite(value) else None


def slice_metrics(views: dict[str, View], table: RequestTable, tasks: CatalogueTasks) -> dict[str, float | None]:
    """ndcg@10 and auc of long_history, tail_target (subsets of the first view), recent_only and restricted."""
    counts = table.train_counts()
    lengths = np.bincount(table.interactions.user[table.train_rows()], minlength=table.interactions.n_users + 1)
    members = np.unique(table.request_user[table.requests("train")])
    long = members[lengths[members] >= np.quantile(lengths[members], 0.75)] if len(members) else members
    tail = np.flatnonzero(counts <= np.median(counts[counts > 0]))
    view = views["overall"]
    subsets = {
        "long_history": (np.isin(view.user, long), np.isin(tasks.user, long)),
        "tail_target": (np.isin(view.item, tail), np.isin(tasks.target, tail)),
    }
    result: dict[str, float | None] = {}
    for name, (rows, chosen) in subsets.items():
        result |= _slice(name, view, rows, chosen)
    for name in VIEWS[1:]:
        result |= _slice(name, views[name], np.ones(len(view.user), bool), np.ones(len(views[name].rank), bool))
    return result


def _slice(name: str, view: View, rows: np.ndarray, tasks: np.ndarray) -> dict[str, float | None]:
    ndcg = None
    if tasks.any():
        rank = view.rank[tasks].astype(np.float64)
        ndcg = float(np.where(rank <= 10, 1.0 / np.log2(1.0 + rank), 0.0).mean())
    return {f"{name}.ndcg@10": ndcg, f"{name}.auc": _auc(view.label[rows], view.score[rows])}


def bootstrap(
    view: View, task_user: np.ndarray, ndcg: np.ndarray, fitness: float, split: str, resamples: int
) -> list[float]:
    """Composite over resampled users; the stream depends on split and users alone, so all genomes share resamples.

    A resample without both labels or without a task user gives the plain fitness.
    """
    users = np.union1d(view.user, task_user)
    rng = stable_rng("recommendation-rankmixer", "bootstrap", split, len(users))
    picks = rng.integers(0, len(users), size=(resamples, len(users)))
    counts = np.zeros((resamples, len(users)))
    np.add.at(counts, (np.arange(resamples)[:, None], picks), 1.0)
    task_weight = counts[:, np.searchsorted(users, task_user)]
    total = task_weight.sum(axis=1)
    mean = np.divide(task_weight @ ndcg, total, out=np.full(resamples, np.nan), where=total > 0)
    weighted = WeightedAuc(view.label, view.score)
    row_user = np.searchsorted(users, view.user)
    auc = np.concatenate([weighted(part[:, row_user]) for part in np.array_split(counts, max(1, resamples // 100))])
    value = 0.5 * mean + 0.5 * auc
    return np.where(np.isfinite(value), value, fitness).tolist()


def floor_metrics(scorer: Scorer, table: RequestTable, split: str, users: int | None) -> dict[str, float | None]:
    """fitness, ndcg@10, auc and head_share@10 of a scorer on CPU arrays of `RECENT` history slots."""
    batches = rated_batches(table, split, history=RECENT)
    _, _, label = _columns(batches)
    auc = _auc(label, sigmoid(np.concatenate([np.asarray(scorer(batch))[:, LIKE] for batch in batches])))
    ranked = rank_catalogue(
        scorer,
        table,
        table.catalogue_tasks(split, users),
        history=RECENT,
        device=torch.device("cpu"),
        chunk=table.interactions.n_items,
    )
    ranking, _ = ranking_metrics(ranked.rank, ranked.top, table.head_items(), table.interactions.n_items)
    return {
        "fitness": composite(ranking["ndcg@10"], auc),
        "ndcg@10": ranking["ndcg@10"],
        "auc": auc,
        "head_share@10": ranking["head_share@10"],
    }
