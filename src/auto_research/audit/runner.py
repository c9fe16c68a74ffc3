"""Runs adapters one after another, each alone in its own process group, and turns what happened into rows."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto_research.audit import rows as audit_rows
from auto_research.audit.scan import scan_folder
from auto_research.experiment.card import Card
from auto_research.runtime import evidence
from auto_research.runtime.errors import CorruptFile
from auto_research.runtime.files import read_json, sha256_bytes, sha256_text
from auto_research.runtime.paths import checkout_root
from auto_research.runtime.process import Finished, run_limited
from auto_research.runtime.schema import validate

_NO_RUNTIME = {"torch": None, "platform": None, "python": None, "cpu_threads": None, "accelerator": None}


@dataclass(frozen=True)
class Settings:
    """What every row of one audit shares.

    root: checkout with `adapters/`.  data_root: folder of prepared data sets.  timeout: hard limit in seconds.
    logs: folder of one log per adapter; None lets the runs write to this process's output, known as `log_name`.
    """

    root: Path
    device: str
    tier: str
    timeout: float
    data_root: Path
    logs: Path | None = None
    log_name: str | None = None
    dataset_dir: str = "data"
    dataset: str | None = None
    seed: int = 42
    threads: int | None = None

    def dataset_of(self, card: Card) -> str:
        """The wanted data set where the card offers it, else the card's default."""
        return self.dataset if self.dataset in card.datasets else card.dataset()


def audit_adapter(card: Card, settings: Settings, *, fingerprint: str | None = None) -> dict[str, Any]:
    """Run one adapter in isolation and return its validated row, whatever happened.

    fingerprint: what a rerun compares; the hash of the sources when None.
    """
    sources = source_hash(settings.root, card)
    log = None
    if settings.logs is not None:
        log = settings.logs / f"{card.module}.log"
        log.unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"audit-{card.module}-"))
    try:
        finished, report, records = _run(card, settings, scratch, log)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    seen = audit_rows.read_evidence(records, folder=card.folder, root=settings.root, device=settings.device)
    completed = report is not None and report["finished"] and finished.returncode == 0
    peak = report["peak_memory_bytes"] if report else None
    status, reason = audit_rows.status_of(
        device=settings.device,
        finished=completed,
        timed_out=finished.timed_out,
        own_calls=seen.own,
        peak_memory_bytes=peak,
    )
    error = reason or _error(status, finished, report, settings.timeout, settings.log_name or (log and log.name))
    row = {
        "schema_version": audit_rows.SCHEMA_VERSION,
        "adapter": card.key,
        "fidelity": card.facts["fidelity"],
        "tier": settings.tier,
        "dataset": settings.dataset_of(card),
        "seed": settings.seed,
        "device": settings.device,
        "status": status,
        "seconds": round(finished.seconds, 3),
        "timeout_seconds": settings.timeout,
        "calls": seen.own,
        "calls_elsewhere": seen.elsewhere,
        "calls_other_device": seen.other_device,
        "callers": seen.callers,
        "sites": [{"file": site.file, "line": site.line, "kind": site.kind} for site in scan_folder(card.folder)],
        "peak_memory_bytes": peak,
        "error": error,
        "fingerprint": fingerprint or sources,
        "sources": sources,
        "command": command_line(card, settings),
        "runtime": (report or {}).get("runtime") or _NO_RUNTIME,
        "metrics": report["metrics"] if report else {},
        "commit": source_commit(settings.root),
    }
    return validate(row, "audit_row", card.key)


def command_line(card: Card, settings: Settings) -> str:
    """The command that repeats this row from a checkout; holds no path of the machine."""
    folder = settings.dataset_dir if not os.path.isabs(settings.dataset_dir) else "data"
    words = ["python", "scripts/audit_gpu_paths.py", "--paper", card.key, "--device", settings.device]
    words += ["--tier", settings.tier, "--dataset-dir", folder, "--timeout-seconds", f"{settings.timeout:g}"]
    return shlex.join(words)


def source_hash(root: Path, card: Card) -> str:
    """sha256 over the bytes of the adapter's folder and of the whole engine: coarser than the graph's fingerprint,
    the same on every machine and Python version, and in need of no import graph."""
    engine = checkout_root() / "src" / "auto_research"
    parts = []
    for label, folder, pattern in (("adapter", card.folder, "*"), ("engine", engine, "*.py")):
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(folder).as_posix()
                parts.append(f"{label} {name} {sha256_bytes(path.read_bytes())}")
    return sha256_text("\n".join(parts))


def source_commit(root: Path) -> str | None:
    """The checkout's commit, or None without git or when tracked files differ from it."""
    try:
        text = _git(root, "rev-parse", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if dirty else text


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _run(card: Card, settings: Settings, scratch: Path, log: Path | None) -> tuple[Finished, dict | None, list[dict]]:
    (scratch / "results").mkdir()
    (scratch / "results" / "data").symlink_to(settings.data_root.resolve(), target_is_directory=True)
    report, device_log = scratch / "report.json", scratch / "device.jsonl"
    command = [sys.executable, "-m", "auto_research.audit.process", "--adapter", card.key, "--tier", settings.tier]
    command += ["--device", settings.device, "--dataset", settings.dataset_of(card)]
    command += ["--seed", str(settings.seed), "--work", str(scratch), "--report", str(report)]
    finished = run_limited(
        command, timeout=settings.timeout, env=_environment(settings, device_log), cwd=scratch, log=log
    )
    try:
        content = read_json(report) if report.is_file() else None
    except CorruptFile:
        content = None
    return finished, content, evidence.read(device_log)


def _environment(settings: Settings, device_log: Path) -> Mapping[str, str]:
    path = [str(checkout_root() / "src"), os.environ.get("PYTHONPATH", "")]
    threads = {} if settings.threads is None else {"AUTO_RESEARCH_CPU_THREADS": str(settings.threads)}
    return threads | {
        evidence.VARIABLE: str(device_log),
        "AUTO_RESEARCH_ROOT": str(settings.root.resolve()),
        "AUTO_RESEARCH_DEVICE": settings.device,
        "AUTO_RESEARCH_DATASET_DIR": str(Path(settings.dataset_dir).resolve()),
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }


def _error(status: str, finished: Finished, report: dict | None, timeout: float, log: str | None) -> dict | None:
    """Error record of a failed or timed out run: class and message, and where its log is."""
    if status == audit_rows.TIMEOUT:
        found = {"type": "TimeLimit", "message": f"ended after the hard limit of {timeout:g} s"}
    elif status != audit_rows.FAILED:
        return None
    elif report is not None and report["error"]:
        found = report["error"]
    else:
        code = finished.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        found = {"type": "ProcessDied", "message": f"ended by {how} without a report"}
    return {**found, "log": log} if log else found
