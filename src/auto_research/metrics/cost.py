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
    """Floating point operations of matrix products and convolutions while fn() runs (multiply and add count as two).

    Counts by PyTorch's own formulas (`torch.utils.flop_counter`). Its FlopCounterMode would import the compiler when it
    starts, 2 to 5 CPU seconds in every job.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def attention(query, key, value, *args, **kwargs) -> int:
        return sdpa_flop_count(query.shape, key.shape, value.shape)

    def attention_backward(gradient, query, key, value, *args, **kwargs) -> int:
        return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)

    aten = torch.ops.aten  # PyTorch's registry has the fused attention of accelerators only
    formulas = dict(flop_registry) | {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }

    class Counting(TorchDispatchMode):
        total = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # PyTorch would wrap the method below in a decorator that imports the compiler

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            formula = formulas.get(func._overloadpacket)
            if formula is None and func is not torch.ops.prim.device.default:
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            result = func(*args, **kwargs)
            if formula is not None:
                self.total += formula(*args, **kwargs, out_val=result)
            return result

    with Counting() as counter:
        fn()
    return int(counter.total)


def saved_bytes(fn: Callable[[], object], without: torch.nn.Module | None = None) -> int:
    """Bytes of the tensors that autograd keeps for backward while fn() runs; every storage counts once.

    without: a model whose parameters do not count.
    """
    import torch

    left_out = {p.untyped_storage().data_ptr() for p in without.parameters()} if without is not None else set()
    kept: dict[int, torch.UntypedStorage] = {}  # storages stay alive, so no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    del result
    return sum(storage.nbytes() for storage in kept.values())


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
