import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from auto_research.experiment.card import find_card
from auto_research.experiment.contract import Measurement, Units
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.layout import Layout
from auto_research.experiment.stages import Stage, write_arm
from auto_research.results.compare import cpu_minutes, write_result
from auto_research.results.partial import write_partial
from auto_research.results.records import StaleOutput
from auto_research.runtime.errors import ConfigError, CorruptFile, DataMissing
from auto_research.runtime.files import write_json

RUNTIME = {
    "device_requested": "auto", "device_resolved": "cpu", "torch": "2.7.0", "platform": "Linux-x86_64", "python": "3.11.7",
    "cpu_threads": 2,
}  # fmt: skip
LEVELS = {"popularity": 0.1, "slow": 0.3, "plain": 0.2}


@pytest.fixture
def finished(toy_root):
    """(card, layout, fingerprints) of a toy whose arms all ran with three seeds at tier full."""
    card = find_card(toy_root, "toy")
    layout = Layout("toy", "full", "movielens-100k", toy_root)
    prints = Fingerprints(toy_root)
    for arm, level in LEVELS.items():
        for seed in (42, 43, 44):
            put(card, layout, prints, arm, seed, level)
    return card, layout, prints


def put(card, layout, prints, arm, seed, level, fingerprint=None):
    users = list(range(50))
    values = [level + 0.01 * ((user * 3 + seed + len(arm)) % 7 - 3) for user in users]
    stage = Stage(card, layout, "arm", arm, seed)
    made = fingerprint or prints.stage("toy", "arm", arm, layout.tier)
    record = stage.identity | {"fingerprint": made, "inputs": {}, "runtime": RUNTIME}
    mean = sum(values) / len(values)
    measured = Measurement(
        {"ndcg@10": mean},
        units={"ndcg@10": Units("user", users, values)},
        cost={"params": 10, "flops": 2e9, "seconds": 1.5, "peak_memory_bytes": 2**20}
        | ({"request_ms": 0.25, "best_epoch": 2} if arm == "slow" else {}),
        curve=[
            {"epoch": 1, "step": 5, "loss": 1.0, "ndcg@10": level / 2},
            {"epoch": 2, "step": 10, "loss": 0.5, "ndcg@10": level},
        ],
        notes=["popularity is weak"] if arm == "slow" else [],
    )
    write_arm(stage, record, measured)


def test_minutes_are_summed_over_arms_and_artifacts_or_left_out(finished):
    card, layout, prints = finished
    assert "cpu_minutes" not in write_result(card, layout, prints)  # the arms say nothing of their time
    seconds = {"popularity": 6, "slow": 60, "plain": 24}
    records = {
        arm: {seed: {"measurement": {"cost": {"stage_cpu_seconds": spent + seed - 42}}} for seed in (42, 43, 44)}
        for arm, spent in seconds.items()
    }
    artifacts = card.artifact_order(list(LEVELS))
    assert artifacts
    assert cpu_minutes(card, layout, records) is None  # nor do the artifacts
    for name in artifacts:
        for seed in (42, 43, 44):
            write_json(layout.output("artifact", name, seed), {"cost": {"stage_cpu_seconds": 30}})
    one = (90 + 30 * len(artifacts)) / 60
    total = 3 * one + 9 / 60
    assert cpu_minutes(card, layout, records) == {"tuning_seed": round(one, 2), "all_seeds": pytest.approx(total)}


def test_three_seeds_an_interval_and_floors_make_a_claim(finished):
    card, layout, prints = finished
    result = write_result(card, layout, prints)
    assert result["claim"] == "improves"
    assert result["floors"] == {"popularity": pytest.approx(0.1, abs=0.01)}
    assert result["seeds"] == [42, 43, 44]
    assert [pair["verdict"] for pair in result["comparisons"]] == ["improves", "improves"]
    assert list(result["arms"]) == ["popularity", "slow", "plain"]
    assert len(result["arms"]["slow"]["metrics"]["ndcg@10"]["per_seed"]) == 3
    own = result["arms"]["slow"]["intervals"]["ndcg@10"]
    assert own["low"] < result["arms"]["slow"]["metrics"]["ndcg@10"]["mean"] < own["high"]
    assert own["method"] == "bootstrap over 50 units of kind user"
    assert json.loads(layout.result.read_text()) == result
    assert set(result["runtime"]) == set(RUNTIME)


def test_losing_arms_stay_and_say_so(finished):
    card, layout, prints = finished
    for seed in (42, 43, 44):
        put(card, layout, prints, "slow", seed, 0.05)
    result = write_result(card, layout, prints)
    assert result["claim"] == "worse"
    assert result["arms"]["slow"]["floors_not_beaten"] == ["popularity"]
    report = layout.report.read_text()
    assert "**Claim: worse.**" in report
    assert "| `slow` * | treatment | 3 |" in report
    assert "slow: popularity is weak" in report
    assert "| arm | best epoch | request ms |" in report  # every cost an adapter measures
    assert "| `slow` | 2 | 0.25 |" in report
    assert "| `plain` | 2 |" not in report


def test_better_than_the_other_arm_but_not_than_a_floor_is_no_improvement(finished):
    card, layout, prints = finished
    for seed in (42, 43, 44):
        put(card, layout, prints, "popularity", seed, 0.5)
    assert write_result(card, layout, prints)["claim"] == "no-difference"


def test_the_picture_is_well_formed_and_shows_every_arm(finished):
    card, layout, prints = finished
    write_result(card, layout, prints)
    picture = ElementTree.fromstring(layout.curves.read_text())
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"popularity", "slow", "plain", "slow - plain", "validation ndcg@10 by epoch, first seed"} <= texts
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 3


def test_a_mixture_is_refused_and_nothing_is_written(finished):
    card, layout, prints = finished
    put(card, layout, prints, "plain", 43, 0.2, fingerprint="0" * 32)
    with pytest.raises(StaleOutput, match=r"seed43/arms/plain\.json was made by other code"):
        write_result(card, layout, prints)
    assert not layout.result.exists()
    assert not layout.report.exists()


def test_another_input_than_the_present_one_is_refused(finished):
    card, layout, prints = finished
    stage = Stage(card, layout, "arm", "plain", 42)
    record = json.loads(stage.output.read_text())
    record["inputs"] = {"table": "0" * 64}
    write_json(stage.output, record)
    write_json(layout.output("artifact", "table", 42), {"made": "later"})  # the hash is looked at before the content
    with pytest.raises(StaleOutput, match="another table"):
        write_result(card, layout, prints)


def test_missing_corrupt_and_misplaced_arms_are_named(finished):
    card, layout, prints = finished
    path = layout.arm("slow", 44)
    text = path.read_text()
    path.unlink()
    with pytest.raises(DataMissing, match="arm slow of toy, seed 44"):
        write_result(card, layout, prints)
    path.write_text(text[:100])
    with pytest.raises(CorruptFile, match=r"slow\.json"):
        write_result(card, layout, prints)
    path.write_text(text.replace('"seed":44', '"seed":45'))
    with pytest.raises(CorruptFile, match="seed 45"):
        write_result(card, layout, prints)
    path.write_text(text.replace('"tier":"full"', '"tier":"full","mood":1'))
    with pytest.raises(ConfigError, match="mood"):
        write_result(card, layout, prints)


def test_a_partial_summary_names_failures_and_is_no_result(finished):
    card, layout, prints = finished
    layout.arm("slow", 43).unlink()
    write_json(
        layout.failure("arm", "slow", 43),
        {"schema_version": 2, "adapter": "toy", "tier": "full", "dataset": "movielens-100k", "kind": "arm", "name": "slow",
         "seed": 43, "error": "NonFinite", "message": "loss became nan", "log": "x.log"},
    )  # fmt: skip
    text = write_partial(card, layout, prints).read_text()
    assert "| arm `slow` | 43 | NonFinite | loss became nan | x.log |" in text
    assert "slow, seed 43: no output" in text
    assert json.loads(layout.partial.read_text())["result"]["arms"]["slow"]["seeds"] == [42, 44]
    assert not layout.result.exists()


def test_comparing_imports_no_torch_pandas_or_sklearn():
    code = (
        "import sys, auto_research.results.compare, auto_research.results.partial, auto_research.experiment.commands;"
        "from auto_research.experiment.graph import machine;"
        "print([m for m in ('torch', 'pandas', 'sklearn', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"
