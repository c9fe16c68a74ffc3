"""What an audit device is called: the kind it proves, its pass status, its folder. Imports no torch."""

from __future__ import annotations

import re

from auto_research.runtime.errors import ConfigError

PASS = {"cuda": "gpu_pass", "cpu": "cpu_pass", "mps": "mps_pass", "shadow": "shadow_pass"}
NO_CALL, FAILED, TIMEOUT = "completed_without_device_call", "failed", "timeout"
STATUSES = (*PASS.values(), NO_CALL, FAILED, TIMEOUT)
_DEVICE = re.compile(r"^(cpu|mps|shadow|cuda)(?::(\d{1,2}))?$")


def kind_of(device: str) -> str:
    """`cuda:1` -> `cuda`. Raises ConfigError for anything but cpu, mps, shadow, cuda and cuda:<index>.

    `auto` is refused: evidence names the device it was asked for.
    """
    match = _DEVICE.match(str(device))
    if match is None or (match[2] is not None and match[1] != "cuda"):
        raise ConfigError(f"audit device '{device}': use cpu, mps, shadow, cuda or cuda:<index> (auto proves nothing)")
    return match[1]


def folder_name(device: str) -> str:
    """The folder of a device below `results/audit/`: `cuda:1` -> `cuda-1`."""
    kind_of(device)
    return device.replace(":", "-")


def answers(resolved: str, required: str) -> bool:
    """True when a `device_for` call that gave `resolved` is evidence for the `required` device."""
    want, got = _DEVICE.match(required), _DEVICE.match(str(resolved))
    if want is None or got is None or want[1] != got[1]:
        return False
    return want[1] != "cuda" or None in (want[2], got[2]) or int(want[2]) == int(got[2])
