"""Studies: a quantity measured at several sizes of one arm, drawn and tabulated with the result.

They are `Measurement.extra["studies"]`: name -> study(...). Studies of one name are drawn
in one panel, whatever arm they come from. A study measured with a clock has a name that ends in _s, _ms or _us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Study = dict[str, Any]
ONLY = ""  # label of the only line of an arm


def study(x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, log: bool = True) -> Study:
    """A study. x, y: axis labels with units; lines: label -> (x, y) points; log: both axes logarithmic.

    Raises ValueError when a logarithmic axis gets a value of 0 or less.
    """
    if log and any(value <= 0 for points in lines.values() for point in points for value in point):
        raise ValueError(f"study of {y} by {x}: logarithmic axes need values above 0")
    return {"x": x, "y": y, "log": log, "lines": {k: [[float(a), float(b)] for a, b in v] for k, v in lines.items()}}


def joined_studies(result: dict[str, Any]) -> dict[str, Study]:
    """Studies of a result.json by name, the lines of all arms together; labels begin with the arm."""
    joined: dict[str, Study] = {}
    for arm, record in result["arms"].items():
        for name, found in record["extra"].get("studies", {}).items():
            entry = joined.setdefault(name, {**found, "lines": {}})
            for label, points in found["lines"].items():
                entry["lines"][f"{arm}, {label}" if label else arm] = points
    return joined
