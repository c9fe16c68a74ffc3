"""Sparse mixture of experts: worked gates, gradients of unchosen experts, dense reference, empty experts."""

import pytest
import torch

from auto_research.blocks.sparse_moe import SparseMoE


def routed(logits, active=2) -> SparseMoE:
    """A mixture whose router gives `logits` to the token (1, 0)."""
    torch.manual_seed(0)
    moe = SparseMoE(2, 12, experts=len(logits), active=active)
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([[value, 0.0] for value in logits]))
    return moe


TOKEN = torch.tensor([[1.0, 0.0]])


def test_gates_keep_the_softmax_without_renormalising():
    moe = routed([2.0, 1.0, 0.0, -1.0])
    shares, gates, chosen = moe.route(TOKEN)
    kept = torch.zeros(4).scatter(0, chosen[0], gates[0])
    assert kept.tolist() == pytest.approx([0.6439, 0.2369, 0, 0], abs=5e-5)
    assert shares.sum().item() == pytest.approx(1.0)


def test_unchosen_experts_get_exactly_no_gradient():
    moe = routed([2.0, 1.0, 0.0, -1.0])
    moe(TOKEN).square().sum().backward()
    for name in ("w1", "b1", "w2", "b2"):
        gradient = getattr(moe, name).grad
        assert not gradient[2:].any(), name
        assert gradient[:2].flatten(1).any(1).all(), name
    assert moe.router.weight.grad[2:].any()  # the softmax is over all experts


def test_sparse_equals_the_dense_masked_sum():
    torch.manual_seed(1)
    moe = SparseMoE(16, 24, experts=8, active=2)
    x = torch.randn(3, 5, 7, 16, requires_grad=True)
    y = torch.randn(3, 5, 7, 16)
    assert torch.allclose(moe(x), moe.dense(x), atol=1e-5)
    sparse = torch.autograd.grad((moe(x) * y).sum(), [x, *moe.parameters()])
    dense = torch.autograd.grad((moe.dense(x) * y).sum(), [x, *moe.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(sparse, dense, strict=True))


def test_experts_without_a_token_are_skipped():
    moe = routed([9.0, 0.0, 0.0, 0.0, 0.0], active=1).eval()
    assert torch.equal(moe(TOKEN), moe.dense(TOKEN))
    assert moe.load.tolist() == [1, 0, 0, 0, 0]
    assert moe.load_entropy() == 0
    assert moe(torch.zeros(0, 2)).shape == (0, 2)


def test_balance_is_one_for_a_uniform_router_and_grows_with_imbalance():
    even = routed([0.0, 0.0, 0.0, 0.0]).train()
    even(TOKEN)
    assert even.take_balance().item() == pytest.approx(1.0)
    assert even.take_balance() is None
    uneven = routed([5.0, 4.0, 0.0, 0.0]).train()
    uneven(TOKEN)
    assert uneven.take_balance().item() == pytest.approx(4 * 0.5 * 0.99024, abs=1e-4)


def test_active_parameters_and_sizes():
    moe = SparseMoE(16, 24, experts=8, active=2)
    assert moe.active_params() == 16 * 8 + 2 * (2 * 16 * 24 + 24 + 16)
    with pytest.raises(ValueError, match="cannot choose"):
        SparseMoE(4, 4, experts=2, active=3)
