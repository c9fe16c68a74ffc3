"""Intra-op threads of one worker."""

from __future__ import annotations

import os

from auto_research.runtime.errors import ConfigError

VARIABLE = "AUTO_RESEARCH_CPU_THREADS"
_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(value: int | str) -> int:
    """Parse a thread count; ConfigError unless it is a whole number of at least 1."""
    try:
        threads = int(str(value))
    except ValueError:
        threads = 0
    if threads < 1:
        raise ConfigError(f"cpu threads {value!r} is not a whole number of at least 1")
    return threads


def requested_threads(threads: int | str | None = None) -> int | None:
    """The argument, else AUTO_RESEARCH_CPU_THREADS, else None (library default)."""
    value = threads if threads is not None else os.environ.get(VARIABLE) or None
    return None if value is None else check_threads(value)


def set_threads(threads: int | str | None = None) -> int:
    """Set torch's intra-op threads (argument, else AUTO_RESEARCH_CPU_THREADS, else unchanged); returns what holds.

    Also exported to child processes and to BLAS libraries that load later.
    """
    import torch

    wanted = requested_threads(threads)
    if wanted is not None:
        os.environ[VARIABLE] = str(wanted)
        for name in _LIBRARIES:
            os.environ[name] = str(wanted)
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def oversubscription(workers: int, threads: int) -> str | None:
    """One warning line when workers x threads exceed the cores, else None."""
    cores = available_cores()
    if workers * threads <= cores:
        return None
    return (
        f"warning: {workers} workers x {threads} threads exceed the {cores} cores of this machine; expect a slower run"
    )
