"""Run one program on CPU and on the shadow device and compare every number."""

from __future__ import annotations

import torch


def on(device: str, program, seed: int = 0):
    """The tensors that `program(device)` yields or returns, on CPU; seeded before."""
    torch.manual_seed(seed)
    out = program(torch.device(device))
    answers = list(out) if isinstance(out, (list, tuple)) or hasattr(out, "__next__") else [out]
    for one in answers:
        if isinstance(one, torch.Tensor):
            assert one.device.type == device, f"an answer of the {device} run lies on {one.device}"
    return [one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in answers]


def assert_equal_runs(program, *, seed: int = 0, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """CPU and shadow give the same tensors (float32 tolerance) and the same Python values."""
    expected, got = on("cpu", program, seed), on("shadow", program, seed)
    assert len(expected) == len(got) > 0
    for want, have in zip(expected, got, strict=True):
        if isinstance(want, torch.Tensor):
            assert type(have) is torch.Tensor
            torch.testing.assert_close(have, want, rtol=rtol, atol=atol)
        else:
            assert have == want
