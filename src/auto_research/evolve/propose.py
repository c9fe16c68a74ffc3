"""The next candidate list: a pure function of the frozen configuration and the previous selection.

No state survives between calls, so killing and resuming a run can neither repeat nor change a decision. Nothing here depends
on wall clock, completion order or the number of workers, and no torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

from auto_research.evolve.genome import (
    canonical,
    changed_genes,
    effective,
    fingerprint,
    illegal_reason,
    inert_genes,
    trial_id,
)
from auto_research.evolve.streams import stream
from auto_research.experiment.search import InvalidGenome, Operator, Track, track_from

ATTEMPTS = 32
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One queue entry: genes to set, and where the idea comes from."""

    operator: str
    sets: tuple[tuple[str, object], ...]
    paper: str
    source: str
    words: frozenset[str]

    @property
    def key(self) -> str:
        return f"{self.operator}:" + ",".join(f"{gene}={value}" for gene, value in self.sets)


def propose(config: dict, generation: int, previous: dict | None) -> dict:
    """Return the candidates document of ``generation``.

    ``config``: frozen configuration; ``previous``: selection document of ``generation - 1`` (None for 0).
    """
    track = track_from(config["definition"])
    document = {
        "schema_version": SCHEMA_VERSION,
        "track": track.name,
        "generation": generation,
        "parent": None,
        "queue": [],
    }
    if generation == 0:
        genome = canonical(track.baseline(), track)
        candidate = _candidate(
            track, 0, 0, genome, genome, {}, attempts=1, source="baseline", rationale="baseline genome"
        )
        return {**document, "candidates": [candidate]}
    return _Generation(config, track, generation, previous["deterministic"]).document(document)


class _Generation:
    """Fills the slots 0, 1, .. of one generation in order."""

    def __init__(self, config: dict, track: Track, generation: int, selection: dict):
        self.config, self.track, self.generation, self.selection = config, track, generation, selection
        self.parent = canonical(selection["champion"]["genome"], track)
        self.archive = dict(selection["archive"])
        self.rule = generation_rule(track, generation)
        self.queue = build_queue(track, config.get("direction", ""), selection, front=self._front())

    def document(self, document: dict) -> dict:
        champion = self.selection["champion"]
        document["parent"] = {
            "trial_id": champion["trial_id"],
            "effective_fingerprint": champion["effective_fingerprint"],
            "selection": self.selection["chain"],
        }
        document["queue"] = [entry.key for entry in self.queue]
        planted = self.config["definition"].get("planted", {}).get(str(self.generation), [])
        candidates = []
        for slot in range(self.config["population"]):
            candidate = self._planted(slot, planted[slot]) if slot < len(planted) else self._fill(slot)
            if candidate["status"] == "run":
                self.archive[candidate["effective_fingerprint"]] = {
                    "trial_id": candidate["trial_id"],
                    "status": "proposed",
                }
            candidates.append(candidate)
        document["candidates"] = candidates
        return document

    def _planted(self, slot: int, sets: dict) -> dict:
        """A genome that the person asked for: run, reused when known, and reported as invalid by its trial if illegal."""
        raw = {**self.parent, **sets}
        facts = {"source": "planted", "rationale": "asked for in the configuration", "attempts": 1}
        try:
            child = canonical(raw, self.track)
        except InvalidGenome:
            marker = fingerprint({key: str(value) for key, value in raw.items()})
            return {
                **_blank(self.generation, slot, "run", **facts),
                "trial_id": trial_id(self.generation, slot, marker),
                "genome": raw,
                "raw_fingerprint": marker,
                "effective_fingerprint": marker,
                "changed": [{"gene": k, "from": self.parent.get(k), "to": v} for k, v in sorted(sets.items())],
            }
        return _candidate(self.track, self.generation, slot, child, self.parent, self.archive, **facts)

    def _fill(self, slot: int) -> dict:
        shape = self.rule["slots"][slot % len(self.rule["slots"])]
        for attempt in range(ATTEMPTS):
            proposed = self._attempt(shape, slot, attempt)
            if proposed is None:
                continue
            child, facts = proposed
            if self._acceptable(child, shape):
                return _candidate(
                    self.track, self.generation, slot, child, self.parent, {}, attempts=attempt + 1, **facts
                )
        for child in self._walk(shape):
            if self._acceptable(child, shape):
                facts = {"source": "generated-combination", "rationale": "systematic walk of the allowed children"}
                return _candidate(
                    self.track, self.generation, slot, child, self.parent, {}, attempts=ATTEMPTS + 1, **facts
                )
        return _blank(
            self.generation, slot, "skipped", reason="search-space-exhausted", attempts=ATTEMPTS, source="none"
        )

    def _attempt(self, shape: dict, slot: int, attempt: int) -> tuple[dict, dict] | None:
        if shape["genes"] == "structural":
            return self._structural(attempt)
        return self._hyper(shape, slot, attempt)

    def _structural(self, attempt: int) -> tuple[dict, dict] | None:
        if attempt >= len(self.queue):
            return None
        entry = self.queue[attempt]
        why = f"queue entry {attempt + 1}: {entry.key}"
        if entry.key in {front.key for front in self._front()}:
            why += "; combination: it ranked in the upper half of the previous generation"
        hits = sorted(_hits(entry.words, self.config.get("direction", "")))
        if hits:
            why += f"; the direction names {', '.join(hits)}"
        facts = {
            "operator": entry.operator,
            "paper": entry.paper,
            "source": entry.source,
            "rationale": why,
            "entry": entry.key,
        }
        return {**self.parent, **dict(entry.sets)}, facts

    def _hyper(self, shape: dict, slot: int, attempt: int) -> tuple[dict, dict] | None:
        genes = self._allowed_genes(shape)
        count = shape.get("changes", 1)
        if len(genes) < count:
            return None
        rng = stream(self.track.name, self.config["run_seed"], "value", self.generation, slot, attempt)
        child = dict(self.parent)
        for offset in range(count):
            gene = genes[(slot + attempt + offset) % len(genes)]
            values = [value for value in gene.allowed if value != self.parent[gene.name]]
            if not values:
                return None
            child[gene.name] = values[int(rng.integers(len(values)))]
        names = ", ".join(change["gene"] for change in changed_genes(self.parent, child))
        return child, {"source": "generated-combination", "rationale": f"hyper-parameter draw for {names}"}

    def _allowed_genes(self, shape: dict) -> list:
        """Genes that this slot may change, in genome order: mutable in this generation and not inert in the parent."""
        inert = inert_genes(self.parent, self.track)
        structural = shape["genes"] == "structural"
        return [
            gene
            for gene in self.track.genes
            if gene.structural == structural and gene.name not in inert and mutable(gene, self.generation)
        ]

    def _acceptable(self, child: dict, shape: dict) -> bool:
        try:
            child = canonical(child, self.track)
        except InvalidGenome:
            return False
        changed = [change["gene"] for change in changed_genes(self.parent, child)]
        genes = self.track.by_name
        structural = shape["genes"] == "structural"
        if len(changed) != shape.get("changes", 1):
            return False
        if any(genes[name].structural != structural or not mutable(genes[name], self.generation) for name in changed):
            return False
        if set(changed) & inert_genes(child, self.track):
            return False
        if illegal_reason(child, self.track) is not None:
            return False
        return fingerprint(effective(child, self.track)) not in self.archive

    def _walk(self, shape: dict) -> Iterator[dict]:
        """Every child that the rule allows, in lexicographic order of (genes, values as text)."""
        structural = shape["genes"] == "structural"
        genes = sorted(
            (gene for gene in self.track.genes if gene.structural == structural and mutable(gene, self.generation)),
            key=lambda gene: gene.name,
        )
        executable = {(gene, value) for entry in self.queue for gene, value in entry.sets}
        for chosen in combinations(genes, shape.get("changes", 1)):
            choices = [
                sorted(
                    (v for v in gene.allowed if not structural or (gene.name, v) in executable),
                    key=str,
                )
                for gene in chosen
            ]
            for values in product(*choices):
                yield {**self.parent, **{gene.name: value for gene, value in zip(chosen, values, strict=True)}}

    def _front(self) -> list[Entry]:
        """Entries of the upper half of the previous generation whose genes are still at default in the champion."""
        if self.rule.get("front") != "upper-half":
            return []
        entries = {entry.key: entry for entry in base_queue(self.track)}
        trials = [row for row in self.selection["ranking"] if row["status"] == "completed" and row["role"] == "child"]
        upper = trials[: (len(trials) + 1) // 2]
        champion = effective(self.parent, self.track)
        defaults = self.track.baseline()
        return [
            entries[row["entry"]]
            for row in upper
            if row.get("entry") in entries
            and all(str(champion[gene]) == str(defaults[gene]) for gene, _ in entries[row["entry"]].sets)
        ]


def generation_rule(track: Track, generation: int) -> dict:
    """Return the rule whose ``when`` names the generation, else the one for ``later``."""
    for rule in track.generations:
        if rule["when"] == generation:
            return rule
    return next(rule for rule in track.generations if rule["when"] == "later")


def mutable(gene, generation: int) -> bool:
    """True when the gene may change in this generation (entries are numbers or '>n'; none means always)."""
    if not gene.generations:
        return True
    return any(
        generation > int(text[1:]) if text.startswith(">") else generation == int(text) for text in gene.generations
    )


def base_queue(track: Track) -> list[Entry]:
    """Operators' first values in file order, then their further values, then structural values of no operator."""
    installed = [operator for operator in track.operators if operator.source == "installed-paper"]
    entries = [
        _entry(track, op, ((op.gene, op.values[0]),) if not op.sets else tuple(op.sets.items())) for op in installed
    ]
    for operator in installed:
        entries += [_entry(track, operator, ((operator.gene, value),)) for value in operator.values[1:]]
    covered = {pair for entry in entries if len(entry.sets) == 1 for pair in entry.sets}
    evidence = {(op.gene, value) for op in track.operators if op.source != "installed-paper" for value in op.values}
    for gene in track.genes:
        for value in gene.allowed if gene.structural else ():
            if (gene.name, value) not in covered | evidence:
                words = frozenset(_words(f"{gene.name} {value}"))
                entries.append(Entry(gene.name, ((gene.name, value),), "", "generated-combination", words))
    return entries


def _entry(track: Track, operator: Operator, sets: tuple) -> Entry:
    text = " ".join([operator.name, *(str(value) for _, value in sets)])
    words = frozenset(_words(text)) | {word.lower() for word in operator.keywords}
    return Entry(operator.name, sets, operator.paper, operator.source, words)


def build_queue(track: Track, direction: str, selection: dict, front: list[Entry]) -> list[Entry]:
    """Order the queue: front entries, direction hits, the rest; tried entries behind, cooled-down operators last."""
    tried = set(selection["tried"])
    cooling = set(selection["failed_operators"])
    leading = {entry.key for entry in front}

    def place(entry: Entry) -> tuple:
        return entry.operator in cooling, entry.key in tried, not _hits(entry.words, direction)

    rest = [entry for entry in base_queue(track) if entry.key not in leading]
    return [*front, *sorted(rest, key=place)]


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[_\s]+", text.lower()) if word]


def _hits(words: frozenset[str], direction: str) -> set[str]:
    """Keywords found in the direction: whole words; keywords in scripts without blanks are searched as substrings."""
    text = direction.lower()
    present = set(re.findall(r"\w+", text)) | set(_words(re.sub(r"\W", " ", text)))
    hits = {word for word in words if word in present}
    hits |= {word for word in words if " " in word and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)}
    return hits | {word for word in words if not word.isascii() and word in text}


def _blank(generation: int, slot: int, status: str, **facts) -> dict:
    return {
        "generation": generation,
        "slot": slot,
        "status": status,
        "trial_id": None,
        "genome": None,
        "raw_fingerprint": None,
        "effective_fingerprint": None,
        "changed": [],
        "operator": None,
        "paper": "",
        "source": "none",
        "rationale": "",
        "entry": None,
        "reuse_of": None,
        "reason": None,
        **facts,
    }


def _candidate(track: Track, generation: int, slot: int, child: dict, parent: dict, archive: dict, **facts) -> dict:
    """Record of one filled slot; a known effective fingerprint in ``archive`` makes it a reuse record."""
    child = canonical(child, track)
    mark = fingerprint(effective(child, track))
    record = {
        **_blank(generation, slot, "run"),
        "genome": child,
        "raw_fingerprint": fingerprint(child),
        "effective_fingerprint": mark,
        "changed": changed_genes(parent, child),
        **facts,
    }
    if mark in archive:
        return {**record, "status": "reused", "reuse_of": archive[mark]["trial_id"], "reason": "duplicate"}
    return {**record, "trial_id": trial_id(generation, slot, mark)}
