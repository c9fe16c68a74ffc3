"""Run a toy search step by step through the functions behind the scripts, without Snakemake."""

from __future__ import annotations

import os
from pathlib import Path

from auto_research.evolve.final import final_test, lock, prepare
from auto_research.evolve.propose import propose
from auto_research.evolve.report import write_report
from auto_research.evolve.request import freeze, load_frozen, search_from
from auto_research.evolve.select import select
from auto_research.evolve.trial import run_trial
from auto_research.runtime.files import read_json, write_json

TOY_ROOT = Path(__file__).resolve().parents[2] / "workflow" / "evolve_root"
TRAINING = {"device": "cpu", "threads": 1, "timeout": 120.0, "code": "toy"}


class LocalRun:
    """One run below the working directory; AUTO_RESEARCH_ROOT must name the toy's root."""

    def __init__(self, track: str = "searchtoy", **settings):
        self.search = search_from(track, {"run": "local", **settings})
        self.folder = self.search.folder
        freeze(self.search)
        prepare(self.folder, Path("results/data/none"))

    def generation(self, g: int, **training) -> dict:
        """Propose, train and select one generation; returns the selection's deterministic block."""
        config = load_frozen(self.folder / "config.yaml")
        previous = read_json(self.folder / f"gen{g - 1}" / "selection.json") if g else None
        path = self.folder / f"gen{g}" / "candidates.json"
        write_json(path, propose(config, g, previous))
        document = read_json(path)
        blocks = []
        for record in document["candidates"]:
            if record["status"] == "run":
                run_trial(self.folder, g, record["trial_id"], **{**TRAINING, **training})
                blocks.append(self.trial(g, record["trial_id"])["deterministic"])
        selection = select(
            config, (self.folder / "config.yaml").read_bytes(), document, path.read_bytes(), blocks, previous
        )
        write_json(self.folder / f"gen{g}" / "selection.json", selection)
        return selection["deterministic"]

    def trial(self, g: int, name: str) -> dict:
        return read_json(self.folder / f"gen{g}" / "trials" / name / "trial.json")

    def records(self, g: int) -> list[dict]:
        return read_json(self.folder / f"gen{g}" / "candidates.json")["candidates"]

    def finish(self, generations: int) -> Path:
        """Lock, test and report; returns the page."""
        lock(self.folder, generations)
        for which in ("baseline", "champion", "floors"):
            final_test(self.folder, generations, which, **TRAINING)
        return write_report(self.folder, generations)


def use_toy_root(monkeypatch, folder: Path, root: Path = TOY_ROOT) -> None:
    """Work in ``folder`` with the toy's code root."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(root))
    monkeypatch.delenv("AUTO_RESEARCH_DEVICE", raising=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
