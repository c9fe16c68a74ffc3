"""What every adapter promises, checked on the tiny tier over MovieLens-100K for every card of the repository.

The promises are in `contract_checks.py`. The list of adapters is the folders that hold a card; nothing is added by hand.
"""

from __future__ import annotations

import contract_checks as checks
import pytest
from contract_edits import EditedFolders, EditedTables, link_checkpoints
from contract_runs import Runs

from auto_research.experiment.card import find_card
from auto_research.experiment.loader import load_experiment
from auto_research.runtime.paths import code_root

KEYS = sorted(path.parent.name.replace("_", "-") for path in (code_root() / "adapters").glob("*/card.yaml"))
DATASET = "movielens-100k"


@pytest.fixture(scope="session")
def data_root(tmp_path_factory, movielens_100k, pretrained):
    root = tmp_path_factory.mktemp("data")
    (root / DATASET).symlink_to(movielens_100k)
    link_checkpoints(root, pretrained)
    return root


@pytest.fixture(scope="session")
def folders(tmp_path_factory, movielens_100k, pretrained):
    return EditedFolders(movielens_100k, DATASET, tmp_path_factory.mktemp("edited"), pretrained)


@pytest.fixture(scope="session")
def tables():
    return EditedTables()


@pytest.fixture(scope="module", params=[pytest.param(key, marks=pytest.mark.xdist_group(key)) for key in KEYS])
def runs(request, tmp_path_factory, data_root):
    card = find_card(code_root(), request.param)
    return Runs(card, load_experiment(card.key, card), tmp_path_factory.mktemp(card.module), data_root)


def test_every_stage_runs_on_cpu(runs):
    checks.runs_on_cpu(runs)


def test_every_stage_runs_on_shadow(runs):
    checks.runs_on_shadow(runs)


def test_a_killed_run_is_resumed(runs):
    checks.a_killed_run_is_resumed(runs)


def test_one_seed_gives_one_result(runs):
    checks.one_seed_gives_one_result(runs)


def test_another_seed_differs(runs):
    checks.another_seed_differs(runs)


def test_every_parameter_learns(runs):
    checks.every_parameter_learns(runs)


def test_the_central_ablation_has_an_effect(runs):
    checks.central_ablation_has_an_effect(runs)


def test_the_future_changes_no_score(runs, tables):
    checks.the_future_changes_no_score(runs, tables)


def test_test_rows_change_no_training(runs, folders):
    checks.test_rows_change_no_training(runs, folders)


def test_the_result_validates(runs):
    checks.the_result_validates(runs)


def test_evidence_names_the_adapter(runs):
    checks.runs_on_cpu(runs)
    checks.runs_on_shadow(runs)
    checks.evidence_names_the_adapter(runs, {"cpu": "cpu", "shadow": "shadow:0"})
