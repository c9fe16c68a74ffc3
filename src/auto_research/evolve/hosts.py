"""Load the host of a search by key: an adapter's ``search.py``, or a person's command."""

from __future__ import annotations

from collections.abc import Callable

from auto_research.evolve.code import SPLIT, prepare_module
from auto_research.experiment.loader import import_adapter
from auto_research.experiment.search import SearchHost
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.paths import code_root


def load_host(config: dict) -> SearchHost:
    """Return the host named by a frozen configuration; raise ConfigError when the adapter declares none."""
    key = config["definition"]["host"]
    if key == "command":
        from auto_research.evolve.command_host import host

        return host
    module = import_adapter(key, "search")
    host = getattr(module, "host", None)
    if not isinstance(host, SearchHost):
        raise ConfigError(f"adapters/{key}/search.py must define `host = SearchHost(...)`")
    missing = [stage for stage in SearchHost.STAGES if stage not in host.functions]
    if missing:
        raise ConfigError(f"host {key}: missing {', '.join(missing)}")
    return host


def load_preparation(config: dict) -> Callable:
    """The host's `prepare`; from its ``search_split.py`` where there is one, so that nothing else is imported."""
    if prepare_module(config, code_root()).endswith(f".{SPLIT}"):
        return import_adapter(config["definition"]["host"], SPLIT).prepare
    return load_host(config).prepare
