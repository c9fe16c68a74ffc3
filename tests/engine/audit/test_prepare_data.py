"""A session without Snakemake prepares whatever its adapters need: tables, text vectors, pretrained models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from auto_research.audit.runner import Settings
from auto_research.audit.session import prepare_data
from auto_research.blocks import title_encoder
from auto_research.data import checkpoints, prepare
from auto_research.runtime.errors import DataMissing


@pytest.fixture
def made(monkeypatch):
    """What was prepared, in order; nothing is fetched."""
    calls = []

    def maker(name, out):
        def make(*arguments, **options):
            folder = out(arguments)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "manifest.json").write_text("{}")
            calls.append((name, folder))

        return make

    monkeypatch.setattr(prepare, "prepare", maker("canonical", lambda a: a[1]))
    monkeypatch.setattr(prepare, "prepare_table", maker("table", lambda a: a[2]))
    monkeypatch.setattr(title_encoder, "prepare_encoded", maker("encoded", lambda a: a[2]))
    monkeypatch.setattr(checkpoints, "fetch_checkpoint", maker("checkpoint", lambda a: a[1]))
    return calls


def card(*needs):
    facts = {"data": {"default": "movielens-100k", "needs": list(needs)}}
    return SimpleNamespace(facts=facts, datasets=["movielens-100k"], dataset=lambda: "movielens-100k")


def settings(root):
    return Settings(root=root, device="cpu", tier="tiny", timeout=1.0, data_root=root / "data")


def test_everything_a_card_needs_is_prepared_once(tmp_path, made):
    cards = [card("texts", "sequences", "causal_lm"), card("texts", "canonical")]
    prepare_data(cards, settings(tmp_path))
    root = tmp_path / "data"
    table = root / "movielens-100k"
    assert sorted(made) == sorted(
        [
            ("canonical", table / "canonical"),
            ("table", table / "sequences"),
            ("encoded", table / "texts"),
            ("checkpoint", root / "smollm2-135m-instruct" / "checkpoint"),
        ]
    )
    made.clear()
    prepare_data(cards, settings(tmp_path))
    assert made == []


def test_a_failure_is_said_and_the_others_go_on(tmp_path, made, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise DataMissing("the index does not answer")

    monkeypatch.setattr(checkpoints, "fetch_checkpoint", fail)
    prepare_data([card("causal_lm", "sequences")], settings(tmp_path))
    assert [name for name, _ in made] == ["canonical", "table"]
    assert "causal_lm of movielens-100k: the index does not answer" in capsys.readouterr().err
