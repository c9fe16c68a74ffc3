"""The module that becomes `torch.shadow`: seeds, random state, memory, streams that do nothing."""

from __future__ import annotations

import types

import torch

from auto_research.shadow import autocast, memory


def _check_index(device) -> int:
    if device is None:
        return 0
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0):
        raise RuntimeError(f"invalid device ordinal: shadow:{index} (the shadow device has one, shadow:0)")
    return 0


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    return None


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device) -> None:
    _check_index(device)


class device:
    """`with torch.shadow.device(index):` for code that selects a card first; there is one."""

    def __init__(self, index) -> None:
        _check_index(index)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error) -> None:
        return None


def synchronize(device=None) -> None:
    """Nothing to wait for: every operator has finished when it returns."""
    _check_index(device)


def empty_cache() -> None:
    return None


def manual_seed(seed: int) -> None:
    """Random numbers come from the CPU's default generator, which `torch.manual_seed` has seeded already."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    # `torch.manual_seed` calls this after it has seeded the CPU generator that this device draws from.
    return None


def _is_in_bad_fork() -> bool:
    return False


def get_rng_state(device=None) -> torch.Tensor:
    """State (ByteTensor, CPU) of the generator this device draws from: the CPU's default one."""
    _check_index(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device=None) -> None:
    _check_index(device)
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states) -> None:
    for state in new_states:
        set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return autocast.supported_dtypes()


def is_bf16_supported() -> bool:
    return True


def memory_allocated(device=None) -> int:
    """Bytes held by living shadow tensors."""
    _check_index(device)
    return memory.allocated()


def max_memory_allocated(device=None) -> int:
    """Most bytes held at once since the last `reset_peak_memory_stats`."""
    _check_index(device)
    return memory.peak()


def reset_peak_memory_stats(device=None) -> None:
    _check_index(device)
    memory.reset_peak()


def get_device_name(device=None) -> str:
    _check_index(device)
    return "shadow accelerator (CPU values)"


def as_module() -> types.ModuleType:
    """A module object with the functions above, for `torch._register_device_module`."""
    made = types.ModuleType("torch.shadow", __doc__)
    for name, value in list(globals().items()):
        public = isinstance(value, types.FunctionType) or value is device
        if public and name not in ("as_module", "_check_index"):
            setattr(made, name, value)
    return made
