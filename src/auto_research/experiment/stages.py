"""Run one stage of one adapter: build its context, call its function, record what it did."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.experiment.card import Card
from auto_research.experiment.context import Budget, Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.layout import Layout
from auto_research.runtime.devices import (
    peak_memory,
    requested_device,
    reset_peak_memory,
    resolve_device,
    runtime_facts,
)
from auto_research.runtime.errors import ConfigError, DataMissing
from auto_research.runtime.files import canonical_json, read_json, sha256_file, sha256_text, write_json, write_text
from auto_research.runtime.schema import validate
from auto_research.runtime.seeds import seed_everything
from auto_research.runtime.threads import set_threads

if TYPE_CHECKING:
    from auto_research.train.state import StateFolder

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Stage:
    """Identity of one job. kind: 'artifact' | 'arm'; device: requested text or None; threads: None = torch's default."""

    card: Card
    layout: Layout
    kind: str
    name: str
    seed: int
    device: str | None = None
    threads: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        where = {"adapter": self.card.key, "tier": self.layout.tier, "dataset": self.layout.dataset, "seed": self.seed}
        return {"schema_version": SCHEMA_VERSION, "kind": self.kind, self.kind: self.name} | where

    @property
    def output(self) -> Path:
        return self.layout.output(self.kind, self.name, self.seed)


def input_files(stage: Stage) -> dict[str, Path]:
    """Files a stage depends on: manifests of tables and artifacts, and the tuning seed's arm where it chooses."""
    tables, artifacts = stage.card.needs(stage.kind, stage.name)
    files = {name: stage.layout.data(name) / "manifest.json" for name in tables}
    files |= {name: stage.layout.output("artifact", name, stage.seed) for name in artifacts}
    if stage.kind == "arm" and stage.card.tuned(stage.layout.tier, stage.name, stage.seed):
        files["tuned"] = stage.layout.arm(stage.name, stage.card.tuning_seed(stage.layout.tier))
    return files


def input_hashes(stage: Stage, files: dict[str, Path] | None = None) -> dict[str, str]:
    """sha256 of every input file (default: all of `input_files`); of the tuning seed's arm only the chosen
    hyperparameters count.

    Raises DataMissing naming the first absent file.
    """
    hashes = {}
    for name, path in (input_files(stage) if files is None else files).items():
        if not path.is_file():
            raise DataMissing(f"{stage.card.key} {stage.name}: input {path} does not exist; make it first")
        chosen = read_json(path)["measurement"]["hyperparameters"] if name == "tuned" else None
        hashes[name] = sha256_file(path) if chosen is None else sha256_text(canonical_json(chosen))
    return hashes


def state_key(stage: Stage, fingerprint: str, inputs: dict[str, str]) -> str:
    """Name of the resumable state: equal code, budget, data, seed and requested device mean equal training."""
    parts = {**stage.identity, "fingerprint": fingerprint, "inputs": inputs, "device": requested_device(stage.device)}
    return sha256_text(canonical_json(parts))[:32]


def is_complete(stage: Stage, fingerprint: str, inputs: dict[str, str]) -> bool:
    """Whether the output exists and was made by this very code, budget and data."""
    if not stage.output.is_file():
        return False
    record = read_json(stage.output)
    return record.get("fingerprint") == fingerprint and record.get("inputs") == inputs


def run_stage(
    stage: Stage,
    experiment: Experiment,
    state: StateFolder,
    *,
    fingerprint: str,
    inputs: dict[str, str],
    quiet: bool = False,
    observer: Callable[[str, dict[str, Any]], None] | None = None,
) -> Measurement | None:
    """Run the stage's function and write its output; the Measurement of an arm, None for an artifact.

    observer: gets what the stage shows by `Context.observe`.
    """
    set_threads(stage.threads)
    seed_everything(stage.seed)
    context = _context(stage, state, quiet, observer)
    if stage.kind == "artifact":
        shutil.rmtree(context.out, ignore_errors=True)
        context.out.mkdir(parents=True)
    device = resolve_device(stage.device)
    reset_peak_memory(device)
    started, cpu = time.perf_counter(), time.process_time()
    returned = experiment.stage(stage.kind, stage.name)(context)
    cost = {"seconds": time.perf_counter() - started, "peak_memory_bytes": peak_memory(device)}
    cost["stage_cpu_seconds"] = time.process_time() - cpu  # of this process: what a killed one spent is not in it
    record = stage.identity | {"fingerprint": fingerprint, "inputs": inputs, "runtime": runtime_facts(stage.device)}
    if stage.kind == "artifact":
        _write_manifest(stage, record, context.out, cost)
        return None
    if not isinstance(returned, Measurement):
        raise ConfigError(f"arm {stage.name} of {stage.card.key} returned {type(returned).__name__}, not a Measurement")
    returned.cost = cost | returned.cost
    write_arm(stage, record, returned)
    return returned


def write_arm(stage: Stage, record: dict, measurement: Measurement) -> None:
    """Check and write an arm's file. Raises NonFinite or ConfigError and leaves no file when the content is wrong."""
    missing = [name for name in (stage.card.primary,) if name not in measurement.metrics]
    if missing:
        raise ConfigError(f"arm {stage.name} of {stage.card.key} reports no {missing[0]!r}, the card's primary metric")
    record = record | {"measurement": measurement.as_dict()}
    lines = (f'"{key}":{canonical_json(value)}' for key, value in sorted(validate(record, "arm").items()))
    write_text(stage.output, "{" + ",\n".join(lines) + "}\n")


def _write_manifest(stage: Stage, record: dict, folder: Path, cost: dict) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".snakemake_timestamp"
    }
    if not files:
        raise ConfigError(f"artifact {stage.name} of {stage.card.key} wrote no file into ctx.out")
    write_json(stage.output, validate(record | {"files": files, "cost": cost}, "manifest"))


def _context(stage: Stage, state: StateFolder, quiet: bool, observer: Callable | None) -> Context:
    tuned = input_files(stage).get("tuned")
    return Context(
        key=stage.card.key,
        stage=stage.name,
        tier=stage.layout.tier,
        dataset=stage.layout.dataset,
        seed=stage.seed,
        budget=Budget(stage.card.budget(stage.layout.tier, stage.name)),
        layout=stage.layout,
        state=state,
        device=stage.device,
        threads=stage.threads,
        tuned=read_json(tuned)["measurement"]["hyperparameters"] if tuned and tuned.is_file() else None,
        switch=stage.card.stage(stage.kind, stage.name).get("switch"),
        out=stage.layout.artifact(stage.name, stage.seed) if stage.kind == "artifact" else None,
        progress_file=state.path / "progress.json",
        quiet=quiet,
        observer=observer,
    )
