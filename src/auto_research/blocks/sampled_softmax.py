"""Softmax losses against sampled negatives, with logQ correction.

    L = -log [ e^{s_+ - log Q_+} / (e^{s_+ - log Q_+} + sum_n e^{s_n - log Q_n}) ]

Subtracting log Q makes the sampled sum an estimate of the full one, so that popular items, which are drawn often as
in-batch negatives, are not pushed down for it (Bengio and Senecal 2003; Yi et al., RecSys 2019). Sources of the two
forms: ARGUS (arXiv:2507.15994) and SessionRec (arXiv:2502.10157). All losses are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.runtime.precision import float32_region


def log_proposal(counts: Tensor, in_batch: int, uniform: int) -> Tensor:
    """log Q(i) of one draw from the mixture of `in_batch` items by frequency and `uniform` items by chance.

    Q(i) = (in_batch * f_i + uniform / n) / (in_batch + uniform), f_i = counts_i / sum counts, n = len(counts).
    counts: [n] non-negative train frequencies (without a padding row). -inf where an item is never drawn.
    """
    counts = counts.to(torch.float32)
    share = counts / counts.sum().clamp(min=1)
    return torch.log((in_batch * share + uniform / len(counts)) / (in_batch + uniform))


def sampled_softmax(
    positive: Tensor,
    negative: Tensor,
    *,
    log_q_positive: Tensor | None = None,
    log_q_negative: Tensor | None = None,
    usable: Tensor | None = None,
) -> Tensor:
    """Loss of every row, [N].

    positive: scores [N].  negative: scores [N, M].  log_q_positive [N], log_q_negative [M] or [N, M]: log Q, no
    correction when None.  usable: bool[N, M], False where a negative is the positive itself or else excluded. A row
    without usable negatives costs 0.
    """
    with float32_region(positive.device):
        positive, negative = positive.float(), negative.float()
        if log_q_positive is not None:
            positive = positive - log_q_positive.float()
        if log_q_negative is not None:
            negative = negative - log_q_negative.float()
        if usable is not None:
            negative = negative.masked_fill(~usable, -torch.inf)
        logits = torch.cat([positive.unsqueeze(1), negative], dim=1)
        return torch.logsumexp(logits, dim=1) - positive


def multi_positive_softmax(
    positive: Tensor,
    positive_mask: Tensor,
    negative: Tensor,
    usable: Tensor,
    *,
    log_q_positive: Tensor | None = None,
    log_q_negative: Tensor | None = None,
) -> Tensor:
    """Every positive of a row against the row's negatives, the other positives left out: loss of every row, [N].

    positive: scores [N, K] with mask bool[N, K]; negative: scores [N, M]; usable bool[N, M] (or [1, M]); log Q as in
    `sampled_softmax` with log_q_positive [N, K]. The mean over the positives of a row; a row without any costs 0.
    """
    with float32_region(positive.device):
        positive, negative = positive.float(), negative.float()
        if log_q_positive is not None:
            positive = positive - log_q_positive.float()
        if log_q_negative is not None:
            negative = negative - log_q_negative.float()
        floor = torch.finfo(torch.float32).min / 2
        rest = torch.logsumexp(negative.masked_fill(~usable, floor), dim=1, keepdim=True)  # (N, 1)
        loss = F.softplus(rest - positive.masked_fill(~positive_mask, 0.0))  # -log e^s / (e^s + e^rest)
        weight = positive_mask.float()
        return (loss * weight).sum(1) / weight.sum(1).clamp(min=1)


class Temperature(nn.Module):
    """Learned temperature tau, kept in [lowest, highest]: forward(dot products) -> dot products / tau, float32."""

    def __init__(self, start: float, lowest: float = 0.01, highest: float = 1.0):
        super().__init__()
        self.lowest, self.highest = lowest, highest
        self.tau = nn.Parameter(torch.tensor(float(start)))

    def forward(self, products: Tensor) -> Tensor:
        with float32_region(products.device):
            return products.float() / self.tau.float().clamp(self.lowest, self.highest)
