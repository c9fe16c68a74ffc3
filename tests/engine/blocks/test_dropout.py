"""Byte dropout keeps the expected share, the mean, and follows the global generator."""

import pytest
import torch

from auto_research.blocks.dropout import Dropout


def test_share_and_mean():
    torch.manual_seed(0)
    out = Dropout(0.2)(torch.ones(100_000))
    kept = 205 / 256
    assert (out > 0).float().mean().item() == pytest.approx(kept, abs=0.005)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / kept])
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)


def test_seeded_and_off_in_evaluation():
    layer, x = Dropout(0.5), torch.randn(3, 7)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    assert layer.eval()(x) is x


def test_positions_are_independent():
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(4000, 16)) > 0).float()
    correlation = torch.corrcoef(kept.t()) - torch.eye(16)
    assert correlation.abs().max() < 0.08
