"""Mechanism tests of card mosaic, with the numbers of its specification."""

import copy
import hashlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch
import torch.nn.functional as F
from torch import nn

import adapters.mosaic.fleet
from adapters.mosaic.data import MosaicTable, earlier_fraction, item_authors, item_surfaces, labels_of, rated_labels
from adapters.mosaic.downstream import CoTraining, Downstream
from adapters.mosaic.fleet import (
    Deployed,
    export_vectors,
    load_specialist,
    mined_groups,
    save_specialist,
    train_specialist,
)
from adapters.mosaic.fleet_report import add_surfaces, normalised_entropy, serving_cost, zero_out
from adapters.mosaic.fleet_report import test_items as scored_items
from adapters.mosaic.relations import (
    CompositeHead,
    composite,
    mean_cosine,
    penalty_weight,
    predictability,
    random_group,
    redundancy_loss,
    seen_classes,
    spearman,
    task_groups,
)
from adapters.mosaic.towers import SPECIALISTS, Catalogue, JointTower, MoEFeedForward, TowerConfig, build_tower
from adapters.mosaic.upstream import UpstreamConfig, UpstreamModel, upstream_model
from auto_research.blocks.behaviour_events import window_events
from auto_research.data.requests import RequestTable
from auto_research.evaluate.ctr import rated_batches, split_pairs
from auto_research.experiment.context import Budget
from auto_research.experiment.contract import Rows
from auto_research.runtime.errors import RunFailure
from auto_research.runtime.files import sha256_bytes
from auto_research.train.ctr import request_loss, training_loss
from auto_research.train.loop import Fitted
from auto_research.train.state import StateFolder

SMALL = TowerConfig(
    user_width=8, sequence=9, field=4, token_width=8, layers=2, heads=2, expansion=1, hidden=12, dropout=0.0
)
PLAIN = UpstreamConfig(hidden=(16, 8), dropout=0.0)
CPU = torch.device("cpu")
ABLATIONS = [
    ("memorization", {"user_table": False}),
    ("dense_heavy", {"dense": "mlp"}),
    ("sequential", {"ffn": "dense"}),
    ("sequential", {"sequence": 4}),
]


@pytest.fixture(scope="module")
def table() -> MosaicTable:
    return MosaicTable.of(synthetic.request_table())


@pytest.fixture(scope="module")
def catalogue(table) -> Catalogue:
    titles = np.random.default_rng(0).normal(size=(synthetic.ITEMS + 1, 6)).astype(np.float32)
    titles[0] = 0
    return Catalogue.of(table, titles)


def training_batch(table, requests=12):
    return table.batch(table.requests("train")[:requests], history=9, negatives=3, rng=np.random.default_rng(1))


def tower_of(kind, catalogue, seed=0, **changes) -> nn.Module:
    torch.manual_seed(seed)
    return build_tower(kind, replace(SMALL, **changes), catalogue).eval()


def upstream(kind, catalogue, config=PLAIN, groups=(), seed=0):
    torch.manual_seed(seed)
    return upstream_model(kind, SMALL, config, catalogue, list(groups))


def fleet(catalogue) -> list[nn.Module]:
    return [tower_of(kind, catalogue, seed) for seed, kind in enumerate(SPECIALISTS)]


def downstream(table, catalogue, towers, seed=0, **options) -> Downstream:
    torch.manual_seed(seed)
    surface = item_surfaces(table.item_genres, ["drama", "comedy", "x", "y", "z"])
    return Downstream(
        catalogue, surface, towers, width=SMALL.user_width, field=4, layers=1, hidden=12, dropout=0.0, **options
    )


def steps(model, batch, count=3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model.train()
    for step in range(count):
        optimizer.zero_grad()
        training_loss(model, batch).backward()
        optimizer.step()
        if hasattr(model, "after_step"):
            model.after_step(step + 1, count)


def state_hash(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()


# Multi-task relation mining


def test_rank_correlations_by_hand():
    rho = spearman(labels_of(np.array([1.0, 2, 3, 4, 5])))  # like, love, dislike
    assert rho[0, 1] == pytest.approx(0.6124, abs=5e-5)
    assert rho[0, 2] == pytest.approx(-0.6667, abs=5e-5)
    assert rho[0, 0] == pytest.approx(1)
    assert (spearman(np.array([[1, 0], [1, 1]]))[0] == 0).all()  # a constant task is related to nothing


def test_composite_classes_of_like_and_love_are_three_of_four():
    labels = labels_of(np.array([1.0, 2, 3, 4, 5]))
    assert seen_classes(labels, (0, 1)) == [0, 1, 3]
    assert seen_classes(labels, (0, 1, 2)) == [0, 1, 3, 4]  # 4 of 8


def test_tasks_form_connected_groups_of_two_or_three():
    rho = np.eye(6)
    for i, j, value in ((0, 1, 0.46), (0, 2, -0.5), (3, 4, 0.29)):
        rho[i, j] = rho[j, i] = value
    assert task_groups(rho) == [(0, 1, 2)]
    assert task_groups(rho, threshold=0.2) == [(0, 1, 2), (3, 4)]
    assert task_groups(np.ones((4, 4))) == []  # a component of four is none
    drawn = [random_group((0, 1, 2), 4, seed) for seed in range(20)]
    assert all(len(group) == 3 and 3 in group for group in drawn)
    assert len(set(drawn)) > 1


def test_the_ratings_form_one_group_of_three(movielens_100k):
    table = MosaicTable.of(RequestTable.load(movielens_100k / "requests"))
    labels = rated_labels(table)
    rho = spearman(labels)
    assert rho[0, 1] == pytest.approx(0.46, abs=0.02)
    assert rho[0, 2] == pytest.approx(-0.50, abs=0.02)
    assert task_groups(rho) == [(0, 1, 2)]
    assert len(seen_classes(labels, (0, 1, 2))) == 4
    assert item_authors(table.interactions)[1] == 367  # 366 genre sets with a decade, and padding
    assert table.between(0.0, 0.5).rows("train") == 45_745
    assert table.between(0.5, 0.8).rows("train") == 30_248
    surface = item_surfaces(table.item_genres, table.genre_names)
    assert len(np.unique(surface)) == 3
    drama = table.item_genres[:, [n.lower() for n in table.genre_names].index("drama")] > 0
    assert (surface[drama] == 0).all()


def test_composite_head_has_no_logit_for_unseen_classes_and_sums_to_marginals():
    torch.manual_seed(0)
    head = CompositeHead(5, (0, 1), [0, 1, 3])
    z, labels = torch.randn(4, 5), torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert head.out.out_features == 3
    assert composite(labels[:, :2]).tolist() == [3, 1, 0, 2]
    p = torch.softmax(head.out(z), dim=1)
    torch.testing.assert_close(head.marginals(z), torch.stack([p[:, 1] + p[:, 2], p[:, 2]], dim=1))
    rated = torch.tensor([True, True, False, True])  # the last pair's class was never seen
    expected = -(p[0, 2].log() + p[1, 1].log()) / 2
    torch.testing.assert_close(head.loss(z, labels, rated), expected)


def test_random_groups_differ_from_the_mined_ones(table, catalogue):
    mined, drawn = mined_groups(table, "mined", 0), mined_groups(table, "random", 0)
    assert mined_groups(table, "none", 0) == []
    assert [len(group) for group, _ in drawn] == [len(group) for group, _ in mined] == [3]
    assert mined[0][0] != drawn[0][0]
    labels = np.column_stack([rated_labels(table), np.ones(table.rows("train"), dtype=np.int64)])
    for group, classes in mined + drawn:
        bits = labels[:, list(group)] @ 2 ** np.arange(len(group))
        assert classes == sorted(set(bits.tolist()))
    batch, losses = training_batch(table), []
    for groups in (mined, drawn):
        model = upstream("memorization", catalogue, groups=groups)
        plain = upstream("memorization", catalogue)
        plain.load_state_dict(model.state_dict(), strict=False)
        losses.append((model.training_loss(batch) - plain.training_loss(batch)).item())
    assert min(losses) > 0
    assert losses[0] != pytest.approx(losses[1])


def test_mining_adds_to_the_loss(table, catalogue):
    batch = training_batch(table)
    plain, mined = (
        upstream("memorization", catalogue),
        upstream("memorization", catalogue, groups=[((0, 1), [0, 1, 3])]),
    )
    mined.load_state_dict(plain.state_dict(), strict=False)
    z = mined.interaction(mined.tower(batch), batch)
    labels = torch.stack([batch.like, batch.love, batch.dislike], dim=1)
    extra = 0.3 * mined.composite[0].loss(z, labels, batch.rated)
    torch.testing.assert_close(mined.training_loss(batch), plain.training_loss(batch) + extra)


# Cosine redundancy loss


def test_redundancy_by_hand():
    new, old = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    assert redundancy_loss(new, old, "signed").item() == pytest.approx(0, abs=1e-7)
    assert redundancy_loss(new, old, "squared").item() == pytest.approx(2 / 3)


def test_deployed_vectors_get_no_gradient():
    new, old = torch.randn(3, 4, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    redundancy_loss(new, old, "squared").backward()
    assert old.grad is None or not old.grad.any()
    assert new.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["signed", "squared"])
def test_short_vectors_leave_the_penalty(kind):
    new = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    old = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
    loss = redundancy_loss(new, old, kind)
    loss.backward()
    assert loss.item() == 0
    assert not new.grad.any()


def test_penalty_rises_between_t0_and_t0_plus_t1():
    assert [penalty_weight(step, 100, 0.05) for step in (0, 20, 50, 99)] == [0, 0, 0.05, 0.05]
    assert penalty_weight(35, 100, 0.05) == pytest.approx(0.025)


def test_the_penalty_pushes_a_specialist_away(table, catalogue):
    deployed = export_vectors(tower_of("memorization", catalogue), table, 9, CPU)[:, None]
    batch = training_batch(table.reading(deployed))
    losses = {}
    for kind in ("none", "signed", "squared"):
        model = upstream("dense_heavy", catalogue, UpstreamConfig(kind, 5.0, (16, 8), 0.0))
        model.penalty.fill_(5.0)
        losses[kind] = model.training_loss(batch)
        u = model.tower(batch)
        if kind != "none":
            torch.testing.assert_close(losses[kind] - losses["none"], 5 * redundancy_loss(u, batch.vectors, kind))
        model.after_step(10, 10)
        assert model.penalty.item() == 5.0
        model.after_step(1, 10)
        assert model.penalty.item() == 0
    assert losses["squared"] > losses["none"]


def test_a_rotation_fools_the_cosine_but_not_the_ridge():
    rng = np.random.default_rng(0)
    old = rng.normal(size=(400, 4))
    turned = old @ np.array([[0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1], [0, 0, -1, 0]], dtype=float)
    user = np.arange(400)
    assert abs(mean_cosine(np.stack([old, turned], axis=1))) < 1e-9
    assert predictability(turned, old, user) > 0.99
    assert predictability(rng.normal(size=(400, 4)), old, user) < 0.1
    assert mean_cosine(np.stack([old, 2 * old, -old], axis=1)) == pytest.approx(-1 / 3)
    assert mean_cosine(np.stack([old, 2 * old, -old], axis=1), squared=True) == pytest.approx(1)
    assert abs(mean_cosine(np.stack([old, turned], axis=1), squared=True)) < 1e-9


# Frozen fleet


def training_context(tmp_path, **budget) -> SimpleNamespace:
    sizes = {"history": 9, "batch": 64, "patience": None, "cross_layers": 1, "cross_hidden": 12} | budget
    return SimpleNamespace(
        seed=0, budget=Budget(sizes), state=StateFolder(tmp_path), observe=lambda *_, **__: None, progress=None
    )


@pytest.mark.parametrize("kind", ["sequential", "cotrain"])
def test_deployed_towers_do_not_change_when_the_next_one_trains(table, catalogue, tmp_path, kind):
    tower = tower_of("memorization", catalogue).requires_grad_(False)
    deployed = Deployed("memorization", tower, export_vectors(tower, table, 9, CPU))
    before, vectors = state_hash(tower), deployed.vectors.copy()
    ctx = training_context(tmp_path, epochs=1)
    config = UpstreamConfig("signed", 5.0, (16, 8), 0.0)
    options = {"towers": SMALL, "config": config}
    new, facts = train_specialist(ctx, kind, table, catalogue, [deployed], CPU, **options)
    assert facts["steps"] > 1
    assert facts["penalty"] == 5.0
    assert facts["redundancy"] == "signed"
    assert state_hash(tower) == before
    assert np.array_equal(deployed.vectors, vectors)
    assert not any(p.requires_grad for p in new.parameters())
    torch.manual_seed(0)
    assert state_hash(new) != state_hash(build_tower(kind, SMALL, catalogue))


@pytest.mark.parametrize(("beside", "redundancy", "best"), [(True, "signed", 3), (True, "none", 3), (False, "none", 1)])
def test_beside_deployed_towers_only_a_full_penalty_is_exported(
    table, catalogue, tmp_path, monkeypatch, beside, redundancy, best
):
    values = iter([0.9, 0.8, 0.7, 0.6, 0.5])
    metrics = adapters.mosaic.fleet.rated_metrics
    monkeypatch.setattr(adapters.mosaic.fleet, "rated_metrics", lambda rows: metrics(rows) | {"auc": next(values)})
    tower = tower_of("memorization", catalogue)
    deployed = [Deployed("memorization", tower, export_vectors(tower, table, 9, CPU))] if beside else []
    ctx = training_context(tmp_path, epochs=5, patience=1)
    options = {"towers": SMALL, "config": UpstreamConfig(redundancy, 0.05, (16, 8), 0.0)}
    _, facts = train_specialist(ctx, "dense_heavy", table, catalogue, deployed, CPU, **options)
    assert facts["best_epoch"] == best
    assert facts["penalty"] == pytest.approx(0.05 if redundancy == "signed" else 0.0)
    assert facts["validation"]["auc"] == {1: 0.9, 3: 0.7}[best]


def test_towers_do_not_change_when_the_downstream_trains(table, catalogue):
    model = downstream(table, catalogue, fleet(catalogue))
    before, rankers = [state_hash(tower) for tower in model.fleet], state_hash(model.rankers)
    steps(model, training_batch(table))
    assert [state_hash(tower) for tower in model.fleet] == before
    assert state_hash(model.rankers) != rankers
    assert not any(tower.training for tower in model.train().fleet)
    assert not any(p.requires_grad for p in model.fleet.parameters())


def test_cotrain_tower_gets_the_downstream_gradient_before_its_freeze(table, catalogue):
    torch.manual_seed(0)
    tower = tower_of("cotrain", catalogue)
    model = CoTraining(tower, SMALL.user_width, PLAIN, catalogue, field=4, layers=1, hidden=12)
    training_loss(model, training_batch(table)).backward()
    assert all(p.grad is not None and p.grad.any() for name, p in tower.named_parameters())
    frozen = downstream(table, catalogue, [copy.deepcopy(tower)])
    request_loss(frozen(training_batch(table)), training_batch(table)).backward()
    assert all(not p.requires_grad for p in frozen.fleet.parameters())


@pytest.mark.parametrize(
    ("cotrain_rows", "model", "start", "stop"), [(True, CoTraining, 0.5, 0.8), (False, UpstreamModel, 0.0, 0.5)]
)
def test_cotrain_can_train_upstream_on_earlier_rows(table, catalogue, monkeypatch, cotrain_rows, model, start, stop):
    seen = {}

    def fit(ctx, trained, rows, device, kind, beside):
        seen.update(model=trained, rows=rows)
        return Fitted([], 1, {}, 0, 0.0, 0.0)

    monkeypatch.setattr(adapters.mosaic.fleet, "_fit", fit)
    ctx = SimpleNamespace(seed=0, budget=Budget({"cross_layers": 1, "cross_hidden": 12}))
    options = {"towers": SMALL, "config": PLAIN, "cotrain_rows": cotrain_rows}
    tower, _ = train_specialist(ctx, "cotrain", table, catalogue, [], CPU, **options)
    assert type(seen["model"]) is model
    assert seen["model"].tower is tower
    requests = seen["rows"].requests("train")
    assert set(requests) == set(table.between(start, stop).requests("train"))
    assert len(requests) < len(table.requests("train"))


def test_cotrain_reads_deployed_vectors_in_its_penalty_only(table, catalogue):
    torch.manual_seed(0)
    config = UpstreamConfig("squared", 0.05, (16, 8), 0.0)
    model = CoTraining(
        tower_of("cotrain", catalogue), SMALL.user_width, config, catalogue, field=4, layers=1, hidden=12
    )
    deployed = export_vectors(tower_of("memorization", catalogue), table, 9, CPU)[:, None]
    plain, reading = training_batch(table), training_batch(table.reading(deployed))
    assert torch.equal(model(plain), model(reading))
    model.penalty.fill_(2.0)
    difference = training_loss(model, reading) - training_loss(model, plain)
    torch.testing.assert_close(difference, 2 * redundancy_loss(model.tower(reading), reading.vectors, "squared"))


# User-only vectors


@pytest.mark.parametrize("kind", SPECIALISTS)
def test_vectors_are_the_same_for_any_candidate(table, catalogue, kind):
    tower, request = tower_of(kind, catalogue), int(table.requests("test")[0])
    with torch.no_grad():
        one = tower(table.score_batch(request, [1, 2, 3], history=9))
        other = tower(table.score_batch(request, [40], history=9))
    assert torch.equal(one, other)
    assert one.shape == (1, SMALL.user_width)


@pytest.mark.parametrize("kind", SPECIALISTS)
def test_vectors_see_strictly_earlier_events_only(table, catalogue, kind):
    tower, request = tower_of(kind, catalogue), int(table.requests("test")[3])
    data, index = table.interactions, table.index
    own = data.user == table.request_user[request]
    later = own & (data.timestamp >= table.request_time[request])
    earlier = np.zeros(len(data), dtype=bool)
    earlier[index.first[request] : index.start[request]] = True

    def vector(rows=None):
        edited = table
        if rows is not None:
            item, rating = data.item.copy(), data.rating.copy()
            item[rows], rating[rows] = item[rows][::-1], 6 - rating[rows]
            edited = table.edited(item=item, rating=rating)
        with torch.no_grad():
            return tower(edited.batch([request], history=9))

    assert later.sum() > 0
    assert torch.equal(vector(), vector(later))
    assert not torch.allclose(vector(), vector(earlier))


@pytest.mark.parametrize("kind", SPECIALISTS)
def test_an_empty_history_gives_a_finite_vector(table, catalogue, kind):
    batch = training_batch(table)
    for name in ("hist_mask", "liked_mask", "other_mask"):
        getattr(batch, name)[:] = False
    tower = tower_of(kind, catalogue).train()
    u = tower(batch)
    u.square().sum().backward()
    assert torch.isfinite(u).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in tower.parameters())


# Sequential specialist


def test_top_two_gates_by_hand():
    torch.manual_seed(0)
    layer = MoEFeedForward(3, 4, 1).train()
    with torch.no_grad():
        layer.moe.router.weight.zero_()
        layer.moe.router.bias.copy_(torch.tensor([3.0, 2, -9, -9]).reshape(1, 1, 4))
    x = torch.randn(1, 5, 3)
    seen = {}
    layer.moe.experts.register_forward_pre_hook(lambda _, args: seen.update(gates=args[1]))
    layer(x).square().sum().backward()
    assert seen["gates"][0, 0].tolist() == pytest.approx([0.7311, 0.2689, 0, 0], abs=5e-5)
    experts, hidden = layer.moe.experts, layer.moe.experts.hidden
    for weight in (experts.w1.grad[0].t(), experts.w2.grad[0]):
        assert weight[: 2 * hidden].abs().max() > 0
        assert not weight[2 * hidden :].any()
    assert not experts.b2.grad[0, 2:].any()


def token_rows(tower, batch):
    """BOS and the embedded events [R, L + 1, D] as the tower reads them, and their mask."""
    events = tower.events(window_events(tower.encoder, batch.window("hist")))
    return tower.bos(events, batch.hist_mask)


def test_target_tokens_do_not_alter_the_vector(table, catalogue):
    tower, batch = tower_of("sequential", catalogue), training_batch(table)
    with torch.no_grad():
        u, cache = tower.states(batch)
        logits = tower.targets(cache, batch)
        events, mask = token_rows(tower, batch)
        target = tower.target(F.embedding(batch.item, tower.encoder.item_vectors()))
        first = torch.tensor([(batch.request_of == row).nonzero()[0, 0] for row in range(len(u))])
        row = torch.cat([events, target[first].unsqueeze(1)], dim=1)  # BOS, events, one candidate
        states, _ = tower.transformer.prefill(row, torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1))
        assert batch.hist_mask[:, -1].all()
        torch.testing.assert_close(states[:, -2], u)
        torch.testing.assert_close(tower.auxiliary(states[:, -1]), logits[first])
        chosen = torch.tensor([0, 5, 9])
        fewer = tower.targets(cache, replace(batch, item=batch.item[chosen], request_of=batch.request_of[chosen]))
    torch.testing.assert_close(fewer, logits[chosen])  # isolated from each other as well
    assert logits.shape == (batch.pairs(), 2)


def test_the_sequential_tower_reads_its_newest_events_only(table, catalogue):
    tower, batch = tower_of("sequential", catalogue, sequence=4), training_batch(table)
    assert batch.hist_mask[:, -4:].all()
    moved = replace(batch, hist_item=batch.hist_item.clone())
    with torch.no_grad():
        moved.hist_item[:, :-4] = moved.hist_item[:, :-4] % synthetic.ITEMS + 1
        assert torch.equal(tower(moved), tower(batch))
        assert torch.equal(tower(table.batch(table.requests("train")[:12], history=4)), tower(batch))
        moved.hist_item[:, -4] = moved.hist_item[:, -4] % synthetic.ITEMS + 1
        assert not torch.allclose(tower(moved), tower(batch))


def test_an_empty_history_reads_the_first_event(table, catalogue):
    tower, batch = tower_of("sequential", catalogue), training_batch(table)
    batch.hist_mask[:] = False
    with torch.no_grad():
        u = tower(batch)
        tower.bos.event.add_(torch.randn(SMALL.user_width))
        moved = tower(batch)
    assert torch.equal(u, u[:1].expand_as(u))
    assert not torch.allclose(u, moved)


def test_auxiliary_and_balance_losses_train_the_sequential_specialist(table, catalogue):
    batch, model = training_batch(table), upstream("sequential", catalogue).train()
    model.training_loss(batch).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    idle = ("key_constant", "encoder.rating", "encoder.event_age", "encoder.user_statistics")  # disposable, not read
    assert not [name for name in silent if "tower" in name or not any(part in name for part in idle)]


# Ablations inside towers


@pytest.mark.parametrize(("kind", "change"), ABLATIONS)
def test_ablations_of_towers(table, catalogue, kind, change):
    batch = training_batch(table)
    plain, other = tower_of(kind, catalogue), tower_of(kind, catalogue, **change)
    weights, own = plain.state_dict(), other.state_dict()
    common = {name for name in weights.keys() & own.keys() if weights[name].shape == own[name].shape}
    assert ("sequence" in change) == (len(common) == len(weights) == len(own))
    other.load_state_dict({name: weights[name] for name in common}, strict=False)
    with torch.no_grad():
        assert other(batch).shape == plain(batch).shape
        assert not torch.allclose(other(batch), plain(batch))
        moved = replace(batch, user_id=batch.user_id.flip(0))
        if kind == "memorization":
            assert torch.equal(other(batch), other(moved))
            assert not torch.equal(plain(batch), plain(moved))
    with pytest.raises(ValueError, match="unknown"):
        TowerConfig(ffn="sparse")
    with pytest.raises(ValueError, match="redundancy"):
        UpstreamConfig("cosine")


def test_joint_training_reaches_every_specialist(table, catalogue):
    torch.manual_seed(0)
    joint = JointTower(SPECIALISTS[:3], SMALL, catalogue)
    model = UpstreamModel(joint, 3 * SMALL.user_width, PLAIN, catalogue, field=4).train()
    training_loss(model, training_batch(table)).backward()
    assert not [name for name, p in joint.named_parameters() if p.grad is None or not p.grad.any()]
    alone = joint.eval().towers["dense_heavy"](training_batch(table))
    assert torch.equal(joint(training_batch(table))[:, SMALL.user_width : 2 * SMALL.user_width], alone)
    last = joint.towers["sequential"](training_batch(table))
    assert torch.equal(joint(training_batch(table))[:, 2 * SMALL.user_width :], last)


# Rows, export and cache


def test_row_ranges_split_the_train_rows(table):
    early, late = table.between(0.0, 0.5), table.between(0.5, 0.8)
    assert early.rows("train") + late.rows("train") == table.rows("train")
    fraction = earlier_fraction(table)
    assert fraction[early.requests("train")].max() < 0.5 <= fraction[late.requests("train")].min()
    assert np.array_equal(early.requests("valid"), table.requests("valid"))


def test_dislike_is_a_rating_of_at_most_two(table):
    batch, data = training_batch(table), table.interactions
    rating = {(u, i): r for u, i, r in zip(data.user.tolist(), data.item.tolist(), data.rating.tolist(), strict=True)}
    expected = [
        float(rated and rating[u, i] <= 2)
        for u, i, rated in zip(batch.user_of_pair.tolist(), batch.item.tolist(), batch.rated.tolist(), strict=True)
    ]
    assert batch.dislike.tolist() == expected
    assert 0 < sum(expected) < len(expected)


@pytest.mark.parametrize("kind", SPECIALISTS)
def test_a_saved_specialist_is_the_same_when_it_is_read(table, catalogue, kind, tmp_path):
    tower = tower_of(kind, catalogue)
    vectors = export_vectors(tower, table, 9, CPU)
    save_specialist(tmp_path / kind, tower, vectors, {"steps": 1}, SMALL)
    read = load_specialist(tmp_path / kind, kind, catalogue)
    assert np.array_equal(read.vectors, vectors)
    assert read.facts["steps"] == 1
    assert state_hash(read.tower) == state_hash(tower)
    first = sha256_bytes((tmp_path / kind / "vectors.safetensors").read_bytes())
    save_specialist(tmp_path / kind, tower, vectors, {"steps": 1}, SMALL)
    assert sha256_bytes((tmp_path / kind / "vectors.safetensors").read_bytes()) == first


@pytest.mark.parametrize(("kind", "change"), ABLATIONS)
def test_an_ablated_tower_is_read_as_it_was_saved(table, catalogue, kind, change, tmp_path):
    tower, config = tower_of(kind, catalogue, **change), replace(SMALL, **change)
    save_specialist(tmp_path, tower, np.zeros((table.n_requests, SMALL.user_width), np.float32), {}, config)
    read, batch = load_specialist(tmp_path, kind, catalogue).tower, training_batch(table)
    with torch.no_grad():
        assert torch.equal(read(batch), tower(batch))


def test_cached_logits_equal_recomputed_ones(table, catalogue):
    towers = fleet(catalogue)
    vectors = np.stack([export_vectors(tower, table, 9, CPU) for tower in towers], axis=1)
    model = downstream(table, catalogue, towers).eval()
    requests = table.requests("test")[:20]
    cached, fresh = (t.batch(requests, history=9) for t in (table.reading(vectors), table))
    assert cached.vectors is not None
    assert fresh.vectors is None
    with torch.no_grad():
        torch.testing.assert_close(model(cached), model(fresh), atol=1e-5, rtol=0)
        assert not torch.allclose(model(fresh), model(replace(cached, vectors=cached.vectors.flip(1))))
    cost = serving_cost(model, table.reading(vectors), list(SPECIALISTS), 9, CPU, (0, 1))
    assert cost["cache_difference"] <= 1e-5
    assert cost["export_requests_per_s"] > 0
    with pytest.raises(RunFailure, match="cached logits"):
        serving_cost(model, table.reading(vectors + 0.1 * vectors[:, ::-1]), list(SPECIALISTS), 9, CPU, (0, 1))


def test_stale_exports_are_those_of_the_first_request_of_a_split(table, catalogue):
    vectors = export_vectors(tower_of("cotrain", catalogue), table, 9, CPU)[:, None]
    stale = table.reading(vectors, stale=True)
    requests = table.requests("test")
    user = table.request_user[requests]
    mine = requests[user == np.bincount(user).argmax()]
    read = stale.batch(mine, history=9).vectors
    assert len(mine) > 1
    assert torch.equal(read, torch.from_numpy(vectors[mine[:1]]).expand_as(read))
    train = table.requests("train")[:5]
    assert torch.equal(stale.batch(train, history=9).vectors, torch.from_numpy(vectors[train]))


# Downstream


def test_zero_out_of_a_constant_specialist_costs_nothing(table, catalogue):
    towers = fleet(catalogue)[:2]
    vectors = np.stack([export_vectors(tower, table, 9, CPU) for tower in towers], axis=1)
    vectors[:, 1] = np.linspace(-1, 1, SMALL.user_width, dtype=np.float32)
    model = downstream(table, catalogue, towers).eval()
    reading = table.reading(vectors)
    means = vectors[table.requests("train")].astype(np.float64).mean(axis=0).astype(np.float32)
    lost = zero_out(model, reading, means, 9, CPU)
    assert lost[1] == 0
    assert lost[0] != 0


def test_normalised_entropy_by_hand():
    label = np.array([1, 1, 0, 0, 0, 0, 0, 1])
    assert normalised_entropy(label, np.full(8, 3 / 8)) == pytest.approx(1)
    assert normalised_entropy(np.array([1, 0]), np.array([0.8, 0.2])) == pytest.approx(np.log(0.8) / np.log(0.5))


def test_surfaces_are_measured_on_the_items_of_the_scored_rows(table):
    batches = rated_batches(table, "test", history=9)
    items = np.concatenate([batch.item.numpy() for batch in batches])
    likes = np.concatenate([batch.like.numpy() for batch in batches]).astype(np.int64)
    assert np.array_equal(scored_items(table), items)
    score = np.random.default_rng(0).random(len(items))
    rows = Rows(user=np.concatenate([batch.user_of_pair.numpy() for batch in batches]), label=likes, score=score)
    table = copy.copy(table)
    table.genre_names = ["drama", "comedy", "x", "y", "z"]
    measured = add_surfaces(SimpleNamespace(rows=rows, metrics={}), table)
    surface = item_surfaces(table.item_genres, table.genre_names)[items]
    for position, name in enumerate(("drama", "comedy", "rest")):
        own = surface == position
        better = score[own][likes[own] == 1][:, None] > score[own][likes[own] == 0]
        assert measured.metrics[f"auc_{name}"] == pytest.approx(better.mean())
        assert measured.metrics[f"ne_{name}"] == normalised_entropy(likes[own], score[own])
    means = [measured.metrics[f"auc_{name}"] for name in ("drama", "comedy", "rest")]
    assert measured.metrics["mean_surface_auc"] == pytest.approx(np.mean(means))


def test_surfaces_share_no_parameter(table, catalogue):
    model, batch = downstream(table, catalogue, fleet(catalogue)), training_batch(table)
    surface = model.surface[batch.item]
    assert sorted(surface.unique().tolist()) == [0, 1, 2]
    for position, ranker in enumerate(model.rankers):
        model.zero_grad()
        model(batch)[surface == position].sum().backward()
        for other, single in enumerate(model.rankers):
            got = any(p.grad is not None and p.grad.any() for p in single.parameters())
            assert got == (other == position)
        assert ranker.mlp[0].weight.grad.any()


def test_surfaces_by_first_matching_genre():
    genres = np.array([[0, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1]])
    assert item_surfaces(genres, ["Drama", "Comedy", "War"]).tolist() == [2, 0, 1, 2]


def test_serving_in_chunks_equals_the_whole(table, catalogue):
    model = downstream(table, catalogue, fleet(catalogue), titles=True).eval()
    batch = table.score_batch(int(table.requests("test")[1]), np.arange(1, 41), history=9)
    with torch.no_grad():
        state = model.prepare(batch)
        served = torch.cat([model.score(state, part) for part in split_pairs(batch, 7)])
        torch.testing.assert_close(served, model(batch), atol=1e-5, rtol=1e-4)


def test_downstream_without_vectors_reads_none(table, catalogue):
    model, batch = downstream(table, catalogue, []), training_batch(table)
    assert model.vectors(batch) is None
    request_loss(model(batch), batch).backward()
    assert not list(model.fleet.parameters())
