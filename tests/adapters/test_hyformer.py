"""Mechanism tests of card hyformer, with the numbers of its specification."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.hyformer import model as hyformer_model
from adapters.hyformer.candidate_check import check_candidate_free, tensors
from adapters.hyformer.experiment import matched_late_fusion
from adapters.hyformer.late_fusion import LateFusion
from adapters.hyformer.model import (
    SEQUENCES,
    SLOTS,
    SWITCHES,
    HyFormer,
    HyFormerConfig,
)
from adapters.hyformer.operators import AttentionEncoder, LongerReducer
from auto_research.baselines.dcnv2 import DCNv2
from auto_research.blocks.behaviour_events import request_fields, window_events
from auto_research.blocks.token_mixing import HeadShuffle, UniMixer, shuffle_permutation
from auto_research.data.behaviours import BehaviourBatch, BehaviourTable
from auto_research.evaluate.ctr import split_pairs
from auto_research.experiment.card import load_card
from auto_research.metrics.cost import flops_of

CARD = load_card(Path(hyformer_model.__file__).parent)
LENGTH = 20
SMALL = HyFormerConfig(width=16, layers=2, heads=2, head_hidden=16, history=LENGTH, dropout=0.1)
CHOICES = SLOTS | SWITCHES
LISTED = [{slot: name} for slot in CHOICES for name in CHOICES[slot] if name != getattr(SMALL, slot)]
DRAWS = {slot: np.random.default_rng(place).permutation(12) for place, slot in enumerate(SLOTS)}
COMBINED = [{slot: SLOTS[slot][DRAWS[slot][i] % len(SLOTS[slot])] for slot in SLOTS} for i in range(8)]


def named(switches: dict) -> str:
    return "-".join(switches.values()) or "default"


@pytest.fixture(scope="module")
def table():
    return BehaviourTable.of(synthetic.request_table())


@pytest.fixture(scope="module")
def full(table):
    """Seven candidates of one request, both of whose sequences are full."""
    return table.score_batch(int(table.requests("test")[-1]), np.arange(1, 8), history=10)


def build(table, config=SMALL, seed=0, **switches) -> HyFormer:
    torch.manual_seed(seed)
    return HyFormer(replace(config, **switches), table.vocab, table.item_genres).eval()


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


def other_items(batch: BehaviourBatch, sequence: str) -> BehaviourBatch:
    """The batch with every event of one sequence on another item."""
    name = f"{sequence}_item"
    moved = torch.where(batch.window(sequence).mask, getattr(batch, name) % synthetic.ITEMS + 1, 0)
    return replace(batch, **{name: moved})


class Trace:
    """What enters and leaves every layer and decoder of one forward pass: lists by layer."""

    def __init__(self, model: HyFormer, batch: BehaviourBatch):
        self.entered, self.left, self.queries, self.decoded, self.keys = [], [], [], [], []
        hooks = [layer.register_forward_hook(self._layer) for layer in model.layers]
        hooks += [d.register_forward_hook(self._decoder) for layer in model.layers for d in layer.decoders]
        self.logits = model(batch)
        for hook in hooks:
            hook.remove()
        count = len(SEQUENCES)
        for name in ("queries", "decoded", "keys"):
            flat = getattr(self, name)
            setattr(self, name, [flat[i : i + count] for i in range(0, len(flat), count)])

    def _layer(self, module, inputs, output):
        self.entered.append(inputs[0])
        self.left.append(output)

    def _decoder(self, module, inputs, output):
        self.queries.append(inputs[0])
        self.keys.append(inputs[1])
        self.decoded.append(output)


def attention_weights(decoder, queries, keys, request_of):
    """Softmax weights of a decoder, [P, H, Q, L], from its definition."""
    x = decoder.norm(queries).transpose(0, 1)
    pairs, count, width = x.shape
    heads = decoder.read.heads
    q = decoder.read.q(x).reshape(pairs, count, heads, -1).transpose(1, 2)
    scores = q @ keys.k[request_of].transpose(2, 3) / (width / heads) ** 0.5
    return torch.softmax(scores.masked_fill(~keys.mask[request_of][:, None, None], -torch.inf), dim=3)


# Order of operations


def without_reading(model: HyFormer) -> HyFormer:
    with torch.no_grad():
        for layer in model.layers:
            for decoder in layer.decoders:
                decoder.read.out.weight.zero_()
                decoder.read.out.bias.zero_()
    return model


def test_without_reading_the_sequences_enter_by_the_queries_only(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    changed = other_items(other_items(batch, "liked"), "other")
    generated, static = without_reading(build(table)), without_reading(build(table, query_generator="static"))
    assert not torch.allclose(logits(generated, batch), logits(generated, changed), atol=1e-6)
    assert torch.equal(logits(static, batch), logits(static, changed))
    no_mean = without_reading(build(table, query_generator="no_mean"))
    assert torch.equal(logits(no_mean, batch), logits(no_mean, changed))  # by their means only
    reading = build(table, query_generator="static")
    assert not torch.allclose(logits(reading, batch), logits(reading, changed), atol=1e-6)


def gradient_of_second_reading(table, batch, **switches) -> list[float]:
    """Largest |d(layer-2 attention weights of sequence 1) / dx| for x the candidate's vectors and the cross field."""
    model = build(table, **switches)
    leaves = []
    inner = model.inputs.candidate

    def candidate(batch):
        leaves.extend(part.detach().requires_grad_() for part in inner(batch))
        return leaves

    model.inputs.candidate = candidate
    trace = Trace(model, batch)
    weights = attention_weights(model.layers[1].decoders[0], trace.queries[1][0], trace.keys[1][0], batch.request_of)
    torch.manual_seed(1)
    found = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), leaves, allow_unused=True)
    return [0.0 if g is None else g.abs().max().item() for g in found]


def test_the_candidate_steers_the_second_reading(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    assert min(gradient_of_second_reading(table, batch)) > 1e-8
    assert min(gradient_of_second_reading(table, batch, query_generator="static")) > 1e-8  # through boosting alone
    assert gradient_of_second_reading(table, batch, boosting="identity", query_generator="static") == [0, 0]


def test_sequences_meet_through_boosting_only(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    changed = other_items(batch, "other")
    assert not torch.equal(batch.other_item, changed.other_item)

    def decoded_liked(**switches):
        model = build(table, query_generator="static", **switches)
        one, two = Trace(model, batch), Trace(model, changed)
        return [torch.equal(a[0], b[0]) for a, b in zip(one.decoded, two.decoded, strict=True)]

    assert decoded_liked() == [True, False]
    assert decoded_liked(boosting="identity") == [True, True]
    assert decoded_liked(sequences="merged") == [False, False]


# Keys, values and the cache


@pytest.mark.parametrize("switches", [{}, *LISTED], ids=named)
def test_the_cache_of_one_candidate_serves_another(table, switches):
    model = build(table, **switches)
    request = int(table.requests("test")[3])
    a, b = (table.score_batch(request, np.array([item]), history=LENGTH) for item in (3, 11))
    with torch.no_grad():
        cached = model.score(model.prepare(a), b)
    assert torch.allclose(cached, logits(model, b), atol=1e-5)
    assert not torch.allclose(cached, logits(model, a), atol=1e-5)


@pytest.mark.parametrize("switches", [{}, *LISTED], ids=named)
def test_the_request_part_has_the_size_of_the_requests_and_knows_no_candidate(table, switches):
    batch = synthetic.training_batch(table, history=LENGTH)
    assert batch.pairs() > len(batch.hour)
    model = build(table, **switches)
    check_candidate_free(model, batch)
    assert len(tensors(model.prepare(batch))) > 4


def test_the_check_finds_a_candidate_in_the_cache(table, monkeypatch):
    batch = synthetic.training_batch(table, history=LENGTH)
    model = build(table)
    plain = hyformer_model.window_events

    def leaking(encoder, window):
        return plain(encoder, window) + batch_seen[0].item.float().mean()

    batch_seen = [batch]
    monkeypatch.setattr(hyformer_model, "window_events", leaking)
    sequences = model.inputs.sequences

    def remember(batch):
        batch_seen[0] = replace(batch, item=batch.item * torch.arange(len(batch.item)))
        return sequences(batch)

    monkeypatch.setattr(model.inputs, "sequences", remember)
    with pytest.raises(ValueError, match="depends on the candidates"):
        check_candidate_free(model, batch)


def test_the_check_refuses_a_copy_per_pair(table, monkeypatch):
    batch = synthetic.training_batch(table, history=LENGTH)
    model = build(table)
    plain = model.inputs.fields
    monkeypatch.setattr(model.inputs, "fields", lambda b: [f[b.request_of] for f in plain(b)])
    with pytest.raises(ValueError, match="requests"):
        check_candidate_free(model, batch)


def test_keys_are_projected_anew_in_every_layer_or_once(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    own, shared = (build(table, keys=name).prepare(batch).keys for name in ("layerwise", "shared"))
    assert not torch.equal(own[0][0].k, own[1][0].k)
    assert shared[0][0].k is shared[1][0].k
    assert build(table, keys="shared").dense_params() < build(table).dense_params()


# Inheritance


def test_field_tokens_are_inherited_and_change(table):
    model = build(table, layers=3)
    n, m = model.config.all_queries, model.config.tokens
    trace = Trace(model, synthetic.training_batch(table, history=LENGTH))
    assert trace.entered[0].shape[0] == n + m == 8
    for i in range(2):
        assert torch.equal(trace.left[i][n:], trace.entered[i + 1][n:])
        assert not torch.allclose(trace.entered[i][n:], trace.entered[i + 1][n:], atol=1e-4)
        assert torch.equal(torch.cat(trace.queries[i + 1]), trace.left[i][:n])


def test_identity_boosting_refines_queries_by_decoding_only(table):
    model = build(table, layers=3, boosting="identity")
    trace = Trace(model, synthetic.training_batch(table, history=LENGTH))
    n = model.config.all_queries
    assert torch.equal(trace.left[2][n:], trace.entered[0][n:])
    assert torch.equal(trace.left[0][:n], torch.cat(trace.decoded[0]))


# Mixing


def test_shuffle_by_hand():
    x = torch.arange(1.0, 9).reshape(2, 1, 4)
    assert HeadShuffle(2, 4)(x).reshape(2, 4).tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_unimixer_with_the_permutation_is_the_default(table, monkeypatch):
    batch = synthetic.training_batch(table, history=LENGTH)
    host, uni = build(table), build(table, token_mixer="unimixer")
    uni.load_state_dict(host.state_dict(), strict=False)
    assert torch.equal(uni.layers[0].booster.mixer.local, torch.eye(2).repeat(64, 1, 1))  # V at its start
    assert not torch.allclose(logits(uni, batch), logits(host, batch), atol=1e-4)
    monkeypatch.setattr(UniMixer, "mixing_matrix", lambda self: shuffle_permutation(self.tokens, self.heads))
    assert torch.allclose(logits(uni, batch), logits(host, batch), atol=1e-5)


def test_unimixer_heads_may_differ_from_tokens_and_tau_anneals(table):
    model = build(table, token_mixer="unimixer", mixer_heads=4)
    assert logits(model, synthetic.training_batch(table, history=LENGTH)).isfinite().all()
    model.after_step(10, 10)
    assert model.layers[1].booster.mixer.tau.item() == pytest.approx(0.05)


def test_boosting_is_the_equation(table):
    booster = build(table).layers[0].booster
    z = torch.randn(8, 5, 16)
    mixed = torch.stack([torch.cat([z[t, :, 2 * h : 2 * h + 2] for t in range(8)], dim=1) for h in range(8)])
    expected = z + booster.channel(booster.norm(mixed))
    assert torch.allclose(booster(z), expected, atol=1e-6)


# Empty sequences and padding


@pytest.mark.parametrize("switches", [{}, *LISTED], ids=named)
def test_an_empty_sequence_is_finite_in_value_and_gradient(table, switches):
    model = build(table, **switches).train()
    batch = synthetic.training_batch(table, history=LENGTH)
    batch.liked_mask = torch.zeros_like(batch.liked_mask)
    for name in ("item", "rating", "age"):
        setattr(batch, f"liked_{name}", torch.zeros_like(getattr(batch, f"liked_{name}")))
    out = model(batch)
    out.square().sum().backward()
    assert out.isfinite().all()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(g.isfinite().all() for g in found.values())
    assert found["inputs.nulls.0.event"].abs().sum() > 0


@pytest.mark.parametrize("switches", [{}, *LISTED], ids=named)
def test_left_padding_changes_no_logit(table, switches):
    requests = table.requests("train")[:8]
    model = build(table, **switches)
    short, long = (table.batch(requests, history=length) for length in (41, 61))  # up to 40 events in all
    assert not long.liked_mask[:, :20].any()
    assert torch.allclose(logits(model, short), logits(model, long), atol=1e-5)


def test_nothing_of_a_padded_event_is_read(table):
    model, batch = build(table), synthetic.training_batch(table, history=LENGTH)
    assert not batch.liked_mask.all()
    noisy = replace(batch, liked_item=torch.where(batch.liked_mask, batch.liked_item, 7))
    assert torch.allclose(logits(model, batch), logits(model, noisy), atol=1e-6)


# Query generation


def test_query_generation_is_the_equation(table):
    model = build(table)
    generator, requests, pairs = model.inputs.generator, 3, 5
    f, means = torch.randn(4, pairs, 16), torch.randn(requests, 32)
    request_of = torch.tensor([0, 0, 1, 2, 2])
    g = torch.cat([*f, means[request_of]], dim=1)  # (P, (M + S) D)
    expected = torch.stack(
        [
            torch.nn.functional.silu(g @ w1 + b1) @ w2 + b2
            for w1, b1, w2, b2 in zip(generator.first, generator.b1, generator.second, generator.b2, strict=True)
        ]
    )
    assert torch.allclose(generator(f, means, request_of), expected, atol=1e-5)


def test_means_leave_the_null_event_out(table):
    model, batch = build(table), synthetic.training_batch(table, history=LENGTH)
    batch.other_mask = torch.zeros_like(batch.other_mask)
    with torch.no_grad():
        means, rows = model.inputs.sequences(batch)
    assert torch.equal(means[:, 16:], torch.zeros_like(means[:, 16:]))
    liked, mask = rows[0]
    row = int(batch.liked_mask.sum(1).argmax())
    assert torch.allclose(means[row, :16], liked[row, 1:][mask[row, 1:]].mean(0), atol=1e-6)
    assert torch.equal(liked[:, 0], model.inputs.nulls[0].event.expand(len(liked), -1))


# Encoders and reducer


def test_only_the_newest_events_survive_the_longer_encoder():
    torch.manual_seed(0)
    encoder = AttentionEncoder(16, 2, 32, 0.0, survivors=4).eval()
    h, mask = torch.randn(2, 10, 16), torch.ones(2, 10, dtype=torch.bool)
    out, kept = encoder(h, mask)
    assert out.shape == (2, 5, 16)
    assert kept.shape == (2, 5)
    everything = AttentionEncoder(16, 2, 32, 0.0).eval()
    everything.load_state_dict(encoder.state_dict())
    whole, _ = everything(h, mask)
    assert torch.allclose(out, whole[:, [0, 6, 7, 8, 9]], atol=1e-6)
    h[:, 2] += 1  # a row that does not survive is still read
    assert not torch.allclose(encoder(h, mask)[0], out, atol=1e-4)


def test_reducer_merges_groups_of_four_aligned_to_the_newest():
    torch.manual_seed(0)
    reducer = LongerReducer(16).eval()
    h, mask = torch.randn(1, 1 + 18, 16), torch.ones(1, 19, dtype=torch.bool)
    out, kept = reducer(h, mask)  # null, mean, ceil(10 / 4) = 3 groups, 8 events
    assert out.shape[1] == 13 == 1 + reducer.length(18)
    assert kept.all()
    assert torch.equal(out[:, 0], h[:, 0])
    assert torch.equal(out[:, 5:], h[:, 11:])
    assert torch.allclose(out[:, 1], h[:, 1:].mean(1), atol=1e-6)
    changed = h.clone()
    changed[:, 2] += 1  # the second oldest event: groups are {1, 2}, {3..6}, {7..10}
    moved = (reducer(changed, mask)[0] != out).any(dim=2)[0]
    assert moved.nonzero().flatten().tolist() == [1, 2]
    assert reducer(h[:, :6], mask[:, :6])[0].shape[1] == 1 + reducer.length(5) == 7  # nothing to merge
    mask[:, 1:11] = False
    assert reducer(h, mask)[1][0].tolist() == [True, True, False, False, False, *[True] * 8]


def test_a_reduced_sequence_is_shorter_in_every_cache(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    keys = build(table, sequence_reducer="longer").prepare(batch).keys
    assert [k.k.shape[2] for layer in keys for k in layer] == 4 * [1 + 1 + 3 + 8]


# Every slot


@pytest.mark.parametrize("switches", [{}, *LISTED, *COMBINED], ids=named)
def test_every_choice_has_gradient_and_batching(table, switches):
    model, batch = build(table, **switches).train(), synthetic.training_batch(table, requests=6, history=9)
    loss = model(batch).square().sum() + model.extra_loss()
    loss.backward()
    model.after_step(1, 10)
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert silent == ["inputs.encoder.key_constant"]
    request = table.score_batch(int(table.requests("test")[3]), np.arange(1, 22), history=9)
    whole = logits(model, request)
    with torch.no_grad():
        state = model.prepare(request)
        chunks = torch.cat([model.score(state, part) for part in split_pairs(request, 8)])
    assert torch.allclose(chunks, whole, atol=1e-5)
    neighbours = [int(r) for r in table.requests("valid")[:11]]
    alone = torch.cat([logits(model, table.batch([r], history=9)) for r in neighbours])
    assert torch.allclose(logits(model, table.batch(neighbours, history=9)), alone, atol=1e-5)


def test_every_choice_differs_from_the_default(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    host = build(table)
    for switches in LISTED:
        other = build(table, **switches)
        fitting = {k: v for k, v in host.state_dict().items() if k in other.state_dict()}
        fitting = {k: v for k, v in fitting.items() if v.shape == other.state_dict()[k].shape}
        other.load_state_dict(fitting, strict=False)
        assert not torch.allclose(logits(other, batch), logits(host, batch), atol=1e-5), switches


def test_slots_are_eight_and_wrong_sizes_are_refused():
    assert len(SLOTS) == 8
    assert all({c[slot] for c in COMBINED} == set(SLOTS[slot]) for slot in SLOTS)
    assert set(SLOTS) <= {f.name for f in fields(HyFormerConfig)}
    with pytest.raises(ValueError, match="multiple of T = 8"):
        HyFormerConfig(width=20)
    with pytest.raises(ValueError, match="kv_encoder"):
        HyFormerConfig(kv_encoder="nothing")
    with pytest.raises(ValueError, match="5 tokens for 4 groups"):
        HyFormer(HyFormerConfig(tokens=5, width=18), {"item": 3} | dict.fromkeys(VOCABULARY, 3), np.zeros((3, 2)))


VOCABULARY = (
    "user_id",
    "age",
    "gender",
    "occupation",
    "zip",
    "hour",
    "weekday",
    "gap",
    "decade",
    "hist_rating",
    "hist_age",
)


def test_the_dot_shortcut_ranks_by_a_product_of_request_and_candidate(table):
    """Two requests, two candidates: without the per-candidate bias the score is linear in the candidate's vector."""
    model = build(table, candidate="dot")
    assert not hasattr(model.inputs.tokenizer, "pair")
    batch = table.score_batch(int(table.requests("test")[3]), np.array([3, 11]), history=LENGTH)
    pair = [p.clone() for p in model.inputs.candidate(batch)]
    with torch.no_grad():
        state = model.prepare(batch)
        ends = model.score(state, batch)
        model.inputs.candidate = lambda b: [p.mean(0, keepdim=True).expand_as(p) for p in pair]
        assert torch.allclose(model.score(state, batch), ends.mean(0, keepdim=True).expand(2, -1), atol=1e-6)


# Cost


@pytest.mark.parametrize("switches", [{}, *(s for s in LISTED if s != {"candidate": "dot"})], ids=named)
def test_declared_cost_is_the_counted_one(table, full, switches):
    model = build(table, history=10, **switches)
    assert full.liked_mask.all()
    assert full.other_mask.all()
    encoder = model.inputs.encoder

    def embed():
        request_fields(encoder, full)
        for name in SEQUENCES:
            window_events(encoder, full.window(name))
        encoder.pairs(full)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        assert flops_of(lambda: model(full)) - flops_of(embed) == model.flops(7)
    assert model.dense_params() == sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in encoder.parameters()
    )


def test_operators_report_their_parameters(table):
    for switches in ({}, *LISTED):
        model = build(table, **switches)
        parts = [model.inputs.tokenizer, model.inputs.generator, *model.inputs.reducers]
        for layer in model.layers:
            parts += [*layer.encoders, *layer.decoders]
            parts += [layer.booster.mixer, layer.booster.channel] if layer.booster.active else []
        parts += [model.head] if model.config.candidate == "token" else []
        for part in parts:
            assert part.params() == sum(p.numel() for p in part.parameters()), type(part).__name__


def test_the_cache_makes_the_request_part_cost_once(table):
    model = build(table, HyFormerConfig())
    request, pair = model.flops(1) - model.flops(0), model.flops(101) - model.flops(1)
    assert pair == 100 * request
    assert model.flops(0) > 10 * request  # encoding both sequences outweighs ten candidates


@pytest.mark.parametrize("tier", ["smoke", "standard", "full"])
def test_late_fusion_has_the_size_of_hyformer(table, tier):
    budget = CARD.budget(tier, "longer_then_rankmixer")
    config = HyFormerConfig(**{f.name: budget[f.name] for f in fields(HyFormerConfig) if f.name in budget})
    torch.manual_seed(0)
    target = HyFormer(config, table.vocab, table.item_genres).dense_params()
    assert matched_late_fusion(config, table.vocab, table.item_genres).dense_params() == pytest.approx(target, rel=0.05)


def test_late_fusion_reads_once_with_queries_that_boosting_never_touched(table):
    torch.manual_seed(0)
    model = LateFusion(replace(SMALL, query_generator="static"), table.vocab, table.item_genres, hidden=16).eval()
    batch = synthetic.training_batch(table, history=LENGTH)
    seen = []
    for decoder in model.decoders:
        decoder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(batch)
    assert len(seen) == len(SEQUENCES)
    moved = replace(batch, item=batch.item % synthetic.ITEMS + 1)
    model(moved)
    assert torch.equal(seen[0], seen[2])  # the candidate does not steer what is read
    check_candidate_free(model, batch)


def test_the_cross_baseline_reads_both_sequences_apart(table):
    torch.manual_seed(0)
    model = DCNv2(table.vocab, torch.from_numpy(table.item_genres), history=9, sequences=SEQUENCES).eval()
    batch = synthetic.training_batch(table)
    assert model.input.width == 224 + 2 * 3 * 48
    for name in SEQUENCES:
        assert not torch.allclose(logits(model, batch), logits(model, other_items(batch, name)), atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(model.score(model.prepare(batch), batch), logits(model, batch))


def test_half_precision_is_finite(table):
    batch = synthetic.training_batch(table, history=LENGTH)
    for switches in ({}, {"kv_encoder": "full"}, {"query_decoder": "linear"}, {"channel": "smoe"}):
        model = build(table, **switches).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
        out.float().square().sum().backward()
        assert out.isfinite().all()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = logits(model, batch)
        assert torch.allclose(half.float(), logits(model, batch), atol=0.1)
