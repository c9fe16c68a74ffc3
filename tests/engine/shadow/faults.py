"""Faults that once broke GPU runs, planted as small modules, each beside its mended form.

Every entry of `FAULTS` is `(broken, mended, error)`: two functions of a device that build the module and run one
training or scoring step. On CPU both pass, which is why nobody saw the fault; on an accelerator `broken` raises.
`ELSEWHERE` names the tests of the rows that no simulated device can show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from auto_research.blocks.language_models import new_rows, rebuilt_linear
from auto_research.runtime.precision import cast_border, contiguous_state


@dataclass(frozen=True)
class Fault:
    """`row`: the row of the Faults table in docs/shadow.md; `error`: what the broken form says on the device."""

    row: str
    broken: Callable[[torch.device], object]
    mended: Callable[[torch.device], object]
    error: str


ELSEWHERE = {
    "old BERT config with no model_type": "tests/engine/audit/test_faults.py",
    "transformers 4 and 5 return different layer outputs": "tests/engine/audit/test_faults.py",
    "formal step counts used in a smoke run": "tests/engine/audit/test_faults.py",
    "scanner inherited neighbours' GPU use": "tests/engine/audit/test_scan.py",
}


class Int8Linear(nn.Module):
    """Linear layer whose weight is stored as INT8 codes [out, in] with a scale [out, 1], rebuilt in the forward pass."""

    def __init__(self, width: int, *, follow: bool) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, width * width).view(width, width)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.zeros(width))
        self.follow = follow

    def forward(self, x):  # [..., in]
        if self.follow:
            return rebuilt_linear(x, self.codes, self.scale, self.bias)
        return F.linear(x, self.codes.float() * self.scale.float(), self.bias)


def _int8(follow: bool):
    def step(device):
        return Int8Linear(4, follow=follow).to(device)(torch.ones(2, 4, device=device, dtype=torch.bfloat16))

    return step


class TrunkAndHead(nn.Module):
    """A BF16 language-model trunk under an FP32 scoring head."""

    def __init__(self, *, cast: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4).bfloat16()
        self.head = nn.Linear(4, 1)
        self.cast = cast

    def forward(self, x):  # [B, 4] bf16 -> [B, 1] float32
        hidden = self.trunk(x)
        return self.head(cast_border(hidden, self.head) if self.cast else hidden)


def _head(cast: bool):
    def step(device):
        out = TrunkAndHead(cast=cast).to(device)(torch.ones(2, 4, device=device, dtype=torch.bfloat16))
        out.sum().backward()
        return out

    return step


def _gru(mend: bool):
    def step(device):
        layer, states = nn.GRU(3, 4, num_layers=2).to(device), torch.zeros(2, 2, 4, device=device)
        h = states.transpose(0, 1)  # kept as [B, layers, H]
        out, _ = layer(torch.ones(5, 2, 3, device=device), contiguous_state(h) if mend else h)
        out.sum().backward()
        return out

    return step


def grow_by_normal(table: nn.Embedding, rows: int) -> nn.Embedding:
    """New rows from a multivariate normal of the old rows: needs a Cholesky factor, so LAPACK."""
    old = table.weight.detach().float()
    covariance = torch.cov(old.T) + 1e-3 * torch.eye(old.size(1), device=old.device)
    fresh = torch.distributions.MultivariateNormal(old.mean(0), covariance_matrix=covariance).sample((rows,))
    return nn.Embedding.from_pretrained(torch.cat([old, fresh.to(old.device)]), freeze=False)


def grow_by_mean(table: nn.Embedding, rows: int) -> nn.Embedding:
    """New rows from the mean of the old ones and small noise: no LAPACK."""
    old = table.weight.detach()
    return nn.Embedding.from_pretrained(torch.cat([old, new_rows(old, rows)]), freeze=False)


def _grow(grow):
    def step(device):
        table = grow(nn.Embedding(6, 3).to(device), 2)
        return table(torch.tensor([7], device=device))

    return step


class CausalMixer(nn.Module):
    """Attention over a sequence; the mask and the positions are made in the forward pass."""

    def __init__(self, *, mend: bool) -> None:
        super().__init__()
        self.position = nn.Embedding(16, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mend = mend

    def forward(self, x):  # [B, T, 8]
        place = x.device if self.mend else None
        x = x + self.position(torch.arange(x.size(1), device=place))
        mask = torch.ones(x.size(1), x.size(1), device=place).triu(1).bool()
        return self.mix(x, x, x, attn_mask=mask, need_weights=False)[0]


def _positions(mend: bool):
    def step(device):
        return CausalMixer(mend=mend).to(device)(torch.ones(2, 3, 8, device=device)).sum().backward()

    return step


class Gated(nn.Module):
    """A constant tensor of the model: kept as a plain attribute it stays behind when the module moves."""

    def __init__(self, *, mend: bool) -> None:
        super().__init__()
        gates = torch.linspace(0, 1, 4)
        if mend:
            self.register_buffer("gates", gates)
        else:
            self.gates = gates

    def forward(self, x):  # [B, 4]
        return x * self.gates


def _buffer(mend: bool):
    return lambda device: Gated(mend=mend).to(device)(torch.ones(2, 4, device=device))


def _negatives(mend: bool):
    def step(device):
        table = nn.Embedding(9, 4).to(device)
        drawn = torch.randint(9, (5,), generator=torch.Generator().manual_seed(0))
        return table(drawn.to(device) if mend else drawn).sum().backward()

    return step


def _sampling(mend: bool):
    def step(device):
        generator = torch.Generator(device=device if mend else "cpu").manual_seed(0)
        return torch.multinomial(torch.ones(2, 5, device=device), 1, generator=generator)

    return step


def _metric(mend: bool):
    def step(device):
        scores = nn.Linear(3, 1).to(device)(torch.ones(4, 3, device=device)).squeeze(1)
        return np.argsort((scores.detach().cpu() if mend else scores.detach()).numpy())

    return step


def _teacher(mend: bool):
    def step(device):
        student, teacher = nn.Linear(3, 5).to(device), nn.Linear(3, 5)
        x = torch.ones(2, 3, device=device)
        target = (teacher.to(device) if mend else teacher)(x).softmax(-1).detach()
        F.kl_div(student(x).log_softmax(-1), target, reduction="batchmean").backward()

    return step


def _running_loss(mend: bool):
    def step(device):
        total = torch.zeros(1, device=device if mend else None)
        total += F.mse_loss(torch.ones(3, device=device), torch.zeros(3, device=device))
        return total

    return step


def _weights(mend: bool):
    def step(device):
        weight = torch.tensor([1.0, 2.0], device=device if mend else None)
        return F.cross_entropy(torch.ones(3, 2, device=device), torch.tensor([0, 1, 1], device=device), weight=weight)

    return step


class Straight(torch.autograd.Function):
    """Straight-through rounding whose backward pass scales by a saved table."""

    @staticmethod
    def forward(ctx, x, table):
        ctx.table = table
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.table, None


def _backward(mend: bool):
    def step(device):
        x = torch.ones(3, device=device, requires_grad=True)
        Straight.apply(x * 2, torch.ones(3, device=device if mend else None)).sum().backward()

    return step


_MIXED = "same device|devices"
FAULTS = {
    "int8 weights rebuilt as float32": Fault(
        "INT8 weights rebuilt as FP32 against BF16 activations", _int8(False), _int8(True), "dtype|same dtype"
    ),
    "embedding grown by a Cholesky factor": Fault(
        "torch without CPU LAPACK broke vocabulary resize", _grow(grow_by_normal), _grow(grow_by_mean), "LAPACK"
    ),
    "hidden state not contiguous": Fault(
        "cuDNN GRU given non-contiguous hidden state", _gru(False), _gru(True), "hx is not contiguous"
    ),
    "bf16 trunk under a float32 head": Fault(
        "BF16 language model meets FP32 head", _head(False), _head(True), "dtype|same dtype"
    ),
    "positions and mask made on CPU": Fault("mixed devices", _positions(False), _positions(True), _MIXED),
    "constant that is no buffer": Fault("mixed devices", _buffer(False), _buffer(True), _MIXED),
    "negatives drawn on CPU": Fault("mixed devices", _negatives(False), _negatives(True), _MIXED),
    "sampling with a CPU generator": Fault("mixed devices", _sampling(False), _sampling(True), "type for generator"),
    "numpy metric on device scores": Fault("mixed devices", _metric(False), _metric(True), "can't convert"),
    "teacher left on CPU": Fault("mixed devices", _teacher(False), _teacher(True), _MIXED),
    "running loss kept on CPU": Fault("mixed devices", _running_loss(False), _running_loss(True), _MIXED),
    "class weights on CPU": Fault("mixed devices", _weights(False), _weights(True), _MIXED),
    "table of a backward pass on CPU": Fault("mixed devices", _backward(False), _backward(True), _MIXED),
}
