"""curves.svg: arms and seeds, training curves, comparison intervals, studies. Plain SVG, no plotting library."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from auto_research.experiment.studies import joined_studies

# Okabe and Ito, readable with every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
WIDTH, LEFT, RIGHT, ROW = 820, 250, 30, 24
NOT_A_MEASURE = {"epoch", "step", "loss", "seconds", "train_seconds", "learning_rate"}


def svg(result: dict[str, Any], curves: dict[str, list[dict]]) -> str:
    """One picture of a result. curves: arm -> list of dicts with step or epoch, loss and a validation measure."""
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(result["arms"])}
    panels = [_arms(result, colours), _training(result, curves, colours), _differences(result)]
    panels += [_study(name, study) for name, study in joined_studies(result).items()]
    body, top = [], 44
    for height, draw in panels:
        body.append(f'<g transform="translate(0,{top})">{draw}</g>')
        top += height
    title = f"{result['adapter']}, tier {result['tier']}, {result['dataset']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" role="img"'
        f' font-family="system-ui, sans-serif" font-size="12">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>\n{_text(16, 26, title, size=16, weight=600)}\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


class Axis:
    """A linear scale from data to pixels with round tick values."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        self.low, self.high, self.start, self.end = low - pad, high + pad, start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step) + 1)]


class LogAxis(Axis):
    """A logarithmic scale; values above 0, ticks at powers of ten."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        super().__init__([math.log10(value) for value in values], start, end)

    def __call__(self, value: float) -> float:
        return super().__call__(math.log10(value))

    def ticks(self, count: int = 5) -> list[float]:
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        return [10.0**power for power in powers][:: max(1, len(powers) // count)]


def _arms(result: dict, colours: dict) -> tuple[int, str]:
    """Primary metric per arm: a dot per seed, a bar at the mean, a dashed line at the best floor."""
    metric = result["metrics"]["primary"]
    rows = [(name, arm["metrics"][metric]) for name, arm in result["arms"].items() if metric in arm["metrics"]]
    if not rows:
        return 0, ""
    floors = [value for value in result["floors"].values() if value is not None]
    axis = Axis([v for _, m in rows for v in m["per_seed"].values()] + floors, LEFT, WIDTH - RIGHT)
    bottom = 24 + ROW * len(rows)
    parts = [_text(16, 12, f"{metric} on test data", weight=600), _x_axis(axis, 20, bottom)]
    if floors:
        best = axis(max(floors) if result["metrics"]["direction"] == "max" else min(floors))
        parts.append(_line(best, 20, best, bottom, "#888888", dash="4 3"))
    for index, (name, value) in enumerate(rows):
        y = 24 + ROW * index + ROW / 2
        parts.append(_text(LEFT - 10, y + 4, name, anchor="end"))
        parts += [_dot(axis(seed), y, colours[name]) for seed in value["per_seed"].values()]
        parts.append(_line(axis(value["mean"]), y - 8, axis(value["mean"]), y + 8, colours[name], width=3))
    return bottom + 46, "".join(parts)


def _training(result: dict, curves: dict[str, list[dict]], colours: dict) -> tuple[int, str]:
    """Validation measure (else loss) over epochs or steps, first seed of each arm."""
    measure = _measure(curves, result["metrics"]["primary"])
    time = "epoch" if all("epoch" in point for curve in curves.values() for point in curve) else "step"
    lines = {
        name: [(point[time], point[measure]) for point in curve if _finite(point, time) and _finite(point, measure)]
        for name, curve in curves.items()
    }
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return 0, ""
    title = "training loss" if measure == "loss" else f"validation {measure}"
    height = 200
    across = Axis([x for points in lines.values() for x, _ in points], LEFT, WIDTH - RIGHT)
    up = Axis([y for points in lines.values() for _, y in points], height, 24)
    parts = [_text(16, 12, f"{title} by {time}, first seed", weight=600), _x_axis(across, 20, height)]
    for tick in up.ticks():
        parts.append(_text(LEFT - 6, up(tick) + 4, f"{tick:g}", anchor="end", colour="#666666"))
        parts.append(_line(LEFT, up(tick), WIDTH - RIGHT, up(tick), "#eeeeee"))
    for index, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        dash = "5 3" if list(colours).index(name) >= len(COLOURS) else "none"
        style = f'fill="none" stroke="{colours[name]}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{path}" {style}/>')
        parts.append(_line(16, 36 + 18 * index, 34, 36 + 18 * index, colours[name], width=2, dash=dash))
        parts.append(_text(40, 40 + 18 * index, name))
    return max(height, 36 + 18 * len(lines)) + 46, "".join(parts)


def _differences(result: dict) -> tuple[int, str]:
    """Comparisons: difference and 95% interval around the zero line."""
    metric = result["metrics"]["primary"]
    rows = [(pair, pair["metrics"][metric]) for pair in result["comparisons"] if metric in pair["metrics"]]
    if not rows:
        return 0, ""
    ends = [v for _, d in rows for v in (d["delta"], d["low"], d["high"]) if v is not None]
    axis = Axis([0.0, *ends], LEFT + 120, WIDTH - RIGHT)
    bottom = 24 + ROW * len(rows)
    parts = [_text(16, 12, f"difference of {metric} with 95% interval", weight=600), _x_axis(axis, 20, bottom)]
    parts.append(_line(axis(0), 20, axis(0), bottom, "#444444"))
    for index, (pair, found) in enumerate(rows):
        y = 24 + ROW * index + ROW / 2
        sign = 1 if found["higher_is_better"] else -1
        apart = found["low"] is not None and (found["low"] > 0 or found["high"] < 0)
        colour = "#777777" if not apart else COLOURS[2] if sign * found["delta"] > 0 else COLOURS[1]
        parts.append(_text(LEFT + 110, y + 4, f"{pair['arm']} - {pair['against']}", anchor="end"))
        if found["low"] is not None:
            parts.append(_line(axis(found["low"]), y, axis(found["high"]), y, colour, width=3))
        parts.append(_dot(axis(found["delta"]), y, colour))
    return bottom + 40, "".join(parts)


def _study(name: str, study: dict) -> tuple[int, str]:
    """A quantity at several sizes, one line for every arm and label."""
    height = 200
    scale = LogAxis if study["log"] else Axis
    points = [point for line in study["lines"].values() for point in line]
    across = scale([x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = scale([y for _, y in points], height, 24)
    parts = [_text(16, 12, f"{name.replace('_', ' ')}: {study['y']} by {study['x']}", weight=600)]
    parts.append(_x_axis(across, 20, height))
    for tick in up.ticks():
        parts.append(_text(LEFT - 6, up(tick) + 4, f"{tick:g}", anchor="end", colour="#666666"))
        parts.append(_line(LEFT, up(tick), WIDTH - RIGHT, up(tick), "#eeeeee"))
    for index, line in enumerate(study["lines"].values()):
        colour, dash = COLOURS[index % len(COLOURS)], "5 3" if index >= len(COLOURS) else "none"
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{path}" {style}/>')
        parts += [_dot(across(x), up(y), colour) for x, y in line]
    legend, columns = [], 2
    for index, label in enumerate(study["lines"]):
        left, top = 16 + (index % columns) * WIDTH // columns, height + 36 + 18 * (index // columns)
        colour, dash = COLOURS[index % len(COLOURS)], "5 3" if index >= len(COLOURS) else "none"
        legend.append(_line(left, top, left + 18, top, colour, width=2, dash=dash))
        legend.append(_text(left + 24, top + 4, label))
    rows = -(-len(study["lines"]) // columns)
    return height + 60 + 18 * rows, "".join(parts + legend)


def _measure(curves: dict[str, list[dict]], primary: str) -> str:
    names = [name for curve in curves.values() for name in curve[-1] if name not in NOT_A_MEASURE]
    return primary if primary in names else max(dict.fromkeys(names), key=names.count, default="loss")


def _finite(point: dict, name: str) -> bool:
    value = point.get(name)
    return isinstance(value, int | float) and math.isfinite(value)


def _x_axis(axis: Axis, top: float, bottom: float) -> str:
    parts = [_line(axis.start, bottom, axis.end, bottom, "#999999")]
    for tick in axis.ticks():
        parts.append(_line(axis(tick), top, axis(tick), bottom, "#eeeeee"))
        parts.append(_text(axis(tick), bottom + 15, f"{tick:.6g}", anchor="middle", colour="#666666"))
    return "".join(parts)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: int = 400, colour: str = "#222222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.75"/>'
