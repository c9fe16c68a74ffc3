"""`Module.to` and `torch.load(map_location=...)` across the border, as they behave on CUDA."""

from __future__ import annotations

import functools

import torch
from torch.utils import _pytree

from auto_research.shadow.tensor import DEVICE_NAME, ShadowTensor


def install() -> None:
    """Replace the two entry points; tensors that are not concerned take the old way."""
    torch._has_compatible_shallow_copy_type = _shallow(torch._has_compatible_shallow_copy_type)
    torch.load = _load(torch.load)


def _shallow(builtin):
    @functools.wraps(builtin)
    def compatible(tensor, applied):
        # Sends `Module.to("cpu")` through `parameter.data = ...`, which keeps ties and the optimizer's references.
        if type(tensor) is ShadowTensor and type(applied) is torch.Tensor:
            return True
        return builtin(tensor, applied)

    return compatible


def _load(builtin):
    @functools.wraps(builtin)
    def load(f, map_location=None, *args, **kwargs):
        if not isinstance(map_location, (str, torch.device)) or torch.device(map_location).type != DEVICE_NAME:
            return builtin(f, map_location, *args, **kwargs)
        # A storage cannot lie on this device, so it is read to CPU and moved tensor by tensor.
        loaded = builtin(f, "cpu", *args, **kwargs)
        return _pytree.tree_map_only(torch.Tensor, _moved, loaded)

    return load


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach().to(DEVICE_NAME), tensor.requires_grad)
    return tensor.detach().to(DEVICE_NAME).requires_grad_(tensor.requires_grad)
