"""Validation of outputs, cards and configuration against `config/schemas/<name>.schema.yaml`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.names import check_name
from auto_research.runtime.paths import checkout_root, config_dir

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(path: Path) -> Any:
    """Parse YAML with the C loader when there is one; ConfigError with line and column when it does not parse."""
    try:
        return yaml.load(Path(path).read_bytes(), Loader=_LOADER)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}: not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None


def validate(obj: Any, schema_name: str, source: str | None = None) -> Any:
    """Return `obj` when it fits the schema; else ConfigError naming the offending path.

    `source`: what the object was read from, put in front of the message.
    """
    error = best_match(_validator(_schema_path(schema_name)).iter_errors(obj))
    if error is None:
        return obj
    place = ".".join(str(part) for part in error.absolute_path) or "top level"
    message = " ".join(error.message.split())
    if len(message) > 300:
        message = message[:200] + " ... " + message[-90:]
    raise ConfigError(f"{source or schema_name}: at {place}: {message}")


def _schema_path(name: str) -> Path:
    check_name(name, "schema")
    for folder in (config_dir(), checkout_root() / "config"):
        path = folder / "schemas" / f"{name}.schema.yaml"
        if path.is_file():
            return path
    raise ConfigError(f"no schema {name}: config/schemas/{name}.schema.yaml is missing")


@lru_cache(maxsize=64)
def _validator(path: Path) -> Draft202012Validator:
    schema = load_yaml(path)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
