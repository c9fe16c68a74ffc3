"""GPU lease: a file lock per device index, so that two local jobs never share a card by accident."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from auto_research.runtime.errors import ConfigError, DeviceUnavailable, TimeLimit

HELD = "AUTO_RESEARCH_GPU_LEASE"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_SECONDS = 0.2


def lease_folder() -> Path:
    """Folder of the lock files, shared by every run of this user on this machine."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"auto-research-gpu-{user}"


@contextmanager
def gpu_lease(
    devices: int | Sequence[int | str], folder: str | os.PathLike | None = None, *, timeout: float | None = None
) -> Iterator[str | None]:
    """Hold one free device of `devices` and make it the only visible one; yields its name in CUDA_VISIBLE_DEVICES.

    `devices`: how many are visible, or their indices. The lock belongs to the process: the kernel frees it when the
    process dies, the file stays. Under a scheduler that assigned devices, or inside a process whose parent holds the
    lease, the assignment is respected and None is yielded. Waits until one is free; TimeLimit after `timeout` seconds.
    """
    if _assigned_elsewhere():
        yield None
        return
    names = _names(devices)
    lock, name = _acquire(names, Path(folder) if folder is not None else lease_folder(), timeout)
    before = {key: os.environ.get(key) for key in (VISIBLE, HELD)}
    os.environ[VISIBLE] = os.environ[HELD] = name
    try:
        yield name
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        lock.release()


@contextmanager
def lease_for(
    device: str, folder: str | os.PathLike | None = None, *, timeout: float | None = None
) -> Iterator[str | None]:
    """Lease what the device text needs: nothing for cpu, mps and shadow (or auto without CUDA), any card for cuda and
    auto, exactly card N for cuda:N (CUDA_VISIBLE_DEVICES then stays, so that the index keeps its meaning)."""
    if not (device == "auto" or device.startswith("cuda")) or _assigned_elsewhere():
        yield None
        return
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        yield None
        return
    if ":" not in device:
        with gpu_lease(count, folder, timeout=timeout) as name:
            yield name
        return
    visible = _names(count)
    index = int(device.split(":")[1])
    if index >= len(visible):
        raise DeviceUnavailable(f"device {device} is not available: {len(visible)} CUDA device(s) are visible")
    lock, name = _acquire([visible[index]], Path(folder) if folder is not None else lease_folder(), timeout)
    before = os.environ.get(HELD)
    os.environ[HELD] = name
    try:
        yield name
    finally:
        if before is None:
            os.environ.pop(HELD, None)
        else:
            os.environ[HELD] = before
        lock.release()


def _assigned_elsewhere() -> bool:
    return bool(os.environ.get(HELD)) or (bool(os.environ.get("SLURM_JOB_ID")) and bool(os.environ.get(VISIBLE)))


def _names(devices: int | Sequence[int | str]) -> list[str]:
    visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if isinstance(devices, int):
        names = visible[:devices] if visible else [str(index) for index in range(devices)]
    else:
        names = [str(name) for name in devices]
    if not names:
        raise DeviceUnavailable("no CUDA device to lease on this machine")
    for name in names:
        if not name.replace("-", "").replace("/", "").isalnum():
            raise ConfigError(f"CUDA device name {name!r} is not allowed")
    return names


def _acquire(names: Sequence[str], folder: Path, timeout: float | None) -> tuple[FileLock, str]:
    folder.mkdir(parents=True, exist_ok=True)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        for name in names:
            # thread_local=False: the lock is this object's, also when another thread releases it
            lock = FileLock(folder / f"gpu-{name.replace('/', '_')}.lock", thread_local=False)
            try:
                lock.acquire(blocking=False)
                return lock, name
            except Timeout:
                continue
        if end is not None and time.monotonic() >= end:
            raise TimeLimit(f"no free GPU among {', '.join(names)} after {timeout:g} s: other jobs hold their leases")
        time.sleep(_POLL_SECONDS)
