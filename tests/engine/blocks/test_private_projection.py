"""Private projections: values by hand, equality with separate layers, the sharing rule of OneTrans."""

import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks.private_projection import (
    GroupTokenizer,
    MixedFFN,
    MixedLinear,
    PieceTokenizer,
    PositionLinear,
    PrivateLinear,
    PrivateSwiGLU,
    SwiGLU,
)
from auto_research.metrics.cost import flops_of


def test_private_linear_by_hand():
    layer = PrivateLinear(2, 1, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[2.0]], [[3.0]]]))
        layer.bias.copy_(torch.tensor([[[1.0]], [[-1.0]]]))
    assert layer(torch.tensor([[[5.0]], [[5.0]]])).flatten().tolist() == [11.0, 14.0]


def test_position_linear_is_the_private_linear_in_the_other_layout():
    torch.manual_seed(0)
    one, other = PrivateLinear(3, 4, 5), PositionLinear(3, 4, 5)
    other.load_state_dict(one.state_dict())
    x = torch.randn(7, 3, 4)
    torch.testing.assert_close(other(x), one(x.transpose(0, 1)).transpose(0, 1))


def test_private_swiglu_equals_one_swiglu_per_token():
    torch.manual_seed(0)
    layer, x = PrivateSwiGLU(3, 4, 6), torch.randn(3, 5, 4)
    for t in range(3):
        single = SwiGLU(4, 6)
        with torch.no_grad():
            single.up.weight.copy_(layer.up.weight[t].t()), single.up.bias.copy_(layer.up.bias[t, 0])
            single.down.weight.copy_(layer.down.weight[t].t()), single.down.bias.copy_(layer.down.bias[t, 0])
        torch.testing.assert_close(layer(x)[t], single(x[t]))


def test_swiglu_by_hand():
    layer = SwiGLU(1, 1)
    with torch.no_grad():
        layer.up.weight.copy_(torch.tensor([[1.0], [2.0]])), layer.up.bias.zero_()
        layer.down.weight.fill_(3.0), layer.down.bias.zero_()
    assert layer(torch.tensor([[1.0]])).item() == pytest.approx(3 * 0.7310586 * 2, rel=1e-5)


def test_equal_inputs_differ_in_private_positions_only():
    torch.manual_seed(0)
    layer = MixedLinear(2, 4, 6)
    x = torch.randn(1, 1, 4).expand(3, 5, 4)  # 3 sequence positions, 2 private ones
    y = layer(x)[0]
    assert torch.equal(y[0], y[2])
    assert not torch.allclose(y[3], y[0])
    assert not torch.allclose(y[3], y[4])
    layer.share()
    torch.testing.assert_close(layer(x)[0], layer.sequence(x)[0])


def test_mixed_ffn_halves_are_the_whole():
    torch.manual_seed(0)
    layer, x = MixedFFN(2, 4, 8), torch.randn(3, 5, 4)
    whole = layer(x)
    torch.testing.assert_close(layer.sequence(x[:, :3]), whole[:, :3])
    torch.testing.assert_close(layer.private(x[:, 3:]), whole[:, 3:])


def test_piece_tokenizer_pads_the_last_piece_with_zeros():
    torch.manual_seed(0)
    layer = PieceTokenizer(5, 2, 4)  # pieces of 3, one zero
    x = torch.randn(6, 5)
    expected = F.linear(x[:, 3:], layer.project.weight[1, :2].t(), layer.project.bias[1, 0])
    torch.testing.assert_close(layer(x)[1], expected)
    moved = x.clone()
    moved[:, 0] += 1
    assert torch.equal(layer(moved)[1], layer(x)[1])


def test_group_tokenizer_gives_one_token_per_group():
    torch.manual_seed(0)
    layer = GroupTokenizer([2, 3], 4)
    a, b = torch.randn(5, 2), torch.randn(5, 3)
    tokens = layer(a, b)
    assert tokens.shape == (2, 5, 4)
    torch.testing.assert_close(tokens[1], layer.projections[1](b))


def test_declared_sizes_are_real():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4)
    for layer in (PrivateLinear(3, 4, 6), PrivateSwiGLU(3, 4, 6)):
        assert layer.params() == sum(p.numel() for p in layer.parameters())
        assert flops_of(lambda layer=layer: layer(x)) == layer.flops(5)
    mixed = MixedFFN(2, 4, 8)
    assert flops_of(lambda: mixed(torch.randn(3, 5, 4))) == mixed.flops(9, 3)
    assert flops_of(lambda: SwiGLU(4, 6)(x)) == SwiGLU(4, 6).flops(15)
    groups = GroupTokenizer([2, 3], 4)
    assert flops_of(lambda: groups(torch.randn(5, 2), torch.randn(5, 3))) == groups.flops(5)
