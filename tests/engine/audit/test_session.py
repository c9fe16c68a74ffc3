"""The audit without Snakemake: light imports, every finished row on disk, resume, shards."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import audit_toys
import pytest
from audit_gate import GATED, wait_for
from hypothesis import given
from hypothesis import strategies as st

from auto_research.audit.records import merge_documents, read_shard
from auto_research.audit.selection import select, shard
from auto_research.audit.session import ordered
from auto_research.experiment.card import discover
from auto_research.runtime.errors import ConfigError, UnknownName

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(ROOT / "scripts" / "audit_gpu_paths.py")
BLOCKER = """\
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"snakemake", "grimp", "typer", "rich"}:
            raise ImportError(f"{name} is not installed here")


sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def environment(tmp_path):
    """Environment in which Snakemake, grimp, typer and rich cannot be imported, also not by child processes."""
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    changes = {"AUTO_RESEARCH_ROOT": str(tmp_path / "root"), "PYTHONPATH": str(tmp_path / "block")}
    return os.environ | changes | {"TOY_GATE": str(tmp_path / "gate"), "OMP_NUM_THREADS": "1"}


def command(*flags: str) -> list[str]:
    return [sys.executable, SCRIPT, "--device", "cpu", "--tier", "tiny", "--timeout-seconds", "240", *flags]


def run(tmp_path, environment, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*flags), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)


def test_snakemake_is_really_out_of_reach(environment):
    done = subprocess.run([sys.executable, "-c", "import snakemake"], env=environment, capture_output=True, text=True)
    assert "not installed here" in done.stderr


def test_help_needs_neither_snakemake_nor_torch(tmp_path, environment):
    code = f"import runpy, sys; sys.argv = ['x', '--help']\ntry:\n    runpy.run_path({SCRIPT!r}, run_name='__main__')\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for flag in ("--dataset-dir", "--output", "--timeout-seconds", "--only-explicit-device-packages", "--include-concept-demos", "--shards", "--shard-index", "--paper", "--resume", "--device", "--tier"):  # fmt: skip
        assert flag in done.stdout


def test_kill_in_the_middle_loses_no_finished_row(tmp_path, environment):
    audit_toys.plant(tmp_path / "root", "alpha")
    audit_toys.plant(tmp_path / "root", "beta", GATED)
    output = tmp_path / "out" / "cpu.json"
    process = subprocess.Popen(command("--output", str(output)), cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    try:
        wait_for((tmp_path / "gate.reached").is_file, process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
    (kept,) = read_shard(output)["rows"]
    assert (kept["adapter"], kept["status"]) == ("alpha", "cpu_pass")

    (tmp_path / "gate").touch()
    done = run(tmp_path, environment, "--output", str(output), "--resume")
    assert done.returncode == 0, done.stderr
    rows = {row["adapter"]: row for row in read_shard(output)["rows"]}
    assert rows["alpha"] == kept
    assert rows["beta"]["status"] == "cpu_pass"
    assert "alpha on cpu" not in done.stderr
    summary = json.loads(output.with_name("cpu.summary.json").read_text())
    assert summary["complete"]
    assert summary["difference"]["added"] == ["beta"]


def test_shards_run_apart_merge_to_the_whole(tmp_path, environment):
    for key in ("alpha", "beta"):
        audit_toys.plant(tmp_path / "root", key)
    audit_toys.plant(tmp_path / "root", "gamma", audit_toys.RAISES)
    assert run(tmp_path, environment, "--output", "whole.json").returncode == 1
    codes = [
        run(tmp_path, environment, "--output", f"{index}.json", "--shards", "3", "--shard-index", str(index)).returncode
        for index in range(3)
    ]
    assert codes == [0, 0, 1]

    def facts(summary: dict) -> dict:
        timed = ("seconds", "valid_seconds")
        rows = [{key: value for key, value in row.items() if key not in timed} for row in summary["rows"]]
        return {key: summary[key] for key in ("expected", "passes", "missing", "counts", "skipped")} | {"rows": rows}

    whole = merge_documents([read_shard(tmp_path / "whole.json")])
    parts = [read_shard(tmp_path / f"{index}.json") for index in range(3)]
    assert facts(merge_documents(parts)) == facts(whole)
    assert not merge_documents(parts[:2])["complete"]
    with pytest.raises(ConfigError, match="twice"):
        merge_documents([parts[0], parts[0]])


def test_an_accelerator_that_is_missing_is_an_error_before_any_work(tmp_path, environment):
    audit_toys.plant(tmp_path / "root", "alpha")
    done = run(tmp_path, environment, "--device", "cuda:7", "--output", "out.json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: device cuda:7 is not available")
    assert not (tmp_path / "out.json").exists()


@given(
    keys=st.sets(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), max_size=40),
    shards=st.integers(min_value=1, max_value=9),
)
def test_shards_are_disjoint_complete_and_do_not_depend_on_order(keys, shards):
    parts = [shard(list(keys), shards, index) for index in range(shards)]
    assert sorted(key for part in parts for key in part) == sorted(keys)
    assert parts == [shard(sorted(keys, reverse=True), shards, index) for index in range(shards)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_that_does_not_exist_is_refused():
    for shards, index in ((3, 3), (3, -1), (0, None)):
        with pytest.raises(ConfigError):
            shard(["a"], shards, index)


def test_selection_follows_cards_and_own_sources(tmp_path):
    audit_toys.plant(tmp_path, "said-and-done")
    audit_toys.plant(tmp_path, "said-only", audit_toys.NO_DEVICE)
    audit_toys.plant(tmp_path, "done-only", path=False)
    audit_toys.plant(tmp_path, "neither", audit_toys.NO_DEVICE, path=False)
    audit_toys.plant(tmp_path, "show-case", fidelity="concept_demo")
    cards = discover(tmp_path)
    assert select(cards).chosen == ("done-only", "said-and-done", "said-only")
    assert select(cards, only_explicit=True).chosen == ("done-only", "said-and-done")
    assert "show-case" in select(cards, include_concept_demos=True).chosen
    assert select(cards, papers=["neither", "show_case"]).chosen == ("neither", "show-case")
    assert select(cards).skipped == {"neither": "no device path in its own folder", "show-case": "concept demo"}
    with pytest.raises(UnknownName):
        select(cards, papers=["nobody"])


def test_longest_adapters_run_last(tmp_path):
    for key in ("alpha", "beta", "gamma"):
        audit_toys.plant(tmp_path, key)
    cards = discover(tmp_path)
    assert ordered(["gamma", "beta", "alpha"], cards, None) == ["alpha", "beta", "gamma"]
    assert ordered(["alpha", "beta", "gamma"], cards, {"alpha": 9.0, "gamma": 2.0}) == ["gamma", "alpha", "beta"]
