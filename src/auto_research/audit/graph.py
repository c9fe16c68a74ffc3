"""The audit as a graph: which files `audit_all` wants, what each row reads, and the fingerprint that reruns it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.audit.devices import folder_name, kind_of
from auto_research.audit.selection import Selection, select, shard
from auto_research.experiment.card import Card
from auto_research.experiment.layout import Layout
from auto_research.runtime.errors import ConfigError

if TYPE_CHECKING:
    from auto_research.experiment.fingerprint import Fingerprints

TIMEOUT_VARIABLE = "AUTO_RESEARCH_AUDIT_TIMEOUT_SECONDS"
ROW_CODE = ("auto_research.audit.runner", "auto_research.audit.process")
SUMMARY_CODE = ("auto_research.audit.records",)


def audit_device(wanted: str | None, device: str) -> str:
    """The device to audit: `wanted`, else the run's `device`; `auto` means cpu, because evidence needs a named device."""
    chosen = wanted or device
    if chosen == "shadow:0":
        return "shadow"
    return "cpu" if chosen == "auto" else chosen


@dataclass(frozen=True)
class AuditGraph:
    """One audit as files below `results/audit/<device>/`. Rows do not depend on the number of shards."""

    cards: Mapping[str, Card]
    device: str
    tier: str = "smoke"
    shards: int = 1
    index: int | None = None
    papers: tuple[str, ...] = ()
    include_concept_demos: bool = False
    only_explicit: bool = False
    dataset: str | None = None
    fingerprints: Fingerprints | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        kind_of(self.device)
        shard((), self.shards, self.index)

    @cached_property
    def selection(self) -> Selection:
        """Raises ConfigError when nothing is left to audit."""
        chosen = select(
            self.cards,
            papers=self.papers,
            include_concept_demos=self.include_concept_demos,
            only_explicit=self.only_explicit,
        )
        if not chosen.chosen:
            raise ConfigError("no adapter to audit: see include_concept_demos, only_explicit_device_packages, paper")
        return chosen

    @property
    def folder(self) -> Path:
        return Path("results") / "audit" / folder_name(self.device)

    def row(self, key: str) -> Path:
        return self.folder / "rows" / f"{key}.json"

    def failure(self, key: str) -> Path:
        return self.folder / "failures" / f"{key}.json"

    def shard_file(self, index: int) -> Path:
        return self.folder / "shards" / f"{index}-of-{self.shards}.json"

    def adapters(self, index: int | None = None) -> tuple[str, ...]:
        """Adapters of one shard, of all shards when None."""
        return shard(self.selection.chosen, self.shards, index)

    def rows_of(self, index: int | None = None) -> list[str]:
        """Row files of one shard, or of all."""
        return [str(self.row(key)) for key in self.adapters(index)]

    def shard_files(self) -> list[str]:
        return [str(self.shard_file(index)) for index in range(self.shards)]

    def targets(self) -> list[str]:
        """What `audit_all` makes: with a shard index that shard alone, else the summary; and every row below it."""
        if self.index is not None:
            return [str(self.shard_file(self.index)), *self.rows_of(self.index)]
        return [str(self.folder / "summary.json"), *self.shard_files(), *self.rows_of()]

    def dataset_of(self, key: str) -> str:
        """The wanted data set where the card offers it, else the card's default."""
        card = self.cards[key]
        return self.dataset if self.dataset in card.datasets else card.dataset()

    def data_files(self, key: str) -> list[str]:
        """Manifests of the prepared tables and pretrained models that the adapter reads."""
        layout = Layout(key, self.tier, self.dataset_of(key))
        return [str(layout.data(table) / "manifest.json") for table in self.cards[key].facts["data"]["needs"]]

    def fingerprint(self, key: str) -> str:
        """Changes when a rerun of the row could give another row: code, budgets, data set, and the card's evidence."""
        card = self.cards[key]
        stages = [("artifact", name) for name in card.artifacts] + [("arm", name) for name in card.arms]
        parts: list[Any] = [self.fingerprints.stage(key, kind, name, self.tier) for kind, name in stages]
        facts = [self.device, self.dataset_of(key), card.facts["fidelity"]]
        return self.fingerprints.combine(self.fingerprints.code(*ROW_CODE), parts, facts)

    def summary_fingerprint(self) -> str:
        """Changes when the summary would: its code, what is skipped and why."""
        return self.fingerprints.combine(self.fingerprints.code(*SUMMARY_CODE), self.selection.skipped, self.shards)

    def flags(self) -> list[str]:
        """The same choice as flags of the audit scripts."""
        flags = ["--device", self.device, "--tier", self.tier, "--shards", str(self.shards)]
        flags += ["--paper", ",".join(self.papers)] if self.papers else []
        flags += ["--dataset", self.dataset] if self.dataset else []
        flags += ["--include-concept-demos"] if self.include_concept_demos else []
        return flags + (["--only-explicit-device-packages"] if self.only_explicit else [])


def export_timeout(seconds: float) -> None:
    """Hand the hard limit of a row to jobs by environment."""
    os.environ[TIMEOUT_VARIABLE] = f"{seconds:g}"


def papers_of(text: str | None) -> tuple[str, ...]:
    """`din,rankmixer` -> keys; `all`, empty and None mean no choice."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    return () if "all" in names else names


def stale_rows(graph: AuditGraph, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Adapters whose row was made by other code, budget or data set than the current one."""
    return [row["adapter"] for row in rows if row["fingerprint"] != graph.fingerprint(row["adapter"])]
