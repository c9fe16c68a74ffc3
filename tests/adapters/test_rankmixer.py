"""Mechanism tests of card rankmixer, with the numbers of its specification."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.rankmixer.cross_ranker import CrossRanker, matched_sizes
from adapters.rankmixer.model import CHANNELS, SLOTS, Block, RankMixer, RankMixerConfig
from auto_research.blocks.relu_moe import Experts, PenaltyController, ReluMoE
from auto_research.blocks.token_mixing import HeadShuffle, UniMixer, shuffle_permutation
from auto_research.evaluate.ctr import split_pairs
from auto_research.evaluate.serving import flop_rates
from auto_research.metrics.cost import flops_of

SMALL = RankMixerConfig(tokens=4, width=16, blocks=2, expansion=2, history=9, dropout=0.1)
COMBINATIONS = [
    dict(zip(("seq_summary", "token_mixer", "channel", "norm", "pooling"), choice, strict=True))
    for choice in itertools.product(*(SLOTS[s] for s in ("seq_summary", "token_mixer", "channel", "norm", "pooling")))
]
LISTED = [
    {slot: name}
    for slot in ("seq_summary", "token_mixer", "channel", "norm", "pooling", "tokenizer")
    for name in SLOTS[slot]
]


def named(switches: dict) -> str:
    return "-".join(switches.values())


@pytest.fixture(scope="module")
def table():
    return synthetic.request_table()


def build(table, config=SMALL, seed=0, **switches) -> RankMixer:
    torch.manual_seed(seed)
    return RankMixer(replace(config, **switches), table.vocab, table.item_genres)


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


# Token mixing


def test_mixing_by_hand_and_its_own_inverse():
    x = torch.arange(1.0, 9).reshape(2, 1, 4)  # two tokens of one pair
    mixer = HeadShuffle(2, 4)
    assert mixer(x).reshape(2, 4).tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]
    assert torch.equal(mixer(mixer(x)), x)
    assert sum(p.numel() for p in mixer.parameters()) == mixer.params() == 0


def test_one_token_reaches_exactly_its_columns_of_every_token():
    tokens, width, t = 4, 16, 2
    x = torch.randn(tokens, 3, width)
    changed = x.clone()
    changed[t] += 1
    moved = HeadShuffle(tokens, width)(changed) != HeadShuffle(tokens, width)(x)
    expected = torch.zeros(width, dtype=torch.bool)
    expected[t * width // tokens : (t + 1) * width // tokens] = True
    assert torch.equal(moved, expected.expand_as(moved))


def test_the_shuffle_refuses_heads_that_differ_from_tokens():
    with pytest.raises(ValueError, match="heads"):
        HeadShuffle(4, 16, heads=2)


def test_tokens_mix_within_their_pair_only():
    x = torch.randn(4, 5, 16)
    changed = x.clone()
    changed[:, 3] *= -1
    for name in SLOTS["token_mixer"]:
        block = Block(replace(SMALL, token_mixer=name, dropout=0.0))
        moved = (block(changed) - block(x)).abs().amax((0, 2)) > 1e-6
        assert moved.tolist() == [False, False, False, True, False], name


# Sizes


def test_parameter_count_of_a_block_and_of_the_dense_part(table):
    config = RankMixerConfig(dropout=0.0)
    block = Block(config)
    count = {"weight": 0, "bias": 0, "norm": 0}
    for name, p in block.named_parameters():
        count["norm" if "norm" in name else "weight" if ".w" in name else "bias"] += p.numel()
    assert count == {"weight": 262_144, "bias": 2_560, "norm": 256}
    assert block.params() == 264_960
    model = build(table, config)
    assert model.input.width == 368
    assert model.tokenizer.piece == 46
    assert model.dense_params() == 566_659


@pytest.mark.parametrize("switches", LISTED, ids=named)
def test_declared_parameters_and_flops_are_the_real_ones(table, switches):
    model = build(table, **switches).eval()
    for block in model.blocks:
        assert block.params() == sum(p.numel() for p in block.parameters())
    e = torch.randn(7, model.input.width)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        assert flops_of(lambda: model.rank(model.tokenizer(e))) == model.flops(7)


def test_the_wide_shared_ffn_has_the_parameters_of_the_private_ones():
    private, wide = (CHANNELS[name](RankMixerConfig()) for name in ("pffn", "shared_wide"))
    assert wide.hidden == 4 * 8 * 64
    assert abs(wide.params() / private.params() - 1) < 0.01


def test_swiglu_is_as_large_as_the_two_layer_ffn():
    private, gated = (CHANNELS[name](RankMixerConfig()) for name in ("pffn", "swiglu_pffn"))
    assert gated.hidden == 168
    assert abs(gated.params() / private.params() - 1) < 0.02


# Isolation of tokens


@pytest.mark.parametrize(("channel", "isolated"), [("pffn", True), ("swiglu_pffn", True), ("shared", False)])
def test_private_weights_meet_their_own_token_only(channel, isolated):
    torch.manual_seed(0)
    block = Block(replace(SMALL, channel=channel, dropout=0.0))
    v = torch.randn(16)
    (block(torch.randn(4, 6, 16))[0] @ v).sum().backward()
    if not isolated:  # the other tokens' weights are these weights
        assert all(p.grad.abs().sum() > 0 for p in block.channel.parameters())
        return
    for p in block.channel.parameters():
        assert p.grad[0].abs().sum() > 0
        assert torch.equal(p.grad[3], torch.zeros_like(p.grad[3]))


def test_the_plain_sum_behind_a_layer_norm_has_no_gradient():
    """Why the isolation test multiplies by a random vector: the plain sum is a constant of the norm's bias."""
    torch.manual_seed(0)
    block = Block(replace(SMALL, dropout=0.0)).double()
    block(torch.randn(4, 6, 16, dtype=torch.float64))[0].sum().backward()
    assert block.channel.w2.grad.abs().max() < 1e-12


def test_shared_tokenizer_gives_every_token_the_same_projection(table):
    private, shared = build(table), build(table, tokenizer="shared")
    assert private.tokenizer.params() == 4 * shared.tokenizer.params()
    piece = torch.randn(2, shared.tokenizer.piece)
    same = shared.tokenizer(piece.repeat(1, 4)[:, : shared.input.width])
    assert torch.allclose(same[0], same[1])
    differ = private.tokenizer(piece.repeat(1, 4)[:, : private.input.width])
    assert not torch.allclose(differ[0], differ[1])


# Effects of the ablations


def test_attention_weighs_tokens_by_their_content_and_the_shuffle_does_not():
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 5, 16)
    for name, linear in (("rankmixer", True), ("identity", True), ("attention", False)):
        mixer = Block(replace(SMALL, token_mixer=name)).mixer.eval()
        assert torch.allclose(mixer(x + y), mixer(x) + mixer(y), atol=1e-5) == linear, name


@pytest.mark.parametrize(("channel", "same"), [("shared", True), ("shared_wide", True), ("pffn", False)])
def test_a_shared_ffn_does_not_know_which_token_it_sees(channel, same):
    torch.manual_seed(0)
    layer, x = CHANNELS[channel](SMALL).eval(), torch.randn(4, 5, 16)
    assert torch.allclose(layer(x.flip(0)), layer(x).flip(0), atol=1e-6) == same


def test_a_single_router_trains_with_the_gates_it_serves_and_two_routers_do_not(table):
    batch = synthetic.training_batch(table)
    for channel, same in (("smoe", True), ("smoe_dtsi", False)):
        model = build(table, channel=channel, dropout=0.0)
        assert torch.allclose(model.train().training_logits(batch)[0], logits(model, batch), atol=1e-5) == same


@pytest.mark.parametrize(("pooling", "same"), [("mean", True), ("concat", False)])
def test_the_mean_forgets_the_order_of_tokens_and_the_concatenation_does_not(table, pooling, same):
    model, x = build(table, pooling=pooling, blocks=0).eval(), torch.randn(4, 5, 16)
    assert torch.allclose(model.rank(x), model.rank(x.flip(0)), atol=1e-6) == same


def test_top_k_opens_k_experts_also_at_a_tie():
    layer = CHANNELS["smoe_topk"](replace(SMALL, dropout=0.0))
    seen = {}
    layer.experts.register_forward_pre_hook(lambda module, inputs: seen.update(gates=inputs[1]))
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.bias.zero_()
    layer(torch.randn(4, 3, 16))
    assert torch.equal((seen["gates"] > 0).sum(2), torch.full((4, 3), 2))


# Sparse experts


def by_hand() -> tuple[Experts, torch.Tensor, torch.Tensor]:
    """One token whose three experts output 10, 2 and 1 through their biases, and gates of logits (-1, 0.5, 2)."""
    experts = Experts(1, 1, 3, 1)
    with torch.no_grad():
        for p in experts.parameters():
            p.zero_()
        experts.b2.copy_(torch.tensor([[[10.0], [2.0], [1.0]]]))
    return experts, torch.randn(1, 1, 1), torch.relu(torch.tensor([[[-1.0, 0.5, 2.0]]]))


def test_relu_gate_by_hand_and_no_gradient_for_a_closed_expert():
    experts, x, gates = by_hand()
    out = experts(x, gates)
    assert out.item() == 0.5 * 2 + 2 * 1 == 3
    out.sum().backward()
    assert experts.b2.grad.flatten().tolist() == [0, 0.5, 2]
    torch.manual_seed(0)
    moe = ReluMoE(2, 6, experts=3, two_routers=False)
    with torch.no_grad():
        moe.h_infer.bias[:, :, 0] = -100
    moe(torch.randn(2, 5, 6)).square().sum().backward()
    hidden = moe.experts.hidden
    assert moe.experts.w1.grad[:, :, :hidden].abs().max() == 0
    assert moe.experts.w2.grad[:, :hidden].abs().max() == 0
    assert moe.experts.b2.grad[:, 0].abs().max() == 0
    assert moe.experts.w1.grad[:, :, hidden:].abs().max() > 0


def test_gathered_serving_equals_masked_dense():
    torch.manual_seed(0)
    moe = ReluMoE(4, 16, experts=4).eval()
    x = torch.randn(4, 33, 16)
    gates = moe.gates(x)
    assert 0.2 < (gates > 0).float().mean() < 0.8
    dense, sparse = moe.experts(x, gates), moe.experts.sparse(x, gates)
    assert torch.allclose(dense, sparse, atol=1e-5)


def test_serving_export_drops_the_training_router_and_keeps_the_logits(table):
    batch = synthetic.training_batch(table)
    for channel in ("smoe", "smoe_dtsi"):
        model = build(table, channel=channel).train()
        model.training_logits(batch)
        assert model.extra_loss() > 0
        expected = logits(model, batch)
        served = copy.deepcopy(model).export()
        assert not any("h_train" in name for name, _ in served.named_parameters())
        assert torch.allclose(logits(served, batch), expected, atol=1e-5)


def test_top_k_routing_uses_two_experts_and_balances():
    torch.manual_seed(0)
    layer = CHANNELS["smoe_topk"](replace(SMALL, dropout=0.0))
    seen = {}
    layer.experts.register_forward_pre_hook(lambda module, inputs: seen.update(gates=inputs[1]))
    layer(torch.randn(4, 50, 16))
    assert torch.equal((seen["gates"] > 0).sum(2), torch.full((4, 50), 2))
    assert torch.allclose(seen["gates"].sum(2), torch.ones(4, 50))
    assert layer.take_balance().item() == pytest.approx(1.0, abs=0.2)
    with torch.no_grad():  # everything to one pair of experts: E * (1/2 + 1/2) * 1/2 = 2 at E = 4
        layer.router.weight.zero_()
        layer.router.bias.copy_(torch.tensor([20.0, 20, -20, -20]))
    layer(torch.randn(4, 50, 16))
    assert layer.take_balance().item() == pytest.approx(2.0)


# Dense training, sparse inference


def test_the_penalty_reaches_only_the_inference_router(table):
    model = build(table, channel="smoe_dtsi").train()
    model.training_logits(synthetic.training_batch(table))
    model.extra_loss().backward()
    for name, p in model.named_parameters():
        reached = p.grad is not None and bool(p.grad.abs().sum() > 0)
        assert reached == ("h_infer" in name), name


def test_both_passes_train_and_every_expert_learns_through_the_training_router(table):
    model = build(table, channel="smoe_dtsi", dropout=0.0).train()
    with torch.no_grad():
        for block in model.blocks:
            block.channel.h_infer.bias.fill_(-100)  # the inference router is shut
    passes = model.training_logits(synthetic.training_batch(table))
    assert len(passes) == 2
    assert not torch.allclose(*passes)
    sum(p.square().sum() for p in passes).backward()
    for block in model.blocks:
        assert block.channel.h_train.weight.grad.abs().sum() > 0
        assert (block.channel.experts.b2.grad.abs().sum(2) > 0).all()


def test_evaluation_ignores_the_training_router(table):
    batch, model = synthetic.training_batch(table), build(table, channel="smoe_dtsi")
    before = logits(model, batch)
    with torch.no_grad():
        for block in model.blocks:
            block.channel.h_train.weight.normal_()
    assert torch.equal(logits(model, batch), before)


def test_the_single_router_is_one_pass(table):
    model = build(table, channel="smoe").train()
    assert len(model.training_logits(synthetic.training_batch(table))) == 1
    assert not any("h_train" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(("ratio", "factor"), [(0.8, 1.05), (0.2, 1 / 1.05), (0.5, 1.0)])
def test_the_controller_multiplies_or_divides(ratio, factor):
    controller = PenaltyController(rho=0.5)
    controller.update(torch.tensor(ratio))
    assert controller.weight.item() == pytest.approx(1e-4 * factor, rel=1e-6)


def test_the_controller_stays_in_its_bounds():
    controller = PenaltyController(rho=0.5)
    for _ in range(400):
        controller.update(torch.tensor(0.9))
    assert controller.weight.item() == 1
    for _ in range(800):
        controller.update(torch.tensor(0.1))
    assert controller.weight.item() == pytest.approx(1e-8)


def test_controller_and_temperature_live_in_the_state(table):
    model = build(table, channel="smoe_dtsi", token_mixer="unimixer").train()
    model.training_logits(synthetic.training_batch(table))
    model.after_step(5, 10)
    copied = build(table, channel="smoe_dtsi", token_mixer="unimixer", seed=1)
    copied.load_state_dict(model.state_dict())
    assert copied.controller.weight == model.controller.weight != 1e-4
    assert copied.blocks[0].mixer.tau.item() == pytest.approx(0.05**0.5)


# UniMixer


def test_unimixer_with_the_permutation_is_rankmixer(table, monkeypatch):
    batch = synthetic.training_batch(table)
    host, uni = build(table), build(table, token_mixer="unimixer")
    uni.load_state_dict(host.state_dict(), strict=False)
    monkeypatch.setattr(UniMixer, "mixing_matrix", lambda self: shuffle_permutation(self.tokens, self.heads))
    assert torch.allclose(logits(uni, batch), logits(host, batch), atol=1e-5)


def test_unimixer_at_the_start_with_low_temperature_is_rankmixer(table):
    batch = synthetic.training_batch(table)
    host, uni = build(table), build(table, token_mixer="unimixer")
    uni.load_state_dict(host.state_dict(), strict=False)
    assert not torch.allclose(logits(uni, batch), logits(host, batch), atol=1e-4)
    for block in uni.blocks:
        block.mixer.anneal(1, 1)
    assert torch.allclose(logits(uni, batch), logits(host, batch), atol=1e-4)


@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize("tau", [1.0, 0.05])
def test_mixing_matrix_is_doubly_stochastic_at_the_start(heads, tau):
    mixer = UniMixer(8, 64, heads)
    mixer.tau.fill_(tau)
    assert mixer.row_error() < 1e-3


@pytest.mark.parametrize(("tau", "mass"), [(1.0, 0.24), (0.3, 0.997)])
def test_mass_on_the_permutation(tau, mass):
    mixer = UniMixer(8, 64)
    mixer.tau.fill_(tau)
    with torch.no_grad():
        on = (mixer.mixing_matrix() * shuffle_permutation(8, 8)).sum(1)
    assert on.mean().item() == pytest.approx(mass, abs=0.005)


def test_the_permutation_is_symmetric_for_equal_heads_only():
    square, oblong = shuffle_permutation(8, 8), shuffle_permutation(8, 4)
    assert torch.equal(square, square.t())
    assert not torch.equal(oblong, oblong.t())
    assert torch.equal(oblong @ oblong.t(), torch.eye(32))


def test_the_permutation_matrix_is_the_shuffle():
    x = torch.randn(4, 3, 16)
    blocks = x.reshape(4, 3, 4, 4).transpose(1, 2).reshape(16, 12)  # rows t H + h
    mixed = (shuffle_permutation(4, 4) @ blocks).reshape(4, 4, 3, 4).transpose(1, 2).reshape(4, 3, 16)
    assert torch.equal(mixed, HeadShuffle(4, 16)(x))


def test_unimixer_works_with_heads_that_differ_from_tokens(table):
    batch = synthetic.training_batch(table)
    assert logits(build(table, token_mixer="unimixer", heads=2), batch).shape == (batch.pairs(), 3)


# Every combination of slots


def edited_from(table, request: int):
    """The same table with every rating and item at or after the request's second changed."""
    data = table.interactions
    later = data.timestamp >= table.request_time[request]
    assert later[table.index.start[request]]  # the target's own rating is among them
    item = data.item.copy()
    item[later] = item[later][::-1]
    return table.edited(rating=np.where(later, 6 - data.rating, data.rating).astype(np.float32), item=item)


@pytest.fixture(scope="module")
def counterfactual(table):
    request = int(table.requests("valid")[5])
    return [t.score_batch(request, np.arange(1, 22), history=9) for t in (table, edited_from(table, request))]


@pytest.mark.parametrize("switches", COMBINATIONS, ids=named)
def test_every_combination_has_shape_gradient_causality_and_batching(table, counterfactual, switches):
    model, batch = build(table, **switches).train(), synthetic.training_batch(table, requests=6)
    passes = model.training_logits(batch)
    assert all(p.shape == (batch.pairs(), 3) for p in passes)
    (sum(p.square().sum() for p in passes) + model.extra_loss()).backward()
    model.after_step(1, 10)
    without = [name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert not without
    request = table.score_batch(int(table.requests("test")[3]), np.arange(1, 22), history=9)
    whole = logits(model, request)
    with torch.no_grad():
        state = model.prepare(request)  # the request's part once, the candidates in chunks
        chunks = torch.cat([model.score(state, part) for part in split_pairs(request, 8)])
    assert torch.allclose(chunks, whole, atol=1e-5)
    before, after = counterfactual
    assert torch.equal(logits(model, before), logits(model, after))
    neighbours = [int(r) for r in table.requests("valid")[:3]]
    alone = torch.cat([logits(model, table.batch([r], history=9)) for r in neighbours])
    assert torch.allclose(logits(model, table.batch(neighbours, history=9)), alone, atol=1e-5)


@pytest.fixture(scope="module")
def catalogue():
    return synthetic.request_table(items=1682)


@pytest.mark.parametrize("switches", LISTED, ids=named)
def test_the_catalogue_in_chunks_equals_one_at_a_time(catalogue, switches):
    model = build(catalogue, **switches).eval()
    request = catalogue.score_batch(int(catalogue.requests("test")[3]), np.arange(1, 1683), history=9)
    with torch.no_grad():
        state = model.prepare(request)
        chunks = torch.cat([model.score(state, part) for part in split_pairs(request, 256)])
        alone = torch.cat([model.score(state, part) for part in split_pairs(request, 1)])
        separate = torch.cat([model(part) for part in split_pairs(request, 256)])
    assert torch.allclose(chunks, alone, atol=1e-5)
    assert torch.allclose(chunks, separate, atol=1e-5)


@pytest.mark.parametrize("switches", LISTED, ids=named)
def test_a_request_does_not_depend_on_its_neighbours_in_the_batch(table, switches):
    model, requests = build(table, **switches), table.requests("valid")[:7]
    together = logits(model, table.batch(requests, history=9))
    alone = torch.cat([logits(model, table.batch([r], history=9)) for r in requests])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("switches", LISTED, ids=named)
def test_more_padding_changes_no_logit(table, switches):
    model, requests = build(table, **switches), table.requests("train")[:8]
    short, long = (table.batch(requests, history=length) for length in (41, 61))  # histories of up to 41 events
    assert not long.hist_mask[:, :20].any()
    assert torch.allclose(logits(model, short), logits(model, long), atol=1e-5)


@pytest.mark.parametrize("switches", LISTED, ids=named)
def test_nothing_at_or_after_the_request_is_read(table, switches):
    request = int(table.requests("valid")[5])
    data, edited = table.interactions, edited_from(table, request)
    items = np.arange(1, synthetic.ITEMS + 1)
    model = build(table, **switches)
    before, after = (t.score_batch(request, items, history=9) for t in (table, edited))
    assert torch.equal(logits(model, before), logits(model, after))
    earlier = data.timestamp < table.request_time[request]
    moved = table.edited(rating=np.where(earlier, 6 - data.rating, data.rating).astype(np.float32))
    assert not torch.equal(logits(model, before), logits(model, moved.score_batch(request, items, history=9)))


@pytest.mark.parametrize("name", SLOTS["seq_summary"])
def test_declared_cost_of_the_sequence_summary(table, name):
    model = build(table, seq_summary=name).eval()
    batch = table.score_batch(int(table.requests("test")[3]), np.arange(1, 8), history=9)
    with torch.no_grad():
        r, p = model.input.encoder(batch)
    assert r.mask.all()
    summary = model.input.summary

    def work():
        _, state = summary.prepare(r.events, r.mask, r.user)
        summary.score(state, p.key, batch.request_of)

    with torch.no_grad():
        assert flops_of(work) == summary.flops(7, 9)
    assert summary.params() == sum(q.numel() for q in summary.parameters())


def test_an_empty_history_gives_three_zero_vectors(table):
    model = build(table).eval()
    batch = table.batch(table.requests("train")[:3], history=9)
    batch.hist_mask[:] = False
    state = model.prepare(batch)
    assert state.flat[:, model.input.encoder.request_width :].abs().max() == 0
    pair = model.input.summary.score(state.cache, torch.randn(batch.pairs(), 48), batch.request_of)
    assert pair.abs().max() == 0


def test_tokens_before_the_third_summary_do_not_see_the_candidate(table):
    model = build(table, RankMixerConfig(history=9)).eval()
    items = np.arange(1, synthetic.ITEMS + 1)
    batch = table.score_batch(int(table.requests("test")[0]), items, history=9)
    assert model.input.request_width == 240
    x = model.tokenizer(model.input.score(model.prepare(batch), batch))  # (8, P, 64)
    same = [bool(torch.allclose(token, token[:1].expand_as(token), atol=1e-6)) for token in x]
    assert same == [True] * 5 + [False] * 3


def test_unknown_slots_are_refused():
    with pytest.raises(ValueError, match="channel"):
        RankMixerConfig(channel="nothing")
    with pytest.raises(ValueError, match="multiple"):
        RankMixerConfig(tokens=6, width=64)


@pytest.mark.parametrize(("tokens", "width", "full"), [(8, 64, True), (8, 32, False), (4, 32, False)])
def test_dcnv2_has_the_size_of_the_dense_model(table, tokens, width, full):
    config = RankMixerConfig(tokens=tokens, width=width)
    dense = RankMixer(config, table.vocab, table.item_genres)
    rank, hidden = matched_sizes(dense.dense_params(), dense.input.width, layers=3)
    ranker = CrossRanker(config, table.vocab, table.item_genres, layers=3, rank=rank, hidden=hidden)
    assert (rank is None) == full
    assert ranker.dense_params() == pytest.approx(dense.dense_params(), rel=0.05)


def test_flop_rates_count_the_parameters_and_work_of_each_width(table):
    seen = []

    def build(width):
        seen.append(width)
        return RankMixer(replace(SMALL, width=width), table.vocab, table.item_genres)

    found = flop_rates(
        build,
        lambda model: model.after_input(torch.zeros(64, model.input.width)),
        (16, 32),
        device=torch.device("cpu"),
        timed=1,
    )["flop_rate_per_s"]
    assert seen == [16, 32]
    (points,) = found["lines"].values()
    assert [p for p, _ in points] == [build(w).dense_params() for w in (16, 32)]
    assert all(1e6 < rate < 1e13 for _, rate in points)
