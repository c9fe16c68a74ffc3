"""Equal tuning for every arm: the budget's trials on the tuning seed, the chosen one on the other seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    race: bool = False,
) -> tuple[Trained, list[dict[str, Any]]]:
    """Run the trials and keep the best by validation; with `ctx.tuned` run that one only.

    Parameters
    ----------
    run: (hyperparameters, state of that trial) -> Trained; a trial that finished before an interruption is loaded from
        its state by `fit` and costs nothing again.
    trials: default `ctx.budget.trials`.
    race: `run` hands its state to one `fit`, so that it can pause. With `race_epochs` in the budget all trials then train
        that long, and only the one ahead goes on to its end.

    Returns the best (the earlier one of equals) and one record per trial. A trial that becomes NaN or infinite is
    recorded as such and cannot be chosen; NonFinite is raised when all of them do.
    """
    chosen = [ctx.tuned] if ctx.tuned is not None else list(trials or ctx.budget.get("trials") or [DEFAULT_TRIAL])
    if not chosen:
        raise ConfigError(f"{ctx.key}: the budget of tier {ctx.tier} has no trials")
    tried = _Trials(ctx, run, validation_key, higher_is_better, chosen)
    epochs = ctx.budget.get("race_epochs") if race else None
    if epochs is None or len(chosen) == 1:
        best = tried.best(range(len(chosen)))
    else:
        ranked = tried.ranked(epochs)
        best = next((found for index in ranked if (found := tried.best([index])) is not None), None)
    if best is None:
        raise tried.failure
    best.cost["tuning_seconds"] = sum(record.get("seconds", 0.0) for record in tried.records)
    return best, tried.records


class _Trials:
    """The trials of one arm: what each did, and the last failure."""

    def __init__(self, ctx: Context, run: Callable, key: str, higher: bool, chosen: list[dict[str, Any]]) -> None:
        self.ctx, self.run, self.key, self.higher, self.chosen = ctx, run, key, higher, chosen
        self.records: list[dict[str, Any]] = [{} for _ in chosen]
        self.failure: NonFinite | None = None

    def best(self, indices: Iterable[int]) -> Trained | None:
        """The best of these trials trained to the end, None when none stays finite."""
        best: Trained | None = None
        for index in indices:
            trained = self._train(index, "finished")
            if trained and (best is None or self._better(trained.validation, best.validation)):
                best = trained
        return best

    def ranked(self, epochs: int) -> list[int]:
        """Trials by validation after `epochs`, best first, the earlier one of equals; failed ones are left out."""
        seen = {
            index: self._train(index, f"stopped after {epochs} epochs", epochs) for index in range(len(self.chosen))
        }
        sign = -1 if self.higher else 1
        alive = [(sign * trained.validation[self.key], index) for index, trained in seen.items() if trained]
        return [index for _, index in sorted(alive)]

    def _train(self, index: int, status: str, pause_after: int | None = None) -> Trained | None:
        hyperparameters = dict(self.chosen[index])
        self.ctx.log(f"trial {index + 1} of {len(self.chosen)}: {_spell(hyperparameters)}")
        try:
            trained = self.run(dict(hyperparameters), self.ctx.state.child(f"trial-{index}", pause_after=pause_after))
        except NonFinite as error:
            self.failure = error
            self.records[index] = {"hyperparameters": hyperparameters, "status": "non-finite", "error": str(error)}
            return None
        trained.hyperparameters = hyperparameters
        self.records[index] = {
            "hyperparameters": dict(hyperparameters),
            "status": status,
            "validation": trained.validation,
            "seconds": trained.cost.get("seconds", 0.0),
        }
        return trained

    def _better(self, new: dict[str, float], old: dict[str, float]) -> bool:
        return new[self.key] > old[self.key] if self.higher else new[self.key] < old[self.key]


def _spell(hyperparameters: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in hyperparameters.items()) or "no hyperparameters"
