"""auto is CUDA, then MPS, then CPU; what was asked for and is missing is an error."""

import json

import pytest
import torch

from auto_research.runtime import devices, evidence
from auto_research.runtime.errors import ConfigError, DeviceUnavailable
from auto_research.runtime.paths import checkout_root


@pytest.fixture
def machine(monkeypatch):
    """A function that makes torch report `cuda` CUDA devices and MPS or none."""
    monkeypatch.delenv("AUTO_RESEARCH_DEVICE", raising=False)

    def pretend(cuda=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    pretend()
    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(2, True, "cuda:0"), (0, True, "mps:0"), (0, False, "cpu"), (1, False, "cuda:0")]
)
def test_auto_order(machine, cuda, mps, expected):
    machine(cuda, mps)
    assert str(devices.resolve_device("auto")) == expected
    assert str(devices.resolve_device(None)) == expected


def test_index_and_plain_cuda(machine):
    machine(cuda=2)
    assert str(devices.resolve_device("cuda")) == "cuda:0"
    assert str(devices.resolve_device("cuda:1")) == "cuda:1"
    assert str(devices.resolve_device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("text", "cuda", "there"), [("cuda:2", 2, "cuda:0, cuda:1, cpu"), ("cuda", 0, "cpu"), ("mps", 1, "cuda:0, cpu")]
)
def test_missing_accelerator_says_what_exists(machine, text, cuda, there):
    machine(cuda=cuda)
    with pytest.raises(DeviceUnavailable) as caught:
        devices.device_for(text)
    assert f"device {text} is not available: this machine has {there};" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["cuda:99x", "cuda:", "cuda:-1", "gpu", "CPU", "cpu:0", "cuda:1000", "cpu\n"])
def test_texts_that_are_no_device(text):
    with pytest.raises(ConfigError, match="is not one of auto, cpu, mps, cuda, cuda:<index>, shadow"):
        devices.check_device_text(text)


def test_environment_carries_the_choice_and_the_argument_wins(machine, monkeypatch):
    machine(cuda=2)
    monkeypatch.setenv("AUTO_RESEARCH_DEVICE", "cuda:1")
    assert str(devices.resolve_device(None)) == "cuda:1"
    assert str(devices.resolve_device("cpu")) == "cpu"
    monkeypatch.setenv("AUTO_RESEARCH_DEVICE", "tpu")
    with pytest.raises(ConfigError):
        devices.resolve_device(None)


def test_facts_name_the_run_and_never_the_machine(machine, monkeypatch):
    import getpass
    import platform

    monkeypatch.setenv("AUTO_RESEARCH_CPU_THREADS", "3")
    facts = devices.runtime_facts("cpu")
    assert set(facts) == {"device_requested", "device_resolved", "torch", "platform", "python", "cpu_threads"}
    assert (facts["device_requested"], facts["device_resolved"], facts["cpu_threads"]) == ("cpu", "cpu", 3)
    text = json.dumps(facts)
    assert "+" not in facts["torch"]
    assert platform.node() not in text
    assert platform.release() not in text
    assert facts["platform"] == f"{platform.system()}-{platform.machine()}"
    assert getpass.getuser() not in text


def test_evidence_names_the_calling_line(machine, monkeypatch, tmp_path):
    log = tmp_path / "logs" / "evidence.jsonl"
    monkeypatch.setenv("AUTO_RESEARCH_DEVICE_AUDIT_LOG", str(log))
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(checkout_root()))
    devices.device_for("auto")
    devices.resolve_device("auto")
    devices.runtime_facts("auto")
    (row,) = evidence.read(log)
    assert row["file"] == "tests/engine/runtime/test_device_rule.py"
    assert row["function"] == "test_evidence_names_the_calling_line"
    assert (row["requested"], row["resolved"]) == ("auto", "cpu")
    assert 'devices.device_for("auto")' in (checkout_root() / row["file"]).read_text().splitlines()[row["line"] - 1]


def test_a_refused_device_leaves_no_evidence(machine, monkeypatch, tmp_path):
    log = tmp_path / "evidence.jsonl"
    monkeypatch.setenv("AUTO_RESEARCH_DEVICE_AUDIT_LOG", str(log))
    with pytest.raises(DeviceUnavailable):
        devices.device_for("cuda:0")
    assert evidence.read(log) == []


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path):
    (tmp_path / "e").write_text('{"resolved": "cpu"}\n{"resol')
    assert evidence.read(tmp_path / "e") == [{"resolved": "cpu"}]


def test_peak_memory_follows_a_large_allocation():
    cpu = torch.device("cpu")
    devices.reset_peak_memory(cpu)
    before = devices.peak_memory(cpu)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert devices.peak_memory(cpu) - before > 32 << 20
    assert int(block[0]) == 1
