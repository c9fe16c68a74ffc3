"""Load the host of a search by key: an adapter's ``search.py``, or a person's command."""

from __future__ import annotations

from auto_research.experiment.loader import import_adapter
from auto_research.experiment.search import SearchHost
from auto_research.runtime.errors import ConfigError


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
