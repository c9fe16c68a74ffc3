"""Equal tuning for every arm."""

import pytest

from auto_research.runtime.errors import NonFinite
from auto_research.train.tuning import Trained, best_of_trials


def trials(*rates):
    return [{"learning_rate": rate} for rate in rates]


def runner(values, ran):
    def run(hyperparameters, state):
        rate = hyperparameters["learning_rate"]
        ran.append((rate, state.path.name))
        if values[rate] is None:
            raise NonFinite("loss is nan at step 3")
        return Trained(rate, {"auc": values[rate]}, cost={"seconds": 2.0})

    return run


def test_the_best_validation_wins_and_the_earlier_of_equals(arm_context):
    ran = []
    ctx = arm_context(trials=trials(1, 2, 3))
    best, records = best_of_trials(ctx, runner({1: 0.5, 2: 0.8, 3: 0.8}, ran), "auc")
    assert (best.model, best.hyperparameters) == (2, {"learning_rate": 2})
    assert [record["validation"]["auc"] for record in records] == [0.5, 0.8, 0.8]
    assert ran == [(1, "trial-0"), (2, "trial-1"), (3, "trial-2")]
    assert best.cost["tuning_seconds"] == 6.0


def test_smaller_can_be_better(arm_context):
    ctx = arm_context(trials=trials(1, 2))
    assert best_of_trials(ctx, runner({1: 0.5, 2: 0.8}, []), "auc", higher_is_better=False)[0].model == 1


def test_other_seeds_run_the_chosen_trial_only(arm_context):
    ran = []
    ctx = arm_context(trials=trials(1, 2), tuned={"learning_rate": 2})
    assert best_of_trials(ctx, runner({2: 0.1}, ran), "auc")[0].model == 2
    assert ran == [(2, "trial-0")]


def test_a_diverging_trial_is_recorded_and_not_chosen(arm_context):
    ctx = arm_context(trials=trials(1, 2))
    best, records = best_of_trials(ctx, runner({1: None, 2: 0.4}, []), "auc")
    assert best.model == 2
    assert [record["status"] for record in records] == ["non-finite", "finished"]


def test_all_trials_diverging_is_a_failure(arm_context):
    with pytest.raises(NonFinite, match="step 3"):
        best_of_trials(arm_context(trials=trials(1)), runner({1: None}, []), "auc")
