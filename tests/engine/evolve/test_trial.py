"""A trial always ends with trial.json; only the machine's own faults are errors."""

import json
import shutil

import pytest
from local_run import TOY_ROOT, TRAINING, LocalRun, use_toy_root

from auto_research.evolve.trial import run_trial
from auto_research.evolve.worker import check_finite, status_of
from auto_research.experiment.search import Evaluation
from auto_research.runtime.errors import ConfigError, DataMissing, NonFinite, OutOfMemory, RunFailure, TimeLimit
from auto_research.runtime.files import read_json, write_json


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A frozen and prepared toy run whose generation 0 is done; `plant(genes)` makes a candidate of generation 1."""
    use_toy_root(monkeypatch, tmp_path)
    made = LocalRun()
    made.generation(0)
    return made


def plant(run, **genes):
    """Write a generation 1 with one candidate and return its record."""
    from auto_research.evolve.propose import propose
    from auto_research.evolve.request import load_frozen

    config = load_frozen(run.folder / "config.yaml")
    config["definition"]["planted"] = {"1": [genes]}
    config["population"] = 1
    document = propose(config, 1, read_json(run.folder / "gen0" / "selection.json"))
    write_json(run.folder / "gen1" / "candidates.json", document)
    return document["candidates"][0]


@pytest.mark.parametrize(
    ("genes", "status", "error"),
    [
        ({"block": "mix"}, "completed", None),
        ({"fault": "raise"}, "failed", "ValueError"),
        ({"fault": "nan"}, "nonfinite", "NonFinite"),
        ({"fault": "exit"}, "failed", "Exit"),
        ({"width": 9}, "invalid", "InvalidGenome"),
    ],
)
def test_every_ending_is_written_and_leaves_no_state(run, genes, status, error):
    record = plant(run, **genes)
    assert run_trial(run.folder, 1, record["trial_id"], **TRAINING) == status
    trial = run.trial(1, record["trial_id"])
    block = trial["deterministic"]
    assert (block["status"], (block["error"] or {}).get("class")) == (status, error)
    assert bool(block["per_seed"]) == (status == "completed")
    assert "seconds" not in json.dumps(block)
    assert trial["telemetry"]["attempts"] == (0 if status == "invalid" else 1)
    assert [path.name for path in (run.folder.parents[2] / "state").iterdir()] == [".locks"]


def test_a_trial_over_its_time_limit_is_killed_and_recorded(run):
    record = plant(run, fault="sleep")
    assert run_trial(run.folder, 1, record["trial_id"], **{**TRAINING, "timeout": 4.0}) == "timeout"
    assert run.trial(1, record["trial_id"])["telemetry"]["message"] == "killed after 4 s"


def test_out_of_memory_is_retried_once_with_half_the_micro_batch(run):
    record = plant(run, fault="oom")
    assert run_trial(run.folder, 1, record["trial_id"], **TRAINING) == "completed"
    trial = run.trial(1, record["trial_id"])
    assert trial["telemetry"]["attempts"] == 2
    assert trial["deterministic"]["micro_batch"] == 4


def test_a_repeated_trial_has_the_same_deterministic_block(run):
    record = plant(run, block="mix")
    blocks = []
    for _ in range(2):
        run_trial(run.folder, 1, record["trial_id"], **TRAINING)
        blocks.append(run.trial(1, record["trial_id"])["deterministic"])
    assert blocks[0] == blocks[1]


def test_finished_seeds_and_steps_are_not_trained_again(tmp_path, monkeypatch):
    use_toy_root(monkeypatch, tmp_path)
    meet = tmp_path / "meet"
    meet.mkdir()
    monkeypatch.setenv("TOY_DIR", str(meet))
    run = LocalRun(seeds=[1, 2])
    run.generation(0)
    whole = run.trial(0, run.records(0)[0]["trial_id"])["deterministic"]
    assert [seed["seed"] for seed in whole["per_seed"]] == [1, 2]
    assert (meet / "trace.txt").read_text().count("plain-8 0 1") == 2


def test_nothing_else_of_the_candidate_list_influences_a_trial(run):
    record = plant(run, block="mix")
    run_trial(run.folder, 1, record["trial_id"], **TRAINING)
    alone = run.trial(1, record["trial_id"])["deterministic"]
    path = run.folder / "gen1" / "candidates.json"
    document = read_json(path)
    document["candidates"].insert(0, {**record, "trial_id": "g01-s09-00000000", "slot": 9})
    write_json(path, document)
    run_trial(run.folder, 1, record["trial_id"], **TRAINING)
    assert run.trial(1, record["trial_id"])["deterministic"] == alone


def test_an_unknown_trial_id_is_one_clear_error(run):
    with pytest.raises(ConfigError, match="no candidate 'g00-s00-00000000'"):
        run_trial(run.folder, 0, "g00-s00-00000000", **TRAINING)


def test_missing_input_is_an_error_and_no_trial(run):
    record = plant(run, block="mix")
    shutil.move(run.folder / "dev" / "rows.json", run.folder / "dev" / "away.json")
    with pytest.raises(RunFailure, match=r"rows\.json"):
        run_trial(run.folder, 1, record["trial_id"], **TRAINING)
    assert not (run.folder / "gen1" / "trials" / record["trial_id"] / "trial.json").exists()
    assert TOY_ROOT.is_dir()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NonFinite("x"), "nonfinite"),
        (OutOfMemory("x"), "oom"),
        (RuntimeError("CUDA out of memory. Tried"), "oom"),
        (TimeLimit("x"), "timeout"),
        (DataMissing("x"), "infrastructure"),
        (OSError(28, "No space left"), "infrastructure"),
        (KeyError("x"), "failed"),
        (RunFailure("x"), "failed"),
    ],
)
def test_status_of_an_exception(error, status):
    assert status_of(error) == status


@pytest.mark.parametrize("field", ["fitness", "metrics", "units", "replicates"])
def test_every_number_of_an_evaluation_must_be_finite(field):
    bad = {
        "fitness": float("inf"),
        "metrics": {"m": float("nan")},
        "units": {"values": [float("nan")]},
        "replicates": [float("nan")],
    }
    with pytest.raises(NonFinite):
        check_finite(Evaluation(**{"fitness": 0.1, "metrics": {}, field: bad[field]}))
    check_finite(Evaluation(fitness=0.1, metrics={"empty slice": None}))
