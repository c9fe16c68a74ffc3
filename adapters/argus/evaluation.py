"""What is measured: retrieval of the first liked event of a part, feedback on all its events, and pairs inside a day."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from adapters.argus.events import EventBatch, EventSplit, part_windows, target_windows
from adapters.argus.model import LIKE, Argus
from adapters.argus.training import with_pairs
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.ctr import row_logloss
from auto_research.metrics.ranking import rank_of_target, ranking_metrics, top_items

Scorer = Callable[[str, np.ndarray], np.ndarray]
CHUNK = 64
TOP = 10
RERANKED = 100


def known(data: EventSplit, split: str) -> np.ndarray:
    """int64 positions of the users that have a target in `split`."""
    return np.flatnonzero(data.target(split) >= 0)


def ranked(score: Scorer, data: EventSplit, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, ranks of their targets (1 = best, ties against them) and top items [U, 10]."""
    positions, item = known(data, split), data.interactions.item
    ranks, tops = [], []
    for start in range(0, len(positions), CHUNK):
        chosen = positions[start : start + CHUNK]
        scores, seen = np.asarray(score(split, chosen)), data.seen(split, chosen)
        ranks.append(rank_of_target(scores, item[data.target(split)[chosen]], seen))
        tops.append(top_items(scores, seen, TOP))
    return positions, np.concatenate(ranks), np.concatenate(tops)


def retrieval(score: Scorer, data: EventSplit) -> Measurement:
    """ndcg@10, hit@10, mrr, head_share@10, coverage@10 of the test targets."""
    began = time.perf_counter()
    positions, ranks, tops = ranked(score, data, "test")
    seconds = time.perf_counter() - began
    metrics, values = ranking_metrics(ranks, tops, data.head_items(), data.n_items)
    ids = data.users[positions]
    units = {name: Units("user", ids, found) for name, found in values.items()}
    return Measurement(metrics, units=units, cost={"users_per_s": len(ids) / max(seconds, 1e-9)})


def ndcg(score: Scorer, data: EventSplit, split: str) -> float:
    _, ranks, _ = ranked(score, data, split)
    return float(np.where(ranks <= TOP, 1 / np.log2(1.0 + ranks), 0.0).mean())


def model_scorer(model: Argus, data: EventSplit, device: torch.device) -> Scorer:
    """Retrieval scores [B, n_items + 1] of the targets' users."""

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        batch = target_windows(data, split, positions, model.config.context).to(device)
        model.eval()
        with torch.no_grad():
            return model.catalogue(model.encode(batch), last_places(batch)).float().cpu().numpy()

    return score


def last_places(batch: EventBatch) -> torch.Tensor:
    """Flat places of the last event of every window, int64[B]."""
    windows, length = batch.shape
    return torch.arange(1, windows + 1, device=batch.item.device) * length - 1


def tower_scorer(model: Argus, data: EventSplit, device: torch.device, delay: str = "none") -> Scorer:
    """Scores g_u . g_i of the two towers from states of a delay."""

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        batch = target_windows(data, split, positions, model.config.context, delay=delay).to(device)
        model.eval()
        with torch.no_grad():
            done = model.encode(batch)
            user = model.user_vectors(done, batch, last_places(batch))
            return (user @ model.object_vectors(done).t()).float().cpu().numpy()

    return score


def reranked(first: Scorer, model: Argus, data: EventSplit, device: torch.device) -> Scorer:
    """The 100 best of `first` among items not seen, in the order of p(like) of the feedback head."""

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        kept = top_items(first(split, positions), data.seen(split, positions), RERANKED)
        batch = target_windows(data, split, positions, model.config.context).to(device)
        model.eval()
        with torch.no_grad():
            like = model.like_of_all(model.encode(batch), last_places(batch)).cpu().numpy().astype(np.float64)
        scores = np.full_like(like, -1e9)
        np.put_along_axis(scores, kept, np.take_along_axis(like, kept, axis=1), axis=1)
        return scores

    return score


def part_batches(data: EventSplit, split: str, model: Argus, device: torch.device, delay: str) -> Iterator[EventBatch]:
    """Windows with losses on a part's events and all its pairs with different like labels, `CHUNK` users at a time."""
    users = np.unique(data.interactions.user[data.rows(split)]).astype(np.int64)
    for start in range(0, len(users), CHUNK):
        batch = part_windows(data, split, users[start : start + CHUNK], model.config.context, delay=delay)
        stop = _stops(data, split, users[start : start + CHUNK])
        yield with_pairs(batch, data, stop, None, only_like=True).to(device)


def _stops(data: EventSplit, split: str, users: np.ndarray) -> np.ndarray:
    """Row after the last event of the part of each user."""
    rows = data.rows(split)
    owner = data.interactions.user[rows]
    return rows[np.searchsorted(owner, users, side="right") - 1] + 1


@torch.no_grad()
def feedback_and_nip(model: Argus, data: EventSplit, split: str, device: torch.device) -> dict[str, float]:
    """feedback_ne (log loss of like over the entropy of its rate) and nip_loss (full catalogue) over a part's events."""
    model.eval()
    label, probability, nip, events = [], [], 0.0, 0
    for batch in part_batches(data, split, model, device, "none"):
        done = model.encode(batch)
        if model.config.fp:
            said = model.feedback(done, batch.at, batch.item.flatten()[batch.at])
            label.append((batch.rating.flatten()[batch.at] >= LIKE).cpu().numpy())
            probability.append(torch.sigmoid(said.like).cpu().numpy())
        if model.config.nip:
            nip += float(model.nip_loss(done, batch, torch.zeros(0), full=True)) * len(batch.at)
            events += len(batch.at)
    found = {"nip_loss": nip / events} if model.config.nip else {}
    if model.config.fp:
        found["feedback_ne"] = normalised_entropy(np.concatenate(label), np.concatenate(probability))
    return found


def normalised_entropy(label: np.ndarray, probability: np.ndarray) -> float:
    """Mean log loss over the entropy of the mean label: 1 for a constant guess of the right rate."""
    rate = float(np.clip(label.mean(), 1e-6, 1 - 1e-6))
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    return float(row_logloss(label, probability).mean()) / entropy


@torch.no_grad()
def pair_accuracy(
    model: Argus, data: EventSplit, split: str, device: torch.device, delay: str = "request"
) -> tuple[np.ndarray, np.ndarray]:
    """Users with a pair, and the share of their pairs (different like labels, less than a day apart) ordered rightly.

    Two-tower models score a pair from one delayed state; the others each event by its like logit, or by its next-item
    score when they have no feedback head, from the event's own state. Ties count half.
    """
    model.eval()
    users = np.unique(data.interactions.user[data.rows(split)]).astype(np.int64)
    owner, right = [], []
    for number, batch in enumerate(part_batches(data, split, model, device, delay)):
        done = model.encode(batch)
        if model.config.tower:
            better, worse = model.pair_scores(done, batch)
        else:
            better, worse = (_event_scores(model, done, batch, at) for at in (batch.better, batch.worse))
        right.append(((better > worse).float() + 0.5 * (better == worse).float()).cpu().numpy())
        owner.append(users[number * CHUNK + (batch.better // batch.shape[1]).cpu().numpy()])
    return mean_by_user(np.concatenate(owner), np.concatenate(right))


def _event_scores(model: Argus, done, batch: EventBatch, at: torch.Tensor) -> torch.Tensor:
    item = batch.item.flatten()[at]
    if model.config.fp:
        return model.feedback(done, at, item).like
    return model.catalogue(done, at).gather(1, item.unsqueeze(1)).squeeze(1)


def mean_by_user(owner: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Users and the mean value of each."""
    users, place = np.unique(owner, return_inverse=True)
    return users, np.bincount(place, weights=value) / np.bincount(place)
