"""Host of ``auto-research run``: a trial starts the person's command once per seed.

The command gets the path of a JSON file with the parameters as its last argument (also AUTO_RESEARCH_PARAMETERS) and
writes its metrics as JSON to the path in AUTO_RESEARCH_METRICS. AUTO_RESEARCH_SEED, AUTO_RESEARCH_DEVICE,
AUTO_RESEARCH_CPU_THREADS and AUTO_RESEARCH_STATE (a folder that survives a kill) are set. Exit code 0 with the metric
present is a completed trial. The command is split like a shell line, but no shell runs it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from auto_research.experiment.search import Evaluation, SearchHost, TrialRequest
from auto_research.runtime.errors import NonFinite, RunFailure
from auto_research.runtime.files import write_json

host = SearchHost("command")


@host.register
def prepare(config: dict, source: Callable[[str], Path], dev: Path, sealed: Path) -> None:
    """Nothing is prepared: the command brings its own data. The folders hold a note."""
    for folder in (dev, sealed):
        write_json(folder / "command.json", {"command": config["host"]["command"]})


@host.register
def trial(request: TrialRequest) -> Evaluation:
    """Run the command with the genome as parameters and read its metric."""
    return run_command(request, "trial")


@host.register
def test(request: TrialRequest, unseal: Callable[[], Path]) -> Evaluation:
    """Run the command again with AUTO_RESEARCH_SPLIT=test; a command that ignores it repeats its measurement."""
    unseal()
    return run_command(request, "test")


@host.register
def floors(config: dict, dev: Path, unseal: Callable[[], Path]) -> dict:
    """A command brings no floors."""
    return {}


def run_command(request: TrialRequest, split: str) -> Evaluation:
    """One run of the command; raises RunFailure for a non-zero exit or a missing metric, NonFinite for NaN."""
    settings = request.config["host"]
    request.state.mkdir(parents=True, exist_ok=True)
    parameters, metrics = request.state / "parameters.json", request.state / "metrics.json"
    write_json(parameters, typed(request.genome, request.config))
    metrics.unlink(missing_ok=True)
    command = [*shlex.split(settings["command"]), str(parameters.resolve())]
    finished = subprocess.run(command, env={**os.environ, **variables(request, split)}, check=False)
    if finished.returncode:
        raise RunFailure(f"the command ended with exit code {finished.returncode}")
    if not metrics.exists():
        raise RunFailure("the command wrote no file at AUTO_RESEARCH_METRICS")
    value = dig(read_metrics(metrics), settings["metric"])
    return Evaluation(fitness=value if settings["direction"] == "max" else -value, metrics={settings["metric"]: value})


def variables(request: TrialRequest, split: str) -> dict[str, str]:
    """Environment of the command beside the caller's own."""
    state = request.state.resolve()
    return {
        "AUTO_RESEARCH_PARAMETERS": str(state / "parameters.json"),
        "AUTO_RESEARCH_METRICS": str(state / "metrics.json"),
        "AUTO_RESEARCH_STATE": str(state),
        "AUTO_RESEARCH_SEED": str(request.seed),
        "AUTO_RESEARCH_SPLIT": split,
        "AUTO_RESEARCH_DEVICE": request.device or os.environ.get("AUTO_RESEARCH_DEVICE", "auto"),
        "AUTO_RESEARCH_CPU_THREADS": str(request.threads or 1),
    }


def typed(genome: dict, config: dict) -> dict:
    """The genome with the space's own types: categorical values are text in a genome, JSON values in the file."""
    genes = {entry["name"]: entry for entry in config["definition"]["genome"]}

    def value(name: str, text):
        if genes[name]["type"] != "cat":
            return text
        return next(v for v in genes[name]["allowed"] if (v if isinstance(v, str) else json.dumps(v)) == text)

    return {name: value(name, text) for name, text in genome.items()}


def read_metrics(path: Path) -> dict:
    """Read the metrics file, Python's NaN and Infinity included; raise RunFailure when it is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RunFailure("the metrics file is not a JSON object")
    return content


def dig(content: dict, path: str) -> float:
    """Value at a dotted path; list positions are numbers."""
    value = content
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise RunFailure(f"the metrics file has no {path!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RunFailure(f"{path!r} is not a number")
    if not math.isfinite(value):
        raise NonFinite(f"{path} is not finite")
    return float(value)
