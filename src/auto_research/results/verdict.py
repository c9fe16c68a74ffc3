"""Differences between two arms with paired intervals, and what may be claimed from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from auto_research.metrics.bootstrap import (
    Interval,
    auc_interval,
    interval_mean,
    paired_auc,
    paired_cluster_mean,
    paired_mean,
)
from auto_research.metrics.ctr import row_logloss

LOWER_IS_BETTER = frozenset(
    {
        "logloss",
        "loss",
        "bits_per_byte",
        "perplexity",
        "rmse",
        "mae",
        "head_share@10",
        "error",
        "latency_ms",
        "ne",
        "feedback_ne",
        "nip_loss",
    }
    | {"ntp_val_loss", "val_ntp_loss", "dislike_hit@10", "max_grad_norm_rl", "kl_to_sft", "short_lists", "profile_kl"}
    | {"distill_mae_rollout", "distill_mae_impression", "reconstruction_mse", "orthogonality_error"}
    | {"redundancy_cosine", "redundancy_cosine_squared", "redundancy_r2", "mean_surface_ne"}
)
MIN_SEEDS = 3
NEVER_A_RESULT = ("tiny", "smoke")


@dataclass(frozen=True)
class Difference:
    """arm minus against on one metric; `low` and `high` are None where no per-unit contributions exist."""

    delta: float
    relative: float | None
    low: float | None
    high: float | None
    method: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def higher_is_better(metric: str, primary: str, direction: str) -> bool:
    """Whether larger values win; the card decides for its primary metric."""
    return direction == "max" if metric == primary else metric not in LOWER_IS_BETTER


def mean_metric(records: dict[int, dict], metric: str) -> float | None:
    """Mean over seeds, None when a seed lacks the metric."""
    values = [record["measurement"]["metrics"].get(metric) for record in records.values()]
    return None if not values or None in values else float(np.mean(values))


def difference(arm: dict[int, dict], against: dict[int, dict], metric: str) -> Difference | None:
    """Compare two arms over their shared seeds; None when a seed lacks the metric or no seed is shared.

    arm, against: records by seed. Contributions of a unit are averaged over the shared seeds first, so that the interval
    is about the sampled units and one lucky seed does not count as evidence.
    """
    seeds = sorted(set(arm) & set(against))
    a, b = ([side[seed]["measurement"] for seed in seeds] for side in (arm, against))
    if not seeds or any(metric not in m["metrics"] for m in a + b):
        return None
    means = [float(np.mean([m["metrics"][metric] for m in side])) for side in (a, b)]
    delta = means[0] - means[1]
    interval, method = _interval([a, b], metric)
    return Difference(
        delta=delta,
        relative=delta / abs(means[1]) if means[1] else None,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        method=method,
    )


def own_interval(records: dict[int, dict], metric: str) -> dict[str, Any] | None:
    """{low, high, method} of one arm's metric over its seeds, or None where no per-unit contributions exist."""
    measured = [record["measurement"] for record in records.values()]
    if not measured or any(metric not in m["metrics"] for m in measured):
        return None
    interval, method = _interval([measured], metric)
    return None if interval is None else {"low": interval.low, "high": interval.high, "method": method}


def relative_improvement(arm: dict[int, dict], against: dict[int, dict]) -> Difference | None:
    """RelaImpr of DIN (arXiv:1706.06978, equation 11) in percent: ((AUC - 0.5) / (AUC_base - 0.5) - 1) * 100.

    arm, against: records by seed, AUC averaged over the shared seeds. None without a shared seed, or for a base at 0.5.
    """
    shared = set(arm) & set(against)
    auc, base = (mean_metric({seed: side[seed] for seed in shared}, "auc") for side in (arm, against))
    if auc is None or base is None or base == 0.5:
        return None
    gain = ((auc - 0.5) / (base - 0.5) - 1) * 100
    return Difference(gain, None, None, None, "per cent, from the mean AUC of the shared seeds")


def verdict(
    found: Difference | None, *, tier: str, shared_seeds: int, higher: bool, floors_not_beaten: list[str]
) -> tuple[str, str]:
    """(smoke | improves | no-difference | worse, the reason in words) for one comparison on the primary metric."""
    if found is None:
        return "smoke", "the two arms share no seed with the primary metric"
    if tier in NEVER_A_RESULT:
        return "smoke", f"tier {tier} is never a result"
    if shared_seeds < MIN_SEEDS:
        return "smoke", f"{shared_seeds} shared seed(s), a claim needs {MIN_SEEDS}"
    if found.low is None:
        return "no-difference", f"no interval: {found.method}"
    low, high = (found.low, found.high) if higher else (-found.high, -found.low)
    if high < 0:
        return "worse", "the interval lies on the losing side of zero"
    if low <= 0:
        return "no-difference", "the interval holds zero"
    if floors_not_beaten:
        return "no-difference", f"the interval excludes zero, but the arm does not beat {', '.join(floors_not_beaten)}"
    return "improves", "the interval excludes zero and every floor is beaten"


def _interval(sides: list[list[dict]], metric: str) -> tuple[Interval | None, str]:
    """Interval of one side's metric, or of the difference of two; a side is the measurements of an arm's seeds."""
    everything = [m for side in sides for m in side]
    if all(metric in m["units"] for m in everything):
        return _from_units([[m["units"][metric] for m in side] for side in sides])
    if metric in ("auc", "logloss") and all(m["rows"] for m in everything):
        return _from_rows([[m["rows"] for m in side] for side in sides], metric)
    return None, "no per-unit contributions were recorded"


def _from_units(sides: list[list[dict]]) -> tuple[Interval | None, str]:
    everything = [units for side in sides for units in side]
    ids = everything[0]["ids"]
    if any(units["ids"] != ids for units in everything):
        common = set(ids).intersection(*(units["ids"] for units in everything))
        ids = [unit for unit in ids if unit in common]
    if not ids:
        return None, "the arms share no unit"
    values = [np.mean([_ordered(units, ids) for units in side], axis=0) for side in sides]
    interval = interval_mean(*values) if len(values) == 1 else paired_mean(*values)
    return interval, f"{_kind(sides)} over {len(ids)} units of kind {everything[0]['kind']}"


def _kind(sides: list) -> str:
    return "paired bootstrap" if len(sides) > 1 else "bootstrap"


def _ordered(units: dict, ids: list) -> np.ndarray:
    if units["ids"] == ids:
        return np.asarray(units["values"], dtype=np.float64)
    at = dict(zip(units["ids"], units["values"], strict=True))
    return np.asarray([at[unit] for unit in ids], dtype=np.float64)


def _from_rows(sides: list[list[dict]], metric: str) -> tuple[Interval | None, str]:
    everything = [rows for side in sides for rows in side]
    user, label = everything[0]["user"], everything[0]["label"]
    if any(rows["user"] != user or rows["label"] != label for rows in everything):
        return None, "the arms scored different rows"
    scores = [np.asarray([rows["score"] for rows in side], dtype=np.float64) for side in sides]
    if metric == "auc":
        if len(set(label)) < 2:
            return None, "only one label occurs"
        interval = auc_interval(user, label, *scores) if len(scores) == 1 else paired_auc(user, label, *scores)
        return interval, f"{_kind(sides)} over users, AUC averaged over seeds"
    loss = [np.mean([row_logloss(label, score) for score in side], axis=0) for side in scores]
    loss += [np.zeros_like(loss[0])] * (2 - len(loss))
    return paired_cluster_mean(user, *loss), f"{_kind(sides)} over users"
