"""The cache-blocked activation unit gives the numbers of ordinary operators: scores, gradients, statistics."""

import copy

import pytest
import torch

from auto_research.blocks import fused_attention
from auto_research.blocks.activation_unit import LocalActivationUnit
from auto_research.blocks.fused_attention import blocks_of


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    monkeypatch.setattr(fused_attention, "BLOCK_FLOATS", 10 * 10 * (11 + 12))  # ten pairs of the shapes below


def inputs(seed: int = 0):
    torch.manual_seed(seed)
    requests, length, width = 9, 11, 12
    request_of = torch.repeat_interleave(torch.arange(requests), torch.randint(1, 20, (requests,)))
    events, key = torch.randn(requests, length, width), torch.randn(len(request_of), width)
    filled = torch.randint(0, length + 1, (requests,))
    filled[0], filled[1] = 0, length  # an empty and a full history
    mask = torch.arange(length)[None, :] >= length - filled[:, None]
    return events, mask, key, request_of


def unit_of(activation: str, seed: int = 1) -> LocalActivationUnit:
    torch.manual_seed(seed)
    unit = LocalActivationUnit(12, (10, 6), activation)
    if activation == "dice":
        for layer in (unit.first_activation, unit.second_activation):
            layer.alpha.data.normal_()
            layer.update(torch.randn(layer.alpha.shape), torch.rand(layer.alpha.shape) + 0.1)
    return unit


@pytest.mark.parametrize("activation", ["dice", "prelu"])
@pytest.mark.parametrize("training", [True, False])
def test_fused_equals_plain(activation, training):
    events, mask, key, request_of = inputs()
    results = []
    for path in ("forward", "plain"):
        unit = unit_of(activation).train(training)
        e, k = events.clone().requires_grad_(), key.clone().requires_grad_()
        assert unit.fusable(e)
        scores = getattr(unit, path)(e, mask, k, request_of)
        torch.manual_seed(2)
        (scores * torch.randn_like(scores)).sum().backward()
        results.append((scores.detach(), e.grad, k.grad, dict(unit.named_parameters()), dict(unit.named_buffers())))
    fused, plain = results
    for a, b in zip(fused[:3], plain[:3], strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    for name, p in fused[3].items():
        assert torch.allclose(p.grad, plain[3][name].grad, atol=5e-5), name
    for name, b in fused[4].items():
        assert torch.allclose(b, plain[4][name], atol=1e-6), name


def test_any_mask_is_allowed_not_only_left_padding():
    events, mask, key, request_of = inputs()
    mask = mask & (torch.rand(mask.shape) < 0.5)
    unit = unit_of("dice").eval()
    with torch.no_grad():
        fused, plain = unit(events, mask, key, request_of), unit.plain(events, mask, key, request_of)
    assert torch.allclose(fused, plain, atol=1e-5)
    assert (fused[~mask[request_of]] == 0).all()


def test_blocks_hold_every_pair_once_and_skip_padding_only():
    _, mask, _, request_of = inputs()
    plan = blocks_of(request_of, mask.float(), floats_per_slot=10, extra_slots=12)
    assert len(plan) == -(-len(request_of) // 10) > 2
    assert sorted(torch.cat([block.pairs for block in plan]).tolist()) == list(range(len(request_of)))
    for block in plan:
        assert not mask[block.requests, : block.since].any()
    assert sum(block.since for block in plan) > 0


def test_fewer_than_two_valid_positions_train_on_running_values():
    events, mask, key, request_of = inputs()
    mask[:] = False
    mask[2, -1] = True
    request_of = torch.arange(9)
    unit = unit_of("dice").train()
    other = copy.deepcopy(unit)
    fused, plain = (run(events, mask, key[:9], request_of) for run in (unit, other.plain))
    assert torch.allclose(fused, plain, atol=1e-6)
    assert unit.first_activation.steps == other.first_activation.steps == 1


def test_a_second_backward_is_refused_clearly():
    events, mask, key, request_of = inputs()
    scores = unit_of("dice").train()(events.requires_grad_(), mask, key, request_of).sum()
    scores.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward twice"):
        scores.backward()


def test_without_gradients_one_pass_keeps_nothing(monkeypatch):
    """Parameters ask for gradients in evaluation too; grad mode decides."""
    events, mask, key, request_of = inputs()
    unit = unit_of("dice").eval()
    made = []
    moments = fused_attention._take_batch_statistics
    monkeypatch.setattr(fused_attention, "_take_batch_statistics", lambda *args: made.append(1) or moments(*args))
    kept = unit(events, mask, key, request_of)
    assert len(made) == 2
    with torch.no_grad():
        assert torch.equal(unit(events, mask, key, request_of), kept)
    assert len(made) == 2
