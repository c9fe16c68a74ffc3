"""Command lines of run_artifact.py and run_arm.py: locks, resume, lease and failure records around one stage.

Nothing here can change a number, so it is not part of any fingerprint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from auto_research.experiment.card import TIERS, find_card
from auto_research.experiment.layout import Layout
from auto_research.runtime.errors import ConfigError, RunFailure, describe_error
from auto_research.runtime.files import write_json
from auto_research.runtime.paths import code_root
from auto_research.runtime.process import die_with_parent

PARENT = "AUTO_RESEARCH_JOB_PARENT"


def parser(description: str) -> argparse.ArgumentParser:
    """Flags that run_artifact, run_arm and compare_arms share."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--adapter", required=True, help="key of the adapter, e.g. rankmixer")
    flags.add_argument("--tier", required=True, choices=TIERS)
    flags.add_argument("--dataset", help="default: the card's")
    flags.add_argument("--fingerprint", help="recorded in the output; computed when left out")
    flags.add_argument("--debug", action="store_true", help="show tracebacks")
    return flags


def stage_main(kind: str, arguments: Sequence[str] | None = None) -> int:
    """Run one artifact or arm from its command line. kind: 'artifact' | 'arm'."""
    end_with_workflow()
    flags = parser(f"Run one {kind} of an adapter and write its output below results/reproduce.")
    flags.add_argument(f"--{kind}", required=True, dest="name")
    flags.add_argument("--seed", type=int, default=42)
    flags.add_argument("--device", help="auto, cpu, mps, cuda or cuda:<index>")
    flags.add_argument("--cpu-threads", type=int)
    flags.add_argument("--log", help="where the caller sends this output; named in the failure record")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    card = find_card(code_root(), options.adapter)
    card.stage(kind, options.name)
    layout = Layout(card.key, options.tier, card.dataset(options.dataset))
    with failure_record(layout, kind, options.name, options.seed, options.log):
        return _run(card, layout, kind, options)


def end_with_workflow() -> None:
    """End this job when the workflow that started it dies, also if that has happened already.

    Called before torch is imported: a workflow killed during those seconds would else leave an orphan that trains on.
    """
    workflow = os.environ.pop(PARENT, None)
    die_with_parent()
    if workflow and workflow != str(os.getppid()):
        raise RunFailure("the workflow that started this job is gone")


def show_tracebacks(debug: bool) -> None:
    """--debug sets AUTO_RESEARCH_DEBUG for this process and its children."""
    if debug:
        os.environ["AUTO_RESEARCH_DEBUG"] = "1"


@contextlib.contextmanager
def failure_record(layout: Layout, kind: str, name: str, seed: int, log: str | None) -> Iterator[None]:
    """Keep class, message and log path of a failure in `failures/`; remove the record when the job succeeds."""
    path = layout.failure(kind, name, seed)
    try:
        yield
    except Exception as error:
        record = {
            "schema_version": 2,
            "adapter": layout.key,
            "tier": layout.tier,
            "dataset": layout.dataset,
            "kind": kind,
            "name": name,
            "seed": seed,
            "error": type(error).__name__,
            "message": describe_error(error)[0],
            "log": log,
        }
        with contextlib.suppress(OSError):  # a full or read-only disk is reported by the error itself
            write_json(path, record)
        raise
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _run(card, layout: Layout, kind: str, options: argparse.Namespace) -> int:
    from auto_research.experiment.loader import load_experiment
    from auto_research.experiment.stages import Stage, input_hashes, is_complete, run_stage, state_key
    from auto_research.runtime.devices import requested_device
    from auto_research.runtime.lease import lease_for
    from auto_research.train.state import StateFolder

    stage = Stage(card, layout, kind, options.name, options.seed, options.device, options.cpu_threads)
    fingerprint = options.fingerprint or _fingerprint(card, kind, options)
    inputs = input_hashes(stage)
    state = StateFolder(layout.state(state_key(stage, fingerprint, inputs)))
    with state.lock():
        # whoever held the lock may have been this job's orphaned predecessor
        if is_complete(stage, fingerprint, inputs):
            print(f"{stage.output} is complete", file=sys.stderr)
            state.discard()
            return 0
        with lease_for(requested_device(options.device)):
            run_stage(stage, load_experiment(card.key, card), state, fingerprint=fingerprint, inputs=inputs)
        state.discard()
    return 0


def _fingerprint(card, kind: str, options: argparse.Namespace) -> str:
    from auto_research.experiment.fingerprint import Fingerprints

    return Fingerprints(code_root(), {card.key: card}).stage(card.key, kind, options.name, options.tier)


def compare_main(arguments: Sequence[str] | None = None) -> int:
    """Join the arms of an adapter into result.json, report.md and curves.svg."""
    from auto_research.experiment.fingerprint import Fingerprints
    from auto_research.results import compare, partial

    flags = parser("Join the arms of an adapter over seeds: result.json, report.md, curves.svg.")
    flags.add_argument("--seeds", help="comma-separated, for all arms; default: the card's")
    flags.add_argument("--partial", action="store_true", help="summarise what exists into summary.partial.*")
    flags.add_argument("--log", help="where the caller sends this output; named in the failure record")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    card = find_card(code_root(), options.adapter)
    layout = Layout(card.key, options.tier, card.dataset(options.dataset))
    fingerprints = Fingerprints(code_root(), {card.key: card})
    seeds = parse_seeds(options.seeds)
    if options.partial:
        print(partial.write_partial(card, layout, fingerprints, seeds))
        return 0
    with failure_record(layout, "compare", "result", 0, options.log):
        compare.write_result(card, layout, fingerprints, seeds, options.fingerprint)
        for stale in (layout.partial, layout.partial.with_suffix(".md")):
            Path(stale).unlink(missing_ok=True)
    print(layout.report)
    return 0


def parse_seeds(text: object) -> list[int] | None:
    """'42,43', 42, ['42', 43] or None -> list of ints or None. ConfigError on anything else."""
    if text is None or text == "" or text == []:
        return None
    parts = text if isinstance(text, list | tuple) else str(text).split(",")
    try:
        seeds = [int(str(part).strip()) for part in parts]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds {text!r} must be different whole numbers like 42,43,44")
    return seeds
