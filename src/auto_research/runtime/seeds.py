"""Seeds and random streams; every stream is a function of named parts."""

from __future__ import annotations

import hashlib
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) and ask torch for deterministic kernels.

    Where a device has no deterministic kernel torch warns and goes on: bitwise equality is promised on CPU
    at one thread count only.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    # The same switch as use_deterministic_algorithms(True, warn_only=True), which imports the whole compiler (2 CPU s a job).
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def stable_seed(*parts: Any) -> int:
    """First eight bytes, big-endian, of sha256('a|b|c'): the same on every machine."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:8], "big")


def stable_rng(*parts: Any) -> np.random.Generator:
    """PCG64 generator seeded by `stable_seed(*parts)`."""
    return np.random.Generator(np.random.PCG64(stable_seed(*parts)))


def torch_generator(device: torch.device | str, *parts: Any) -> torch.Generator:
    """torch generator on `device` seeded by `stable_seed(*parts)` (63 bits)."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(stable_seed(*parts) & (2**63 - 1))
    return generator


def rng_state() -> dict[str, Any]:
    """State of the global generators as tensors, ints and tuples (readable by torch.load(weights_only=True))."""
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`; parts of devices that are absent here are left out."""
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
