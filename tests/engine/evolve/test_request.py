"""What identifies a run, and how a changed request is refused."""

import pytest
import yaml
from local_run import use_toy_root

from auto_research.evolve.request import freeze, frozen_text, load_frozen, refuse_changes, search_from
from auto_research.evolve.tracks import check_definition, discover_tracks, load_track, merged
from auto_research.runtime.errors import ConfigError, UnknownName
from auto_research.runtime.paths import checkout_root


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    use_toy_root(monkeypatch, tmp_path)


def test_generations_workers_device_threads_and_time_limit_are_not_frozen():
    freeze(search_from("searchtoy", {"run": "r"}))
    for changes in (
        {"generations": 9},
        {"workers": 4},
        {"device": "cpu"},
        {"cpu_threads": 2},
        {"trial_timeout_seconds": 5},
    ):
        refuse_changes(search_from("searchtoy", {"run": "r", **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"population": 4},
        {"seeds": [1]},
        {"direction": "x"},
        {"steps": 7},
        {"evaluation_users": 3},
        {"dataset": "other"},
    ],
)
def test_a_changed_request_is_refused_with_both_values(changes):
    freeze(search_from("searchtoy", {"run": "r"}))
    (name,) = changes
    with pytest.raises(ConfigError, match=f"{name}: .* -> "):
        refuse_changes(search_from("searchtoy", {"run": "r", **changes}))
    refuse_changes(search_from("searchtoy", {"run": "another", **changes}))


def test_equal_requests_are_equal_files_under_any_name():
    first, second = (freeze(search_from("searchtoy", {"run": name})) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert (load_frozen(first)["run"], load_frozen(second)["run"]) == ("a", "b")


def test_free_text_survives_the_frozen_file():
    text = '先看序列: "quotes" {braces} --flag\n第二行'
    path = freeze(search_from("searchtoy", {"direction": text}))
    assert load_frozen(path)["direction"] == text
    assert frozen_text(load_frozen(path)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["1e-05", "0.1", "123456789.0"])
def test_numbers_survive_the_frozen_file(text):
    assert yaml.safe_load(frozen_text({"v": float(text)}))["v"] == float(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run": "../x"}, "run"),
        ({"population": 0}, "at least 1"),
        ({"seeds": [1, 1]}, "repeats"),
        ({"seeds": "a"}, "integers"),
        ({"profile": "full"}, "unknown budget profile"),
    ],
)
def test_bad_settings_are_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        search_from("searchtoy", settings)


def test_unknown_track_names_the_known_ones():
    with pytest.raises(UnknownName, match="known: searchtoy"):
        load_track("other")


def test_the_rankmixer_track_is_valid_and_never_runs_evidence():
    folder = checkout_root() / "config" / "evolve"
    definition = load_track("rankmixer", folder)
    assert "rankmixer" in discover_tracks(folder)
    runnable = {operator["name"] for operator in definition["operators"]}
    assert runnable == {"longer", "unimixer", "smoe_dtsi", "attention", "identity", "swiglu_pffn"}
    evidence = {entry["name"] for entry in definition["evidence"]}
    assert "dceo" in evidence
    values = {str(value) for gene in definition["genome"] for value in gene["allowed"]}
    assert not evidence & values
    quick = {gene["name"]: gene["default"] for gene in merged(definition, "quick")["genome"]}
    assert (quick["dimensions"], quick["sequence_length"], quick["batch_size"]) == (32, 20, 64)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["genome"][0].update(active_when=[{"block": ["mix"]}]), "may not read the gene it sets"),
        (lambda d: d["genome"][0].update(active_when=[{"width": [7]}]), "names nothing"),
        (lambda d: d["operators"][0].update(values=["absent"]), "not in the genome"),
        (lambda d: d["generations"].pop(), "later"),
        (lambda d: d["budgets"]["quick"].update(defaults={"width": 7}), "budget quick"),
        (lambda d: d["budgets"]["quick"].update(defaults={"absent": 7}), "unknown genes"),
        (lambda d: d.update(extra=1), "extra"),
    ],
)
def test_a_wrong_track_file_is_refused(edit, message):
    definition = load_track("searchtoy")
    edit(definition)
    with pytest.raises(ConfigError, match=message):
        check_definition(definition, "toy.yaml")
