"""report.md: a result as text for readers."""

from __future__ import annotations

from typing import Any

from auto_research.experiment.studies import joined_studies

CLAIMS = {
    "smoke": "smoke: the run shows that everything works; it supports no claim",
    "improves": "improves",
    "no-difference": "no difference",
    "worse": "worse",
}


def report(result: dict[str, Any]) -> str:
    """Markdown of a result.json: claim, arms with floors, comparisons with intervals, cost, boundary."""
    card = result["card"]
    parts = [
        f"# {card['title']}",
        f"{card['paper']}, {card['organization']}, {card['published']}. Adapter `{result['adapter']}`, tier "
        f"`{result['tier']}`, data `{result['dataset']}`, fidelity `{card['fidelity']}`.",
        card["problem"],
        f"**Claim: {CLAIMS[result['claim']]}.** {_sentence(result['claim_reason'])}",
        "## Arms",
        arms_table(result),
        "Mean over seeds, ± standard deviation where an arm ran more than one; the interval is a bootstrap over the tested "
        "units. An arm marked with an asterisk does not beat "
        "every floor on the primary metric.",
        "## Comparisons",
        _comparisons(result),
        "Differences are arm minus other; intervals are 95% paired bootstraps (2,000 resamples) over the units that were "
        "tested. All declared comparisons are listed, lost ones too.",
        "![Training and comparison curves](curves.svg)",
        "## Cost",
        _cost(result),
        *_studies(result),
        *_section("Notes", _notes(result)),
        *_section("What is replaced or scaled down", card["boundary"]),
        *(["## Reported in the paper", card["paper_reported"]] if card["paper_reported"] else []),
        "## How this was made",
        _provenance(result),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Markdown table; the first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, rule, *rows])


def number(value: float | None) -> str:
    """Four decimals, more where they would all be zero."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.2e}"


def arms_table(result: dict[str, Any]) -> str:
    """One row per arm: role, seeds, the interval of the primary metric, every metric of the card."""
    names = [result["metrics"]["primary"], *result["metrics"]["also"]]
    names = [name for name in names if any(name in arm["metrics"] for arm in result["arms"].values())]
    rows = []
    for name, arm in result["arms"].items():
        cells = []
        for metric in names:
            value = arm["metrics"].get(metric)
            spread = f" ± {number(value['std'])}" if value and value["std"] is not None else ""
            cells.append(number(value["mean"] if value else None) + spread)
        mark = " *" if arm["floors_not_beaten"] else ""
        cells.insert(1, interval(arm["intervals"].get(names[0]) if names else None))
        rows.append([f"`{name}`{mark}", arm["role"], str(len(arm["seeds"])), *cells])
    head = [*names[:1], "95% interval", *names[1:]]
    return table(["arm", "role", "seeds", *head], rows, left=2)


def interval(found: dict[str, Any] | None) -> str:
    """`low to high` of an interval, `-` where there is none."""
    return f"{number(found['low'])} to {number(found['high'])}" if found else "-"


def _comparisons(result: dict[str, Any]) -> str:
    primary = result["metrics"]["primary"]
    rows = []
    for pair in result["comparisons"]:
        found = pair["metrics"].get(primary)
        delta = f"{found['delta']:+.4f}" if found else "-"
        relative = f"{100 * found['relative']:+.2f}%" if found and found["relative"] is not None else "-"
        interval = f"{found['low']:+.4f} to {found['high']:+.4f}" if found and found["low"] is not None else "-"
        rows.append(
            [
                f"`{pair['arm']}`",
                f"`{pair['against']}`",
                f"{pair['verdict']}: {pair['reason']}",
                delta,
                relative,
                interval,
            ]
        )
    return table(["arm", "against", "verdict", f"{primary} difference", "relative", "95% interval"], rows, left=3)


_TIMES = {
    "stage_cpu_seconds",
    "train_seconds",
    "tuning_seconds",
    "catalogue_seconds",
    "engage_seconds",
}  # parts of seconds


def _cost(result: dict[str, Any]) -> str:
    names = ["params", "flops", "seconds", "peak_memory_bytes"]
    rows = []
    for name, arm in result["arms"].items():
        cost = arm["cost"]
        chosen = ", ".join(f"{key} {value:g}" for key, value in arm["hyperparameters"].items() if _is_number(value))
        memory = cost.get("peak_memory_bytes")
        cells = [_count(cost.get("params")), _count(cost.get("flops"))]
        cells += [f"{cost['seconds']:.1f}" if _is_number(cost.get("seconds")) else "-"]
        cells += [f"{memory / 2**20:.0f}" if _is_number(memory) else "-"]
        rows.append([f"`{name}`", chosen or "-", *cells])
    text = table(["arm", "hyperparameters", *names[:3], "peak MiB"], rows, left=2)
    further = sorted({key for arm in result["arms"].values() for key in arm["cost"]} - {*names, *_TIMES})
    further = [key for key in further if any(_is_number(arm["cost"].get(key)) for arm in result["arms"].values())]
    if not further:
        return text
    measured = [
        (name, arm["cost"]) for name, arm in result["arms"].items() if any(key in arm["cost"] for key in further)
    ]
    rows = [[f"`{name}`", *(_short(cost.get(key)) for key in further)] for name, cost in measured]
    return text + "\n\n" + table(["arm", *(key.replace("_", " ") for key in further)], rows)


def _studies(result: dict[str, Any]) -> list[str]:
    parts = ["## Cost at several sizes"]
    for name, study in joined_studies(result).items():
        sizes = sorted({x for line in study["lines"].values() for x, _ in line})
        rows = []
        for label, line in study["lines"].items():
            values = dict(map(tuple, line))
            rows.append([label, *(f"{values[x]:.4g}" if x in values else "-" for x in sizes)])
        head = [f"{name.replace('_', ' ')} ({study['y']}) by {study['x']}", *(f"{size:,g}" for size in sizes)]
        parts.append(table(head, rows))
    return parts if len(parts) > 1 else []


def _provenance(result: dict[str, Any]) -> str:
    runtime = ", ".join(f"{name} {_joined(value)}" for name, value in result["runtime"].items())
    code = result["code"]
    commit = (
        f"commit {code['commit'][:12]}{' with changes' if code.get('modified') else ''}, " if code.get("commit") else ""
    )
    data = "; ".join(f"{name} {sha[:12]}" for name, sha in result["data"].items())
    target = f"reproduce_{result['adapter'].replace('-', '_')}"
    lines = [
        f"* `snakemake {target} --config tier={result['tier']} dataset={result['dataset']}`",
        f"* code: {commit}fingerprint {code['fingerprint'][:12]}",
        f"* data: {data or 'none'}",
        f"* seeds: {_joined(result['seeds'])}",
        f"* runtime: {runtime}",
    ]
    if minutes := result.get("cpu_minutes"):
        lines.append(f"* CPU minutes: {minutes['tuning_seed']:.1f} with one seed, {minutes['all_seeds']:.1f} with all")
    return "\n".join(lines)


def _notes(result: dict[str, Any]) -> list[str]:
    """Every note once, after the arms that have it."""
    owners: dict[str, list[str]] = {}
    for name, arm in result["arms"].items():
        for note in arm["notes"]:
            owners.setdefault(note, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in owners.items()]


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"* {line}" for line in lines)] if lines else []


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """Whole numbers in full, others in four digits."""
    if not _is_number(value):
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1e4 else f"{value:.4g}"


def _count(value: Any) -> str:
    return f"{value:,.0f}" if _is_number(value) else "-"
