"""Equal tuning for every arm: the budget's trials on the tuning seed, the chosen one on the other seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from auto_research.runtime.errors import ConfigError, NonFinite
from auto_research.train.state import StateFolder

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

DEFAULT_TRIAL = {"learning_rate": 1e-3, "weight_decay": 1e-4}


@dataclass
class Trained:
    """One trained model, ready to be measured.

    validation: values at the chosen epoch.  curve: one dict per epoch.  cost: seconds, train_seconds, steps, ...
    """

    model: Any
    validation: dict[str, float]
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)


def best_of_trials(
    ctx: Context,
    run: Callable[[dict[str, Any], StateFolder], Trained],
    validation_key: str,
    *,
    higher_is_better: bool = True,
    trials: Sequence[dict[str, Any]] | None = None,
) -> tuple[Trained, list[dict[str, Any]]]:
    """Run the trials and keep the best by validation; with `ctx.tuned` run that one only.

    Parameters
    ----------
    run: (hyperparameters, state of that trial) -> Trained; a trial that finished before an interruption is loaded from
        its state by `fit` and costs nothing again.
    trials: default `ctx.budget.trials`.

    Returns the best (the earlier one of equals) and one record per trial. A trial that becomes NaN or infinite is
    recorded as such and cannot be chosen; NonFinite is raised when all of them do.
    """
    chosen = [ctx.tuned] if ctx.tuned is not None else list(trials or ctx.budget.get("trials") or [DEFAULT_TRIAL])
    if not chosen:
        raise ConfigError(f"{ctx.key}: the budget of tier {ctx.tier} has no trials")
    best: Trained | None = None
    records: list[dict[str, Any]] = []
    failure: NonFinite | None = None
    for index, hyperparameters in enumerate(chosen):
        ctx.log(f"trial {index + 1} of {len(chosen)}: {_spell(hyperparameters)}")
        try:
            trained = run(dict(hyperparameters), ctx.state.child(f"trial-{index}"))
        except NonFinite as error:
            failure = error
            records.append({"hyperparameters": dict(hyperparameters), "status": "non-finite", "error": str(error)})
            continue
        trained.hyperparameters = dict(hyperparameters)
        records.append(
            {
                "hyperparameters": dict(hyperparameters),
                "status": "finished",
                "validation": trained.validation,
                "seconds": trained.cost.get("seconds", 0.0),
            }
        )
        if best is None or _better(trained.validation, best.validation, validation_key, higher_is_better):
            best = trained
    if best is None:
        raise failure
    best.cost["tuning_seconds"] = sum(record.get("seconds", 0.0) for record in records)
    return best, records


def _better(new: dict[str, float], old: dict[str, float], key: str, higher_is_better: bool) -> bool:
    return new[key] > old[key] if higher_is_better else new[key] < old[key]


def _spell(hyperparameters: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in hyperparameters.items()) or "no hyperparameters"
