"""The command line: one line and exit code 2 for mistakes, progress a person can follow, no heavy imports for --help."""

import json
import subprocess
import sys
import textwrap

import pytest

from auto_research.cli.commands import parse_seeds
from auto_research.cli.follow import Follower
from auto_research.cli.search_table import search_lines
from auto_research.cli.snakemake_call import write_request
from auto_research.runtime.errors import ConfigError


def cli(*arguments, cwd):
    command = [sys.executable, "-m", "auto_research.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "--paper", "nope"], ["unknown paper 'nope'", "din", "rankmixer"]),
        (["reproduce", "--paper", "din", "--device", "cuda:99x"], ["cuda:99x"]),
        (["reproduce", "--paper", "din", "--seeds", "1,x"], ["--seeds"]),
        (["evolve", "--model", "nope"], ["unknown model 'nope'", "rankmixer"]),
        (["evolve", "--run", "Bad/Name"], ["Bad/Name"]),
        (["run", "--command", "true", "--space", "missing.yaml", "--metric", "a"], ["missing.yaml"]),
        (["audit", "--shards", "2", "--shard-index", "2"], ["--shard-index 2"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, tmp_path):
    done = cli(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words)
    assert not list(tmp_path.iterdir())


def test_help_and_list_import_neither_torch_nor_sklearn(tmp_path):
    script = textwrap.dedent("""
        import sys
        from auto_research.cli import commands, main
        commands.list_papers(None, True)
        heavy = {"torch", "sklearn", "pandas", "transformers"} & set(sys.modules)
        sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
    """)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {row["key"] for row in json.loads(done.stdout)} >= {"din", "rankmixer"}


def test_seeds_are_parsed_and_checked():
    assert parse_seeds(None, "42,43") == [42, 43]
    assert parse_seeds(7, None) == [7]
    assert parse_seeds(None, None) is None
    for text in ("1,1", "a", "1,,2", "1.5"):
        with pytest.raises(ConfigError):
            parse_seeds(None, text)
    with pytest.raises(ConfigError):
        parse_seeds(1, "2")


def test_free_text_travels_as_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "更长的历史 {x} 'quotes' -- dashes"
    path = write_request("evolve", {"direction": text, "steps": None})
    assert json.loads(path.read_text(encoding="utf-8")) == {"direction": text}
    assert write_request("evolve", {"direction": text}) == path


CHILD = """
import os, sys
print("rule arm:")
print("Job 3: din smoke: arm din_full, seed 42")
print("1 of 2 steps (50%) done")
print(sys.argv[2], file=sys.stderr)
if sys.argv[1] != "-":
    open(os.environ["AUTO_RESEARCH_EXIT_CODES"], "a").write(sys.argv[1])
sys.exit(int(sys.argv[3]))
"""


def follow(tmp_path, monkeypatch, *arguments):
    import os

    monkeypatch.chdir(tmp_path)
    return Follower([sys.executable, "-c", CHILD, *arguments], dict(os.environ), interval=0.05).run()


def test_progress_and_success(tmp_path, monkeypatch, capfd):
    assert follow(tmp_path, monkeypatch, "-", "nothing", "0") == 0
    shown = capfd.readouterr().err
    assert "arm din_full, seed 42" in shown
    assert "1/2 jobs done" in shown


@pytest.mark.parametrize(("codes", "expected"), [("2\n", 2), ("2\n1\n", 1), ("-", 1)])
def test_a_job_failed_by_mistake_gives_2_and_by_itself_1(tmp_path, monkeypatch, capfd, codes, expected):
    assert follow(tmp_path, monkeypatch, codes, "error: no such data", "1") == expected
    shown = capfd.readouterr().err
    assert "error: no such data" in shown
    assert ("full log" in shown) == (expected == 1)
    assert "no such data" in (tmp_path / "results/requests/snakemake.log").read_text()


def test_a_failure_without_an_error_line_shows_the_end_of_the_log(tmp_path, monkeypatch, capfd):
    assert follow(tmp_path, monkeypatch, "-", "KilledWorker: gone", "1") == 1
    assert "KilledWorker: gone" in capfd.readouterr().err


def test_result_table_names_floors_failures_and_the_claim():
    trial = {"trial_id": "g01-s00-aa", "generation": 1, "slot": 0, "status": "failed", "changed": [], "mean": None}
    trial |= {"low": None, "high": None, "score": None, "error": {"class": "ValueError"}, "why_not": None}
    report = {
        "trials": [trial],
        "champion": {"trial_id": "g00-s00-bb"},
        "floors": {"popularity": {"test": {"fitness": 0.1}}},
        "test": {
            "baseline": {"fitness": 0.2},
            "champion": {"fitness": 0.3},
            "gain": {"delta": 0.1, "low": -0.1, "high": 0.3},
        },
        "claim": "smoke",
    }
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for line in search_lines(report):
        console.print(line)
    text = console.export_text()
    for words in ("failed: ValueError", "floor popularity", "0.1000", "+0.1000 [-0.1000, +0.3000]", "claim: smoke"):
        assert words in text
