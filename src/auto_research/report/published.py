"""Published results: the small part of a `result.json` that is committed under docs/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import read_json, write_json, write_text
from auto_research.runtime.schema import validate

MAX_EXTRA_CHARACTERS = 4_000
MIN_PUBLISHED_TIER = ("standard", "full")


def publish(result_file: Path, docs: Path) -> Path:
    """Copy a finished result and its picture into `docs/results`; bulky extras stay behind.

    Raises ConfigError for a tiny or smoke result: those run the code and are never numbers.
    """
    result = read_json(result_file)
    validate(result, "result")
    if result["tier"] not in MIN_PUBLISHED_TIER:
        raise ConfigError(f"{result_file}: tier {result['tier']} is never published; run tier standard")
    for arm in result["arms"].values():
        arm["extra"] = {key: value for key, value in arm["extra"].items() if key == "studies" or _small(value)}
        arm["trials"] = [{key: value for key, value in trial.items() if _small(value)} for trial in arm["trials"]]
    target = Path(docs) / "results" / f"{result['adapter']}-{result['dataset']}-{result['tier']}.json"
    write_json(target, result)
    curves = Path(result_file).with_name("curves.svg")
    if curves.is_file():
        write_text(target.with_suffix(".svg"), curves.read_text(encoding="utf-8"))
    return target


def load_published(docs: Path) -> list[dict[str, Any]]:
    """All committed results, by adapter, data set and tier."""
    results = []
    for path in sorted((Path(docs) / "results").glob("*.json")):
        result = read_json(path)
        validate(result, "result")
        results.append(result | {"file": path.name})
    return results


def load_local(root: Path = Path()) -> list[dict[str, Any]]:
    """All results below `results/reproduce` of the working directory."""
    found = []
    for path in sorted((Path(root) / "results/reproduce").glob("*/*/*/result.json")):
        result = read_json(path)
        validate(result, "result")
        found.append(result | {"file": str(path)})
    return found


def _small(value: Any) -> bool:
    return len(json.dumps(value)) <= MAX_EXTRA_CHARACTERS
