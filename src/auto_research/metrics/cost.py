"""What an arm costs: parameters, floating point operations, seconds, peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from auto_research.runtime.devices import peak_memory, reset_peak_memory, synchronize

if TYPE_CHECKING:
    import torch


def count_params(module: torch.nn.Module, trainable_only: bool = True) -> int:
    """Number of parameters; shared tensors count once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable_only)


def flops_of(fn: Callable[[], object]) -> int:
    """Floating point operations of matrix products and convolutions while fn() runs (multiply and add count as two)."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        fn()
    return int(counter.get_total_flops())


class Stopwatch:
    """Seconds of a block and the device's peak memory in bytes; the device is synchronised at both ends.

    Use as a context manager; `seconds` adds up over several uses, `peak_memory_bytes` is the largest seen.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = 0.0
        self.peak_memory_bytes = 0
        self._started = 0.0

    def __enter__(self) -> Stopwatch:
        synchronize(self.device)
        reset_peak_memory(self.device)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_exception: object) -> None:
        synchronize(self.device)
        self.seconds += time.perf_counter() - self._started
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory(self.device))
