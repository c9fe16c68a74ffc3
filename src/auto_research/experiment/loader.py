"""Import an adapter by key and check that its functions and its card agree."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from auto_research.experiment.card import Card, find_card
from auto_research.experiment.contract import Experiment
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.names import module_name
from auto_research.runtime.paths import code_root


def use_root(root: Path | None = None) -> Path:
    """Make `adapters` importable from `root` (default: `code_root()`) and return it.

    Modules of adapters that were imported from another root are forgotten.
    """
    root = Path(root or code_root()).resolve()
    if str(root) in sys.path:
        sys.path.remove(str(root))
    sys.path.insert(0, str(root))
    loaded = sys.modules.get("adapters")
    if loaded is not None and str(root / "adapters") not in {str(Path(p).resolve()) for p in loaded.__path__}:
        for name in [n for n in sys.modules if n == "adapters" or n.startswith("adapters.")]:
            del sys.modules[name]
    importlib.invalidate_caches()
    return root


def import_adapter(key: str, part: str) -> Any:
    """The module `adapters.<module>.<part>`; part: 'experiment', 'model', 'search'."""
    use_root()
    return importlib.import_module(f"adapters.{module_name(key)}.{part}")


def load_experiment(key: str, card: Card | None = None) -> Experiment:
    """Import `adapters.<module>.experiment` and return its `experiment`.

    Raises UnknownName for a key without a card and ConfigError when stages and card differ.
    """
    card = card or find_card(code_root(), key)
    module = import_adapter(card.key, "experiment")
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"adapters/{card.module}/experiment.py must define `experiment = Experiment({card.key!r})`")
    if experiment.key != card.key:
        raise ConfigError(
            f"adapters/{card.module}/experiment.py is Experiment({experiment.key!r}), the card says {card.key!r}"
        )
    for what, coded, written in (
        ("artifact", set(experiment.artifacts), set(card.artifacts)),
        ("arm", set(experiment.arms), set(card.arms)),
    ):
        if coded - written:
            raise ConfigError(
                f"adapter {card.key}: {what} {sorted(coded - written)[0]!r} is coded but not in card.yaml"
            )
        if written - coded:
            raise ConfigError(
                f"adapter {card.key}: {what} {sorted(written - coded)[0]!r} is in card.yaml but not coded"
            )
    return experiment
