"""What an accelerator refuses, the shadow device refuses; the mended line beside it passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auto_research.shadow.dispatch import MixedDevices


def _shadow(*shape):
    return torch.ones(*shape, device="shadow")


MIXTURES = {
    "sum": lambda: _shadow(3) + torch.ones(3),
    "sum, CPU first": lambda: torch.ones(3) + _shadow(3),
    "in place": lambda: _shadow(3).add_(torch.ones(3)),
    "in place on CPU": lambda: torch.ones(3).add_(_shadow(3)),
    "in place on a CPU scalar": lambda: torch.tensor(1.0).add_(_shadow(1).sum()),
    "matmul": lambda: _shadow(2, 2) @ torch.ones(2, 2),
    "linear, weights left on CPU": lambda: nn.Linear(2, 2)(_shadow(1, 2)),
    "cat": lambda: torch.cat([_shadow(2), torch.ones(2)]),
    "stack with a CPU scalar": lambda: torch.stack([_shadow(1)[0], torch.tensor(1.0)]),
    "where": lambda: torch.where(torch.tensor([True]), _shadow(1), _shadow(1)),
    "mask": lambda: _shadow(2).masked_fill(torch.tensor([True, False]), 0.0),
    "boolean index": lambda: _shadow(2)[torch.tensor([True, False])],
    "integer index": lambda: _shadow(2)[torch.tensor([1])],
    "index in a CPU tensor": lambda: torch.ones(2)[torch.tensor([1], device="shadow")],
    "embedding, CPU indices": lambda: F.embedding(torch.tensor([1]), _shadow(2, 2)),
    "embedding, CPU scalar index": lambda: F.embedding(torch.tensor(1), _shadow(2, 2)),
    "embedding, CPU table": lambda: F.embedding(torch.tensor([1], device="shadow"), torch.ones(2, 2)),
    "gather": lambda: _shadow(2).gather(0, torch.tensor([1])),
    "index_select": lambda: _shadow(2).index_select(0, torch.tensor([1])),
    "scatter_add": lambda: _shadow(2).scatter_add(0, torch.tensor([1]), _shadow(1)),
    "index_put": lambda: _shadow(2).index_put_((torch.tensor([1]),), torch.tensor(2.0)),
    "cross entropy": lambda: F.cross_entropy(_shadow(2, 2), torch.tensor([0, 1])),
    "attention mask": lambda: F.scaled_dot_product_attention(
        _shadow(1, 1, 2, 2), _shadow(1, 1, 2, 2), _shadow(1, 1, 2, 2), attn_mask=torch.ones(2, 2)
    ),
    "einsum": lambda: torch.einsum("i,i->", _shadow(2), torch.ones(2)),
    "gru input": lambda: nn.GRU(2, 2).to("shadow")(torch.ones(3, 1, 2)),
    "gru weights": lambda: nn.GRU(2, 2)(_shadow(3, 1, 2)),
    "lstm state": lambda: nn.LSTM(2, 2).to("shadow")(_shadow(3, 1, 2), (torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))),
    "foreach": lambda: torch._foreach_add([_shadow(2), _shadow(2)], [_shadow(2), torch.ones(2)]),
    "out argument": lambda: torch.add(_shadow(2), _shadow(2), out=torch.empty(2)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_raises(name):
    with pytest.raises(RuntimeError, match=r"device|would write"):
        MIXTURES[name]()


def test_the_message_names_operator_and_both_devices():
    with pytest.raises(MixedDevices, match=r"shadow:0 and cpu! \(operator add, a \(3,\) torch.float32 tensor on cpu\)"):
        _shadow(3) + torch.ones(3)


def test_zero_dimensional_cpu_scalars_pass_in_arithmetic():
    x = _shadow(2)
    assert (x * torch.tensor(3.0)).tolist() == [3.0, 3.0]
    assert torch.where(x > 0, x, torch.tensor(0.0)).tolist() == [1.0, 1.0]
    assert x.clamp(max=torch.tensor(0.5)).tolist() == [0.5, 0.5]
    x[x > 0] = torch.tensor(4.0)
    assert x.tolist() == [4.0, 4.0]
    assert (x / 4).lerp(torch.zeros(2, device="shadow"), 0.5).tolist() == [0.5, 0.5]


def test_copies_cross_devices():
    x = _shadow(2)
    x.copy_(torch.tensor([5.0, 6.0]))
    home = torch.zeros(2)
    home.copy_(x)
    assert home.tolist() == [5.0, 6.0] == x.to("cpu").tolist()


@pytest.mark.parametrize("take", [lambda x: x.numpy(), np.asarray, np.array], ids=["numpy()", "asarray", "array"])
def test_numpy_needs_cpu_first(take):
    with pytest.raises(TypeError, match=r"can't convert shadow:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        take(_shadow(2))
    assert take(_shadow(2).cpu()).tolist() == [1.0, 1.0]


def test_a_mixture_in_the_backward_pass_reaches_the_caller():
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.cpu()

    x = _shadow(3).requires_grad_()
    with pytest.raises(MixedDevices, match="operator mul"):
        Forgetful.apply(x.exp()).sum().backward()
    (x.exp()).sum().backward()
    assert x.grad is not None


def test_a_hook_that_fails_reaches_the_caller():
    x = _shadow(3).requires_grad_()
    y = x * 2
    y.register_hook(lambda gradient: gradient + torch.ones(3))
    with pytest.raises(MixedDevices):
        y.sum().backward()


def test_sparse_gradients_are_refused_in_words():
    table = nn.Embedding(4, 2, sparse=True).to("shadow")
    with pytest.raises(NotImplementedError, match=r"the shadow device has no torch\.sparse_coo tensors"):
        table(torch.tensor([1], device="shadow")).sum().backward()


BF16 = {
    "mm": lambda a, b: a @ b,
    "bmm": lambda a, b: a.expand(2, 2, 2) @ b.expand(2, 2, 2),
    "linear": lambda a, b: F.linear(a, b),
    "linear, bias of another dtype": lambda a, b: F.linear(a, a, b[0]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "conv": lambda a, b: F.conv1d(a.view(1, 2, 2), b.view(2, 2, 1)),
    "layer norm": lambda a, b: F.layer_norm(a, (2,), b[0], b[1]),
    "mv": lambda a, b: a @ b[0],
}


@pytest.mark.parametrize("name", BF16)
def test_bf16_with_float32_products_raise(name):
    low, full = _shadow(2, 2).bfloat16(), _shadow(2, 2)
    with pytest.raises(RuntimeError, match="dtype"):
        BF16[name](low, full)
    BF16[name](full, full)
    BF16[name](low, low)
