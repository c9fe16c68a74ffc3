"""Request side and candidate side: the decomposed products equal the dense masked ones on broadcast inputs."""

import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks.two_sided import (
    BroadcastLinear,
    DecoupledHeadShuffle,
    MaskedSlotLinear,
    SlotLinear,
    UpperPairs,
    bcast_linear,
    block_mask,
    cross_pairs,
)
from auto_research.metrics.cost import flops_of

COUNTS = torch.tensor([1, 3, 17])  # ragged requests of the card rocs
REQUEST_OF = torch.repeat_interleave(torch.arange(3), COUNTS)


def test_bcast_linear_by_hand():
    x_r, x_c = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    w_r, w_c = torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0]])
    assert bcast_linear(x_r, x_c, torch.tensor([0, 0]), w_r, w_c).flatten().tolist() == [9.0, 11.0]


def test_broadcast_linear_equals_the_linear_on_the_concatenation():
    torch.manual_seed(0)
    layer = BroadcastLinear(4, 3, 5)
    x_r, x_c = torch.randn(3, 4), torch.randn(21, 3)
    dense = torch.cat([layer.request, layer.pair]).t()
    whole = F.linear(torch.cat([x_r[REQUEST_OF], x_c], dim=1), dense, layer.bias)
    torch.testing.assert_close(layer(x_r, x_c, REQUEST_OF), whole)


def test_masked_slot_linear_equals_the_dense_masked_weight_in_value_and_gradient():
    torch.manual_seed(0)
    layer = MaskedSlotLinear((5, 4), (3, 2))
    x_r, x_c = torch.randn(3, 5, 6, requires_grad=True), torch.randn(21, 3, 6, requires_grad=True)
    y_r, y_c = layer(x_r, x_c, REQUEST_OF)
    dense = layer.dense()
    assert torch.equal(dense * block_mask((5, 4), (3, 2)), dense)
    assert (dense[:4, 5:] == 0).all()
    whole = dense @ torch.cat([x_r[REQUEST_OF], x_c], dim=1)  # (P, 4 + 2, d)
    torch.testing.assert_close(y_r[REQUEST_OF], whole[:, :4])
    torch.testing.assert_close(y_c, whole[:, 4:])
    weight = torch.randn_like(y_c)
    found = torch.autograd.grad((y_c * weight).sum(), [x_r, x_c, layer.cr], retain_graph=True)
    wanted = torch.autograd.grad((whole[:, 4:] * weight).sum(), [x_r, x_c, layer.cr], retain_graph=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad((y_r * torch.randn_like(y_r)).sum(), [x_c], allow_unused=True)
    assert gradient is None  # request outputs read no candidate


def test_slot_linear_leaves_channels_alone():
    torch.manual_seed(0)
    layer, x = SlotLinear(4, 3), torch.randn(2, 4, 5)
    order = torch.randperm(5)
    torch.testing.assert_close(layer(x)[..., order], layer(x[..., order]))
    assert torch.equal(SlotLinear(4, 4, start="identity")(x), x)
    with pytest.raises(ValueError, match="identity"):
        SlotLinear(4, 3, start="identity")
    with pytest.raises(ValueError, match="start"):
        SlotLinear(4, 3, start="zero")


def test_pairwise_products_by_hand():
    x = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]])
    assert UpperPairs(3)(x).tolist() == [[2.0, 0.0, 3.0]]
    x_c = torch.tensor([[[1.0, 1.0]], [[0.0, 2.0]]])  # two candidates with one slot
    assert cross_pairs(x, x_c, torch.tensor([0, 0])).tolist() == [[1.0, 3.0, 3.0], [0.0, 2.0, 6.0]]


def test_cross_pairs_equal_the_product_on_copied_slots():
    torch.manual_seed(0)
    counts = torch.tensor([1, 3, 17, 2, 0, 5, 1, 4, 9, 2])
    request_of = torch.repeat_interleave(torch.arange(10), counts)
    x_r, x_c = torch.randn(10, 5, 4), torch.randn(len(request_of), 3, 4)
    expected = (x_c @ x_r[request_of].transpose(1, 2)).flatten(1)
    torch.testing.assert_close(cross_pairs(x_r, x_c, request_of), expected)


def test_decoupled_shuffle_by_hand():
    """The example of the card mixformer: N = D = 4, N_U = 2."""
    x = torch.arange(1.0, 17.0).reshape(4, 1, 4)
    plain = DecoupledHeadShuffle(4, 4, 4)(x)[:, 0].tolist()
    assert plain == [[1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [4, 8, 12, 16]]
    masked = DecoupledHeadShuffle(4, 4, 2)(x)[:, 0].tolist()
    assert masked == [[1, 5, 0, 0], [2, 6, 0, 0], *plain[2:]]


def test_user_heads_have_no_gradient_from_item_heads():
    x = torch.randn(4, 3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad((DecoupledHeadShuffle(4, 8, 2)(x)[:2] * torch.randn(2, 3, 8)).sum(), [x])
    assert (gradient[2:] == 0).all()
    assert (gradient[:2] != 0).any()


@pytest.mark.parametrize("pairs", [1, 6])
def test_cost_is_a_request_part_plus_a_part_per_candidate(pairs):
    request_of = torch.zeros(pairs, dtype=torch.int64)
    linear = BroadcastLinear(4, 3, 5)
    assert flops_of(lambda: linear(torch.randn(1, 4), torch.randn(pairs, 3), request_of)) == linear.flops(pairs)
    slots = MaskedSlotLinear((5, 4), (3, 2))
    x_r, x_c = torch.randn(1, 5, 6), torch.randn(pairs, 3, 6)
    assert flops_of(lambda: slots(x_r, x_c, request_of)) == slots.flops(pairs, 6)
    assert slots.flops(pairs, 6) == 2 * 6 * (20 + 10 + pairs * 6)
