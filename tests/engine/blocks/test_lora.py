"""Low-rank updates of linear layers: start, scale, and which gradients each way of detaching leaves."""

import pytest
import torch
from torch import nn

from auto_research.blocks.lora import LoRALinear, LowRank, detached_linear

MODES = ({}, {"detach_base": True}, {"detach_output": True})


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def trained(linear, **options) -> LoRALinear:
    layer = LoRALinear(linear, 2, **options)
    nn.init.normal_(layer.update.b)
    return layer


@pytest.mark.parametrize("options", MODES)
def test_an_untrained_update_changes_nothing(linear, options):
    x = torch.randn(3, 5, 6)
    assert torch.equal(LoRALinear(linear, 2, **options)(x), linear(x))


@pytest.mark.parametrize("options", MODES)
def test_the_update_is_scaled_by_alpha_over_rank(linear, options):
    layer, x = trained(linear, alpha=6.0, **options), torch.randn(5, 6)
    expected = linear(x) + 3.0 * x @ layer.update.a.t() @ layer.update.b.t()
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.merged()(x), expected)


def test_a_by_hand():
    update = LowRank(2, 1, 1)
    with torch.no_grad():
        update.a.copy_(torch.tensor([[2.0, -1.0]]))
        update.b.fill_(3.0)
    assert update(torch.tensor([[1.0, 4.0]])).item() == -6.0


def test_a_starts_with_variance_one_over_rank():
    assert LowRank(4000, 3, 8).a.var().item() == pytest.approx(1 / 8, rel=0.1)
    with pytest.raises(ValueError, match="rank"):
        LowRank(4, 4, 0)


@pytest.mark.parametrize(
    ("options", "weight", "through_base"),
    [({}, True, True), ({"detach_base": True}, False, True), ({"detach_output": True}, False, False)],
)
def test_gradients_by_way_of_detaching(linear, options, weight, through_base):
    layer = trained(linear, **options)
    x = torch.randn(5, 6, requires_grad=True)
    layer(x).sum().backward()
    assert (linear.weight.grad is not None) == weight
    assert (linear.bias.grad is not None) == weight
    update = layer.update.b @ layer.update.a
    total = (linear.weight + update if through_base else update).sum(0)
    torch.testing.assert_close(x.grad, total.expand(5, -1))
    assert layer.update.a.grad.abs().sum() > 0
    assert layer.update.b.grad.abs().sum() > 0


def test_at_the_start_detach_output_stops_the_input_and_detach_base_does_not(linear):
    for options, reached in (({"detach_output": True}, False), ({"detach_base": True}, True)):
        x = torch.randn(5, 6, requires_grad=True)
        LoRALinear(linear, 2, **options)(x).sum().backward()
        assert bool(x.grad.any()) == reached


def test_a_shared_layer_is_one_layer(linear):
    both = nn.ModuleList([linear, LoRALinear(linear, 2)])
    assert sum(p.numel() for p in both.parameters()) == 6 * 4 + 4 + 2 * 6 + 4 * 2
    assert detached_linear(nn.Linear(3, 2, bias=False), torch.ones(1, 3)).shape == (1, 2)


def test_low_precision_activations(linear):
    layer = trained(linear, detach_output=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(torch.randn(3, 6))
    assert found.isfinite().all()
