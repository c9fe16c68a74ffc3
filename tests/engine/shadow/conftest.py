"""Every test here runs with the shadow device named. It cannot be un-named; on CPU tensors it changes nothing."""

from __future__ import annotations

import pytest

from auto_research.shadow import accelerator


@pytest.fixture(scope="session", autouse=True)
def shadow_device() -> None:
    accelerator.activate()
