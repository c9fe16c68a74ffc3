"""Snakemake on the toy search in a working directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from auto_research.runtime.files import sha256_file

CHECKOUT = Path(__file__).resolve().parents[2]
TOY_ROOT = Path(__file__).parent / "evolve_root"


@dataclass
class Search:
    """``work``: working directory; ``meet``: folder through which the toy's loop is steered and traced."""

    root: Path
    work: Path
    meet: Path
    environment: dict = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path) -> Search:
        for name in ("work", "meet"):
            (folder / name).mkdir(parents=True)
        return cls(TOY_ROOT, folder / "work", folder / "meet")

    @property
    def folder(self) -> Path:
        return self.work / "results/evolve/searchtoy/demo"

    @property
    def env(self) -> dict:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTO_RESEARCH_")}
        return {
            **kept,
            "AUTO_RESEARCH_ROOT": str(self.root),
            "TOY_DIR": str(self.meet),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }

    def command(self, *config: str, target: str = "evolve_searchtoy") -> list[str]:
        flags = [item for item in config if item.startswith("--") or "=" not in item]
        values = [item for item in config if item not in flags]
        start = [sys.executable, "-m", "snakemake", target, "--snakefile", str(CHECKOUT / "Snakefile")]
        start += ["--workflow-profile", str(CHECKOUT / "profiles" / "default"), *flags]
        return [*start, "--config", *values] if values else start

    def run(self, *config: str, target: str = "evolve_searchtoy", code: int = 0) -> str:
        """Run to the end; the output, after checking the exit code."""
        done = subprocess.run(
            self.command(*config, target=target),
            env=self.env,
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
        )
        text = done.stdout + done.stderr
        assert done.returncode == code, text
        return text

    def start(self, *config: str) -> subprocess.Popen:
        """Start in a process group of its own."""
        return subprocess.Popen(
            self.command(*config), env=self.env, cwd=self.work, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def script(self, name: str, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, str(CHECKOUT / "scripts" / name), *arguments]
        done = subprocess.run(command, env=self.env, cwd=self.work, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def records(self, g: int) -> list[dict]:
        return json.loads((self.folder / f"gen{g}" / "candidates.json").read_text())["candidates"]

    def decisions(self) -> dict[str, str]:
        """Hashes of every candidate list and selection."""
        return {
            path.relative_to(self.folder).as_posix(): sha256_file(path)
            for name in ("candidates.json", "selection.json")
            for path in self.folder.glob(f"gen*/{name}")
        }

    def contents(self) -> dict[str, str]:
        """Hashes of every file of the run."""
        return self.hashes(self.folder)

    @staticmethod
    def hashes(folder: Path) -> dict[str, str]:
        return {p.relative_to(folder).as_posix(): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}
