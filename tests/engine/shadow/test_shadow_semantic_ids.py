"""Trie, beam search, sampling and models of semantic ids give the same on the shadow device as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from both_devices import assert_equal_runs

from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores, sample_paths
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDVocab, resolve_collisions
from auto_research.blocks.sid_models import SIDConfig, SIDDecoder, SIDSeq2Seq, SIDStep, sequence_logprob, sid_loss

SIZES = (3, 4, 5)
CODES = np.stack([np.random.default_rng(0).integers(0, size, 40) for size in SIZES], axis=1)
TABLES = {
    "suffix": resolve_collisions(CODES, SIZES, "suffix"),
    "group": resolve_collisions(CODES, SIZES, "group", popularity=np.arange(41)),
}


@pytest.mark.parametrize("mode", TABLES)
def test_counts_of_the_trie(mode):
    def program(device):
        trie = PrefixTrie.of(TABLES[mode], device)
        assert trie.device.type == device.type
        seen = torch.randint(0, 41, (3, 25)).to(device)
        alive = trie.alive(seen)
        yield alive
        yield trie.alive(seen, inventory=(torch.rand(3, 41) < 0.6).to(device))
        codes = torch.from_numpy(TABLES[mode].codes[1:7]).view(3, 2, -1).to(device)
        yield from trie.path_masks(codes, alive)
        yield trie.expand(torch.tensor([[1, 5, -1], [0, 2, 7], [3, -1, -1]]).to(device), 4, seen=seen)

    assert_equal_runs(program)
    moved = PrefixTrie.of(TABLES[mode]).to("shadow")
    assert moved.code.device.type == "shadow"


@pytest.mark.parametrize("kind", [SIDSeq2Seq, SIDDecoder])
@pytest.mark.parametrize("low_precision", [False, True])
def test_training_search_and_samples(kind, low_precision):
    table = TABLES["suffix"]

    def program(device):
        config = SIDConfig(width=16, heads=2, encoder_layers=1, layers=2, dropout=0.0)
        model = kind(SIDVocab.of(table), config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
        model = model.to(device)
        tokens = torch.randint(0, 12, (3, 8)).to(device)
        mask = torch.ones(3, 8, dtype=torch.bool)
        mask[1, :4] = False
        trie = PrefixTrie.of(table, device)
        alive = trie.alive(torch.randint(0, 41, (3, 25)).to(device))
        codes = torch.from_numpy(table.codes[[3, 14, 15]]).unsqueeze(1).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=low_precision):
            mask = mask.to(device)
            ctx = model.encode(tokens, mask) if kind is SIDSeq2Seq else model(tokens, mask=mask)[1]
            loss = sid_loss(model, ctx, codes)
            loss.backward()
            yield loss
            gradient = model.embedding.weight.grad
            yield gradient.norm() if low_precision else gradient
            beams = constrained_beam(SIDStep(model), ctx, trie, 6, alive=alive)
            assert beams.logp.dtype == torch.float32
            yield beams.logp
            if low_precision:
                return
            yield beams.codes
            yield sequence_logprob(model, ctx, beams.codes)
            yield exhaustive_sid_scores(model, ctx, table)
            yield constrained_beam(SIDStep(model), ctx, trie, 9, constrained=False).leaf
            for distinct in (False, True):
                noise = torch.Generator().manual_seed(3)
                draws = sample_paths(SIDStep(model), ctx, trie, 5, alive=alive, distinct=distinct, generator=noise)
                yield draws.codes
                yield draws.proposal

    tolerance = {"rtol": 0.1, "atol": 0.05} if low_precision else {"rtol": 1e-4, "atol": 1e-5}
    assert_equal_runs(program, **tolerance)
