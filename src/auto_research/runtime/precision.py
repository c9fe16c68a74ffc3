"""Device and dtype at the borders between modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def align(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` on the device of `like`; floating tensors also take its dtype when that is floating.

    For rebuilt weights and biases: they follow the activation, whatever they were stored as.
    """
    if tensor.is_floating_point() and like.is_floating_point():
        return tensor.to(device=like.device, dtype=like.dtype)
    return tensor.to(device=like.device)


def cast_border(x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """`x` with device and dtype of the module's first floating parameter (a BF16 trunk feeding an FP32 head)."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return align(x, parameter)
    return x


def dequantize(codes: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rebuild INT8 weights, codes [..., n] times scale (broadcastable), on device and dtype of the activation `like`.

    The product is taken in float32: int8 codes times a bf16 scale would round twice.
    """
    return align(codes.to(like.device, torch.float32) * scale.to(like.device, torch.float32), like)


def contiguous_state(state: Any) -> Any:
    """Recurrent state (tensor, or tuple of tensors as LSTM has) made contiguous for fused cells."""
    if isinstance(state, torch.Tensor):
        return state.contiguous()
    if isinstance(state, (tuple, list)):
        return tuple(part.contiguous() for part in state)
    return state


def hidden_of(output: Any) -> torch.Tensor:
    """Hidden states of a transformers layer or model, whichever shape its version returns.

    Takes a tensor, a tuple or list whose first entry is the tensor, or an output object or dict with
    `last_hidden_state` (else the last of `hidden_states`). TypeError for anything else.
    """
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "get"):
        last, every = output.get("last_hidden_state"), output.get("hidden_states")
    else:
        last, every = getattr(output, "last_hidden_state", None), getattr(output, "hidden_states", None)
    if isinstance(last, torch.Tensor):
        return last
    if every:
        return every[-1]
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        return output[0]
    raise TypeError(f"no hidden states in {type(output).__name__}")


def float32_region(device: torch.device | str) -> AbstractContextManager:
    """Context in which autocast is off on `device`: for losses, norms and log-sums that need float32."""
    kind = torch.device(device).type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
