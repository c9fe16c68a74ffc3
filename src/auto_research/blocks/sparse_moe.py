"""Sparse mixture of experts with softmax top-k routing; only the chosen experts are computed (OneRec, arXiv:2502.18965).

    s = softmax(x W_r),   y = sum_{e in TopK(s)} s_e FFN_e(x)

The kept gates are not renormalised. Tokens are gathered per expert and scattered back, summed in float32. `relu_moe`
holds the mixtures whose experts belong to a token position; here one set of experts serves every token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.runtime.precision import float32_region


class SparseMoE(nn.Module):
    """[.., D] -> [.., D] with E experts D -> hidden -> D (ReLU), `active` of them per token.

    load: float32[E] tokens sent to every expert since `reset_load`, a count that no state saves.
    """

    def __init__(self, width: int, hidden: int, experts: int = 8, active: int = 2):
        super().__init__()
        if not 1 <= active <= experts:
            raise ValueError(f"cannot choose {active} of {experts} experts")
        self.active = active
        self.router = nn.Linear(width, experts, bias=False)
        self.w1, self.b1 = _uniform(experts, width, hidden), _uniform(experts, hidden, scale=width)
        self.w2, self.b2 = _uniform(experts, hidden, width), _uniform(experts, width, scale=hidden)
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self._balance: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.w1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities [N, E], gates [N, k] and experts int64 [N, k] of tokens [N, D]; float32 in training and serving."""
        with float32_region(x.device):
            shares = F.linear(x.float(), self.router.weight.float()).softmax(-1)
            gates, chosen = shares.topk(self.active, dim=-1)
        return shares, gates, chosen

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (N, D)
        shares, gates, chosen = self.route(flat)
        count = torch.zeros_like(shares).scatter_(1, chosen, 1.0).sum(0)  # (E,)
        if self.training:
            self._balance = self.experts * (count / count.sum().clamp(min=1) * shares.mean(0)).sum()
        else:
            self.load += count.detach()
        out = torch.zeros(flat.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                value = self.expert(flat[token], expert).float() * gates[token, slot].unsqueeze(1)
                out = out.index_add(0, token, value)
        return out.to(x.dtype).view_as(x)

    def expert(self, x: Tensor, number: int) -> Tensor:
        """FFN_number of tokens [n, D]."""
        hidden = F.relu(x @ self.w1[number] + self.b1[number].to(x.dtype))
        return hidden @ self.w2[number] + self.b2[number].to(hidden.dtype)

    def dense(self, x: Tensor) -> Tensor:
        """The same value with every expert computed on every token and the gates masked; the reference of tests."""
        flat = x.flatten(0, -2)
        shares, gates, chosen = self.route(flat)
        mask = torch.zeros_like(shares).scatter(1, chosen, gates)
        values = torch.stack([self.expert(flat, e) for e in range(self.experts)], dim=1)  # (N, E, D)
        return (values * mask.unsqueeze(2)).sum(1).view_as(x)

    def take_balance(self) -> Tensor:
        """Balance loss E sum_e f_e P_e of the last training pass, once; f_e share of the dispatched tokens, P_e mean
        probability. 1 when both are uniform."""
        balance, self._balance = self._balance, None
        return balance

    def reset_load(self) -> None:
        self.load.zero_()

    def load_entropy(self) -> float:
        """Entropy of the load divided by log E: 1 for an even load, 0 when one expert does everything or none did."""
        share = self.load / self.load.sum().clamp(min=1)
        used = share[share > 0]
        return float(-(used * used.log()).sum() / math.log(self.experts)) if self.experts > 1 else 1.0

    def active_params(self) -> int:
        """Parameters that one token uses: the router and `active` experts."""
        each = sum(p[0].numel() for p in (self.w1, self.b1, self.w2, self.b2))
        return self.router.weight.numel() + self.active * each


def _uniform(*shape: int, scale: int | None = None) -> nn.Parameter:
    """Uniform within 1 / sqrt(fan-in), as nn.Linear starts; the fan-in is the second axis unless given."""
    bound = (scale or shape[1]) ** -0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
