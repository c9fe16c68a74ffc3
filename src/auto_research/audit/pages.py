"""The audit summary for readers: Markdown and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLAIM = (
    "This page answers whether the code runs on the device. It says nothing about whether a method works: "
    "the runs are cut to the named tier and their metrics are not results."
)

_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit on {{ summary.device }}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:70rem;padding:1rem;color:#1d2530;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
.scroll{overflow-x:auto}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dde3;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}.pass{color:#176b37}.bad{color:#a4231c;font-weight:600}
code{font-size:.9em}p.claim{background:#f3f5f8;padding:.6rem .8rem;border-left:4px solid #7d8a99}
@media(prefers-color-scheme:dark){body{background:#14181d;color:#dfe5ec}p.claim{background:#1f262e}
th,td{border-color:#333c46}.pass{color:#6fcf97}.bad{color:#ff8a80}}
</style></head><body>
<h1>Audit on {{ summary.device }}, tier {{ summary.tier }}</h1>
<p class="claim">{{ claim }}</p>
<p><strong class="{{ 'pass' if summary.complete else 'bad' }}">{{ headline }}</strong>
Sum of valid durations {{ '%.1f'|format(summary.valid_seconds) }} s.</p>
{% if lines %}<h2>Since the last summary</h2><ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% if summary.failures or summary.missing %}<h2>Not passed</h2><div class="scroll"><table>
<tr><th>Adapter</th><th>Status</th><th>Seconds</th><th>Error</th></tr>
{% for row in summary.failures %}<tr><td>{{ row.adapter }}</td><td class="bad">{{ row.status }}</td>
<td class="n">{{ '%.1f'|format(row.seconds) }}</td>
<td>{% if row.error %}<code>{{ row.error.type }}</code> {{ row.error.message }}{% endif %}</td></tr>{% endfor %}
{% for key in summary.missing %}<tr><td>{{ key }}</td><td class="bad">no row</td><td></td><td></td></tr>{% endfor %}
</table></div>{% endif %}
<h2>Rows</h2><div class="scroll"><table>
<tr><th>Adapter</th><th>Fidelity</th><th>Status</th><th>Seconds</th><th>Calls</th><th>Peak device memory</th><th>Callers</th></tr>
{% for row in summary.rows %}<tr><td>{{ row.adapter }}</td><td>{{ row.fidelity }}</td>
<td class="{{ 'pass' if row.adapter in summary.passes else 'bad' }}">{{ row.status }}</td>
<td class="n">{{ '%.1f'|format(row.seconds) }}</td><td class="n">{{ row.calls }}</td>
<td class="n">{{ memory(row.peak_memory_bytes) }}</td>
<td>{% for c in row.callers %}<code>{{ c.file }}:{{ c.line }}</code> {% endfor %}</td></tr>{% endfor %}
</table></div>
{% if summary.skipped %}<h2>Not audited</h2><ul>
{% for key, reason in summary.skipped.items() %}<li>{{ key }}: {{ reason }}</li>{% endfor %}</ul>{% endif %}
</body></html>
"""


def memory_text(peak: int | None) -> str:
    """Bytes as MiB; `-` where the device reports none."""
    return "-" if peak is None else f"{peak / 2**20:.1f} MiB"


def headline(summary: Mapping[str, Any]) -> str:
    """One sentence: how many of the expected adapters passed, and the other statuses."""
    passed, total = len(summary["passes"]), len(summary["expected"])
    rest = [f"{count} {status}" for status, count in summary["counts"].items() if not status.endswith("_pass")]
    if summary["missing"]:
        rest.append(f"{len(summary['missing'])} without a row")
    return f"{passed} of {total} adapters passed" + (f"; {', '.join(rest)}." if rest else ".")


def difference_lines(summary: Mapping[str, Any]) -> list[str]:
    """The difference to the previous summary as sentences; empty without a previous one."""
    change = summary["difference"]
    if change is None:
        return []
    lines = [f"{row['adapter']}: {row['before']} -> {row['after']}" for row in change["changed"]]
    lines += [f"{adapter}: new" for adapter in change["added"]]
    lines += [f"{adapter}: no longer audited" for adapter in change["removed"]]
    return [*lines, f"{change['unchanged']} unchanged"]


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a Markdown page."""
    out = [f"# Audit on {summary['device']}, tier {summary['tier']}", "", CLAIM, "", headline(summary)]
    out += [f"Sum of valid durations {summary['valid_seconds']:.1f} s.", ""]
    if lines := difference_lines(summary):
        out += ["## Since the last summary", "", *(f"- {line}" for line in lines), ""]
    if summary["failures"] or summary["missing"]:
        out += ["## Not passed", "", "| adapter | status | seconds | error |", "|---|---|---:|---|"]
        for row in summary["failures"]:
            error = f"`{row['error']['type']}` {_cell(row['error']['message'])}" if row["error"] else ""
            out.append(f"| {row['adapter']} | {row['status']} | {row['seconds']:.1f} | {error} |")
        out += [f"| {adapter} | no row | | |" for adapter in summary["missing"]] + [""]
    out += ["## Rows", "", "| adapter | status | seconds | calls | peak device memory | callers |"]
    out += ["|---|---|---:|---:|---:|---|"]
    for row in summary["rows"]:
        callers = " ".join(f"`{caller['file']}:{caller['line']}`" for caller in row["callers"])
        peak = memory_text(row["peak_memory_bytes"])
        out.append(
            f"| {row['adapter']} | {row['status']} | {row['seconds']:.1f} | {row['calls']} | {peak} | {callers} |"
        )
    if summary["skipped"]:
        out += ["", "## Not audited", "", *(f"- {key}: {reason}" for key, reason in summary["skipped"].items())]
    return "\n".join(out) + "\n"


def html(summary: Mapping[str, Any]) -> str:
    """The summary as one HTML page that needs nothing else."""
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(_HTML)
    return template.render(
        summary=summary,
        claim=CLAIM,
        headline=headline(summary),
        lines=difference_lines(summary),
        memory=memory_text,
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
