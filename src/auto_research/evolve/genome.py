"""Canonical and effective genomes and their fingerprints (pure functions).

Raw fingerprint = sha256 of the canonical JSON. Effective fingerprint = the same after every inert gene was set to its
default; duplicates are judged on it.
"""

from __future__ import annotations

from auto_research.experiment.search import InvalidGenome, Track
from auto_research.runtime.files import canonical_json, sha256_text


def canonical(genome: dict, track: Track) -> dict:
    """Return the genome with every gene of the track, keys sorted, values verbatim from the allowed lists."""
    genes = track.by_name
    unknown = sorted(set(genome) - set(genes))
    missing = sorted(set(genes) - set(genome))
    if unknown or missing:
        raise InvalidGenome(f"genome: unknown genes {unknown}, missing genes {missing}")
    return {name: genes[name].verbatim(genome[name]) for name in sorted(genes)}


def fingerprint(genome: dict) -> str:
    """Return the sha256 hex of a canonical genome."""
    return sha256_text(canonical_json(genome))


def inert_genes(genome: dict, track: Track) -> frozenset[str]:
    """Return the genes that cannot change the model of this genome.

    The set only grows until nothing changes: a gene is never kept alive by a gene that is itself inert.
    """
    inert: frozenset[str] = frozenset()
    while True:
        grown = frozenset(
            gene.name
            for gene in track.genes
            if gene.active_when is not None and not any(_holds(clause, genome, inert) for clause in gene.active_when)
        )
        if grown == inert:
            return inert
        inert = grown


def _holds(clause: dict, genome: dict, inert: frozenset[str]) -> bool:
    return all(name not in inert and str(genome[name]) in {str(v) for v in values} for name, values in clause.items())


def effective(genome: dict, track: Track) -> dict:
    """Return the canonical genome with inert genes at their defaults and equal-model values merged."""
    result = canonical(genome, track)
    while True:
        before = dict(result)
        for name in inert_genes(result, track):
            result[name] = track.by_name[name].default
        inert = inert_genes(result, track)
        for rule in track.merges:
            gene, limit = rule["gene"], result[rule["above"]]
            if gene not in inert and result[gene] > limit:
                result[gene] = track.by_name[gene].verbatim(rule["becomes"])
        if result == before:
            return result


def illegal_reason(genome: dict, track: Track) -> str | None:
    """Return why the genome may not be run, or None."""
    inert = inert_genes(genome, track)
    for rule in track.illegal:
        if _holds(rule["when"], genome, inert):
            return rule["reason"]
    return None


def changed_genes(parent: dict, child: dict) -> list[dict]:
    """Return [{gene, from, to}] of the genes in which the raw genomes differ, in text order."""
    return [{"gene": n, "from": parent[n], "to": child[n]} for n in sorted(child) if child[n] != parent[n]]


def trial_id(generation: int, slot: int, effective_fingerprint: str) -> str:
    """Return ``g{gg}-s{ss}-{8 hex}``."""
    return f"g{generation:02d}-s{slot:02d}-{effective_fingerprint[:8]}"
