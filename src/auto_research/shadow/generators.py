"""Random generators of the shadow device.

`torch.Generator(device="shadow")` cannot be made by a Python backend (its C++ hook is not exposed), so while the
backend is active `torch.Generator` is a thin class that hands out `ShadowGenerator` for that device and the
built-in generator for every other. A `ShadowGenerator` is a marker that PyTorch accepts as a generator; the state
lives in a CPU generator behind it, so equal seeds give the CPU run's numbers.
"""

from __future__ import annotations

import warnings
import weakref

import torch

_Builtin = torch._C.Generator
_markers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_library = None
# Every CPU kernel that takes a generator ends in one of these.
_RANDOM = (
    "uniform_", "normal_", "random_", "random_.from", "random_.to", "bernoulli_.float", "bernoulli_.Tensor",
    "bernoulli.out", "exponential_", "geometric_", "cauchy_", "log_normal_", "multinomial", "multinomial.out",
    "randperm.generator_out", "poisson", "binomial", "normal.Tensor_float", "normal.float_Tensor",
    "normal.Tensor_Tensor",
)  # fmt: skip


class ShadowGenerator(_Builtin):
    """A generator whose device is `shadow:0`; takes and gives the state of a CPU generator (ByteTensor, CPU)."""

    def __init__(self, device=None) -> None:
        self._inner = _Builtin()
        _markers[self._cdata] = self
        _guard_cpu_kernels()

    @property
    def device(self):
        return torch.device("shadow", 0)

    def manual_seed(self, seed):
        self._inner.manual_seed(seed)
        return self

    def seed(self):
        return self._inner.seed()

    def initial_seed(self):
        return self._inner.initial_seed()

    def get_state(self):
        return self._inner.get_state()

    def set_state(self, new_state):
        self._inner.set_state(new_state)
        return self

    def clone_state(self):
        twin = ShadowGenerator.__new__(ShadowGenerator)
        twin.__init__()
        return twin.set_state(self.get_state())

    def __reduce__(self):
        return _rebuild, (self.get_state(),)


def _rebuild(state):
    return ShadowGenerator().set_state(state)


class _Choice(type):
    def __instancecheck__(cls, thing):
        return isinstance(thing, _Builtin)

    def __subclasscheck__(cls, kind):
        return issubclass(kind, _Builtin)

    def __call__(cls, device="cpu"):
        if torch.device(device).type == "shadow":
            return ShadowGenerator()
        return _Builtin(device)


class Generator(metaclass=_Choice):
    """Stands in for `torch.Generator` while the shadow device is active."""


def install() -> None:
    """Put `Generator` in the place of `torch.Generator`."""
    torch.Generator = Generator


def value_of(generator, operator: str):
    """The CPU generator behind a shadow one; raises RuntimeError for a generator of another device.

    The dispatcher hands over a fresh Python object per call, so the marker is found by its C++ address.
    """
    marker = _markers.get(generator._cdata)
    if marker is None:
        raise RuntimeError(
            f"Expected a 'shadow' device type for generator but found '{generator.device}' (operator {operator})"
        )
    return marker._inner


def _guard_cpu_kernels() -> None:
    """From the first shadow generator on, CPU kernels refuse one, as they refuse a CUDA generator."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _RANDOM:
            full = f"aten::{name}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
                _library.impl(name, _guarded(torch.library.get_kernel(full, "CPU")), "CPU", with_keyset=True)


def _guarded(kernel):
    def guarded(keys, *args, **kwargs):
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata in _markers:
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'shadow:0'")
        return kernel.call_boxed(keys, *args, **kwargs)

    return guarded
