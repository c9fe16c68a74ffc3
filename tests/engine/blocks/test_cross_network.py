import torch

from auto_research.blocks.cross_network import CrossNetwork


def test_one_cross_layer_by_hand():
    net = CrossNetwork(2, 1)
    with torch.no_grad():
        net.layers[0].weight.copy_(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
        net.layers[0].bias.copy_(torch.tensor([0.5, 0.0]))
    # x0 * (W x0 + b) + x0 with x0 = (2, 3): W x0 + b = (2.5, 7)
    assert net(torch.tensor([[2.0, 3.0]])).tolist() == [[2 * 2.5 + 2, 3 * 7 + 3]]


def test_later_layers_multiply_by_the_first_input():
    net = CrossNetwork(1, 2)
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.fill_(1.0)
            layer.bias.zero_()
    # x1 = x0^2 + x0 = 6, x2 = x0 * x1 + x1 = 18 for x0 = 2
    assert net(torch.tensor([[2.0]])).item() == 18.0


def test_parameter_count_of_the_card():
    assert CrossNetwork(368, 3).params() == 407_376
