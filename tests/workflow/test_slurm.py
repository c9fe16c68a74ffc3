"""A two-shard audit through a real Slurm on loopback: resources reach the scheduler, a cancelled job alone is repeated."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import audit_toys
import pytest
from audit_gate import GATED, wait_for

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "scripts" / "ci" / "start_slurm.sh"
DEADLINE = 600.0

pytestmark = [pytest.mark.slurm, pytest.mark.workflow]


def missing_tools() -> list[str]:
    path = os.environ["PATH"] + ":/usr/sbin"
    return [
        tool for tool in ("munged", "slurmctld", "slurmd", "sbatch", "scontrol") if not shutil.which(tool, path=path)
    ]


@pytest.fixture
def slurm():
    """Environment of a running loopback cluster; the daemons end with the test."""
    if missing := missing_tools():
        if os.environ.get("AUTO_RESEARCH_REQUIRE_SERVERS"):
            pytest.fail(f"missing: {', '.join(missing)}; apt-get install slurm-wlm munge")
        pytest.skip(f"missing: {', '.join(missing)}; apt-get install slurm-wlm munge")
    pytest.importorskip("snakemake_executor_plugin_slurm")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    started = subprocess.run([str(START), str(folder)], capture_output=True, text=True, timeout=120)
    try:
        assert started.returncode == 0, started.stderr
        environment = dict(os.environ, SLURM_CONF=f"{folder}/slurm.conf")
        environment["PATH"] = f"{folder}/bin:{environment['PATH']}"
        yield environment
    finally:
        subprocess.run([str(START), str(folder), "stop"], timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def audit(tmp_path: Path, log: str, environment: dict) -> subprocess.Popen:
    command = [sys.executable, "-m", "snakemake", "audit_all", "-s", str(ROOT / "Snakefile")]
    command += ["--workflow-profile", str(ROOT / "profiles" / "slurm-a30")]
    command += ["--slurm-init-seconds-before-status-checks", "3", "--config", "audit_device=cpu", "audit_tier=tiny"]
    command += ["audit_shards=2", "audit_timeout_seconds=240", "default_cpu_threads=1"]
    with open(tmp_path / log, "wb") as handle:
        return subprocess.Popen(command, cwd=tmp_path / "run", env=environment, stdout=handle, stderr=handle)


def job_of(row: str, state: str, environment: dict) -> str | None:
    """Id of the Slurm job of one audit row in a state."""
    listed = subprocess.run(
        ["squeue", "--noheader", "--states", state, "--format", "%i %k"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for line in listed.stdout.splitlines():
        number, _, comment = line.partition(" ")
        if comment.strip() == f"rule_audit_row_wildcards_cpu_{row}":
            return number
    return None


def test_a_cancelled_row_alone_is_repeated(tmp_path, slurm):
    for key in ("alpha", "beta"):
        audit_toys.plant(tmp_path / "root", key)
    audit_toys.plant(tmp_path / "root", "gamma", GATED)
    (tmp_path / "run").mkdir()
    gate = tmp_path / "gate"
    slurm |= {"AUTO_RESEARCH_ROOT": str(tmp_path / "root"), "TOY_GATE": str(gate), "OMP_NUM_THREADS": "1"}
    rows = tmp_path / "run" / "results" / "audit" / "cpu" / "rows"

    run = audit(tmp_path, "first.log", slurm)
    try:
        number = wait_for(lambda: job_of("gamma", "RUNNING", slurm), run)
        shown = subprocess.run(["scontrol", "show", "job", number], env=slurm, capture_output=True, text=True).stdout
        assert "TresPerJob=gres:gpu:a30:1" in shown
        assert "mem=16000M" in shown
        assert "TimeLimit=00:09:00" in shown
        assert re.search(r"NumCPUs=1\b", shown)
        assert "Partition=gpu" in shown
        subprocess.run(["scancel", number], env=slurm, check=True)
        assert run.wait(DEADLINE) == 1
    finally:
        run.kill()
    assert sorted(path.stem for path in rows.glob("*.json")) == ["alpha", "beta"]
    assert not (rows.parent / "summary.json").exists()
    assert (rows.parent / "summary.partial.json").is_file()
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in rows.glob("*.json")}

    gate.touch()
    again = audit(tmp_path, "second.log", slurm)
    try:
        assert again.wait(DEADLINE) == 0, (tmp_path / "second.log").read_text()
    finally:
        again.kill()
    log = (tmp_path / "second.log").read_text()
    assert re.findall(r"audit on cpu: (alpha|beta|gamma)$", log, re.MULTILINE) == ["gamma"]
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in rows.glob("*.json")}
    assert {name: after[name] for name in before} == before
    assert sorted(after) == ["alpha.json", "beta.json", "gamma.json"]
    assert (rows.parent / "summary.json").is_file()
    assert sorted(path.name for path in (rows.parent / "shards").glob("*.json")) == ["0-of-2.json", "1-of-2.json"]
