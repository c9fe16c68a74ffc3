"""AdamW with the usual decay groups, and learning-rate schedules as plain functions of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import nn

_Plain = torch.optim.Optimizer


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the same numbers, without importing the compiler on first use.

    torch wraps these methods so that torch.compile leaves them alone, and the wrapper imports torch._dynamo: 2.7 CPU
    seconds in every training process. Nothing here is compiled, so the plain methods do.
    """

    add_param_group = inspect.unwrap(_Plain.add_param_group)
    zero_grad = inspect.unwrap(_Plain.zero_grad)
    state_dict = inspect.unwrap(_Plain.state_dict)
    load_state_dict = inspect.unwrap(_Plain.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices and tables decay, vectors (biases, norms, slopes) do not.

    A model with `param_groups(weight_decay)` decides for itself.
    """
    if hasattr(model, "param_groups"):
        return model.param_groups(weight_decay)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)
) -> AdamW:
    """AdamW over `decay_groups`; the fused kernel where the device has one."""
    groups = decay_groups(model, weight_decay)
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return AdamW(groups, lr=learning_rate, weight_decay=weight_decay, betas=betas, fused=fused)


def warmup_cosine(warmup: int, floor: float = 0.05) -> Callable[[int, int], float]:
    """Linear warm-up over `warmup` steps, then half a cosine down to `floor`: (step, total) -> factor."""

    def factor(step: int, total: int) -> float:
        rise = min(1.0, (step + 1) / max(1, warmup))
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total))))
        return rise * (floor + (1 - floor) * fall)

    return factor


def exponential(rate: float, every: int) -> Callable[[int, int], float]:
    """`rate` ** (step / every), DIN's decay: (step, total) -> factor."""

    def factor(step: int, total: int) -> float:
        return rate ** (step / max(1, every))

    return factor
