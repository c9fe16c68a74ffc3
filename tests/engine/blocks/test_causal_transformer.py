"""Causality and padding of the Transformer, and the two kernels it is trained with."""

import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks import softmax_loss
from auto_research.blocks.causal_transformer import CausalTransformer, TransformerConfig, causal_mask
from auto_research.blocks.dropout import Dropout, byte_dropout
from auto_research.blocks.softmax_loss import linear_cross_entropy


@pytest.fixture(params=["pre", "post"])
def trunk(request):
    torch.manual_seed(0)
    return CausalTransformer(TransformerConfig(width=8, heads=2, layers=2, norm=request.param)).eval()


def test_causal_mask_by_hand():
    mask = torch.tensor([[False, True, True]])
    assert causal_mask(mask)[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_the_future_changes_nothing(trunk):
    x = torch.randn(2, 6, 8)
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, 8)
    mask = torch.ones(2, 6, dtype=torch.bool)
    before, after = trunk(x, mask), trunk(changed, mask)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_padding_on_either_side_changes_no_valid_row(trunk):
    x = torch.randn(1, 4, 8)
    alone = trunk(x, torch.ones(1, 4, dtype=torch.bool))
    junk = torch.full((1, 3, 8), 1e3)
    left = trunk(torch.cat([junk, x], 1), torch.tensor([[False] * 3 + [True] * 4]))
    right = trunk(torch.cat([x, junk], 1), torch.tensor([[True] * 4 + [False] * 3]))
    torch.testing.assert_close(left[:, 3:], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(right[:, :4], alone, atol=1e-5, rtol=1e-5)


def test_a_row_of_padding_stays_finite(trunk):
    assert trunk(torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=torch.bool)).isfinite().all()


def test_width_must_be_divisible_by_heads():
    with pytest.raises(ValueError, match="divisible"):
        TransformerConfig(width=10, heads=4)


@pytest.mark.parametrize("first", [0, 1])
def test_linear_cross_entropy_equals_the_plain_one(monkeypatch, first):
    monkeypatch.setattr(softmax_loss, "CPU_ROWS", 4)  # several chunks and a short last one
    torch.manual_seed(1)
    hidden = torch.randn(11, 5, dtype=torch.float64).float().requires_grad_()
    table = torch.randn(7, 5).requires_grad_()
    target = torch.randint(1, 7, (11,))
    plain = F.cross_entropy(hidden @ table[first:].t(), target - first) * 3.0
    expected = torch.autograd.grad(plain, [hidden, table])
    chunked = linear_cross_entropy(hidden, table, target, first=first) * 3.0
    found = torch.autograd.grad(chunked, [hidden, table])
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_linear_cross_entropy_survives_large_logits():
    hidden, table = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.5]])
    assert float(linear_cross_entropy(hidden, table, torch.tensor([1]))) == pytest.approx(500.0)


def test_byte_dropout_keeps_the_mean_and_the_rate():
    torch.manual_seed(0)
    dropped = byte_dropout(torch.ones(100_003), 0.3)
    kept = dropped != 0
    assert float(kept.float().mean()) == pytest.approx(1 - 77 / 256, abs=0.01)
    assert dropped[kept].unique().tolist() == [pytest.approx(256 / 179)]
    # every one of the eight bytes of a draw is as random as the others
    shares = kept[:100_000].reshape(-1, 8).float().mean(0)
    assert (shares - shares.mean()).abs().max() < 0.02


def test_dropout_is_off_in_eval_mode_and_follows_the_seed():
    layer, x = Dropout(0.5), torch.randn(64)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(first, layer(x))
    assert torch.equal(layer.eval()(x), x)
    with pytest.raises(ValueError, match="rate"):
        Dropout(1.0)
