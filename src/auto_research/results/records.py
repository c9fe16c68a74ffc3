"""Read the arms of an adapter and refuse a mixture of old and new ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from auto_research.experiment.card import Card
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.layout import Layout
from auto_research.experiment.stages import Stage, input_files, input_hashes
from auto_research.runtime.errors import CorruptFile, DataMissing, UserError
from auto_research.runtime.files import read_json
from auto_research.runtime.schema import validate

Records = dict[str, dict[int, dict[str, Any]]]


class StaleOutput(UserError):
    """An output was made by other code, another budget or other data than the current one."""


def load_arms(card: Card, layout: Layout, fingerprints: Fingerprints, seeds: Iterable[int] | None = None) -> Records:
    """Records by arm and seed, in card order, each checked against schema, fingerprint and inputs.

    Raises DataMissing for an absent arm, StaleOutput for one that does not belong to the current code, budget and data.
    """
    records: Records = {}
    for arm in card.arms:
        records[arm] = {}
        for seed in card.seeds(layout.tier, arm, seeds):
            path = layout.arm(arm, seed)
            if not path.is_file():
                raise DataMissing(f"arm {arm} of {card.key}, seed {seed}, is missing: {path}")
            records[arm][seed] = check_current(Stage(card, layout, "arm", arm, seed), fingerprints)
    return records


def load_existing(
    card: Card, layout: Layout, fingerprints: Fingerprints, seeds: Iterable[int] | None = None
) -> tuple[Records, list[str]]:
    """Like `load_arms` but with what exists, and one sentence for every arm and seed that cannot be used."""
    records: Records = {}
    problems = []
    for arm in card.arms:
        for seed in card.seeds(layout.tier, arm, seeds):
            try:
                if layout.arm(arm, seed).is_file():
                    found = check_current(Stage(card, layout, "arm", arm, seed), fingerprints)
                    records.setdefault(arm, {})[seed] = found
                else:
                    problems.append(f"{arm}, seed {seed}: no output")
            except UserError as error:
                problems.append(f"{arm}, seed {seed}: {error}")
    return records, problems


def check_current(stage: Stage, fingerprints: Fingerprints) -> dict[str, Any]:
    """The record of a finished stage. StaleOutput when it, or an artifact below it, is not of the current code and data."""
    record = validated(stage)
    current = fingerprints.stage(stage.card.key, stage.kind, stage.name, stage.layout.tier)
    if record["fingerprint"] != current:
        raise StaleOutput(
            f"{stage.output} was made by other code or another budget (fingerprint {record['fingerprint'][:8]}, "
            f"now {current[:8]}): delete it and run the same command again"
        )
    present = {name: path for name, path in input_files(stage).items() if path.is_file()}
    changed = [name for name, sha in input_hashes(stage, present).items() if sha != record["inputs"].get(name)]
    if changed:
        raise StaleOutput(
            f"{stage.output} was made from another {changed[0]} than the present one: delete it and run the same "
            "command again"
        )
    for name in stage.card.needs(stage.kind, stage.name)[1]:
        if name in present:
            check_current(Stage(stage.card, stage.layout, "artifact", name, stage.seed), fingerprints)
    return record


def validated(stage: Stage) -> dict[str, Any]:
    """Read and validate the output of a stage; CorruptFile when it is for another stage than its path says."""
    path: Path = stage.output
    record = validate(read_json(path), "arm" if stage.kind == "arm" else "manifest", str(path))
    wrong = [name for name, value in stage.identity.items() if record[name] != value]
    if wrong:
        raise CorruptFile(f"{path} says {wrong[0]} {record[wrong[0]]!r}: delete it and run the command again")
    return record
