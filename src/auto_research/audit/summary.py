"""Merges audit rows into one summary: counts, passes, failures, what is missing, what changed since the last one.

The summary answers "does the code run on this device", never "does the method work".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from auto_research.audit.devices import STATUSES
from auto_research.audit.rows import is_pass
from auto_research.runtime.errors import ConfigError

SCHEMA_VERSION = 1


def merge_rows(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of several shards in one list ordered by adapter.

    Raises ConfigError when two shards hold the same adapter or when rows of two devices or tiers meet.
    """
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        for row in part:
            if row["adapter"] in rows:
                raise ConfigError(f"audit shards overlap: adapter '{row['adapter']}' has two rows")
            rows[row["adapter"]] = dict(row)
    for key in ("device", "tier"):
        values = sorted({row[key] for row in rows.values()})
        if len(values) > 1:
            raise ConfigError(f"audit rows of different {key}s cannot be merged: {', '.join(values)}")
    return [rows[adapter] for adapter in sorted(rows)]


def summarise(
    rows: Sequence[Mapping[str, Any]],
    *,
    device: str,
    tier: str,
    expected: Iterable[str],
    skipped: Mapping[str, str] | None = None,
    previous: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A summary of `rows` against the adapters that were `expected`; `previous` is the last summary, if any.

    `complete` is true when every expected adapter has a row and every row is a pass of `device`.
    """
    expected = sorted(set(expected))
    rows = sorted((dict(row) for row in rows), key=lambda row: row["adapter"])
    counts = Counter(row["status"] for row in rows)
    passes = [row["adapter"] for row in rows if is_pass(row)]
    missing = sorted(set(expected) - {row["adapter"] for row in rows})
    failures = [
        {key: row[key] for key in ("adapter", "status", "seconds", "error")} for row in rows if not is_pass(row)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "device": device,
        "tier": tier,
        "complete": not missing and not failures,
        "expected": expected,
        "missing": missing,
        "skipped": dict(sorted((skipped or {}).items())),
        "counts": {status: counts[status] for status in STATUSES if counts[status]},
        "passes": passes,
        "valid_seconds": round(sum(row["seconds"] for row in rows if is_pass(row)), 3),
        "failures": failures,
        "rows": rows,
        "difference": difference(previous, rows),
    }


def difference(previous: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What changed since `previous`: adapters that came, went, or changed status. None without a previous summary."""
    if previous is None:
        return None
    before = {row["adapter"]: row["status"] for row in previous["rows"]}
    after = {row["adapter"]: row["status"] for row in rows}
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": [
            {"adapter": adapter, "before": before[adapter], "after": after[adapter]}
            for adapter in sorted(after.keys() & before.keys())
            if before[adapter] != after[adapter]
        ],
        "unchanged": sum(after[adapter] == before[adapter] for adapter in after.keys() & before.keys()),
    }
