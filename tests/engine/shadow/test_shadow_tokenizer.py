"""RQ-VAE training and preference objectives give the same on the shadow device as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from both_devices import assert_equal_runs

from auto_research.blocks.preference import dpo, ecpo, frozen_reference, gbpo, group_adv, grpo, logprob_of_logits
from auto_research.blocks.rqvae import RQVAEConfig, build_rqvae
from auto_research.train.state import StateFolder
from auto_research.train.tokenizer import TokenizerPlan, fit_rqvae

FORMS = {
    "plain": {},
    "two_channels": {"channels": 2, "rotation": "householder", "progressive": True},
    "fused": {"inputs": (6, 3), "hidden": ((8,), ()), "fuse": (7,), "activation": "gelu", "pair_weight": 1.0},
}


def config(name: str) -> RQVAEConfig:
    return RQVAEConfig(**({"inputs": (6,), "sizes": (6, 4), "hidden": ((8,),), "width": 4} | FORMS[name]))


@pytest.mark.parametrize("name", FORMS)
def test_codes_and_losses_of_a_fit(name, tmp_path):
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((60, width)).astype(np.float32) for width in config(name).inputs]
    pairs = rng.integers(0, 60, (30, 2)) if config(name).pair_weight else None
    plan = TokenizerPlan(steps=10, warm_up=2, batch=16, pair_batch=8, reset_every=4)

    def program(device):
        state = StateFolder(tmp_path / device.type)
        result = fit_rqvae(x, config(name), plan=plan, seed=1, state=state, device=device, pairs=pairs)
        yield [codes.tolist() for codes in result.codes]
        yield torch.tensor([entry["loss"] for entry in result.history]).to(device)

    assert_equal_runs(program, rtol=1e-4, atol=1e-5)


def test_quantisation_stays_float32_under_autocast():
    def program(device):
        model = build_rqvae(config("two_channels"), 0).to(device)
        inputs = [torch.randn(20, 6).to(device)]
        model.start_quantising(inputs, 0)
        with torch.autocast(device.type, torch.bfloat16):
            terms = model.losses(inputs, depth=torch.ones(20, dtype=torch.int64).to(device))
        terms["loss"].backward()
        assert terms["quantisation"].dtype == torch.float32
        yield terms["loss"]
        yield model.rotation.v.grad

    assert_equal_runs(program, rtol=2e-2, atol=2e-2)


def test_preference_objectives():
    def program(device):
        head = torch.nn.Linear(8, 12).to(device)
        reference = frozen_reference(head)
        with torch.no_grad():
            reference.bias += 0.3
        hidden, tokens = torch.randn(6, 4, 8).to(device), torch.randint(0, 12, (6, 4)).to(device)
        mask = (torch.rand(6, 4) < 0.8).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logp = logprob_of_logits(head(hidden), tokens, mask)
            with torch.no_grad():
                old = logprob_of_logits(reference(hidden), tokens, mask)
            advantage = group_adv(torch.randn(2, 3).to(device)).flatten()
            losses = [
                gbpo(logp, old, advantage),
                ecpo(logp, old, advantage),
                grpo(logp, old, advantage, 0.2, 0.1, old),
                dpo(logp[:3], logp[3:], old[:3], old[3:], 0.1),
            ]
        sum(loss.sum() for loss in losses).backward()
        assert all(loss.dtype == torch.float32 for loss in losses)
        yield from losses
        yield head.weight.grad

    assert_equal_runs(program, rtol=1e-3, atol=1e-4)
