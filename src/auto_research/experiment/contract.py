"""The contract of an experiment: its stages and what an arm hands back.

An adapter's `experiment.py` holds one `Experiment` and functions decorated with `artifact` or `arm`; the function name is
the stage name of the card.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from auto_research.runtime.errors import ConfigError, NonFinite


class Experiment:
    """The stages of one adapter.

    Parameters
    ----------
    key: the adapter's key as written in its card.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.artifacts: dict[str, Callable] = {}
        self.arms: dict[str, Callable] = {}

    def artifact(self, function: Callable) -> Callable:
        """Register `function(ctx) -> None`, which writes files into `ctx.out`."""
        return self._register(self.artifacts, function)

    def arm(self, function: Callable) -> Callable:
        """Register `function(ctx) -> Measurement`."""
        return self._register(self.arms, function)

    def stage(self, kind: str, name: str) -> Callable:
        """The function of one stage. kind: 'artifact' | 'arm'."""
        return (self.artifacts if kind == "artifact" else self.arms)[name]

    def _register(self, table: dict[str, Callable], function: Callable) -> Callable:
        name = function.__name__
        if name in self.artifacts or name in self.arms:
            raise ConfigError(f"adapter {self.key}: stage {name} is defined twice")
        table[name] = function
        return function


@dataclass
class Units:
    """Per-unit contributions of one metric: `mean(values)` is the metric, `ids[i]` names the unit of `values[i]`."""

    kind: str
    ids: list
    values: list[float]

    def __post_init__(self) -> None:
        self.ids = _plain(self.ids)
        self.values = _plain(self.values)
        if len(self.ids) != len(self.values):
            raise ValueError(f"{len(self.ids)} unit ids but {len(self.values)} values")


@dataclass
class Rows:
    """Scored test rows of the like head, for the bootstrap of AUC and logloss. Three columns of equal length."""

    user: list[int]
    label: list[int]
    score: list[float]

    def __post_init__(self) -> None:
        self.user, self.label, self.score = _plain(self.user), _plain(self.label), _plain(self.score)
        if not len(self.user) == len(self.label) == len(self.score):
            raise ValueError(f"row columns differ in length: {len(self.user)}, {len(self.label)}, {len(self.score)}")


@dataclass
class Measurement:
    """What one arm measured. Every number must be finite.

    metrics: test metrics, read once after selection.  validation: what selection looked at.
    units: metric name -> `Units`.  rows: scored test rows.  cost: params, flops, seconds, peak_memory_bytes and more.
    curve: one dict per evaluation (step or epoch, loss, validation ...).  hyperparameters: the chosen ones, handed to the
    arm's other seeds as `ctx.tuned`.  trials: one dict per hyperparameter trial.  notes: sentences for the report.
    """

    metrics: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    units: dict[str, Units] = field(default_factory=dict)
    rows: Rows | None = None
    cost: dict[str, Any] = field(default_factory=dict)
    curve: list[dict] = field(default_factory=list)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    trials: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """Plain JSON values (numpy and torch scalars unpacked). Raises NonFinite naming the first bad number."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        where = first_non_finite(plain)
        if where:
            raise NonFinite(f"the measurement has a non-finite number at {where}")
        return plain


def measurement_from(record: dict) -> Measurement:
    """The inverse of `Measurement.as_dict`."""
    values = dict(record)
    values["units"] = {name: Units(**unit) for name, unit in values.get("units", {}).items()}
    values["rows"] = Rows(**values["rows"]) if values.get("rows") else None
    return Measurement(**values)


def first_non_finite(value: Any, where: str = "") -> str:
    """Path of the first NaN or infinity in nested plain values, '' if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else where or "the value"
    if isinstance(value, dict):
        children = ((f"{where}.{key}" if where else str(key), child) for key, child in value.items())
    elif isinstance(value, list):
        children = ((f"{where}[{index}]", child) for index, child in enumerate(value))
    else:
        return ""
    return next((found for name, child in children if (found := first_non_finite(child, name))), "")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return value.tolist()
    return value
