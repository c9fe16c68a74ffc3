import torch
import torch.nn.functional as F

from auto_research.blocks.wukong import WukongLayer, close_layer
from auto_research.metrics.cost import flops_of


def test_one_layer_by_hand():
    layer = WukongLayer(width=1, slots=3, outputs=1, hidden=1)
    with torch.no_grad():
        layer.hidden.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        layer.hidden.bias.fill_(0.5)
        layer.out.weight.fill_(2.0)
        layer.out.bias.fill_(-1.0)
        layer.linear.weight.copy_(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
        layer.norm = torch.nn.Identity()
    # x = (2, 3, 5): products 6, 10, 15 -> 6 + 20 + 45 + 0.5; compression 7; residuals 3 and 10
    mixed = 2 * F.silu(torch.tensor(71.5)) - 1
    y = layer(torch.tensor([[[2.0], [3.0], [5.0]]]))
    torch.testing.assert_close(y, torch.stack([mixed + 3, torch.tensor(17.0)]).reshape(1, 2, 1))


def test_products_are_scaled_by_the_root_of_the_width():
    torch.manual_seed(0)
    layer, x = WukongLayer(width=4, slots=3, outputs=2, hidden=5).eval(), torch.randn(6, 3, 4)
    row, column = torch.triu_indices(3, 3, offset=1)
    dots = (x[:, row] * x[:, column]).sum(2) / 2  # sqrt(4)
    fm = layer.out(F.silu(layer.hidden(dots))).reshape(6, 2, 4)
    linear = torch.einsum("os,bsd->bod", layer.linear.weight, x)
    expected = layer.norm(torch.cat([fm, linear[:, :2]], dim=1) + linear[:, 2:])
    torch.testing.assert_close(layer(x), expected)
    assert layer(x).shape == (6, 4, 4)


def test_every_output_slot_is_normalised_over_its_channels():
    torch.manual_seed(0)
    y = close_layer(torch.randn(5, 2 * 8), torch.randn(5, 3 * 2, 8), torch.nn.LayerNorm(8))
    torch.testing.assert_close(y.mean(2), torch.zeros(5, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(2, unbiased=False), torch.ones(5, 4), atol=1e-3, rtol=0)


def test_counted_operations_are_those_that_run():
    layer, x = WukongLayer(width=8, slots=6, outputs=2, hidden=5).eval(), torch.randn(7, 6, 8)
    assert layer.flops(7) == flops_of(lambda: layer(x))
    assert layer.params() == 6 * 6 + 15 * 5 + 5 + 5 * 16 + 16 + 16
