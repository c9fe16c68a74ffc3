"""Tables a person sees after a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from auto_research.runtime.files import read_json


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _interval(found: dict[str, Any] | None) -> str:
    if not found or found.get("low") is None:
        return "-"
    return f"{found['delta']:+.4f}  [{found['low']:+.4f}, {found['high']:+.4f}]"


def print_result(key: str, tier: str, dataset: str) -> None:
    """Arms, floors and comparisons of one finished reproduction."""
    folder = Path("results/reproduce") / key / tier / dataset
    if not (folder / "result.json").is_file():
        return
    result = read_json(folder / "result.json")
    names = [result["metrics"]["primary"], *result["metrics"]["also"]]
    names = [name for name in names if any(name in arm["metrics"] for arm in result["arms"].values())][:5]
    table = _table("arm", "role", "seeds", *names, title=f"{key}, tier {tier}, {dataset}")
    for name, arm in result["arms"].items():
        values = [_number(arm["metrics"].get(metric, {}).get("mean")) for metric in names]
        table.add_row(name, arm["role"], str(len(arm["seeds"])), *values)
    console = Console()
    console.print(table)
    for pair in result["comparisons"]:
        interval = _interval(pair["metrics"].get(names[0]))
        console.print(
            f"{pair['arm']} against {pair['against']}: {names[0]} {interval}  {pair['verdict']}", highlight=False
        )
    print(f"claim: {result['claim']} ({result['claim_reason']})")
    print((folder / "report.md").resolve())


def print_search(track: str, run: str) -> None:
    """Result table and board of the newest finished final of a search."""
    finals = Path("results/evolve") / track / run / "final"
    folders = sorted(finals.glob("g*"), key=lambda path: int(path.name[1:]))
    if not folders:
        return
    from auto_research.cli.search_table import search_lines

    folder = folders[-1]
    for line in search_lines(read_json(folder / "report.json")):
        Console().print(line, highlight=False)
    print(f"board: {(folder / 'index.html').resolve()}")


def print_checks(checks: list) -> int:
    """Print the doctor's lines; return 1 when something needed is missing."""
    table = Table(box=None, pad_edge=False)
    for name in ("check", "state", "found", "what to type"):
        table.add_column(name, overflow="fold")
    style = {"ok": "green", "warning": "yellow", "missing": "red"}
    for check in checks:
        table.add_row(check.name, f"[{style[check.status]}]{check.status}[/]", check.detail, check.fix)
    Console().print(table)
    return int(any(check.status == "missing" for check in checks))


def print_datasets() -> None:
    """The registry with what is prepared below the working directory."""
    from auto_research.data.sources import load_registry

    table = Table(box=None, pad_edge=False)
    for name in ("dataset", "what", "prepared here"):
        table.add_column(name, overflow="fold")
    for name, entry in load_registry().items():
        prepared = Path("results/data") / name / "canonical" / "manifest.json"
        table.add_row(name, entry.title, "yes" if prepared.is_file() else "no")
    Console().print(table)
