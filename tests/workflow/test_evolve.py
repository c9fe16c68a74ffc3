"""The search as Snakemake checkpoints, on a host that trains in milliseconds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from search_bench import Search

pytestmark = pytest.mark.workflow


@pytest.fixture
def search(tmp_path):
    return Search.at(tmp_path)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A finished run of three generations with two workers: read only."""
    made = Search.at(tmp_path_factory.mktemp("three"))
    made.run("workers=2")
    return made


def test_a_run_makes_every_file_and_a_second_call_does_nothing(three):
    assert (three.folder / "final/g3/index.html").stat().st_size > 5000
    text = three.run("workers=2")
    assert "Nothing to be done" in text


def test_a_failed_trial_is_listed_and_does_not_stop_the_run(three):
    report = json.loads((three.folder / "final/g3/report.json").read_text())
    failed = [row for row in report["trials"] if row["status"] == "failed"]
    assert failed
    assert all(row["score"] is None and row["error"]["class"] == "ValueError" for row in failed)
    assert report["champion"]["trial_id"] not in {row["trial_id"] for row in failed}


def test_a_planted_nan_is_nonfinite_and_never_champion(three):
    report = json.loads((three.folder / "final/g3/report.json").read_text())
    assert [row["status"] for row in report["trials"] if any(c["to"] == "nan" for c in row["changed"])] == ["nonfinite"]


def test_one_and_two_workers_propose_the_same_bytes(three, search):
    search.run("workers=1")
    assert search.decisions() == three.decisions()


def test_growing_from_three_to_five_reuses_everything_and_equals_five_at_once(three, search, tmp_path):
    shutil.copytree(three.work, search.work, dirs_exist_ok=True)
    before = search.contents()
    text = search.run("generations=5")
    assert {rule: text.count(f"(Rule: {rule})") for rule in ("trial", "select", "final_test", "floors_test")} == {
        "trial": sum(record["status"] == "run" for g in (4, 5) for record in search.records(g)),
        "select": 2,
        "final_test": 2,
        "floors_test": 1,
    }
    after = search.contents()
    changed = [name for name in before if name != "generations.txt" and after[name] != before[name]]
    assert [name for name in changed if not name.startswith(("logs/", "test_reads"))] == []
    assert json.loads((search.folder / "final/g5/report.json").read_text())["test_reads_before"] == 1
    whole = Search.at(tmp_path / "whole")
    whole.run("generations=5", target="evolve_searchtoy_search")
    assert whole.decisions() == search.decisions()
    assert not (whole.folder / "final").exists()


def test_kill_9_in_generation_two_then_the_same_command_ends_the_same(three, search):
    blocks = [record["genome"]["block"] for record in three.records(2) if record["status"] == "run"]
    hold = search.meet / f"hold-{blocks[0]}-3"
    (search.folder.parents[0]).mkdir(parents=True, exist_ok=True)
    search.run("generations=1", target="evolve_searchtoy_search")
    hold.touch()
    process = search.start("generations=3")
    seen = (search.meet / "trace.txt").read_text().count(f"{blocks[0]}-8 3")
    while (search.meet / "trace.txt").read_text().count(f"{blocks[0]}-8 3") == seen:
        assert process.poll() is None, "Snakemake ended before the trial reached the step"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    hold.unlink()
    search.run("generations=3")
    assert search.decisions() == three.decisions()


def test_no_process_opens_sealed_before_the_lock_exists(search):
    hook = search.meet / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(AUDIT)
    search.environment["PYTHONPATH"] = str(hook)
    search.run("generations=1")
    opened = [line.split("|") for line in (search.meet / "opened.txt").read_text().splitlines()]
    readers = {entry for entry, locked, _ in opened if locked == "0"}
    assert readers <= {"evolve_prepare.py"}
    assert any(locked == "1" and path.endswith("rows.json") for _, locked, path in opened)


AUDIT = """
import os, sys
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and "/sealed/" in os.path.abspath(arguments[0]):
        path = os.path.abspath(arguments[0])
        run = path.split("/sealed/")[0]
        finals = os.path.join(run, "final")
        locked = os.path.isdir(finals) and any(os.path.exists(os.path.join(finals, g, "LOCK.json")) for g in os.listdir(finals))
        name = os.path.basename(sys.argv[0]) if sys.argv else "?"
        if name in ("snakemake", "__main__.py"):
            return
        descriptor = os.open(os.environ["TOY_DIR"] + "/opened.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, f"{name}|{int(locked)}|{path}\\n".encode())
        os.close(descriptor)
sys.addaudithook(hook)
"""


def test_corrupt_sealed_data_change_nothing_before_the_test(three, search):
    search.run("generations=0", target="evolve_searchtoy_search")
    (search.folder / "sealed" / "rows.json").write_text("garbage")
    search.run("generations=3", target="evolve_searchtoy_search")
    assert search.decisions() == three.decisions()
    text = search.run("generations=3", code=1)
    assert "sealed test of" in text
    assert not (search.folder / "final/g3/report.json").exists()


@pytest.mark.parametrize("changed", ["population=2", "steps=9", "seeds=7"])
def test_a_changed_request_is_refused_before_any_job(three, changed):
    before = three.contents()
    text = three.run(changed, code=2)
    assert text.strip().splitlines()[-1].startswith("error: run 'demo' of searchtoy is frozen with another request")
    assert "Traceback" not in text
    assert three.contents() == before


def test_the_direction_travels_by_file_only(search):
    request = search.meet / "request.json"
    text = '看 {mixing}: "quoted" --flag'
    request.write_text(json.dumps({"direction": text, "generations": 0}))
    search.run("generations=0", "--configfile", str(request), target="evolve_searchtoy_search")
    assert yaml.safe_load((search.folder / "config.yaml").read_text())["direction"] == text


def test_a_finished_sealed_test_is_never_computed_again(three, search):
    shutil.copytree(three.work, search.work, dirs_exist_ok=True)
    tests = {path: path.read_bytes() for path in search.folder.glob("final/g3/test_*.json")}
    os.utime(search.folder / "final/g3/LOCK.json")
    os.utime(search.folder / "sealed/manifest.json")
    (search.folder / "final/g3/index.html").unlink()
    text = search.run()
    assert "(Rule: final_test)" not in text
    assert "(Rule: floors_test)" not in text
    assert {path: path.read_bytes() for path in tests} == tests


def test_a_search_over_a_command_and_an_edit_of_its_script(search):
    script = search.work / "tune.py"
    script.write_text(
        "import json, os, sys\np = json.load(open(sys.argv[1]))\n"
        "json.dump({'m': {'loss': abs(p['x'] - 2) + p['y']}}, open(os.environ['AUTO_RESEARCH_METRICS'], 'w'))\n"
    )
    (search.work / "space.yaml").write_text("parameters: {x: [0, 1, 2, 3], y: {values: [1, 0.5]}}")
    request = search.meet / "request.json"
    request.write_text(
        json.dumps({
            "command": f"{sys.executable} tune.py", "space": "space.yaml", "metric": "m.loss", "metric_direction": "min",
        })
    )  # fmt: skip
    flags = ("--configfile", str(request), "generations=2")
    search.run(*flags, target="evolve_command")
    folder = search.work / "results/evolve/command/demo"
    report = json.loads((folder / "final/g2/report.json").read_text())
    assert report["champion"]["genome"] == {"x": 2, "y": 1} or report["champion"]["genome"]["y"] == 0.5
    assert report["test"]["champion"]["m.loss"] < report["test"]["baseline"]["m.loss"]
    assert "Nothing to be done" in search.run(*flags, target="evolve_command")
    script.write_text(script.read_text() + "print(1)\n")
    assert "trial" in search.run("-n", *flags, target="evolve_command")


def test_scripts_run_without_snakemake(search):
    request = search.meet / "request.json"
    request.write_text(json.dumps({"population": 1}))
    start = ["--track", "searchtoy", "--run", "alone"]
    search.script("evolve_freeze.py", *start, "--request", str(request))
    search.script("evolve_prepare.py", *start)
    search.script("evolve_propose.py", *start, "--generation", "0")
    folder = search.work / "results/evolve/searchtoy/alone"
    (record,) = json.loads((folder / "gen0/candidates.json").read_text())["candidates"]
    search.script("evolve_trial.py", *start, "--generation", "0", "--trial", record["trial_id"])
    search.script("evolve_select.py", *start, "--generation", "0")
    search.script("evolve_lock.py", *start, "--generations", "0")
    for which in ("baseline", "champion", "floors"):
        search.script("evolve_final_test.py", *start, "--generations", "0", "--which", which)
    search.script("evolve_report.py", *start, "--generations", "0")
    assert (folder / "final/g0/index.html").exists()
    assert "error: " in search.script("evolve_select.py", *start, "--generation", "1", code=2)


def test_proposing_selecting_and_reporting_never_import_torch():
    code = (
        "import sys; import auto_research.evolve.commands, auto_research.evolve.propose, auto_research.evolve.select, "
        "auto_research.evolve.final, auto_research.evolve.report, auto_research.evolve.board, auto_research.evolve.trial; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pandas', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
