"""A person's own script as host: parameters in a JSON file, a metric out of one, same controller and report."""

import sys

import pytest
import yaml
from local_run import LocalRun, use_toy_root

from auto_research.evolve.command_host import dig
from auto_research.evolve.command_space import command_definition
from auto_research.runtime.errors import ConfigError, NonFinite, RunFailure
from auto_research.runtime.files import read_json

SCRIPT = """
import json, os, sys
p = json.load(open(sys.argv[1]))
assert os.environ["AUTO_RESEARCH_PARAMETERS"] == sys.argv[1]
assert isinstance(p["shuffle"], bool) and isinstance(p["layers"], int)
if p["layers"] == 3:
    sys.exit("three layers do not fit")
loss = (p["rate"] - 0.1) ** 2 + 1.0 / p["layers"] + int(os.environ["AUTO_RESEARCH_SEED"]) * 0
json.dump({"valid": [{"loss": loss}]}, open(os.environ["AUTO_RESEARCH_METRICS"], "w"))
"""
SPACE = {
    "title": "Tune it",
    "parameters": {
        "rate": {"values": [0.01, 0.1, 1.0], "default": 0.01},
        "layers": [1, 2, 3],
        "shuffle": [True, False],
        "warmup": {"values": [0, 10], "when": {"layers": [2]}},
    },
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    use_toy_root(monkeypatch, tmp_path)
    (tmp_path / "train it.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return {
        "command": f"{sys.executable} 'train it.py'",
        "space": "space.yaml",
        "metric": "valid.0.loss",
        "metric_direction": "min",
    }


def test_a_search_over_a_script_finds_the_smaller_loss_and_keeps_failures(settings):
    run = LocalRun("command", **settings, population=3)
    for g in range(4):
        block = run.generation(g)
    genome = block["champion"]["genome"]
    assert block["champion"]["mean"] < 0
    assert (genome["rate"], genome["layers"]) == (0.1, 2)
    report = read_json(run.finish(3).parent / "report.json")
    failed = [row for row in report["trials"] if row["status"] == "failed"]
    assert failed
    assert all("exit code 1" in row["error"]["message"] for row in failed)
    assert report["floors"] == {}


def test_parameters_keep_the_types_of_the_space(settings, tmp_path):
    definition = command_definition(settings)
    kinds = {gene["name"]: gene["type"] for gene in definition["genome"]}
    assert kinds == {"rate": "float", "layers": "int", "shuffle": "cat", "warmup": "int"}
    run = LocalRun("command", **settings)
    run.generation(0)
    genome = run.records(0)[0]["genome"]
    assert genome == {"rate": 0.01, "layers": 1, "shuffle": "true", "warmup": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": "absent.yaml"}, "no such file"),
        ({"command": ""}, "needs command"),
        ({"metric": None}, "needs metric"),
    ],
)
def test_missing_parts_are_one_line(settings, change, message):
    with pytest.raises(ConfigError, match=message):
        command_definition({**settings, **change})


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"a b": [1]},
        {"a": {"values": [1], "default": 2}},
        {"a": {"values": [1], "when": {"b": [1]}}},
        {"a": {"value": 1}},
    ],
)
def test_a_wrong_space_is_refused(settings, tmp_path, parameters):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({"parameters": parameters}))
    with pytest.raises(ConfigError):
        command_definition(settings)


def test_metric_paths():
    assert dig({"a": {"b": [1, {"c": 2}]}}, "a.b.1.c") == 2.0
    for path in ("a.x", "a.b.9", "a", "a.b.1.c.d"):
        with pytest.raises(RunFailure):
            dig({"a": {"b": [1, {"c": 2}]}}, path)
    with pytest.raises(NonFinite):
        dig({"a": float("nan")}, "a")
    with pytest.raises(RunFailure):
        dig({"a": True}, "a")


def test_no_shell_sees_the_command(settings, tmp_path):
    marker = tmp_path / "marker"
    command = f"{settings['command']} ; touch {marker}"
    run = LocalRun("command", **{**settings, "command": command})
    with pytest.raises(RunFailure, match="baseline ended as failed"):
        run.generation(0)
    assert not marker.exists()
