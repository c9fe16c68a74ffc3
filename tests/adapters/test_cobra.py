"""COBRA: the mechanism tests of its card with their numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from contract_runs import Runs
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.cobra import experiment, serving
from adapters.cobra.model import Cobra, CobraBatch, CobraConfig, info_nce, unit
from adapters.cobra.serving import (
    NOTHING,
    Fusion,
    Server,
    beam_fusion,
    cell_facts,
    nearest_inside,
    phase_times,
    ranked,
    refined,
    search,
    tune,
    unfused,
)
from adapters.cobra.text_encoder import PackedTexts, TextEncoder
from auto_research.blocks.beam_search import constrained_beam
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import resolve_collisions
from auto_research.blocks.sid_models import SIDStep
from auto_research.blocks.title_encoder import encode_text_states, load_text_layers, word_pieces
from auto_research.data.sequences import LeaveTwoOut
from auto_research.experiment.card import find_card
from auto_research.metrics.ranking import top_items
from auto_research.runtime.errors import ConfigError, CorruptFile
from auto_research.runtime.paths import code_root
from auto_research.train.optimizer import adamw

CPU = torch.device("cpu")
ITEMS = 40
RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 4, (ITEMS, 2))
TABLE = resolve_collisions(CODES, (4, 4), "group", popularity=np.arange(ITEMS + 1))
SUFFIXED = resolve_collisions(CODES, (4, 4))
MASK = np.concatenate([np.zeros((1, 5), dtype=bool), np.arange(5) < RNG.integers(1, 6, (ITEMS, 1))])
STATES = RNG.normal(size=(ITEMS + 1, 5, 12)).astype(np.float32) * MASK[..., None]
TEXTS = PackedTexts(STATES, MASK)
CONFIG = CobraConfig(16, 2, 2, 32, 0.0, length=5)


def build(table=TABLE, **options) -> Cobra:
    """A model in evaluation mode with weights far from their small start."""
    torch.manual_seed(0)
    config = replace(CONFIG, **options)
    model = Cobra(table, config, TEXTS if config.dense else None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def windows(items, target) -> CobraBatch:
    return CobraBatch.of(np.array(items), np.array(target), TEXTS)


BATCH = windows([[0, 0, 3, 9, 17], [5, 6, 7, 8, 10]], [[0, 0, 9, 17, 2], [6, 7, 8, 10, 40]])


def walks() -> LeaveTwoOut:
    rows = [np.random.default_rng(user).permutation(ITEMS)[:12] + 1 for user in range(8)]
    return LeaveTwoOut(
        8, ITEMS, np.arange(1, 9), np.concatenate([w[:10] for w in rows]), np.arange(9) * 10,
        np.array([w[10] for w in rows]), np.array([w[11] for w in rows]), "walks",
    )  # fmt: skip


def server(**options) -> Server:
    served = Server(build(**options), walks(), PrefixTrie.of(TABLE), CPU)
    served.model.index()
    return served


# Batches and texts --------------------------------------------------------------------------------------------------


def test_batches_know_their_distinct_items():
    assert BATCH.items.tolist() == [[0, 0, 3, 9, 17, 2], [5, 6, 7, 8, 10, 40]]
    assert BATCH.row.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert BATCH.column.tolist() == [3, 4, 5, 1, 2, 3, 4, 5]
    distinct = np.unique(BATCH.items)
    assert np.array_equal(distinct[BATCH.index], BATCH.items)
    assert len(BATCH.text.mask) == len(distinct)


def test_the_encoder_is_a_transformer_layer_read_at_cls():
    """Against torch's own layer over padded texts: the shortcut (only CLS is computed) changes nothing."""
    torch.manual_seed(1)
    ours = TextEncoder(TEXTS, 16, 2, 32, 0.0).eval()
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True).eval()
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        pairs = [
            (layer.self_attn.out_proj, ours.mix), (layer.linear1, ours.ffn[0]), (layer.linear2, ours.ffn[2]),
            (layer.norm1, ours.norm_attention), (layer.norm2, ours.norm_ffn),
        ]  # fmt: skip
        for theirs, mine in pairs:
            theirs.load_state_dict(mine.state_dict())
    items = np.array([3, 7, 1, 0])
    states, mask = torch.from_numpy(STATES[items]), torch.from_numpy(MASK[items])
    x = torch.cat([ours.cls.expand(4, 1, -1), ours.project(states)], dim=1)
    hidden = torch.nn.functional.pad(~mask, (1, 0), value=False)
    expected = ours.out(ours.norm(layer(x, src_key_padding_mask=hidden)[:, 0]))
    torch.testing.assert_close(ours(TEXTS.batch(items)), expected, atol=1e-5, rtol=1e-4)


# Who depends on what ------------------------------------------------------------------------------------------------


def probe(model: Cobra, batch: CobraBatch, vectors: torch.Tensor, column: int = 3):
    """Logits of both codes and vhat of the item at a column of the second row."""
    states = model.states(batch, vectors)[1]
    before = column * model.sid.per_item
    logits = [model.sid.logits(states[before + level], level) for level in range(model.sid.ids)]
    known = 0 if model.config.parallel else model.sid.ids
    return [*logits, model.dense_head(states[before + known])]


@torch.no_grad()
def test_what_each_prediction_knows():
    model = build()
    vectors = model.vectors(BATCH.text)
    base = probe(model, BATCH, vectors)
    item = int(BATCH.items[1, 3])
    other_vector = vectors.clone()
    other_vector[BATCH.index[1, 3:]] += 1.0  # v of the target and of everything later
    assert all(torch.equal(a, b) for a, b in zip(base, probe(model, BATCH, other_vector), strict=True))
    tokens = model.tokens[item].clone()
    for level, changed in ((0, (False, True, True)), (1, (False, False, True))):
        model.tokens[item] = tokens
        model.tokens[item, level] = model.sid.vocab.token(level, (CODES[item - 1, level] + 1) % 4)
        after = probe(model, BATCH, vectors)
        assert tuple(not torch.equal(a, b) for a, b in zip(base, after, strict=True)) == changed
    model.tokens[item] = tokens
    later = int(BATCH.items[1, 4])
    model.tokens[later] = model.sid.vocab.token(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(base, probe(model, BATCH, vectors), strict=True))
    earlier = vectors.clone()
    earlier[BATCH.index[1, 2]] += 1.0
    assert not any(torch.equal(a, b) for a, b in zip(base, probe(model, BATCH, earlier), strict=True))


@torch.no_grad()
def test_in_parallel_the_vector_does_not_know_the_id():
    model = build(parallel=True)
    vectors = model.vectors(BATCH.text)
    base = probe(model, BATCH, vectors)
    model.tokens[int(BATCH.items[1, 3])] = model.sid.vocab.token(0, 0)
    assert torch.equal(base[-1], probe(model, BATCH, vectors)[-1])
    ctx = model.index() is not None and model.context(BATCH.items[:, :5])
    both = model.expected(ctx, torch.tensor([[[0, 0], [3, 3]]]).expand(2, -1, -1))
    assert torch.equal(both[:, 0], both[:, 1])
    wise = build()
    wise.index()
    both = wise.expected(wise.context(BATCH.items[:, :5]), torch.tensor([[[0, 0], [3, 3]]]).expand(2, -1, -1))
    assert not torch.allclose(both[:, 0], both[:, 1])


def test_padding_changes_nothing():
    model = build()
    short = windows([[3, 9, 17]], [[9, 17, 2]])
    wide = windows([[0, 0, 3, 9, 17]], [[0, 0, 9, 17, 2]])
    model.tokens[0] = 1
    torch.testing.assert_close(model.losses(short)["loss"], model.losses(wide)["loss"])


# Losses -------------------------------------------------------------------------------------------------------------


def gradient(model: Cobra, detach: str = "") -> float:
    """Norm of the encoder's gradient after the dense loss, one side of the vectors detached."""
    model.zero_grad()
    v = model.vectors(BATCH.text)
    states = model.states(BATCH, v.detach() if detach == "inputs" else v)
    vhat = model.dense_head(states[BATCH.row, BATCH.column * model.sid.per_item + model.sid.ids])
    targets = v.detach() if detach == "targets" else v
    loss = info_nce(vhat, targets[1:], BATCH.index[BATCH.row, BATCH.column] - 1, 0.1)
    if not loss.requires_grad:
        return 0.0
    loss.backward()
    return sum(float(p.grad.abs().sum()) for p in model.text.parameters() if p.grad is not None)


def test_the_text_encoder_learns_from_inputs_and_from_targets():
    model = build()
    assert gradient(model, "inputs") > 0
    assert gradient(model, "targets") > 0
    frozen = build(frozen=True)
    assert gradient(frozen) == 0
    frozen.training_loss(BATCH).backward()
    assert all(p.grad is None for p in frozen.text.parameters())


def test_frozen_vectors_are_constant_in_training():
    frozen, trained = build(frozen=True, dropout=0.1).train(), build(dropout=0.1).train()
    assert torch.equal(frozen.vectors(BATCH.text), frozen.vectors(BATCH.text))
    assert not torch.equal(trained.vectors(BATCH.text), trained.vectors(BATCH.text))
    assert frozen.sid.dropout.rate == 0.1


def test_vectors_start_small_and_without_a_bias():
    torch.manual_seed(0)
    model = Cobra(TABLE, replace(CONFIG, frozen=True), TEXTS)
    assert not model.text.out.bias.any()
    assert 0.04 < model.vectors(TEXTS.batch(np.arange(1, ITEMS + 1))).std() < 0.12


def test_loss_terms_by_hand():
    model = build()
    terms = model.losses(BATCH)
    vectors = model.vectors(BATCH.text)
    states, sparse, dense = model.states(BATCH, vectors), [], []
    for row, column in zip(BATCH.row.tolist(), BATCH.column.tolist(), strict=True):
        codes = CODES[int(BATCH.items[row, column]) - 1]
        hidden = states[row, 3 * column :]
        for level in range(2):
            sparse.append(-model.sid.heads[level](hidden[level]).log_softmax(-1)[codes[level]])
        cosine = unit(model.dense_head(hidden[2])) @ unit(vectors[1:]).T / 0.1
        dense.append(-cosine.log_softmax(-1)[BATCH.index[row, column] - 1])
    torch.testing.assert_close(terms["sparse"], torch.stack(sparse).sum() / len(dense))
    torch.testing.assert_close(terms["dense"], torch.stack(dense).mean())
    torch.testing.assert_close(terms["loss"], terms["sparse"] + terms["dense"])


class ShapesFromValues(TorchDispatchMode):
    """Counts the operations whose result has a shape, or becomes a number, that only the device knows."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(part is not None and part.dtype == torch.bool for part in args[1])
        if by_mask or name in ("nonzero", "masked_select", "unique", "_unique2", "_local_scalar_dense"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_no_shape():
    model = build().train()
    with ShapesFromValues() as spy:
        model.training_loss(BATCH).backward()
    assert spy.found == []
    with ShapesFromValues() as spy:
        BATCH.items[BATCH.items > 0].sum()
    assert spy.found == ["index"]


def test_one_distinct_item_has_nothing_to_repel():
    model = build()
    one = windows([[7, 7], [7, 7]], [[7, 7], [7, 7]])
    assert model.losses(one)["dense"].item() == 0.0


@pytest.mark.parametrize("options", [{"ids": False}, {"dense": False, "dense_weight": 0.0}])
def test_tokens_that_are_taken_away(options):
    model = build(SUFFIXED if "dense" in options else TABLE, **options)
    batch = (
        BATCH if model.config.dense else CobraBatch.of(BATCH.items[:, :-1].numpy(), BATCH.items[:, 1:].numpy(), None)
    )
    terms = model.losses(batch)
    assert (terms["sparse"] == 0) == (not model.config.ids)
    assert (terms["dense"] == 0) == (not model.config.dense)
    terms["loss"].backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


# Serving ------------------------------------------------------------------------------------------------------------


PHI = torch.tensor([[0.6, 0.4]]).log()
COSINE = torch.tensor([[[0.9, 0.1], [0.5, NOTHING]]])
PLACES = torch.tensor([[[11, 12], [13, 0]]])


def test_beam_fusion_by_hand():
    score = beam_fusion(PHI, COSINE, 1.0, 1.0)
    torch.testing.assert_close(score, torch.tensor([[[0.2831, 0.1272], [0.1265, 0.0]]]), atol=5e-5, rtol=0)
    candidates = 2 * beam_fusion(PHI, COSINE, 0.0, 1.0)  # tau 0: both beams weigh one half
    torch.testing.assert_close(candidates, torch.tensor([[[0.4718, 0.2120], [0.3162, 0.0]]]), atol=5e-5, rtol=0)
    assert ranked(score, PLACES, 4).tolist() == [[11, 12, 13, 0]]


def test_limits_of_beam_fusion():
    cosine = torch.tensor([[[0.1, 0.0], [0.9, 0.8]]])
    items = torch.tensor([[[1, 2], [3, 4]]])
    by_beam = beam_fusion(PHI, cosine, 1.0, 0.0)
    assert (by_beam[0, 0] == by_beam[0, 0, 0]).all()
    assert ranked(by_beam, items, 4).tolist() == [[1, 2, 3, 4]]
    assert ranked(beam_fusion(PHI, cosine, 0.0, 16.0), items, 4).tolist() == [[3, 4, 1, 2]]
    assert ranked(unfused(PHI, cosine), items, 4).tolist() == [[1, 2, 3, 4]]
    assert ranked(unfused(PHI, COSINE), PLACES, 4).tolist() == [[11, 12, 13, 0]]


def test_all_cells_and_all_items_are_the_whole_catalogue():
    served, positions = server(), np.arange(3)
    model, fusion = served.model, Fusion()
    ctx, seen = served.read("test", positions)
    cosine = torch.full((3, ITEMS + 1), NOTHING)
    phi = torch.full((3, ITEMS + 1), NOTHING)
    with torch.no_grad():
        for item in range(1, ITEMS + 1):
            codes = model.codes[item].expand(3, 1, -1)
            cosine[:, item] = (unit(model.expected(ctx, codes)[:, 0]) * unit(model.catalogue[item])).sum(-1)
            logits = model.sid.path_logits(ctx, codes)
            phi[:, item] = sum(
                part[:, 0].log_softmax(-1)[torch.arange(3), codes[:, 0, n]] for n, part in enumerate(logits)
            )
    cosine.scatter_(1, seen, NOTHING)
    cosine[:, 0] = NOTHING
    beam = torch.zeros(3, ITEMS + 1)
    for row in range(3):
        live = {tuple(CODES[item - 1]) for item in range(1, ITEMS + 1) if cosine[row, item] > NOTHING}
        where = {cell: next(i for i in range(1, ITEMS + 1) if tuple(CODES[i - 1]) == cell) for cell in live}
        total = torch.stack([fusion.tau * phi[row, item] for item in where.values()]).logsumexp(0)
        beam[row] = (fusion.tau * phi[row] - total).exp()
    expected = beam * (fusion.psi * cosine).masked_fill(cosine == NOTHING, -torch.inf).softmax(-1)
    found = served.scorer(fusion)("test", positions)
    offered = cosine > NOTHING
    torch.testing.assert_close(torch.from_numpy(found)[offered], expected[offered], atol=1e-6, rtol=1e-3)
    assert np.isneginf(found[:, 0]).all()
    lists = served.lister(fusion, cells=16, inside=ITEMS)("test", positions)
    history = [served.sequences.history("test", i) for i in positions]
    assert np.array_equal(lists, top_items(np.where(np.isneginf(found), -1, found), history, 10))


def test_candidates_of_a_beam_lie_in_its_cell():
    served, positions = server(), np.arange(4)
    found = served.find("test", positions, cells=5, inside=3)
    leaf = served.trie.leaf_of[found.items]
    real = found.items > 0
    assert real.any()
    assert (leaf == found.leaf.unsqueeze(-1))[real].all()
    for row, position in enumerate(positions):
        kept = found.items[row][real[row]].tolist()
        assert len(set(kept)) == len(kept)
        assert not set(kept) & set(served.sequences.history("test", position).tolist())


def test_fusion_changes_the_order_only():
    served, positions = server(), np.arange(6)
    fused = served.lister(Fusion(), cells=16, inside=ITEMS, count=29)("test", positions)
    plain = served.lister(Fusion(fused=False), cells=16, inside=ITEMS, count=29)("test", positions)
    assert not np.array_equal(fused, plain)
    assert np.array_equal(np.sort(fused, axis=1), np.sort(plain, axis=1))


@torch.no_grad()
def test_one_cached_step_is_the_full_pass():
    served, positions = server(), np.arange(3)
    model = served.model
    ctx, seen = served.read("test", positions)
    beams = constrained_beam(SIDStep(model.sid), ctx, served.trie, 4, alive=served.trie.alive(seen))
    fast = refined(model, beams)
    torch.testing.assert_close(fast, model.expected(ctx, beams.codes), atol=1e-4, rtol=0)
    for row in range(3):
        history = served.sequences.history("test", row)[-5:]
        for k in range(4):
            item = int(served.trie.group[beams.leaf[row, k, 0], 0])  # any item of the cell
            batch = windows([history], [[*history[1:], item]])
            states = model.states(batch, model.vectors(batch.text))
            whole = model.dense_head(states[0, -2])  # the last code of the last item
            torch.testing.assert_close(fast[row, k], whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_in_parallel_one_vector_searches_every_cell():
    served, positions = server(parallel=True), np.arange(3)
    model = served.model
    ctx, seen = served.read("test", positions)
    found = search(model, served.trie, ctx, seen, cells=5, inside=ITEMS)
    real = found.items > 0
    assert real.any(2).all()
    for row in range(3):
        history = served.sequences.history("test", row)
        batch = windows([history[-5:]], [[*history[-4:], 1]])
        newest = model.states(batch, model.vectors(batch.text))[0, 5 * model.sid.per_item]
        vhat = model.dense_head(newest)
        cosine = torch.nn.functional.cosine_similarity(vhat, model.catalogue)
        torch.testing.assert_close(found.cosine[row][real[row]], cosine[found.items[row][real[row]]], atol=1e-5, rtol=0)
        for k in range(5):
            group = served.trie.group[found.leaf[row, k]].tolist()
            fresh = [item for item in group if item and item not in history]
            best = sorted(fresh, key=lambda item: -float(cosine[item]))
            assert found.items[row, k][real[row, k]].tolist() == best


@torch.no_grad()
def test_search_without_ids_is_a_cosine_with_every_unseen_item():
    served = Server(build(ids=False), walks(), PrefixTrie.of(TABLE), CPU)
    lists, model = served.dense_lister(12)("test", np.arange(3)), served.model
    for row in range(3):
        history = served.sequences.history("test", row)
        batch = windows([history[-5:]], [[*history[-4:], 1]])
        vhat = model.dense_head(model.states(batch, model.vectors(batch.text))[0, -2])  # the newest item's vector
        cosine = torch.nn.functional.cosine_similarity(vhat, model.vectors(TEXTS.batch(np.arange(ITEMS + 1))))
        cosine[torch.tensor([0, *history])] = -2.0
        assert lists[row].tolist() == cosine.argsort(descending=True)[:12].tolist()


def test_facts_and_tuning_are_finite_and_consistent():
    served = server()
    fusion, values = tune(served, cells=16, inside=ITEMS)
    assert len(values) == 9
    assert values[f"tau {fusion.tau:g}, psi {fusion.psi:g}"] == max(values.values())
    facts = cell_facts(served, cells=16)
    assert facts["cell_hit_rate"] == 1.0  # every cell is a beam
    assert 0 < facts["in_cell_mrr"] <= 1
    found = search(served.model, served.trie, *served.read("test", np.arange(2)), cells=16, inside=2)
    assert found.items.shape == (2, 16, 2)


def test_in_cell_rank_by_hand_and_nothing_for_a_target_that_may_not_be_offered():
    served = server()
    sequences, inverse = served.sequences, []
    for row in range(len(sequences)):
        target, history = int(sequences.test_target[row]), sequences.history("test", row)
        ctx, _ = served.read("test", np.array([row]))
        with torch.no_grad():
            vhat = served.model.expected(ctx, served.model.codes[target].view(1, 1, -1))[0, 0]
        group = served.trie.group[served.trie.leaf_of[target]].tolist()
        offered = [item for item in group if item and item not in history]
        cosine = torch.nn.functional.cosine_similarity(vhat, served.model.catalogue)
        inverse.append(1 / sum(bool(cosine[item] >= cosine[target]) for item in offered))
    assert cell_facts(served, cells=4)["in_cell_mrr"] == pytest.approx(np.mean(inverse))
    again = sequences.train_items.reshape(len(sequences), -1)[:, 0]  # an item of the history, so not offered
    repeated = served._replace(sequences=replace(sequences, test_target=again))
    assert cell_facts(repeated, cells=4)["in_cell_mrr"] == 0.0


def test_each_phase_has_its_own_clock(monkeypatch):
    """Every part of an answer moves a clock that nothing else moves; 8 users."""
    clock, served = [0.0], server()

    def costs(owner, name: str, seconds: float) -> None:
        part = getattr(owner, name)

        def slow(*args, **options):
            clock[0] += seconds
            return part(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr(serving.time, "perf_counter", lambda: clock[0])
    costs(Cobra, "index", 0.5)
    costs(Server, "read", 8)
    costs(serving, "constrained_beam", 16)
    costs(serving, "refined", 32)
    costs(serving, "nearest_inside", 64)
    costs(Fusion, "score", 128)
    costs(serving, "ranked", 256)
    assert phase_times(served, Fusion(), cells=4, inside=3) == {
        "read_ms": 1e3, "beam_ms": 2e3, "refine_ms": 4e3, "search_ms": 8e3, "fuse_ms": 48e3, "index_ms": 500.0,
    }  # fmt: skip


def test_the_phases_are_those_of_the_card():
    efficiency = find_card(code_root(), "cobra").facts["metrics"]["efficiency"]
    named = {name for name in efficiency if name.endswith("_ms")}
    assert named == set(phase_times(server(), Fusion(), cells=4, inside=3))


# Learning -----------------------------------------------------------------------------------------------------------


def test_learns_windows_by_heart():
    """64 windows: the first cell right for 95 percent and the item first inside its true cell for 90 percent."""
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    items = np.stack([rng.permutation(ITEMS)[:4] + 1 for _ in range(64)])
    config = replace(CONFIG, width=32, hidden=64, length=3)
    model = Cobra(TABLE, config, TEXTS)
    target = np.zeros((64, 3), dtype=np.int64)
    target[:, -1] = items[:, 3]
    batch = CobraBatch.of(items[:, :3], target, TEXTS)
    optimizer = adamw(model, 5e-3)
    for _ in range(250):
        optimizer.zero_grad()
        loss = model.training_loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.index()
    with torch.no_grad():
        ctx = model.context(batch.items[:, :3])
    trie = PrefixTrie.of(TABLE)
    none = torch.zeros(64, 1, dtype=torch.int64)
    found = search(model, trie, ctx, none, cells=1, inside=ITEMS)
    wanted = batch.items[:, 3]
    hit = found.leaf[:, 0] == trie.leaf_of[wanted]
    assert hit.float().mean() >= 0.95
    with torch.no_grad():
        vhat = model.expected(ctx, model.codes[wanted].unsqueeze(1))
    inside = nearest_inside(vhat, model.catalogue, trie, trie.leaf_of[wanted].unsqueeze(1), none, ITEMS)[1]
    assert (inside[:, 0, 0] == wanted).float().mean() >= 0.9


@pytest.fixture(scope="module")
def runs(tmp_path_factory, movielens_100k):
    root = tmp_path_factory.mktemp("data")
    (root / "movielens-100k").symlink_to(movielens_100k)
    return Runs(find_card(code_root(), "cobra"), experiment.experiment, tmp_path_factory.mktemp("cobra"), root)


def test_fused_and_unfused_are_one_training(runs):
    fused, plain = (runs.watch(name) for name in ("cobra", "cobra_wo_beamfusion"))
    assert fused.steps == plain.steps
    assert fused.trained.validation == plain.trained.validation
    assert all(torch.equal(value, plain.trained.weights[name]) for name, value in fused.trained.weights.items())
    both = [runs.first("arm", name) for name in ("cobra", "cobra_wo_beamfusion")]
    loss = [[epoch["loss"] for epoch in run["curve"]] for run in both]
    assert loss[0] == loss[1]
    assert ["fusion" in run["extra"] for run in both] == [True, False]


@pytest.mark.parametrize("name", ["cobra", "cobra_wo_id", "tiger", "sasrec", "ease", "itemknn", "popularity"])
def test_arms_have_the_metrics_of_the_card(runs, name):
    """All but those of cells, which only the cascade has; recall does not fall with the length of the list."""
    metrics = runs.first("arm", name)["metrics"]
    wanted = set(runs.card.facts["metrics"]["also"])
    if name != "cobra":
        wanted -= {"cell_hit_rate", "in_cell_mrr"}
    assert wanted <= set(metrics)
    assert metrics["recall@5"] <= metrics["hit@10"]
    assert metrics["recall@50"] <= metrics["recall@100"]


def test_the_epoch_is_chosen_with_fusion_in_both_arms(runs, monkeypatch, tmp_path):
    used, answer = [], experiment.lister_of

    def seen(server, fusion, *rest):
        used.append(fusion)
        return answer(server, fusion, *rest)

    monkeypatch.setattr(experiment, "lister_of", seen)
    runs.seen("cobra_wo_beamfusion", "chosen", "trained", workdir=tmp_path)
    assert used
    assert set(used) == {Fusion()}


def test_validation_uses_its_own_beam(runs, monkeypatch):
    """The ids-only arm searches with validation_beam while it trains and with beam at the end."""
    widths = []
    wide = experiment.beam_lister

    def seen(*args, width: int, **options):
        widths.append(width)
        return wide(*args, width=width, **options)

    monkeypatch.setattr(experiment, "beam_lister", seen)
    monkeypatch.setitem(runs.card.facts["budgets"]["tiny"], "beam", 12)
    runs.first("arm", "cobra_wo_dense")
    assert widths[-2:] == [12, 100]
    assert set(widths[:-2]) == {10}


def test_every_arm_of_the_card_has_a_function():
    card = find_card(code_root(), "cobra")
    assert set(experiment.experiment.arms) == set(card.arms)
    assert set(experiment.experiment.artifacts) == set(card.artifacts)


# Training the pretrained encoder


@pytest.fixture(scope="module")
def titles(pretrained):
    """Texts of the catalogue with their word pieces and the states that the frozen encoder gives them."""
    texts = [f"Film number {item}, a story of {item * 7}" for item in range(1, ITEMS + 1)]
    states, mask = encode_text_states(pretrained["text_encoder"], texts)
    states, mask = (np.concatenate([np.zeros_like(a[:1]), a]) for a in (states, mask))
    return PackedTexts(states, mask, word_pieces(pretrained["text_encoder"], texts, mask)), texts, mask


def tuned(titles, pretrained, **options) -> Cobra:
    torch.manual_seed(0)
    config = replace(CONFIG, finetuned=True, **options)
    encoder = load_text_layers(pretrained["text_encoder"], config.text_layers)
    return Cobra(TABLE, config, titles[0], encoder)


def test_the_untrained_encoder_gives_the_stored_states(titles, pretrained):
    model, frozen = tuned(titles, pretrained).eval(), Cobra(TABLE, CONFIG, titles[0]).eval()
    frozen.load_state_dict(model.state_dict(), strict=False)
    batch = titles[0].batch(np.array([0, 3, 17, 40]))
    with torch.no_grad():
        assert torch.allclose(model.text.read(batch), frozen.text.read(batch), atol=1e-4)
        assert torch.allclose(model.vectors(batch), frozen.vectors(batch), atol=1e-4)
        assert torch.isfinite(model.index()).all()


def test_a_step_trains_the_encoder_and_its_vectors_follow(titles, pretrained):
    model = tuned(titles, pretrained, text_layers=1).train()
    assert len(model.text.pretrained.encoder.layer) == 1
    items, target = [[3, 9, 17, 2, 5]], [[9, 17, 2, 5, 21]]
    batch = CobraBatch.of(np.array(items), np.array(target), titles[0])
    before = model.text.read(batch.text).detach()
    optimizer = adamw(model, 1e-2)
    model.training_loss(batch).backward()
    learning = {name for name, p in model.text.pretrained.named_parameters() if p.grad is not None and p.grad.any()}
    assert {n.split(".")[0] for n in learning} == {"embeddings", "encoder"}
    optimizer.step()
    assert not torch.allclose(model.text.read(batch.text), before, atol=1e-3)


def test_another_tokenizer_and_impossible_arms_are_refused(titles, pretrained):
    with pytest.raises(CorruptFile, match="tokenizer"):
        word_pieces(pretrained["text_encoder"], [*titles[1][:-1], "a"], titles[2])
    with pytest.raises(ConfigError, match="7 layers of an encoder that has 6"):
        load_text_layers(pretrained["text_encoder"], 7)
    for options in ({"frozen": True}, {"dense": False}):
        with pytest.raises(ValueError, match="trained"):
            replace(CONFIG, finetuned=True, **options)
