"""Flat pairs and padded grids hold the same numbers."""

import torch

from auto_research.blocks.pairs import from_grid, pair_slots, pool_by_request, to_grid

REQUEST_OF = torch.tensor([0, 0, 2, 2, 2])  # request 1 has no pair


def test_grid_by_hand():
    grid, mask = to_grid(torch.tensor([1.0, 2, 3, 4, 5]), REQUEST_OF, 3)
    assert grid.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert pair_slots(REQUEST_OF, 3)[0].tolist() == [0, 1, 0, 1, 2]


def test_there_and_back():
    x = torch.randn(5, 4, 2)
    assert torch.equal(from_grid(to_grid(x, REQUEST_OF, 3)[0], REQUEST_OF), x)


def test_pooling_equals_the_gathered_product():
    events = torch.randn(3, 6, 4, requires_grad=True)
    weights = torch.randn(5, 6, requires_grad=True)
    pooled = pool_by_request(weights, events, REQUEST_OF)
    expected = torch.einsum("pl,pld->pd", weights, events[REQUEST_OF])
    assert torch.allclose(pooled, expected, atol=1e-6)
    one = pool_by_request(weights, events[:1], torch.zeros(5, dtype=torch.int64))
    assert torch.allclose(one, weights @ events[0])
