"""Mechanism tests of card barge, with the numbers of its specification."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch

from adapters.barge import experiment
from adapters.barge.experiment import Trainer, add_tokenizer, disliked_items
from adapters.barge.model import Barge, BargeConfig, ItemContextAttention, PathReranker, path_contrast
from adapters.barge.search import (
    ChannelLists,
    DualSearch,
    channel_beam,
    expansions,
    fuse,
    path_hook,
    scorer,
    survival,
    watched,
)
from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.residual_kmeans import mutual_information
from auto_research.blocks.rqvae import RQVAEConfig, build_rqvae
from auto_research.blocks.semantic_ids import random_codes, resolve_collisions
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.texts import load_text_vectors
from auto_research.experiment.context import Budget
from auto_research.metrics.ranking import top_items
from auto_research.runtime.errors import ConfigError
from auto_research.train.optimizer import adamw
from auto_research.train.sid import SIDBatch, SIDBudget, read_history
from auto_research.train.state import StateFolder
from auto_research.train.tokenizer import TokenizerPlan, fit_rqvae

CPU = torch.device("cpu")
SIZES = (4, 4, 4)
TABLES = [resolve_collisions(random_codes(synthetic.ITEMS, SIZES, seed=s), SIZES) for s in (0, 1)]
CONFIG = BargeConfig(width=16, heads=2, encoder_layers=1, layers=1, hidden=24, dropout=0.0, length=6)
ITEMS = torch.tensor([[0, 0, 3, 9, 17, 2], [5, 6, 7, 8, 10, 40]])
TARGET = torch.tensor([[0, 0, 9, 17, 2, 30], [6, 7, 8, 10, 40, 1]])
USER = torch.tensor([1, 2])


def build(seed: int = 0, low=None, **switches) -> Barge:
    torch.manual_seed(seed)
    model = Barge(TABLES, replace(CONFIG, **switches), low).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for channel in model.channels:
            if channel.reranker is not None:
                channel.reranker.log_tau.fill_(math.log(0.1))
    return model


@pytest.fixture(scope="module")
def data():
    return LeaveTwoOut.build(synthetic.interactions(users=20, ratings=30))


# OSQ-VAE


def osq(**changes):
    config = RQVAEConfig((24,), (4, 4, 4), ((16,),), 8, channels=2, rotation="householder", **changes)
    model = build_rqvae(config, 0)
    x = torch.randn(40, 24)
    return model, x


def test_rotation_is_orthogonal_and_the_identity_quantiser_gives_the_plain_decoder():
    config = RQVAEConfig((384,), (32, 32, 32), ((128,),), 64, channels=2, rotation="householder")
    model, x = build_rqvae(config, 3), torch.randn(20, 384)
    matrix = model.rotation(torch.eye(64)).t()
    assert (matrix.t() @ matrix - torch.eye(64)).abs().max() < 1e-5
    assert float(torch.linalg.det(matrix.detach().double())) == pytest.approx(1.0, abs=1e-5)
    z = model.encoders[0](x)
    assert torch.allclose(model.rotation(z).norm(dim=1), z.norm(dim=1), rtol=1e-5)
    quantised_by_identity = model.decode(torch.cat(model.channels(model.latent([x])), dim=1))[0]
    assert torch.allclose(quantised_by_identity, model.decoders[0](z), atol=1e-5)


def test_every_reflection_learns_and_stays_a_reflection():
    model, x = osq()
    model.start_quantising([x], 0)
    optimizer = adamw(model, 1e-2, 0.0)
    before = model.rotation.v.detach().clone()
    for step in range(100):
        optimizer.zero_grad()
        model.losses([x])["loss"].backward()
        if step == 0:
            assert (model.rotation.v.grad.abs().sum(1) > 0).all()
        optimizer.step()
    matrix = model.rotation(torch.eye(8))
    assert (matrix @ matrix.t() - torch.eye(8)).abs().max() < 1e-5
    assert (model.rotation.v - before).abs().max() > 0.05


def test_real_codes_are_bijections_and_not_functions_of_each_other(movielens_100k, tmp_path):
    vectors = load_text_vectors(movielens_100k / "texts")[1:]
    config = RQVAEConfig((384,), (32, 32, 32), ((128,),), 64, channels=2, rotation="householder")
    plan = TokenizerPlan(steps=60, warm_up=20, batch=256)
    fitted = fit_rqvae(vectors, config, plan=plan, seed=0, state=StateFolder(tmp_path), device="cpu")
    first = [codes[:, 0] for codes in fitted.codes]
    assert 0.02 < mutual_information(*first, normalised=True) < 0.9
    for codes in fitted.codes:
        table = resolve_collisions(codes, (32, 32, 32))
        assert table.levels == 4
        assert len(table.leaves) == len(vectors) == 1682
    assert fitted.statistics["orthogonality_error"] < 1e-5


def test_a_random_rotation_is_orthogonal_stays_and_gives_other_codes(tmp_path):
    vectors = torch.randn(60, 24, generator=torch.Generator().manual_seed(0)).numpy()
    codes = {}
    for rotation in ("none", "random"):
        config = RQVAEConfig((24,), (4, 4, 4), ((16,),), 8, channels=2, rotation=rotation)
        plan = TokenizerPlan(steps=20, warm_up=5, batch=32)
        fitted = fit_rqvae(vectors, config, plan=plan, seed=0, state=StateFolder(tmp_path / rotation), device="cpu")
        codes[rotation] = np.stack(fitted.codes)
    drawn = build_rqvae(config, 0).rotation.v
    assert torch.equal(fitted.model.rotation.v, drawn)
    assert fitted.statistics["orthogonality_error"] < 1e-5
    assert (codes["none"] != codes["random"]).mean() > 0.1


def test_errors_of_the_tokenizer_are_metrics():
    measured = SimpleNamespace(metrics={"ndcg@10": 0.1}, extra={})
    add_tokenizer(measured, {"reconstruction_mse": 0.5, "hashes": []})
    assert measured.metrics == {"ndcg@10": 0.1, "reconstruction_mse": 0.5}
    add_tokenizer(measured, {"reconstruction_mse": 0.5, "orthogonality_error": 1e-7})
    assert measured.metrics["orthogonality_error"] == 1e-7


# Encoder


def test_item_context_attention_is_local():
    torch.manual_seed(0)
    ica, x = ItemContextAttention(16, 4).eval(), torch.randn(5, 4, 16)
    out = ica(x)
    moved = x.clone()
    moved[2, 1] += 1.0
    other = ica(moved)
    rest = [0, 1, 3, 4]
    assert torch.equal(out[rest], other[rest])
    assert ((out[2] - other[2]).abs().amax(1) > 1e-4).all()  # all tokens of the item hear of it
    swap = [0, 3, 2, 1]
    assert torch.allclose(ica(x[:, swap]), out[:, swap], atol=1e-6)
    with torch.no_grad():
        ica.gate.bias.fill_(-30.0)
    assert torch.allclose(ica(x), x, atol=1e-6)


def test_item_context_attention_is_its_formula():
    torch.manual_seed(0)
    ica, x = ItemContextAttention(6, 2).eval(), torch.randn(1, 3, 6)
    q = ica.to_query(ica.query).view(2, 3)
    k, v = ica.to_pair(x[0]).chunk(2, dim=1)
    read = []
    for head in range(2):
        part = slice(3 * head, 3 * head + 3)
        read.append((k[:, part] @ q[head] / math.sqrt(3)).softmax(0) @ v[:, part])
    z = ica.norm(ica.out(torch.cat(read)))
    assert torch.allclose(ica.summary(x)[0], z, atol=1e-6)
    gate = torch.sigmoid(ica.gate(torch.cat([x[0], ica.mlp(z).expand(3, -1)], dim=1)))
    assert torch.allclose(ica(x)[0], x[0] + gate * ica.mlp(z), atol=1e-6)


def test_four_fused_tokens_an_item_and_eight_apart():
    fused, apart = build(), build(fused=False)
    assert fused.item_tokens(ITEMS).shape == (2, 6, 4, 16)
    assert apart.item_tokens(ITEMS).shape == (2, 6, 8, 16)
    assert not fused.item_tokens(ITEMS)[0, :2].any()
    assert not torch.allclose(build(ica=False).item_tokens(ITEMS), fused.item_tokens(ITEMS))
    plain = build(fused=False, ica=False)
    item, place = 17, plain.level + plain.slot[1]  # the second newest
    first, second = (channel.embedding(channel.tokens[item]) for channel in plain.channels)
    assert torch.allclose(plain.item_tokens(ITEMS)[0, 4], torch.cat([first, second]) + place, atol=1e-6)
    assert not torch.allclose(scores(apart, ITEMS), scores(fused, ITEMS), atol=1e-2)


def test_an_item_changes_no_token_of_the_others():
    model = build()
    other = ITEMS.clone()
    other[0, 4] = 23
    before, after = model.item_tokens(ITEMS), model.item_tokens(other)
    same = other == ITEMS
    assert torch.equal(before[same], after[same])
    one = model.channels[0].tokens[17].clone()  # one code of one channel alone, too
    with torch.no_grad():
        model.channels[0].tokens[17, 1] = model.channels[0].tokens[17, 1] + (1 if one[1] % 4 != 3 else -1)
    moved = model.item_tokens(ITEMS)
    assert torch.equal(before[same], moved[same])
    assert ((moved[~same] - before[~same]).abs().amax(-1) > 1e-5).all()  # all tokens of that item hear of it


def test_summaries_of_items_differ_from_the_start():
    torch.manual_seed(0)
    model = Barge(TABLES, replace(CONFIG, width=64, heads=4))
    plain = Barge(TABLES, replace(CONFIG, width=64, heads=4, ica=False))
    summary = model.ica.summary(plain.item_tokens(torch.arange(1, 21)[None, -6:])[0])
    unit = torch.nn.functional.normalize(summary.detach(), dim=1)
    assert (unit @ unit.t())[~torch.eye(6, dtype=torch.bool)].mean() < 0.55


@pytest.mark.parametrize("switches", [{}, {"fused": False, "ica": False}])
def test_windows_are_causal_between_items_and_padding_is_nothing(switches):
    model = build(**switches)
    memories = model.context(ITEMS)
    later = ITEMS.clone()
    later[:, -1] = torch.tensor([33, 34])
    per_item = model.per_item
    for memory, changed in zip(memories, model.context(later), strict=True):
        assert torch.allclose(memory.states[:, : 5 * per_item], changed.states[:, : 5 * per_item], atol=1e-6)
        assert not torch.allclose(memory.states[:, 5 * per_item :], changed.states[:, 5 * per_item :])
    short = scores(model, ITEMS[:1, 2:])
    assert torch.allclose(short, scores(model, ITEMS[:1]), atol=1e-4)


def scores(model: Barge, items):
    with torch.no_grad():
        return exhaustive_sid_scores(model.channels[0], model.context(items)[0], TABLES[0])[:, 1:]


def test_a_target_of_a_window_is_spelled_from_the_items_up_to_it():
    """The loss of the last target alone is what serving says of that item."""
    model = build(hpr=0.0)
    target = torch.zeros_like(TARGET)
    target[:, -1] = TARGET[:, -1]
    loss = float(model.training_loss(SIDBatch(ITEMS, target, USER)).detach())
    with torch.no_grad():
        memories = model.context(ITEMS)
        expected = 0.0
        for channel, memory, table in zip(model.channels, memories, TABLES, strict=True):
            logp = exhaustive_sid_scores(channel, memory, table)
            expected -= float(logp[torch.arange(2), TARGET[:, -1]].mean()) / table.levels
    assert loss == pytest.approx(expected, rel=1e-5)
    later = ITEMS.clone()
    later[:, 4:] = torch.tensor([[21, 22], [23, 24]])
    target[:, -1], target[:, 3] = 0, TARGET[:, 3]
    first = model.training_loss(SIDBatch(ITEMS, target, USER))
    assert torch.allclose(first, model.training_loss(SIDBatch(later, target, USER)), atol=1e-6)


def test_channels_share_the_encoder_and_nothing_else():
    model = build()
    model.training_loss(SIDBatch(ITEMS, TARGET, USER)).backward()
    named = dict(model.named_parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in named.values())
    a, b = model.channels
    assert {id(p) for p in a.parameters()}.isdisjoint({id(p) for p in b.parameters()})
    with pytest.raises(ConfigError, match="equally many levels"):
        Barge([TABLES[0], resolve_collisions(random_codes(60, (8, 8), seed=0), (8, 8))], CONFIG)


# Hierarchical path re-ranking


def test_path_loss_by_hand():
    eye, none = torch.eye(2), torch.eye(2, dtype=torch.bool)
    assert float(path_contrast(eye, eye, 1.0, none)) == pytest.approx(0.313262, abs=1e-6)
    assert float(path_contrast(eye, eye, 0.1, none)) == pytest.approx(4.54e-5, rel=1e-3)
    assert float(path_contrast(eye, eye, 1.0, torch.ones(2, 2, dtype=torch.bool))) == 0.0


def test_rows_of_one_prefix_are_no_negatives_at_its_level():
    torch.manual_seed(0)
    reranker, h = PathReranker(8, 2), torch.randn(2, 8)
    paths = torch.randn(2, 2, 8)
    codes = torch.tensor([[3, 1, 0], [3, 2, 0]])
    single = [path_contrast(reranker.u(n, h), reranker.v(n, paths[:, n]), 0.1, torch.eye(2).bool()) for n in (0, 1)]
    assert float(single[0].detach()) > 1e-3
    users = torch.tensor([1, 2])
    # the first level is shared, the second is not
    assert torch.allclose(reranker.loss(h, paths, codes, users), single[1])
    other = torch.tensor([[3, 1, 0], [2, 1, 0]])  # another first code: other prefixes below
    assert torch.allclose(reranker.loss(h, paths, other, users), single[0] + single[1])


def test_targets_of_one_user_are_no_negatives_of_each_other():
    torch.manual_seed(0)
    reranker, h, paths = PathReranker(8, 2), torch.randn(3, 8), torch.randn(3, 2, 8)
    codes, users = torch.tensor([[0, 0], [1, 1], [2, 0]]), torch.tensor([4, 4, 5])
    expected = 0.0
    for level in (0, 1):
        score = (reranker.u(level, h) @ reranker.v(level, paths[:, level]).t() / 0.1).detach()
        for row, negatives in ((0, [2]), (1, [2]), (2, [0, 1])):
            seen = [row, *negatives]
            expected += float(score[row, seen].logsumexp(0) + score[seen, row].logsumexp(0) - 2 * score[row, row]) / 6
    assert float(reranker.loss(h, paths, codes, users).detach()) == pytest.approx(expected, rel=1e-5)
    alone = SIDBatch(ITEMS[1:], TARGET[1:], USER[1:])  # one user: nothing to tell apart
    assert float(build().training_loss(alone).detach()) == pytest.approx(ntp_alone(alone), rel=1e-6)


def ntp_alone(batch: SIDBatch) -> float:
    """The loss without its path term, of the same weights."""
    model = build()
    for channel in model.channels:
        channel.reranker = None
    return float(model.training_loss(batch).detach())


def test_the_path_loss_enters_with_its_weight():
    """.1 of the mean over levels, summed over channels; its contexts are what serving reads at BOS."""
    model, target = build(), torch.zeros_like(TARGET)
    target[:, -1] = TARGET[:, -1]
    batch, expected = SIDBatch(ITEMS, target, USER), 0.0
    with torch.no_grad():
        for channel, memory in zip(model.channels, model.context(ITEMS), strict=True):
            codes = channel.codes[target[:, -1]]
            paths = channel.paths(codes[:, :3])
            expected += 0.1 / 3 * float(channel.reranker.loss(channel.opening(memory), paths, codes, USER))
    assert expected > 1e-2
    loss = float(model.training_loss(batch).detach())
    assert loss - ntp_alone(batch) == pytest.approx(expected, rel=1e-4)
    every = SIDBatch(ITEMS, TARGET, USER)
    assert float(model.training_loss(every).detach()) - ntp_alone(every) > 1e-2


def test_temperature_is_learned_between_its_bounds():
    reranker = PathReranker(8, 3)
    assert torch.allclose(reranker.tau(), torch.full((3,), 0.1))
    with torch.no_grad():
        reranker.log_tau.copy_(torch.tensor([-9.0, 0.0, 5.0]))
    assert torch.allclose(reranker.tau(), torch.tensor([0.03, 1.0, 1.0]))


def test_a_path_is_the_sum_of_its_codes():
    channel = build().channels[0]
    paths = channel.paths(torch.tensor([2, 0, 3]))
    third = channel.embedding.weight[channel.vocab.token(2, 3)]
    assert torch.allclose(paths[2], paths[1] + third, atol=1e-6)
    assert torch.allclose(channel.paths(torch.tensor([2, 0]))[-1], paths[1])


def test_disliked_items_are_further_negatives_of_their_user():
    batch, low = SIDBatch(ITEMS, TARGET, USER), torch.zeros(3, 2, dtype=torch.int64)
    plain = build().training_loss(batch)
    assert torch.allclose(build(low=low, disliked=True).training_loss(batch), plain)
    low[1] = torch.tensor([50, 51])
    assert float((build(low=low, disliked=True).training_loss(batch) - plain).detach()) > 1e-4
    only = torch.zeros_like(TARGET)
    only[0, -1] = 30
    low[1], alone = torch.tensor([30, 0]), SIDBatch(ITEMS, only, USER)  # the target's own path is no negative
    assert torch.allclose(build(low=low, disliked=True).training_loss(alone), build().training_loss(alone))
    with pytest.raises(ConfigError, match="not given"):
        build(disliked=True)


def test_context_vectors_rank_the_paths_of_a_beam():
    model = build()
    with torch.no_grad():
        memory = model.context(ITEMS)[0]
    channel, trie = model.channels[0], PrefixTrie.of(TABLES[0])
    alive = trie.alive(ITEMS)
    plain = constrained_beam(SIDStep(channel), memory, trie, 7, alive=alive)
    with torch.no_grad():
        guided = channel_beam(channel, memory, trie, 7, path_hook(channel, memory, 0.0), alive)
        assert torch.equal(guided.codes, plain.codes)
        assert torch.allclose(guided.logp, plain.logp)
        strong = channel_beam(channel, memory, trie, 7, path_hook(channel, memory, 2.0), alive)
    assert not torch.equal(strong.codes, plain.codes)
    kept = strong.found()
    exact = exhaustive_sid_scores(channel, memory, TABLES[0])
    items = trie.expand(strong.leaf[..., 0], 7)
    assert torch.allclose(strong.logp[kept], exact.gather(1, items)[kept], atol=1e-4)  # log p alone is carried on
    key = strong.logp + 2.0 * last_cosine(channel, memory, strong.codes)
    assert (key.diff(dim=1)[kept[:, 1:]] <= 1e-6).all()
    assert (strong.logp.diff(dim=1)[kept[:, 1:]] > 0).any()  # which is not the order of log p


@torch.no_grad()
def last_cosine(channel, memory, codes):
    """cos(u^3, v^3) float[B, w] of beams codes [B, w, 4]."""
    u = channel.reranker.u(2, channel.opening(memory))
    v = channel.reranker.v(2, channel.paths(codes[..., :3])[..., -1, :])
    return torch.einsum("bd,bwd->bw", u, v)


def planted(eta: float, preselect: int):
    """First codes kept by a beam of 3: code 3 has the fourth log-probability and the highest cosine."""
    table = resolve_collisions(np.arange(12)[:, None], (12,))
    trie, width = PrefixTrie.of(table), 3
    first = torch.tensor([5.0, 4.9, 4.8, 4.5, 3, 2, 1, 0.9, 0.8, 0.7, 0.6, 0.5])
    cosine = torch.linspace(-0.2, 0.2, 12)
    cosine[3] = 1.0
    vectors = torch.stack([cosine, (1 - cosine**2).sqrt()], dim=1)
    reranker = PathReranker(2, 1)
    with torch.no_grad():
        reranker.context[0].weight.copy_(torch.eye(2)), reranker.path[0].weight.copy_(torch.eye(2))
    channel = SimpleNamespace(
        reranker=reranker,
        opening=lambda memory: torch.tensor([[1.0, 0.0]]),
        paths=lambda codes: vectors[codes].cumsum(-2),
    )

    def step(codes, parent, state):
        if codes is None:
            return first.view(1, 1, -1), None
        return torch.zeros(1, codes.shape[1], 1), None

    hook = path_hook(channel, None, eta)
    beams = constrained_beam(step, None, trie, width, on_level=hook, preselect=preselect, offsets=[0, 0])
    return beams.codes[0, :, 0].tolist()


@torch.no_grad()
def test_planted_drift_is_mended_by_the_path():
    assert planted(0.0, 3) == [0, 1, 2]
    assert 3 in planted(5.0, 3)
    assert set(planted(5.0, 1)) == {0, 1, 2}  # without the wider pre-selection it is gone before it is judged
    assert planted(1e4, 3) == [3, 8, 7]  # by cosine only, among the nine likeliest


# Fusion and serving


def example(logp_a, logp_b):
    """A ranks x, y, z and B ranks z, w, x, with x, y, z, w = 1, 2, 3, 4."""
    return ChannelLists([np.array([[1, 2, 3]]), np.array([[3, 4, 1]])], [np.array([logp_a]), np.array([logp_b])])


def test_or_fusion_by_hand():
    lists = example([-1.0, -3.0, -4.0], [-0.5, -2.0, -6.0])
    assert fuse(lists, count=6, missing=51).tolist() == [[3, 1, 4, 2, 0, 0]]
    lists = example([-0.1, -1.5, -4.0], [-0.5, -2.0, -6.0])
    assert fuse(lists, count=4, missing=51).tolist() == [[1, 3, 2, 4]]
    assert fuse(lists, count=4).tolist() == [[1, 3, 2, 4]]


def test_other_fusions():
    lists = ChannelLists(
        [np.array([[5, 1, 2]]), np.array([[6, 2, 0]])], [np.array([[-1.0, -2, -3]]), np.array([[-1.5, -2.5, -np.inf]])]
    )
    assert fuse(lists, "or", 5).tolist() == [[5, 6, 2, 1, 0]]
    assert fuse(lists, "and", 5).tolist() == [[2, 5, 6, 1, 0]]
    assert fuse(lists, "logsum", 4).tolist() == [[5, 6, 1, 2]]
    both = math.log(math.exp(-3) + math.exp(-2.5))
    assert both < -2  # so that item 2 stays behind item 1 in the sum
    assert lists.overlap().tolist() == [pytest.approx(1 / 3)]
    assert fuse(lists.only(1), "or", 3).tolist() == [[6, 2, 0]]
    with pytest.raises(ValueError, match="unknown fusion"):
        fuse(lists, "xor")


def test_wide_beams_are_exhaustive_and_targets_survive_them(data):
    model, positions = build(), np.arange(8)
    search = DualSearch(model, data, TABLES, synthetic.ITEMS, CPU)
    for eta in (0.0, 1.0):
        found = search.lists("test", positions, eta, survival=True)
        memories = read_history(model, data, "test", positions, CONFIG.length, CPU)
        for channel, (items, table) in enumerate(zip(found.items, TABLES, strict=True)):
            exact = scorer(_One(model, channel), data, [table], CPU)("test", positions)
            if eta:  # every item by log p + eta cos(u^3, v^3)
                codes = torch.from_numpy(table.codes[1:].copy()).expand(len(positions), -1, -1)
                exact[:, 1:] += eta * last_cosine(model.channels[channel], memories[channel], codes).numpy()
            expected = top_items(exact, [data.history("test", i) for i in positions], 20)
            assert np.array_equal(items[:, :20], expected)
        assert all(s.all() for s in found.survived)
    narrow = DualSearch(model, data, TABLES, 5, CPU).lists("test", positions, 0.0, survival=True)
    target = data.test_target[positions]
    for items, survived in zip(narrow.items, narrow.survived, strict=True):
        assert np.array_equal(survived[:, -1], (items == target[:, None]).any(1))
        assert (np.diff(survived.astype(int), axis=1) <= 0).all()
    listed = search.lister(1.0)("test", positions)
    assert listed.shape == (8, 10)
    assert all(not np.isin(row, data.history("test", i)).any() for row, i in zip(listed, positions, strict=True))


class _One(torch.nn.Module):
    """One channel of a model, as a model."""

    def __init__(self, model: Barge, channel: int):
        super().__init__()
        self.model, self.channel, self.config = model, channel, model.config
        self.channels = [model.channels[channel]]

    def context(self, items, user):
        return (self.model.context(items)[self.channel],)


def test_watching_a_beam_changes_nothing():
    model, kept = build(), []
    with torch.no_grad():
        memory = model.context(ITEMS)[0]
        channel, trie = model.channels[0], PrefixTrie.of(TABLES[0])
        hook = path_hook(channel, memory, 1.0)
        plain = channel_beam(channel, memory, trie, 5, hook)
        looked = channel_beam(channel, memory, trie, 5, watched(hook, 5, plain.codes[:, 2], kept))
    assert torch.equal(plain.codes, looked.codes)
    assert torch.stack(kept).all()  # a path of the answer was never lost
    assert len(kept) == TABLES[0].levels


def test_survival_by_hand():
    kept = np.array([[[1, 1], [1, 0]], [[1, 0], [0, 0]]], dtype=bool)  # (channel, user, level)
    found = survival(kept)
    assert found["beam_prefix_survival@1"].tolist() == [1.0, 0.5]
    assert found["beam_prefix_survival@2"].tolist() == [0.5, 0.0]
    assert found["beam_prefix_survival_any@1"].tolist() == [1.0, 1.0]
    assert found["beam_prefix_survival_any@2"].tolist() == [1.0, 0.0]
    lists = ChannelLists([], [], list(kept))
    assert all(np.array_equal(lists.survival()[name], value) for name, value in found.items())


def test_expansions_by_hand():
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
    trie = PrefixTrie.of(resolve_collisions(codes, (2, 3)))  # root, 2 first codes, 5 pairs, a suffix each
    assert trie.levels == 3
    assert expansions(10, trie) == 1 + 2 + 5
    assert expansions(3, trie) == 1 + 2 + 3
    assert expansions(1, trie) == 3


def test_eta_is_chosen_as_served_and_the_smallest_of_equals(data):
    target, asked = data.valid_target, []

    def lister(eta):
        def answer(split, positions):
            asked.append((split, len(positions)))
            taken = [[*data.history("valid", i), target[i]] for i in positions]
            found = np.stack([np.setdiff1d(np.arange(1, data.n_items + 1), items)[:10] for items in taken])
            found[:, {0.0: 5, 0.5: 1, 1.0: 1, 2.0: 3}[eta]] = target[positions]
            return found

        return answer

    def trainer(hpr):
        return SimpleNamespace(
            ctx=SimpleNamespace(budget=SimpleNamespace(etas=[2.0, 1.0, 0.5, 0])),
            config=SimpleNamespace(hpr=hpr),
            sequences=data,
            served=lambda model: SimpleNamespace(lister=lister),
        )

    eta, found = Trainer.choose_eta(trainer(0.1), None)
    assert eta == 0.5
    assert found[0.0] < found[2.0] < found[1.0] == found[0.5]
    assert set(asked) == {("valid", len(data))}
    assert Trainer.choose_eta(trainer(0.0), None)[0] == 0.0


def test_one_channel_alone_is_trained_with_both_and_has_their_beams(data):
    trainer = object.__new__(Trainer)
    trainer.sequences, trainer.device, trainer.tables, trainer.used = data, CPU, TABLES, TABLES[:1]
    trainer.budget = SIDBudget(beam=6, validation_beam=5)
    model = build()
    assert trainer.served(model).width == 12
    assert len(trainer.served(model).tries) == 1
    alone = trainer.validation(model)
    trainer.used = TABLES
    assert trainer.served(model).width == 6
    assert trainer.validation(model) == alone


def test_disliked_items_come_from_the_train_part(data, monkeypatch):
    table = synthetic.interactions(users=20, ratings=30)
    monkeypatch.setattr("adapters.barge.experiment.load_interactions", lambda folder: table)
    found = disliked_items(SimpleNamespace(data=lambda name: name), data)
    for user, train in zip(data.users, data.train, strict=True):
        rated = {
            int(i): r for i, r in zip(table.item[table.user == user], table.rating[table.user == user], strict=True)
        }
        low = [int(i) for i in train if rated[int(i)] <= 2][-8:]
        assert found[user].tolist() == low + [0] * (8 - len(low))


@pytest.mark.parametrize("name", ["popularity", "itemknn", "ease", "sasrec"])
def test_baselines_report_the_metrics_of_the_generators(name, data, monkeypatch):
    def run(ctx, *, device, measure, **options):
        score = np.tile(np.arange(data.n_items + 1.0), (len(data), 1))
        return measure(lambda split, positions: score[positions], data)

    monkeypatch.setattr(getattr(experiment, f"{name}_baseline"), "run", run)
    genres = SimpleNamespace(item_genres=np.eye(data.n_items + 1))
    monkeypatch.setattr(experiment, "load_interactions", lambda folder: genres)
    measured = getattr(experiment, name)(SimpleNamespace(device="cpu", budget={}, data=lambda table: table))
    assert {"ndcg@10", "hit@10", "recall@5", "ndcg@5", "genre_entropy@10"} <= set(measured.metrics)
    assert measured.metrics["genre_entropy@10"] == pytest.approx(math.log(10))  # every item has a genre of its own


def test_tiger_has_the_beams_layers_and_gradient_bound_of_both_channels(data, monkeypatch):
    class Asked(Exception):
        pass

    def generator(ctx, table, **options):
        raise Asked(options)

    monkeypatch.setattr(experiment, "load_sequences", lambda ctx: data)
    monkeypatch.setattr(experiment, "load_codes", lambda ctx, name: (TABLES[:1], {}))
    monkeypatch.setattr(experiment, "further_metrics", lambda ctx: None)
    monkeypatch.setattr(experiment.tiger_baseline, "train_generator", generator)
    budget = Budget({"layers": 1, "beam": 50, "validation_beam": 20, "clip": 1.0})
    with pytest.raises(Asked) as asked:
        experiment.train_tiger(SimpleNamespace(budget=budget), CPU)
    options = asked.value.args[0]
    assert (options["beam"], options["validation_beam"], options["layers"]) == (100, 40, 2)
    assert options["clip"] == 4.0  # its loss adds up the four codes of a path
