"""The child process of a trial or of the sealed test: trains seed after seed and always leaves an outcome file.

It is started in its own process group under a hard time limit (see ``supervise``), ends itself when its parent dies, and
resumes: finished seeds are read from the state folder, an unfinished one goes on at its last saved step.
"""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from auto_research.evolve.hosts import load_host
from auto_research.evolve.request import load_frozen
from auto_research.experiment.search import Evaluation, InvalidGenome, TrialRequest, unseal
from auto_research.runtime.errors import NonFinite, OutOfMemory, TimeLimit, UserError, describe_error
from auto_research.runtime.files import read_json, write_json

INFRASTRUCTURE = 3


def work(job_path: Path) -> int:
    """Run the job and write ``outcome.json`` into its state folder; exit code 3 means the machine, not the candidate."""
    import traceback

    from auto_research.experiment.graph import gpu_of
    from auto_research.runtime.devices import requested_device
    from auto_research.runtime.lease import lease_for
    from auto_research.runtime.process import die_with_parent

    die_with_parent()
    job = read_json(job_path)
    state = Path(job["state"])
    outcome = {"status": "completed", "error": None, "message": ""}
    code = 0
    try:
        device = requested_device(job["device"])
        with lease_for(device) if gpu_of(device) else nullcontext():
            run_job(job)
    except Exception as error:
        traceback.print_exc()
        status = status_of(error)
        outcome = {"status": status, "error": type(error).__name__, "message": one_line(error)}
        code = INFRASTRUCTURE if status == "infrastructure" else 0
        if isinstance(error, UserError):
            outcome["exit_code"] = error.exit_code
    write_json(state / "outcome.json", outcome)
    return code


def one_line(error: Exception, limit: int = 300) -> str:
    """The error's own text in one line, without its class."""
    text = " ".join(str(error).split()) or describe_error(error)[0]
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def status_of(error: Exception) -> str:
    """Return the trial status of an exception; ``infrastructure`` for disks, inputs and devices."""
    if isinstance(error, InvalidGenome):
        return "invalid"
    if isinstance(error, (NonFinite, FloatingPointError)):
        return "nonfinite"
    if isinstance(error, (OutOfMemory, MemoryError)) or describe_error(error)[0].startswith("out of memory"):
        return "oom"
    if isinstance(error, TimeLimit):
        return "timeout"
    if isinstance(error, (OSError, UserError)):
        return "infrastructure"
    return "failed"


def run_job(job: dict) -> None:
    """Run every seed that has no result yet (modes trial and test), or the floors."""
    config = load_frozen(Path(job["config"]))
    host = load_host(config)
    state = Path(job["state"])
    opened = partial(unseal, Path(job["sealed"]), job["token"]) if job["mode"] != "trial" else None
    if job["mode"] == "floors":
        write_json(state / "floors.json", host.floors(config, Path(job["dev"]), opened))
        return
    for number, seed in enumerate(job["seeds"]):
        target = state / f"seed{seed}.json"
        if target.exists():
            continue
        request = TrialRequest(
            genome=job["genome"],
            config=config,
            seed=seed,
            dev=Path(job["dev"]),
            state=state / f"train{seed}-{job['accumulate']}",
            accumulate=job["accumulate"],
            device=job["device"],
            threads=job["threads"],
            progress=Progress(state / "progress.json", job["name"], seed, number, len(job["seeds"])),
        )
        evaluation = host.trial(request) if job["mode"] == "trial" else host.test(request, opened)
        check_finite(evaluation)
        write_json(target, {"seed": seed, **dataclasses.asdict(evaluation)})


def check_finite(evaluation: Evaluation) -> None:
    """Raise NonFinite when fitness, a metric, a unit or a replicate is NaN or infinite."""
    numbers = {"fitness": evaluation.fitness, **evaluation.metrics}
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise NonFinite(f"{name} is not finite")
    for name, values in (("units", evaluation.units.get("values", [])), ("replicates", evaluation.replicates)):
        if not all(math.isfinite(value) for value in values):
            raise NonFinite(f"{name} are not finite")


class Progress:
    """Writes ``progress.json`` at most once a second; the command line reads it."""

    def __init__(self, path: Path, name: str, seed: int, number: int, seeds: int):
        self.path, self.stage, self.number, self.seeds, self.last = path, f"{name} seed {seed}", number, seeds, 0.0

    def __call__(self, done: int, total: int, **values) -> None:
        now = time.monotonic()
        if now - self.last < 1.0 and done < total:
            return
        self.last = now
        facts = {
            key: value for key, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }
        write_json(self.path, {"stage": self.stage, "done": done, "total": total, **facts})
