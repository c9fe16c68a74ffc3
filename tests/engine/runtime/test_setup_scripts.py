"""Set-up and demo scripts: pins, reuse of environments, variables, and clear lines. Nothing is installed here."""

import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement

from auto_research.runtime import device_report
from auto_research.runtime.errors import guard
from auto_research.runtime.paths import checkout_root
from auto_research.runtime.schema import load_yaml

ROOT = checkout_root()
SCRIPTS = [
    *ROOT.glob("demo*.sh"),
    ROOT / "test.sh",
    *(ROOT / "scripts" / name for name in ("bootstrap.sh", "run_demo.sh")),
]


def pins(platform):
    lines = (ROOT / "envs" / f"constraints-{platform}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def bash(script, *arguments, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("DEMO_", "TORCH_INDEX"))}
    return subprocess.run(
        ["bash", "-euc", script, "bash", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**clean, **environment},
    )


def test_platforms_pin_the_same_public_versions():
    cpu = pins("cpu")
    assert pins("cuda") == cpu
    assert pins("mps") == cpu
    assert not [version for version in cpu.values() if "+" in version]


def test_pins_satisfy_every_declared_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {name.lower().replace("_", "-"): version for name, version in pins("cpu").items()}
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    for line in lines:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[requirement.name.lower().replace("_", "-")]), line


@pytest.mark.parametrize("platform", ["cpu", "cuda", "mps"])
def test_conda_files_repeat_the_pins(platform):
    conda = load_yaml(ROOT / "envs" / f"{platform}.yaml")
    listed = dict(line.split("==") for line in conda["dependencies"][-1]["pip"])
    assert "torch" in listed
    assert listed.items() <= pins(platform).items()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_keep_to_bash_3(script):
    subprocess.run(["bash", "-n", script], check=True)
    newer = re.compile(r"declare -[An]|local -[An]|mapfile|readarray|\$\{\w+(,,|\^\^|@[A-Z])|\|&|&>>|coproc|\bwait -n")
    assert not newer.findall(script.read_text())


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"DEMO_TRACK": "llm"}, "DEMO_TRACK=llm is not built yet: the track that exists is recommendation"),
        ({"DEMO_TRACK": "checkpoint-vlm"}, "DEMO_TRACK=checkpoint-vlm is not built yet"),
        ({"DEMO_TRACK": "music"}, "DEMO_TRACK=music is unknown: use one of recommendation llm"),
        ({"DEMO_PROFILE": "long"}, "DEMO_PROFILE=long is unknown: use one of quick full"),
        ({"DEMO_MULTIMODAL_DATASET": "x"}, "DEMO_MULTIMODAL_DATASET=x is unknown: use one of visual-shapes"),
        ({"DEMO_WORKERS": "0"}, "DEMO_WORKERS=0 is not a whole number of at least 1"),
        ({"DEMO_CPU_THREADS": "two"}, "DEMO_CPU_THREADS=two is not a whole number"),
    ],
)
@pytest.mark.parametrize("platform", ["mac", "linux-cpu", "linux-gpu"])
def test_a_wrong_variable_is_one_line_before_any_set_up(variables, line, platform, tmp_path):
    answer = bash(f"./demo-{platform}.sh", DEMO_VENV=str(tmp_path / "venv"), **variables)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"error: {line}")
    assert answer.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_threads_are_cores_over_workers_between_1_and_16():
    script = 'source scripts/run_demo.sh; bootstrap_cores() { echo "$CORES"; }; demo_threads "$1" "$2"'
    for cores, workers, usual, threads in [
        ("2", "2", "2", "1"),
        ("2", "1", "2", "1"),  # as with two workers: the same numbers
        ("2", "1", "1", "2"),
        ("2", "4", "2", "1"),
        ("8", "2", "2", "4"),
        ("8", "4", "2", "2"),
        ("128", "1", "1", "16"),
        ("7", "2", "2", "3"),
    ]:
        assert bash(script, workers, usual, CORES=cores).stdout.strip() == threads


def test_trailing_arguments_win():
    script = 'source scripts/run_demo.sh; demo_option --device auto "${@}"'
    assert bash(script).stdout == "auto"
    assert bash(script, "--run", "x", "--device", "cpu").stdout == "cpu"
    assert bash(script, "--device=cpu", "--device", "cuda:1").stdout == "cuda:1"


# Replaces what needs a network: the environment is made without pip (PYTHONPATH lends it), pip's install is noted.
OFFLINE = """
source scripts/bootstrap.sh
bootstrap_make_venv() { "$1" -m venv --clear --without-pip "$2" && echo made; }
bootstrap_install() { echo "installed [$3]"; printf '#!/bin/sh\\n' >"$(dirname "$1")/auto-research"; chmod +x "$(dirname "$1")/auto-research"; }
bootstrap_environment "$1" cpu "$2"
"""


@pytest.fixture
def set_up(tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    (library / "pip").symlink_to(Path(pip.__file__).parent)

    def run(extras="", script=OFFLINE, **environment):
        lent = {"PYTHONPATH": str(library), "BOOTSTRAP_BASE_PYTHON": sys.executable, **environment}
        return bash(script, str(tmp_path / "venv"), extras, **lent)

    return run


def test_an_environment_is_reused_until_its_pins_change(set_up):
    assert "made\n" in set_up("dev,llm").stdout
    assert "reused" in set_up("dev,llm").stdout
    assert "reused" in set_up("").stdout  # fewer extras are there already
    more = set_up("cluster").stdout
    assert "made" not in more
    assert "installed [dev,llm,cluster]" in more
    assert "reused" in set_up("llm,cluster").stdout
    assert "installed" in set_up("cluster", TORCH_INDEX_URL="file:/wheels").stdout
    again = set_up("cluster", TORCH_INDEX_URL="file:/wheels", BOOTSTRAP_REINSTALL="1").stdout
    assert "made\n" in again
    assert "installed [cluster]" in again


def test_a_set_up_that_failed_is_not_taken_for_done(set_up):
    broken = OFFLINE.replace('echo "installed [$3]"', "return 2")
    assert set_up(script=broken).returncode == 2
    after = set_up()
    assert after.returncode == 0
    assert "installed []" in after.stdout


def test_an_environment_whose_python_is_gone_is_made_anew(set_up, tmp_path):
    set_up()
    (tmp_path / "venv" / "bin" / "python").unlink()
    assert "made\n" in set_up().stdout


def test_too_old_a_python_is_refused(set_up):
    answer = set_up(BOOTSTRAP_BASE_PYTHON="no-such-python")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: no Python 3.11 or later found")


class Index(BaseHTTPRequestHandler):
    """Answers /good/torch/ and nothing else."""

    def do_GET(self):
        self.send_response(200 if self.path == "/good/torch/" else 404)
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *_):
        """Quiet."""


def test_only_an_index_that_answers_is_used(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    script = 'source scripts/bootstrap.sh; bootstrap_index_answers "$1" "$2" && echo yes || echo no'
    direct = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    try:
        assert bash(script, sys.executable, f"{base}/good", **direct).stdout == "yes\n"
        assert bash(script, sys.executable, f"{base}/bad", **direct).stdout == "no\n"
    finally:
        server.shutdown()
        server.server_close()
    assert bash(script, sys.executable, f"{base}/good", **direct).stdout == "no\n"
    assert bash(script, sys.executable, "file:/wheels").stdout == "yes\n"


def test_device_report_says_what_is_used_and_stops_on_what_is_missing(capsys):
    assert guard(device_report.main, ["--device", "cpu", "--cpu-threads", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("device    cpu", "hardware", "torch     ", "cuda", "one training step passed"):
        assert word in out
    assert guard(device_report.main, ["--device", "cuda:99"]) == 2
    assert capsys.readouterr().err.startswith("error: device cuda:99 is not available: this machine has ")
