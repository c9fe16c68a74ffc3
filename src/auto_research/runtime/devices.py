"""The one device rule: auto is CUDA, then Apple MPS, then CPU; a requested accelerator that is missing is an error."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.runtime import evidence
from auto_research.runtime.errors import ConfigError, DeviceUnavailable
from auto_research.runtime.threads import requested_threads

if TYPE_CHECKING:
    import torch

VARIABLE = "AUTO_RESEARCH_DEVICE"
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?|shadow(:0)?")


def check_device_text(text: str) -> str:
    """Return `text` when it is auto, cpu, mps, cuda, cuda:<index> or shadow; ConfigError otherwise. No torch import."""
    if not isinstance(text, str) or not _DEVICE.fullmatch(text):
        raise ConfigError(f"device {text!r} is not one of auto, cpu, mps, cuda, cuda:<index>, shadow")
    return text


def requested_device(text: str | None = None) -> str:
    """The argument, else AUTO_RESEARCH_DEVICE, else 'auto'; checked."""
    return check_device_text(text or os.environ.get(VARIABLE) or "auto")


def available_devices() -> list[str]:
    """Devices of this machine in the order auto tries them, e.g. ['cuda:0', 'cuda:1', 'cpu']."""
    import torch

    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def resolve_device(text: str | None = None) -> torch.device:
    """Device with an explicit index for `text` (None: environment, then auto). DeviceUnavailable when it is missing."""
    import torch

    text = requested_device(text)
    if text.startswith("shadow"):
        from auto_research.shadow import accelerator

        accelerator.activate()
        return torch.device("shadow:0")
    found = available_devices()
    if text == "auto":
        wanted = found[0]
    elif text == "cuda":
        wanted = "cuda:0"
    else:
        wanted = "cuda:" + str(int(text[5:])) if text.startswith("cuda:") else text
    if wanted not in found:
        raise DeviceUnavailable(
            f"device {text} is not available: this machine has {', '.join(found)}; pass --device auto or one of these"
        )
    return torch.device("mps:0") if wanted == "mps" else torch.device(wanted)


def device_for(requested: str | None = None) -> torch.device:
    """Device to train on, with the caller's file, line and function written to the evidence log.

    Adapters call it in their own file. Errors: ConfigError (bad text), DeviceUnavailable.
    """
    import torch

    text = requested_device(requested)
    device = resolve_device(text)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    evidence.record(text, str(device), sys._getframe(1))
    return device


def runtime_facts(requested: str | None = None) -> dict[str, Any]:
    """Facts for result files: no host name, user, driver or build string."""
    import torch

    text = requested_device(requested)
    return {
        "device_requested": text,
        "device_resolved": str(resolve_device(text)),
        "torch": public_version(torch.__version__),
        "platform": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "cpu_threads": requested_threads() or torch.get_num_threads(),
    }


def public_version(version: str) -> str:
    """Version without the local build part: '2.13.0+cpu' -> '2.13.0'."""
    return str(version).split("+")[0]


def hardware_name(device: torch.device) -> str:
    """Marketing name of the processor or accelerator behind `device`, for people to read."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"Apple GPU ({platform.machine()})"
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`; nothing to do on CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(device: torch.device) -> int:
    """Peak bytes since `reset_peak_memory`: allocated device memory on CUDA and shadow, current driver memory on MPS (it
    keeps no peak), resident host memory elsewhere (never reset on systems other than Linux)."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    if device.type == "shadow":
        return int(torch.shadow.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak measurement where the platform can."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "shadow":
        torch.shadow.reset_peak_memory_stats()
    elif device.type != "mps" and sys.platform == "linux":
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return
