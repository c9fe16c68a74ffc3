"""The search space of ``auto-research run``: a person's YAML file becomes a track definition.

    title: Tune my script                       # optional
    parameters:
      learning_rate: {values: [0.01, 0.03, 0.1], default: 0.03}
      layers: [1, 2, 3]                         # default: the first value
      warmup: {values: [0, 100], when: {layers: [2, 3]}}

Every generation changes one parameter of the champion; from the third on, odd slots change two.
"""

from __future__ import annotations

import re
from pathlib import Path

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.schema import load_yaml, validate

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def command_definition(settings: dict) -> dict:
    """Return the (validated) track definition of a command search; raise ConfigError with one line."""
    from auto_research.evolve.tracks import check_definition

    command, space, metric = (settings.get(key) for key in ("command", "space", "metric"))
    for name, value in (("command", command), ("space", space), ("metric", metric)):
        if not value:
            raise ConfigError(
                f"a command search needs {name}: use `auto-research run --command ... --space ... --metric ...`"
            )
    path = Path(space)
    if not path.is_file():
        raise ConfigError(f"--space: no such file: {space}")
    content = load_yaml(path)
    validate(content, "space", str(path))
    direction = settings.get("metric_direction") or "max"
    definition = {
        "key": "command",
        "track": "command",
        "host": "command",
        "title": content.get("title", "Search over a command"),
        "question": content.get("question", f"Which parameters give the {direction}imum of {metric}?"),
        "fitness": {
            "name": metric,
            "what": metric if direction == "max" else f"-({metric}), because smaller is better",
            "unit": "seed",
            "direction": direction,
        },
        "genome": [_gene(name, entry) for name, entry in content["parameters"].items()],
        "generations": [
            {"when": 1, "slots": [{"genes": "hyper", "changes": 1}]},
            {"when": 2, "slots": [{"genes": "hyper", "changes": 1}]},
            {"when": "later", "slots": _later(len(content["parameters"]))},
        ],
        "budgets": {
            "quick": {
                "generations": 3,
                "population": 2,
                "seeds": [42],
                "promotion_min_seeds": 1,
                "trial_timeout_seconds": 3600,
                "host": {"command": command, "metric": metric, "direction": direction},
            }
        },
    }
    check_definition(definition, str(path))
    return definition


def _later(parameters: int) -> list[dict]:
    slots = [{"genes": "hyper", "changes": 1}]
    return slots if parameters < 2 else [*slots, {"genes": "hyper", "changes": 2}]


def _gene(name: str, entry) -> dict:
    if not NAME.fullmatch(name):
        raise ConfigError(f"space: parameter name {name!r} may hold letters, digits, '-' and '_' only")
    entry = entry if isinstance(entry, dict) else {"values": entry if isinstance(entry, list) else [entry]}
    values = entry["values"]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    gene = {
        "name": name,
        "type": ("float" if any(isinstance(value, float) for value in values) else "int") if numeric else "cat",
        "allowed": values,
        "default": entry.get("default", values[0]),
    }
    if not any(type(value) is type(gene["default"]) and value == gene["default"] for value in values):
        raise ConfigError(f"space: parameter {name}: default {gene['default']!r} is not among its values")
    if "when" in entry:
        gene["active_when"] = [entry["when"]] if isinstance(entry["when"], dict) else entry["when"]
    return gene
