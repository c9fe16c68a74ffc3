"""Snakemake on a toy adapter in a code root and working directory of its own."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TOY_ROOT = Path(__file__).parent / "toy_root"


@dataclass
class Bench:
    """A temporary code root `root`, working directory `work` and folder `meet` through which the toy's loop is steered."""

    root: Path
    work: Path
    meet: Path
    calls: list[str] = field(default_factory=list)

    @property
    def env(self):
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("AUTO_RESEARCH_")},
            "AUTO_RESEARCH_ROOT": str(self.root),
            "TOY_DIR": str(self.meet),
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *arguments):
        profile = str(CHECKOUT / "profiles" / "default")
        start = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(CHECKOUT / "Snakefile"),
            "--workflow-profile",
            profile,
        ]
        return [*start, *arguments]

    def snakemake(self, *arguments, code=0):
        """Run to the end; the output, after checking the exit code."""
        done = subprocess.run(
            self.command(*arguments), env=self.env, cwd=self.work, capture_output=True, text=True, check=False
        )
        text = done.stdout + done.stderr
        assert done.returncode == code, text
        return text

    def script(self, name, *arguments, code=0):
        command = [sys.executable, str(CHECKOUT / "scripts" / name), *arguments]
        done = subprocess.run(command, env=self.env, cwd=self.work, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def edit(self, name, old, new):
        path = self.root / "adapters" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def folder(self, tier="tiny"):
        return self.work / "results" / "reproduce" / "toy" / tier / "movielens-100k"

    def trace(self, arm):
        """Steps the arm's loop started, in order."""
        return [int(step) for step in (self.meet / f"trace-{arm}.txt").read_text().split()]


@pytest.fixture
def bench(tmp_path):
    """An empty bench."""
    for name in ("work", "meet"):
        (tmp_path / name).mkdir()
    shutil.copytree(TOY_ROOT, tmp_path / "root", ignore=shutil.ignore_patterns("__pycache__"))
    return Bench(tmp_path / "root", tmp_path / "work", tmp_path / "meet")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A bench on which `reproduce_toy` at tier tiny has run, shared by all tests: read only."""
    base = tmp_path_factory.mktemp("finished")
    for name in ("work", "meet"):
        (base / name).mkdir()
    shutil.copytree(TOY_ROOT, base / "root", ignore=shutil.ignore_patterns("__pycache__"))
    made = Bench(base / "root", base / "work", base / "meet")
    made.snakemake("reproduce_toy", "--config", "tier=tiny")
    return made


@pytest.fixture
def finished(built, tmp_path):
    """A copy of `built` to change."""
    for name in ("root", "work", "meet"):
        shutil.copytree(getattr(built, name), tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return Bench(tmp_path / "root", tmp_path / "work", tmp_path / "meet")
