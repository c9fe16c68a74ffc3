"""Inline SVG of a search: fitness per generation with intervals, and the interval of the sealed gain. No script, no font."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 40
SLOT = 24


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round tick values covering [low, high]."""
    from math import ceil, floor, log10

    if high <= low:
        high = low + 1.0
    raw = (high - low) / count
    base = 10 ** floor(log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw)
    return [round(index * step, 12) for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def fitness_chart(trials: list[dict], generations: list[dict]) -> str:
    """SVG: every trial's mean fitness with its 95% interval, failed trials as crosses, the champion as a line."""
    done = [row for row in trials if row["mean"] is not None]
    low = min(row["low"] for row in done)
    high = max(row["high"] for row in done)
    pad = (high - low) * 0.06 or 0.05
    low, high = low - pad, high + pad
    count = len(generations)
    most = max(sum(1 for row in trials if row["generation"] == g and row["trial_id"]) for g in range(count))
    width = max(WIDTH, LEFT + RIGHT + count * SLOT * (most + 1))
    slot = (width - LEFT - RIGHT) / count

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def x(generation: int, index: int, size: int) -> float:
        return round(LEFT + slot * (generation + (index + 1) / (size + 1)), 1)

    parts = []
    for value in ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    places: dict[str, tuple[float, float]] = {}
    marks = []
    for generation in range(count):
        rows = [row for row in trials if row["generation"] == generation and row["trial_id"]]
        middle = LEFT + slot * (generation + 0.5)
        label = "baseline" if generation == 0 else f"gen {generation}"
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{label}</text>')
        for index, row in enumerate(rows):
            where = x(generation, index, len(rows))
            if row["mean"] is None:
                marks.append(_cross(where, HEIGHT - BOTTOM - 8, f"{row['trial_id']}: {row['status']}"))
                continue
            places[row["trial_id"]] = (where, y(row["mean"]))
            kind = "champ" if row["champion"] or generation == 0 else "other"
            text = f"{row['trial_id']}: {row['mean']:.4f}, 95% interval {row['low']:.4f} to {row['high']:.4f}"
            marks.append(_dot(where, row, y, kind, text))
    start = places[generations[0]["champion"]]
    path, height = [f"M{start[0]},{start[1]}"], start[1]
    for entry in generations[1:]:
        px, py = places[entry["champion"]]
        if py != height:
            path.append(f"H{px} V{py}")
            height = py
    path.append(f"H{width - RIGHT}")
    best = generations[-1]
    title = f"Fitness per generation; the champion ends at {best['mean']:.4f}"
    return (
        f'<svg viewBox="0 0 {width} {HEIGHT}" style="min-width:{0 if width == WIDTH else width}px" role="img" '
        f'aria-label="{escape(title)}">'
        + "".join(parts)
        + f'<path class="line" d="{" ".join(path)}"/>'
        + "".join(marks)
        + "</svg>"
    )


def _dot(x: float, row: dict, y, kind: str, text: str) -> str:
    return (
        f'<g class="{kind}"><title>{escape(text)}</title>'
        f'<line class="bar" x1="{x}" x2="{x}" y1="{y(row["low"])}" y2="{y(row["high"])}"/>'
        f'<circle cx="{x}" cy="{y(row["mean"])}" r="5"/></g>'
    )


def _cross(x: float, y: float, text: str) -> str:
    return (
        f'<g class="failed"><title>{escape(text)}</title>'
        f'<path d="M{x - 5},{y - 5} L{x + 5},{y + 5} M{x - 5},{y + 5} L{x + 5},{y - 5}"/></g>'
    )


def gain_chart(gains: list[tuple[str, dict]]) -> str:
    """SVG: one row per (name, gain) with its paired interval around zero."""
    rows = [(name, gain) for name, gain in gains if gain["low"] is not None]
    if not rows:
        return ""
    reach = max(max(abs(gain["low"]), abs(gain["high"]), abs(gain["delta"])) for _, gain in rows) * 1.15 or 1.0
    height, left, right = 34 * len(rows) + 34, 84, 28

    def x(value: float) -> float:
        return round(left + (value + reach) / (2 * reach) * (WIDTH - left - right), 1)

    parts = [f'<line class="zero" x1="{x(0)}" x2="{x(0)}" y1="6" y2="{height - 26}"/>']
    for value in (-reach / 1.15, 0.0, reach / 1.15):
        parts.append(f'<text class="tick" x="{x(value)}" y="{height - 8}" text-anchor="middle">{value:+.3f}</text>')
    for index, (name, gain) in enumerate(rows):
        y = 22 + 34 * index
        text = f"{name}: {gain['delta']:+.4f}, 95% interval {gain['low']:+.4f} to {gain['high']:+.4f}"
        parts.append(
            f'<text class="name" x="0" y="{y + 4}">{escape(name)}</text><g class="champ"><title>{escape(text)}</title>'
            f'<line class="bar" x1="{x(gain["low"])}" x2="{x(gain["high"])}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{x(gain["delta"])}" cy="{y}" r="5"/></g>'
        )
    label = "; ".join(f"{name} gain {gain['delta']:+.4f}" for name, gain in rows)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
