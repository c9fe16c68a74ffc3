"""The audited process: runs every stage of one adapter on one device and reports what it saw.

    python -m auto_research.audit.process --adapter din --tier tiny --device cpu --work DIR --report FILE

The report is written last, also after an exception; a process that dies without one was killed or crashed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from auto_research.runtime.errors import AutoResearchError, describe_error
from auto_research.runtime.files import write_json
from auto_research.runtime.process import die_with_parent


def main(arguments: list[str] | None = None) -> int:
    """Run one adapter; 0 when every stage finished, 1 when one raised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--tier", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dataset", default=None)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args(arguments)
    die_with_parent()
    report: dict[str, Any] = {"finished": False, "error": None, "metrics": {}, "peak_memory_bytes": None}
    try:
        report["metrics"], peak = _run(options)
        report["finished"] = True
    except Exception as error:
        report["error"] = _error(error)
        traceback.print_exc()
        peak = 0
    try:
        report |= _device_facts(options.device, peak)
    except Exception as error:
        report["error"] = report["error"] or _error(error)
        report["finished"] = False
    write_json(options.report, report)
    return 0 if report["finished"] else 1


def _run(options: argparse.Namespace) -> tuple[dict[str, dict[str, float | None]], int]:
    """Metrics per arm and the largest peak memory (bytes) that an arm recorded itself."""
    from auto_research.experiment.inline import run_adapter
    from auto_research.runtime.threads import set_threads

    set_threads(None)
    measured = run_adapter(
        options.adapter,
        options.tier,
        workdir=options.work,
        dataset=options.dataset,
        seed=options.seed,
        device=options.device,
    )
    metrics, peak = {}, 0
    for arm, measurement in measured.items():
        metrics[arm] = {name: _finite(value) for name, value in measurement.metrics.items()}
        peak = max(peak, int(measurement.cost.get("peak_memory_bytes") or 0))
    return metrics, peak


def _device_facts(device: str, recorded: int) -> dict[str, Any]:
    """Peak bytes allocated on the device (None where it is not the device's own memory) and runtime facts."""
    from auto_research.runtime.devices import hardware_name, peak_memory, resolve_device, runtime_facts

    resolved = resolve_device(device)
    facts = runtime_facts(device)
    return {
        "peak_memory_bytes": _peak(resolved, recorded, peak_memory(resolved)),
        "runtime": {
            **{key: facts[key] for key in ("torch", "platform", "python", "cpu_threads")},
            "accelerator": hardware_name(resolved) if resolved.type == "cuda" else None,
        },
    }


def _peak(device: Any, recorded: int, last: int) -> int | None:
    """Device memory only. Stages reset the peak counter, so what they recorded stands beside the last value; a CUDA
    device that never served an allocation (a total nobody resets) has a peak of 0 whatever a stage recorded."""
    if device.type == "cuda":
        import torch

        total = torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0)
        return max(recorded, last) if total else 0
    return max(recorded, last) if device.type == "mps" else None


def _error(error: Exception) -> dict[str, str]:
    """Class and one-line message; the traceback is in the log."""
    text = describe_error(error)[0] if isinstance(error, AutoResearchError | OSError | MemoryError) else str(error)
    return {"type": type(error).__name__, "message": " ".join(text.split()) or type(error).__name__}


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if number == number and abs(number) != float("inf") else None


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
