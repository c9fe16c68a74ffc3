"""A whole adapter in one process, without Snakemake: for the audit and the contract tests, which pay `import torch` once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from auto_research.experiment.card import find_card
from auto_research.experiment.contract import Measurement
from auto_research.experiment.layout import Layout
from auto_research.experiment.loader import load_experiment
from auto_research.experiment.stages import Stage, run_stage
from auto_research.runtime.paths import code_root


def run_adapter(
    key: str,
    tier: str,
    *,
    workdir: Path,
    dataset: str | None = None,
    seed: int = 42,
    device: str | None = None,
    arms: Iterable[str] | None = None,
    threads: int | None = None,
    data_root: Path | None = None,
    quiet: bool = True,
) -> dict[str, Measurement]:
    """Run every artifact and arm of an adapter in order and return the measurements by arm.

    Parameters
    ----------
    workdir: outputs go below `<workdir>/results`, as in the graph.
    data_root: folder of prepared data (default `<workdir>/results/data`); tables that a stage needs must be there.
    arms: the arms to run with the artifacts below them; default all.

    Raises whatever a stage raises: nothing is caught here. Every stage starts from its own seed, so that order and
    selection of arms change no number. Nothing is resumed.
    """
    from auto_research.train.state import StateFolder

    card = find_card(code_root(), key)
    experiment = load_experiment(card.key, card)
    layout = Layout(card.key, tier, card.dataset(dataset), Path(workdir), data_root and Path(data_root))
    chosen = list(card.arms) if arms is None else list(arms)
    stages = [("artifact", name) for name in card.artifact_order(chosen)] + [("arm", name) for name in chosen]
    measured = {}
    for kind, name in stages:
        stage = Stage(card, layout, kind, name, seed, device, threads)
        state = StateFolder(layout.state(f"inline-{card.module}-{kind}-{name}-{seed}"))
        state.discard()
        with state.lock():
            result = run_stage(stage, experiment, state, fingerprint="inline", inputs={}, quiet=quiet)
            state.discard()
        if result is not None:
            measured[name] = result
    return measured
