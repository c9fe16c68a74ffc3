"""Ranking, champion, archive and hash chain of one generation: a pure function over files' contents."""

from __future__ import annotations

import math

from auto_research.evolve.genome import fingerprint
from auto_research.runtime.errors import RunFailure
from auto_research.runtime.files import canonical_json, sha256_bytes

SCHEMA_VERSION = 1
DIGITS = 9


def deviation(values: list[float]) -> float:
    """Sample standard deviation (ddof 1); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def score_parts(trial: dict, z: float) -> dict:
    """Return {mean, se_unit, se_seed, score} of a completed deterministic trial block.

    f_u = mean over seeds of unit u; se_unit = sd_u(f_u)/sqrt(U), or the sd over unit bootstraps when the trial has
    replicates; se_seed = sd_s(f_s)/sqrt(S) if S >= 2 else 0; score = mean_s f_s - z*max(se_unit, se_seed).
    """
    seeds = trial["per_seed"]
    fitness = [seed["fitness"] for seed in seeds]
    mean = math.fsum(fitness) / len(fitness)
    se_seed = deviation(fitness) / math.sqrt(len(fitness)) if len(fitness) >= 2 else 0.0
    if seeds[0].get("replicates"):
        se_unit = deviation(over_seeds([seed["replicates"] for seed in seeds]))
    elif seeds[0].get("units", {}).get("values"):
        units = over_seeds([seed["units"]["values"] for seed in seeds])
        se_unit = deviation(units) / math.sqrt(len(units))
    else:
        se_unit = 0.0
    return {"mean": mean, "se_unit": se_unit, "se_seed": se_seed, "score": mean - z * max(se_unit, se_seed)}


def over_seeds(rows: list[list[float]]) -> list[float]:
    return [math.fsum(column) / len(column) for column in zip(*rows, strict=True)]


def mean_metric(trial: dict, name: str) -> float | None:
    """Mean over seeds of one metric (or of ``parameters``, ``flops``, ``spent.<name>``); None when any seed lacks it."""
    if name in ("parameters", "flops"):
        return trial[name]
    if name.startswith("spent."):
        values = [seed["spent"].get(name[6:]) for seed in trial["per_seed"]]
    else:
        values = [seed["metrics"].get(name) for seed in trial["per_seed"]]
    return None if any(value is None for value in values) else math.fsum(values) / len(values)


def ineligible_reason(trial: dict, config: dict, baseline: dict | None) -> str | None:
    """Return why a trial cannot become champion, or None."""
    if trial["status"] != "completed":
        return trial["status"]
    numbers = [seed["fitness"] for seed in trial["per_seed"]]
    numbers += [value for seed in trial["per_seed"] for value in seed["metrics"].values() if value is not None]
    if not all(math.isfinite(number) for number in numbers):
        return "a metric is not finite"
    if len(trial["per_seed"]) < config["promotion_min_seeds"]:
        return f"fewer than {config['promotion_min_seeds']} seeds"
    for guard in config["definition"].get("guards", ()) if baseline is not None else ():
        value, reference = mean_metric(trial, guard["metric"]), baseline["guards"].get(guard["metric"])
        if value is not None and reference is not None and value > guard["at_most"] * reference + 1e-12:
            return f"guard: {guard['metric']} {value:.6g} > {guard['at_most']:g} x baseline {reference:.6g}"
    return None


def tie_key(row: dict) -> tuple:
    """Sort key: score down (rounded to 1e-9), then fewer parameters, fewer flops, lower generation, trial id."""
    score = -math.inf if row["score"] is None else round(row["score"], DIGITS)
    return (-score, row["parameters"] or 0, row["flops"] or 0, row["generation"], row["trial_id"])


def select(
    config: dict,
    config_bytes: bytes,
    candidates: dict,
    candidates_bytes: bytes,
    trials: list[dict],
    previous: dict | None,
) -> dict:
    """Return the selection document.

    ``trials``: deterministic blocks of the trial files named in ``candidates`` (any order); ``previous``: selection document
    of the generation before (None for 0). Raises RunFailure when the baseline did not complete.
    """
    generation = candidates["generation"]
    trials = sorted(trials, key=lambda trial: trial["trial_id"])
    records = {record["trial_id"]: record for record in candidates["candidates"] if record["status"] == "run"}
    if sorted(records) != [trial["trial_id"] for trial in trials]:
        raise RunFailure(f"generation {generation}: trial files do not match candidates.json")
    before = previous["deterministic"] if previous else None
    if generation == 0 and trials[0]["status"] != "completed":
        error = trials[0]["error"] or {}
        where = f"gen0/trials/{trials[0]['trial_id']}"
        raise RunFailure(f"the baseline ended as {trials[0]['status']} ({error.get('class')}): see {where}/stdout.log")
    baseline = before["baseline"] if before else _baseline(trials[0], config)
    rows = [_row(trial, records[trial["trial_id"]], config, baseline if before else None) for trial in trials]
    parent = {**before["champion"], "role": "parent", "eligible": True} if before else None
    rows.sort(key=tie_key)
    champion, decision = choose(rows, parent, config)
    ranking = sorted([*rows, *([parent] if parent else [])], key=tie_key)
    archive = dict(before["archive"]) if before else {}
    archive |= {row["effective_fingerprint"]: {"trial_id": row["trial_id"], "status": row["status"]} for row in rows}
    failed = {row["operator"] for row in rows if row["status"] != "completed" and row["operator"]}
    tried = set(before["tried"] if before else ()) | {row["entry"] for row in rows if row["entry"]}
    chain = hash_chain(config_bytes, candidates_bytes, trials, previous)
    deterministic = {
        "generation": generation,
        "chain": chain,
        "ranking": [{key: row[key] for key in RANKING} for row in ranking],
        "champion": {key: champion[key] for key in CHAMPION},
        "decision": decision,
        "baseline": baseline,
        "archive": archive,
        "tried": sorted(tried),
        "failed_operators": sorted(failed),
        "slots": {
            status: sum(record["status"] == status for record in candidates["candidates"])
            for status in ("run", "reused", "skipped")
        },
    }
    return {"schema_version": SCHEMA_VERSION, "track": candidates["track"], "deterministic": deterministic}


RANKING = (
    "trial_id", "role", "generation", "status", "eligible", "why_not", "score", "mean", "se_unit", "se_seed",
    "parameters", "flops", "operator", "entry",
)  # fmt: skip
CHAMPION = (*RANKING, "genome", "effective_fingerprint")


def hash_chain(config_bytes: bytes, candidates_bytes: bytes, trials: list[dict], previous: dict | None) -> str:
    """sha256(previous deterministic block, or the bytes of config.yaml + candidates.json + deterministic trial blocks)."""
    start = canonical_json(previous["deterministic"]).encode() if previous else config_bytes
    blocks = [canonical_json(trial).encode() for trial in sorted(trials, key=lambda trial: trial["trial_id"])]
    return sha256_bytes(b"\n".join([start, candidates_bytes, *blocks]))


def choose(rows: list[dict], parent: dict | None, config: dict) -> tuple[dict, str]:
    """Return (champion row, one sentence). The parent competes with its recorded score and wins every tie."""
    eligible = sorted((row for row in rows if row["eligible"]), key=tie_key)
    if parent is None and not eligible:
        raise RunFailure(f"the baseline is not eligible: {rows[0]['why_not']}")
    if parent is None:
        return eligible[0], f"{eligible[0]['trial_id']} is the baseline"
    bar = round(parent["score"] + config["min_improvement"], DIGITS)
    if not eligible:
        return parent, f"{parent['trial_id']} stays: no child is eligible"
    best = eligible[0]
    scores = f"{best['score']:.6f} against {parent['score']:.6f}"
    if round(best["score"], DIGITS) > bar:
        return best, f"{best['trial_id']} replaces {parent['trial_id']}: penalised score {scores}"
    return parent, f"{parent['trial_id']} stays: the best child {best['trial_id']} reaches {scores}"


def _row(trial: dict, record: dict, config: dict, baseline: dict | None) -> dict:
    reason = ineligible_reason(trial, config, baseline)
    parts = {"mean": None, "se_unit": None, "se_seed": None, "score": None}
    if trial["status"] == "completed":
        parts = score_parts(trial, config["z"])
    return {
        "trial_id": trial["trial_id"],
        "role": "child" if record["generation"] else "baseline",
        "generation": record["generation"],
        "status": trial["status"],
        "eligible": reason is None,
        "why_not": reason,
        **parts,
        "parameters": trial["parameters"],
        "flops": trial["flops"],
        "operator": record["operator"],
        "entry": record["entry"],
        "genome": record["genome"],
        "effective_fingerprint": record["effective_fingerprint"],
    }


def _baseline(trial: dict, config: dict) -> dict:
    guards = {guard["metric"]: mean_metric(trial, guard["metric"]) for guard in config["definition"].get("guards", ())}
    return {
        "trial_id": trial["trial_id"],
        "genome": trial["genome"],
        "genome_fingerprint": fingerprint(trial["genome"]),
        "guards": guards,
    }
