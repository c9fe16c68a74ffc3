"""Join the arms of an adapter: result.json, report.md and curves.svg. Imports no torch."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from auto_research.experiment.card import Card
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.layout import Layout
from auto_research.results import curves, markdown
from auto_research.results.records import Records, load_arms
from auto_research.results.verdict import (
    difference,
    higher_is_better,
    mean_metric,
    own_interval,
    relative_improvement,
    verdict,
)
from auto_research.runtime.files import read_json, write_json, write_text
from auto_research.runtime.schema import validate

SCHEMA_VERSION = 2


def write_result(
    card: Card,
    layout: Layout,
    fingerprints: Fingerprints,
    seeds: Iterable[int] | None = None,
    fingerprint: str | None = None,
) -> dict:
    """Write report.md, curves.svg and, last, result.json; return the result.

    Raises DataMissing or StaleOutput (nothing is written) when an arm is absent or not of the current code and data.
    """
    records = load_arms(card, layout, fingerprints, seeds)
    result = build_result(card, layout, records, fingerprint or fingerprints.compare(card.key))
    result["code"] |= git_commit(fingerprints.root)
    if minutes := cpu_minutes(card, layout, records):
        result["cpu_minutes"] = minutes
    validate(result, "result")
    write_text(layout.report, markdown.report(result))
    write_text(layout.curves, curves.svg(result, training_curves(card, records)))
    write_json(layout.result, result)
    return result


def build_result(card: Card, layout: Layout, records: Records, fingerprint: str) -> dict[str, Any]:
    """The result of schema v2 from records by arm and seed (all of the card's arms, or those that exist)."""
    primary, direction = card.primary, card.direction
    floors = {name: mean_metric(records[name], primary) for name in card.floors if name in records}
    comparisons = [_compare(card, layout.tier, records, floors, pair) for pair in card.comparisons]
    everything = [record for by_seed in records.values() for record in by_seed.values()]
    return {
        "schema_version": SCHEMA_VERSION,
        "adapter": card.key,
        "card": {
            "title": card.title,
            "paper": card.paper["id"],
            "organization": card.paper["organization"],
            "published": card.paper["published"],
            "fidelity": card.fidelity,
            "task": card.task,
            "problem": card.problem,
            "boundary": card.boundary,
            "paper_reported": card.paper_reported,
        },
        "tier": layout.tier,
        "dataset": layout.dataset,
        "data": _data(everything, card),
        "code": {
            "fingerprint": fingerprint,
            "stages": {name: next(iter(found.values()))["fingerprint"] for name, found in records.items() if found},
        },
        "runtime": _common([record["runtime"] for record in everything]),
        "seeds": sorted({record["seed"] for record in everything}),
        "metrics": {"primary": primary, "direction": direction, "also": card.metrics[1:]},
        "arms": {name: _arm(card, name, found, floors) for name, found in records.items() if found},
        "floors": floors,
        "comparisons": comparisons,
        "claim": comparisons[0]["verdict"],
        "claim_reason": f"{comparisons[0]['arm']} against {comparisons[0]['against']}: {comparisons[0]['reason']}",
    }


def cpu_minutes(card: Card, layout: Layout, records: Records) -> dict[str, float] | None:
    """CPU minutes of all arms and their artifacts, on the tuning seed and on all seeds; None where one is not known."""
    spent: dict[int, list[float | None]] = {}
    for by_seed in records.values():
        for seed, record in by_seed.items():
            spent.setdefault(seed, []).append(record["measurement"]["cost"].get("stage_cpu_seconds"))
    arms = {seed: [name for name, found in records.items() if seed in found] for seed in spent}
    for seed, values in spent.items():
        for artifact in card.artifact_order(arms[seed]):
            path = layout.output("artifact", artifact, seed)
            cost = read_json(path).get("cost", {}) if path.is_file() else {}
            values.append(cost.get("stage_cpu_seconds"))
    if not spent or any(value is None for values in spent.values() for value in values):
        return None
    tuning = card.tuning_seed(layout.tier)
    total = {seed: sum(values) / 60 for seed, values in spent.items()}
    return {"tuning_seed": round(total.get(tuning, 0.0), 2), "all_seeds": round(sum(total.values()), 2)}


def training_curves(card: Card, records: Records) -> dict[str, list[dict]]:
    """Curve of the first seed of every arm that trained."""
    first = {name: next(iter(found.values()))["measurement"]["curve"] for name, found in records.items() if found}
    return {name: curve for name, curve in first.items() if curve}


def git_commit(root: Path) -> dict[str, Any]:
    """{'commit': 40 hex or None, 'modified': whether tracked files differ} of the repository whose top is `root`."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != Path(root).resolve():
        return {"commit": None, "modified": None}
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "adapters", "scripts")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if changed is None else bool(changed)}


def _not_beaten(card: Card, arm: str, value: float | None, floors: dict[str, float | None]) -> list[str]:
    """Floors that `value` does not strictly beat on the primary metric; an arm is not measured against itself."""
    sign = 1 if card.direction == "max" else -1
    return [
        name
        for name, floor in floors.items()
        if name != arm and (value is None or floor is None or sign * (value - floor) <= 0)
    ]


def _same_protocol(card: Card, arm: str, floors: dict[str, float | None]) -> dict[str, float | None]:
    """Floors measured on what the arm was measured on."""
    return {floor: value for floor, value in floors.items() if card.protocol(floor) == card.protocol(arm)}


def _compare(card: Card, tier: str, records: Records, floors: dict, pair: dict) -> dict[str, Any]:
    arm, against = records.get(pair["arm"], {}), records.get(pair["against"], {})
    found = {metric: difference(arm, against, metric) for metric in card.metrics}
    if "relaimpr" in found:
        found["relaimpr"] = relative_improvement(arm, against)
    seeds = sorted(set(arm) & set(against))
    comparable = _same_protocol(card, pair["arm"], floors)
    name, reason = verdict(
        found[card.primary],
        tier=tier,
        shared_seeds=len(seeds),
        higher=card.direction == "max",
        floors_not_beaten=_not_beaten(card, pair["arm"], mean_metric(arm, card.primary), comparable),
    )
    metrics = {
        metric: value.as_dict() | {"higher_is_better": higher_is_better(metric, card.primary, card.direction)}
        for metric, value in found.items()
        if value is not None
    }
    return {**pair, "seeds": seeds, "metrics": metrics, "verdict": name, "reason": reason}


def _arm(card: Card, name: str, found: dict[int, dict], floors: dict) -> dict[str, Any]:
    measured = {seed: record["measurement"] for seed, record in found.items()}
    first = next(iter(measured.values()))
    missed = _not_beaten(card, name, mean_metric(found, card.primary), _same_protocol(card, name, floors))
    return {
        "role": card.arms[name]["role"],
        "what": card.arms[name]["what"],
        "protocol": card.protocol(name),
        "seeds": list(found),
        "metrics": _summary({seed: m["metrics"] for seed, m in measured.items()}),
        "intervals": {metric: own for metric in card.metrics if (own := own_interval(found, metric))},
        "validation": _summary({seed: m["validation"] for seed, m in measured.items()}),
        "cost": _mean_cost([m["cost"] for m in measured.values()]),
        "hyperparameters": first["hyperparameters"],
        "trials": first["trials"],
        "notes": list(dict.fromkeys(note for m in measured.values() for note in m["notes"])),
        "extra": first["extra"],
        "floors_not_beaten": [] if card.arms[name]["role"] == "floor" else missed,
    }


def _summary(by_seed: dict[int, dict[str, float]]) -> dict[str, Any]:
    shared = [name for name in next(iter(by_seed.values())) if all(name in values for values in by_seed.values())]
    summary = {}
    for name in shared:
        values = [values[name] for values in by_seed.values()]
        summary[name] = {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "per_seed": {str(seed): values[name] for seed, values in by_seed.items()},
        }
    return summary


def _mean_cost(costs: list[dict]) -> dict[str, Any]:
    """Mean over seeds of numbers that every seed has; other entries of the first seed."""
    merged = {}
    for name, value in costs[0].items():
        values = [cost.get(name) for cost in costs]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        mean = statistics.fmean(values) if numeric else value
        merged[name] = int(mean) if numeric and mean == int(mean) else mean
    return merged


def _data(everything: list[dict], card: Card) -> dict[str, str]:
    """sha256 of the manifest of each prepared table that an arm read."""
    tables = set(card.data["needs"])
    return {name: sha for record in everything for name, sha in record["inputs"].items() if name in tables}


def _common(runtimes: list[dict]) -> dict[str, Any]:
    """Runtime facts; a fact that differs between arms becomes the list of its values."""
    names = sorted({name for runtime in runtimes for name in runtime})
    common = {}
    for name in names:
        values = list(dict.fromkeys(runtime.get(name) for runtime in runtimes))
        common[name] = values[0] if len(values) == 1 else values
    return common
