"""Mechanism tests of card mixformer, with the numbers of its specification."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.mixformer import experiment
from adapters.mixformer.experiment import ALL_HEADS, CANDIDATES, inspect, matched_stacked
from adapters.mixformer.model import SWITCHES, MixFormer, MixFormerConfig
from auto_research.blocks.two_sided import DecoupledHeadShuffle
from auto_research.data.requests import RequestTable
from auto_research.evaluate.ctr import split_pairs
from auto_research.evaluate.serving import SHARED
from auto_research.experiment.card import TIERS, load_card
from auto_research.experiment.context import Budget, Context
from auto_research.experiment.contract import Measurement
from auto_research.metrics.cost import flops_of
from auto_research.train.state import StateFolder

CARD = load_card(Path(experiment.__file__).parent)
CPU = torch.device("cpu")
LENGTH = 20
SMALL = MixFormerConfig(width=16, blocks=2, head_hidden=16, history=LENGTH, dropout=0.1)
LISTED = [{switch: name} for switch in SWITCHES for name in SWITCHES[switch] if name != getattr(SMALL, switch)]
DECOUPLED = [
    {"decoupled": True},
    *({"decoupled": True} | s for s in LISTED if s not in ({"mixing": "attention"}, {"heads": "joint"})),
]
EVERY = [{}, *LISTED, *DECOUPLED]


def named(switches: dict) -> str:
    return "-".join(str(v) for v in switches.values()) or "default"


@pytest.fixture(scope="module")
def table():
    return synthetic.request_table()


@pytest.fixture(scope="module")
def batch(table):
    return synthetic.training_batch(table, history=LENGTH)


@pytest.fixture(scope="module")
def fifty(table):
    """One request with 50 candidates."""
    return table.score_batch(int(table.requests("test")[3]), np.arange(1, 51), history=LENGTH)


def build(table, config=SMALL, seed=0, **switches) -> MixFormer:
    torch.manual_seed(seed)
    return MixFormer(replace(config, **switches), table.vocab, table.item_genres).eval()


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


def heads_by_block(model: MixFormer, batch) -> list[torch.Tensor]:
    """Outputs [N, P, D] of every block in the definition's form."""
    outputs = []
    hooks = [b.register_forward_hook(lambda module, inputs, output: outputs.append(output)) for b in model.blocks]
    model.recompute(batch)
    for hook in hooks:
        hook.remove()
    return outputs


# Head mixing


def test_head_mixing_by_hand():
    x = torch.arange(1.0, 17).reshape(4, 1, 4)
    assert DecoupledHeadShuffle(4, 4, 4)(x).reshape(4, 4).tolist() == [
        [1, 5, 9, 13],
        [2, 6, 10, 14],
        [3, 7, 11, 15],
        [4, 8, 12, 16],
    ]
    masked = DecoupledHeadShuffle(4, 4, 2)(x).reshape(4, 4).tolist()
    assert masked == [[1, 5, 0, 0], [2, 6, 0, 0], [3, 7, 11, 15], [4, 8, 12, 16]]


def test_a_block_is_the_equation(table, batch):
    model = build(table)
    block, (n, d) = model.blocks[0], (8, 16)
    x, of = torch.randn(n, batch.pairs(), d), batch.request_of
    with torch.no_grad():
        _, events, mask = model.sequence(batch)
        r = block.mix_norm(x)
        mixed = torch.stack([torch.cat([r[t, :, 2 * h : 2 * h + 2] for t in range(n)], dim=1) for h in range(n)])
        p = x + mixed

        def swiglu(ffn, z):
            sides = [ffn.user, ffn.item]
            up = torch.cat([s.up.weight for s in sides]), torch.cat([s.up.bias for s in sides])
            down = torch.cat([s.down.weight for s in sides]), torch.cat([s.down.bias for s in sides])
            gate, value = (z @ up[0] + up[1]).chunk(2, dim=2)
            return (F.silu(gate) * value) @ down[0] + down[1]

        q = p + swiglu(block.query_ffn, block.query_norm(p))
        hs = events + block.event_ffn(block.event_norm(events))
        s = block.source_norm(hs).unflatten(2, (n, d))  # (R, L, N, D)
        k, v = torch.einsum("rlnd,nde->rlne", s, block.reading.kv).chunk(2, dim=3)
        score = torch.einsum("npd,plnd->pnl", block.read_norm(q), k[of]) / d**0.5
        weight = torch.softmax(score.masked_fill(~mask[of].unsqueeze(1), -torch.inf), dim=2)
        z = q + torch.einsum("pnl,plnd->npd", weight, v[of])
        expected = z + swiglu(block.fusion, block.fusion_norm(z))
        assert torch.allclose(block(x, block.keys(events, mask), of), expected, atol=1e-5)


def test_heads_are_private_without_mixing(table, fifty):
    """With identity mixing head i's output depends only on piece i and the sequence."""
    model = build(table, mixing="identity")
    fields, events, mask = model.sequence(fifty)
    fields, item = fields.detach().requires_grad_(), model.candidate(fifty).detach().requires_grad_()
    x = model.heads(fields, item, fifty.request_of)
    for block in model.blocks:
        x = block(x, block.keys(events, mask), fifty.request_of)
    for head in range(8):
        torch.manual_seed(head)
        value = (x[head] @ torch.randn(16)).sum()
        leaves = (fields, item, model.null.event)
        found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        user, pair, null = (torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))
        pieces = [bool(piece.any()) for piece in (*user.split(36, dim=1), *pair.split(20, dim=1))]
        assert pieces == [i == head for i in range(8)]
        assert null.any()


def test_mixing_joins_the_heads(table, fifty):
    model = build(table)
    item = model.candidate(fifty).detach()
    fields, events, mask = model.sequence(fifty)
    fields = fields.detach().requires_grad_()
    x = model.heads(fields, item, fifty.request_of)
    block = model.blocks[0]
    out = block(x, block.keys(events, mask), fifty.request_of)
    (gradient,) = torch.autograd.grad((out[0] @ torch.randn(16)).sum(), fields)
    assert all(piece.abs().sum() > 0 for piece in gradient.sum(0).split(36))


def test_attention_mixing_is_the_equation(table, batch):
    """P = X + attention over the heads of RMSNorm(X), 4 attention heads."""
    model = build(table, mixing="attention")
    block, x = model.blocks[0], torch.randn(8, batch.pairs(), 16)
    seen = []
    block.query_norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        _, events, mask = model.sequence(batch)
        block(x, block.keys(events, mask), batch.request_of)
        r = x / (x.square().mean(2, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * block.mix_norm.weight
        q, k, v = (part.unflatten(2, (4, 4)) for part in block.mixer.qkv(r).chunk(3, dim=2))  # each (N, P, 4, D / 4)
        weight = torch.softmax(torch.einsum("npad,mpad->panm", q, k) / 2, dim=3)
        expected = x + block.mixer.out(torch.einsum("panm,mpad->npad", weight, v).flatten(2))
    assert torch.allclose(seen[0], expected, atol=1e-5)


@pytest.mark.parametrize("heads", ["joint", "pieces"])
def test_a_joint_head_reads_every_piece(table, fifty, heads):
    model = build(table, heads=heads)
    user, _, _ = model.sequence(fifty)
    user, item = user.detach().requires_grad_(), model.candidate(fifty).detach().requires_grad_()
    x = model.heads(user, item, fifty.request_of)
    found = torch.autograd.grad((x[0] @ torch.randn(16)).sum(), (user, item), allow_unused=True, materialize_grads=True)
    read = [bool(piece.any()) for piece in (*found[0].split(36, dim=1), *found[1].split(20, dim=1))]
    assert read == ([True] * 8 if heads == "joint" else [True] + [False] * 7)
    if heads == "joint":
        layer = model.heads.project
        whole = torch.cat([user[fifty.request_of], item], dim=1) @ torch.cat([layer.request, layer.pair]) + layer.bias
        assert torch.allclose(x[3], whole[:, 48:64], atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "flatten"])
def test_mean_pooling_does_not_tell_the_heads_apart(table, batch, pooling):
    model, own = build(table, pooling=pooling), torch.arange(batch.pairs())
    with torch.no_grad():
        x = heads_by_block(model, batch)[-1]
        permuted = x[torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])]
        out = [model.head(heads[:4], heads[4:], own) for heads in (x, permuted)]
        assert torch.equal(out[0], model.recompute(batch))
        if pooling == "mean":
            expected = model.head.last(F.silu(model.head.first(x.mean(0))))
            assert torch.allclose(out[0], expected, atol=1e-5)
    assert torch.allclose(*out, atol=1e-5) == (pooling == "mean")


# Decoupling


def test_decoupled_user_heads_do_not_know_the_candidate(table, fifty):
    for output in heads_by_block(build(table, decoupled=True), fifty):
        user, item = output[:4], output[4:]
        assert torch.allclose(user, user[:, :1].expand_as(user), atol=1e-6)
        assert not torch.allclose(item, item[:, :1].expand_as(item), atol=1e-3)
    plain = heads_by_block(build(table), fifty)
    for output in plain:
        assert not torch.allclose(output[:4], output[:4, :1].expand_as(output[:4]), atol=1e-3)


@pytest.mark.parametrize(("decoupled", "depends"), [(True, False), (False, True)])
def test_gradient_of_user_heads_with_respect_to_the_candidate(table, fifty, decoupled, depends):
    model = build(table, decoupled=decoupled)
    seen = []
    inner = model.candidate

    def candidate(batch):
        seen.append(inner(batch).detach().requires_grad_())
        return seen[0]

    model.candidate = candidate
    for output in heads_by_block(model, fifty):
        value = (output[:4] @ torch.randn(16)).sum()
        (gradient,) = torch.autograd.grad(value, seen, retain_graph=True, allow_unused=True)
        assert (gradient is not None and gradient.abs().sum().item() > 0) == depends


@pytest.mark.parametrize("switches", EVERY, ids=named)
def test_serving_equals_the_definition(table, batch, switches):
    """200 (request, candidate) pairs: cached user heads give the logits of the masked network."""
    model = build(table, **switches)
    requests = [int(r) for r in table.requests("test")[:4]]
    with torch.no_grad():
        for request in requests:
            one = table.score_batch(request, np.arange(1, 51), history=LENGTH)
            state = model.prepare(one)
            served = torch.cat([model.score(state, part) for part in split_pairs(one, 16)])
            assert torch.allclose(served, model.recompute(one), atol=1e-5)
        assert torch.allclose(model(batch), model.recompute(batch), atol=1e-5)


def test_decoupling_changes_the_model(table, batch):
    plain, decoupled = build(table), build(table, decoupled=True)
    decoupled.load_state_dict(plain.state_dict())
    assert not torch.allclose(logits(plain, batch), logits(decoupled, batch), atol=1e-4)
    everyone_is_user = DecoupledHeadShuffle(8, 16, 8)
    x = torch.randn(8, 3, 16)
    assert torch.equal(everyone_is_user(x), plain.blocks[0].mixer(x))


def test_gradients_of_both_paths_agree(table, batch):
    model = build(table, decoupled=True)
    for path in (model.forward, model.recompute):
        path(batch).square().sum().backward()
        for p in model.parameters():
            if p.grad is not None:
                p.kept = [*getattr(p, "kept", []), p.grad.clone()]
                p.grad = None
    for name, p in model.named_parameters():
        if hasattr(p, "kept"):
            assert torch.allclose(*p.kept, rtol=1e-3, atol=1e-5), name


# The sequence


def test_the_order_of_events_does_not_matter(table, batch):
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))
    names = ("hist_item", "hist_rating", "hist_age", "hist_mask")
    shuffled = replace(batch, **{name: getattr(batch, name)[:, order] for name in names})
    for switches in ({}, {"sequence": "mean"}, {"decoupled": True}):
        model = build(table, **switches)
        assert torch.allclose(logits(model, batch), logits(model, shuffled), atol=1e-5)
    older = replace(batch, hist_age=batch.hist_age[:, order])  # the age is all that tells the order
    assert not torch.allclose(logits(build(table), batch), logits(build(table), older), atol=1e-5)


def test_without_values_the_history_is_not_read(table, batch):
    model = build(table)
    moved = replace(batch, hist_item=torch.where(batch.hist_mask, batch.hist_item % synthetic.ITEMS + 1, 0))
    assert not torch.allclose(logits(model, batch), logits(model, moved), atol=1e-6)
    with torch.no_grad():
        for block in model.blocks:
            block.reading.kv[:, :, 16:] = 0
    assert torch.equal(logits(model, batch), logits(model, moved))


def test_the_static_summary_is_the_same_for_every_head(table, batch):
    model = build(table, sequence="mean")
    block = model.blocks[0]
    _, events, mask = model.sequence(batch)
    keys = block.keys(events, mask)
    one, two = (block.reading.attend(torch.randn(8, batch.pairs(), 16), keys, batch.request_of) for _ in range(2))
    assert torch.equal(one, two)  # whatever the query
    assert torch.equal(one, one[:1].expand_as(one))
    row = int(batch.hist_mask.sum(1).argmax())
    source = block.source_norm(block.sequence(events))[row][mask[row]]
    expected = block.reading.summary(source.mean(0))
    assert torch.allclose(one[0, batch.request_of == row], expected.expand(1, -1), atol=1e-5)
    attending = build(table).blocks[0]
    keys = attending.keys(events, mask)
    one, two = (attending.reading.attend(torch.randn(8, batch.pairs(), 16), keys, batch.request_of) for _ in range(2))
    assert not torch.allclose(one, two, atol=1e-4)


def test_a_block_reads_the_raw_sequence(table, batch):
    """Block 2's keys computed alone from S are those used inside the full forward, in either order."""
    model = build(table, blocks=3)
    with torch.no_grad():
        _, events, mask = model.sequence(batch)
        alone = [model.blocks[i].keys(events, mask) for i in (2, 1, 0)][::-1]
        inside = model.prepare(batch).keys
    for one, two in zip(alone, inside, strict=True):
        assert torch.equal(one.k, two.k)
        assert torch.equal(one.v, two.v)
    assert not torch.allclose(inside[0].k, inside[1].k, atol=1e-3)


@pytest.mark.parametrize("switches", EVERY, ids=named)
def test_an_empty_history_is_finite(table, batch, switches):
    model = build(table, **switches).train()
    empty = replace(batch, hist_mask=torch.zeros_like(batch.hist_mask), hist_item=torch.zeros_like(batch.hist_item))
    out = model(empty)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.null.event.grad.abs().sum() > 0


@pytest.mark.parametrize("switches", EVERY, ids=named)
def test_left_padding_changes_no_logit(table, switches):
    requests, model = table.requests("train")[:8], build(table, **switches)
    short, long = (table.batch(requests, history=length) for length in (41, 61))
    assert not long.hist_mask[:, :20].any()
    assert torch.allclose(logits(model, short), logits(model, long), atol=1e-5)


# Every switch


@pytest.mark.parametrize("switches", EVERY, ids=named)
def test_every_switch_has_gradient_batching_and_an_effect(table, batch, switches):
    model = build(table, **switches).train()
    model(batch).square().sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == ["encoder.key_constant"]
    neighbours = [int(r) for r in table.requests("valid")[:11]]
    alone = torch.cat([logits(model, table.batch([r], history=9)) for r in neighbours])
    assert torch.allclose(logits(model, table.batch(neighbours, history=9)), alone, atol=1e-5)
    if switches:
        host = build(table)
        own = model.state_dict()
        model.load_state_dict(
            {k: v for k, v in host.state_dict().items() if k in own and v.shape == own[k].shape}, strict=False
        )
        assert not torch.allclose(logits(model, batch), logits(host, batch), atol=1e-5)


def test_wrong_configurations_are_refused():
    with pytest.raises(ValueError, match="multiple of 8 heads"):
        MixFormerConfig(width=20)
    with pytest.raises(ValueError, match="mixing"):
        MixFormerConfig(mixing="nothing")
    for switch in ({"mixing": "attention"}, {"heads": "joint"}):
        with pytest.raises(ValueError, match="decoupling needs"):
            MixFormerConfig(decoupled=True, **switch)


def test_the_mask_is_a_buffer(table):
    model = build(table, decoupled=True)
    assert "blocks.1.mixer.mask" in dict(model.named_buffers())


# Cost


def embedding_flops(model, batch) -> int:
    with torch.no_grad():
        return flops_of(lambda: (model.encoder.request(batch), model.encoder.pairs(batch)))


@pytest.mark.parametrize("switches", EVERY, ids=named)
def test_declared_cost_is_the_counted_one(table, switches):
    model = build(table, history=5, **switches)
    one = table.score_batch(int(table.requests("test")[-1]), np.arange(1, 8), history=5)
    assert one.hist_mask.all()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        assert flops_of(lambda: model(one)) - embedding_flops(model, one) == model.flops(7)


def test_decoupling_saves_the_user_share_of_the_heads(table, fifty):
    """Per candidate the block costs N_G / N of the plain one, counted; per request the saving grows with J."""
    decoupled, plain = build(table, decoupled=True), build(table)
    with torch.no_grad():
        state, own = decoupled.prepare(fifty), plain.prepare(fifty)
        x = torch.randn(8, 50, 16)
        block = flops_of(lambda: plain.blocks[0](x, own.keys[0], fifty.request_of))
        served = flops_of(lambda: decoupled.blocks[0].item(x[4:], state.shared[0], state.keys[0], fifty.request_of))
    assert served / block == 4 / 8
    saved = [1 - decoupled.flops(j) / plain.flops(j) for j in (1, 32, 1682)]
    assert saved[0] == 0
    assert saved[0] < saved[1] < saved[2] < 0.5


def test_inspection_compares_both_ways_of_serving(table):
    look = {"device": CPU, "history": LENGTH, "timed": 1}
    decoupled, plain = inspect(build(table, decoupled=True), table, **look), inspect(build(table), table, **look)
    assert decoupled["serving_difference"] < 1e-5
    assert "serving_difference" not in plain
    found, reference = (e["studies"]["flops_per_request"]["lines"] for e in (decoupled, plain))
    assert found[ALL_HEADS] == reference[SHARED]
    assert [count for count, _ in found[ALL_HEADS]] == list(CANDIDATES)
    assert found[SHARED][-1][1] < 0.7 * found[ALL_HEADS][-1][1]
    assert len(decoupled["studies"]["request_ms"]["lines"][ALL_HEADS]) == len(CANDIDATES)


def test_inspection_sees_a_wrong_cache(table):
    """Of one user among those that are checked."""
    model = build(table, decoupled=True)
    inner, user = model.forward, int(table.catalogue_tasks("test", experiment.CHECKED_TASKS).user[0])
    model.forward = lambda batch: inner(batch) + 0.5 * (batch.user_of_pair == user).unsqueeze(1)
    assert inspect(model, table, device=CPU, history=LENGTH, timed=1)["serving_difference"] > 0.4


def sizes_of_the_card():
    for tier in TIERS:
        budget = CARD.budget(tier)
        for width in sorted({budget["width"], *(width for width, _ in budget["cells"])}):
            values = {f.name: budget[f.name] for f in fields(MixFormerConfig) if f.name in budget}
            yield pytest.param(MixFormerConfig(**values | {"width": width}), id=f"{tier}-{width}")


@pytest.mark.parametrize("config", sizes_of_the_card())
def test_stacked_has_the_size_of_mixformer(table, config):
    target = MixFormer(config, table.vocab, table.item_genres).dense_params()
    assert matched_stacked(config, table.vocab, table.item_genres).dense_params() == pytest.approx(target, rel=0.05)


def test_the_stacked_model_drops_feed_forward_outputs_only(table):
    config = replace(SMALL, blocks=3, dropout=0.9)
    model = matched_stacked(config, table.vocab, table.item_genres).train()
    assert len(model.transformer.blocks) == 2
    width = config.count * config.width // 2
    x, read = torch.randn(3, 5, width), torch.randn(3, 4, 5, width // 4)
    with torch.no_grad():
        for block in model.transformer.blocks:
            assert not torch.equal(block.finish(x, read), block.finish(x, read))
            block.ffn.down.weight.zero_(), block.ffn.down.bias.zero_()
            expected = x + block.out(read.transpose(1, 2).flatten(2))
            assert torch.allclose(block.finish(x, read), expected, atol=1e-6)


def test_the_scaling_study_adds_up_the_time_of_its_cells(tmp_path, monkeypatch):
    """The row is the last cell's, its seconds are those of all; lines are grouped by history and sorted by FLOPs."""
    seen = []

    def train(ctx, device, model_of):
        width, history = ctx.budget["width"], ctx.budget["history"]
        seen.append((width, history, ctx.state.path.name))
        seconds = float(len(seen))
        cost = {"seconds": seconds, "train_seconds": seconds / 2, "tuning_seconds": 10 * seconds, "steps": history}
        cost |= {"flops": 1e6 * width, "dense_params": width}
        return Measurement({"auc": history / 100}, {"auc": 0.5}, cost=cost)

    monkeypatch.setattr(experiment, "train", train)
    cells = [[16, 12], [8, 30], [16, 30]]
    budget = Budget(CARD.budget("tiny") | {"cells": cells})
    ctx = Context("mixformer", "arm", "tiny", "synthetic", 42, budget, None, StateFolder(tmp_path), quiet=True)
    measured = experiment.scaling(ctx, CPU)
    assert [cell[:2] for cell in seen] == [tuple(cell) for cell in cells]
    assert len({name for _, _, name in seen}) == 3
    assert {k: measured.cost[k] for k in experiment.SUMMED} == {
        "seconds": 6.0,
        "train_seconds": 3.0,
        "tuning_seconds": 60.0,
    }
    assert (measured.metrics["auc"], measured.cost["steps"]) == (0.3, 30)
    assert "D=16, L=30" in measured.notes[-1]
    lines = measured.extra["studies"]["auc_by_flops"]["lines"]
    assert lines == {"L 12": [[16.0, 0.12]], "L 30": [[8.0, 0.3], [16.0, 0.3]]}


def test_the_target_row_of_the_stacked_model_reads_the_history(table: RequestTable, fifty, batch):
    torch.manual_seed(0)
    model = matched_stacked(replace(SMALL, blocks=3), table.vocab, table.item_genres).eval()
    moved = replace(batch, hist_item=torch.where(batch.hist_mask, batch.hist_item % synthetic.ITEMS + 1, 0))
    assert not torch.allclose(logits(model, batch), logits(model, moved), atol=1e-6)
    with torch.no_grad():
        state = model.prepare(fifty)
        chunks = torch.cat([model.score(state, part) for part in split_pairs(fifty, 16)])
    assert torch.allclose(chunks, logits(model, fifty), atol=1e-5)
    requests = table.requests("train")[:8]
    short, long = (table.batch(requests, history=length) for length in (41, 61))
    assert torch.allclose(logits(model, short), logits(model, long), atol=1e-5)


def test_the_reference_ranker_says_how_the_data_was_split(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment.dcnv2_baseline, "run", lambda ctx, device: Measurement({"auc": 0.5}))
    ctx = Context(
        "mixformer", "din_dcnv2", "tiny", "synthetic", 42, Budget({}), None, StateFolder(tmp_path), quiet=True
    )
    assert experiment.din_dcnv2(ctx).notes == [experiment.SPLIT_NOTE]


def test_half_precision_is_finite(table, batch):
    for switches in ({}, {"decoupled": True}, {"sequence": "mean"}):
        model = build(table, **switches).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
        out.float().square().sum().backward()
        assert out.isfinite().all()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            half = model.eval()(batch)
        assert torch.allclose(half.float(), logits(model, batch), atol=0.1)
