"""Track files: discovery, validation, and the definition of one run after its budget was merged in."""

from __future__ import annotations

from pathlib import Path

from auto_research.experiment.search import InvalidGenome, track_from
from auto_research.runtime.errors import ConfigError, UnknownName
from auto_research.runtime.paths import config_dir
from auto_research.runtime.schema import load_yaml, validate


def discover_tracks(folder: Path | None = None) -> dict[str, Path]:
    """Return {key: path} of every ``config/evolve/*.yaml``; two files with one key raise ConfigError."""
    folder = Path(folder or config_dir() / "evolve")
    tracks: dict[str, Path] = {}
    for path in sorted(folder.glob("*.yaml")):
        key = (load_yaml(path) or {}).get("key", path.stem)
        if key in tracks:
            raise ConfigError(f"{path}: track key {key!r} is already used by {tracks[key]}")
        tracks[key] = path
    return tracks


def load_track(key: str, folder: Path | None = None) -> dict:
    """Return the validated definition of a track; raise UnknownName or ConfigError."""
    tracks = discover_tracks(folder)
    if key not in tracks:
        raise UnknownName(f"unknown track {key!r}; known: {', '.join(sorted(tracks)) or 'none'}")
    definition = load_yaml(tracks[key])
    check_definition(definition, str(tracks[key]))
    return definition


def check_definition(definition: dict, source: str) -> None:
    """Check schema, references between genes, rules and operators, and every budget's defaults; raise ConfigError."""
    validate(definition, "track", source)
    genes = {entry["name"]: entry for entry in definition["genome"]}
    if len(genes) != len(definition["genome"]):
        raise ConfigError(f"{source}: a gene is declared twice")
    for name, entry in genes.items():
        _clauses(entry.get("active_when", ()), genes, f"{source}: gene {name}")
        if any(name in clause for clause in entry.get("active_when", ())):
            raise ConfigError(f"{source}: gene {name}: an inert rule may not read the gene it sets")
    _clauses([rule["when"] for rule in definition.get("illegal", ())], genes, f"{source}: illegal")
    for operator in definition.get("operators", ()):
        pairs = [(operator["gene"], value) for value in operator["values"]] + list(operator.get("sets", {}).items())
        for gene, value in pairs:
            if gene not in genes or value not in genes[gene]["allowed"]:
                raise ConfigError(f"{source}: operator {operator['name']}: {gene}={value!r} is not in the genome")
    if not any(rule["when"] == "later" for rule in definition["generations"]):
        raise ConfigError(f"{source}: generations: a rule for 'later' is missing")
    for profile in definition["budgets"]:
        try:
            track_from(merged(definition, profile))
        except InvalidGenome as error:
            raise ConfigError(f"{source}: budget {profile}: {error}") from None


def _clauses(clauses, genes: dict, where: str) -> None:
    for clause in clauses:
        for name, values in clause.items():
            unknown = name not in genes or [value for value in values if value not in genes[name]["allowed"]]
            if unknown:
                raise ConfigError(f"{where}: condition on {name}={values} names nothing in the genome")


def merged(definition: dict, profile: str) -> dict:
    """Return the definition with the budget's gene defaults in place and the budgets left out."""
    if profile not in definition["budgets"]:
        known = ", ".join(sorted(definition["budgets"]))
        raise ConfigError(f"track {definition['key']}: unknown budget profile {profile!r}; known: {known}")
    defaults = definition["budgets"][profile].get("defaults", {})
    unknown = sorted(set(defaults) - {entry["name"] for entry in definition["genome"]})
    if unknown:
        raise ConfigError(f"track {definition['key']}: budget {profile} sets unknown genes {unknown}")
    genome = [{**entry, "default": defaults.get(entry["name"], entry["default"])} for entry in definition["genome"]]
    return {**{key: value for key, value in definition.items() if key != "budgets"}, "genome": genome}
