"""Files of an audit: row or failure of one adapter, shard documents, summaries with their history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from auto_research.audit import pages
from auto_research.audit.rows import is_pass
from auto_research.audit.summary import merge_rows, summarise
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import read_json, write_json, write_text
from auto_research.runtime.schema import validate

SCHEMA_VERSION = 1


def write_row(row: Mapping[str, Any], out: Path, failure: Path) -> bool:
    """A pass goes to `out` and clears `failure`; anything else goes to `failure` and leaves no `out`. True on a pass."""
    if is_pass(row):
        write_json(out, row)
        failure.unlink(missing_ok=True)
        return True
    out.unlink(missing_ok=True)
    write_json(failure, row)
    return False


def read_row(path: Path) -> dict[str, Any]:
    """One validated row. CorruptFile or ConfigError name the file when it is not one."""
    return validate(read_json(path), "audit_row", str(path))


def shard_document(
    rows: Sequence[Mapping[str, Any]],
    *,
    device: str,
    tier: str,
    shards: int,
    index: int | None,
    expected: Sequence[str],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """What a shard file holds: its rows, and which adapters it was to run. index None: the whole audit in one."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "device": device,
        "tier": tier,
        "shards": shards,
        "shard_index": index,
        "expected": sorted(expected),
        "skipped": dict(sorted(skipped.items())),
        "rows": sorted((dict(row) for row in rows), key=lambda row: row["adapter"]),
    }
    return validate(document, "audit_shard")


def write_shard(path: Path, document: Mapping[str, Any]) -> None:
    """Write a shard document."""
    write_json(path, document)


def read_shard(path: Path) -> dict[str, Any]:
    """A validated shard document with validated rows."""
    document = validate(read_json(path), "audit_shard", str(path))
    for row in document["rows"]:
        validate(row, "audit_row", str(path))
    return document


def merge_documents(
    documents: Sequence[Mapping[str, Any]], previous: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One summary of several shard documents of the same audit.

    Raises ConfigError when they disagree on device, tier or shard count, when two hold the same adapter or index.
    """
    if not documents:
        raise ConfigError("no audit shard to summarise")
    for key in ("device", "tier", "shards"):
        if len({document[key] for document in documents}) > 1:
            raise ConfigError(f"audit shards of different {key} cannot be merged")
    indices = [document["shard_index"] for document in documents]
    if len(set(indices)) < len(indices):
        raise ConfigError("the same audit shard is given twice")
    first = documents[0]
    expected = [key for document in documents for key in document["expected"]]
    if len(set(expected)) < len(expected):
        raise ConfigError("audit shards overlap: an adapter is expected by two of them")
    rows = merge_rows(document["rows"] for document in documents)
    skipped = {key: reason for document in documents for key, reason in document["skipped"].items()}
    summary = summarise(
        rows, device=first["device"], tier=first["tier"], expected=expected, skipped=skipped, previous=previous
    )
    absent = sorted(set(range(first["shards"])) - set(indices)) if None not in indices else []
    if absent:
        summary["complete"] = False
    return validate(summary, "audit_summary")


def write_summary(summary: Mapping[str, Any], stem: Path, history: Path | None = None) -> None:
    """Write `<stem>.json`, `.md`, `.html`; `history` keeps the JSON as what the next summary is compared with."""
    write_text(stem.with_name(stem.name + ".md"), pages.markdown(summary))
    write_text(stem.with_name(stem.name + ".html"), pages.html(summary))
    if history is not None:
        write_json(history, summary)
    write_json(stem.with_name(stem.name + ".json"), summary)


def read_previous(path: Path | None) -> dict[str, Any] | None:
    """The last summary, or None when there is none that can be read."""
    if path is None or not path.is_file():
        return None
    return validate(read_json(path), "audit_summary", str(path))
