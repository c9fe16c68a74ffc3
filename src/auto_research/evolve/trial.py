"""One trial: look the candidate up by id, train it under the hard limit, write ``trial.json`` whatever happens."""

from __future__ import annotations

from pathlib import Path

from auto_research.evolve.genome import canonical, effective, illegal_reason
from auto_research.evolve.request import load_frozen
from auto_research.evolve.supervise import Ended, discard, held, state_folder, supervise
from auto_research.experiment.search import InvalidGenome, track_from
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import canonical_json, read_json, sha256_file, sha256_text, write_json, write_text
from auto_research.runtime.schema import validate

SCHEMA_VERSION = 1
PER_SEED = ("seed", "fitness", "metrics", "units", "replicates", "spent", "contributions", "curve", "notes")


def run_trial(
    folder: Path, generation: int, trial_id: str, *, device: str | None, threads: int, timeout: float, code: str
) -> str:
    """Run (or resume) one trial of the run in ``folder`` and return its status.

    ``code`` is the code fingerprint. Only infrastructure errors raise; every other ending is written as data.
    """
    candidate = find_candidate(folder / f"gen{generation}" / "candidates.json", trial_id)
    output = folder / f"gen{generation}" / "trials" / trial_id
    config = load_frozen(folder / "config.yaml")
    facts = fingerprints(folder, config, code)
    write_json(output / "genome.json", candidate["genome"])
    genome, problem = check_genome(candidate["genome"], config)
    if problem is not None:
        ended = Ended("invalid", "InvalidGenome", problem, [], 0, 1, 0.0)
        _write(output, candidate, config, facts, ended, device, legality=problem)
        return "invalid"
    state = state_folder("trial", facts, config["seeds"], genome)
    with held(state):
        job = {
            "mode": "trial",
            "name": f"trial {trial_id}",
            "config": str(folder / "config.yaml"),
            "dev": str(folder / "dev"),
            "state": str(state),
            "genome": genome,
            "seeds": config["seeds"],
            "device": device,
            "threads": threads,
        }
        ended = supervise(job, timeout=timeout, log=output / "stdout.log")
        _write(output, candidate, config, facts, ended, device, legality="legal")
        discard(state)
    return ended.status


def find_candidate(path: Path, trial_id: str) -> dict:
    """Return the record with this id; nothing else of the list is used."""
    for record in read_json(path)["candidates"]:
        if record["trial_id"] == trial_id and record["status"] == "run":
            return record
    raise ConfigError(f"{path}: no candidate {trial_id!r} to run")


def check_genome(genome: dict, config: dict) -> tuple[dict, str | None]:
    """Return (effective genome, None) or (the raw genome, why it is invalid)."""
    track = track_from(config["definition"])
    try:
        genome = canonical(genome, track)
    except InvalidGenome as error:
        return genome, str(error)
    return effective(genome, track), illegal_reason(genome, track)


def fingerprints(folder: Path, config: dict, code: str) -> dict:
    """Fingerprints that, with the effective genome, decide a trial's result."""
    budget = {key: config[key] for key in ("profile", "seeds", "steps", "evaluation_users", "host", "dataset")}
    return {
        "budget": sha256_text(canonical_json(budget)),
        "data": sha256_file(folder / "dev" / "manifest.json"),
        "code": code,
    }


def _write(
    output: Path, candidate: dict, config: dict, facts: dict, ended: Ended, device: str | None, legality: str
) -> None:
    deterministic, telemetry = blocks(candidate, facts, ended, legality)
    telemetry["runtime"] = _runtime(device, config)
    document = {
        "schema_version": SCHEMA_VERSION,
        "track": config["track"],
        "run": config["run"],
        "deterministic": deterministic,
        "telemetry": telemetry,
    }
    lines = [{"seed": seed["seed"], **point} for seed in ended.seeds for point in seed["curve"]]
    write_text(output / "metrics.jsonl", "".join(canonical_json(line) + "\n" for line in lines))
    write_json(output / "trial.json", validate(document, "trial"))


def blocks(candidate: dict, facts: dict, ended: Ended, legality: str) -> tuple[dict, dict]:
    """Return (deterministic, telemetry); only the first is hashed. Partial seeds of an unfinished trial are not kept."""
    seeds = ended.seeds if ended.status == "completed" else []
    first = seeds[0] if seeds else {}
    deterministic = {
        "trial_id": candidate["trial_id"],
        "genome": candidate["genome"],
        "raw_fingerprint": candidate["raw_fingerprint"],
        "effective_fingerprint": candidate["effective_fingerprint"],
        "fingerprints": facts,
        "legality": legality,
        "status": ended.status,
        "error": {"class": ended.error} if ended.error else None,
        "per_seed": [{key: seed[key] for key in PER_SEED} for seed in seeds],
        "parameters": first.get("parameters"),
        "flops": first.get("flops"),
        "micro_batch": first.get("micro_batch"),
    }
    telemetry = {
        "seconds": round(ended.seconds, 3),
        "attempts": ended.attempts,
        "message": ended.message,
        "peak_memory_bytes": max((seed["peak_memory_bytes"] for seed in ended.seeds), default=0),
    }
    return deterministic, telemetry


def _runtime(device: str | None, config: dict) -> dict:
    from importlib.metadata import version
    from platform import machine, python_version, system

    facts = {"device_requested": device or "auto", "python": python_version(), "platform": f"{system()} {machine()}"}
    return facts if config["definition"]["host"] == "command" else {**facts, "torch": version("torch")}
