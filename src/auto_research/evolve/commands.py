"""Command lines of scripts/evolve_*.py. Nothing here can change a number, so it is part of no fingerprint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from auto_research.runtime.errors import ConfigError, DataMissing
from auto_research.runtime.files import read_json, write_json
from auto_research.runtime.names import check_name
from auto_research.runtime.paths import code_root
from auto_research.runtime.process import die_with_parent
from auto_research.runtime.schema import validate


def _options(description: str, *names: str) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--track", required=True, help="track of the search, e.g. rankmixer")
    flags.add_argument("--run", required=True, help="name of the run")
    flags.add_argument("--debug", action="store_true", help="show tracebacks")
    if "generation" in names:
        flags.add_argument("--generation", type=int, required=True, help="0 is the baseline")
    if "generations" in names:
        flags.add_argument("--generations", type=int, required=True, help="generations after the baseline")
    if "training" in names:
        flags.add_argument("--device", help="auto, cpu, mps, cuda, cuda:<index>, shadow")
        flags.add_argument("--cpu-threads", type=int, help="intra-op threads (results depend on it); default 1")
        flags.add_argument("--timeout", type=float, help="seconds per trial; default: the budget's own")
        flags.add_argument("--fingerprint", help="code fingerprint; computed when left out")
    if "trial" in names:
        flags.add_argument("--trial", required=True, help="trial id in candidates.json")
    if "which" in names:
        flags.add_argument("--which", required=True, choices=("baseline", "champion", "floors"))
    if "request" in names:
        flags.add_argument("--request", type=Path, help="JSON or YAML file; default: the surrounding Snakemake call's")
    options = flags.parse_args()
    if options.debug:
        os.environ["AUTO_RESEARCH_DEBUG"] = "1"
    options.folder = Path("results/evolve") / check_name(options.track, "track") / check_name(options.run, "run")
    return options


def _read(path: Path):
    if not path.exists():
        raise DataMissing(f"{path} is missing: run the steps before it, or `snakemake evolve_<track>`")
    return read_json(path)


def _frozen(folder: Path) -> dict:
    from auto_research.evolve.request import load_frozen

    if not (folder / "config.yaml").exists():
        raise DataMissing(f"{folder / 'config.yaml'} is missing: run evolve_freeze.py first")
    return load_frozen(folder / "config.yaml")


def freeze_main() -> int:
    from auto_research.evolve.request import freeze, search_from, settings_from

    options = _options("Freeze the request of a run.", "request")
    settings = settings_from(options.request)
    asked = settings.get("run") or "default"
    if options.request is None and asked != options.run:
        raise ConfigError(
            f"this call is configured for run {asked!r}, not {options.run!r}: pass --config run={options.run}"
        )
    print(freeze(search_from(options.track, {**settings, "run": options.run})))
    return 0


def prepare_main() -> int:
    from auto_research.evolve.final import prepare

    options = _options("Separate development and sealed data.")
    die_with_parent()
    prepare(options.folder, Path("results/data") / _frozen(options.folder)["dataset"])
    return 0


def propose_main() -> int:
    from auto_research.evolve.propose import propose

    options = _options("Propose the candidates of one generation.", "generation")
    g = options.generation
    previous = _read(options.folder / f"gen{g - 1}" / "selection.json") if g else None
    document = propose(_frozen(options.folder), g, previous)
    write_json(options.folder / f"gen{g}" / "candidates.json", validate(document, "candidates"))
    return 0


def select_main() -> int:
    from auto_research.evolve.select import select

    options = _options("Select the champion of one generation.", "generation")
    folder, g = options.folder, options.generation
    config = _frozen(folder)
    path = folder / f"gen{g}" / "candidates.json"
    candidates = _read(path)
    ids = [record["trial_id"] for record in candidates["candidates"] if record["status"] == "run"]
    trials = [_read(folder / f"gen{g}" / "trials" / name / "trial.json")["deterministic"] for name in ids]
    previous = _read(folder / f"gen{g - 1}" / "selection.json") if g else None
    document = select(config, (folder / "config.yaml").read_bytes(), candidates, path.read_bytes(), trials, previous)
    write_json(folder / f"gen{g}" / "selection.json", validate(document, "selection"))
    print(document["deterministic"]["decision"])
    return 0


def _training(options: argparse.Namespace) -> dict:
    """Flags win over the surrounding Snakemake call, which wins over the frozen budget."""
    from auto_research.evolve.request import VARIABLE, settings_from, trial_threads_of

    config = _frozen(options.folder)
    settings = settings_from(None) if VARIABLE in os.environ else {}
    timeout = options.timeout or settings.get("trial_timeout_seconds") or config["trial_timeout_seconds"]
    return {
        "device": options.device or os.environ.get("AUTO_RESEARCH_DEVICE"),
        "threads": options.cpu_threads or trial_threads_of(settings),
        "timeout": float(timeout),
        "code": options.fingerprint or code_fingerprint(config),
    }


def code_fingerprint(config: dict) -> str:
    """The fingerprint that rules/evolve_functions.smk passes on the command line."""
    from auto_research.evolve.code import trial_code
    from auto_research.experiment.fingerprint import Fingerprints

    return trial_code(Fingerprints(code_root()), config)


def trial_main() -> int:
    from auto_research.evolve.trial import run_trial

    options = _options("Train and score one candidate.", "generation", "trial", "training")
    die_with_parent()
    status = run_trial(options.folder, options.generation, options.trial, **_training(options))
    print(f"{options.trial}: {status}", file=sys.stderr)
    return 0


def lock_main() -> int:
    from auto_research.evolve.final import lock

    options = _options("Lock the champion.", "generations")
    _read(options.folder / f"gen{options.generations}" / "selection.json")
    print(lock(options.folder, options.generations))
    return 0


def final_test_main() -> int:
    from auto_research.evolve.final import final_test

    options = _options("Read the sealed test.", "generations", "which", "training")
    die_with_parent()
    print(final_test(options.folder, options.generations, options.which, **_training(options)))
    return 0


def report_main() -> int:
    from auto_research.evolve.report import write_report

    options = _options("Write the report and the board.", "generations")
    print(write_report(options.folder, options.generations))
    return 0
