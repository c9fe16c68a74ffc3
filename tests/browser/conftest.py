"""Boards of a finished toy search with a failed, a nonfinite and a skipped slot."""

import os
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[1] / "engine"
sys.path[:0] = [str(Path(__file__).parent), str(ENGINE / "evolve"), str(ENGINE / "report")]


@pytest.fixture(scope="session")
def board(tmp_path_factory):
    """Path of index.html."""
    from local_run import LocalRun, use_toy_root

    folder = tmp_path_factory.mktemp("board")
    before, here = dict(os.environ), Path.cwd()
    patch = pytest.MonkeyPatch()
    try:
        use_toy_root(patch, folder)
        run = LocalRun(direction='先看 mixing <script>alert("x")</script>')
        for g in range(4):
            run.generation(g)
        return run.finish(3).resolve()
    finally:
        patch.undo()
        assert Path.cwd() == here
        assert os.environ.get("AUTO_RESEARCH_ROOT") == before.get("AUTO_RESEARCH_ROOT")
