import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks.per_token_ffn import PerTokenFFN
from auto_research.blocks.rankmixer_block import PrivateFFN, RankMixerBlock, matched_width
from auto_research.metrics.cost import flops_of


def test_a_block_is_the_equation():
    torch.manual_seed(0)
    block, x = RankMixerBlock(2, 4, 6), torch.randn(2, 3, 4)
    mixed = torch.stack([torch.cat([x[0, :, h : h + 2], x[1, :, h : h + 2]], dim=1) for h in (0, 2)])
    s = F.layer_norm(x + mixed, (4,))
    assert torch.allclose(block(x), F.layer_norm(s + block.ffn(s), (4,)), atol=1e-6)


def test_the_private_ffn_of_a_multiple_width_is_the_per_token_ffn():
    torch.manual_seed(0)
    one, two = PrivateFFN(3, 4, 8), PerTokenFFN(3, 4, expansion=2)
    with torch.no_grad():
        for layer, weight, bias in ((one.up, two.w1, two.b1), (one.down, two.w2, two.b2)):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    x = torch.randn(3, 5, 4)
    assert torch.equal(one(x), two(x))
    assert one.params() == two.params()
    assert one.flops(5) == two.flops(5) == flops_of(lambda: one(x))


def test_matched_width_meets_a_parameter_count():
    target = RankMixerBlock(4, 8, 37).params()
    assert matched_width(target, lambda hidden: RankMixerBlock(4, 8, hidden)) == 37
    with pytest.raises(ValueError, match="already holds"):
        matched_width(100, lambda hidden: RankMixerBlock(4, 8, hidden))
