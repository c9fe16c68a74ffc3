"""The result table of a finished search, from its report.json."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def search_lines(report: dict[str, Any]) -> list[Any]:
    """Renderables for the terminal: all trials, floors, sealed test, claim."""
    trials = _plain("trial", "changed", "status", "fitness", "95% interval", "score")
    for row in report["trials"]:
        mark = " *" if row["trial_id"] == report["champion"]["trial_id"] else ""
        interval = "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
        trials.add_row(
            (row["trial_id"] or f"g{row['generation']} slot {row['slot']}") + mark,
            _changed(row["changed"]) or "baseline",
            _status(row),
            _number(row["mean"]),
            interval,
            _number(row["score"]),
        )
    sealed = _plain("sealed test", *_metric_names(report))
    for name in ("baseline", "champion"):
        sealed.add_row(name, *[_number(report["test"][name].get(metric)) for metric in _metric_names(report)])
    for name, values in report["floors"].items():
        sealed.add_row(f"floor {name}", *[_number(values["test"].get(metric)) for metric in _metric_names(report)])
    gain = report["test"]["gain"]
    interval = "" if gain["low"] is None else f" [{gain['low']:+.4f}, {gain['high']:+.4f}]"
    lines = [trials, "", sealed, ""]
    lines.append(
        f"champion minus baseline on the sealed test: {gain['delta']:+.4f}{interval}; claim: {report['claim']}"
    )
    return lines


def _status(row: dict[str, Any]) -> str:
    """Why a trial counts or does not: its error, or the guard it broke."""
    if row["error"]:
        return f"{row['status']}: {row['error']['class']}"
    return f"{row['status']}, not eligible: {row['why_not']}" if row["why_not"] else row["status"]


def _metric_names(report: dict[str, Any]) -> list[str]:
    return [
        name for name in ("fitness", "auc", "ndcg@10", "logloss", "head_share@10") if name in report["test"]["baseline"]
    ]


def _plain(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(
            name, justify="left" if (index < 3 and len(columns) == 6) or index == 0 else "right", overflow="fold"
        )
    return table


def _changed(changed: list[Any]) -> str:
    parts = [f"{c['gene']}={c['to']}" if isinstance(c, dict) else str(c) for c in changed]
    return ", ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"
