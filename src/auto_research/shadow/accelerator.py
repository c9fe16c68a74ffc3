"""Switch the shadow accelerator on: `activate()` makes the device name `shadow` usable in this process."""

from __future__ import annotations

import threading

import torch

from auto_research.runtime.devices import public_version
from auto_research.runtime.errors import DeviceUnavailable
from auto_research.shadow import (
    autocast,
    backend,
    dispatch,
    factories,
    failures,
    generators,
    lapack,
    moving,
    recurrent,
    tensor,
)

_lock = threading.Lock()
_libraries: list[torch.library.Library] = []


def is_active() -> bool:
    """Whether `activate` has run in this process."""
    return bool(_libraries)


def activate() -> None:
    """Register device `shadow` (one, index 0) with PyTorch; a second call does nothing.

    Raises DeviceUnavailable where PyTorch has no Python-backend hooks (they came after 2.7) or the key is taken.
    There is no way back: PyTorch lets a process name the key once.
    """
    with _lock:
        if _libraries:
            return
        _check_torch()
        torch.utils.backend_registration._setup_privateuseone_for_python_backend("shadow", backend.as_module())
        tensor.bind(dispatch.run)
        library = torch.library.Library("aten", "IMPL")
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(factories.fallback, "PrivateUse1")
        everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        factories.register(library)
        recurrent.register(library)
        autocast.register(library)
        generators.install()
        failures.install()
        moving.install()
        _allow_foreach(tensor.ShadowTensor)
        lapack.follow_environment()
        _libraries.extend((library, everything))


def _check_torch() -> None:
    registration = torch.utils.backend_registration
    if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
        raise DeviceUnavailable(
            f"device 'shadow' needs a PyTorch with Python backend hooks "
            f"(torch.utils.backend_registration._setup_privateuseone_for_python_backend); "
            f"found torch {public_version(torch.__version__)}"
        )
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        raise DeviceUnavailable(
            f"device 'shadow' needs PyTorch's PrivateUse1 key, which backend "
            f"'{torch._C._get_privateuse1_backend_name()}' has taken in this process"
        )


def _allow_foreach(kind: type) -> None:
    """Optimizers take their multi-tensor path for known tensor types only; on accelerators it is the default."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in known:
            known.append(kind)
