"""Start the child of a trial or sealed test under a hard time limit and turn how it ended into a status."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from auto_research.runtime.errors import RunFailure, UserError
from auto_research.runtime.files import canonical_json, read_json, sha256_text, write_json
from auto_research.runtime.process import run_limited

STATE = Path("results/state")


@dataclass(frozen=True)
class Ended:
    """status as in the trial contract; ``seeds`` holds the finished seeds' results."""

    status: str
    error: str | None
    message: str
    seeds: list[dict]
    attempts: int
    accumulate: int
    seconds: float


def state_folder(*parts) -> Path:
    """Folder of the resumable state of a job, named by everything that decides its result."""
    return STATE / sha256_text(canonical_json(list(parts)))[:32]


@contextmanager
def held(state: Path):
    """Hold the job's lock: a successor waits for an orphan instead of training beside it."""
    locks = STATE / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{state.name}.lock"):
        state.mkdir(parents=True, exist_ok=True)
        yield


def discard(state: Path) -> None:
    """Remove the state of a finished job."""
    shutil.rmtree(state, ignore_errors=True)


def supervise(job: dict, *, timeout: float, log: Path) -> Ended:
    """Run the job's child; one retry on oom (half micro-batch) and on infrastructure errors, never on anything else.

    Raises RunFailure (or UserError for a missing device or input) when the infrastructure fails twice.
    """
    state = Path(job["state"])
    accumulate, attempts, seconds = 1, 0, 0.0
    while True:
        attempts += 1
        (state / "outcome.json").unlink(missing_ok=True)
        write_json(state / "job.json", {**job, "accumulate": accumulate})
        command = [sys.executable, "-m", "auto_research.evolve.child", str(state / "job.json")]
        finished = run_limited(command, timeout=timeout, env=threads_environment(job["threads"]), log=log)
        seconds += finished.seconds
        outcome = _outcome(state, finished, timeout)
        status = outcome["status"]
        if status == "oom" and attempts == 1:
            accumulate = 2
            continue
        if status == "infrastructure" and attempts == 1 and outcome.get("exit_code") is None:
            continue
        if status == "infrastructure":
            kind = UserError if outcome.get("exit_code") == 2 else RunFailure
            raise kind(f"{job['name']}: {outcome['message']} (log: {log})")
        seeds = [read_json(path) for path in (state / f"seed{seed}.json" for seed in job["seeds"]) if path.exists()]
        return Ended(status, outcome["error"], outcome["message"], seeds, attempts, accumulate, seconds)


def threads_environment(threads: int) -> dict[str, str]:
    """Thread counts of the child, set before any numerical library loads (hosts without torch need none of it)."""
    names = ("AUTO_RESEARCH_CPU_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def _outcome(state: Path, finished, timeout: float) -> dict:
    if finished.timed_out:
        return {"status": "timeout", "error": "TimeLimit", "message": f"killed after {timeout:g} s"}
    path = state / "outcome.json"
    if path.exists():
        return read_json(path)
    if finished.returncode < 0:
        # a kill from outside, often by a system short of memory: one retry resumes at the last saved step
        message = f"the training process was killed by signal {-finished.returncode}"
        return {"status": "infrastructure", "error": "Killed", "message": message}
    return {
        "status": "failed",
        "error": "Exit",
        "message": f"the training process ended with code {finished.returncode}",
    }
