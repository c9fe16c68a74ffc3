"""TIGER: the mechanism tests of its card with their numbers; generic blocks are tested in tests/engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.tiger import cold_start, experiment
from adapters.tiger.serving import Served, temperatures, unconstrained
from adapters.tiger.tokenizers import content_vectors, hyperplane_table, kmeans_table, random_table
from auto_research.baselines.tiger import TokenizerConfig, builder, code_facts, fit_semantic_ids
from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores
from auto_research.blocks.history_generator import GeneratorConfig
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.rqvae import RQVAE, ResidualQuantizer, RQVAEConfig
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab, random_codes, resolve_collisions
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.sequences import LeaveTwoOut
from auto_research.experiment.card import find_card
from auto_research.metrics.cost import count_params
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.paths import code_root
from auto_research.train.next_item import recent_items
from auto_research.train.optimizer import adamw
from auto_research.train.sid import SIDBatch, generator_loss, read_history
from auto_research.train.state import StateFolder

CPU = torch.device("cpu")
CARD = find_card(code_root(), "tiger")
SMALL = GeneratorConfig(32, 4, 1, 1, 64, 0.0, length=6)


@pytest.fixture(scope="module")
def sequences(movielens_100k):
    return LeaveTwoOut.load(movielens_100k / "sequences")


def context(movielens_100k, folder, **budget):
    """What the functions of an artifact read of a context."""
    folder.mkdir(exist_ok=True)
    return SimpleNamespace(
        data=lambda name: movielens_100k / name,
        budget=budget,
        switch=None,
        seed=42,
        out=folder,
        state=StateFolder(folder / "state"),
        progress=lambda *args, **values: None,
    )


@pytest.fixture(scope="module")
def tokenized(movielens_100k, tmp_path_factory):
    """The real catalogue with the standard books and fewer steps: vectors, table, folder."""
    ctx = context(movielens_100k, tmp_path_factory.mktemp("tiger") / "ids")
    vectors = content_vectors(ctx)
    table = fit_semantic_ids(ctx, vectors, TokenizerConfig(rq_steps=250), device=CPU)
    return vectors, table, ctx.out


# Tokenizer ----------------------------------------------------------------------------------------------------------


def test_residual_quantisation_by_hand():
    quantizer = ResidualQuantizer((2, 2), 2, beta=0.25)
    with torch.no_grad():
        quantizer.books[0].copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        quantizer.books[1].copy_(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
    r0 = torch.tensor([[1.0, 2.0]], requires_grad=True)
    found = quantizer(r0)
    assert found.codes.tolist() == [[1, 0]]
    assert (r0 - found.vectors.sum(1)).tolist() == [[0.0, 0.0]]
    assert found.vectors.sum(1).tolist() == [[1.0, 2.0]]
    assert found.loss.item() == 1.25
    found.loss.sum().backward()
    assert r0.grad.tolist() == [[0.0, 0.5]]
    assert quantizer.books[0].grad.tolist() == [[0.0, 0.0], [0.0, -2.0]]


def test_reconstruction_goes_straight_through_and_never_to_the_books():
    torch.manual_seed(0)
    model = RQVAE(RQVAEConfig((6,), (4, 4), ((8,),), 3))
    x = torch.randn(5, 6)
    model.start_quantising([x], 0)
    z = model.latent([x]).detach().requires_grad_()
    zhat = model.quantizers[0](z).vectors.sum(1)
    through = z + (zhat - z).detach()
    through.retain_grad()
    (x - model.decode(through)[0]).square().sum().backward()
    assert z.grad.abs().max() > 0
    assert torch.equal(z.grad, through.grad)
    assert all(book.grad is None for book in model.quantizers[0].books)


def test_exported_codes_are_those_of_the_saved_model(tokenized):
    vectors, table, folder = tokenized
    again = RQVAE.load(folder).codes([torch.from_numpy(vectors[1:])])[0].numpy()
    assert np.array_equal(table.codes[1:, :3], again)
    assert SIDTable.load(folder).content_hash == table.content_hash


def test_codes_of_the_real_catalogue(tokenized):
    vectors, table, _ = tokenized
    for level in range(3):
        assert len(np.unique(table.codes[1:, level])) >= 0.8 * 64
    assert len(np.unique(table.codes[1:], axis=0)) == table.n_items == 1682  # a bijection
    _, group = np.unique(vectors[1:].round(6), axis=0, return_inverse=True)
    twins = [np.flatnonzero(group.reshape(-1) == g) + 1 for g in np.flatnonzero(np.bincount(group.reshape(-1)) > 1)]
    assert len(twins) >= 10
    for items in twins:
        assert len(np.unique(table.codes[items, :3], axis=0)) == 1
        assert len(np.unique(table.codes[items, 3])) == len(items)


def test_genres_alone_collide(tokenized, movielens_100k, tmp_path):
    """genre_only: items with the same genres have the same vector, so 1,682 items share a few hundred prefixes."""
    _, table, _ = tokenized
    genres = content_vectors(context(movielens_100k, tmp_path / "genres"), "genres")
    coarse = kmeans_table(genres, TokenizerConfig(), 0)
    assert code_facts(coarse, 3)["prefix_collision_rate"] > 0.9
    assert code_facts(coarse, 3)["prefix_collision_rate"] > 4 * code_facts(table, 3)["prefix_collision_rate"]


def test_suffix_by_hand():
    table = resolve_collisions(np.array([[3, 1], [3, 1], [2, 5], [3, 1]]), (4, 6))
    assert table.codes[1:, 2].tolist() == [0, 1, 0, 2]
    assert table.sizes == (4, 6, 3)


def test_without_a_suffix_an_id_expands_to_its_group_by_popularity():
    """drop_suffix"""
    table = resolve_collisions(np.array([[3, 1], [3, 1], [2, 5]]), (4, 6), "group", popularity=np.array([0, 5, 9, 1]))
    trie = PrefixTrie.of(table)
    leaf = torch.tensor([[table.leaf_of_code((3, 1)), table.leaf_of_code((2, 5))]])
    assert trie.expand(leaf, 3).tolist() == [[2, 1, 3]]


def test_random_and_hyperplane_tables(tokenized):
    vectors, table, _ = tokenized
    drawn = random_table(table, 1)
    assert drawn.sizes == table.sizes
    assert len(drawn.leaves) == 1682
    assert drawn.content_hash != table.content_hash
    planes = hyperplane_table(vectors, TokenizerConfig(), 0)
    assert code_facts(planes, 3)["prefix_collision_rate"] < 0.10  # centred: about 4 percent; uncentred 21
    assert code_facts(planes, 3)["codebook_usage"] == 1.0
    sizes = [count_params(builder(t, SMALL)(None, SimpleNamespace(n_users=9))) for t in (table, drawn)]
    assert sizes[0] == sizes[1]


# Generator ----------------------------------------------------------------------------------------------------------


def rows(sequences: LeaveTwoOut, count: int, length: int):
    """The last train event of the first users that have enough of them, as cuts."""
    chosen = [i for i, items in enumerate(sequences.train) if len(items) > length][:count]
    items = np.stack([sequences.train[i][-length - 1 : -1] for i in chosen])
    target = np.zeros_like(items)
    target[:, -1] = [sequences.train[i][-1] for i in chosen]
    return SIDBatch(*(torch.from_numpy(x.copy()) for x in (items, target, sequences.users[chosen])))


@pytest.mark.parametrize("source", ["fused", "flat"])
def test_wide_beam_is_the_exhaustive_order_over_the_real_catalogue(tokenized, sequences, source):
    _, table, _ = tokenized
    torch.manual_seed(0)
    model = builder(table, GeneratorConfig(16, 2, 1, 1, 32, 0.0, length=6, source=source))(None, sequences).eval()
    positions = np.arange(2)
    ctx = read_history(model, sequences, "test", positions, 6, CPU)
    trie = PrefixTrie.of(table)
    seen = np.zeros((2, 700), dtype=np.int64)
    for row in positions:
        history = sequences.history("test", row)
        seen[row, : len(history)] = history
    seen = torch.from_numpy(seen)
    scores = exhaustive_sid_scores(model, ctx, table).scatter(1, seen, -torch.inf)
    found = [
        constrained_beam(SIDStep(model, cache=cache), ctx, trie, 1682, alive=trie.alive(seen))
        for cache in (True, False)
    ]
    for row in positions:
        left = 1682 - len(sequences.history("test", row))
        order = trie.expand(found[0].leaf[..., 0], 1682)[row, :left]
        assert len(order.unique()) == left
        torch.testing.assert_close(found[0].logp[row, :left], scores[row, order], atol=1e-4, rtol=0)
        assert (found[0].logp[row, 1:left] <= found[0].logp[row, : left - 1]).all()
        assert (found[0].leaf[row, left:] == -1).all()
    torch.testing.assert_close(found[0].logp, found[1].logp, atol=1e-4, rtol=0)


def test_a_code_never_changes_the_logits_before_it(tokenized, sequences):
    _, table, _ = tokenized
    model = builder(table, SMALL)(None, sequences).eval()
    batch = rows(sequences, 2, 6)
    ctx = model.context(batch.items, batch.user)
    codes = torch.tensor([[[1, 2, 3, 0]], [[4, 5, 6, 1]]])
    before = model.path_logits(ctx, codes)
    for level in range(4):
        changed = codes.clone()
        changed[..., level] = (changed[..., level] + 1) % table.sizes[level]
        after = model.path_logits(ctx, changed)
        for position in range(4):
            assert torch.equal(after[position], before[position]) == (position <= level)


def test_history_ends_before_the_target(sequences):
    positions = np.arange(50)
    for split, target in (("valid", sequences.valid_target), ("test", sequences.test_target)):
        window = recent_items(sequences, split, positions, 50)
        assert not (window == target[positions][:, None]).any()


@pytest.mark.parametrize("source", ["fused", "flat"])
def test_learns_rows_by_heart(tokenized, sequences, source):
    """64 fixed rows: loss under .05 and beam top 1 right for 95 percent within 400 steps."""
    _, table, _ = tokenized
    torch.manual_seed(0)
    config = GeneratorConfig(32, 4, 1, 1, 64, 0.0, length=3, source=source, causal=False)
    model = builder(table, config)(None, sequences)
    batch = rows(sequences, 64, 3)
    optimizer = adamw(model, 8e-3)
    for _ in range(400):
        optimizer.zero_grad()
        loss = generator_loss(model, batch, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.04:
            break
    assert loss.item() < 0.05
    trie = PrefixTrie.of(table)
    best = constrained_beam(SIDStep(model.eval()), model.context(batch.items, batch.user), trie, 5).leaf[:, :1, 0]
    assert (trie.expand(best, 1)[:, 0] == batch.target[:, -1]).float().mean() >= 0.95


def test_one_stack_of_equal_size_has_the_same_interface(tokenized, sequences):
    """decoder_only"""
    _, table, _ = tokenized
    config = GeneratorConfig(32, 4, 1, 1, 64, 0.0, length=6, source="flat", causal=False)
    one, two = (builder(table, config, stack=stack)(None, sequences) for stack in ("decoder", "seq2seq"))
    assert abs(count_params(one) / count_params(two) - 1) < 0.01
    batch = rows(sequences, 4, 6)
    codes = torch.from_numpy(table.codes)
    assert torch.isfinite(generator_loss(one, batch, codes))
    assert generator_loss(one, batch, codes) != generator_loss(two, batch, codes)


# Serving ------------------------------------------------------------------------------------------------------------


def small_served():
    table = resolve_collisions(random_codes(60, (4, 4, 4), seed=0), (4, 4, 4))
    walks = [(np.arange(12) * 3 + user) % 60 + 1 for user in range(6)]
    data = LeaveTwoOut(
        6, 60, np.arange(1, 7), np.concatenate([w[:10] for w in walks]), np.arange(7) * 10,
        np.array([w[10] for w in walks]), np.array([w[11] for w in walks]), "walks",
    )  # fmt: skip
    torch.manual_seed(0)
    model = builder(table, GeneratorConfig(16, 2, 1, 1, 32, 0.0, length=4))(None, data).eval()
    return Served(model, data, PrefixTrie.of(table), 4, CPU)


def test_the_beam_without_a_trie_names_items_that_do_not_exist():
    found = unconstrained(small_served(), 10)
    assert 0 < found["invalid_sid_rate"] <= 1  # 60 of the 64 prefixes exist, each with one suffix only
    assert found["unconstrained_short_lists"] > 0


def test_temperature_spreads_the_lists():
    served = small_served()
    genres = np.eye(61)[:, 1:]
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.mul_(3)
    found = temperatures(served, genres, 0)
    assert [t for t, _ in found["topk_genre_entropy"]] == [1.0, 1.5, 2.0]
    assert found == temperatures(served, genres, 0)
    # ten distinct items with a genre each: the entropy is that of ten, whatever the temperature
    assert found["topk_genre_entropy"][0][1] == pytest.approx(np.log(10))


# Items without history ----------------------------------------------------------------------------------------------


CODES = np.array([[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]])  # items 1..6
TABLE = resolve_collisions(CODES, (2, 2, 2))
COLD = np.array([False, False, True, True, True, False, False])


def test_neighbours_share_three_codes_then_two():
    near = cold_start.code_neighbours(TABLE, COLD, 3)
    assert near[1].tolist() == [2, 3]
    assert near[6].tolist() == [3, 2]
    assert near[5].tolist() == []


def test_epsilon_bounds_the_unseen_items_of_a_list():
    near = cold_start.code_neighbours(TABLE, COLD, 3)
    lists = np.array([[5, 1, 6, 0, 0, 0, 0, 0, 0, 0]])
    assert cold_start.mixed(lists, near, 0.0).tolist() == lists.tolist()
    assert cold_start.mixed(lists, near, 0.1)[0].tolist() == [5, 1, 2, 6, 0, 0, 0, 0, 0, 0]
    assert cold_start.mixed(lists, near, 0.3)[0].tolist() == [5, 1, 2, 3, 6, 0, 0, 0, 0, 0]
    assert [cold_start.quota(e, 10) for e in (0.0, 0.1, 0.3, 0.5)] == [0, 1, 3, 5]


def test_nearest_vectors_obey_the_same_bound():
    """semantic_knn"""
    vectors = np.array([[0, 0], [1, 0], [0.6, 0.8], [0.8, 0.6], [0, 1], [0, 1], [1, 0]], dtype=float)
    near = cold_start.vector_neighbours(vectors, COLD)
    assert near[1].tolist() == [3, 2, 4]
    lists = np.array([[5, 1, 6, 0, 0, 0, 0, 0, 0, 0]])
    found = cold_start.knn_mixed(lists, np.array([1]), near, 0.1)
    assert found[0].tolist() == [5, 3, 1, 6, 0, 0, 0, 0, 0, 0]
    assert cold_start.knn_mixed(lists, np.array([1]), near, 0.0).tolist() == lists.tolist()


def test_cold_items_leave_training_and_histories(sequences):
    cold = cold_start.cold_items(sequences.n_items, 42)
    assert cold.sum() == 84
    assert not cold[0]
    left = cold_start.without_items(sequences, cold)
    assert not cold[left.train_items].any()
    assert not cold[left.valid_target].any()
    assert cold[left.test_target].any()
    assert len(left) > 0.99 * len(sequences)
    user = int(np.flatnonzero(cold[sequences.valid_target])[0])
    position = int(np.flatnonzero(left.users == sequences.users[user])[0])
    kept = sequences.train[user][~cold[sequences.train[user]]]
    assert left.history("test", position).tolist() == kept.tolist()


def test_every_arm_of_the_card_has_a_function():
    assert set(experiment.experiment.arms) == set(CARD.arms)
    assert set(experiment.experiment.artifacts) == set(CARD.artifacts)


def test_another_vocabulary_is_refused(tokenized):
    _, table, _ = tokenized
    with pytest.raises(ConfigError, match="semantic ids"):
        SIDVocab.of(table).item_tokens(random_table(table, 0))
