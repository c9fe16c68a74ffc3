"""The RankMixer host: data separation, fitness by hand, and that every gene changes something."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from adapters.rankmixer import search, search_scoring
from adapters.rankmixer.model import RankMixer
from auto_research.data.requests import RequestTable
from auto_research.evolve.code import prepare_module
from auto_research.evolve.genome import effective, inert_genes
from auto_research.evolve.hosts import load_preparation
from auto_research.evolve.tracks import load_track, merged
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.search import SealedData, TrialRequest, track_from
from auto_research.runtime.errors import NonFinite
from auto_research.runtime.paths import checkout_root

DEFINITION = load_track("rankmixer", checkout_root() / "config" / "evolve")
QUICK = DEFINITION["budgets"]["quick"]
TRACK = track_from(merged(DEFINITION, "quick"))
BASE = TRACK.baseline()
SETTINGS = {
    **QUICK["host"],
    "users": 12,
    "bootstraps": 20,
    "test_bootstraps": 20,
    "slice_users": 2,
    "chunk": 2048,
    "negatives": 1,
}
CONFIG = {"steps": 2, "evaluation_users": 3, "host": SETTINGS, "run_seed": 42}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, movielens_100k):
    folder = tmp_path_factory.mktemp("search")
    search.prepare(CONFIG, lambda table: movielens_100k / table, folder / "dev", folder / "sealed")
    return folder


@pytest.fixture(scope="module")
def table(prepared):
    return search.development_table(CONFIG, prepared / "dev")


@pytest.fixture(scope="module")
def full(movielens_100k):
    return RequestTable.load(movielens_100k / "requests").restrict(SETTINGS["users"])


def request(prepared, folder, **genes):
    return TrialRequest(
        genome=effective({**BASE, **genes}, TRACK),
        config=CONFIG,
        seed=42,
        dev=prepared / "dev",
        state=folder,
        device="cpu",
        threads=1,
    )


def test_dev_holds_no_test_row_and_the_same_train_and_validation_batches(table, full):
    assert len(table.requests("test")) == 0
    assert table.interactions.timestamp.shape[0] < full.interactions.timestamp.shape[0]
    for split in ("train", "valid"):
        ours, theirs = table.requests(split), full.requests(split)
        assert len(ours) == len(theirs) > 0
        a, b = table.batch(ours, history=20), full.batch(theirs, history=20)
        for name in vars(a):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    tasks = [t.catalogue_tasks("valid") for t in (table, full)]
    assert np.array_equal(tasks[0].target, tasks[1].target)
    assert all(np.array_equal(a, b) for a, b in zip(*(t.excluded for t in tasks), strict=True))


def test_no_test_label_is_in_dev(prepared, full):
    raw = RequestTable.load(prepared / "dev" / "requests").interactions
    seen = set(zip(raw.user.tolist(), raw.item.tolist(), strict=True))
    whole = RequestTable.load(prepared / "sealed" / "requests")
    rows = np.concatenate([np.arange(whole.index.start[r], whole.index.stop[r]) for r in whole.requests("test")])
    test = set(zip(whole.interactions.user[rows].tolist(), whole.interactions.item[rows].tolist(), strict=True))
    assert test
    assert not test & seen


def test_separating_the_data_needs_neither_torch_nor_the_model():
    root = checkout_root()
    code = "import sys, adapters.rankmixer.search_split; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    config = {"definition": {"host": "rankmixer"}, "host": {}}
    assert prepare_module(config, root) == "adapters.rankmixer.search_split"
    assert load_preparation(config).__module__ == "adapters.rankmixer.search_split"
    assert search.host.functions["prepare"] is search.prepare
    assert prepare_module({"definition": {"host": "command"}}, root) == "auto_research.evolve.command_host"
    closure = Fingerprints(root).closure("adapters.rankmixer.search_split")
    assert "auto_research.data.request_index" in closure
    assert "adapters.rankmixer.model" not in closure


def test_the_development_loader_refuses_the_sealed_folder(prepared):
    with pytest.raises(SealedData):
        search.development_table(CONFIG, prepared / "sealed")


def test_every_batch_size_sees_the_same_requests(table):
    config = {**CONFIG, "steps": 300}
    orders = [search.request_order(table, config, 42, 0) for _ in range(2)]
    assert np.array_equal(*orders)
    assert len(orders[0]) == 300 * SETTINGS["batch"]
    for size in (64, 128, 256):
        genome = {**BASE, "batch_size": size}
        made = search.TrainingRequests(table, replace(request_of(config), genome=genome), torch.device("cpu"), 0)
        assert len(made) == -(-len(orders[0]) // size)
        assert np.array_equal(made.order, orders[0])


def request_of(config):
    from pathlib import Path

    return TrialRequest(genome=BASE, config=config, seed=42, dev=Path(), state=Path())


def outcome(prepared, table, folder, **genes):
    """Parameters, logits after two steps of the default size, and the losses of all steps."""
    asked = request(prepared, folder, **genes)
    model, curve, _ = search.train(asked, table, torch.device("cpu"))
    batch = table.batch(table.requests("valid")[:8], history=asked.genome["sequence_length"])
    with torch.no_grad():
        logits = model(batch)
    return sum(p.numel() for p in model.parameters()), logits, [point["loss"] for point in curve]


@pytest.fixture(scope="module")
def defaults(prepared, table, tmp_path_factory):
    """Outcome of the baseline, alone and with the gene that keeps experts alive."""
    made = {}
    for channel in ("pffn", "smoe_dtsi"):
        made[channel] = outcome(prepared, table, tmp_path_factory.mktemp(channel), channel=channel)
    return made


ACTIVATE = {"experts": {"channel": "smoe_dtsi"}}
VARIANTS = [(gene.name, value) for gene in TRACK.genes for value in gene.allowed if value != gene.default]


@pytest.mark.parametrize(("name", "value"), VARIANTS, ids=[f"{name}={value}" for name, value in VARIANTS])
def test_every_value_of_every_gene_changes_something(prepared, table, defaults, tmp_path, name, value):
    around = ACTIVATE.get(name, {})
    assert name not in inert_genes({**BASE, **around, name: value}, TRACK)
    default = defaults[around.get("channel", BASE["channel"])]
    changed = outcome(prepared, table, tmp_path, **{**around, name: value})
    assert default[0] != changed[0] or default[2] != changed[2] or not torch.equal(default[1], changed[1])


def test_experts_are_inert_without_a_mixture():
    for channel, value in chain.from_iterable(((c, v) for v in (2, 8)) for c in ("pffn", "swiglu_pffn")):
        genome = {**BASE, "channel": channel, "experts": value}
        assert "experts" in inert_genes(genome, TRACK)
        assert effective(genome, TRACK)["experts"] == BASE["experts"]


def test_a_resumed_training_ends_with_the_same_bits(prepared, table, tmp_path, monkeypatch):
    whole = search.train(request(prepared, tmp_path / "whole"), table, torch.device("cpu"))
    asked = request(prepared, tmp_path / "cut")

    def stop(done, total, **values):
        raise KeyboardInterrupt

    plan = search.Plan
    monkeypatch.setattr(search, "Plan", lambda *a, **k: plan(*a, **k, checkpoint_seconds=0.0))
    calls = []

    def stop_at_second(done, total, **values):
        calls.append(done)
        if done == 2:
            stop(done, total)

    with pytest.raises(KeyboardInterrupt):
        search.train(replace(asked, progress=stop_at_second), table, torch.device("cpu"))
    again = search.train(asked, table, torch.device("cpu"))
    assert calls == [1, 2]
    for (name, a), b in zip(whole[0].state_dict().items(), again[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert whole[1] == again[1]


def test_micro_batches_accumulate_the_gradient_of_the_whole_batch(prepared, table):
    torch.manual_seed(0)
    model = RankMixer(
        search.model_config(BASE, {**SETTINGS, "dropout": 0.0}), table.vocab, torch.from_numpy(table.item_genres)
    ).eval()
    requests = table.requests("train")[:9]
    parts = [table.batch(part, history=20) for part in (requests[:2], requests[2:])]
    shares = [part.pairs() / len(part.hour) for part in parts]
    assert shares[0] != pytest.approx(shares[1], rel=0.05)  # weighting by requests would differ
    loss = search.accumulated_loss(model, parts)
    loss.backward()
    split = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected = search.training_loss(model, table.batch(requests, history=20))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert all(
        torch.allclose(a, p.grad, atol=1e-6)
        for a, p in zip(split, (p for p in model.parameters() if p.grad is not None), strict=True)
    )


def test_trial_and_test_measure_all_slices_with_finite_numbers(prepared, tmp_path):
    asked = request(prepared, tmp_path / "t")
    made = search.trial(asked)
    assert made.fitness == pytest.approx(0.5 * made.metrics["ndcg@10"] + 0.5 * made.metrics["auc"])
    assert len(made.replicates) == 20
    names = {
        f"{s}.{m}" for s in ("long_history", "tail_target", "recent_only", "restricted") for m in ("ndcg@10", "auc")
    }
    assert names <= set(made.metrics)
    opened = []

    def unseal():
        opened.append((tmp_path / "t" / "state.pt").exists())
        return prepared / "sealed"

    tested = search.test(asked, unseal)
    assert opened == [True]  # training was over
    assert tested.fitness != made.fitness
    assert tested.parameters == made.parameters > 0


def test_restricted_view_ignores_every_personal_field(table):
    torch.manual_seed(0)
    model = RankMixer(search.model_config(BASE, SETTINGS), table.vocab, torch.from_numpy(table.item_genres)).eval()
    views = search_scoring.ThreeViews(model)
    batch = table.batch(table.requests("valid")[:1], history=20)
    other = replace(
        batch,
        user_id=batch.user_id % 900 + 1,
        occupation=(batch.occupation + 1) % 21,
        user_stats=batch.user_stats + 1,
        hist_item=batch.hist_item.flip(1),
        cross=batch.cross + 1,
    )
    with torch.no_grad():
        a, b = (views(views.prepared(x), x) for x in (batch, other))
    assert torch.equal(a[2], b[2])
    assert not torch.equal(a[0], b[0])


def test_recent_view_sees_four_events(table):
    batch = table.batch(table.requests("valid")[:3], history=20)
    recent = search_scoring.last_events(batch, 4)
    assert torch.equal(recent.hist_item, batch.hist_item[:, -4:])


def test_bootstrap_replicates_are_paired_and_centred():
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(40), 5)
    label = rng.random(200) < 0.5
    view = search_scoring.View(user, user, label, label * 0.3 + rng.random(200), np.array([]), np.array([]))
    tasks, ndcg = np.arange(40), rng.random(40)
    auc = search_scoring._auc(label, view.score)
    fitness = search_scoring.composite(float(ndcg.mean()), auc)
    values = search_scoring.bootstrap(view, tasks, ndcg, fitness, "valid", 400)
    assert values == search_scoring.bootstrap(view, tasks, ndcg, fitness, "valid", 400)
    assert np.mean(values) == pytest.approx(fitness, abs=0.01)
    better = search_scoring.bootstrap(view, tasks, ndcg + 0.1, fitness, "valid", 400)
    assert np.allclose(np.subtract(better, values), 0.05)


def test_an_empty_slice_is_none_and_a_nan_score_is_nonfinite():
    view = search_scoring.View(
        np.array([1]), np.array([1]), np.array([True]), np.array([0.5]), np.array([3]), np.array([[1]])
    )
    empty = search_scoring._slice("tail", view, np.zeros(1, bool), np.zeros(1, bool))
    assert empty == {"tail.ndcg@10": None, "tail.auc": None}
    with pytest.raises(NonFinite):
        search_scoring._auc(np.array([True, False]), np.array([np.nan, 0.1]))


def test_floors_are_fitted_on_dev_and_measured_on_both_splits(prepared):
    floors = search.floors(CONFIG, prepared / "dev", lambda: prepared / "sealed")
    assert set(floors) == {"popularity", "bias", "gbdt"}
    for values in floors.values():
        assert 0 <= values["validation"]["auc"] <= 1
        assert values["test"]["fitness"] == pytest.approx(0.5 * values["test"]["auc"] + 0.5 * values["test"]["ndcg@10"])
