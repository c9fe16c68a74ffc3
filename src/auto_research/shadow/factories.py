"""Operators that see no shadow tensor and are asked for one by `device=`: `zeros`, `arange`, `randn`..."""

from __future__ import annotations

import torch

from auto_research.shadow import generators
from auto_research.shadow.dispatch import run
from auto_research.shadow.tensor import wrap

_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided", "eye", "eye.m", "full",
    "linspace", "logspace", "ones", "zeros", "rand", "rand.generator", "randn", "randn.generator", "randint",
    "randint.generator", "randint.low", "randint.low_generator", "randperm", "randperm.generator", "scalar_tensor",
    "tril_indices", "triu_indices", "range", "range.step", "_efficientzerotensor", "fft_fftfreq", "fft_rfftfreq",
    "bartlett_window", "bartlett_window.periodic", "blackman_window", "blackman_window.periodic", "hann_window",
    "hann_window.periodic", "hamming_window", "hamming_window.periodic", "kaiser_window", "kaiser_window.periodic",
    "normal.float_float",
)  # fmt: skip
_CPU = torch.device("cpu")


def _factory(name: str):
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args, **kwargs):
        place = kwargs["device"]
        if place.index not in (None, 0):
            raise RuntimeError(f"invalid device ordinal: {place} (the shadow device has one, shadow:0)")
        kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = generators.value_of(kwargs["generator"], name)
        return wrap(func(*args, **kwargs))

    return make


def register(library: torch.library.Library) -> None:
    """Register every factory on the PrivateUse1 key of an `aten` IMPL library."""
    for name in _FACTORIES:
        library.impl(name, _factory(name), "PrivateUse1")
    # `torch.tensor(data, device="shadow")` moves its data with the Python key switched off.
    library.impl("copy_", lambda *args: run(torch.ops.aten.copy_.default, args, {}), "PrivateUse1")


def fallback(func, *args, **kwargs):
    """Backend fallback: a factory that has no kernel above. Never reached with a tensor argument."""
    if "device" not in kwargs:
        raise NotImplementedError(f"operator {func} has no kernel on the shadow device")
    kwargs["device"] = _CPU
    out = func(*args, **kwargs)
    return wrap(out) if type(out) is torch.Tensor else out
