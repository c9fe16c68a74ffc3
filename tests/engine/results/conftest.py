import shutil
from pathlib import Path

import pytest

TOY_ROOT = Path(__file__).parents[2] / "workflow" / "toy_root"


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
