"""Layers with two natural batch sizes: request rows [R, ...] and candidate rows [P, ...] joined by request_of [P].

Every masked product is evaluated as a request part at R rows, a candidate part at P rows, and a gather-add; never on
an input that was copied per candidate (ROCS, arXiv:2607.27744). Slot maps act along the slot axis and
leave the channels alone (SlimPer's L(.), Wukong's linear compression).

    [x_r[r]; x_c] [W_r; W_c] = (x_r W_r)[r] + x_c W_c
    Y_r = W_rr X_r,   Y_c = (W_cr X_r)[r] + W_cc X_c,   W = [[W_rr, 0], [W_cr, W_cc]]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auto_research.blocks.request_groups import Group, collect, request_groups, spread
from auto_research.blocks.token_mixing import HeadShuffle


def bcast_linear(
    x_r: Tensor, x_c: Tensor, request_of: Tensor, w_r: Tensor, w_c: Tensor, bias: Tensor | None = None
) -> Tensor:
    """(x_r W_r)[request_of] + x_c W_c + bias: x_r [R, a], x_c [P, b], w_r [a, K], w_c [b, K] -> [P, K]."""
    request = x_r @ w_r if bias is None else torch.addmm(bias, x_r, w_r)
    return request.index_select(0, request_of) + x_c @ w_c


class BroadcastLinear(nn.Module):
    """Linear over the concatenation [request row; candidate row], evaluated without building it.

    forward(x_r [R, a], x_c [P, b], request_of [P]) -> [P, K]. Starts like nn.Linear(a + b, K).
    """

    def __init__(self, request_inputs: int, pair_inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.inputs = (request_inputs, pair_inputs)
        bound = (request_inputs + pair_inputs) ** -0.5
        self.request = nn.Parameter(torch.empty(request_inputs, outputs).uniform_(-bound, bound))
        self.pair = nn.Parameter(torch.empty(pair_inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, x_r: Tensor, x_c: Tensor, request_of: Tensor) -> Tensor:
        return bcast_linear(x_r, x_c, request_of, self.request, self.pair, self.bias)

    def request_part(self, x_r: Tensor) -> Tensor:
        """[R, K], paid once per request: what `pair_part` adds to every candidate."""
        return x_r @ self.request if self.bias is None else torch.addmm(self.bias, x_r, self.request)

    def pair_part(self, shared: Tensor, x_c: Tensor, request_of: Tensor) -> Tensor:
        """forward for candidates of prepared requests, shared [R, K] -> [P, K]."""
        return shared.index_select(0, request_of) + x_c @ self.pair

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, requests: int = 1) -> int:
        """cost(J) = a + b J: the request part is paid once per request."""
        return 2 * (requests * self.request.numel() + pairs * self.pair.numel())


def slot_map(weight: Tensor, x: Tensor) -> Tensor:
    """weight [n, m], x [..., m, d] -> [..., n, d] as one product over all rows, not one small product per row."""
    return torch.einsum("nm,...md->...nd", weight, x)


class SlotLinear(nn.Module):
    """Segment-wise map along the slot axis, the same for all channels: Y = W X, [..., K, d] -> [..., m, d].

    start: 'normal' (standard deviation K^-0.5) or 'identity' (m = K).
    """

    def __init__(self, slots: int, outputs: int, start: str = "normal"):
        super().__init__()
        if start == "identity":
            if slots != outputs:
                raise ValueError(f"an identity start needs as many outputs as slots, not {outputs} for {slots}")
            weight = torch.eye(slots)
        elif start == "normal":
            weight = torch.randn(outputs, slots) * slots**-0.5
        else:
            raise ValueError(f"start must be 'normal' or 'identity', not {start!r}")
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return slot_map(self.weight, x)

    def params(self) -> int:
        return self.weight.numel()

    def flops(self, rows: int, width: int) -> int:
        return 2 * rows * width * self.weight.numel()


class MaskedSlotLinear(nn.Module):
    """Block-triangular slot map of a request side and a candidate side (generalised layer masking).

    request = (input slots, output slots), pair likewise. forward(x_r [R, a, d], x_c [P, b, d], request_of [P]) ->
    (y_r [R, a', d], y_c [P, b', d]): request outputs read request inputs only, candidate outputs read both.
    """

    def __init__(self, request: tuple[int, int], pair: tuple[int, int]):
        super().__init__()
        (m_r, n_r), (m_c, n_c) = request, pair
        self.rr = nn.Parameter(torch.randn(n_r, m_r) * m_r**-0.5)
        self.cr = nn.Parameter(torch.randn(n_c, m_r) * (m_r + m_c) ** -0.5)
        self.cc = nn.Parameter(torch.randn(n_c, m_c) * (m_r + m_c) ** -0.5)

    def forward(self, x_r: Tensor, x_c: Tensor, request_of: Tensor) -> tuple[Tensor, Tensor]:
        y_r, shared = self.request_part(x_r)
        return y_r, self.pair_part(shared, x_c, request_of)

    def request_part(self, x_r: Tensor) -> tuple[Tensor, Tensor]:
        """(y_r [R, a', d], shared [R, b', d]), paid once per request; `pair_part` adds shared to every candidate."""
        y = slot_map(torch.cat([self.rr, self.cr]), x_r)
        return y[:, : len(self.rr)], y[:, len(self.rr) :]

    def pair_part(self, shared: Tensor, x_c: Tensor, request_of: Tensor) -> Tensor:
        """y_c [P, b', d] for candidates of prepared requests."""
        return shared.index_select(0, request_of) + slot_map(self.cc, x_c)

    def dense(self) -> Tensor:
        """[[W_rr, 0], [W_cr, W_cc]], the weight of the reference that broadcasts its inputs."""
        corner = self.rr.new_zeros(len(self.rr), self.cc.shape[1])
        return torch.cat([torch.cat([self.rr, corner], dim=1), torch.cat([self.cr, self.cc], dim=1)])

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, width: int, requests: int = 1) -> int:
        shared = self.rr.numel() + self.cr.numel()
        return 2 * width * (requests * shared + pairs * self.cc.numel())


def block_mask(request: tuple[int, int], pair: tuple[int, int]) -> Tensor:
    """0/1 mask [a' + b', a + b] of a dense slot weight: zero where a request output would read a candidate input."""
    (m_r, n_r), (m_c, n_c) = request, pair
    mask = torch.ones(n_r + n_c, m_r + m_c)
    mask[:n_r, m_r:] = 0
    return mask


class UpperPairs(nn.Module):
    """Strict upper triangle of X X^T: [..., m, d] -> [..., m (m - 1) / 2] dot products, indices kept as a buffer."""

    def __init__(self, slots: int):
        super().__init__()
        row, column = torch.triu_indices(slots, slots, offset=1)
        self.slots = slots
        self.register_buffer("index", row * slots + column, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).flatten(-2)[..., self.index]

    @property
    def outputs(self) -> int:
        return len(self.index)

    def flops(self, rows: int, width: int) -> int:
        return 2 * rows * self.slots**2 * width


def cross_pairs(x_r: Tensor, x_c: Tensor, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
    """Dot products of every candidate slot with every slot of its request: [R, a, d], [P, b, d] -> [P, b a].

    One product [J b, d] x [d, a] per request; the request slots are not copied per candidate. groups: those of
    `request_of`, where a caller has them.
    """
    requests, m_r, _ = x_r.shape
    pairs, m_c, _ = x_c.shape
    out = x_c.new_zeros(pairs, m_c * m_r)
    for group in request_groups(request_of, requests) if groups is None else groups:
        rows = len(group.rows)
        whole, everyone = rows == requests, len(group.pairs) == pairs
        candidates = x_c if everyone else x_c.index_select(0, group.pairs)
        slots = x_r if whole else x_r.index_select(0, group.rows)
        grid = spread(candidates, group).reshape(rows, group.width * m_c, -1)  # (r, J b, d)
        dots = (grid @ slots.transpose(1, 2)).reshape(rows, group.width, m_c * m_r)  # (r, J, b a)
        dots = collect(dots, group)
        out = dots if everyone else out.index_copy(0, group.pairs, dots.to(out.dtype))
    return out


def decoupling_mask(tokens: int, width: int, user_tokens: int) -> Tensor:
    """UI-MixFormer's M [T, D]: zero for user rows h < N_U in the columns c >= N_U D / T that came from item heads."""
    mask = torch.ones(tokens, width)
    mask[:user_tokens, user_tokens * width // tokens :] = 0
    return mask


class DecoupledHeadShuffle(nn.Module):
    """Head shuffle times the decoupling mask: the first `user_tokens` output heads never read the item heads.

    [T, P, D] -> [T, P, D]; user_tokens = T is the plain shuffle (arXiv:2602.14110).
    """

    def __init__(self, tokens: int, width: int, user_tokens: int):
        super().__init__()
        self.shuffle = HeadShuffle(tokens, width)
        self.user_tokens = user_tokens
        self.register_buffer("mask", decoupling_mask(tokens, width, user_tokens).unsqueeze(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(x) * self.mask.to(x.dtype)

    def params(self) -> int:
        return 0

    def flops(self, pairs: int) -> int:
        return 0
