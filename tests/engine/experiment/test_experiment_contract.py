from dataclasses import dataclass

import numpy as np
import pytest

from auto_research.baselines.floors import request_floors
from auto_research.experiment.context import Budget, Context
from auto_research.experiment.contract import Experiment, Measurement, Rows, Units, measurement_from
from auto_research.experiment.layout import Layout
from auto_research.runtime.errors import ConfigError, NonFinite
from auto_research.train.state import StateFolder


def test_a_measurement_survives_the_trip_through_plain_values():
    measured = Measurement(
        metrics={"auc": np.float64(0.5)},
        units={"uauc": Units("user", np.array([3, 4]), np.array([0.25, 0.75]))},
        rows=Rows(np.array([1, 1]), np.array([0.0, 1.0]), np.array([0.2, 0.7])),
        cost={"params": np.int64(3)},
    )
    plain = measured.as_dict()
    assert plain["metrics"] == {"auc": 0.5}
    assert type(plain["cost"]["params"]) is int
    assert plain["units"]["uauc"] == {"kind": "user", "ids": [3, 4], "values": [0.25, 0.75]}
    assert measurement_from(plain) == measured


@pytest.mark.parametrize(
    ("measured", "where"),
    [
        (Measurement({"auc": float("nan")}), "metrics.auc"),
        (Measurement({"auc": 1.0}, curve=[{"loss": 1.0}, {"loss": float("inf")}]), r"curve\[1\]\.loss"),
        (Measurement({"auc": 1.0}, units={"auc": Units("user", [1], [float("nan")])}), r"units\.auc\.values\[0\]"),
    ],
)
def test_a_number_that_is_not_finite_is_named(measured, where):
    with pytest.raises(NonFinite, match=where):
        measured.as_dict()


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="2 unit ids but 1 values"):
        Units("user", [1, 2], [0.5])
    with pytest.raises(ValueError, match="1, 1, 2"):
        Rows([1], [1], [0.1, 0.2])


def test_a_stage_name_is_used_once():
    experiment = Experiment("toy")

    @experiment.arm
    def full(ctx): ...

    with pytest.raises(ConfigError, match="full is defined twice"):
        experiment.artifact(full)


def test_a_budget_is_read_only_and_names_what_it_has():
    budget = Budget({"epochs": 3})
    assert (budget.epochs, budget["epochs"], budget.get("width", 8), dict(budget)) == (3, 3, 8, {"epochs": 3})
    with pytest.raises(AttributeError, match="epochs"):
        _ = budget.width
    with pytest.raises(AttributeError, match="read-only"):
        budget.epochs = 4


@dataclass(frozen=True)
class Sizes:
    width: int = 4
    hidden: tuple[int, int] = (8, 4)
    mixer: str = "shuffle"


def test_a_configuration_takes_budget_then_switch_then_fixed_values(tmp_path):
    switch = {"mixer": "identity", "width": 16}
    budget = Budget({"width": 8, "hidden": [2, 1], "epochs": 3, "mixer": "attention"})
    ctx = Context(
        "toy", "arm", "tiny", "movielens-100k", 42, budget, Layout("toy", "tiny", "movielens-100k"),
        StateFolder(tmp_path), switch=switch,
    )  # fmt: skip
    assert ctx.configured(Sizes) == Sizes(16, (2, 1), "identity")
    assert ctx.configured(Sizes, mixer="fixed") == Sizes(16, (2, 1), "fixed")


def test_floors_are_arms_and_a_second_registration_is_refused():
    experiment = Experiment("toy")
    request_floors(experiment)
    assert list(experiment.arms) == ["bias", "popularity", "gbdt"]
    with pytest.raises(ConfigError, match="bias is defined twice"):
        request_floors(experiment)
