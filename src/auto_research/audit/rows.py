"""One audit row: what happened when one adapter ran alone on one device, and which status that evidence earns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auto_research.audit.devices import FAILED, NO_CALL, PASS, TIMEOUT, answers, kind_of

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Evidence:
    """The `device_for` calls of one run. `own` came from the adapter's folder and resolved to the required device."""

    own: int = 0
    elsewhere: int = 0
    other_device: int = 0
    callers: list[dict[str, Any]] = field(default_factory=list)


def read_evidence(records: Iterable[Mapping[str, Any]], *, folder: Path, root: Path, device: str) -> Evidence:
    """Counts evidence records (requested, resolved, file, line, function) against one adapter folder.

    Only calls whose file lies in `folder` count as own; those that resolved to another device are counted apart.
    Callers name files relative to `root`, so that a row holds no path of the machine.
    """
    folder, root = folder.resolve(), root.resolve()
    own, elsewhere, other_device = 0, 0, 0
    callers: Counter[tuple[str, int, str, str]] = Counter()
    for record in records:
        path = (root / str(record["file"])).resolve()
        if not path.is_relative_to(folder):
            elsewhere += 1
            continue
        if answers(str(record["resolved"]), device):
            own += 1
        else:
            other_device += 1
        where = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        callers[(where, int(record["line"]), str(record["function"]), str(record["resolved"]))] += 1
    return Evidence(
        own,
        elsewhere,
        other_device,
        [
            {"file": file, "line": line, "function": function, "resolved": resolved, "calls": calls}
            for (file, line, function, resolved), calls in sorted(callers.items())
        ],
    )


def status_of(
    *, device: str, finished: bool, timed_out: bool, own_calls: int, peak_memory_bytes: int | None
) -> tuple[str, dict[str, str] | None]:
    """The status of a run and, where it finished without earning a pass, the reason as an error record."""
    if timed_out:
        return TIMEOUT, None
    if not finished:
        return FAILED, None
    kind = kind_of(device)
    if own_calls == 0:
        return NO_CALL, {
            "type": "NoDeviceCall",
            "message": f"no device_for call from the adapter's own folder resolved to {device}",
        }
    if kind == "cuda" and not peak_memory_bytes:
        return NO_CALL, {
            "type": "NoDeviceMemory",
            "message": f"device_for resolved to {device}, but no memory was ever allocated on it",
        }
    return PASS[kind], None


def is_pass(row: Mapping[str, Any]) -> bool:
    """True when the row's status is the pass of the device it was run for, and no other."""
    return row["status"] == PASS[kind_of(row["device"])]
