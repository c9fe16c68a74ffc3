"""Cache-blocked forward and backward of the local activation unit on CPU.

Written with ordinary operators the unit streams a dozen [P, L, 80] tensors (34 MB each at 256 requests) through
memory, which costs more than its matrix products. Here pairs are worked off in blocks that stay in the cache; only
the two pre-activations are kept. The numbers are those of `LocalActivationUnit.plain`.

Backward of Dice with batch statistics (w = 1 at the n valid positions, z = (s - mean) rstd, p = sigmoid(z), g the
gradient of h, q = g s p (1 - p), c = rstd (1 - alpha)):
    ds = g (alpha + (1 - alpha) p) + c (q - (w/n) sum q - (w/n) z sum(q z)),   dalpha = sum g s (1 - p)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from auto_research.blocks.dice import EPS, Dice

BLOCK = 32  # pairs per block: 32 x 50 x 80 floats are 512 kB


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
    """Inputs after the two index arguments: mask [R, L], events [R, L, d], key [P, d], event and product weights
    [d, h1], the per-pair row key W23 + b [P, h1], alpha1 [h1], W2 [h1, h2], b2, alpha2 [h2], w3 [h2, 1], b3 [1]."""

    @staticmethod
    def forward(ctx, unit, request_of, mask, events, key, w_event, w_product, row, alpha1, w2, b2, alpha2, w3, b3):
        length = events.shape[1]
        gate1, gate2 = _gates(unit)
        rows = request_of.split(BLOCK)
        keep = any(ctx.needs_input_grad)
        moments1, moments2 = Moments(alpha1), Moments(alpha2)
        starts = range(0, len(request_of), BLOCK)

        def pre_activation(start: int, block: Tensor) -> Tensor:
            stop = start + len(block)
            per_pair = torch.addcmul(w_event, key[start:stop].unsqueeze(2), w_product)  # (c, d, h1)
            return torch.baddbmm(row[start:stop].unsqueeze(1), events[block], per_pair).reshape(-1, row.shape[1])

        first, gated = [], []  # per block: pre-activation and p of the first layer, of the second layer
        second, gated2 = [], []
        scores = key.new_empty((len(request_of), length))

        def finish(t: Tensor, start: int, block: Tensor) -> Tensor:
            h, p = gate2.apply(t)
            scores[start : start + len(block)] = torch.addmm(b3, h, w3).reshape(-1, length).mul_(mask[block])
            return p

        def middle(s: Tensor) -> tuple[Tensor, Tensor]:
            h, p = gate1.apply(s)
            return torch.addmm(b2, h, w2), p

        if not unit.training and not keep:  # running statistics and nothing to keep: one pass
            for start, block in zip(starts, rows, strict=True):
                finish(middle(pre_activation(start, block))[0], start, block)
            return scores

        for start, block in zip(starts, rows, strict=True):
            s = pre_activation(start, block)
            if gate1.dice and unit.training:
                moments1.add(s, mask[block].reshape(-1))
            first.append(s)
        _take_batch_statistics(gate1, unit.first_activation, moments1)
        for s, block in zip(first, rows, strict=True):
            t, p = middle(s)
            if gate2.dice and unit.training:
                moments2.add(t, mask[block].reshape(-1))
            second.append(t)
            gated.append(p)
        _take_batch_statistics(gate2, unit.second_activation, moments2)
        for t, start, block in zip(second, starts, rows, strict=True):
            gated2.append(finish(t, start, block))
        if keep:
            ctx.gates, ctx.kept = (gate1, gate2), (first, gated, second, gated2)
            ctx.save_for_backward(request_of, mask, events, key, w_event, w_product, w2, w3)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        request_of, mask, events, key, w_event, w_product, w2, w3 = ctx.saved_tensors
        (gate1, gate2), (first, gated, second, gated2) = ctx.gates, ctx.kept
        rows = request_of.split(BLOCK)
        grads = grad.split(BLOCK)
        length = events.shape[1]
        valid = [mask[block].reshape(-1) for block in rows]

        sums2 = GateSums(gate2.alpha)
        d_w3, d_b3 = torch.zeros_like(w3), grad.new_zeros(1)
        d_second = []
        for t, p, g, v in zip(second, gated2, grads, valid, strict=True):
            g = (g.reshape(-1) * v).unsqueeze(1)  # (M, 1)
            h, ds = gate2.backward(t, p, g * w3.t(), sums2)
            d_w3.addmm_(h.t(), g)
            d_b3 += g.sum()
            d_second.append(ds)

        sums1 = GateSums(gate1.alpha)
        d_w2, d_b2 = torch.zeros(w2.shape, dtype=w2.dtype), torch.zeros_like(gate2.alpha)
        d_first = []
        for s, p, t, ds, v in zip(first, gated, second, d_second, valid, strict=True):
            ds = gate2.finish(t, ds, v, sums2)
            h, d_s = gate1.backward(s, p, ds @ w2.t(), sums1)
            d_w2.addmm_(h.t(), ds)
            d_b2 += ds.sum(0)
            d_first.append(d_s)

        d_events, d_key = torch.zeros_like(events), torch.empty_like(key)
        d_event = torch.zeros(w_event.shape, dtype=w_event.dtype)
        d_product = torch.zeros(w_product.shape, dtype=w_product.dtype)
        d_row = key.new_empty((len(key), w_event.shape[1]))
        for index, (s, ds, v, block) in enumerate(zip(first, d_first, valid, rows, strict=True)):
            start, stop = index * BLOCK, index * BLOCK + len(block)
            ds = gate1.finish(s, ds, v, sums1).reshape(-1, length, w_event.shape[1])  # (c, L, h1)
            k = key[start:stop].unsqueeze(2)
            per_pair = torch.addcmul(w_event, k, w_product)
            d_pair = torch.bmm(events[block].transpose(1, 2), ds)  # (c, d, h1)
            d_event += d_pair.sum(0)
            d_product += (d_pair * k).sum(0)
            d_key[start:stop] = d_pair.mul_(w_product).sum(2)
            d_row[start:stop] = ds.sum(1)
            d_events.index_add_(0, block, torch.bmm(ds, per_pair.transpose(1, 2)))
        ctx.kept = None
        return (
            *(None, None, None, d_events, d_key, d_event, d_product, d_row),
            *(sums1.alpha, d_w2, d_b2, sums2.alpha, d_w3, d_b3),
        )
