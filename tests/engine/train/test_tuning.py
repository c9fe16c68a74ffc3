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


def racing(values, ran, failing=()):
    """values: rate -> (validation when paused, validation at the end)."""

    def run(hyperparameters, state):
        rate = hyperparameters["learning_rate"]
        ran.append((rate, state.path.name, state.pause_after))
        if rate in failing and state.pause_after is None:
            raise NonFinite("loss is nan at step 9")
        value = values[rate][state.pause_after is None]
        return Trained(rate, {"auc": value}, cost={"seconds": 2.0 if state.pause_after else 5.0})

    return run


def test_in_a_race_only_the_trial_ahead_is_trained_to_its_end(arm_context):
    ran = []
    ctx = arm_context(trials=trials(1, 2, 3), race_epochs=2)
    best, records = best_of_trials(ctx, racing({1: (0.5, 0.9), 2: (0.6, 0.7), 3: (0.6, 0.8)}, ran), "auc", race=True)
    assert (best.model, best.validation) == (2, {"auc": 0.7})
    assert ran == [(1, "trial-0", 2), (2, "trial-1", 2), (3, "trial-2", 2), (2, "trial-1", None)]
    assert [record["status"] for record in records] == ["stopped after 2 epochs", "finished", "stopped after 2 epochs"]
    assert best.cost["tuning_seconds"] == 2 + 5 + 2


def test_a_race_of_losses_is_won_by_the_smallest_and_the_next_follows_a_failure(arm_context):
    ran = []
    ctx = arm_context(trials=trials(1, 2), race_epochs=3)
    run = racing({1: (0.5, 0.4), 2: (0.6, 0.5)}, ran, failing=(1,))
    best, records = best_of_trials(ctx, run, "auc", higher_is_better=False, race=True)
    assert best.model == 2
    assert [record["status"] for record in records] == ["non-finite", "finished"]
    with pytest.raises(NonFinite, match="step 9"):
        best_of_trials(ctx, racing({1: (0.5, 0.4), 2: (0.6, 0.5)}, ran, failing=(1, 2)), "auc", race=True)


def test_a_single_trial_does_not_race(arm_context):
    ran = []
    for ctx in (
        arm_context(trials=trials(1), race_epochs=2),
        arm_context(trials=trials(1, 2), race_epochs=2, tuned=trials(1)[0]),
    ):
        best_of_trials(ctx, racing({1: (0.5, 0.6)}, ran), "auc", race=True)
    assert ran == [(1, "trial-0", None)] * 2


def test_what_cannot_pause_does_not_race(arm_context):
    ran = []
    best, records = best_of_trials(
        arm_context(trials=trials(1, 2), race_epochs=2), runner({1: 0.5, 2: 0.4}, ran), "auc"
    )
    assert best.model == 1
    assert len(ran) == 2
    assert [record["status"] for record in records] == ["finished", "finished"]
