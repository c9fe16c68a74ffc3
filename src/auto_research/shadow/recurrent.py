"""Recurrent layers and cells: one whole call on CPU, with its own small graph for the backward pass.

PyTorch sends GRU and LSTM of a foreign device to fused kernels that a Python backend does not have. Here the call
is run by the CPU's operator, so values and gradients are the CPU's. As in cuDNN, the hidden state must be
contiguous and there is no second derivative.
"""

from __future__ import annotations

import torch

from auto_research.shadow.dispatch import MixedDevices, special, value_of
from auto_research.shadow.tensor import ShadowTensor, wrap

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _flatten(args, packed: bool):
    """Tensors of `args` in order, and a template that `_fill` turns back into arguments.

    `packed`: the second argument is the CPU batch sizes and is left alone.
    """
    tensors, template = [], []
    for position, a in enumerate(args):
        if isinstance(a, torch.Tensor) and not (packed and position == 1):
            template.append(len(tensors))
            tensors.append(a)
        elif isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            template.append(list(range(len(tensors), len(tensors) + len(a))))
            tensors.extend(a)
        else:
            template.append(("as is", a))
    return tensors, template


def _fill(template, tensors):
    filled = []
    for part in template:
        if isinstance(part, tuple):
            filled.append(part[1])
        elif isinstance(part, list):
            filled.append([tensors[i] for i in part])
        else:
            filled.append(tensors[part])
    return filled


def _check(name: str, args, tensors, packed: bool) -> None:
    for one in tensors:
        if type(one) is not ShadowTensor:
            raise MixedDevices(
                f"Input and parameter tensors are not at the same device, found one at shadow:0 and one at "
                f"{one.device} (operator {name})"
            )
    hidden = args[2 if packed else 1]
    for one in hidden if isinstance(hidden, (list, tuple)) else (hidden,):
        if not one.is_contiguous():
            raise RuntimeError(f"{name}: hx is not contiguous (call .contiguous() on the hidden state)")
    kinds = {one.dtype for one in tensors}
    if len(kinds) > 1:
        raise RuntimeError(
            f"{name}: input, hidden state and weights must have one dtype, got {sorted(map(str, kinds))}"
        )


class _OnCPU(torch.autograd.Function):
    """One recurrent call: forward builds a CPU graph over detached values, backward walks it."""

    @staticmethod
    def forward(ctx, func, template, *tensors):
        wanted = [t.requires_grad for t in tensors]
        inner = [t._value.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = func(*_fill(template, inner))
        outs = out if isinstance(out, tuple) else (out,)
        ctx.inner, ctx.wanted, ctx.outs = inner, wanted, outs
        return tuple(wrap(o.detach()) for o in outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        pairs = [(o, g._value) for o, g in zip(ctx.outs, grads, strict=True) if g is not None and o.requires_grad]
        inputs = [t for t, w in zip(ctx.inner, ctx.wanted, strict=True) if w]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True, allow_unused=True
            )
        )
        answers = [next(found) if w else None for w in ctx.wanted]
        return None, None, *[wrap(a) if a is not None else None for a in answers]


def _call(func, args):
    name = func._schema.name.partition("::")[2]
    packed = func._schema.overload_name == "data"
    tensors, template = _flatten(args, packed)
    _check(name, args, tensors, packed)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        outs = _OnCPU.apply(func, template, *tensors)
    else:
        with torch.no_grad():
            out = func(*_fill(template, [value_of(t) for t in tensors]))
        outs = tuple(wrap(o) for o in (out if isinstance(out, tuple) else (out,)))
    return outs if len(outs) > 1 else outs[0]


def _overloads():
    for name in _LAYERS:
        for overload in ("input", "data"):
            yield f"{name}.{overload}", getattr(getattr(torch.ops.aten, name), overload)
    for name in _CELLS:
        yield name, getattr(torch.ops.aten, name).default


def register(library: torch.library.Library) -> None:
    """Register layers and cells above autograd, so that no fused kernel is ever looked for."""
    for name, func in _overloads():

        def kernel(*args, _func=func):
            return _call(_func, args)

        library.impl(name, kernel, "AutogradPrivateUse1")


@special(*_LAYERS, *_CELLS)
def _in_inference_mode(func, args, kwargs):
    """Inference tensors carry no autograd key and come straight to the dispatcher."""
    return _call(func, args)
