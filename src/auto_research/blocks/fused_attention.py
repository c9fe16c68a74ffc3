"""Cache-blocked forward and backward of the local activation unit on CPU.

Written with ordinary operators the unit streams a dozen [P, L, 80] tensors (34 MB each at 256 requests) through
memory, which costs more than its matrix products. Here pairs are worked off in blocks that stay in the cache, sorted by
history length so that padding is skipped. The numbers are those of `LocalActivationUnit.plain`.

Backward of Dice with batch statistics (w = 1 at the n valid positions, z = (s - mean) rstd, p = sigmoid(z), g the
gradient of h, q = g s p (1 - p), c = rstd (1 - alpha)):
    ds = g (alpha + (1 - alpha) p) + c (q - (w/n) sum q - (w/n) z sum(q z)),   dalpha = sum g s (1 - p)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from auto_research.blocks.dice import EPS, Dice

BLOCK_FLOATS = 1 << 18  # of a block's [c, l, h1] activations and [c, d, h1] weights: 1 MB stays in the cache


class Block(NamedTuple):
    """Some pairs, their requests, and the first history slot that any of them fills (histories are left-padded)."""

    pairs: Tensor
    requests: Tensor
    since: int

    def of(self, per_request: Tensor) -> Tensor:
        """[R, L, ...] -> [c, l, ...] with l = L - since."""
        return per_request[:, self.since :][self.requests]


def blocks_of(request_of: Tensor, mask: Tensor, floats_per_slot: int, extra_slots: int) -> list[Block]:
    """Pairs in blocks of similar history length, so that little padding is computed. mask: float[R, L].

    A pair takes floats_per_slot * (L + extra_slots) floats of the block's budget.
    """
    length = mask.shape[1]
    size = max(1, BLOCK_FLOATS // (floats_per_slot * (length + extra_slots)))
    span = (mask * torch.arange(length, 0, -1, dtype=mask.dtype)).amax(1).long()  # filled slots from the newest back
    order = torch.argsort(span[request_of], stable=True)
    found = []
    for pairs in order.split(size):
        requests = request_of[pairs]
        found.append(Block(pairs, requests, length - max(1, int(span[requests].max()))))
    return found


@dataclass
class Gate:
    """How one layer's pre-activation s [M, C] becomes h = s (alpha + (1 - alpha) p)."""

    alpha: Tensor
    dice: bool
    batch: bool = False  # the statistics are those of this batch, so they carry gradient
    mean: Tensor | None = None
    rstd: Tensor | None = None
    count: float = 0.0

    def p(self, s: Tensor) -> Tensor:
        if not self.dice:
            return (s > 0).to(s.dtype)
        return torch.addcmul(-self.mean * self.rstd, s, self.rstd).sigmoid_()

    def apply(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """(h, p)."""
        p = self.p(s)
        return torch.addcmul(self.alpha, p, 1 - self.alpha).mul_(s), p

    def backward(self, s: Tensor, p: Tensor, g: Tensor, sums: "GateSums") -> tuple[Tensor, Tensor]:
        """(h, ds without the terms through mean and variance); adds to the sums. g is overwritten."""
        slope = torch.addcmul(self.alpha, p, 1 - self.alpha)
        q = g * s
        q.addcmul_(q, p, value=-1)  # g s (1 - p)
        sums.alpha += q.sum(0)
        ds = g.mul_(slope)
        if self.dice:
            q.mul_(p)
            ds.addcmul_(q, self.rstd * (1 - self.alpha))
            if self.batch:
                sums.q += q.sum(0)
                sums.qs += q.mul_(s).sum(0)
        return slope.mul_(s), ds

    def finish(self, s: Tensor, ds: Tensor, valid: Tensor, sums: "GateSums") -> Tensor:
        """Subtract the terms through mean and variance from ds [M, C], in place."""
        if self.dice and self.batch:
            qz = (sums.qs - self.mean * sums.q) * self.rstd
            scale = self.rstd * (1 - self.alpha) / self.count
            slope = scale * qz * self.rstd
            through = torch.addcmul(scale * sums.q - slope * self.mean, s, slope)
            ds.addcmul_(through, valid.unsqueeze(1), value=-1)
        return ds


class GateSums:
    """Sums over all blocks that the backward pass of one gate needs."""

    def __init__(self, like: Tensor):
        self.alpha, self.q, self.qs = (torch.zeros_like(like) for _ in range(3))


class Moments:
    """Mean and biased variance over valid rows, merged block by block (Chan et al.)."""

    def __init__(self, like: Tensor):
        self.count, self.mean, self.square = 0.0, torch.zeros_like(like), torch.zeros_like(like)

    def add(self, s: Tensor, valid: Tensor) -> None:
        count = float(valid.sum())
        if not count:
            return
        mean = (valid / count) @ s
        square = valid @ (s - mean).square_()
        total = self.count + count
        step = mean - self.mean
        self.square += square + step.square() * (self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total


def _gates(unit) -> list[Gate]:
    gates = []
    for layer in (unit.first_activation, unit.second_activation):
        gate = Gate(layer.alpha.detach(), isinstance(layer, Dice))
        if gate.dice:
            gate.mean, variance = layer.running()
            gate.rstd = (variance + EPS).rsqrt()
        gates.append(gate)
    return gates


def _take_batch_statistics(gate: Gate, layer: Dice, moments: Moments) -> None:
    if not gate.dice or not layer.training or moments.count < 2:
        return
    variance = moments.square / moments.count
    layer.update(moments.mean, variance)
    gate.batch, gate.count, gate.mean, gate.rstd = True, moments.count, moments.mean, (variance + EPS).rsqrt()


def fused_scores(unit, events: Tensor, mask: Tensor, key: Tensor, request_of: Tensor) -> Tensor:
    """Scores [P, L] of `LocalActivationUnit` `unit`; arguments as its forward."""
    w = unit.factorised()
    return _Scores.apply(
        unit,
        torch.is_grad_enabled(),
        request_of,
        mask.to(events.dtype),
        events,
        key,
        w.event,
        w.product,
        key @ w.key + w.bias,
        unit.first_activation.alpha,
        unit.second.weight.t(),
        unit.second.bias,
        unit.second_activation.alpha,
        unit.last.weight.t(),
        unit.last.bias,
    )


class _Scores(torch.autograd.Function):
    """Inputs after unit, graded (the caller's grad mode; in here it is always off) and request_of: mask [R, L],
    events [R, L, d], key [P, d], event and product weights [d, h1], the per-pair row key W23 + b [P, h1], alpha1 [h1],
    W2 [h1, h2], b2, alpha2 [h2], w3 [h2, 1], b3 [1]."""

    @staticmethod
    def forward(
        ctx, unit, graded, request_of, mask, events, key, w_event, w_product, row, alpha1, w2, b2, alpha2, w3, b3
    ):
        gate1, gate2 = _gates(unit)
        plan = blocks_of(request_of, mask, row.shape[1], key.shape[1])
        keep = graded and any(ctx.needs_input_grad)
        moments1, moments2 = Moments(alpha1), Moments(alpha2)
        scores = key.new_zeros((len(request_of), events.shape[1]))

        def first_layer(block: Block) -> Tensor:
            per_pair = torch.addcmul(w_event, key[block.pairs].unsqueeze(2), w_product)  # (c, d, h1)
            s = torch.baddbmm(row[block.pairs].unsqueeze(1), block.of(events), per_pair)
            return s.reshape(-1, row.shape[1])

        def second_layer(s: Tensor) -> tuple[Tensor, Tensor]:
            h, p = gate1.apply(s)
            return torch.addmm(b2, h, w2), p

        def write_scores(t: Tensor, block: Block) -> Tensor:
            h, p = gate2.apply(t)
            a = torch.addmm(b3, h, w3).reshape(len(block.pairs), -1)
            scores[block.pairs, block.since :] = a.mul_(block.of(mask))
            return p

        if not unit.training and not keep:  # running statistics and nothing to keep: one pass
            for block in plan:
                write_scores(second_layer(first_layer(block))[0], block)
            return scores

        first, second, p1, p2 = [], [], [], []  # per block: pre-activations and p of both layers
        for block in plan:
            first.append(first_layer(block))
            if gate1.dice and unit.training:
                moments1.add(first[-1], block.of(mask).reshape(-1))
        _take_batch_statistics(gate1, unit.first_activation, moments1)
        for s, block in zip(first, plan, strict=True):
            t, p = second_layer(s)
            second.append(t)
            p1.append(p)
            if gate2.dice and unit.training:
                moments2.add(t, block.of(mask).reshape(-1))
        _take_batch_statistics(gate2, unit.second_activation, moments2)
        for t, block in zip(second, plan, strict=True):
            p2.append(write_scores(t, block))
        if keep:
            ctx.plan, ctx.gates, ctx.kept = plan, (gate1, gate2), (first, second, p1, p2)
            ctx.save_for_backward(mask, events, key, w_event, w_product, w2, w3)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.kept is None:
            raise RuntimeError("the fused activation unit frees its activations: it cannot go backward twice")
        mask, events, key, w_event, w_product, w2, w3 = ctx.saved_tensors
        (gate1, gate2), (first, second, p1, p2), plan = ctx.gates, ctx.kept, ctx.plan
        ctx.kept = None
        valid = [block.of(mask).reshape(-1) for block in plan]

        sums2, d_w3, d_b3 = GateSums(gate2.alpha), zeros(w3), grad.new_zeros(1)
        d_second = []
        for t, p, v, block in zip(second, p2, valid, plan, strict=True):
            g = (grad[block.pairs, block.since :].reshape(-1) * v).unsqueeze(1)  # (M, 1)
            h, ds = gate2.backward(t, p, g * w3.t(), sums2)
            d_w3.addmm_(h.t(), g)
            d_b3 += g.sum()
            d_second.append(ds)

        sums1, d_w2, d_b2 = GateSums(gate1.alpha), zeros(w2), torch.zeros_like(gate2.alpha)
        d_first = []
        for s, p, t, ds, v in zip(first, p1, second, d_second, valid, strict=True):
            ds = gate2.finish(t, ds, v, sums2)
            h, d_s = gate1.backward(s, p, ds @ w2.t(), sums1)
            d_w2.addmm_(h.t(), ds)
            d_b2 += ds.sum(0)
            d_first.append(d_s)

        d_events, d_key, d_event, d_product = zeros(events), zeros(key), zeros(w_event), zeros(w_product)
        d_row = key.new_empty((len(key), w_event.shape[1]))
        for s, ds, v, block in zip(first, d_first, valid, plan, strict=True):
            ds = gate1.finish(s, ds, v, sums1).reshape(len(block.pairs), -1, w_event.shape[1])  # (c, l, h1)
            k = key[block.pairs].unsqueeze(2)
            per_pair = torch.addcmul(w_event, k, w_product)
            d_pair = torch.bmm(block.of(events).transpose(1, 2), ds)  # (c, d, h1)
            d_event += d_pair.sum(0)
            d_product += (d_pair * k).sum(0)
            d_key[block.pairs] = d_pair.mul_(w_product).sum(2)
            d_row[block.pairs] = ds.sum(1)
            d_events[:, block.since :].index_add_(0, block.requests, torch.bmm(ds, per_pair.transpose(1, 2)))
        return (
            *(None, None, None, None, d_events, d_key, d_event, d_product, d_row),
            *(sums1.alpha, d_w2, d_b2, sums2.alpha, d_w3, d_b3),
        )


def zeros(like: Tensor) -> Tensor:
    """Contiguous zeros of the same shape (weights arrive transposed)."""
    return torch.zeros(like.shape, dtype=like.dtype)
