"""Sparse mixture of per-token experts with ReLU routing (arXiv:2507.15551, section 3.4), and a softmax top-k ablation.

    G_ij = ReLU(h(s_i)_j),   v_i = sum_j G_ij e_ij(s_i),   e_ij: D -> k_e D -> D with GELU

Tensors are token-major [T, P, D]. All experts of a token are one wide hidden layer [E k_e D] whose slices are scaled by
the gates, so training is two batched products whatever the sparsity; `sparse` gathers active experts for serving.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.per_token_ffn import private_linear

PENALTY_START, PENALTY_LOW, PENALTY_HIGH, PENALTY_RATE = 1e-4, 1e-8, 1.0, 1.05
TOP_K = 2
BALANCE_WEIGHT = 0.01


class PenaltyController(nn.Module):
    """Weight lambda of the sparsity penalty: lambda <- lambda * 1.05^sign(active_ratio - rho), in [1e-8, 1]."""

    def __init__(self, rho: float):
        super().__init__()
        self.rho = rho
        self.register_buffer("weight", torch.tensor(PENALTY_START))

    @torch.no_grad()
    def update(self, active_ratio: Tensor) -> None:
        step = torch.sign(active_ratio.to(self.weight) - self.rho)
        self.weight.mul_(PENALTY_RATE**step).clamp_(PENALTY_LOW, PENALTY_HIGH)


class Router(nn.Module):
    """Private Linear(D, E) per token: [T, P, D] -> logits [T, P, E], float32 (a bf16 gate may change sign at 0)."""

    def __init__(self, tokens: int, width: int, experts: int):
        super().__init__()
        self.weight, self.bias = private_linear(tokens, width, experts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight).float()


class Experts(nn.Module):
    """E experts per token, each D -> k_e D -> D; mixed by gates [T, P, E]."""

    def __init__(self, tokens: int, width: int, experts: int, expansion: int):
        super().__init__()
        self.tokens, self.width, self.experts, self.hidden = tokens, width, experts, expansion * width
        self.w1, self.b1 = private_linear(tokens, width, experts * self.hidden)
        bound = self.hidden**-0.5
        self.w2 = nn.Parameter(torch.empty(tokens, experts * self.hidden, width).uniform_(-bound, bound))
        self.b2 = nn.Parameter(torch.empty(tokens, experts, width).uniform_(-bound, bound))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        tokens, pairs, _ = x.shape
        gates = gates.to(x.dtype)
        h = F.gelu(torch.baddbmm(self.b1, x, self.w1))  # (T, P, E k_e D)
        h = (h.reshape(tokens, pairs, self.experts, self.hidden) * gates.unsqueeze(3)).flatten(2)
        return torch.bmm(h, self.w2) + torch.bmm(gates, self.b2)

    def sparse(self, x: Tensor, gates: Tensor) -> Tensor:
        """The same value, evaluating expert j of token t only on the pairs with a positive gate."""
        out = torch.zeros_like(x)
        for t in range(self.tokens):
            for j in range(self.experts):
                rows = torch.nonzero(gates[t, :, j] > 0).squeeze(1)
                if len(rows) == 0:
                    continue
                part = slice(j * self.hidden, (j + 1) * self.hidden)
                h = F.gelu(x[t, rows] @ self.w1[t][:, part] + self.b1[t][:, part])
                value = h @ self.w2[t][part] + self.b2[t, j]
                out[t].index_add_(0, rows, value * gates[t, rows, j].to(x.dtype).unsqueeze(1))
        return out

    def flops(self, pairs: int, active: float = 1.0) -> int:
        dense = 2 * pairs * self.tokens * self.experts * self.width * (2 * self.hidden + 1)
        return round(dense * active)


class ReluMoE(nn.Module):
    """ReLU-routed experts; with `two_routers` dense training and sparse inference (DTSI).

    forward(x, route): route 'infer' gates with ReLU(h_infer), route 'train' (two routers only) with softplus(h_train),
    which gives every expert gradient. In training the 'infer' pass also evaluates the penalty, mean ReLU(h_infer) over
    pairs, tokens and experts, on detached token inputs: it shapes the router only.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        experts: int = 4,
        expansion: int = 2,
        dropout: float = 0.0,
        two_routers: bool = True,
    ):
        super().__init__()
        self.h_infer = Router(tokens, width, experts)
        self.h_train = Router(tokens, width, experts) if two_routers else None
        self.experts = Experts(tokens, width, experts, expansion)
        self.dropout = Dropout(dropout)
        self.serving = False
        self._penalty: Tensor | None = None  # of the last training pass
        self.active: Tensor | None = None  # share of open gates per token of the last 'infer' pass, [T]

    def gates(self, x: Tensor, route: str = "infer") -> Tensor:
        if route == "train":
            return F.softplus(self.h_train(x))
        return torch.relu(self.h_infer(x))

    def forward(self, x: Tensor, route: str = "infer") -> Tensor:
        gates = self.gates(x, route)
        if route == "infer":
            self.active = (gates.detach() > 0).float().mean(dim=(1, 2))
            if self.training:
                self._penalty = torch.relu(self.h_infer(x.detach())).mean()
        mix = self.experts.sparse if self.serving and not self.training else self.experts
        return self.dropout(mix(x, gates))

    def take_penalty(self) -> Tensor:
        """Penalty of the last training pass, once: a kept graph would hold memory and forbid copying the model."""
        penalty, self._penalty = self._penalty, None
        return penalty

    def export(self) -> None:
        """Drop h_train and serve by gathering active experts."""
        self.h_train, self.serving = None, True

    def params(self) -> int:
        e = self.experts
        routers = 1 if self.h_train is None else 2
        per_token = e.experts * (2 * e.width * e.hidden + e.hidden + e.width) + routers * e.experts * (e.width + 1)
        return e.tokens * per_token

    def flops(self, pairs: int, active: float = 1.0) -> int:
        """Forward of one pass; `active` is the share of experts really evaluated in sparse serving."""
        router = 2 * pairs * self.experts.tokens * self.experts.width * self.experts.experts
        return router + self.experts.flops(pairs, active)


class TopKMoE(nn.Module):
    """Ablation: softmax router, the two best experts renormalised, usual load-balance loss E sum_j f_j p_j per token."""

    def __init__(self, tokens: int, width: int, experts: int = 4, expansion: int = 2, dropout: float = 0.0):
        super().__init__()
        self.router = Router(tokens, width, experts)
        self.experts = Experts(tokens, width, experts, expansion)
        self.k = min(TOP_K, experts)
        self.dropout = Dropout(dropout)
        self._balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.router(x), dim=2)  # (T, P, E)
        chosen = torch.zeros_like(p, dtype=torch.bool).scatter_(
            2, p.topk(self.k, dim=2).indices, True
        )  # k also at ties
        gates = p * chosen
        if self.training:
            share = chosen.float().mean(dim=1) / self.k  # (T, E)
            self._balance = (p.shape[2] * share * p.mean(dim=1)).sum(dim=1).mean()
        return self.dropout(self.experts(x, gates / gates.sum(dim=2, keepdim=True)))

    def take_balance(self) -> Tensor:
        """Load-balance loss of the last training pass, once."""
        balance, self._balance = self._balance, None
        return balance

    def params(self) -> int:
        e = self.experts
        return e.tokens * e.experts * (2 * e.width * e.hidden + e.hidden + 2 * e.width + 1)

    def flops(self, pairs: int) -> int:
        router = 2 * pairs * self.experts.tokens * self.experts.width * self.experts.experts
        return router + self.experts.flops(pairs)
