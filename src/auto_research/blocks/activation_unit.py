"""DIN's local activation unit and attention pooling (arXiv:1706.06978, section 4.3), on flat pairs.

    a_j = MLP([e_j; v; e_j - v; e_j * v]),   v_U(v) = (1 / sqrt(L_max)) sum_j a_j e_j

The first layer is linear, so with its weight cut into four parts
    W [e; v; e - v; e * v] = (W1 + W3) e + (W2 - W3) v + W4 (e * v)
                           = e (W13 + diag(v) W4) + v W23,
and the [P, L, 4d] tensor is never built: one [d, h] matrix per pair is.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from auto_research.blocks.dice import ACTIVATIONS, Dice, PReLU
from auto_research.blocks.fused_attention import fused_scores
from auto_research.blocks.pairs import pool_by_request


class UnitWeights(NamedTuple):
    """Factorised first layer: event, key, product [d, h1] and bias [h1]."""

    event: Tensor
    key: Tensor
    product: Tensor
    bias: Tensor


class LocalActivationUnit(nn.Module):
    """Scores a_j of every (pair, behaviour): 4d -> hidden[0] -> hidden[1] -> 1.

    forward(events [R, L, d], mask bool[R, L], key [P, d], request_of int64[P]) -> [P, L]; zero at masked positions.
    """

    def __init__(self, width: int, hidden: tuple[int, int] = (80, 40), activation: str = "dice"):
        super().__init__()
        self.width = width
        self.first = nn.Linear(4 * width, hidden[0])
        self.first_activation = ACTIVATIONS[activation](hidden[0])
        self.second = nn.Linear(hidden[0], hidden[1])
        self.second_activation = ACTIVATIONS[activation](hidden[1])
        self.last = nn.Linear(hidden[1], 1)

    def factorised(self) -> UnitWeights:
        w1, w2, w3, w4 = self.first.weight.split(self.width, dim=1)  # each (h1, d)
        return UnitWeights((w1 + w3).t(), (w2 - w3).t(), w4.t(), self.first.bias)

    def forward(self, events: Tensor, mask: Tensor, key: Tensor, request_of: Tensor) -> Tensor:
        if self.fusable(events):
            return fused_scores(self, events, mask, key, request_of)
        return self.plain(events, mask, key, request_of)

    def fusable(self, events: Tensor) -> bool:
        """The cache-blocked kernel serves float32 on CPU; elsewhere memory traffic is not the bottleneck."""
        known = isinstance(self.first_activation, (Dice, PReLU))
        return known and events.device.type == "cpu" and not torch.is_autocast_enabled("cpu")

    def plain(self, events: Tensor, mask: Tensor, key: Tensor, request_of: Tensor) -> Tensor:
        """The same scores with ordinary operators; reference of the fused kernel."""
        w = self.factorised()
        e, valid = events[request_of], mask[request_of]  # (P, L, d), (P, L)
        per_pair = w.event + key.unsqueeze(2) * w.product  # (P, d, h1)
        s = torch.bmm(e, per_pair) + (key @ w.key + w.bias).unsqueeze(1)  # (P, L, h1)
        s = self.second(self.first_activation(s, valid))  # (P, L, h2)
        scores = self.last(self.second_activation(s, valid)).squeeze(2)  # (P, L)
        return scores * valid.to(scores.dtype)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, length: int) -> int:
        """Forward multiply-adds times two of `pairs` candidates over `length` events, activations not counted."""
        d, h1, h2 = self.width, self.first.out_features, self.second.out_features
        return 2 * pairs * (length * (d * h1 + h1 * h2 + h2) + d * h1)


class AttentionPooling(nn.Module):
    """User vector of every pair, v_U [P, d].

    pooling: 'attention' (unnormalised weighted sum), 'softmax' (ablation, scale 1/sqrt(d)), 'mean' and 'sum' (a_j =
    sqrt(L_max)/max(1, len) and a_j = 1, no unit). The divisor sqrt(L_max) is a constant of the configuration, never
    the padded or the real length; an empty history gives 0.
    """

    def __init__(
        self,
        width: int,
        *,
        longest: int = 50,
        pooling: str = "attention",
        hidden: tuple[int, int] = (80, 40),
        activation: str = "dice",
    ):
        super().__init__()
        if pooling not in ("attention", "softmax", "mean", "sum"):
            raise ValueError(f"unknown pooling {pooling!r}")
        self.pooling = pooling
        self.scale = 1 / math.sqrt(longest)
        attends = pooling in ("attention", "softmax")
        self.unit = LocalActivationUnit(width, hidden, activation) if attends else None

    def weights(self, events: Tensor, mask: Tensor, key: Tensor, request_of: Tensor) -> Tensor:
        """The a_j of every pair, [P, L], before the division by sqrt(L_max); they sum to 1 for 'softmax'."""
        valid = mask[request_of]  # (P, L)
        if self.pooling == "sum":
            return valid.to(events.dtype)
        if self.pooling == "mean":
            return valid.to(events.dtype) / (self.scale * valid.sum(1, keepdim=True).clamp(min=1))
        scores = self.unit(events, mask, key, request_of)
        if self.pooling == "attention":
            return scores
        scores = (scores / math.sqrt(events.shape[2])).float()
        scores = scores.masked_fill(~valid, torch.finfo(scores.dtype).min)
        return (torch.softmax(scores, dim=1) * valid).to(events.dtype)

    def forward(self, events: Tensor, mask: Tensor, key: Tensor, request_of: Tensor) -> Tensor:
        if self.pooling == "mean":  # candidate independent: once per request
            share = mask.to(events.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
            return (share.unsqueeze(1) @ events).squeeze(1)[request_of]
        weights = self.weights(events, mask, key, request_of)
        pooled = pool_by_request(weights, events, request_of)
        return pooled if self.pooling == "softmax" else pooled * self.scale

    def flops(self, pairs: int, length: int, width: int) -> int:
        """Forward matrix FLOPs of unit and weighted sum for `pairs` candidates of one request."""
        return 2 * pairs * length * width + (self.unit.flops(pairs, length) if self.unit else 0)
