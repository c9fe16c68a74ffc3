"""The resumable loop: kill it anywhere, and the weights come out the same bit for bit."""

import pytest
import torch
from torch import nn

from auto_research.runtime.errors import NonFinite
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw, exponential
from auto_research.train.state import StateFolder


class Killed(Exception):
    pass


class Counter:
    """Something outside the model that changes with every step."""

    def __init__(self):
        self.value = 1.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def small_model():
    seed_everything(7)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def batches(epoch):
    rng = stable_rng("test-batches", epoch)
    return [torch.from_numpy(rng.normal(size=(6, 4))).float() for _ in range(5)]


def train(folder, kill_at=None, checkpoint_seconds=0.0, epochs=4, pause_after=None, **options):
    model, counter = small_model(), Counter()
    optimizer = adamw(model, 0.05, 0.01)
    held_out = torch.linspace(-1, 1, 24).reshape(6, 4)

    def on_step(model, step, total):
        counter.value *= 1.01
        if step == kill_at:
            raise Killed

    def loss(model, x):
        return (model(x).squeeze(1) - x.sum(1)).square().mean() * counter.value

    fitted = fit(
        model,
        optimizer,
        Plan(epochs, key="score", checkpoint_seconds=checkpoint_seconds, **options),
        batches=batches,
        loss=loss,
        validate=lambda m: {"score": -float((m(held_out).squeeze(1) - held_out.sum(1)).square().mean())},
        state=StateFolder(folder, pause_after=pause_after),
        schedule=exponential(0.9, 2),
        on_step=on_step,
        extras={"counter": counter},
    )
    return model, fitted, counter


def without_seconds(history):
    return [{k: v for k, v in entry.items() if "seconds" not in k} for entry in history]


@pytest.mark.parametrize(
    ("kill_at", "checkpoint_seconds"), [(1, 0.0), (7, 0.0), (10, 0.0), (13, 1e9), (20, 0.0), (4, 1e9)]
)
def test_a_killed_run_ends_with_the_same_bits(tmp_path, kill_at, checkpoint_seconds):
    whole, fitted, counter = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "killed", kill_at=kill_at, checkpoint_seconds=checkpoint_seconds)
    resumed, again, counted = train(tmp_path / "killed", checkpoint_seconds=checkpoint_seconds)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert without_seconds(fitted.history) == without_seconds(again.history)
    assert (fitted.best_epoch, fitted.steps, counter.value) == (again.best_epoch, again.steps, counted.value)


@pytest.mark.parametrize("pause_after", [1, 3, 4, 9])
def test_a_paused_run_goes_on_with_the_same_bits(tmp_path, pause_after):
    whole, fitted, counter = train(tmp_path / "whole")
    _, paused, _ = train(tmp_path / "paused", pause_after=pause_after)
    assert paused.steps == 5 * min(pause_after, 4)
    assert without_seconds(paused.history) == without_seconds(fitted.history[:pause_after])
    _, again, _ = train(tmp_path / "paused", pause_after=pause_after, kill_at=paused.steps + 1)  # trains no step
    assert without_seconds(again.history) == without_seconds(paused.history)
    resumed, ended, counted = train(tmp_path / "paused")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert without_seconds(ended.history) == without_seconds(fitted.history)
    assert (ended.best_epoch, ended.validation, counted.value) == (fitted.best_epoch, fitted.validation, counter.value)


def test_a_finished_run_is_not_trained_again(tmp_path):
    whole, fitted, _ = train(tmp_path)
    again, refitted, _ = train(tmp_path, kill_at=1)  # a step would raise
    assert refitted.history == fitted.history
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def scripted(values, patience=None, epochs=10):
    """Train a single weight that counts epochs, with given validation values."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, lambda folder: fit(
        model,
        optimizer,
        Plan(epochs, clip=None, key="auc", patience=patience),
        batches=lambda epoch: [None],
        loss=lambda m, _: -m.weight.sum(),  # one step adds exactly 1
        validate=lambda m: {"auc": values[round(float(m.weight)) - 1]},
        state=StateFolder(folder),
    )


def test_patience_stops_and_the_best_epoch_is_restored(tmp_path):
    model, run = scripted([0.5, 0.7, 0.7, 0.6, 0.9], patience=2)
    fitted = run(tmp_path)
    assert (fitted.best_epoch, len(fitted.history)) == (2, 4)  # 0.7 again is no improvement; epoch 5 is never seen
    assert float(model.weight) == 2.0
    assert fitted.validation == {"auc": 0.7}


def test_steps_cap_ends_inside_an_epoch_and_still_validates(tmp_path):
    _model, fitted, _ = train(tmp_path, steps=7)
    assert fitted.steps == 7
    assert [entry["step"] for entry in fitted.history] == [5, 7]
    assert "score" in fitted.history[-1]


def test_clipping_bounds_the_update(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    plan = Plan(1, clip=0.5)
    fit(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        batches=lambda epoch: [None],
        loss=lambda m, _: -100 * m.weight.sum(),
        state=StateFolder(tmp_path),
    )
    assert float(model.weight) == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_names_the_step_and_saves_nothing_of_it(tmp_path, bad):
    model = nn.Linear(1, 1)
    state = StateFolder(tmp_path)
    with pytest.raises(NonFinite, match=r"loss is .* at step 3"):
        fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Plan(1, checkpoint_seconds=0.0),
            batches=lambda epoch: [1.0, 1.0, bad, 1.0],
            loss=lambda m, x: m.weight.sum() * x,
            state=state,
        )
    assert state.load()["position"]["step"] == 2


def test_non_finite_gradient_is_found_under_a_finite_loss(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with pytest.raises(NonFinite, match=r"gradient norm is .* at step 1"):
        fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Plan(1),
            batches=lambda epoch: [None],
            loss=lambda m, _: m.weight.abs().sqrt().sum(),  # derivative of sqrt at 0
            state=StateFolder(tmp_path),
        )


def test_non_finite_validation_is_refused(tmp_path):
    _, run = scripted([float("nan")], epochs=1)
    with pytest.raises(NonFinite, match="validation auc"):
        run(tmp_path)


def test_progress_counts_to_the_total(tmp_path):
    seen = []
    model = nn.Linear(4, 1)
    fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Plan(2),
        batches=lambda epoch: [torch.ones(2, 4)] * 3,
        loss=lambda m, x: m(x).square().mean(),
        state=StateFolder(tmp_path),
        progress=lambda done, total, **values: seen.append((done, total)),
    )
    assert seen[0] == (1, 6)
    assert seen[-1] == (6, 6)
