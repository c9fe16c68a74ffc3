"""A whole audit, or one shard of it, in one call without Snakemake. Every row is on disk before the next one starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from auto_research.audit import pages, records
from auto_research.audit.devices import TIMEOUT, kind_of
from auto_research.audit.rows import is_pass
from auto_research.audit.runner import Settings, audit_adapter, source_hash
from auto_research.audit.selection import Selection, shard
from auto_research.experiment.card import Card
from auto_research.experiment.layout import CHECKPOINTS, Layout
from auto_research.runtime.errors import AutoResearchError, describe_error
from auto_research.runtime.files import read_json, write_json


@dataclass(frozen=True)
class Session:
    """One audit call.

    output: shard document to write.  resume: keep passes of `output` whose sources are unchanged.
    seconds: start no adapter after this many seconds and record none that they cut short; None: no limit.
    durations: expected seconds per adapter; shortest first when given, else alphabetical.
    """

    settings: Settings
    output: Path
    shards: int = 1
    index: int | None = None
    resume: bool = False
    seconds: float | None = None
    durations: Mapping[str, float] | None = None


def run_session(cards: Mapping[str, Card], selection: Selection, session: Session) -> dict[str, Any]:
    """Run the shard's adapters one after another and return its summary.

    Raises DeviceUnavailable before any work when the device is missing.
    """
    settings = session.settings
    check_device(settings.device)
    keys = shard(selection.chosen, session.shards, session.index)
    rows = _kept_rows(session, keys) if session.resume else {}
    earlier = _earlier_document(session.output)
    current = {key: source_hash(settings.root, cards[key]) for key in keys}
    todo = [key for key in keys if not _still_valid(rows.get(key), settings, current[key])]
    prepare_data([cards[key] for key in todo], settings)
    started = time.monotonic()
    _save(session, keys, selection, rows)
    for number, key in enumerate(ordered(todo, cards, session.durations), start=1):
        left = None if session.seconds is None else session.seconds - (time.monotonic() - started)
        if left is not None and left <= 0:
            _say(f"time is over: {len(todo) - number + 1} adapters not run")
            break
        limited = settings if left is None else replace(settings, timeout=min(settings.timeout, left))
        _say(f"[{number}/{len(todo)}] {key} on {settings.device} ...")
        row = audit_adapter(cards[key], limited)
        if row["status"] == TIMEOUT and limited.timeout < settings.timeout:
            _say(f"[{number}/{len(todo)}] {key}: cut short by the end of the session, no row")
            continue
        rows[key] = row
        _save(session, keys, selection, rows)
        error = f" {row['error']['type']}: {row['error']['message']}" if row["error"] else ""
        _say(f"[{number}/{len(todo)}] {key}: {row['status']} in {row['seconds']:.1f} s{error}")
    document = _document(session, keys, selection, rows)
    previous = records.merge_documents([earlier]) if earlier else None
    summary = records.merge_documents([{**document, "shards": 1, "shard_index": None}], previous)
    records.write_summary(summary, session.output.with_name(session.output.stem + ".summary"))
    return summary


def check_device(device: str) -> None:
    """Raise ConfigError or DeviceUnavailable unless this machine can run on `device`."""
    from auto_research.runtime.devices import resolve_device

    kind_of(device)
    resolve_device(device)


def ordered(keys: Sequence[str], cards: Mapping[str, Card], durations: Mapping[str, float] | None) -> list[str]:
    """Shortest first by known seconds; adapters never timed come after them, those with fewest stages first."""
    if durations is None:
        return sorted(keys)
    stages = {key: len(cards[key].arms) + len(cards[key].artifacts) for key in keys}
    return sorted(keys, key=lambda key: (key not in durations, durations.get(key, stages[key]), key))


def prepare_data(cards: Sequence[Card], settings: Settings) -> None:
    """Prepare what `cards` need and is not there. A failure is printed; its rows will fail."""
    wanted = sorted({(settings.dataset_of(card), need) for card in cards for need in card.facts["data"]["needs"]})
    for dataset, need in sorted(wanted, key=lambda pair: pair[1] != "canonical"):
        layout = Layout("any", settings.tier, dataset, data_root=settings.data_root)
        if (layout.data(need) / "manifest.json").is_file():
            continue
        try:
            _prepare(need, layout, settings)
        except (AutoResearchError, OSError) as error:
            _say(f"{need} of {dataset}: {describe_error(error)[0]}")


def _prepare(need: str, layout: Layout, settings: Settings) -> None:
    from auto_research.blocks.title_encoder import ENCODED, prepare_encoded
    from auto_research.data.checkpoints import fetch_checkpoint
    from auto_research.data.prepare import prepare, prepare_table

    if need in CHECKPOINTS:
        fetch_checkpoint(CHECKPOINTS[need], layout.data(need), settings.dataset_dir)
        return
    canonical = layout.data("canonical")
    if not (canonical / "manifest.json").is_file():
        prepare(layout.dataset, canonical, settings.dataset_dir)
    if need in ENCODED:
        prepare_encoded(need, canonical, layout.data(need), layout.data("text_encoder"), settings.dataset_dir)
    elif need != "canonical":
        prepare_table(canonical, need, layout.data(need))


def table(summary: Mapping[str, Any]) -> str:
    """The rows as aligned text for a terminal."""
    lines = [("adapter", "status", "seconds", "calls", "peak memory", "error")]
    for row in summary["rows"]:
        error = f"{row['error']['type']}: {row['error']['message']}"[:60] if row["error"] else ""
        peak = pages.memory_text(row["peak_memory_bytes"])
        lines.append((row["adapter"], row["status"], f"{row['seconds']:.1f}", str(row["calls"]), peak, error))
    lines += [(key, "no row", "", "", "", "") for key in summary["missing"]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, pages.headline(summary)])


def _still_valid(row: Mapping[str, Any] | None, settings: Settings, sources: str) -> bool:
    return (
        row is not None
        and is_pass(row)
        and row["sources"] == sources
        and (row["device"], row["tier"], row["seed"]) == (settings.device, settings.tier, settings.seed)
    )


def _earlier_document(output: Path) -> dict[str, Any] | None:
    """The document an earlier call left, as one whole audit; None without one."""
    if not output.is_file():
        return None
    return {**records.read_shard(output), "shards": 1, "shard_index": None}


def _kept_rows(session: Session, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    document = _earlier_document(session.output)
    settings = session.settings
    if document is None or (document["device"], document["tier"]) != (settings.device, settings.tier):
        return {}
    return {row["adapter"]: row for row in document["rows"] if row["adapter"] in keys}


def _document(session: Session, keys: Sequence[str], selection: Selection, rows: Mapping[str, Any]) -> dict[str, Any]:
    return records.shard_document(
        list(rows.values()),
        device=session.settings.device,
        tier=session.settings.tier,
        shards=session.shards,
        index=session.index,
        expected=keys,
        skipped=selection.skipped,
    )


def _save(session: Session, keys: Sequence[str], selection: Selection, rows: Mapping[str, Any]) -> None:
    write_json(session.output, _document(session, keys, selection, rows))


def known_durations(paths: Sequence[Path]) -> dict[str, float]:
    """Seconds per adapter out of shard documents or summaries of earlier audits; later files win."""
    return {row["adapter"]: float(row["seconds"]) for path in paths for row in read_json(path)["rows"]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
