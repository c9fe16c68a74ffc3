"""`audit_all` end to end over toy adapters: honest statuses, reruns of exactly what failed, kill -9, shards, new adapters."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import audit_toys
import pytest
from audit_gate import GATED, wait_for

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.workflow


class Audit:
    """`snakemake audit_all` over the toy adapters of one temporary root."""

    def __init__(self, folder: Path) -> None:
        self.root, self.work = folder / "root", folder / "work"
        self.work.mkdir()
        self.gate = folder / "gate"
        self.results = self.work / "results" / "audit" / "cpu"
        self.environment = os.environ | {"AUTO_RESEARCH_ROOT": str(self.root), "TOY_GATE": str(self.gate)}

    def command(self, *config: str) -> list[str]:
        command = [sys.executable, "-m", "snakemake", "audit_all", "-s", str(ROOT / "Snakefile"), "--cores", "2"]
        fixed = ["audit_device=cpu", "audit_tier=tiny", "cpu_threads=2", "audit_timeout_seconds=60"]
        return [*command, "--config", *fixed, *config]

    def run(self, *config: str) -> tuple[int, list[str], str]:
        """Exit code, adapters whose row was made, and everything Snakemake said."""
        done = subprocess.run(
            self.command(*config), cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=900
        )
        said = done.stdout + done.stderr
        return (
            done.returncode,
            sorted(re.findall(r"audit on cpu: ([a-z-]+)$", said.replace(": summary", ""), re.M)),
            said,
        )

    def rows(self) -> list[str]:
        return sorted(path.stem for path in (self.results / "rows").glob("*.json"))

    def failures(self) -> dict[str, str]:
        found = (json.loads(path.read_text()) for path in (self.results / "failures").glob("*.json"))
        return {row["adapter"]: row["status"] for row in found}

    def summary(self, name: str = "summary") -> dict:
        return json.loads((self.results / f"{name}.json").read_text())


def test_failures_are_honest_and_a_rerun_repeats_exactly_them(tmp_path):
    audit = Audit(tmp_path)
    planted = {"raises": audit_toys.RAISES, "hangs": audit_toys.HANGS, "no-device": audit_toys.NO_DEVICE}
    for key, body in {"good": audit_toys.GOOD, **planted}.items():
        audit_toys.plant(audit.root, key, body)
    code, ran, said = audit.run()
    assert code == 1, said
    assert ran == ["good", "hangs", "no-device", "raises"]
    assert audit.rows() == ["good"]
    assert audit.failures() == {"raises": "failed", "hangs": "timeout", "no-device": "completed_without_device_call"}
    error = json.loads((audit.results / "failures" / "raises.json").read_text())["error"]
    assert (error["type"], error["message"]) == ("RuntimeError", "planted failure")
    assert (audit.work / error["log"]).is_file()
    assert not (audit.results / "summary.json").exists()
    partial = audit.summary("summary.partial")
    assert partial["counts"] == {"cpu_pass": 1, "completed_without_device_call": 1, "failed": 1, "timeout": 1}

    for key in planted:
        audit_toys.plant(audit.root, key)
    code, ran, said = audit.run()
    assert code == 0, said
    assert ran == ["hangs", "no-device", "raises"]
    assert audit.failures() == {}
    whole = audit.summary()
    assert whole["complete"]
    assert {row["adapter"]: row["before"] for row in whole["difference"]["changed"]} == {
        "raises": "failed",
        "hangs": "timeout",
        "no-device": "completed_without_device_call",
    }
    assert not list(audit.results.glob("summary.partial.*"))

    # the same rows in three shards: disjoint, complete, and the same summary
    code, ran, said = audit.run("audit_shards=3")
    assert (code, ran) == (0, []), said
    shards = [json.loads((audit.results / "shards" / f"{index}-of-3.json").read_text()) for index in range(3)]
    assert sorted(row["adapter"] for part in shards for row in part["rows"]) == whole["expected"]
    merged = audit.summary()
    assert {**merged, "difference": None} == {**whole, "difference": None}

    # a card and a folder, no list: the next run audits the new adapter alone, after a kill -9 in its middle
    audit_toys.plant(audit.root, "newcomer", GATED)
    audit.gate.unlink(missing_ok=True)
    process = subprocess.Popen(audit.command(), cwd=audit.work, env=audit.environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(audit.gate.with_name("gate.reached").is_file, process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert audit.rows() == ["good", "hangs", "no-device", "raises"]
    audit.gate.touch()
    code, ran, said = audit.run()
    assert (code, ran) == (0, ["newcomer"]), said
    assert audit.summary()["difference"]["added"] == ["newcomer"]

    # nothing changed: nothing runs; a comment reruns nothing, code reruns its own row
    assert audit.run()[:2] == (0, [])
    with open(audit.root / "adapters" / "good" / "experiment.py", "a") as handle:
        handle.write("\n# a comment\n")
    assert audit.run()[:2] == (0, [])
    with open(audit.root / "adapters" / "good" / "experiment.py", "a") as handle:
        handle.write("\nEXTRA = 1\n")
    assert audit.run()[:2] == (0, ["good"])


def test_a_device_that_proves_nothing_is_refused_while_the_snakefile_is_read(tmp_path):
    audit = Audit(tmp_path)
    audit_toys.plant(audit.root, "good")
    code, ran, said = audit.run("paper=nobody")
    assert (code, ran) == (2, [])
    assert "error: unknown adapter 'nobody'; known: good" in said
