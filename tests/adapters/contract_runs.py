"""The runs of one adapter that the contract is checked on. Each is made when first asked for and shared by the checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from auto_research.experiment.card import Card
from auto_research.experiment.contract import Experiment
from auto_research.experiment.layout import Layout
from auto_research.experiment.stages import Stage, input_files, run_stage
from auto_research.runtime import evidence
from auto_research.runtime.files import read_json
from auto_research.runtime.names import check_name
from auto_research.train.state import StateFolder

TIER = "tiny"
GRADIENT_STEPS = 3
StageName = tuple[str, str]  # kind, name


class Killed(BaseException):
    """The process died. Not an Exception: no stage may survive it."""


class Enough(BaseException):
    """The observer has seen what it wanted."""


class MortalState(StateFolder):
    """Saves after every step; the second save never happens, so what came after the first checkpoint is lost."""

    def __init__(self, path: Path, saves: list[int] | None = None, pause_after: int | None = None) -> None:
        super().__init__(path, checkpoint_seconds=0.0, pause_after=pause_after)
        self.saves = [0] if saves is None else saves

    def save(self, state: dict[str, Any]) -> None:
        self.saves[0] += 1
        if self.saves[0] == 2:
            raise Killed
        super().save(state)

    def child(self, name: str, *, pause_after: int | None = None) -> MortalState:
        return MortalState(self.path / check_name(name, "state"), self.saves, pause_after)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers on CPU, those that are not saved included."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().cpu().clone() for name, value in named}


class Watch:
    """Observer of one stage.

    steps: numbers of the steps seen.  after_first: weights after the first of them.  gradient: for every trained
    parameter of the latest model, whether one of its first three steps gave it a gradient.  trained: model, data, score,
    validation and weights of the chosen model, or None.  until: event after which the stage is ended.
    """

    def __init__(self, until: str | None = None) -> None:
        self.until = until
        self.steps: list[int] = []
        self.after_first: dict[str, Tensor] = {}
        self.gradient: dict[str, bool] = {}
        self.trained: SimpleNamespace | None = None
        self._model: nn.Module | None = None
        self._looked = 0

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        if event == "step":
            self._step(values["model"], values["step"])
        elif event == "trained":
            self.trained = SimpleNamespace(**values, weights=weights(values["model"]))
        if event == self.until:
            raise Enough

    def _step(self, model: nn.Module, step: int) -> None:
        if model is not self._model:
            self._model, self._looked, self.gradient = model, 0, {}
        if not self.steps:
            self.after_first = weights(model)
        self.steps.append(step)
        self._looked += 1
        if self._looked > GRADIENT_STEPS:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                now = parameter.grad is not None and bool(parameter.grad.any())
                self.gradient[name] = self.gradient.get(name, False) or now


class Runs:
    """Runs of the stages of one adapter on its tiny tier.

    card, experiment: the adapter.  folder: outputs.  data_root: folder whose `<data set>/<table>` are prepared.
    Every run is a dict: of an arm its plain measurement, of an artifact the hashes of its files.
    """

    def __init__(self, card: Card, experiment: Experiment, folder: Path, data_root: Path) -> None:
        self.card, self.experiment = card, experiment
        self.folder, self.data_root = Path(folder), Path(data_root)
        self.seed = card.tuning_seed(TIER)
        self._watch: dict[StageName, Watch] = {}
        self._done: dict[tuple, Any] = {}

    @property
    def arms(self) -> list[StageName]:
        return [("arm", name) for name in self.card.arms]

    @property
    def stages(self) -> list[StageName]:
        return [("artifact", name) for name in self.card.artifact_order()] + self.arms

    def role(self, name: str) -> str:
        return self.card.arms[name]["role"]

    def first(self, kind: str, name: str) -> dict:
        """The run on CPU with the tuning seed that all others are compared with."""
        watch = self._watch.setdefault((kind, name), Watch())
        return self._once("first", kind, name, watch=watch)

    def watch(self, name: str) -> Watch:
        """What was seen in the first run of an arm."""
        self.first("arm", name)
        return self._watch["arm", name]

    def again(self, kind: str, name: str) -> dict:
        """One more run, nothing changed."""
        return self._once("again", kind, name, workdir=self.folder / "again")

    def shadow(self, kind: str, name: str) -> dict:
        return self._once("shadow", kind, name, device="shadow", workdir=self.folder / "shadow")

    def resumed(self, kind: str, name: str) -> tuple[dict, Watch | None]:
        """Killed after its first checkpoint and run again; (run, what the second process saw, None if none was needed)."""
        if ("resumed", kind, name) not in self._done:
            self._done["resumed", kind, name] = self._resume(kind, name)
        return self._done["resumed", kind, name]

    def _resume(self, kind: str, name: str) -> tuple[dict, Watch | None]:
        workdir = self.folder / "again"
        self._artifacts_below(kind, name, "again", workdir=workdir)
        place = workdir / "results" / "state" / f"{kind}-{name}"
        try:
            return self._run(kind, name, workdir=workdir, state=MortalState(place)), None
        except Killed:
            watch = Watch()
            return self._run(kind, name, workdir=workdir, state=StateFolder(place), watch=watch), watch

    def seen(self, name: str, variant: str, until: str, **options: Any) -> Watch:
        """An arm ended after an event, on other data or with another seed; its own artifacts below it."""
        if (variant, name) not in self._done:
            self._artifacts_below("arm", name, variant, **options)
            watch = Watch(until)
            with suppress(Enough):
                self._run("arm", name, watch=watch, **options)
            self._done[variant, name] = watch
        return self._done[variant, name]

    def layout(self, workdir: Path | None = None, data_root: Path | None = None) -> Layout:
        return Layout(
            self.card.key, TIER, self.card.dataset(), workdir or self.folder / "first", data_root or self.data_root
        )

    def evidence(self, device: str) -> list[dict]:
        """The `device_for` calls of all runs on a device."""
        return evidence.read(self.folder / f"evidence-{device}.jsonl")

    def _once(self, variant: str, kind: str, name: str, **options: Any) -> dict:
        if (variant, kind, name) not in self._done:
            below = {key: value for key, value in options.items() if key != "watch"}
            self._artifacts_below(kind, name, variant, **below)
            self._done[variant, kind, name] = self._run(kind, name, **options)
        return self._done[variant, kind, name]

    def _artifacts_below(self, kind: str, name: str, variant: str, **options: Any) -> None:
        for artifact in self.card.needs(kind, name)[1]:
            if variant == "first":
                self.first("artifact", artifact)
            else:
                self._once(variant, "artifact", artifact, **options)

    def _run(
        self,
        kind: str,
        name: str,
        *,
        seed: int | None = None,
        device: str = "cpu",
        workdir: Path | None = None,
        data_root: Path | None = None,
        state: StateFolder | None = None,
        watch: Watch | None = None,
    ) -> dict:
        layout = self.layout(workdir, data_root)
        stage = Stage(self.card, layout, kind, name, self.seed if seed is None else seed, device, 1)
        if "tuned" in input_files(stage):
            self.first(kind, name)
        state = state or StateFolder(layout.state(f"{kind}-{name}-{stage.seed}"))
        with _evidence_in(self.folder / f"evidence-{device}.jsonl"):
            run_stage(stage, self.experiment, state, fingerprint="contract", inputs={}, quiet=True, observer=watch)
        state.discard()
        record = read_json(stage.output)
        return record["measurement"] if kind == "arm" else record["files"]


@contextmanager
def _evidence_in(log: Path) -> Iterator[None]:
    before = os.environ.get(evidence.VARIABLE)
    os.environ[evidence.VARIABLE] = str(log)
    try:
        yield
    finally:
        os.environ.pop(evidence.VARIABLE)
        if before is not None:
            os.environ[evidence.VARIABLE] = before
