"""What a stage sees while it runs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from auto_research.experiment.layout import CHECKPOINTS, Layout
from auto_research.runtime.errors import DataMissing
from auto_research.runtime.files import write_json

if TYPE_CHECKING:
    from auto_research.train.state import StateFolder

T = TypeVar("T")


class Budget(Mapping):
    """Read-only budget of a stage: `budget["epochs"]`, `budget.epochs`, `budget.get("epochs", 3)`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__["_values"] = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the budget has no {name!r}; it has {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a budget is read-only")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Budget({self._values!r})"


@dataclass
class Context:
    """Everything one stage of one adapter may use.

    device: the requested text; the adapter turns it into a device with `device_for(ctx.device)` in its own file.
    state: resumable training state.  tuned: hyperparameters chosen on the tuning seed, None on that seed itself.
    switch: the stage's `switch` of the card.  out: folder to fill (artifact stages).
    """

    key: str
    stage: str
    tier: str
    dataset: str
    seed: int
    budget: Budget
    layout: Layout
    state: StateFolder
    device: str | None = None
    threads: int | None = None
    tuned: dict | None = None
    switch: Any = None
    out: Path | None = None
    progress_file: Path | None = None
    quiet: bool = False
    observer: Callable[[str, dict[str, Any]], None] | None = field(default=None, repr=False)
    _shown: float = field(default=0.0, repr=False)

    def data(self, name: str) -> Path:
        """Folder of a prepared table or pretrained model of `data.needs`. DataMissing when it is not prepared."""
        folder = self.layout.data(name)
        if not (folder / "manifest.json").is_file():
            what = (
                f"{CHECKPOINTS[name]} --table checkpoint" if name in CHECKPOINTS else f"{self.dataset} --table {name}"
            )
            raise DataMissing(f"{folder} is not prepared; run: python scripts/prepare_data.py --dataset {what}")
        return folder

    def artifact(self, name: str) -> Path:
        """Folder of another artifact of the same seed. DataMissing when it has not been made."""
        folder = self.layout.artifact(name, self.seed)
        if not (folder / "manifest.json").is_file():
            raise DataMissing(
                f"{folder} is not made; run scripts/run_artifact.py --adapter {self.key} --artifact {name}"
            )
        return folder

    def configured(self, kind: type[T], **fixed: Any) -> T:
        """A configuration dataclass filled with the budget's values of its fields, the arm's switch, and `fixed`.

        Each wins over those before it; lists become tuples.
        """
        names = {f.name for f in fields(kind)}
        values = {name: self.budget[name] for name in self.budget if name in names} | (self.switch or {}) | fixed
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def progress(self, done: float, total: float, **values: Any) -> None:
        """Say how far the stage is. Written at most twice a second to `progress_file`, where the command line reads it."""
        now = time.monotonic()
        if now - self._shown < 0.5 and done < total:
            return
        self._shown = now
        if self.progress_file is not None:
            shown = {name: _short(value) for name, value in values.items()}
            identity = {"adapter": self.key, "stage": self.stage, "tier": self.tier, "seed": self.seed}
            write_json(self.progress_file, shown | identity | {"done": done, "total": total})
        text = " ".join(f"{name}={_short(value)}" for name, value in values.items())
        self.log(f"{done:g}/{total:g} {text}".rstrip())

    def observe(self, event: str, **values: Any) -> None:
        """Show `values` to whoever watches this stage; nothing happens when nobody does, and nothing comes back.

        The contract tests look into models through it; an adapter with a training loop of its own calls it as
        `train_ctr` and `train_next_item` do:

        'step': model, step (from 1), after the optimizer's step and before the gradients are cleared.
        'trained': model, data, score, validation, before any test unit is read. `score(data, ...)` gives the model's
        scores on `data` or an edited copy of it: (table, request, items) -> logits [P, 3] of a RequestTable,
        (sequences, split, positions) -> [B, n_items + 1] of a LeaveTwoOut or
        of an adapter's own split.
        """
        if self.observer is not None:
            self.observer(event, values)

    def log(self, text: str) -> None:
        """One line on stderr, with the stage's name in front."""
        if not self.quiet:
            print(f"[{self.key} {self.stage} seed {self.seed}] {text}", file=sys.stderr, flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return value if isinstance(value, int | str) else str(value)
