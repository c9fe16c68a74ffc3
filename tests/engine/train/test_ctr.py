"""The request-table protocol on a cut of the real MovieLens-100K."""

import math

import pytest
import torch
from torch import nn

from auto_research.data.requests import RequestTable
from auto_research.runtime.errors import RunFailure
from auto_research.train.ctr import EpochBatches, RequestBudget, load_requests, request_loss, train_ctr, training_loss

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def table(movielens_100k) -> RequestTable:
    return RequestTable.load(movielens_100k / "requests").restrict(24)


class Linear(nn.Module):
    """Logits from the dense features of a pair, with dropout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(26, 3)
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        x = torch.cat([batch.user_stats[batch.request_of], batch.popularity, batch.cross], 1)
        return self.layer(nn.functional.dropout(x, 0.3, self.training))


def test_all_arms_see_the_same_batches(table):
    budget = RequestBudget(history=4, batch=16)
    first, again = (EpochBatches(table, budget, 42, 0, CPU)[3] for _ in range(2))
    assert torch.equal(first.item, again.item)
    other = EpochBatches(table, budget, 42, 1, CPU)
    assert sorted(other.order) == sorted(table.requests("train"))
    assert not torch.equal(first.item, other[3].item)


def test_negatives_are_drawn_anew_every_epoch(table):
    """The same request, once per epoch, keeps its rated items and changes the others."""
    budget = RequestBudget(history=4, batch=len(table.requests("train")))
    batches = [EpochBatches(table, budget, 42, epoch, CPU)[0] for epoch in (0, 1)]
    rated = [sorted(b.item[b.rated].tolist()) for b in batches]
    drawn = [sorted(b.item[~b.rated].tolist()) for b in batches]
    assert rated[0] == rated[1]
    assert drawn[0] != drawn[1]
    assert len(drawn[0]) == 3 * len(rated[0])


def test_loss_by_hand(table):
    batch = table.batch(table.requests("train")[:1], history=4)
    batch.rated = torch.tensor([True, False, False])
    batch.engage = torch.tensor([1.0, 0.0, 0.0])
    batch.like, batch.love = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0])
    logits = torch.tensor([[0.0, math.log(3), 0.0], [0.0, 50.0, 50.0], [0.0, -50.0, 9.0]])
    # engage: ln 2 each; like: -ln(3/4); love: ln 2, halved; negatives carry neither like nor love
    assert float(request_loss(logits, batch)) == pytest.approx(math.log(2) - math.log(0.75) + 0.5 * math.log(2))


def test_negatives_get_no_like_or_love_gradient(table):
    batch = EpochBatches(table, RequestBudget(history=4, batch=8), 42, 0, CPU)[0]
    logits = torch.zeros(batch.pairs(), 3, requires_grad=True)
    request_loss(logits, batch).backward()
    assert (logits.grad[~batch.rated, 1:] == 0).all()
    assert (logits.grad[batch.rated] != 0).all()
    assert (logits.grad[:, 0] != 0).all()


def test_losses_of_two_passes_are_added_and_the_extra_loss_too(table):
    batch = EpochBatches(table, RequestBudget(history=4, batch=8), 42, 0, CPU)[0]

    class TwoPasses(Linear):
        def training_logits(self, batch):
            return [torch.zeros(batch.pairs(), 3), torch.ones(batch.pairs(), 3)]

        def extra_loss(self):
            return torch.tensor(5.0)

    one, two = (float(request_loss(torch.full((batch.pairs(), 3), v), batch)) for v in (0.0, 1.0))
    assert float(training_loss(TwoPasses(), batch)) == pytest.approx(one + two + 5.0)


def test_a_model_may_replace_the_loss(table):
    batch = EpochBatches(table, RequestBudget(history=4, batch=8), 42, 0, CPU)[0]

    class Own(Linear):
        def training_loss(self, batch, task_loss):
            return 2 * task_loss(torch.zeros(batch.pairs(), 3))

    assert float(training_loss(Own(), batch)) == pytest.approx(
        2 * float(request_loss(torch.zeros(batch.pairs(), 3), batch))
    )


def test_measurement_is_complete_and_its_units_average_to_the_metrics(arm_context):
    ctx = arm_context(
        trials=[{"learning_rate": 0.01, "weight_decay": 0.0}, {"learning_rate": 0.1, "weight_decay": 0.0}]
    )
    measured = train_ctr(ctx, lambda _: Linear(), device=CPU)
    table = load_requests(ctx)
    assert set(measured.metrics) >= {"auc", "uauc", "gauc", "logloss", "ndcg@10", "hit@10", "head_share@10"}
    for name, unit in measured.units.items():
        assert sum(unit.values) / len(unit.values) == pytest.approx(measured.metrics[name])
    assert len(measured.rows.user) == table.rows("test")
    assert len(measured.units["ndcg@10"].ids) == 6  # catalogue_users
    assert measured.cost["params"] == 81
    assert measured.cost["flops"] == 2 * 26 * 3
    assert measured.cost["steps"] == 3
    assert [trial["status"] for trial in measured.trials] == ["finished", "finished"]
    best = max(measured.trials, key=lambda trial: trial["validation"]["auc"])
    assert measured.hyperparameters == best["hyperparameters"]
    assert measured.validation == best["validation"]
    measured.as_dict()


def test_the_winner_of_a_race_ends_like_the_same_trial_alone(arm_context):
    slow, fast = ({"learning_rate": rate, "weight_decay": 0.0} for rate in (1e-6, 0.1))
    alone = train_ctr(arm_context("alone", trials=[fast], steps=None, epochs=3), lambda _: Linear(), device=CPU)
    raced = arm_context("raced", trials=[slow, fast], steps=None, epochs=3, race_epochs=1)
    measured = train_ctr(raced, lambda _: Linear(), device=CPU)
    assert [trial["status"] for trial in measured.trials] == ["stopped after 1 epochs", "finished"]
    assert measured.hyperparameters == fast
    assert measured.metrics == alone.metrics
    assert measured.cost["steps"] == alone.cost["steps"]


def test_a_killed_arm_resumes_to_the_same_numbers(arm_context, monkeypatch):
    whole = train_ctr(arm_context("whole", steps=6), lambda _: Linear(), device=CPU)

    class Killed(Exception):
        pass

    def kill(model, step, total):
        if step == 4:
            raise Killed

    import auto_research.train.ctr as ctr

    plan = ctr.Plan
    monkeypatch.setattr(ctr, "Plan", lambda *a, **k: plan(*a, **k, checkpoint_seconds=0.0))
    with pytest.raises(Killed):
        train_ctr(arm_context("killed", steps=6), lambda _: Linear(), device=CPU, on_step=kill)
    ctx = arm_context("killed", steps=6)
    assert ctx.state.child("trial-0").load()["position"]["step"] == 3
    resumed = train_ctr(ctx, lambda _: Linear(), device=CPU)
    assert resumed.metrics == whole.metrics
    assert resumed.rows == whole.rows


def test_hooks_are_called_with_the_step(arm_context):
    seen = []

    class Hooked(Linear):
        def after_step(self, step, total):
            seen.append((step, total))

        def on_gradient(self, batch):
            assert self.layer.weight.grad is not None
            seen.append("gradient")

    train_ctr(arm_context(), lambda _: Hooked(), device=CPU)
    assert seen == ["gradient", (1, 3), "gradient", (2, 3), "gradient", (3, 3)]


def test_test_rows_are_not_read_before_the_choice(arm_context, monkeypatch):
    """Asking for test requests while training would raise."""
    ctx = arm_context()
    real, calls = RequestTable.requests, []
    monkeypatch.setattr(RequestTable, "requests", lambda self, split: (calls.append(split), real(self, split))[1])

    def on_step(model, step, total):
        assert "test" not in calls

    train_ctr(ctx, lambda _: Linear(), device=CPU, on_step=on_step)
    assert "test" in calls


def test_labels_of_one_kind_are_a_clear_failure(arm_context):
    with pytest.raises(RunFailure, match="both labels"):
        train_ctr(arm_context(users=1), lambda _: Linear(), device=CPU)
