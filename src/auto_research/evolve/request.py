"""The frozen request of a run: what identifies it, and the comparison made while the Snakefile is read.

Generations, workers, device, threads and the time limit are not part of it: they may differ from call to call.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from auto_research.evolve.tracks import load_track, merged
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import write_json, write_text
from auto_research.runtime.names import check_name
from auto_research.runtime.schema import load_yaml
from auto_research.runtime.threads import requested_threads

SCHEMA_VERSION = 1
VARIABLE = "AUTO_RESEARCH_SEARCH_REQUESTS"
COMMAND = "command"


@dataclass(frozen=True)
class Search:
    """One search as asked for: the frozen configuration plus what may change from call to call."""

    track: str
    run: str
    config: dict
    generations: int
    timeout: float
    device: str | None
    threads: int

    @property
    def folder(self) -> Path:
        return Path("results/evolve") / self.track / self.run


def search_from(track: str, settings: dict, folder: Path | None = None) -> Search:
    """Build the search of ``track`` from flat configuration settings (the keys of config.schema.yaml).

    Raises ConfigError or UnknownName with one line.
    """
    if track == COMMAND:
        from auto_research.evolve.command_space import command_definition

        definition = command_definition(settings)
    else:
        definition = load_track(track, folder)
    profile = settings.get("profile") or ("quick" if "quick" in definition["budgets"] else min(definition["budgets"]))
    resolved = merged(definition, profile)
    budget = definition["budgets"][profile]
    run = check_name(settings.get("run") or "default", "run")
    datasets = definition.get("datasets", [])
    dataset = settings.get("dataset") or (datasets[0] if datasets else "none")
    if datasets and dataset not in datasets:
        raise ConfigError(f"track {track}: unknown dataset {dataset!r}; known: {', '.join(datasets)}")

    def chosen(name: str):
        return settings[name] if settings.get(name) is not None else budget.get(name)

    seeds = _seeds(settings.get("seeds")) or budget.get("seeds", [42])
    config = {
        "schema_version": SCHEMA_VERSION,
        "track": track,
        "run": run,
        "dataset": check_name(dataset, "dataset"),
        "direction": settings.get("direction") or "",
        "profile": profile,
        "seeds": list(seeds),
        "run_seed": seeds[0],
        "population": _whole("population", chosen("population"), 1),
        "steps": _optional("steps", chosen("steps")),
        "evaluation_users": _optional("evaluation_users", chosen("evaluation_users")),
        "trial_timeout_seconds": budget["trial_timeout_seconds"],
        "z": 1.0,
        "min_improvement": 0.0,
        "promotion_min_seeds": min(budget.get("promotion_min_seeds", 1), len(seeds)),
        "host": budget.get("host", {}),
        "definition": resolved,
    }
    return Search(
        track=track,
        run=run,
        config=config,
        generations=_whole("generations", chosen("generations"), 0),
        timeout=float(chosen("trial_timeout_seconds")),
        device=settings.get("device"),
        threads=trial_threads_of(settings),
    )


def trial_threads_of(settings: dict) -> int:
    """Intra-op threads of a trial: one unless asked otherwise, because results must not depend on the worker count."""
    return requested_threads(settings.get("cpu_threads")) or 1


def _seeds(value) -> list[int] | None:
    if value in (None, "", []):
        return None
    if isinstance(value, str):
        value = value.split(",")
    try:
        seeds = [int(part) for part in (value if isinstance(value, (list, tuple)) else [value])]
    except (TypeError, ValueError):
        raise ConfigError(f"seeds: expected integers, got {value!r}") from None
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds: {seeds} repeats a seed")
    return seeds


def _whole(name: str, value, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return value


def _optional(name: str, value) -> int | None:
    return None if value is None else _whole(name, value, 1)


def frozen_text(config: dict) -> str:
    """Return the bytes of ``config.yaml`` as text: sorted keys, shortest round-trip floats.

    The run's name is its folder and not part of it, so that equal requests give equal files under any name.
    """
    request = {key: value for key, value in config.items() if key != "run"}
    return yaml.safe_dump(request, sort_keys=True, allow_unicode=True, width=120)


def load_frozen(path: Path) -> dict:
    """Read a frozen configuration; `run` is the name of its folder."""
    return {**load_yaml(Path(path)), "run": Path(path).resolve().parent.name}


def refuse_changes(search: Search) -> None:
    """Raise ConfigError when the run was frozen with another request (called while the Snakefile is read)."""
    path = search.folder / "config.yaml"
    if not path.exists():
        return
    frozen = load_frozen(path)
    asked = {**yaml.safe_load(frozen_text(search.config)), "run": search.run}
    changed = sorted(key for key in {*frozen, *asked} if frozen.get(key) != asked.get(key))
    if changed:
        facts = "; ".join(f"{key}: {_short(frozen.get(key))} -> {_short(asked.get(key))}" for key in changed)
        raise ConfigError(
            f"run {search.run!r} of {search.track} is frozen with another request ({facts}): choose another run name"
        )


def _short(value) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 60 else "(differs)"


def refuse_stale_test(search: Search) -> None:
    """Raise ConfigError when the sealed test of this final folder belongs to another lock than the one on disk."""
    from auto_research.runtime.files import read_json, sha256_file

    final = search.folder / "final" / f"g{search.generations}"
    lock = final / "LOCK.json"
    for path in sorted(final.glob("test_*.json")):
        if lock.exists() and read_json(path)["lock"] != sha256_file(lock):
            raise ConfigError(
                f"{path} was read under another champion: it is never recomputed; choose another run name"
            )


def freeze(search: Search) -> Path:
    """Write ``config.yaml`` unless it exists; device and versions go to ``runtime.json``, which nothing compares."""
    path = search.folder / "config.yaml"
    refuse_changes(search)
    facts = {
        "device_requested": search.device or os.environ.get("AUTO_RESEARCH_DEVICE") or "auto",
        "cpu_threads": search.threads,
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    write_json(search.folder / "runtime.json", facts)
    write_text(path, frozen_text(search.config))
    return path


def export(settings: dict) -> None:
    """Hand the settings to child jobs through the environment: free text never meets a shell line."""
    os.environ[VARIABLE] = json.dumps(settings, sort_keys=True, ensure_ascii=False)


def settings_from(path: Path | None) -> dict:
    """Settings of a request file, or those of the surrounding Snakemake call."""
    if path is not None:
        return load_yaml(Path(path)) or {}
    if VARIABLE not in os.environ:
        raise ConfigError(
            "no request: pass --request FILE (JSON or YAML with the keys of config/schemas/config.schema.yaml)"
        )
    return json.loads(os.environ[VARIABLE])
