"""Requests grouped by their number of candidates, so that one matrix product per request wastes little on padding.

Flat pairs [P, ...] are spread over a grid [r, J, ...] per group; `collect` goes back. Both move whole rows by one index,
which costs a fraction of advanced indexing in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from auto_research.blocks.pairs import pair_slots

FEW_REQUESTS = 8  # below this a split by size costs more than its padding


class Group(NamedTuple):
    """Requests with a similar number of pairs: rows int64[r]; pairs int64[p]; row and slot of each pair int64[p]; J."""

    rows: Tensor
    pairs: Tensor
    row: Tensor
    slot: Tensor
    width: int


def request_groups(request_of: Tensor, requests: int) -> list[Group]:
    """Requests bucketed by the power of two above their number of pairs: a grid of a group is at least half full.

    request_of int64[P], pairs of one request contiguous. Requests without pairs are in no group.
    """
    slot, counts = pair_slots(request_of, requests)
    if requests <= FEW_REQUESTS:
        rows = torch.arange(requests, device=request_of.device)
        width = int(counts.max()) if requests else 0
        pairs = torch.arange(len(request_of), device=request_of.device)
        return [Group(rows, pairs, request_of, slot, width)] if width else []
    bucket = torch.bucketize(counts, 2 ** torch.arange(32, device=counts.device))  # ceil(log2(counts))
    groups = []
    for level in torch.unique(bucket[counts > 0]).tolist():
        rows = torch.nonzero((bucket == level) & (counts > 0)).squeeze(1)
        position = torch.full_like(counts, -1).index_put((rows,), torch.arange(len(rows), device=rows.device))
        pairs = torch.nonzero(position[request_of] >= 0).squeeze(1)
        width = int(counts[rows].max())
        groups.append(Group(rows, pairs, position[request_of[pairs]], slot[pairs], width))
    return groups


def spread(x: Tensor, group: Group) -> Tensor:
    """Flat pairs of a group [p, ...] -> zero-padded grid [r, J, ...]."""
    grid = x.new_zeros((len(group.rows) * group.width, *x.shape[1:]))
    return grid.index_copy(0, group.row * group.width + group.slot, x).unflatten(0, (len(group.rows), group.width))


def collect(grid: Tensor, group: Group) -> Tensor:
    """Inverse of `spread`: [r, J, ...] -> [p, ...]."""
    return grid.flatten(0, 1).index_select(0, group.row * group.width + group.slot)
