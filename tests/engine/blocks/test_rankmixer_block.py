import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks.per_token_ffn import PerTokenFFN
from auto_research.blocks.rankmixer_block import RankMixerBlock, matched_width
from auto_research.metrics.cost import flops_of


def test_a_block_is_the_equation():
    torch.manual_seed(0)
    block, x = RankMixerBlock(2, 4, 6), torch.randn(2, 3, 4)
    mixed = torch.stack([torch.cat([x[0, :, h : h + 2], x[1, :, h : h + 2]], dim=1) for h in (0, 2)])
    s = F.layer_norm(x + mixed, (4,))
    assert torch.allclose(block(x), F.layer_norm(s + block.ffn(s), (4,)), atol=1e-6)


def test_a_hidden_width_can_be_given_instead_of_a_multiple():
    torch.manual_seed(0)
    ffn, x = PerTokenFFN(3, 4, hidden=6), torch.randn(3, 5, 4)
    apart = [F.gelu(x[t] @ ffn.w1[t] + ffn.b1[t]) @ ffn.w2[t] + ffn.b2[t] for t in range(3)]
    torch.testing.assert_close(ffn(x), torch.stack(apart))
    assert ffn.w1.shape == (3, 4, 6)
    assert ffn.params() == sum(p.numel() for p in ffn.parameters())
    assert ffn.flops(5) == flops_of(lambda: ffn(x))


def test_matched_width_meets_a_parameter_count():
    target = RankMixerBlock(4, 8, 37).params()
    assert matched_width(target, lambda hidden: RankMixerBlock(4, 8, hidden)) == 37
    with pytest.raises(ValueError, match="already holds"):
        matched_width(100, lambda hidden: RankMixerBlock(4, 8, hidden))
