"""Code fingerprints of a search's jobs: the host's import closure, and for a command the script files it names."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from auto_research.runtime.names import module_name

if TYPE_CHECKING:
    from auto_research.experiment.fingerprint import Fingerprints

SPLIT = "search_split"
TRIAL = ("auto_research.evolve.trial", "auto_research.evolve.worker")


def host_module(config: dict) -> str:
    """Module that holds the host of a frozen configuration."""
    host = config["definition"]["host"]
    return "auto_research.evolve.command_host" if host == "command" else f"adapters.{module_name(host)}.search"


def command_files(config: dict) -> tuple[Path, ...]:
    """Files that a person's command names after its program: editing one reruns the trials."""
    if config["definition"]["host"] != "command":
        return ()
    return tuple(Path(word).resolve() for word in shlex.split(config["host"]["command"])[1:] if Path(word).is_file())


def prepare_module(config: dict, root: Path) -> str:
    """Module that separates the data: the adapter's ``search_split`` where it has one, else the host's own."""
    module = host_module(config)
    split = module.rpartition(".")[0] + f".{SPLIT}"
    return split if (root / f"{split.replace('.', '/')}.py").is_file() else module


def prepare_code(fingerprints: Fingerprints, config: dict) -> str:
    """Fingerprint of the data separation."""
    return fingerprints.code(prepare_module(config, fingerprints.root))[:32]


def trial_code(fingerprints: Fingerprints, config: dict) -> str:
    """Fingerprint of a trial; it is recorded in trial.json."""
    return fingerprints.code(host_module(config), *TRIAL, files=command_files(config))[:32]
