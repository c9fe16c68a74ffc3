"""Claims, intervals and the two renderings."""

import pytest
from local_run import LocalRun, use_toy_root

from auto_research.evolve.board import render_markdown
from auto_research.evolve.chart import fitness_chart, gain_chart, ticks
from auto_research.evolve.report import claim, paired_gain
from auto_research.runtime.files import read_json

GAIN = {"delta": 0.1, "low": 0.05, "high": 0.15, "resamples": 10}


def report(**changes):
    base = {
        "request": {"profile": "full", "seeds": [1, 2, 3]},
        "test_reads_before": 0,
        "test": {"gain": GAIN, "champion": {"fitness": 0.5}},
        "floors": {"popularity": {"test": {"fitness": 0.4}}},
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "improves"),
        ({"request": {"profile": "quick", "seeds": [1, 2, 3]}}, "smoke"),
        ({"request": {"profile": "full", "seeds": [1, 2]}}, "smoke"),
        ({"test_reads_before": 1}, "exploratory"),
        ({"floors": {"gbdt": {"test": {"fitness": 0.6}}}}, "no-difference"),
        ({"test": {"gain": {**GAIN, "low": -0.1}, "champion": {"fitness": 0.5}}}, "no-difference"),
        ({"test": {"gain": {**GAIN, "low": -0.2, "high": -0.1}, "champion": {"fitness": 0.5}}}, "worse"),
    ],
)
def test_claim(changes, expected):
    assert claim(report(**changes)) == expected


def seed(fitness, replicates=(), values=()):
    return {"fitness": fitness, "metrics": {}, "replicates": list(replicates), "units": {"values": list(values)}}


def test_the_gain_of_replicates_is_paired():
    gain = paired_gain([seed(0.6, [0.5, 0.7])], [seed(0.5, [0.4, 0.6])])
    assert gain["delta"] == pytest.approx(0.1)
    assert (gain["low"], gain["high"]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_gain_of_units_is_paired_over_seeds():
    champion = [seed(1.0, values=[1.0, 1.0]), seed(3.0, values=[3.0, 3.0])]
    baseline = [seed(1.0, values=[1.0, 1.0]), seed(1.0, values=[1.0, 1.0])]
    gain = paired_gain(champion, baseline)
    assert (gain["delta"], gain["low"], gain["high"]) == (1.0, 1.0, 1.0)
    assert paired_gain([seed(1.0)], [seed(0.5)])["low"] is None


def test_ticks_are_round_and_inside():
    assert ticks(0.13, 0.58) == [0.2, 0.3, 0.4, 0.5]
    assert ticks(1.0, 1.0)


def test_chart_has_a_mark_for_every_trial_and_a_cross_for_failures():
    rows = [
        {
            "trial_id": "a<b",
            "generation": 0,
            "mean": 0.5,
            "low": 0.4,
            "high": 0.6,
            "champion": True,
            "status": "completed",
        },
        {
            "trial_id": "c",
            "generation": 1,
            "mean": None,
            "low": None,
            "high": None,
            "champion": False,
            "status": "failed",
        },
    ]
    svg = fitness_chart(rows, [{"generation": g, "champion": "a<b", "mean": 0.5} for g in (0, 1)])
    assert svg.count("<circle") == 1
    assert svg.count('class="failed"') == 1
    assert "a&lt;b" in svg
    assert gain_chart([("validation", {**GAIN, "low": None})]) == ""


def test_markdown_lists_every_slot_with_its_error(tmp_path, monkeypatch):
    use_toy_root(monkeypatch, tmp_path)
    run = LocalRun()
    for g in (0, 1):
        run.generation(g)
    page = run.finish(1)
    content = read_json(page.parent / "report.json")
    text = render_markdown(content)
    assert [row["status"] for row in content["trials"]] == ["completed", "completed", "completed", "failed"]
    assert all(row["trial_id"] in text for row in content["trials"])
    assert "ValueError: planted" in text
    assert content["floors"]["mean"]["test"]["fitness"] == pytest.approx(0.375)
    assert content["champion"]["changes"] == [{"gene": "block", "from": "plain", "to": "mix"}]
    assert content["test"]["head_share_change"] == pytest.approx(-0.05)
