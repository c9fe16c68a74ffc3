"""Every promise of the contract is broken by a toy, and the check says so; the toy that keeps them all passes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import contract_checks as checks
import numpy as np
import pytest
import torch
from contract_edits import EditedFolders, EditedTables
from contract_runs import Runs
from torch import nn

from auto_research.baselines import sasrec
from auto_research.data.requests import RequestTable
from auto_research.experiment.card import Card
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for
from auto_research.runtime.errors import ConfigError, NonFinite
from auto_research.train.ctr import load_requests, train_ctr

HERE = "tests/adapters/"
BUDGET = {
    "seeds": [42],
    "trials": [{"learning_rate": 1e-2, "weight_decay": 0.0}],
    "users": 12,
    "test_rows": 60,
    "catalogue_users": 2,
    "history": 6,
    "batch": 8,
    "epochs": 1,
    "steps": 2,
    "patience": None,
    "chunk": 842,
    "width": 8,
    "length": 8,
}


def card(task: str, table: str, arms: dict, primary: str) -> Card:
    facts = {
        "key": "toy",
        "paper": {"title": "Toy", "id": "arXiv:0000.00000", "organization": "none", "published": "2024"},
        "fidelity": "concept_demo",
        "family": "toys",
        "task": task,
        "problem": "None.",
        "boundary": [],
        "data": {"default": "movielens-100k", "needs": [table]},
        "metrics": {"primary": primary, "direction": "max"},
        "artifacts": {},
        "arms": {name: {"what": name, "needs": [table], **arm} for name, arm in arms.items()},
        "headline": ["full", "plain"],
        "comparisons": [{"arm": "full", "against": "plain"}],
        "budgets": {"tiny": BUDGET},
        "gpu": {"path": True},
    }
    return Card(facts, Path("adapters/toy"))


class Ranker(nn.Module):
    """Statistics of the user and of the item, and an item table; `crossed` multiplies the two."""

    def __init__(self, table: RequestTable, crossed: bool = True) -> None:
        super().__init__()
        self.crossed = crossed
        self.item = nn.Embedding(table.vocab["item"], 3)
        self.user = nn.Linear(3 + len(table.genre_names), 3)
        self.popularity = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, batch):
        user = self.dropout(self.user(batch.user_stats))[batch.request_of]
        item = self.item(batch.item) + self.popularity(batch.popularity)
        return user * item if self.crossed else user + item


def toy(build=Ranker, table_of=load_requests, ablation=None, **options) -> tuple[Card, Experiment]:
    """full and its ablation plain, trained on the request table."""
    experiment = Experiment("toy")

    def train(ctx, make):
        table = table_of(ctx)
        return train_ctr(ctx, lambda _: make(table), device=device_for(ctx.device), table=table, **options)

    def full(ctx):
        return train(ctx, build)

    def plain(ctx):
        return train(ctx, ablation or (lambda table: build(table, crossed=False)))

    experiment.arm(full)
    experiment.arm(plain)
    return card("ctr", "requests", {"full": {"role": "treatment"}, "plain": {"role": "ablation"}}, "auc"), experiment


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, movielens_100k):
    root = tmp_path_factory.mktemp("prepared")
    (root / "movielens-100k").symlink_to(movielens_100k)
    return SimpleNamespace(
        root=root,
        tables=EditedTables(),
        folders=EditedFolders(movielens_100k, "movielens-100k", tmp_path_factory.mktemp("edited-toys")),
    )


@pytest.fixture
def runs_of(tmp_path, prepared):
    return lambda made: Runs(*made, tmp_path, prepared.root)


def breaks(check, *arguments, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        check(*arguments)


def test_an_honest_ranker_passes_every_check(runs_of, prepared):
    runs = runs_of(toy())
    checks.runs_on_cpu(runs)
    checks.runs_on_shadow(runs)
    checks.a_killed_run_is_resumed(runs)
    checks.one_seed_gives_one_result(runs)
    checks.another_seed_differs(runs)
    checks.every_parameter_learns(runs)
    checks.central_ablation_has_an_effect(runs)
    checks.the_future_changes_no_score(runs, prepared.tables)
    checks.test_rows_change_no_training(runs, prepared.folders)
    checks.the_result_validates(runs)
    checks.evidence_names_the_adapter(runs, {"cpu": "cpu", "shadow": "shadow:0"}, HERE)
    breaks(checks.evidence_names_the_adapter, runs, {"cpu": "cpu"}, match="no call of device_for")
    breaks(checks.evidence_names_the_adapter, runs, {"cpu": "cuda:0"}, HERE, match="got cpu, not cuda:0")


def test_an_honest_sequence_model_passes_every_check(runs_of, prepared):
    experiment = Experiment("toy")

    def full(ctx):
        return sasrec.run(ctx, device=device_for(ctx.device), layers=1, heads=1)

    def plain(ctx):
        return sasrec.run(ctx, device=device_for(ctx.device), layers=1, heads=2)

    experiment.arm(full)
    experiment.arm(plain)
    arms = {"full": {"role": "treatment"}, "plain": {"role": "ablation"}}
    runs = runs_of((card("next_item", "sequences", arms, "ndcg@10"), experiment))
    checks.a_killed_run_is_resumed(runs)
    checks.one_seed_gives_one_result(runs)
    checks.another_seed_differs(runs)
    checks.central_ablation_has_an_effect(runs)
    checks.the_future_changes_no_score(runs, prepared.tables)
    checks.test_rows_change_no_training(runs, prepared.folders)


# Runs


def test_a_metric_that_is_not_a_number_is_refused(runs_of):
    made = toy()
    full = made[1].arms["full"]

    def broken(ctx):
        measured = full(ctx)
        measured.metrics["auc"] = float("nan")
        return measured

    made[1].arms["full"] = broken
    with pytest.raises(NonFinite, match="auc"):
        checks.runs_on_cpu(runs_of(made))


def test_a_buffer_left_on_cpu_breaks_on_shadow(runs_of):
    class Left(Ranker):
        def __init__(self, table, crossed=True):
            super().__init__(table, crossed)
            self.offset = torch.ones(4, 3)  # not registered, so `.to(device)` leaves it behind

        def forward(self, batch):
            return super().forward(batch) + self.offset[torch.zeros_like(batch.item)]

    runs = runs_of(toy(Left))
    checks.runs_on_cpu(runs)
    with pytest.raises(RuntimeError, match="shadow"):
        checks.runs_on_shadow(runs)


def test_an_arm_without_measurement_is_refused(runs_of):
    made = toy()
    made[1].arms["full"] = lambda ctx: None
    with pytest.raises(ConfigError, match="not a Measurement"):
        checks.runs_on_cpu(runs_of(made))


# One seed, one result


def test_weights_drawn_without_a_seed(runs_of):
    def build(table, crossed=True):
        model = Ranker(table, crossed)
        with torch.no_grad():
            model.user.weight += torch.from_numpy(np.random.default_rng().normal(size=model.user.weight.shape))
        return model

    breaks(checks.one_seed_gives_one_result, runs_of(toy(build)), match="full: two runs with seed 42 differ")


def test_state_that_is_not_saved(runs_of):
    class Warming(Ranker):
        scale = 0.0

        def after_step(self, step, total):
            self.scale += 1.0

        def extra_loss(self):
            return self.scale * self.user.weight.square().sum()

    runs = runs_of(toy(Warming))
    checks.one_seed_gives_one_result(runs)
    breaks(checks.a_killed_run_is_resumed, runs, match="full: killed and resumed, it differs")


def test_a_loop_that_saves_but_never_loads(runs_of):
    made = toy()
    full = made[1].arms["full"]

    def forgetful(ctx):
        state = ctx.state
        ctx.state.child("trial-0").discard()
        return full(replace(ctx, state=state))

    made[1].arms["full"] = forgetful
    breaks(checks.a_killed_run_is_resumed, runs_of(made), match="full: began again at step 1")


def test_training_without_saving(runs_of):
    made = toy()
    full = made[1].arms["full"]

    class NoState:
        checkpoint_seconds = 1e9
        pause_after = None

        def child(self, name, pause_after=None):
            return self

        def load(self):
            return None

        def save(self, state):
            pass

    made[1].arms["full"] = lambda ctx: full(replace(ctx, state=NoState()))
    breaks(checks.a_killed_run_is_resumed, runs_of(made), match="full: trains, but saved its state less than twice")


def test_a_seed_that_is_ignored(runs_of):
    made = toy()
    full = made[1].arms["full"]
    made[1].arms["full"] = lambda ctx: full(replace(ctx, seed=42))
    breaks(checks.another_seed_differs, runs_of(made), match="full: seeds 42 and 43 give the same weights")


# Gradients and ablations


class WithIdle(Ranker):
    """A layer that is made, and moves the generator, but is not used."""

    def __init__(self, table, crossed=True):
        nn.Module.__init__(self)
        idle = nn.Linear(3, 3)
        super().__init__(table, crossed)
        self.idle = idle


def test_a_parameter_without_gradient_unless_the_card_names_it(runs_of, tmp_path):
    made = toy(WithIdle)
    runs = runs_of(made)
    breaks(
        checks.every_parameter_learns, runs, match=r"full: no gradient within three steps for idle\.weight, idle\.bias"
    )
    made[0].facts["contract"] = {"gradient_exceptions": [r"^idle\."]}
    checks.every_parameter_learns(runs)


def test_a_treatment_that_shows_no_step(runs_of):
    made = toy()
    full = made[1].arms["full"]
    made[1].arms["full"] = lambda ctx: full(replace(ctx, observer=None))
    runs = runs_of(made)
    breaks(checks.every_parameter_learns, runs, match="full: no step was shown")
    breaks(checks.central_ablation_has_an_effect, runs, match="no trained model shown")
    breaks(checks.the_future_changes_no_score, runs, EditedTables(), match="no trained model shown")


@pytest.mark.parametrize("build", [Ranker, WithIdle])
def test_an_ablation_without_effect(runs_of, build):
    """Also when an idle layer gives it other initial weights."""
    runs = runs_of(toy(ablation=build))
    breaks(checks.central_ablation_has_an_effect, runs, match="plain: neither scores nor training differ from full")


def test_an_ablation_of_the_loss_has_an_effect(runs_of):
    class Decayed(Ranker):
        def extra_loss(self):
            return self.user.weight.square().sum()

    checks.central_ablation_has_an_effect(runs_of(toy(ablation=Decayed)))


def test_a_card_without_ablation(runs_of):
    made = toy()
    made[0].arms["plain"]["role"] = "baseline"
    breaks(checks.central_ablation_has_an_effect, runs_of(made), match="no arm is an ablation")


# The future


class SeesItsOwnSecond(RequestTable):
    """The user's statistics of a request hold the request's own ratings."""

    def score_batch(self, request, items, *, history):
        batch = super().score_batch(request, items, history=history)
        start, stop = self.index.start[request], self.index.stop[request]
        batch.user_stats[:, 1] += float(self.interactions.rating[start:stop].mean())
        return batch


def test_a_feature_from_the_requests_own_second(runs_of):
    def table_of(ctx):
        table = load_requests(ctx)
        leaky = SeesItsOwnSecond(table.interactions, table.index)
        return leaky.restrict(ctx.budget.users, ctx.budget.test_rows)

    runs = runs_of(toy(table_of=table_of))
    breaks(checks.the_future_changes_no_score, runs, EditedTables(), match="full: ratings at or after request")


def test_a_model_that_reads_no_past(runs_of):
    class Blind(Ranker):
        def forward(self, batch):
            return self.item(batch.item) + 0 * self.popularity(batch.popularity)

    runs = runs_of(toy(Blind))
    breaks(checks.the_future_changes_no_score, runs, EditedTables(), match="full: the user's past does not change")


@pytest.mark.parametrize(("only_when_serving", "where"), [(False, "item.weight"), (True, "sums")])
def test_item_sums_over_all_rows_baked_into_a_model(runs_of, prepared, only_when_serving, where):
    class Baked(Ranker):
        def __init__(self, table, crossed=True):
            super().__init__(table, crossed)
            data = table.interactions
            total = np.bincount(data.item, weights=data.rating, minlength=data.n_items + 1)
            self.register_buffer("sums", torch.from_numpy(total).float(), persistent=False)

        def forward(self, batch):
            scores = super().forward(batch)
            if self.training and only_when_serving:
                return scores
            return scores + 1e-3 * self.sums[batch.item].unsqueeze(1)

    runs = runs_of(toy(Baked))
    checks.the_future_changes_no_score(runs, prepared.tables)  # what is baked in does not move with the table
    message = rf"full: test rows changed what was trained \({where}\)"
    breaks(checks.test_rows_change_no_training, runs, prepared.folders, match=message)


def test_training_on_test_requests(runs_of, prepared):
    class Greedy(RequestTable):
        def requests(self, split):
            if split != "train":
                return super().requests(split)
            return np.concatenate([super().requests("test"), super().requests("train")])

    def table_of(ctx):
        table = load_requests(ctx)
        return Greedy(table.interactions, table.index).restrict(ctx.budget.users, ctx.budget.test_rows)

    runs = runs_of(toy(table_of=table_of))
    breaks(checks.test_rows_change_no_training, runs, prepared.folders, match="full: test rows changed")


def test_a_sequence_model_that_is_given_the_target(runs_of, prepared):
    experiment = Experiment("toy")

    def full(ctx):
        def peeking(event, values):
            if event == "trained":
                score = values["score"]

                def peek(data, split, positions):
                    given = score(data, split, positions).copy()
                    given[np.arange(len(positions)), data.target(split)[positions]] += 1
                    return given

                values["score"] = peek
            ctx.observer(event, values)

        return sasrec.run(replace(ctx, observer=peeking), device=device_for(ctx.device), layers=1, heads=1)

    experiment.arm(full)
    arms = {"full": {"role": "treatment"}}
    runs = runs_of((card("next_item", "sequences", arms, "ndcg@10"), experiment))
    breaks(checks.the_future_changes_no_score, runs, prepared.tables, match="full: the valid target changes")


# Result and evidence


def test_a_primary_metric_without_contributions(runs_of):
    made = toy()
    made[0].facts["metrics"]["primary"] = "coverage@10"
    breaks(checks.the_result_validates, runs_of(made), match="full against plain: coverage@10 has no contributions")


def test_the_difference_of_two_runs_is_named_and_clocks_are_left_out():
    one = Measurement({"auc": 0.5}, cost={"seconds": 1.0, "pairs_per_s": 3.0, "params": 4}, curve=[{"loss": 1.0}])
    same = Measurement({"auc": 0.5}, cost={"seconds": 2.0, "pairs_per_s": 9.0, "params": 4}, curve=[{"loss": 1.0}])
    other = Measurement({"auc": 0.5}, cost={"params": 4}, curve=[{"loss": 1.0 + 1e-16 + 2.3e-16}])
    assert checks.first_difference(one.as_dict(), same.as_dict()) == ""
    assert checks.first_difference(one.as_dict(), other.as_dict()) == "curve[0].loss"
    assert checks.first_difference({"a": 1}, {"a": 1.0}) == "a"
    assert checks.first_difference({"a": [1]}, {"a": [1, 2]}) == "a"
    assert checks.first_difference({"a": 1}, {"b": 1}) == "a"


def test_every_check_is_part_of_the_contract():
    """No promise is written down and then never checked."""
    promises = {
        name
        for name, function in inspect.getmembers(checks, inspect.isfunction)
        if function.__module__ == checks.__name__ and "runs" in inspect.signature(function).parameters
    }
    text = Path(__file__).with_name("test_contract.py").read_text(encoding="utf-8")
    assert promises
    assert [name for name in sorted(promises) if f"checks.{name}(runs" not in text] == []


# Artifacts


def with_artifact(content) -> tuple[Card, Experiment]:
    """An artifact of three saved steps and a floor that reads it. content: (ctx, state) -> text of the file."""
    experiment = Experiment("toy")

    def table(ctx):
        state = ctx.state.load() or {"step": 0, "draws": []}
        while state["step"] < 3:
            state = {"step": state["step"] + 1, "draws": [*state["draws"], float(torch.rand(()))]}
            ctx.state.save({**state, "rng": torch.get_rng_state()})
        (ctx.out / "table.txt").write_text(content(ctx, state))

    def floor(ctx):
        text = (ctx.artifact("table") / "table.txt").read_text()
        return Measurement({"auc": len(text) / 1000})

    experiment.artifact(table)
    experiment.arm(floor)
    made = card("text", "requests", {"floor": {"role": "floor"}}, "auc")
    made.facts["artifacts"]["table"] = {"what": "a table", "needs": []}
    made.facts["arms"]["floor"]["needs"] = ["table"]
    return made, experiment


def test_an_artifact_keeps_the_promises_too(runs_of):
    runs = runs_of(with_artifact(lambda ctx, state: f"{ctx.seed} {state['step']}"))
    checks.runs_on_cpu(runs)
    checks.a_killed_run_is_resumed(runs)
    checks.one_seed_gives_one_result(runs)
    assert runs.resumed("artifact", "table")[1] is not None  # it was killed
    assert runs.stages == [("artifact", "table"), ("arm", "floor")]


def test_an_artifact_that_forgets_its_generator(runs_of):
    runs = runs_of(with_artifact(lambda ctx, state: str(state["draws"])))
    checks.one_seed_gives_one_result(runs)
    breaks(checks.a_killed_run_is_resumed, runs, match=r"table: killed and resumed, it differs .* table\.txt")


def test_an_artifact_written_without_a_seed(runs_of):
    runs = runs_of(with_artifact(lambda ctx, state: str(np.random.default_rng().random())))
    breaks(checks.one_seed_gives_one_result, runs, match="table: two runs with seed 42 differ")
