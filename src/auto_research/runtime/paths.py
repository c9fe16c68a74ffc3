"""Where the code, the data and the results are."""

from __future__ import annotations

import os
from pathlib import Path

from auto_research.runtime.errors import ConfigError

_MARKER = Path("adapters") / "__init__.py"


def checkout_root() -> Path:
    """Root of the checkout this package is installed from (editable install)."""
    return Path(__file__).resolve().parents[3]


def code_root() -> Path:
    """Folder that holds `adapters/`, `config/`, `rules/`.

    AUTO_RESEARCH_ROOT, else the nearest of the working directory and its parents that holds
    `adapters/__init__.py`, else the checkout of this package. Raises ConfigError when none qualifies.
    """
    named = os.environ.get("AUTO_RESEARCH_ROOT")
    if named:
        root = Path(named).expanduser().resolve()
        if not (root / _MARKER).is_file():
            raise ConfigError(f"AUTO_RESEARCH_ROOT={named} holds no {_MARKER.as_posix()}: point it at a checkout")
        return root
    here = Path.cwd().resolve()
    for folder in (here, *here.parents, checkout_root()):
        if (folder / _MARKER).is_file():
            return folder
    raise ConfigError("no adapters/ folder here or above: run inside a checkout, or set AUTO_RESEARCH_ROOT to one")


def adapters_dir() -> Path:
    """Folder of the adapters."""
    return code_root() / "adapters"


def config_dir() -> Path:
    """Folder of the configuration; the checkout's own when the code root has none (toy roots in tests)."""
    folder = code_root() / "config"
    return folder if folder.is_dir() else checkout_root() / "config"


def results_dir() -> Path:
    """Folder of everything produced: `results/` below the working directory."""
    return Path.cwd() / "results"


def dataset_dir(named: str | os.PathLike | None = None) -> Path:
    """Folder of downloads: the argument, else AUTO_RESEARCH_DATASET_DIR, else `data/` below the working directory."""
    return Path(named or os.environ.get("AUTO_RESEARCH_DATASET_DIR") or "data").expanduser()
