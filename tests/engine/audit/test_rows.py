"""A status is earned by evidence from the adapter's own folder on the required device, never by another device."""

import pytest

from auto_research.audit.devices import PASS, STATUSES, answers, folder_name, kind_of
from auto_research.audit.rows import is_pass, read_evidence, status_of
from auto_research.runtime.errors import ConfigError


def record(file, resolved="cpu", line=3, function="arm"):
    return {"requested": "cpu", "resolved": resolved, "file": str(file), "line": line, "function": function}


def status(device="cpu", **changes):
    facts = {"finished": True, "timed_out": False, "own_calls": 1, "peak_memory_bytes": 10} | changes
    return status_of(device=device, **facts)[0]


def test_only_calls_from_the_own_folder_count(tmp_path):
    folder = tmp_path / "adapters" / "toy"
    folder.mkdir(parents=True)
    records = [
        record(folder / "experiment.py"),
        record(folder / "experiment.py"),
        record(tmp_path / "adapters" / "toy_two" / "experiment.py"),
        record(tmp_path / "src" / "auto_research" / "train" / "loop.py"),
    ]
    evidence = read_evidence(records, folder=folder, root=tmp_path, device="cpu")
    assert (evidence.own, evidence.elsewhere, evidence.other_device) == (2, 2, 0)
    assert evidence.callers == [
        {"file": "adapters/toy/experiment.py", "line": 3, "function": "arm", "resolved": "cpu", "calls": 2}
    ]


def test_a_call_that_resolved_elsewhere_is_no_evidence(tmp_path):
    folder = tmp_path / "adapters" / "toy"
    folder.mkdir(parents=True)
    records = [record(folder / "model.py", resolved="cpu"), record("adapters/toy/model.py", resolved="cuda:1")]
    evidence = read_evidence(records, folder=folder, root=tmp_path, device="cuda:0")
    assert (evidence.own, evidence.other_device) == (0, 2)


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", "gpu_pass"), ("cpu", "cpu_pass"), ("mps", "mps_pass"), ("shadow", "shadow_pass")])  # fmt: skip
def test_each_device_earns_its_own_pass(device, expected):
    assert status(device) == expected


def test_no_own_call_is_never_a_pass():
    for device in ("cpu", "mps", "shadow", "cuda"):
        assert status(device, own_calls=0) == "completed_without_device_call"


def test_cuda_needs_allocated_device_memory():
    assert status("cuda", peak_memory_bytes=0) == "completed_without_device_call"
    assert status("cuda", peak_memory_bytes=None) == "completed_without_device_call"
    assert status("cpu", peak_memory_bytes=None) == "cpu_pass"


def test_timeout_wins_over_failed_and_failed_over_evidence():
    assert status(timed_out=True, finished=False) == "timeout"
    assert status(finished=False) == "failed"


def test_a_pass_of_another_device_is_not_a_pass():
    assert is_pass({"status": "cpu_pass", "device": "cpu"})
    assert not is_pass({"status": "cpu_pass", "device": "cuda:0"})
    assert not is_pass({"status": "shadow_pass", "device": "cuda"})


def test_statuses_are_exactly_those_of_the_document():
    assert set(STATUSES) == {*PASS.values(), "completed_without_device_call", "failed", "timeout"}
    assert set(PASS.values()) == {"gpu_pass", "cpu_pass", "mps_pass", "shadow_pass"}


def test_devices_answer_for_themselves():
    assert answers("cuda:0", "cuda")
    assert answers("cuda", "cuda:0")
    assert answers("shadow:0", "shadow")
    assert not answers("cuda:1", "cuda:0")
    assert not answers("cpu", "cuda")
    assert folder_name("cuda:1") == "cuda-1"


@pytest.mark.parametrize("device", ["auto", "cuda:99x", "gpu", "", "cuda:0/..", "cpu:1", "mps:0"])
def test_a_device_that_proves_nothing_is_refused(device):
    with pytest.raises(ConfigError):
        kind_of(device)
