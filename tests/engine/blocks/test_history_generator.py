"""TIGER's generator: what a target may read, both sources, both stacks, beam against exhaustive scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores
from auto_research.blocks.history_generator import GeneratorConfig, HistoryDecoder, HistoryGenerator
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDVocab, random_codes, resolve_collisions
from auto_research.blocks.sid_models import SIDStep, sid_loss

SIZES = (5, 4, 3)
TABLE = resolve_collisions(random_codes(40, SIZES, seed=0), SIZES)
VOCAB = SIDVocab.of(TABLE, users=4)
SMALL = {"width": 16, "heads": 2, "encoder_layers": 1, "layers": 2, "hidden": 24, "dropout": 0.0, "length": 6}
ITEMS = torch.tensor([[0, 0, 3, 9, 17, 2], [5, 6, 7, 8, 10, 40]])
USER = torch.tensor([1, 7])
WAYS = {
    "fused": {},
    "fused-last": {"causal": False},
    "flat": {"source": "flat"},
    "flat-last": {"source": "flat", "causal": False},
    "no-user": {"user_token": False},
}


def build(kind=HistoryGenerator, **options):
    torch.manual_seed(0)
    model = kind(TABLE, VOCAB, GeneratorConfig(**SMALL, **options), 9).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def batch(items, target, user=USER):
    return SimpleNamespace(items=items, target=target, user=user)


@pytest.fixture(params=[*WAYS, "decoder"])
def model(request):
    return build(HistoryDecoder) if request.param == "decoder" else build(**WAYS[request.param])


def test_beam_of_all_leaves_gives_the_exhaustive_order(model):
    ctx = model.context(ITEMS, USER)
    alive = PrefixTrie.of(TABLE).alive(ITEMS)
    scores = exhaustive_sid_scores(model, ctx, TABLE)
    scores.scatter_(1, ITEMS, -torch.inf)
    beams = constrained_beam(SIDStep(model), ctx, PrefixTrie.of(TABLE), 40, alive=alive)
    found = PrefixTrie.of(TABLE).expand(beams.leaf[..., 0], 34)
    expected = scores.sort(1, descending=True)
    assert torch.equal(found, expected.indices[:, :34])
    torch.testing.assert_close(beams.logp[:, :34], expected.values[:, :34], atol=1e-4, rtol=0)
    plain = constrained_beam(SIDStep(model, cache=False), ctx, PrefixTrie.of(TABLE), 40, alive=alive)
    torch.testing.assert_close(plain.logp, beams.logp, atol=1e-4, rtol=0)


def test_padding_is_never_read(model):
    before = exhaustive_sid_scores(model, model.context(ITEMS, USER), TABLE)
    model.tokens.items[0] = torch.tensor([1, 2, 3, 4])
    torch.testing.assert_close(exhaustive_sid_scores(model, model.context(ITEMS, USER), TABLE), before)


def test_user_token_is_read_where_there_is_one(model):
    before = exhaustive_sid_scores(model, model.context(ITEMS, USER), TABLE)
    after = exhaustive_sid_scores(model, model.context(ITEMS, USER + 1), TABLE)
    assert torch.equal(before, after) == (not model.choice.user_token)


@pytest.mark.parametrize("way", ["fused", "flat", "no-user"])
def test_window_loss_is_the_mean_over_its_prefixes(way):
    """What follows item t reads items up to t: the loss at every item equals that of each prefix alone, with the slots
    it has in the window."""
    model = build(**WAYS[way])
    target = torch.tensor([[0, 0, 9, 17, 2, 33], [6, 7, 8, 10, 40, 1]])
    losses = []
    for row in range(2):
        for t in range(6):
            if target[row, t] == 0:
                continue
            later = ITEMS[row : row + 1].clone()
            later[:, t + 1 :] = 12  # other items in the future
            ctx = model.context(later, USER[row : row + 1])
            visible = (model._place(6, ITEMS.device) <= t).view(1, 1, -1)
            codes = model.tokens.codes[target[row, t]].view(1, 1, -1)
            losses.append(sid_loss(model, ctx, codes, visible=visible, extra=model.slot[5 - t]))
    torch.testing.assert_close(model.training_loss(batch(ITEMS, target)), torch.stack(losses).mean())


def test_last_target_alone_where_the_encoder_is_open():
    model = build(causal=False)
    target = torch.zeros_like(ITEMS)
    target[:, -1] = torch.tensor([33, 1])
    scores = exhaustive_sid_scores(model, model.context(ITEMS, USER), TABLE)
    expected = -scores[[0, 1], [33, 1]].mean()
    torch.testing.assert_close(model.training_loss(batch(ITEMS, target)), expected)


def test_fused_token_is_the_sum_of_the_codes_over_their_root():
    model = build()
    token = model.source(ITEMS, USER)[1, 1] - model.slot[5]
    torch.testing.assert_close(token, model.embedding(model.tokens.items[5]).sum(0) / 2)


def test_both_stacks_have_as_many_parameters():
    flat, decoder = build(source="flat", causal=False), build(HistoryDecoder)
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (flat, decoder))
    assert abs(ours - theirs) <= decoder.config.layers * (2 * 16 + 1)


def test_every_parameter_learns():
    for way in WAYS:
        model = build(**WAYS[way])
        target = torch.zeros_like(ITEMS)
        target[:, -2:] = torch.tensor([[33, 34], [1, 2]])
        model.training_loss(batch(ITEMS, target)).backward()
        trained = {name: p for name, p in model.named_parameters() if p.numel()}
        assert not [name for name, p in trained.items() if p.grad is None or not p.grad.any()], way


def test_users_beyond_the_table_of_tokens_are_hashed():
    model = build()
    assert np.array_equal(model.tokens.users.numpy(), VOCAB.user_token(np.arange(10)))
