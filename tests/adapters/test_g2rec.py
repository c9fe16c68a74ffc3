"""Mechanism tests of card g2rec, with the numbers of its specification."""

import math
from dataclasses import replace
from types import SimpleNamespace

import networkx
import numpy as np
import pytest
import synthetic
import torch

from adapters.g2rec import experiment as stages
from adapters.g2rec.evaluation import measure, sampled_negatives
from adapters.g2rec.experiment import build_graph, profile_hash, variant
from adapters.g2rec.graph import (
    Graph,
    Modularity,
    ascent,
    climb,
    effective_clusters,
    full_graph,
    hard_profiles,
    louvain_labels,
    one_hot,
    permuted_profiles,
    sampled_graph,
    soft_clusters,
    sparse_profiles,
    start_logits,
    window_graph,
)
from adapters.g2rec.model import G2Rec, G2RecConfig, prototypes_of, to_right
from auto_research.blocks.causal_lm import load_layers
from auto_research.blocks.residual_kmeans import mutual_information
from auto_research.data.item_vectors import item_cf_vectors
from auto_research.data.sequences import LeaveTwoOut
from auto_research.metrics.cost import count_params
from auto_research.train.next_item import WindowBatch
from auto_research.train.optimizer import adamw

ITEMS, CLUSTERS = 30, 5
CONFIG = G2RecConfig(width=16, heads=2, layers=2, dropout=0.0, length=6)
ROWS = torch.tensor([[0, 0, 3, 9, 17, 2], [5, 6, 7, 8, 10, 30]])
TARGET = torch.tensor([[0, 0, 9, 17, 2, 21], [6, 7, 8, 10, 30, 1]])


def memberships(items: int = ITEMS, clusters: int = CLUSTERS, rho: int = 3) -> torch.Tensor:
    torch.manual_seed(7)
    profiles = sparse_profiles(torch.randn(items + 1, clusters) * 2, rho)
    profiles[0] = 0
    return profiles


def build(profiles=None, seed: int = 0, **switches) -> G2Rec:
    torch.manual_seed(seed)
    model = G2Rec(replace(CONFIG, **switches), memberships() if profiles is None else profiles).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
            if name == "item.weight":
                parameter[0] = 0
    return model


@pytest.fixture(scope="module")
def data():
    return LeaveTwoOut.build(synthetic.interactions(users=20, ratings=30))


# Graph and modularity


def triangles() -> Graph:
    """Items 1-2-3 and 4-5-6 with the bridge 3-4."""
    edges = np.array([(1, 2), (1, 3), (2, 3), (4, 5), (4, 6), (5, 6), (3, 4)])
    return Graph.of(edges[:, 0], edges[:, 1], 6)


def rows(*items) -> torch.Tensor:
    return torch.tensor([[0.0, 0.0], *items])


def test_modularity_by_hand():
    quality = Modularity(triangles())
    left, right, both = [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]
    assert float(quality(rows(left, left, left, right, right, right))) == pytest.approx(0.357143, abs=1e-6)
    assert float(quality(rows(*[left] * 6))) == pytest.approx(0.0, abs=1e-6)
    assert float(quality(rows(*[both] * 6))) == pytest.approx(0.0, abs=1e-6)
    assert float(quality(rows(left, left, both, right, right, right))) == pytest.approx(0.262755, abs=1e-6)


@pytest.mark.parametrize("dense", [True, False])
def test_one_hot_modularity_is_the_usual_one(data, monkeypatch, dense):
    monkeypatch.setattr("adapters.g2rec.graph.DENSE_ITEMS", 10_000 if dense else 0)
    graph = sampled_graph(data, seed=3, draws=2)
    quality = Modularity(graph)
    assert quality.dense == dense
    network = networkx.Graph()
    network.add_nodes_from(range(1, graph.n_items + 1))
    once = graph.i < graph.j
    network.add_weighted_edges_from(zip(*(x[once].tolist() for x in (graph.i, graph.j, graph.w)), strict=True))
    labels = np.arange(graph.n_items + 1) % 4
    groups = [set((np.flatnonzero(labels[1:] == c) + 1).tolist()) for c in range(4)]
    expected = networkx.community.modularity(network, groups)
    assert float(quality(torch.from_numpy(one_hot(labels)))) == pytest.approx(expected, abs=1e-6)


def test_modularity_is_the_same_over_edges_as_dense(data, monkeypatch):
    graph = sampled_graph(data, seed=3)
    soft = memberships(data.n_items)
    found = []
    for limit in (10_000, 0):
        monkeypatch.setattr("adapters.g2rec.graph.DENSE_ITEMS", limit)
        p = soft.clone().requires_grad_()
        quality = Modularity(graph)
        q = quality(p)
        q.backward()
        found.append((float(q.detach()), p.grad))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)
    assert len(quality.w) == len(graph.w) // 2


def test_edges_have_both_directions_and_every_draw_counts_once(data):
    graph = sampled_graph(data, seed=0)
    events = len(data.train_items)
    assert set(zip(graph.i.tolist(), graph.j.tolist(), graph.w.tolist(), strict=True)) == set(
        zip(graph.j.tolist(), graph.i.tolist(), graph.w.tolist(), strict=True)
    )
    assert graph.degree().sum() == graph.total
    assert graph.total == 2 * events * math.ceil(math.log(events))  # a user holds an item once, so none is a self-pair
    assert sampled_graph(data, seed=0, draws=3).total == 2 * events * 3
    assert not (graph.i == graph.j).any()
    matrix = np.zeros((graph.n_items + 1,) * 2)
    matrix[graph.i, graph.j] = graph.w
    assert np.array_equal(matrix, graph.matrix().toarray())


def test_the_graph_knows_train_events_of_one_user_only(data):
    together = full_graph(data)
    allowed = set(zip(together.i.tolist(), together.j.tolist(), strict=True))
    for graph in (sampled_graph(data, seed=1), window_graph(data)):
        assert set(zip(graph.i.tolist(), graph.j.tolist(), strict=True)) <= allowed
    held = [set(items.tolist()) for items in data.train]
    assert all(any({i, j} <= items for items in held) for i, j in allowed)
    edited = LeaveTwoOut(
        data.n_users, data.n_items, data.users, data.train_items, data.train_starts, data.valid_target[::-1].copy(),
        data.test_target[::-1].copy(), data.dataset,
    )  # fmt: skip
    assert not np.array_equal(data.valid_target, edited.valid_target)
    assert not np.array_equal(data.test_target, edited.test_target)
    for graph in (lambda data: sampled_graph(data, 1), window_graph, full_graph):
        for first, second in zip(graph(data)[:3], graph(edited)[:3], strict=True):
            assert np.array_equal(first, second)
    assert np.array_equal(item_cf_vectors(data, width=8), item_cf_vectors(edited, width=8))


def test_window_and_full_graphs_by_hand():
    data = LeaveTwoOut(1, 6, np.array([1]), np.array([1, 2, 3, 4, 5]), np.array([0, 5]), np.array([6]), np.array([6]))
    near = window_graph(data, 2)
    assert set(zip(near.i.tolist(), near.j.tolist(), strict=True)) == {
        (a, b) for a in range(1, 6) for b in range(1, 6) if a != b and abs(a - b) <= 2
    }
    assert len(full_graph(data).i) == 20
    assert full_graph(data).total == 20
    for kind, pairs in (("window", 18), ("full", 20)):  # three places apart: all but (1, 5) and its reverse
        assert len(build_graph(kind, data, 0).i) == pairs
    for draws in (2, 4):
        assert build_graph("sampled", data, 0, draws).total == 2 * 5 * draws
    with pytest.raises(ValueError, match="unknown graph"):
        build_graph("dense", data, 0)


# Clustering


def planted(seed: int = 0) -> tuple[Graph, np.ndarray]:
    """80 items in 4 blocks, edges with probability .3 inside and .02 outside."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(4), 20)
    chance = np.where(block[:, None] == block[None, :], 0.3, 0.02)
    first, second = np.nonzero(np.triu(rng.random((80, 80)) < chance, 1))
    return Graph.of(first + 1, second + 1, 80), block


def spectral(graph: Graph, width: int = 16) -> np.ndarray:
    values, vectors = np.linalg.eigh(np.log1p(graph.matrix().toarray()))
    order = np.argsort(-np.abs(values))[:width]
    return (vectors[:, order] * np.sqrt(np.abs(values[order]))).astype(np.float32)


def test_planted_blocks_are_found():
    graph, block = planted()
    found = soft_clusters(graph, spectral(graph), clusters=8, rho=4, steps=300, restarts=3, seed=0)
    assert len(found.start) == len(found.best) == 3
    assert max(found.best) > max(found.start) + 0.01
    profiles = found.profiles
    assert torch.allclose(profiles[1:].sum(1), torch.ones(80), atol=1e-5)
    assert ((profiles > 0).sum(1) <= 4).all()
    assert not profiles[0].any()
    assert mutual_information(profiles[1:].argmax(1).numpy(), block, normalised=True) >= 0.85
    q = float(Modularity(graph)(profiles))
    assert q >= 0.5
    assert q == pytest.approx(max(found.best), abs=1e-5)
    mixed = torch.from_numpy(permuted_profiles(profiles.numpy(), 0))
    assert q >= float(Modularity(graph)(mixed)) + 0.3
    louvain = one_hot(louvain_labels(graph, 0))
    assert float(Modularity(graph)(torch.from_numpy(louvain))) >= 0.5
    assert 3.5 < effective_clusters(profiles.numpy()) < 8


def test_the_best_step_is_kept_and_not_the_last(monkeypatch):
    graph, _ = planted()
    monkeypatch.setattr("adapters.g2rec.graph.RATE", 50.0)  # leaps past the summit
    vectors = spectral(graph)
    short = soft_clusters(graph, vectors, clusters=8, rho=4, steps=0, restarts=1, seed=0)
    found = soft_clusters(graph, vectors, clusters=8, rho=4, steps=6, restarts=1, seed=0)
    assert found.start == short.start == short.best
    values = []
    logits, optimizer = ascent(start_logits(vectors[1:], 8, 0, 0), "cpu")
    for _ in range(6):
        values.append(climb(Modularity(graph), logits, optimizer, 4))
    values.append(float(Modularity(graph)(sparse_profiles(logits.detach(), 4))))
    assert values[0] == found.start[0]
    assert found.best == [max(values)]
    assert values[-1] < max(values)
    assert float(Modularity(graph)(found.profiles)) == pytest.approx(max(values), abs=1e-6)


def test_items_without_edges_are_uniform():
    graph = triangles()._replace(n_items=8)
    vectors = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    profiles = soft_clusters(graph, vectors, clusters=5, rho=2, steps=5, restarts=2, seed=0).profiles
    for item in (7, 8):
        assert sorted(profiles[item].tolist()) == pytest.approx([0, 0, 0, 0.5, 0.5])


def test_variants_of_profiles():
    soft = memberships().numpy()
    labels = np.arange(ITEMS + 1) % 4
    hard = variant(soft, labels, "hard", 0)
    assert np.array_equal(hard, hard_profiles(soft))
    assert (hard[1:].sum(1) == 1).all()
    assert np.array_equal(hard[1:].argmax(1), soft[1:].argmax(1))
    mixed = variant(soft, labels, "random", 0)
    assert not np.array_equal(mixed, soft)
    assert np.array_equal(np.unique(mixed[1:], axis=0), np.unique(soft[1:], axis=0))
    assert variant(soft, labels, "louvain", 0).shape == (ITEMS + 1, 4)
    assert variant(soft, labels, "soft", 0) is soft
    assert profile_hash(mixed) != profile_hash(soft)
    with pytest.raises(ValueError, match="unknown profiles"):
        variant(soft, labels, "fuzzy", 0)


# Interest tokens


def test_prototypes_by_hand():
    profiles, items = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0], [3.0]])
    prototypes = prototypes_of(profiles, items)
    assert prototypes.flatten().tolist() == pytest.approx([1.6667, 3.0], abs=1e-4)
    assert (profiles @ prototypes).flatten().tolist() == pytest.approx([1.6667, 2.3333], abs=1e-4)


def test_interests_are_mixtures_of_the_items_and_move_with_them():
    model = build()
    tables = model.tables()
    share = model.profiles / model.profiles.sum(0).clamp_min(1e-6)
    mixture = model.profiles @ share.t()  # y = mixture x
    assert torch.allclose(mixture[1:].sum(1), torch.ones(ITEMS), atol=1e-5)
    assert (mixture >= 0).all()  # the convex hull
    assert torch.allclose(mixture @ tables.items, tables.interests, atol=1e-5)
    item = 4
    tables.interests[item].sum().backward()
    relatives = (model.profiles @ model.profiles[item]) > 0
    relatives[[0, item]] = False
    assert relatives.any()
    assert (model.item.weight.grad[relatives].abs().sum(1) > 0).all()


def test_singleton_clusters_give_the_item_itself():
    profiles = torch.cat([torch.zeros(1, ITEMS), torch.eye(ITEMS)])
    tables = build(profiles).tables()
    assert torch.equal(tables.interests, tables.items)


def test_prototypes_are_recomputed_and_profiles_stay():
    model = build()
    before, profiles = model.tables().interests.detach().clone(), model.profiles.clone()
    optimizer = adamw(model, 1e-2)
    model.train()
    model.training_loss(WindowBatch(ROWS, TARGET)).backward()
    optimizer.step()
    assert (model.tables().interests[1:] - before[1:]).abs().amax(1).min() > 0
    assert torch.equal(model.profiles, profiles)
    free = build(prototypes="free")
    assert "free" in dict(free.named_parameters())
    free.tables().prototypes.sum().backward()
    assert free.item.weight.grad is None


# Sequence and loss


def test_a_profile_is_predicted_before_its_interest_is_visible():
    model = build()
    with torch.no_grad():
        tables = model.tables()
        states = model.read(ROWS[1:], tables)
        changed = tables.interests.clone()
        changed[7] += torch.randn(16)  # the third item of the row
        other = model.read(ROWS[1:], tables._replace(interests=changed))
        one, two = model.profile_logits(states, tables)[0], model.profile_logits(other, tables)[0]
        assert torch.equal(one[:3], two[:3])
        assert not torch.allclose(one[3:], two[3:])
        assert torch.equal(states[0, :6], other[0, :6])  # BOS, x1, y1, x2, y2, x3
        assert not torch.allclose(states[0, 6], other[0, 6])  # what follows item 3 is read at y3
        later = ROWS[1:].clone()
        later[0, 3] = 20
        assert torch.equal(model.read(later, tables)[0, :7], states[0, :7])


def test_padding_is_nothing():
    model = build()
    with torch.no_grad():
        padded, plain = model(ROWS[:1]), model(ROWS[:1, 2:])
        assert torch.allclose(padded[:, 2:], plain, atol=1e-5)
        tables = model.tables()
        right = to_right(ROWS[:1])[0]
        assert right.tolist() == [[3, 9, 17, 2, 0, 0]]
        long, short = model.read(right, tables), model.read(right[:, :4], tables)
        assert torch.allclose(long[:, :9], short, atol=1e-5)


def test_without_interest_tokens_it_is_the_item_only_model():
    full, item_only = build(interest="none"), build(interest="none", weight=0.0)
    item_only.load_state_dict(full.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(full(ROWS), item_only(ROWS))
        x = full.item_table()[ROWS[1:]] * 4.0 + full.position[[1, 3, 5, 7, 9, 11]] + full.kind[1]
        begin = (full.begin + full.position[0] + full.kind[0]).expand(1, 1, -1)
        states = full.trunk(torch.cat([begin, x], dim=1), torch.ones(1, 7, dtype=torch.bool))
        assert torch.allclose(full(ROWS[1:]), states[:, 1:], atol=1e-6)
    assert not torch.allclose(full(ROWS), build()(ROWS))


def loss_terms(model: G2Rec) -> tuple[list[float], list[float]]:
    """Item and profile terms of both rows, each read without padding."""
    with torch.no_grad():
        tables = model.tables()
        item_terms, profile_terms = [], []
        for row, target in zip(ROWS, TARGET, strict=True):
            items, after = row[row > 0], target[target > 0]
            states = model.read(items.unsqueeze(0), tables)[0]
            wanted = torch.cat([items[:1], after])
            logits = states[::2] @ tables.items[1:].t()
            item_terms += (-logits.log_softmax(1))[torch.arange(len(wanted)), wanted - 1].tolist()
            if model.to_profile is not None:
                logp = (model.to_profile(states[1::2]) @ tables.prototypes.t()).log_softmax(1)
                profile_terms += (-(model.profiles[items] * logp).sum(1)).tolist()
    return item_terms, profile_terms


def test_the_loss_by_hand():
    model, batch = build(weight=0.5), WindowBatch(ROWS, TARGET)
    item_terms, profile_terms = loss_terms(model)
    assert len(item_terms) == 12  # ten items and what follows BOS in both rows
    expected = np.mean(item_terms) + 0.5 * np.mean(profile_terms)
    assert float(model.training_loss(batch).detach()) == pytest.approx(expected, rel=1e-5)
    without = build(weight=0.0)
    assert set(model.state_dict()) - set(without.state_dict()) == {"to_profile.weight"}
    without.load_state_dict(model.state_dict(), strict=False)
    assert loss_terms(without)[0] == item_terms
    assert float(without.training_loss(batch).detach()) == pytest.approx(np.mean(item_terms), rel=1e-5)
    entropy = -(model.profiles * model.profiles.clamp_min(1e-12).log()).sum(1)
    kl = float(model.profile_kl(ROWS).mean().detach())
    assert kl == pytest.approx(np.mean(profile_terms) - float(entropy[ROWS[ROWS > 0]].mean()), rel=1e-4)


def test_repeated_items_are_as_long_as_interest_tokens():
    wide, plain = build(interest="repeat", weight=0.0), build(interest="none", weight=0.0)
    plain.load_state_dict(wide.state_dict())
    with torch.no_grad():
        assert wide.read(ROWS[1:], wide.tables()).shape[1] == 1 + 2 * 6
        assert plain.read(ROWS[1:], plain.tables()).shape[1] == 1 + 6
        assert wide(ROWS).shape == plain(ROWS).shape == (2, 6, 16)
        assert not torch.allclose(wide(ROWS), plain(ROWS), atol=1e-3)
        # every item stands in its own slot and in that of its interest, told apart by position alone
        item = wide.item_table()[[7, 7]] * 4.0 + wide.position[[1, 2]] + wide.kind[1]
        begin = (wide.begin + wide.position[0] + wide.kind[0]).unsqueeze(0)
        states = wide.trunk(torch.cat([begin, item]).unsqueeze(0), torch.ones(1, 3, dtype=torch.bool))
        assert torch.allclose(wide(torch.tensor([[7]]))[0, 0], states[0, 2], atol=1e-6)


def test_only_models_that_use_prototypes_make_them():
    for interest in ("none", "repeat"):
        assert build(interest=interest, weight=0.0).tables()[1:] == (None, None)
        assert build(interest=interest).tables().prototypes.shape == (CLUSTERS, 16)
    for interest in ("token", "sum"):
        assert build(interest=interest, weight=0.0).tables().interests.shape == (ITEMS + 1, 16)


@pytest.mark.parametrize("switches", [{"interest": "sum"}, {"interest": "repeat", "weight": 0.0}, {"interest": "none"}])
def test_other_sequences_are_causal_and_learn(switches):
    model = build(**switches)
    with torch.no_grad():
        later = ROWS.clone()
        later[:, -1] = 25
        assert torch.allclose(model(ROWS)[:, :-1], model(later)[:, :-1], atol=1e-6)
        assert not torch.allclose(model(ROWS)[:, -1], model(later)[:, -1])
    model.train()
    model.training_loss(WindowBatch(ROWS, TARGET)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.fixture
def with_language_model(causal_lm):
    torch.manual_seed(0)
    config = replace(CONFIG, backbone="causal_lm", lm_layers=1)
    model = G2Rec(config, memberships(), lm=load_layers(causal_lm, 1)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
        model.item.weight[0] = 0
    return model


def test_a_language_model_reads_the_same_sequence(with_language_model):
    """Visibility and padding as with the decoder: the backbone is all that differs."""
    model = with_language_model
    with torch.no_grad():
        padded, plain = model(ROWS[:1]), model(ROWS[:1, 2:])
        assert torch.allclose(padded[:, 2:], plain, atol=1e-4)
        tables = model.tables()
        states = model.read(ROWS[1:], tables)
        changed = tables.interests.clone()
        changed[7] += torch.randn(16)  # the third item of the row
        other = model.read(ROWS[1:], tables._replace(interests=changed))
        assert torch.allclose(states[0, :6], other[0, :6], atol=1e-5)
        assert not torch.allclose(states[0, 6], other[0, 6], atol=1e-3)


def test_a_language_model_is_trained_through_lora_alone(with_language_model):
    model = with_language_model
    model.train()
    model.training_loss(WindowBatch(ROWS, TARGET)).backward()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(name.startswith("trunk.layers.") and "lora" not in name for name in frozen)
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learned == {name for name, _ in model.named_parameters()} - frozen
    assert count_params(model) < 200_000 < count_params(model, trainable_only=False)


def test_unknown_backbones_are_refused():
    with pytest.raises(ValueError, match="backbone"):
        G2RecConfig(backbone="llm")


def test_the_item_only_arm_has_as_many_parameters():
    profiles, text = torch.zeros(1683, 32), torch.zeros(1683, 384)
    size = G2RecConfig(width=64)
    plain = G2Rec(replace(size, interest="none", weight=0.0), profiles, text)
    assert count_params(plain) == pytest.approx(count_params(G2Rec(size, profiles, text)), rel=0.05)


# Evaluation


def test_sampled_negatives_are_unseen_and_fixed(data):
    drawn = sampled_negatives(data)
    assert np.array_equal(drawn, sampled_negatives(data))
    for row, items in enumerate(drawn):
        items = items[items > 0]
        known = np.append(data.history("test", row), data.test_target[row])
        assert len(items) == min(99, data.n_items - len(known))
        assert len(np.unique(items)) == len(items)
        assert not np.isin(items, known).any()


def test_sampled_metrics_by_hand(data):
    target = data.test_target

    def score(split, positions):
        scores = np.tile(np.arange(data.n_items + 1, dtype=np.float64), (len(positions), 1))
        scores[np.arange(len(positions)), target[positions]] = 1e3
        return scores

    best = measure(score, data)
    assert best.metrics["sampled99_ndcg@5"] == best.metrics["sampled99_mrr"] == best.metrics["ndcg@5"] == 1.0
    worst = measure(lambda split, positions: np.zeros((len(positions), data.n_items + 1)), data)
    unseen = (sampled_negatives(data) > 0).sum(1)
    assert worst.metrics["sampled99_mrr"] == pytest.approx((1 / (1 + unseen)).mean())
    assert worst.metrics["recall@10"] == worst.metrics["hit@10"] == 0.0


def test_sampled_metrics_rank_the_target_among_its_99():
    data = LeaveTwoOut.build(synthetic.interactions(users=60, items=200, ratings=30))
    drawn = sampled_negatives(data)
    assert (drawn > 0).all()
    ids = np.arange(data.n_items + 1, dtype=np.float64)
    found = measure(lambda split, positions: np.tile(ids, (len(positions), 1)), data)
    ranks = 1 + (drawn > data.test_target[:, None]).sum(1)
    gains = np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)
    expected = {
        "ndcg@5": np.where(ranks <= 5, gains, 0.0), "ndcg@10": gains, "hit@10": (ranks <= 10) * 1.0, "mrr": 1 / ranks,
    }  # fmt: skip
    for name, values in expected.items():
        assert found.metrics[f"sampled99_{name}"] == pytest.approx(values.mean())
        assert found.units[f"sampled99_{name}"].values == pytest.approx(values)
    assert found.metrics["sampled99_ndcg@10"] > found.metrics["sampled99_ndcg@5"] > 0

    full = []
    for user, target in enumerate(data.test_target):
        better = set(range(target + 1, data.n_items + 1)) - set(data.history("test", user).tolist())
        full.append(1 + len(better))
    full = np.array(full)
    assert found.metrics["recall@10"] == pytest.approx((full <= 10).mean())
    assert found.metrics["ndcg@5"] == pytest.approx(np.where(full <= 5, 1 / np.log2(1 + full), 0.0).mean())
    assert found.metrics["ndcg@10"] > found.metrics["ndcg@5"] > 0
    assert found.metrics["sampled99_hit@10"] > found.metrics["recall@10"]


@pytest.mark.parametrize("name", ["itemknn", "ease", "sasrec"])
def test_shared_baselines_report_the_sampled_metrics_too(name, monkeypatch):
    given = {}
    monkeypatch.setattr(getattr(stages, f"{name}_baseline"), "run", lambda ctx, **options: given.update(options))
    getattr(stages, name)(SimpleNamespace(device="cpu", budget={}))
    assert given["measure"] is measure
