"""The adapter printed in docs/guide.md is complete: dropped into an empty root it is listed, runs, and is in the graph."""

import os
import re
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"`adapters/pooled_mlp/([a-z]+\.(?:yaml|py))`:\n\n```(?:yaml|python)\n(.*?)```", re.S)
RUN = """
from pathlib import Path
from auto_research.experiment.card import discover
from auto_research.experiment.inline import run_adapter
from auto_research.report.pages import catalogue
from auto_research.runtime.paths import code_root

cards = discover(code_root())
assert list(cards) == ["pooled-mlp"], list(cards)
assert "YouTube" in catalogue(cards, [])
measured = run_adapter("pooled-mlp", "tiny", workdir=Path("."), device="cpu")
assert measured["pooled"].metrics["auc"] != measured["no_history"].metrics["auc"]
assert set(measured) == {"bias", "pooled", "no_history"}
"""


def test_guide_adapter_is_complete(tmp_path, movielens_100k):
    root = tmp_path / "root"
    folder = root / "adapters" / "pooled_mlp"
    folder.mkdir(parents=True)
    (root / "adapters" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (root / "config").symlink_to(CHECKOUT / "config")
    found = BLOCK.findall((CHECKOUT / "docs" / "guide.md").read_text(encoding="utf-8"))
    assert [name for name, _ in found] == ["card.yaml", "model.py", "experiment.py"]
    for name, text in found:
        (folder / name).write_text(text, encoding="utf-8")
    work = tmp_path / "work"
    (work / "results" / "data").mkdir(parents=True)
    (work / "results" / "data" / "movielens-100k").symlink_to(movielens_100k)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=work,
        env={**os.environ, "AUTO_RESEARCH_ROOT": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
