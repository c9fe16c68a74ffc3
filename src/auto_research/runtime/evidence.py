"""Evidence log: one JSON line per `device_for` call, saying which line of which file asked for which device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import FrameType

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.paths import code_root

VARIABLE = "AUTO_RESEARCH_DEVICE_AUDIT_LOG"


def record(requested: str, resolved: str, frame: FrameType) -> None:
    """Append one line to $AUTO_RESEARCH_DEVICE_AUDIT_LOG when it is set.

    `file` is relative to the code root when it lies below it, so an adapter's line reads `adapters/<key>/...`.
    Lines of concurrent processes do not mix: each is one append of one buffer.
    """
    target = os.environ.get(VARIABLE)
    if not target:
        return
    line = {
        "requested": requested,
        "resolved": resolved,
        "file": _relative(frame.f_code.co_filename),
        "line": frame.f_lineno,
        "function": frame.f_code.co_name,
    }
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(line, sort_keys=True) + "\n").encode())
    finally:
        os.close(handle)


def read(path: str | os.PathLike) -> list[dict]:
    """All complete lines of an evidence log; a half line left by a killed process is dropped; absent file gives []."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


def _relative(filename: str) -> str:
    path = Path(filename).resolve()
    try:
        return path.relative_to(code_root()).as_posix()
    except (ValueError, ConfigError):
        return path.as_posix()
