"""What each command does; heavy imports happen inside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from auto_research.runtime.errors import ConfigError, UnknownName
from auto_research.runtime.names import check_name, module_name
from auto_research.runtime.paths import code_root

MODELS = {"rankmixer": "rankmixer"}


def enable_debug() -> None:
    """Let `guard` show tracebacks, here and in every child process."""
    os.environ["AUTO_RESEARCH_DEBUG"] = "1"


def parse_seeds(seed: int | None, seeds: str | None) -> list[int] | None:
    """Return the requested seeds or None; raise ConfigError for text that is no list of integers."""
    if seed is not None and seeds is not None:
        raise ConfigError("--seed and --seeds exclude each other")
    if seed is not None:
        return [seed]
    if seeds is None:
        return None
    try:
        numbers = [int(part) for part in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds: expected comma-separated integers, got {seeds!r}") from None
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--seeds: {seeds!r} repeats a seed")
    return numbers


def _finish(code: int) -> None:
    if code:
        sys.exit(2 if code == 2 else 1)


def _runtime(device: str | None, cpu_threads: int | None, dataset_dir: Path | None, offline: bool) -> dict:
    if device is not None:
        from auto_research.runtime.devices import check_device_text, resolve_device

        check_device_text(device)
        if device not in ("auto", "cpu"):
            resolve_device(device)
    return {
        "device": device,
        "cpu_threads": cpu_threads,
        "dataset_dir": str(dataset_dir) if dataset_dir is not None else None,
        "offline": True if offline else None,
    }


def _cards() -> dict:
    from auto_research.experiment.card import discover

    return discover(code_root())


def _known(key: str, known, what: str) -> str:
    if key not in known:
        raise UnknownName(f"unknown {what} {key!r}; known: {', '.join(sorted(known))}")
    return key


def list_papers(topic: str | None, json_output: bool) -> None:
    """Print the catalogue from the cards."""
    cards = [card for card in _cards().values() if topic is None or topic in card.paper["topics"]]
    if json_output:
        rows = [{"key": card.key, **card.paper, "arms": list(card.arms), "datasets": card.datasets} for card in cards]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("key", "paper", "organisation", "published", "arms", "GPU"):
        table.add_column(name, overflow="fold")
    for card in cards:
        state = card.gpu.get("validation", "pending") if card.gpu.get("path") else "no GPU path"
        table.add_row(
            card.key,
            card.paper["title"],
            card.paper["organization"],
            card.paper["published"],
            str(len(card.arms)),
            state,
        )
    Console().print(table)


def reproduce(
    *, paper: str, extra: list[str], tier: str, seeds, dataset, device, cpu_threads, dataset_dir, offline
) -> None:
    """Run `reproduce_<key>` or `reproduce_all` and print the result table."""
    from auto_research.cli.snakemake_call import call

    cards = _cards()
    keys = sorted(cards) if paper == "all" else [_known(check_name(paper, "paper"), cards, "paper")]
    target = "reproduce_all" if paper == "all" else f"reproduce_{module_name(paper)}"
    request = {
        "tier": tier,
        "seeds": seeds,
        "dataset": dataset,
        **_runtime(device, cpu_threads, dataset_dir, offline),
    }
    code = call([target], "reproduce", request, extra)
    if not code and not _is_dry(extra):
        from auto_research.cli.tables import print_result

        for key in keys:
            print_result(key, tier, dataset or cards[key].data["default"])
    _finish(code)


def _is_dry(extra: list[str]) -> bool:
    return bool({"-n", "--dry-run", "--dryrun"} & set(extra))


def evolve(*, model: str, extra: list[str], device, cpu_threads, dataset_dir, offline, workers, **request) -> None:
    """Run `evolve_<track>`, print the board's path and its result table."""
    from auto_research.cli.snakemake_call import call

    track = MODELS[_known(model, MODELS, "model")]
    check_name(request["run"], "run")
    check_name(request["dataset"], "dataset")
    threads = cpu_threads or int(os.environ.get("AUTO_RESEARCH_CPU_THREADS") or 0) or None
    cores = os.cpu_count() or 1
    if workers and threads and workers * threads > cores:
        print(f"note: {workers} workers x {threads} threads exceed the {cores} cores of this machine", file=sys.stderr)
    settings = {**request, "workers": workers, **_runtime(device, threads, dataset_dir, offline)}
    code = call([f"evolve_{track}"], f"evolve-{track}", settings, extra)
    if not code and not _is_dry(extra):
        from auto_research.cli.tables import print_search

        print_search(track, request["run"])
    _finish(code)


def run_command(*, command, space, metric, direction, extra, device, cpu_threads, workers, **request) -> None:
    """Search over a person's own script with the same controller."""
    from auto_research.cli.snakemake_call import call

    check_name(request["run"], "run")
    if not Path(space).is_file():
        raise ConfigError(f"--space: no such file: {space}")
    settings = {
        **request,
        "command": command,
        "space": str(space),
        "metric": metric,
        "metric_direction": direction,
        "workers": workers,
        **_runtime(device, cpu_threads, None, False),
    }
    code = call(["evolve_command"], "run", settings, extra)
    if not code and not _is_dry(extra):
        from auto_research.cli.tables import print_search

        print_search("command", request["run"])
    _finish(code)


def audit(
    *,
    device,
    paper,
    shards,
    shard_index,
    timeout_seconds,
    include_concept_demos,
    extra,
    cpu_threads,
    dataset_dir,
    offline,
) -> None:
    """Run `audit_all`."""
    from auto_research.cli.snakemake_call import call

    if paper is not None:
        _known(check_name(paper, "paper"), _cards(), "paper")
    if shard_index is not None and shard_index >= shards:
        raise ConfigError(f"--shard-index {shard_index} is not below --shards {shards}")
    settings = {
        **_runtime(device, cpu_threads, dataset_dir, offline),
        "audit_device": device,
        "paper": paper,
        "audit_shards": shards,
        "audit_shard_index": shard_index,
        "audit_timeout_seconds": timeout_seconds,
        "include_concept_demos": include_concept_demos,
    }
    settings.pop("device")
    _finish(call(["audit_all"], "audit", settings, extra))


def site(extra: list[str]) -> None:
    """Build the static pages."""
    from auto_research.cli.snakemake_call import call

    code = call(["site"], "site", {}, extra)
    if not code:
        print(Path("results/site/index.html").resolve())
    _finish(code)


def doctor(dataset_dir: Path | None) -> None:
    """Print every check; exit 1 when something needed is missing."""
    from auto_research.cli.tables import print_checks
    from auto_research.runtime.doctor import doctor as checks

    sys.exit(print_checks(checks(dataset_dir)))


def data_list() -> None:
    """Print the dataset registry."""
    from auto_research.cli.tables import print_datasets

    print_datasets()


def data_prepare(dataset: str, dataset_dir: Path | None, offline: bool, extra: list[str]) -> None:
    """Prepare one dataset through the graph."""
    from auto_research.cli.snakemake_call import call
    from auto_research.data.sources import load_registry

    _known(check_name(dataset, "dataset"), load_registry(), "dataset")
    target = f"results/data/{dataset}/canonical/manifest.json"
    _finish(call([target], "data", _runtime(None, None, dataset_dir, offline), extra))


def link_profiles() -> None:
    """Link profiles into the user's Snakemake configuration folder."""
    from auto_research.runtime.doctor import link_profiles as link

    for line in link():
        print(line)
