"""Every planted fault passes on CPU, is caught on the shadow device, and passes there once mended."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from faults import ELSEWHERE, FAULTS

from auto_research.shadow import lapack

ROOT = Path(__file__).resolve().parents[3]


def _machine(fault):
    """The LAPACK fault is one of the machine, not of the device: its torch has no LAPACK."""
    return lapack.without_lapack() if fault.error == "LAPACK" else contextlib.nullcontext()


@pytest.mark.parametrize("name", FAULTS)
def test_broken_form_is_caught(name):
    fault = FAULTS[name]
    with _machine(fault), pytest.raises((RuntimeError, TypeError), match=fault.error):
        fault.broken(torch.device("shadow"))


@pytest.mark.parametrize("name", FAULTS)
def test_mended_form_passes_on_both_devices(name):
    fault = FAULTS[name]
    with _machine(fault):
        fault.mended(torch.device("shadow"))
        fault.mended(torch.device("cpu"))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if "dtype" not in fault.error])
def test_broken_form_passes_on_an_ordinary_cpu(name):
    FAULTS[name].broken(torch.device("cpu"))


def test_every_row_of_the_table_is_planted_or_tested_elsewhere():
    text = (ROOT / "docs/shadow.md").read_text(encoding="utf-8")
    table = text.partition("## Faults")[2].partition("\n## ")[0]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    rows.pop("fault")
    planted = {fault.row for fault in FAULTS.values()}
    assert set(rows) == planted | set(ELSEWHERE)
    for row, line in rows.items():
        named = re.findall(r"`(tests/[a-z_/]+\.py)`", line)
        assert named, f"row {row!r} names no test file"
        assert all((ROOT / path).is_file() for path in named)
        assert ELSEWHERE.get(row, "tests/engine/shadow/test_planted_faults.py") in named
