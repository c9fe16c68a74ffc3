"""Names that may reach a path, and the two spellings of an adapter key."""

from __future__ import annotations

import re

from auto_research.runtime.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def check_name(text: str, what: str = "name") -> str:
    """Return `text` when it is lower-case letters, digits, '-' and '_' starting with a letter or digit; else ConfigError."""
    if not isinstance(text, str) or not _NAME.fullmatch(text) or len(text) > 100:
        shown = repr(text)[:60]
        raise ConfigError(f"{what} {shown} is not allowed: use a-z, 0-9, '-' and '_', first a letter or digit")
    return text


def module_name(key: str) -> str:
    """'onerec-v2' -> 'onerec_v2': folder, module and Snakemake target spelling."""
    return check_name(key, "adapter key").replace("-", "_")


def key_name(module: str) -> str:
    """'onerec_v2' -> 'onerec-v2': card and command-line spelling."""
    return check_name(module, "adapter folder").replace("_", "-")
