"""Contexts for arms that run outside an adapter, and a code root with a toy adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from auto_research.experiment.context import Budget, Context
from auto_research.experiment.layout import Layout
from auto_research.train.state import StateFolder

TOY_ROOT = Path(__file__).parents[1] / "workflow" / "toy_root"
TINY = {
    "users": 24,
    "catalogue_users": 6,
    "history": 8,
    "length": 8,
    "batch": 16,
    "epochs": 1,
    "steps": 3,
    "gbdt_rounds": 5,
    "trials": [{"learning_rate": 1e-2, "weight_decay": 1e-4}],
}


@pytest.fixture
def arm_context(tmp_path, movielens_100k):
    """Factory of contexts over the real MovieLens-100K with a tiny budget; keywords change the budget."""

    def make(name: str = "arm", *, seed: int = 42, tuned: dict | None = None, **budget) -> Context:
        layout = Layout("engine", "tiny", movielens_100k.name, tmp_path, movielens_100k.parent)
        return Context(
            key="engine",
            stage=name,
            tier="tiny",
            dataset=movielens_100k.name,
            seed=seed,
            budget=Budget(TINY | budget),
            layout=layout,
            state=StateFolder(tmp_path / "state" / name),
            device="cpu",
            tuned=tuned,
            progress_file=tmp_path / "state" / name / "progress.json",
            quiet=True,
        )

    return make


@pytest.fixture
def toy_root(tmp_path, monkeypatch):
    """A code root of its own with the toy adapter, and the working directory below it."""
    root = tmp_path / "root"
    shutil.copytree(TOY_ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(root))
    monkeypatch.delenv("TOY_DIR", raising=False)
    monkeypatch.chdir(root)
    yield root
    from auto_research.experiment.loader import use_root

    monkeypatch.undo()
    use_root()
