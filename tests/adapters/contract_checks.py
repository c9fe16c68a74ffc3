"""The contract of an adapter, one function per promise; each raises AssertionError naming the stage and what is wrong.

What an adapter has to know:

* A value measured with a clock has a name that ends in seconds, _s, _ms or _us, or holds latency, throughput, mfu,
  memory or speedup. Everything else in a measurement, and every byte of an artifact, is the same in every run.
* A treatment that trains nothing has `gradient_exceptions: [".*"]` in its card.
* A central ablation is an ablation among the card's headline arms, or else the first one that is compared.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from contract_edits import (
    EditedFolders,
    EditedTables,
    OwnSplit,
    blind_spot,
    edges,
    other_future,
    other_history,
    other_past,
    other_targets,
    scores,
)
from contract_runs import Runs, Watch

from auto_research.data.requests import RequestTable
from auto_research.data.sequences import LeaveTwoOut
from auto_research.experiment.card import Card
from auto_research.experiment.contract import first_non_finite
from auto_research.experiment.stages import Stage
from auto_research.results import curves, markdown
from auto_research.results.compare import build_result, training_curves
from auto_research.results.records import validated
from auto_research.runtime.schema import validate

CLOCK = re.compile(r"(seconds|_s|_ms|_us)$|latency|throughput|mfu|memory|speedup")
SAME = {"rtol": 1e-5, "atol": 1e-6}
SPLIT_TASKS = ("ctr", "next_item")


def runs_on_cpu(runs: Runs) -> None:
    """Every stage runs and every number is finite."""
    for kind, name in runs.stages:
        where = first_non_finite(runs.first(kind, name))
        assert not where, f"{name}: {where} is not finite"


def runs_on_shadow(runs: Runs) -> None:
    """Every stage runs on the device that refuses mixed devices."""
    for kind, name in runs.stages:
        where = first_non_finite(runs.shadow(kind, name))
        assert not where, f"{name}: {where} is not finite on the shadow device"


def one_seed_gives_one_result(runs: Runs) -> None:
    """Two runs are equal bit for bit. A resumed run that equals the first is the second run."""
    for kind, name in runs.stages:
        expected = runs.first(kind, name)
        where = first_difference(expected, runs.resumed(kind, name)[0])
        where = where and first_difference(expected, runs.again(kind, name))
        assert not where, f"{name}: two runs with seed {runs.seed} differ at {where}"


def a_killed_run_is_resumed(runs: Runs) -> None:
    """Killed after its first checkpoint, a stage goes on from there and ends with the bits of the uninterrupted run."""
    for kind, name in runs.stages:
        expected = runs.first(kind, name)
        run, watch = runs.resumed(kind, name)
        trained = kind == "arm" and bool(runs.watch(name).steps)
        assert not (trained and watch is None), f"{name}: trains, but saved its state less than twice"
        if watch is None:
            continue
        restarted = trained and watch.steps[:1] == [1]
        assert not restarted, f"{name}: began again at step 1 although step 1 was saved"
        where = first_difference(expected, run)
        assert not where, f"{name}: killed and resumed, it differs from the uninterrupted run at {where}"


def another_seed_differs(runs: Runs) -> None:
    """Other weights after the first step."""
    for _, name in runs.arms:
        if runs.watch(name).steps:
            other = runs.seen(name, "seed", "step", seed=runs.seed + 1)
            same = not different_weights(runs.watch(name).after_first, other.after_first)
            assert not same, f"{name}: seeds {runs.seed} and {runs.seed + 1} give the same weights after one step"


def every_parameter_learns(runs: Runs) -> None:
    """Every trained parameter of a treatment gets a gradient within three steps, but for the card's exceptions."""
    patterns = runs.card.contract.get("gradient_exceptions", [])
    for name in _treatments(runs.card):
        watch = runs.watch(name)
        assert watch.steps or ".*" in patterns, (
            f"{name}: no step was shown by ctx.observe; a treatment that trains nothing has gradient_exceptions ['.*']"
        )
        silent = [
            parameter
            for parameter, learns in watch.gradient.items()
            if not learns and not any(re.search(pattern, parameter) for pattern in patterns)
        ]
        assert not silent, f"{name}: no gradient within three steps for {', '.join(silent)}"


def central_ablation_has_an_effect(runs: Runs) -> None:
    """With the treatment's weights wherever they fit, the ablation scores differently, or else it trains differently."""
    pairs = central_pairs(runs.card)
    assert pairs, f"{runs.card.key}: no arm is an ablation of a treatment"
    for treatment, ablation in pairs:
        ours, theirs = runs.watch(treatment), runs.watch(ablation)
        if ours.trained is None or theirs.trained is None:
            assert runs.card.task not in SPLIT_TASKS, f"{treatment}, {ablation}: no trained model shown by ctx.observe"
            same = not first_difference(runs.first("arm", treatment), runs.first("arm", ablation), whole=False)
        else:
            same = not _differs(ours, theirs)
        assert not same, f"{ablation}: neither scores nor training differ from {treatment}"


def the_future_changes_no_score(runs: Runs, tables: EditedTables) -> None:
    """Editing value or item of any rating at or after the request leaves every score of a trained arm as it was.

    Editing the past of the user changes the scores of a treatment: the check does look at something.
    """
    for _, name in runs.arms:
        trained = runs.watch(name).trained
        if trained is None:
            required = runs.card.task in SPLIT_TASKS and runs.role(name) == "treatment"
            assert not required, f"{name}: no trained model shown by ctx.observe"
        elif isinstance(trained.data, RequestTable):
            _future_of_requests(name, runs.role(name), trained, tables)
        elif isinstance(trained.data, LeaveTwoOut):
            _future_of_sequences(name, runs.role(name), trained)
        else:
            assert isinstance(trained.data, OwnSplit), (
                f"{name}: {type(trained.data).__name__} is no split that can be edited"
            )
            _future_of_own_split(name, runs.role(name), trained)


def test_rows_change_no_training(runs: Runs, folders: EditedFolders) -> None:
    """With value and item of all test rows changed on disk, weights and validation of every arm stay the same."""
    for _, name in runs.arms:
        seen = runs.watch(name).trained
        if seen is None or not isinstance(seen.data, RequestTable | LeaveTwoOut | OwnSplit):
            continue
        root = folders.root(seen.data)
        edited = runs.seen(
            name, f"edited-{root.name}", "trained", workdir=runs.folder / f"edited-{root.name}", data_root=root
        ).trained
        where = different_weights(seen.weights, edited.weights)
        assert not where, f"{name}: test rows changed what was trained ({where})"
        where = first_difference(seen.validation, edited.validation)
        assert not where, f"{name}: test rows changed the validation value {where}"


def the_result_validates(runs: Runs) -> None:
    """result.json of the tiny run fits its schema; report and curves are drawn; the primary metric has an interval."""
    for stage in runs.arms:
        runs.first(*stage)
    layout = runs.layout()
    records = {
        name: {runs.seed: validated(Stage(runs.card, layout, "arm", name, runs.seed))} for name in runs.card.arms
    }
    result = build_result(runs.card, layout, records, "contract")
    result["code"] |= {"commit": None, "modified": None}
    validate(result, "result")
    for comparison in result["comparisons"]:
        difference = comparison["metrics"].get(runs.card.primary, {"low": None})
        assert difference["low"] is not None, (
            f"{comparison['arm']} against {comparison['against']}: {runs.card.primary} has no contributions to compare"
        )
    assert runs.card.title in markdown.report(result)
    assert curves.svg(result, training_curves(runs.card, records)).startswith("<svg")


def evidence_names_the_adapter(runs: Runs, devices: dict[str, str], folder: str | None = None) -> None:
    """`device_for` was called in a file of the adapter's own folder, and gave the device that was asked for.

    devices: requested -> resolved text.  folder: default `adapters/<module>/`.
    """
    folder = folder or f"adapters/{runs.card.module}/"
    for requested, resolved in devices.items():
        own = [line for line in runs.evidence(requested) if line["file"].startswith(folder)]
        assert own, f"{runs.card.key}: no call of device_for({requested!r}) in {folder}"
        wrong = [line for line in own if line["resolved"] != resolved]
        assert not wrong, f"{wrong[0]['file']}:{wrong[0]['line']} got {wrong[0]['resolved']}, not {resolved}"


def central_pairs(card: Card) -> list[tuple[str, str]]:
    """(treatment, ablation) for every central ablation."""
    role = {name: arm["role"] for name, arm in card.arms.items()}
    compared = [(c["arm"], c["against"]) for c in card.comparisons]
    pairs = [
        pair for a, b in compared for pair in ((a, b), (b, a)) if [role[n] for n in pair] == ["treatment", "ablation"]
    ]
    central = [pair for pair in pairs if pair[1] in card.headline]
    return list(dict.fromkeys(central)) or pairs[:1]


def first_difference(a: Any, b: Any, where: str = "", whole: bool = True) -> str:
    """Path of the first value that differs, '' when all are equal; values measured with a clock are not looked at.

    whole: False compares metrics, units and rows only, at the top of two measurements.
    """
    if not whole:
        parts = ("metrics", "units", "rows")
        return first_difference({p: a.get(p) for p in parts}, {p: b.get(p) for p in parts})
    if isinstance(a, dict) and isinstance(b, dict):
        kept = [{name: value for name, value in x.items() if not CLOCK.search(name)} for x in (a, b)]
        if set(kept[0]) != set(kept[1]):
            return f"{where}.{min(set(kept[0]) ^ set(kept[1]))}".lstrip(".")
        children = ((f"{where}.{name}".lstrip("."), kept[0][name], kept[1][name]) for name in kept[0])
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return where or "the length"
        children = ((f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True)))
    else:
        return "" if type(a) is type(b) and a == b else where or "the value"
    return next((found for name, x, y in children if (found := first_difference(x, y, name))), "")


def different_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str:
    """Name of the first tensor that is not the same in both, bit for bit."""
    if set(a) != set(b):
        return min(set(a) ^ set(b))
    return next((name for name in a if not torch.equal(a[name], b[name])), "")


def _treatments(card: Card) -> list[str]:
    return [name for name, arm in card.arms.items() if arm["role"] == "treatment"]


def _differs(ours: Watch, theirs: Watch) -> bool:
    """Whether the ablation's scores differ under shared weights; if not, whether training does, for a reason.

    With all parameters in common, other trained weights are reason enough. Otherwise a parameter that only one of them
    has must have had a gradient: an idle one merely shifts the initial weights of those made after it.
    """
    before = scores(ours.trained)
    model = theirs.trained.model
    own, given = theirs.trained.weights, ours.trained.weights
    shared = [name for name in own if name in given and own[name].shape == given[name].shape]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.copy_(given[name] if name in shared else own[name])
        after = scores(theirs.trained, ours.trained.data)
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.copy_(own[name])
    if not np.allclose(before, after, **SAME):
        return True
    moved = any(not torch.equal(own[name], given[name]) for name in shared)
    surplus = [watch.gradient[name] for watch in (ours, theirs) for name in watch.gradient if name not in shared]
    return moved and (any(surplus) or not surplus)


def _future_of_requests(name: str, role: str, trained, tables: EditedTables) -> None:
    requests = edges(trained.data)
    for request in requests:
        before = scores(trained, request=request)
        after = scores(trained, tables.future(trained.data, request), request)
        assert np.array_equal(before, after), f"{name}: ratings at or after request {request} change its scores"
    if role == "treatment":
        noticed = scores(trained, tables.past(trained.data, request), request)
        assert not np.array_equal(before, noticed), f"{name}: the user's past does not change the scores either"


def _future_of_sequences(name: str, role: str, trained) -> None:
    for split in ("valid", "test"):
        before = scores(trained, split=split)
        after = scores(trained, other_targets(trained.data, split), split=split)
        assert np.array_equal(before, after), f"{name}: the {split} target changes the {split} scores"
    noticed = not np.array_equal(before, scores(trained, other_history(trained.data)))
    assert noticed or role != "treatment", f"{name}: the user's past does not change the scores either"


def _future_of_own_split(name: str, role: str, trained) -> None:
    problem = blind_spot(trained.data)
    assert not problem, f"{name}: {problem}"
    for split in ("valid", "test"):
        before = scores(trained, split=split)
        after = scores(trained, other_future(trained.data, split), split=split)
        assert np.array_equal(before, after), f"{name}: ratings from the {split} target on change the {split} scores"
    noticed = not np.array_equal(before, scores(trained, other_past(trained.data)))
    assert noticed or role != "treatment", f"{name}: the user's past does not change the scores either"
