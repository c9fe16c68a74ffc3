"""`auto-research`: each command is a thin translation into one Snakemake call, which is printed."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from auto_research.cli import commands

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="auto-research",
    help="Does a paper's mechanism work, does it run on this machine's accelerator, and what does a search over such mechanisms find?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Fetch and prepare public datasets.", no_args_is_help=True)
profiles_app = typer.Typer(help="Snakemake profiles of this project.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(profiles_app, name="profiles")


class Direction(StrEnum):
    """Which way a metric of one's own improves."""

    maximise = "max"
    minimise = "min"


class Tier(StrEnum):
    """How much an adapter is scaled down; see docs/protocols.md."""

    tiny = "tiny"
    smoke = "smoke"
    standard = "standard"
    full = "full"


class BudgetProfile(StrEnum):
    """Budget of a search."""

    quick = "quick"
    full = "full"


Device = Annotated[
    str | None, typer.Option(help="auto | cpu | mps | cuda | cuda:<index> | shadow. A missing accelerator is an error.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="PyTorch intra-op threads of each worker.")]
DatasetDir = Annotated[Path | None, typer.Option(help="Folder of downloaded archives (default: data/).")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.callback()
def main(debug: Debug = False) -> None:
    """Options of every command."""
    if debug:
        commands.enable_debug()


@app.command("list")
def list_papers(
    topic: Annotated[str | None, typer.Option(help="Only papers with this topic.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Machine readable.")] = False,
) -> None:
    """The papers that have an adapter here, with their arms and datasets."""
    commands.list_papers(topic, json_output)


@app.command(context_settings=PASS_ON)
def reproduce(
    context: typer.Context,
    paper: Annotated[str, typer.Option(help="Key of an adapter (see `auto-research list`) or all.")],
    tier: Annotated[Tier, typer.Option(help="tiny and smoke run the code, standard gives numbers.")] = Tier.smoke,
    seed: Annotated[int | None, typer.Option(help="One seed for every arm.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated seeds for every arm, for example 42,43,44.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Another dataset than the card's default.")] = None,
    device: Device = None,
    cpu_threads: Threads = None,
    dataset_dir: DatasetDir = None,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Train every arm of one paper (or all) and write its result, floors and losers included.

    Unknown flags go to Snakemake, for example --dry-run or --forcerun.
    """
    main(debug)
    commands.reproduce(
        paper=paper,
        extra=context.args,
        tier=tier.value,
        seeds=commands.parse_seeds(seed, seeds),
        dataset=dataset,
        device=device,
        cpu_threads=cpu_threads,
        dataset_dir=dataset_dir,
        offline=offline,
    )


@app.command(context_settings=PASS_ON)
def evolve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Host of the search, for example rankmixer.")] = "rankmixer",
    dataset: Annotated[str, typer.Option(help="Dataset of the search.")] = "movielens-100k",
    direction: Annotated[str, typer.Option(help="What to look into, free text in any language.")] = "",
    profile: Annotated[
        BudgetProfile, typer.Option(help="quick finishes in minutes, full takes hours.")
    ] = BudgetProfile.quick,
    run: Annotated[str, typer.Option(help="Name of the run; the same name resumes or extends it.")] = "default",
    generations: Annotated[int | None, typer.Option(min=1, help="Generations after the baseline.")] = None,
    population: Annotated[int | None, typer.Option(min=1, help="Candidates per generation.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps per candidate.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated training seeds.")] = None,
    evaluation_users: Annotated[int | None, typer.Option(min=1, help="Users in the full-catalogue evaluation.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Candidates trained at the same time.")] = None,
    trial_timeout_seconds: Annotated[int | None, typer.Option(min=1, help="Hard limit of one trial.")] = None,
    device: Device = None,
    cpu_threads: Threads = None,
    dataset_dir: DatasetDir = None,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Run (or resume, or extend) a multi-generation search and print the board and its result table."""
    main(debug)
    commands.evolve(
        model=model,
        extra=context.args,
        dataset=dataset,
        direction=direction,
        profile=profile.value,
        run=run,
        generations=generations,
        population=population,
        steps=steps,
        seeds=commands.parse_seeds(None, seeds),
        evaluation_users=evaluation_users,
        workers=workers,
        trial_timeout_seconds=trial_timeout_seconds,
        device=device,
        cpu_threads=cpu_threads,
        dataset_dir=dataset_dir,
        offline=offline,
    )


@app.command("run", context_settings=PASS_ON)
def run_command(
    context: typer.Context,
    command: Annotated[
        str, typer.Option(help="Your script; it gets the path of a parameter JSON file as last argument.")
    ],
    space: Annotated[Path, typer.Option(help="YAML file with the search space.")],
    metric: Annotated[str, typer.Option(help="Dotted path of the metric in the JSON file the script writes.")],
    direction: Annotated[
        Direction, typer.Option(help="Whether the metric is to grow or to shrink.")
    ] = Direction.maximise,
    run: Annotated[str, typer.Option(help="Name of the run; the same name resumes or extends it.")] = "default",
    generations: Annotated[int, typer.Option(min=1)] = 3,
    population: Annotated[int, typer.Option(min=1)] = 2,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds.")] = None,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    trial_timeout_seconds: Annotated[int | None, typer.Option(min=1)] = None,
    device: Device = None,
    cpu_threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Search over a script of your own: same devices, same resume, same report."""
    main(debug)
    commands.run_command(
        command=command,
        space=space,
        metric=metric,
        direction=direction.value,
        run=run,
        generations=generations,
        population=population,
        seeds=commands.parse_seeds(None, seeds),
        workers=workers,
        trial_timeout_seconds=trial_timeout_seconds,
        device=device,
        cpu_threads=cpu_threads,
        extra=context.args,
    )


@app.command(context_settings=PASS_ON)
def audit(
    context: typer.Context,
    device: Annotated[str | None, typer.Option(help="auto | cpu | mps | cuda | cuda:<index> | shadow.")] = None,
    paper: Annotated[str | None, typer.Option(help="Only this adapter.")] = None,
    shards: Annotated[int, typer.Option(min=1)] = 1,
    shard_index: Annotated[int | None, typer.Option(min=0, help="Only this shard (default: all).")] = None,
    timeout_seconds: Annotated[int, typer.Option(min=1, help="Hard limit per adapter.")] = 600,
    include_concept_demos: Annotated[bool, typer.Option("--include-concept-demos")] = False,
    cpu_threads: Threads = None,
    dataset_dir: DatasetDir = None,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Prove, adapter by adapter, what really executes on an accelerator."""
    main(debug)
    commands.audit(
        device=device,
        paper=paper,
        shards=shards,
        shard_index=shard_index,
        timeout_seconds=timeout_seconds,
        include_concept_demos=include_concept_demos,
        cpu_threads=cpu_threads,
        dataset_dir=dataset_dir,
        offline=offline,
        extra=context.args,
    )


@app.command(context_settings=PASS_ON)
def site(context: typer.Context, debug: Debug = False) -> None:
    """Build the catalogue, the leaderboards and the index of boards under results/site/."""
    main(debug)
    commands.site(context.args)


@app.command()
def doctor(dataset_dir: DatasetDir = None, debug: Debug = False) -> None:
    """Versions, devices, data, disk: what is missing and which command mends it."""
    main(debug)
    commands.doctor(dataset_dir)


@data_app.command("list")
def data_list() -> None:
    """The registered datasets, their sources and what is prepared here."""
    commands.data_list()


@data_app.command("prepare", context_settings=PASS_ON)
def data_prepare(
    context: typer.Context,
    dataset: Annotated[str, typer.Option(help="Dataset name.")] = "movielens-100k",
    dataset_dir: DatasetDir = None,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Download (pinned, checksummed) and prepare one dataset."""
    main(debug)
    commands.data_prepare(dataset, dataset_dir, offline, context.args)


@profiles_app.command("link")
def profiles_link() -> None:
    """Link the profiles into the user's Snakemake folder, so that `snakemake --profile gpu-a30` works by name."""
    commands.link_profiles()


def entry() -> None:
    """Console entry point: one line and exit code 2 for the user's mistakes."""
    from auto_research.runtime.errors import guard

    # standalone_mode keeps Click's own usage errors (exit code 2) intact
    sys.exit(guard(lambda: app(standalone_mode=True)))


if __name__ == "__main__":
    entry()
