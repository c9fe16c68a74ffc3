"""Render report.json as a self-contained page and as Markdown."""

from __future__ import annotations

from pathlib import Path

from auto_research.evolve.chart import fitness_chart, gain_chart

TEMPLATES = Path(__file__).parent / "templates"
CLAIMS = {
    "smoke": "Smoke run: cut data, short training or fewer than three seeds. It shows that the search works; its numbers are not a result.",
    "exploratory": "Exploratory: the sealed test of this run was read before, so its numbers no longer count as a fresh test.",
    "improves": "The champion improves on the baseline in the sealed test: the paired interval excludes zero and every floor is beaten.",
    "no-difference": "No difference shown: the paired interval of the sealed test includes zero, or a floor is not beaten.",
    "worse": "The champion is worse than the baseline in the sealed test.",
}
SOURCES = {
    "baseline": "baseline",
    "installed-paper": "implemented paper",
    "generated-combination": "generated combination",
    "retrieved-paper": "literature only",
    "novel-proposal": "proposal, not run",
    "planted": "asked for",
    "none": "no candidate",
}


def number(value, digits: int = 4, sign: bool = False) -> str:
    """Fixed-point text, an en dash for None."""
    return "–" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def compact(value) -> str:
    """1234567 -> 1.23M, 56789 -> 56.8k."""
    if value is None:
        return "–"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.4g}"


def changes(rows: list[dict]) -> str:
    """``gene: from → to`` for each change."""
    return ", ".join(f"{row['gene']}: {row['from']} → {row['to']}" for row in rows) or "none"


def sentence(claim: str) -> str:
    """The claim's explanation without its leading word."""
    text = claim.split(": ", 1)[-1]
    return text[0].upper() + text[1:]


def short(text: str, limit: int = 110) -> str:
    """Text cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown_metrics(report: dict) -> list[str]:
    """Metrics that both sides have, fitness first, slices left to the details."""
    names = [name for name in report["test"]["champion"] if "." not in name]
    return ["fitness", *sorted(name for name in names if name != "fitness")]


def slices(report: dict) -> list[dict]:
    """Rows of the slice table: every dotted metric on validation and test."""
    names = sorted(name for name in report["test"]["champion"] if "." in name)
    sides = ((where, who) for where in ("validation", "test") for who in ("baseline", "champion"))
    keys = list(sides)
    return [{"name": name, "values": [report[where][who].get(name) for where, who in keys]} for name in names]


def render_board(report: dict) -> str:
    """Return the page: one HTML file, no network, light and dark."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "compact": compact, "changes": changes, "short": short}
    return environment.get_template("board.html.j2").render(
        report=report,
        chart=fitness_chart(report["trials"], report["generations"]),
        gains=gain_chart([("validation", report["validation"]["gain"]), ("sealed test", report["test"]["gain"])]),
        claim_text=sentence(CLAIMS[report["claim"]]),
        sources=SOURCES,
        metrics=shown_metrics(report),
        slices=slices(report),
        floor_names=floor_table(report)[0],
        floor_rows=floor_table(report)[1],
        verdict=verdict(report),
    )


def verdict(report: dict) -> str:
    """One or two sentences that say how the search ended, floors that stay above the champion included."""
    gain, champion = report["test"]["gain"], report["champion"]
    if champion["is_baseline"]:
        text = "No candidate beat the baseline; the baseline stays champion."
    else:
        text = (
            f"Champion {champion['trial_id']} ({changes(champion['changes'])}) against the baseline: fitness "
            f"{report['validation']['gain']['delta']:+.4f} on validation, {gain['delta']:+.4f} in the sealed test"
        )
        if gain["low"] is None:
            text += "."
        else:
            zero = "includes" if gain["low"] <= 0 <= gain["high"] else "excludes"
            text += f" (95% interval {gain['low']:+.4f} to {gain['high']:+.4f}, {zero} zero)."
    fitness = report["test"]["champion"]["fitness"]
    above = [
        f"{name} ({row['test']['fitness']:.4f})"
        for name, row in report["floors"].items()
        if (row["test"].get("fitness") or 0) >= fitness
    ]
    if above:
        text += f" Floors not beaten in the test: {', '.join(above)}; champion {fitness:.4f}."
    return text


def floor_table(report: dict) -> tuple[list[str], list[dict]]:
    """(metric names, rows) of floors with baseline and champion below them, on validation and test."""
    if not report["floors"]:
        return [], []
    known = next(iter(report["floors"].values()))["test"]
    names = [name for name in ("fitness", "ndcg@10", "auc", "head_share@10") if name in known]
    names += sorted(set(known) - set(names))
    sides = {f"floor {name}": values for name, values in report["floors"].items()}
    sides |= {who: {where: report[where][who] for where in ("validation", "test")} for who in ("baseline", "champion")}
    rows = [
        {"name": name, "values": [parts[where].get(metric) for where in ("validation", "test") for metric in names]}
        for name, parts in sides.items()
    ]
    return names, rows


def render_markdown(report: dict) -> str:
    """Return the report as Markdown."""
    request = report["request"]
    lines = [
        f"# {report['title']}: run {report['run']}",
        "",
        report["question"],
        "",
        f"**{report['claim']}** · {CLAIMS[report['claim']]}",
        "",
        verdict(report),
        "",
        f"Asked: data {request['dataset']}, direction {request['direction'] or 'none'}, budget {request['profile']}, "
        f"{request['generations']} generations of {request['population']} candidates, seeds "
        f"{', '.join(map(str, request['seeds']))}, device {report['runtime'].get('device_requested', 'auto')}.",
        "",
        "## Sealed test",
        "",
        f"Read before for this run: {report['test_reads_before']} times. Fitness: {report['fitness']['what']}.",
        "",
        "| metric | validation baseline | validation champion | test baseline | test champion |",
        "|---|---|---|---|---|",
    ]
    for name in shown_metrics(report):
        cells = [report[where][who].get(name) for where in ("validation", "test") for who in ("baseline", "champion")]
        lines.append(f"| {name} | " + " | ".join(number(cell) for cell in cells) + " |")
    for where in ("validation", "test"):
        gain = report[where]["gain"]
        lines += [
            "",
            f"Gain on {where}: {number(gain['delta'], sign=True)} "
            f"[{number(gain['low'], sign=True)}, {number(gain['high'], sign=True)}], {gain['resamples']} resamples.",
        ]
    if report["floors"]:
        lines += ["", "| floor | validation | test |", "|---|---|---|"]
        for name, values in report["floors"].items():
            cells = [", ".join(f"{k} {number(v)}" for k, v in values[part].items()) for part in ("validation", "test")]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        "## All trials",
        "",
        "| trial | changed | source | status | fitness | score | parameters | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["trials"]:
        error = "" if not row["error"] else f"{row['error']['class']}: {row['error']['message']}".replace("|", "/")
        lines.append(
            f"| {row['trial_id'] or '(slot ' + str(row['slot']) + ')'} | {changes(row['changed'])} | "
            f"{SOURCES.get(row['source'], row['source'])} {row['paper']} | {row['status']} | {number(row['mean'])} | "
            f"{number(row['score'])} | {compact(row['parameters'])} | {error or row['why_not'] or ''} |"
        )
    lines += ["", "## Decisions", ""]
    lines += [f"{entry['generation']}. {entry['decision']}" for entry in report["generations"]]
    return "\n".join(lines) + "\n"
