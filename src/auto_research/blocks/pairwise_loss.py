"""Pairwise ranking losses and the choice of pairs.

    BPR / RankNet   log(1 + exp(-(s_a - s_b)))         (arXiv:1205.2618; Burges et al., ICML 2005)
    margin          max(0, m - (s_a - s_b))
a is the better item of a pair. Losses are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from auto_research.blocks.pairs import to_grid
from auto_research.runtime.precision import float32_region


def logistic_pairs(better: Tensor, worse: Tensor, weight: Tensor | None = None) -> Tensor:
    """Weighted mean of softplus(-(better - worse)) over pairs [N]; 0 without pairs. Unweighted it is BPR.

    weight: [N] non-negative, e.g. the difference of gains (LambdaRank) or of ratings.
    """
    with float32_region(better.device):
        return _mean(F.softplus(worse.float() - better.float()), weight)


def margin_pairs(better: Tensor, worse: Tensor, margin: float = 1.0, weight: Tensor | None = None) -> Tensor:
    """Weighted mean of max(0, margin - (better - worse)) over pairs [N]; 0 without pairs."""
    with float32_region(better.device):
        return _mean(F.relu(margin - (better.float() - worse.float())), weight)


def _mean(loss: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return loss.sum() / max(1, loss.numel())
    weight = weight.to(loss.dtype)
    return (loss * weight).sum() / weight.sum().clamp(min=torch.finfo(loss.dtype).tiny)


def all_pairs(positive: Tensor, positive_mask: Tensor, negative: Tensor, negative_mask: Tensor) -> Tensor:
    """Mean over all (p, n) of a row of softplus(s_n - s_p): SessionRec's in-session rank loss, [N].

    positive [N, K], negative [N, M] with bool masks. A row without either costs 0 with zero gradient.
    """
    with float32_region(positive.device):
        positive = positive.float().masked_fill(~positive_mask, 0.0)
        negative = negative.float().masked_fill(~negative_mask, 0.0)
        both = (positive_mask.unsqueeze(2) & negative_mask.unsqueeze(1)).float()  # (N, K, M)
        loss = F.softplus(negative.unsqueeze(1) - positive.unsqueeze(2)) * both
        return loss.sum((1, 2)) / both.sum((1, 2)).clamp(min=1)


def label_pairs(
    group: Tensor,
    label: Tensor,
    *,
    second: Tensor | None = None,
    time: Tensor | None = None,
    within: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pairs of one group with different labels: (better, worse), each int64[pairs], row numbers into the inputs.

    group: int64[N], ascending.  label: [N].  second: [N], decides where labels are equal (ratings below likes).
    time: int64[N] with within: only pairs less than `within` apart. Pairs never cross groups.
    """
    _, member = torch.unique_consecutive(group, return_inverse=True)
    groups = int(member[-1]) + 1 if len(member) else 0
    rows, valid = to_grid(
        torch.arange(len(group), device=group.device), member, groups
    )  # (G, J): J^2 per group, not N^2

    def compared(values: Tensor) -> tuple[Tensor, Tensor]:
        return values[rows].unsqueeze(2), values[rows].unsqueeze(1)  # (G, J, 1), (G, 1, J)

    a, b = compared(label)
    keep = a > b
    if second is not None:
        finer, other = compared(second)
        keep = keep | ((a == b) & (finer > other))
    keep = keep & valid.unsqueeze(2) & valid.unsqueeze(1)
    if within is not None:
        one, other = compared(time)
        keep = keep & ((one - other).abs() < within)
    which, better, worse = torch.nonzero(keep, as_tuple=True)
    return rows[which, better], rows[which, worse]


def at_most(group: Tensor, limit: int, generator: torch.Generator | None = None) -> Tensor:
    """Row numbers of a random choice of at most `limit` rows per group: group int64[N] -> int64[n], ascending.

    Drawn on CPU from `generator`, so the choice is the same on every device.
    """
    order = torch.argsort(torch.rand(len(group), generator=generator))
    shuffled = group.cpu()[order]
    by_group = torch.argsort(shuffled, stable=True)
    sorted_group = shuffled[by_group]
    first = torch.searchsorted(sorted_group, sorted_group, right=False)
    rank = torch.arange(len(group)) - first
    return order[by_group[rank < limit]].sort().values.to(group.device)
