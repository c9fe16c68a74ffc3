"""Contract between a search host (an adapter, or a person's command) and the search controller.

The controller knows genomes, scores and files; a host knows how to prepare data, train one genome and score it. Hosts may
import this module (layer 3), never the controller (layer 5). No torch is imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from auto_research.runtime.errors import UserError


class SealedData(UserError):
    """Test data were asked for without a valid capability token."""


class InvalidGenome(ValueError):
    """A genome that is not in the space of its track."""


@dataclass(frozen=True)
class Gene:
    """One dimension of the genome.

    ``kind`` is structural, int, float or cat. ``active_when`` is None (always active) or a list of clauses
    ``{gene: [values]}``; the gene is active when every condition of at least one clause holds for active genes.
    """

    name: str
    kind: str
    allowed: tuple
    default: object
    changes: str = ""
    generations: tuple[str, ...] = ()
    active_when: tuple[dict, ...] | None = None

    @property
    def structural(self) -> bool:
        return self.kind == "structural"

    def verbatim(self, value):
        """Return the allowed entry equal to ``value`` (64.0 gives 64, True never gives 1); raise InvalidGenome."""
        for entry in self.allowed:
            if isinstance(entry, str) or isinstance(value, str):
                if type(entry) is type(value) and entry == value:
                    return entry
            elif not isinstance(value, bool) and isinstance(value, (int, float)) and entry == value:
                return entry
        raise InvalidGenome(f"gene {self.name}: {value!r} is not one of {list(self.allowed)}")


@dataclass(frozen=True)
class Operator:
    """A published mechanism that sets ``gene`` to one of ``values``; ``sets`` (a preset) sets several genes at once."""

    name: str
    gene: str
    values: tuple
    paper: str = ""
    source: str = "installed-paper"
    keywords: tuple[str, ...] = ()
    sets: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """Genome, operators and rules of one search, as read from ``config/evolve/<track>.yaml`` and its budget."""

    name: str
    genes: tuple[Gene, ...]
    operators: tuple[Operator, ...]
    generations: tuple[dict, ...]
    illegal: tuple[dict, ...] = ()
    merges: tuple[dict, ...] = ()
    guards: tuple[dict, ...] = ()

    @property
    def by_name(self) -> dict[str, Gene]:
        return {gene.name: gene for gene in self.genes}

    def baseline(self) -> dict:
        return {gene.name: gene.default for gene in self.genes}


def track_from(definition: dict) -> Track:
    """Build the Track of a (validated) definition mapping; budget defaults must already be merged into the genes."""
    genes = tuple(
        Gene(
            name=entry["name"],
            kind=entry["type"],
            allowed=tuple(_plain(entry["type"], value) for value in entry["allowed"]),
            default=_plain(entry["type"], entry["default"]),
            changes=entry.get("changes", ""),
            generations=tuple(str(number) for number in entry.get("generations", ())),
            active_when=tuple(entry["active_when"]) if "active_when" in entry else None,
        )
        for entry in definition["genome"]
    )
    for gene in genes:
        gene.verbatim(gene.default)
    kinds = {gene.name: gene.kind for gene in genes}
    operators = tuple(
        Operator(
            name=entry["name"],
            gene=entry["gene"],
            values=tuple(_plain(kinds[entry["gene"]], value) for value in entry["values"]),
            paper=entry.get("paper", ""),
            source=entry.get("source", "installed-paper"),
            keywords=tuple(entry.get("keywords", ())),
            sets=dict(entry.get("sets", {})),
        )
        for entry in definition.get("operators", ())
    )
    return Track(
        name=definition["track"],
        genes=genes,
        operators=operators,
        generations=tuple(definition["generations"]),
        illegal=tuple(definition.get("illegal", ())),
        merges=tuple(definition.get("merges", ())),
        guards=tuple(definition.get("guards", ())),
    )


def _plain(kind: str, value):
    if kind in ("structural", "cat") and not isinstance(value, str):
        return json.dumps(value)
    return value


@dataclass(frozen=True)
class TrialRequest:
    """One training of one genome with one seed.

    ``genome`` is the effective genome, ``config`` the frozen request, ``dev`` the folder with training and validation data,
    ``state`` a private folder for resumable state. ``accumulate`` is the number of backward passes per optimiser step (2 after
    an out-of-memory error: half the micro-batch, same effective batch).
    ``progress(done, total, **values)`` may be called at any time.
    """

    genome: dict
    config: dict
    seed: int
    dev: Path
    state: Path
    accumulate: int = 1
    device: str | None = None
    threads: int | None = None
    progress: Callable[..., None] = lambda done, total, **values: None


@dataclass
class Evaluation:
    """What one seed of one genome measured.

    ``fitness`` is maximised. ``metrics`` may hold None for an empty slice. ``units`` are per-unit fitness contributions,
    ``replicates`` fitness values over bootstraps of units drawn from a fixed stream (same resamples for every genome), for
    fitness functions that are no mean over units. ``spent`` counts what the budget limits (for example requests seen).
    """

    fitness: float
    metrics: dict[str, float | None]
    units: dict = field(default_factory=dict)
    replicates: list[float] = field(default_factory=list)
    parameters: int = 0
    flops: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    micro_batch: int | None = None
    curve: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    contributions: dict = field(default_factory=dict)
    peak_memory_bytes: int = 0


class SearchHost:
    """Functions of a host, registered by decorator.

    prepare(config, source, dev, sealed): write ``dev`` (train, validation) and ``sealed`` (test); ``source(table)`` gives a
    prepared data folder. trial(TrialRequest) -> Evaluation on validation. test(TrialRequest, unseal) -> Evaluation on test;
    ``unseal()`` returns the sealed folder and may be called only when training is over.
    floors(config, dev, unseal) -> {floor: {"validation": metrics, "test": metrics}}.
    """

    STAGES = ("prepare", "trial", "test", "floors")

    def __init__(self, key: str, needs: tuple[str, ...] = ()):
        self.key = key
        self.needs = needs
        self.functions: dict[str, Callable] = {}

    def register(self, function: Callable) -> Callable:
        """Register ``function`` under its own name, which must be one of STAGES."""
        if function.__name__ not in self.STAGES:
            raise ValueError(f"host {self.key}: {function.__name__} is not one of {self.STAGES}")
        self.functions[function.__name__] = function
        return function

    def __getattr__(self, name: str) -> Callable:
        functions = self.__dict__.get("functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"host {self.__dict__.get('key')} has no stage {name}")


def refuse_sealed(path: Path) -> Path:
    """Return ``path``; raise SealedData when any part of it is a sealed folder (used by every dev loader)."""
    if "sealed" in Path(path).parts:
        raise SealedData(f"{path}: test data are sealed; only the final test opens them, after LOCK.json exists")
    return Path(path)


def unseal(folder: Path, token: str) -> Path:
    """Return ``folder`` when ``token`` is the sha256 of a ``final/g*/LOCK.json`` beside it; raise SealedData otherwise.

    Every granted opening is added once to ``test_reads.jsonl`` beside the folder.
    """
    folder = Path(folder)
    run = folder.parent
    for lock in sorted(run.glob("final/g*/LOCK.json")):
        if hashlib.sha256(lock.read_bytes()).hexdigest() == token:
            _record_read(run, lock, token)
            return folder
    raise SealedData(f"{folder}: the capability token is not the hash of any LOCK.json of this run")


def reads_before(run: Path, token: str) -> int:
    """Number of other locks whose test was read before the one of ``token`` (0 = first read)."""
    before = []
    for line in _reads(run):
        if line["lock"] == token:
            break
        before.append(line["lock"])
    return len(set(before))


def _reads(run: Path) -> list[dict]:
    path = Path(run) / "test_reads.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _record_read(run: Path, lock: Path, token: str) -> None:
    if any(line["lock"] == token for line in _reads(run)):
        return
    line = json.dumps({"final": lock.parent.name, "lock": token}, sort_keys=True) + "\n"
    descriptor = os.open(run / "test_reads.jsonl", os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
