"""Print device, torch, CUDA and hardware, and take one training step there: what the demos check before they train."""

from __future__ import annotations

import argparse
import platform
import sys

from auto_research.runtime import devices
from auto_research.runtime.errors import RunFailure, guard
from auto_research.runtime.threads import available_cores, set_threads


def lines(requested: str | None, threads: int | None) -> list[str]:
    """Lines for people; DeviceUnavailable when the requested device is missing."""
    import torch

    used = set_threads(threads)
    device = devices.resolve_device(requested)
    cuda = torch.version.cuda if torch.cuda.is_available() else "not available"
    return [
        f"device    {device} (requested: {devices.requested_device(requested)})",
        f"hardware  {devices.hardware_name(device)}, {available_cores()} cores, {used} thread(s) per worker",
        f"torch     {devices.public_version(torch.__version__)} on Python {platform.python_version()}",
        f"cuda      {cuda}",
    ]


def training_step(requested: str | None) -> float:
    """Loss after one gradient step of a small layer on the device; RunFailure when it did not fall."""
    import torch

    device = devices.resolve_device(requested)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 1).to(device)
    x = torch.randn(32, 8).to(device)
    before = layer(x).square().mean()
    before.backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.05 * parameter.grad
    after = float(layer(x).square().mean().detach())
    devices.synchronize(device)
    if not after < float(before.detach()):
        raise RunFailure(f"a training step on {device} did not lower its loss: driver and torch do not fit together")
    return after


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m auto_research.runtime.device_report`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--cpu-threads", type=int)
    options = parser.parse_args(arguments)
    for line in lines(options.device, options.cpu_threads):
        print(line)
    training_step(options.device)
    print("check     one training step passed")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
