"""The shared blocks of the ranking backbones give the same values and gradients on the shadow device as on the CPU."""

from __future__ import annotations

import pytest
import torch
from both_devices import assert_equal_runs

from auto_research.blocks.attention_bias import BIAS_KINDS
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.blocks.hstu import Hstu, HstuConfig
from auto_research.blocks.pairwise_loss import all_pairs, at_most, label_pairs, logistic_pairs
from auto_research.blocks.private_projection import MixedFFN, PrivateSwiGLU
from auto_research.blocks.request_attention import HeadwiseCrossAttention, RequestCrossAttention
from auto_research.blocks.sampled_softmax import log_proposal, multi_positive_softmax, sampled_softmax
from auto_research.blocks.two_sided import (
    BroadcastLinear,
    DecoupledHeadShuffle,
    MaskedSlotLinear,
    UpperPairs,
    cross_pairs,
)

REQUEST_OF = torch.repeat_interleave(torch.arange(10), torch.tensor([1, 2, 3, 4, 9, 1, 1, 2, 17, 1]))
PAIRS = len(REQUEST_OF)


def request_blocks(device):
    request_of, mask = REQUEST_OF.to(device), (torch.rand(10, 6) < 0.7).to(device)
    tokens, events, wide = (torch.randn(*s).to(device) for s in ((PAIRS, 3, 8), (10, 6, 6), (10, 6, 32)))
    slots_r, slots_c, heads = (torch.randn(*s).to(device) for s in ((10, 5, 6), (PAIRS, 3, 6), (4, PAIRS, 8)))
    cross = RequestCrossAttention(8, 6, heads=2, null_event=True).to(device)
    read = cross(tokens, events, mask, request_of)
    read.square().sum().backward()
    yield read
    yield cross.kv.weight.grad
    yield HeadwiseCrossAttention(4, 8).to(device)(heads, wide, mask, request_of)
    yield from MaskedSlotLinear((5, 4), (3, 2)).to(device)(slots_r, slots_c, request_of)
    yield BroadcastLinear(30, 18, 4).to(device)(slots_r.flatten(1), slots_c.flatten(1), request_of)
    yield cross_pairs(slots_r, slots_c, request_of)
    yield UpperPairs(5).to(device)(slots_r)
    yield DecoupledHeadShuffle(4, 8, 2).to(device)(heads)
    yield PrivateSwiGLU(4, 8, 12).to(device)(heads)
    yield MixedFFN(2, 8, 16).to(device)(tokens)


def test_request_level_blocks():
    assert_equal_runs(request_blocks)


@pytest.mark.parametrize("bias", BIAS_KINDS)
def test_biased_transformer_with_cache_and_candidates(bias):
    def program(device):
        model = BiasedTransformer(BiasedConfig(width=8, heads=2, bias=bias)).to(device)
        mask = (torch.rand(10, 6) < 0.7).to(device)
        time = torch.randint(0, 9, (10, 6)).cumsum(1).to(device)
        hidden, cache = model.prefill(torch.randn(10, 6, 8).to(device), mask, time=time)
        later = torch.full((PAIRS,), 100).to(device)
        rows = model.candidates(torch.randn(PAIRS, 8).to(device), cache, REQUEST_OF.to(device), time=later)
        rows.square().sum().backward()
        yield hidden
        yield rows
        yield model.blocks[0].qkv.weight.grad
        yield model.extend(torch.randn(10, 2, 8).to(device), cache, time=time[:, -2:] + 50)[0]

    assert_equal_runs(program, rtol=1e-4, atol=1e-5)


def test_hstu_and_losses():
    def program(device):
        mask = (torch.rand(3, 6) < 0.7).to(device)
        time = torch.randint(0, 9, (3, 6)).cumsum(1).to(device)
        yield Hstu(HstuConfig(width=8, heads=2)).to(device)(torch.randn(3, 6, 8).to(device), mask, time=time)
        positive, negative = torch.randn(3, 2).to(device), torch.randn(3, 6).to(device)
        some = (torch.rand(3, 2) < 0.7).to(device)
        yield multi_positive_softmax(positive, some, negative, mask)
        log_q = log_proposal(torch.arange(6).to(device), 4, 4)
        yield sampled_softmax(positive[:, 0], negative, log_q_negative=log_q, usable=mask)
        yield all_pairs(positive, some, negative, mask)
        group, label = torch.tensor([0, 0, 1, 1, 1]).to(device), torch.tensor([1, 0, 1, 0, 0]).to(device)
        better, worse = label_pairs(group, label)
        yield better
        score = torch.randn(5).to(device)
        yield logistic_pairs(score[better], score[worse])
        yield at_most(group[better], 1, torch.Generator().manual_seed(0))

    assert_equal_runs(program)
