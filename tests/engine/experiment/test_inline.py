import json

import pytest

from auto_research.experiment.inline import run_adapter
from auto_research.experiment.layout import Layout
from auto_research.experiment.loader import load_experiment
from auto_research.runtime.errors import ConfigError


def test_every_arm_runs_and_nothing_is_left_behind(toy_root, tmp_path):
    measured = run_adapter("toy", "tiny", workdir=tmp_path / "work", device="cpu")
    assert list(measured) == ["popularity", "slow", "plain"]
    assert measured["popularity"].metrics["ndcg@10"] == pytest.approx(0.1)
    assert measured["plain"].metrics["ndcg@10"] == pytest.approx(0.2 + 0.001 * (1 + 2 + 3 + 4))
    assert measured["slow"].metrics["ndcg@10"] == pytest.approx(0.2 + 0.003 * 10)
    assert measured["slow"].cost["seconds"] > 0
    layout = Layout("toy", "tiny", "movielens-100k", tmp_path / "work")
    manifest = json.loads(layout.output("artifact", "table", 42).read_text())
    assert list(manifest["files"]) == ["table.json"]
    assert [path.name for path in (tmp_path / "work" / "results" / "state").iterdir()] == [".locks"]


def test_only_the_arms_asked_for_and_the_artifacts_below_them(toy_root, tmp_path):
    assert list(run_adapter("toy", "tiny", workdir=tmp_path / "work", arms=["popularity"])) == ["popularity"]
    assert not (tmp_path / "work" / "results/reproduce/toy/tiny/movielens-100k/seed42/artifacts").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def plain(ctx)", "def plane(ctx)", "'plane' is coded but not in card.yaml"),
        ("@experiment.arm\ndef plain(ctx)", "def plain(ctx)", "'plain' is in card.yaml but not coded"),
        ('Experiment("toy")', 'Experiment("tiger")', "the card says 'toy'"),
        ("experiment = Experiment", "experiments = Experiment", "must define"),
    ],
)
def test_functions_and_card_must_agree(toy_root, old, new, message):
    path = toy_root / "adapters" / "toy" / "experiment.py"
    text = path.read_text()
    assert old in text
    text = text.replace(old, new)
    if "experiments =" in text:
        text = text.replace("@experiment.", "@experiments.")
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_experiment("toy")


def test_an_arm_must_report_the_primary_metric_as_a_measurement(toy_root, tmp_path):
    path = toy_root / "adapters" / "toy" / "experiment.py"
    good = path.read_text()
    path.write_text(good.replace("return measured(ctx, 0.1)", 'return Measurement({"hit@10": 0.1})'))
    with pytest.raises(ConfigError, match="'ndcg@10', the card's primary metric"):
        run_adapter("toy", "tiny", workdir=tmp_path / "work", arms=["popularity"])
    assert not list((tmp_path / "work").rglob("arms/*.json"))


def test_an_artifact_that_writes_nothing_is_refused(toy_root, tmp_path):
    path = toy_root / "adapters" / "toy" / "experiment.py"
    line = '    (ctx.out / "table.json").write_text(json.dumps([1, 2, ctx.seed]))'
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, "    return"))
    with pytest.raises(ConfigError, match="wrote no file"):
        run_adapter("toy", "tiny", workdir=tmp_path / "work", arms=["slow"])
