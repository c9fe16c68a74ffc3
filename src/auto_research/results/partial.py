"""summary.partial.json and .md: what exists and what failed after an incomplete run; never the declared result."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from auto_research.experiment.card import Card
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.layout import Layout
from auto_research.results import markdown
from auto_research.results.compare import build_result
from auto_research.results.records import load_existing
from auto_research.runtime.files import read_json, write_json, write_text


def write_partial(card: Card, layout: Layout, fingerprints: Fingerprints, seeds: Iterable[int] | None = None) -> Path:
    """Write the two partial summaries and return the path of the markdown one."""
    records, problems = load_existing(card, layout, fingerprints, seeds)
    failed = failures(layout)
    summary = {
        "schema_version": 2,
        "partial": True,
        "adapter": card.key,
        "tier": layout.tier,
        "dataset": layout.dataset,
        "failures": failed,
        "unusable": problems,
        "result": build_result(card, layout, records, fingerprints.compare(card.key)) if records else None,
    }
    write_json(layout.partial, summary)
    text = layout.partial.with_suffix(".md")
    write_text(text, _text(card, layout, summary))
    return text


def failures(layout: Layout) -> list[dict[str, Any]]:
    """Failure records of an adapter at one tier and data set, by file name."""
    return [read_json(path) for path in sorted(layout.failures.glob("*.json"))]


def _text(card: Card, layout: Layout, summary: dict) -> str:
    rows = [
        [
            f"{record['kind']} `{record['name']}`",
            str(record["seed"]),
            record["error"],
            record["message"],
            record["log"] or "-",
        ]
        for record in summary["failures"]
    ]
    parts = [
        f"# {card.title}: incomplete",
        f"Adapter `{card.key}`, tier `{layout.tier}`, data `{layout.dataset}`. The same command again repeats only what is "
        "missing. This is not a result.",
        "## Failed jobs",
        markdown.table(["job", "seed", "error", "message", "log"], rows, left=5) if rows else "none",
        "## Not usable",
        "\n".join(f"* {line}" for line in summary["unusable"]) or "none",
    ]
    if summary["result"]:
        parts += ["## So far", markdown.arms_table(summary["result"])]
    return "\n\n".join(parts) + "\n"
