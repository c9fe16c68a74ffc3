"""Naming the device: lazily, once, late, and never where PyTorch cannot."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from auto_research.runtime.devices import device_for, peak_memory, reset_peak_memory, synchronize
from auto_research.runtime.errors import DeviceUnavailable
from auto_research.shadow import accelerator


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_activation_changes_nothing():
    generator = torch.Generator
    accelerator.activate()
    assert accelerator.is_active()
    assert torch.Generator is generator
    assert torch.shadow.device_count() == 1


def test_the_device_rule_names_it_only_on_request():
    out = _run(
        """
        import torch
        from auto_research.runtime import devices
        devices.device_for("cpu")
        print(hasattr(torch, "shadow"))
        print(devices.device_for("shadow"), torch.zeros(2, device="shadow").device, torch.shadow.is_available())
        """
    )
    assert out.split() == ["False", "shadow:0", "shadow:0", "True"]


def test_training_works_when_cpu_training_came_first():
    out = _run(
        """
        import torch
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
        from auto_research.shadow import accelerator
        accelerator.activate()
        x = torch.ones(2, device="shadow", requires_grad=True)
        (x * 3).sum().backward()
        print(x.grad.tolist())
        """
    )
    assert out.strip() == "[3.0, 3.0]"


def test_an_error_in_backward_leaves_the_process_alive():
    out = _run(
        """
        import torch
        from auto_research.shadow import accelerator
        accelerator.activate()
        table = torch.nn.Embedding(3, 2, sparse=True).to("shadow")
        try:
            table(torch.tensor([1], device="shadow")).sum().backward()
        except NotImplementedError as error:
            print("caught")
        x = torch.ones(2, device="shadow", requires_grad=True)
        x.exp().sum().backward()
        print(x.grad.device)
        """
    )
    assert out.split() == ["caught", "shadow:0"]


def test_a_torch_without_the_hooks_is_refused(monkeypatch):
    monkeypatch.delattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
    with pytest.raises(DeviceUnavailable, match="needs a PyTorch with Python backend hooks"):
        accelerator._check_torch()


def test_a_key_taken_by_another_backend_is_refused():
    out = _run(
        """
        import torch
        torch.utils.rename_privateuse1_backend("other")
        from auto_research.runtime.errors import DeviceUnavailable
        from auto_research.shadow import accelerator
        try:
            accelerator.activate()
        except DeviceUnavailable as error:
            print(error)
        """
    )
    assert "which backend 'other' has taken" in out


def test_the_device_answers_the_runtime():
    device = device_for("shadow")
    synchronize(device)
    reset_peak_memory(device)
    before = peak_memory(device)
    kept = torch.zeros(1 << 16, device=device)
    assert peak_memory(device) - before == 4 * kept.numel()
