"""Flat pairs <-> padded grid.

A ranking batch holds R requests and P (request, candidate) pairs; the pairs of one request are contiguous and
`request_of` [P] names their request. Most layers work on the flat [P, ...] form, which carries no padding; a grid
[R, J, ...] is only worth its padding where one matrix product per request replaces a gather.
"""

import torch
from torch import Tensor


def pair_slots(request_of: Tensor, requests: int) -> tuple[Tensor, Tensor]:
    """Position of every pair inside its request, and the pairs of every request: int64[P], int64[R]."""
    counts = torch.bincount(request_of, minlength=requests)
    first = counts.cumsum(0) - counts
    return torch.arange(len(request_of), device=request_of.device) - first[request_of], counts


def to_grid(x: Tensor, request_of: Tensor, requests: int) -> tuple[Tensor, Tensor]:
    """Spread flat pairs over a zero-padded grid.

    Parameters: x [P, ...]; request_of int64[P], pairs of one request contiguous; requests R.
    Returns: grid [R, J, ...] with J the largest number of pairs of one request, and its mask bool[R, J].
    """
    slot, counts = pair_slots(request_of, requests)
    width = int(counts.max()) if requests else 0
    grid = x.new_zeros((requests, width, *x.shape[1:]))
    grid = grid.index_put((request_of, slot), x)
    mask = torch.arange(width, device=x.device)[None, :] < counts[:, None]
    return grid, mask


def from_grid(grid: Tensor, request_of: Tensor) -> Tensor:
    """Inverse of `to_grid`: [R, J, ...] -> [P, ...]."""
    slot, _ = pair_slots(request_of, grid.shape[0])
    return grid[request_of, slot]


def pool_by_request(weights: Tensor, events: Tensor, request_of: Tensor) -> Tensor:
    """Weighted sums of a request's events, one per pair: u_p = sum_l weights[p, l] * events[request_of[p], l].

    weights [P, L], events [R, L, d] -> [P, d]. Done as one [J, L] x [L, d] product per request, so that the events
    are never copied once per pair.
    """
    if events.shape[0] == 1:
        return weights @ events[0]
    grid, _ = to_grid(weights, request_of, events.shape[0])
    return from_grid(torch.bmm(grid, events), request_of)
