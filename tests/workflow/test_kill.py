"""kill -9 in the middle of training, then the same command: the run goes on and ends with the same result."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.workflow
ARM = "results/reproduce/toy/tiny/movielens-100k/seed42/arms/slow.json"


def start_and_wait_for(bench, step):
    """Start Snakemake in its own process group and return when the loop stands at `step`."""
    (bench.meet / f"hold-slow-{step}").touch()
    process = subprocess.Popen(
        bench.command(ARM), env=bench.env, cwd=bench.work, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    trace = bench.meet / "trace-slow.txt"
    while not (trace.exists() and str(step) in trace.read_text().split()):
        assert process.poll() is None, "Snakemake ended before the loop reached the step"
        time.sleep(0.05)
    return process


def measured(bench):
    """The measurement without clocks and memory."""
    measurement = json.loads((bench.work / ARM).read_text())["measurement"]
    for name in ("seconds", "stage_cpu_seconds", "peak_memory_bytes"):
        measurement["cost"].pop(name)
    return measurement


@pytest.mark.parametrize("whole_tree", [True, False], ids=["whole-tree", "snakemake-only"])
def test_a_killed_run_goes_on_where_it_was(bench, built, whole_tree):
    process = start_and_wait_for(bench, 2)
    if whole_tree:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    assert not (bench.work / ARM).exists()
    (bench.meet / "hold-slow-2").unlink()
    bench.snakemake(ARM)
    # steps 0 and 1 were saved and are not trained again; an orphan may have gone on for a moment before it noticed
    steps = bench.trace("slow")
    assert steps[:3] == [0, 1, 2]
    assert steps.count(0) == steps.count(1) == 1
    assert steps[-1] == 3
    assert measured(bench) == measured(built)


def test_a_second_live_run_of_the_same_target_is_refused(bench):
    process = start_and_wait_for(bench, 1)
    try:
        text = bench.snakemake(ARM, code=1)
        assert "lock" in text.lower()
    finally:
        (bench.meet / "hold-slow-1").unlink()
        assert process.wait() == 0
    assert bench.trace("slow") == [0, 1, 2, 3]


def test_a_job_whose_workflow_is_already_gone_does_not_start(bench):
    run = [
        sys.executable,
        str(CHECKOUT / "scripts" / "run_arm.py"),
        "--adapter",
        "toy",
        "--tier",
        "tiny",
        "--arm",
        "popularity",
    ]
    env = {**bench.env, "AUTO_RESEARCH_JOB_PARENT": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run(run, env=env, cwd=bench.work, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the workflow that started this job is gone\n"
    assert not (bench.work / "results").exists()
    done = subprocess.run(run, env={**env, "AUTO_RESEARCH_JOB_PARENT": str(os.getpid())}, cwd=bench.work, check=False)
    assert done.returncode == 0
