"""A switch that makes LAPACK calls fail as on a PyTorch build without it, for CPU and shadow tensors alike."""

from __future__ import annotations

import contextlib
import os
import warnings

import torch

VARIABLE = "AUTO_RESEARCH_SHADOW_LAPACK"
# The operators whose CPU kernels call LAPACK; torch.linalg.*, torch.svd, MultivariateNormal... all end in these.
OPERATORS = frozenset((
    "_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd",
    "_cholesky_solve_helper", "cholesky", "cholesky_inverse", "geqrf", "linalg_cholesky_ex", "linalg_eig",
    "linalg_eigvals", "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve",
    "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_qr", "linalg_solve_triangular",
    "ormqr", "triangular_solve",
))  # fmt: skip
_library: torch.library.Library | None = None


def available() -> bool:
    """Whether LAPACK calls pass."""
    return _library is None


def check(operator: str) -> None:
    """Raise RuntimeError in PyTorch's words when the switch is off."""
    if _library is not None:
        name = operator.partition("::")[2]
        raise RuntimeError(
            f"Calling {name} requires compiling PyTorch with LAPACK. Please use PyTorch built with LAPACK support "
            f"(the shadow device's LAPACK switch is off)."
        )


def switch(on: bool) -> None:
    """Let LAPACK calls pass (`on`) or raise, in this whole process, for CPU tensors too."""
    global _library
    if on:
        if _library is not None:
            library, _library = _library, None
            library._destroy()
        return
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(OPERATORS):
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                short = name if overload == "default" else f"{name}.{overload}"
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{short}", "CPU"):
                    _library.impl(short, _refusing(f"aten::{name}"), "CPU")


def _refusing(operator: str):
    def refuse(*args, **kwargs):
        check(operator)

    return refuse


@contextlib.contextmanager
def without_lapack():
    """Inside the block every LAPACK call raises RuntimeError."""
    before = available()
    switch(False)
    try:
        yield
    finally:
        switch(before)


def follow_environment() -> None:
    """`AUTO_RESEARCH_SHADOW_LAPACK=0` turns the switch off when the device is activated."""
    if os.environ.get(VARIABLE) == "0":
        switch(False)
