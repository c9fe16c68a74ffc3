"""HSTU: weights by hand, divisor by visible keys, causality and gating."""

import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks.hstu import Hstu, HstuBlock, HstuConfig
from auto_research.metrics.cost import flops_of


def model(**choice):
    torch.manual_seed(0)
    return Hstu(HstuConfig(width=8, heads=2, layers=2, positions=8, times=6) if not choice else HstuConfig(**choice))


def events():
    torch.manual_seed(1)
    mask = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    return torch.randn(2, 5, 8), mask, torch.randint(0, 9, (2, 5)).cumsum(1)


def test_weights_by_hand():
    block = HstuBlock(HstuConfig(width=1, heads=1, bias="none"))
    q = k = torch.tensor([[[[1.0], [2.0]]]])
    visible = torch.tensor([[[True, False], [True, True]]])
    position = torch.tensor([[0, 1]])
    found = block.weights(q, k, visible, position, None)[0, 0]
    # SiLU(1) / 1; SiLU(2) / 2 and SiLU(4) / 2
    torch.testing.assert_close(found, torch.tensor([[0.7311, 0.0], [0.8808, 1.9640]]), atol=1e-4, rtol=0)
    block.longest = 8
    scaled = block.weights(q, k, visible, position, None)[0, 0]
    torch.testing.assert_close(scaled[1], F.silu(torch.tensor([2.0, 4.0])) / 8)


def test_the_future_and_padding_change_nothing():
    trunk, (x, mask, time) = model(), events()
    before = trunk(x, mask, time=time)
    later, padded = x.clone(), x.clone()
    later[:, 3:] = torch.randn(2, 2, 8)
    padded[1, :2] = 50.0
    torch.testing.assert_close(trunk(later, mask, time=time)[:, :3], before[:, :3])
    torch.testing.assert_close(trunk(padded, mask, time=time)[1, 2:], before[1, 2:])


def test_more_left_padding_changes_no_state():
    """n is the number of visible keys, not the padded length."""
    trunk, (x, mask, time) = model(), events()
    wide = F.pad(x, (0, 0, 3, 0)), F.pad(mask, (3, 0)), F.pad(time, (3, 0))
    found = trunk(wide[0], wide[1], time=wide[2])[:, 3:]
    torch.testing.assert_close(found[0], trunk(x, mask, time=time)[0])


def test_time_and_position_count():
    trunk, (x, mask, time) = model(), events()
    before = trunk(x, mask, time=time)
    assert not torch.allclose(trunk(x, mask, time=time * 7), before)
    assert not torch.allclose(trunk(x, mask, time=time, position=2 * torch.arange(5).expand(2, 5)), before)


def test_a_closed_gate_leaves_the_residual():
    block = HstuBlock(HstuConfig(width=8, heads=2, bias="none"))
    with torch.no_grad():
        block.uvqk.weight[:8].zero_(), block.uvqk.bias[:8].zero_()  # U = SiLU(0) = 0
        block.out.bias.zero_()
    x = torch.randn(1, 3, 8)
    visible = torch.ones(1, 3, 3, dtype=torch.bool)
    assert torch.equal(block(x, visible, torch.arange(3)[None]), x)


def test_declared_flops_are_counted_flops_and_rotary_is_refused():
    trunk, (x, mask, time) = model(), events()
    assert flops_of(lambda: trunk(x, mask, time=time)) == trunk.flops(2, 5)
    with pytest.raises(ValueError, match="rotary"):
        HstuConfig(bias="rotary")


@pytest.mark.parametrize("longest", [None, 40])
def test_candidates_behind_a_cache_equal_whole_sequences(longest):
    torch.manual_seed(0)
    trunk = Hstu(HstuConfig(width=8, heads=2, layers=3, longest=longest, positions=9, times=12)).eval()
    with torch.no_grad():
        for block in trunk.blocks:
            for table in block.bias.parameters():
                table.normal_()
    x, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
    mask[1, :3], mask[2] = False, False
    time, now = torch.randint(0, 500, (3, 5)).cumsum(1), torch.tensor([9_000, 3_000, 5_000])
    request_of = torch.tensor([0, 0, 0, 1, 2, 2])
    rows = torch.randn(6, 8)
    own = torch.cat([x[request_of], rows.unsqueeze(1)], dim=1)
    own_mask = torch.nn.functional.pad(mask[request_of], (0, 1), value=True)
    own_time = torch.cat([time[request_of], now[request_of].unsqueeze(1)], dim=1)
    expected = trunk(own, own_mask, time=own_time)[:, -1]
    cache = trunk.cache(x, mask, time=time)
    found = trunk.candidates(rows, cache, mask, request_of, time=time, now=now)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
