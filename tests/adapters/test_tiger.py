"""TIGER: the mechanism tests of its card with their numbers; generic blocks are tested in tests/engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.tiger import cold_start, experiment
from adapters.tiger.serving import Served, drawn_lister, temperatures, unconstrained
from adapters.tiger.tokenizers import content_vectors, hyperplane_table, kmeans_table, random_table
from auto_research.baselines import tiger as tiger_baseline
from auto_research.baselines.tiger import TokenizerConfig, builder, code_facts, fit_semantic_ids, train_generator
from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores
from auto_research.blocks.history_generator import GeneratorConfig
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.rqvae import RQVAE, ResidualQuantizer, RQVAEConfig
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab, random_codes, resolve_collisions
from auto_research.blocks.sid_models import SIDStep, path_logprob
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_list import genre_entropy, split_lists
from auto_research.experiment.card import find_card
from auto_research.metrics.cost import count_params
from auto_research.runtime.errors import ConfigError, NonFinite
from auto_research.runtime.paths import code_root
from auto_research.train.next_item import recent_items
from auto_research.train.optimizer import adamw
from auto_research.train.sid import SIDBatch, beam_lister, generator_loss, read_history
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
    x = torch.randn(40, 6)
    model.start_quantising([x], 0)
    seen = {}

    def kept(name, tensor):
        tensor.retain_grad()
        seen[name] = tensor

    model.encoders[0].register_forward_hook(lambda module, inputs, z: kept("z", z))
    model.decoders[0].register_forward_pre_hook(lambda module, inputs: kept("zhat", inputs[0]))
    model.losses([x])["reconstruction"].sum().backward()
    assert seen["z"].grad.abs().max() > 0
    assert torch.equal(seen["z"].grad, seen["zhat"].grad)
    assert not torch.equal(seen["z"], seen["zhat"])
    assert all(book.grad is None or not book.grad.any() for book in model.quantizers[0].books)


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


def test_options_reach_the_tokenizer(movielens_100k, tmp_path):
    """content genres and text_cf, and ids without a suffix, through the artifact's own function."""
    sizes = {"codes": 16, "rq_hidden": [32], "rq_width": 8, "rq_steps": 20}
    tables = {}
    for name, more in {
        "text": {},
        "genres": {"content": "genres"},
        "text_cf": {"content": "text_cf"},
        "group": {"collisions": "group"},
    }.items():
        ctx = context(movielens_100k, tmp_path / name, **sizes, **more)
        ctx.device = "cpu"
        experiment.rqvae_ids(ctx)
        tables[name] = SIDTable.load(ctx.out)
    assert len({table.content_hash for table in tables.values()}) == 4
    assert [tables[name].levels for name in ("text", "group")] == [4, 3]
    assert len(tables["group"].leaves) < 1682
    genres = content_vectors(context(movielens_100k, tmp_path / "again"), "genres")[1:]
    _, group = np.unique(genres, axis=0, return_inverse=True)
    prefixes = np.unique(np.column_stack([group.reshape(-1), tables["genres"].codes[1:, :3]]), axis=0)
    assert len(prefixes) == group.max() + 1  # equal genres, equal codes


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
    optimizer = adamw(one, 5e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = generator_loss(one, batch, codes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    beams = constrained_beam(SIDStep(one.eval()), one.context(batch.items, batch.user), PrefixTrie.of(table), 5)
    assert torch.isfinite(beams.logp).all()
    paths = beams.codes[:1]  # the cache of the one stack spells what teacher forcing spells
    first = one.context(batch.items[:1], batch.user[:1])
    torch.testing.assert_close(beams.logp[:1], path_logprob(one, first, paths), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{"stack": "decoder", "source": "flat"}, {"causal": False}])
def test_one_target_a_row_needs_cuts(tokenized, sequences, options):
    ctx = SimpleNamespace(budget={"length": 6, "user_tokens": 4}, switch=options, key="tiger", tier="tiny", seed=42)
    with pytest.raises(ConfigError, match="cuts: true"):
        train_generator(ctx, tokenized[1], device=CPU, sequences=sequences)


def test_without_a_user_token_the_vocabulary_has_none(tokenized, sequences):
    _, table, _ = tokenized
    without = GeneratorConfig(32, 4, 1, 1, 64, 0.0, length=6, user_token=False)
    assert builder(table, without, users=0)(None, sequences).vocab.size + 128 == SIDVocab.of(table, users=128).size


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
    """Near temperature 0 the first item is the greedy path's; at 2 it is mostly another."""
    served, positions = small_served(), np.arange(6)
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.mul_(3)
    greedy = beam_lister(served.model, served.sequences, served.trie, width=1, length=4, device=CPU, renormalise=True)(
        "test", positions
    )
    cold, hot = (drawn_lister(served, temperature, 0)("test", positions) for temperature in (1e-3, 2.0))
    assert np.array_equal(cold[:, 0], greedy[:, 0])
    assert (hot[:, 0] != greedy[:, 0]).mean() >= 0.5
    assert (np.sort(hot, axis=1) != np.sort(cold, axis=1)).any(1).all()
    genres = np.zeros((61, 4))
    genres[np.arange(1, 61), served.model.tokens.codes[1:, 0].numpy()] = 1
    found = temperatures(served, genres, 0)
    assert [t for t, _ in found["topk_genre_entropy"]] == [1.0, 1.5, 2.0]
    assert found == temperatures(served, genres, 0)
    lists = split_lists(drawn_lister(served, 2.0, 0), served.sequences, "test")
    assert found["topk_genre_entropy"][2][1] == pytest.approx(genre_entropy(lists.items, genres).mean())
    assert found["ndcg@10"][2][1] == pytest.approx(lists.ndcg(10).mean())


def test_a_path_without_an_item_goes_on_from_the_token_it_chose():
    """Scores of the beam without a trie are the model's own log-probabilities, of foreign tokens too."""
    served = small_served()
    ctx, _ = served.read("test", np.arange(2))
    beams = constrained_beam(SIDStep(served.model), ctx, served.trie, 30, constrained=False)
    foreign = (beams.codes >= torch.tensor(served.model.vocab.sizes)).any(-1)
    assert foreign.any()
    torch.testing.assert_close(beams.logp, path_logprob(served.model, ctx, beams.codes), atol=1e-4, rtol=0)


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


def test_no_cold_item_is_offered_but_through_epsilon():
    served = small_served()
    cold = np.zeros(61, dtype=bool)
    cold[1::3] = True
    sizes = {"width": 16, "heads": 2, "encoder_layers": 1, "layers": 1, "hidden": 32, "dropout": 0.0}
    lister = beam_lister(
        served.model, served.sequences, served.trie, width=20, length=4, device=CPU, inventory=torch.from_numpy(~cold)
    )
    lists = split_lists(lister, served.sequences, "test").items
    assert not cold[lists].any()
    table = resolve_collisions(random_codes(60, (4, 4, 4), seed=0), (4, 4, 4))
    near = cold_start.code_neighbours(table, cold, 3)
    assert cold[cold_start.mixed(lists, near, 0.0)].sum(1).max() == 0
    assert cold[cold_start.mixed(lists, near, 0.1)].sum(1).max() == 1
    offered = []

    def fit(ctx, build, *, inventory, **options):
        offered.append(inventory)
        raise NonFinite("stop here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiger_baseline, "fit_sid", fit)
        ctx = SimpleNamespace(budget=sizes | {"length": 4, "user_tokens": 4}, switch=None)
        with pytest.raises(NonFinite):
            train_generator(ctx, table, device=CPU, sequences=served.sequences, inventory=torch.from_numpy(~cold))
    assert torch.equal(offered[0], torch.from_numpy(~cold))


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
