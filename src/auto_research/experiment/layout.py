"""Where everything lies below the working directory. The same paths are written out in rules/*.smk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from auto_research.runtime.names import check_name

TABLES = ("canonical", "sequences", "requests", "titles", "texts", "text_states")
# Needs that are a pretrained model, the same for every data set.
CHECKPOINTS = {"causal_lm": "smollm2-135m-instruct", "text_encoder": "minilm-l6-v2"}


@dataclass(frozen=True)
class Layout:
    """Paths of one adapter at one tier and data set.

    workdir: the folder that holds `results/`.  data_root: where prepared data lie, default `<workdir>/results/data`.
    """

    key: str
    tier: str
    dataset: str
    workdir: Path = Path()
    data_root: Path | None = None

    def __post_init__(self) -> None:
        for value, what in ((self.key, "adapter"), (self.tier, "tier"), (self.dataset, "data set")):
            check_name(value, what)

    @cached_property
    def folder(self) -> Path:
        return Path(self.workdir, "results", "reproduce", self.key, self.tier, self.dataset)

    def data(self, table: str) -> Path:
        """Folder of a prepared table or pretrained model; its manifest.json is written last."""
        root = self.data_root or Path(self.workdir) / "results" / "data"
        return root / CHECKPOINTS[table] / "checkpoint" if table in CHECKPOINTS else root / self.dataset / table

    def seed(self, seed: int) -> Path:
        return self.folder / f"seed{int(seed)}"

    def artifact(self, name: str, seed: int) -> Path:
        return self.seed(seed) / "artifacts" / name

    def arm(self, name: str, seed: int) -> Path:
        return self.seed(seed) / "arms" / f"{name}.json"

    def output(self, kind: str, name: str, seed: int) -> Path:
        """The file that says a stage is done. kind: 'artifact' | 'arm'."""
        return self.arm(name, seed) if kind == "arm" else self.artifact(name, seed) / "manifest.json"

    def log(self, kind: str, name: str, seed: int) -> Path:
        return self.seed(seed) / "logs" / f"{kind}-{name}.log"

    def failure(self, kind: str, name: str, seed: int) -> Path:
        return self.failures / f"{kind}-{name}-seed{int(seed)}.json"

    @property
    def failures(self) -> Path:
        return self.folder / "failures"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.md"

    @property
    def curves(self) -> Path:
        return self.folder / "curves.svg"

    @property
    def partial(self) -> Path:
        """Summary over what exists after a failed run; never the declared summary."""
        return self.folder / "summary.partial.json"

    def state(self, fingerprint: str) -> Path:
        return Path(self.workdir) / "results" / "state" / fingerprint
