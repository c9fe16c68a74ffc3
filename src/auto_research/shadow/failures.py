"""The backward pass: on the caller's thread, with its errors brought back whole.

PyTorch gives every device a thread of its own when the first backward of the process runs; a device named later has
none, so backward runs on the calling thread here.

Nodes of a foreign device run under a stream guard. When a Python exception unwinds through that guard, the guard asks
the Python backend for its device type while the exception is pending, and the process aborts (torch 2.13). So an
operator that fails there hands back something that PyTorch cannot convert, which makes PyTorch raise its own C++ error,
and the true exception is raised again when the engine returns. A tensor hook that fails is treated alike. Hooks on graph
nodes and on saved tensors are not reached: an error there still aborts.
"""

from __future__ import annotations

import functools

import torch

_held: list[BaseException] = []
_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__


class _Unconvertible:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"<{type(self.error).__name__}: {self.error}>"


def called_by_engine(frame) -> bool:
    """Whether the Python `frame` next above an operator is the one that runs the C++ engine, so no Python node is between."""
    return frame is None or frame.f_code is _ENGINE_CODE


def hold(error: BaseException):
    """Keep `error` for the caller of backward; the answer makes the engine stop."""
    _held.append(error)
    return _Unconvertible(error)


def guarded(hook):
    """`hook`, whose error is kept for the caller of backward; the gradient passes unchanged in the meantime."""

    @functools.wraps(hook)
    def run_hook(gradient):
        try:
            return hook(gradient)
        except Exception as error:
            _held.append(error)
            return None

    return run_hook


def install() -> None:
    """Make `torch.autograd` raise the kept error in the place of the engine's."""
    engine = torch.autograd.graph._engine_run_backward

    @functools.wraps(engine)
    def run_backward(*args, **kwargs):
        _held.clear()
        threads = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        try:
            out = engine(*args, **kwargs)
        except RuntimeError:
            if not _held:
                raise
        finally:
            torch._C._set_multithreading_enabled(threads)
        if _held:
            first = _held[0]
            _held.clear()
            raise first
        return out

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
