"""Receipts come from real GPU rows only and carry nothing of the machine."""

import copy
import getpass
import json
import socket

import audit_toys as toys
import pytest

from auto_research.audit import receipts
from auto_research.audit.privacy import problems
from auto_research.experiment.card import discover
from auto_research.runtime.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def card(tmp_path):
    toys.plant(tmp_path, "toy")
    return discover(tmp_path)["toy"]


def gpu_row(**changes):
    """A row as a GPU run would leave it. Test data: no receipt in this repository comes from it."""
    row = {
        "schema_version": 1,
        "adapter": "toy",
        "fidelity": "core_mechanism",
        "tier": "smoke",
        "dataset": "movielens-100k",
        "seed": 42,
        "device": "cuda:0",
        "status": "gpu_pass",
        "seconds": 12.5,
        "timeout_seconds": 600,
        "calls": 2,
        "calls_elsewhere": 0,
        "calls_other_device": 0,
        "callers": [],
        "sites": [],
        "peak_memory_bytes": 4096,
        "error": None,
        "fingerprint": "a" * 64,
        "sources": "a" * 64,
        "command": "python scripts/audit_gpu_paths.py --paper toy",
        "runtime": {"torch": "2.7.1", "platform": "Linux-x86_64", "python": "3.11", "cpu_threads": 4, "accelerator": "NVIDIA A30"},
        "metrics": {"treatment": {"loss": 3.0, "other": 1.0}},
        "commit": None,
    }  # fmt: skip
    return row | changes


def receipt(card, **changes):
    return receipts.receipt_of(gpu_row(**changes), card, date="2026-08-11", commit=COMMIT)


def test_a_gpu_row_gives_a_valid_receipt(card):
    made = receipt(card)
    receipts.check_receipt(made, {"toy": card})
    assert made["accelerator"] == "A30"
    assert made["metrics"] == {"treatment": {"loss": 3.0}}
    assert receipts.file_name(made) == "toy-a30-20260811.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu", "status": "cpu_pass", "peak_memory_bytes": None},
        {"device": "shadow", "status": "shadow_pass", "peak_memory_bytes": None},
        {"device": "mps", "status": "mps_pass"},
        {"device": "cpu", "status": "gpu_pass"},
        {"status": "failed"},
        {"status": "timeout"},
        {"status": "completed_without_device_call"},
    ],
)
def test_nothing_but_a_gpu_pass_gives_a_receipt(card, changes):
    with pytest.raises(receipts.NoReceipt):
        receipt(card, **changes)


@pytest.mark.parametrize("model", [None, "", "Tesla T4", "NVIDIA A3000", "NVIDIA GeForce RTX 4090", "AMD MI300X"])
def test_an_accelerator_outside_the_list_gives_no_receipt(card, model):
    with pytest.raises(receipts.NoReceipt):
        receipt(card, runtime=gpu_row()["runtime"] | {"accelerator": model})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A30", "A30"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_accepted_models(model, name):
    assert receipts.accelerator_of(model) == name


def test_uncommitted_sources_give_no_receipt(card):
    with pytest.raises(receipts.NoReceipt):
        receipts.receipt_of(gpu_row(), card, date="2026-08-11", commit=None)


def test_build_suffix_of_torch_is_not_kept(card):
    assert receipt(card, runtime=gpu_row()["runtime"] | {"torch": "2.7.1+cu128"})["torch"] == "2.7.1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", "python scripts/audit_gpu_paths.py --paper toy --device cuda:0 --tier smoke --dataset-dir /srv/data --timeout-seconds 600"),
        ("command", "ssh a30box python scripts/audit_gpu_paths.py --paper toy"),
        ("torch", "2.7.1+cu128"),
        ("torch", "2.7.0.dev20250301"),
        ("accelerator", "A30 driver 535.104.05"),
        ("accelerator", "T4"),
        ("dataset", "our-clicks"),
        ("hostname", "a30-lab"),
        ("user", "somebody"),
        ("metrics", {"treatment": {"a30-lab": 1.0}}),
        ("metrics", {"somebody": {"loss": 1.0}}),
    ],
)  # fmt: skip
def test_the_validator_refuses_planted_private_text(card, field, value):
    made = receipt(card)
    with pytest.raises(ConfigError):
        receipts.check_receipt({**made, field: value}, {"toy": card})


@pytest.mark.parametrize(
    "text",
    [
        "/home/me/data",
        "data in /mnt/x",
        "--dataset-dir=/srv",
        "~/data",
        r"C:\data",
        "me@gpubox",
        "10.1.2.3",
        "ip-10-0-0-12",
        "gpu07.cluster.example.com",
        "node-17",
        "535.104.05",
        "550.54",
        "2.7.1+cu128",
        "CUDA 12.8",
        "cuDNN 9",
    ],
)
def test_private_text_is_found_anywhere(text):
    assert problems({"deep": [{"text": text}]})
    assert problems({text: 1})


def test_this_machine_and_person_are_refused_by_the_writer():
    from auto_research.audit.privacy import machine_words

    words = machine_words()
    assert socket.gethostname().lower() in words
    assert getpass.getuser().lower() in words
    assert problems({"note": f"run on {socket.gethostname()}"}, words)
    assert problems({"note": f"by {getpass.getuser()}"}, words)


def test_private_words_of_the_environment_are_refused(monkeypatch):
    from auto_research.audit.privacy import WORDS_VARIABLE, machine_words

    monkeypatch.setenv(WORDS_VARIABLE, "labbox,other")
    assert problems({"note": "on labbox today"}, machine_words())
    assert not problems({"note": "on labboxes today"}, {"labbox"})


def test_plain_receipt_text_is_not_private(card):
    assert problems(receipt(card)) == []


def evidence(tmp_path, card, state, *, requires=True, made=None, name=None):
    facts = copy.deepcopy(card.facts)
    facts["gpu"] |= {"requires_validation": requires} | ({"validation": state} if state is not None else {})
    folder = tmp_path / "receipts"
    folder.mkdir(exist_ok=True)
    if made is not None:
        (folder / (name or receipts.file_name(made))).write_text(json.dumps(made), encoding="utf-8")
    return receipts.evidence_problems({"toy": type(card)(facts, card.folder)}, folder)


def test_pending_needs_no_receipt(tmp_path, card):
    assert evidence(tmp_path, card, "pending") == []


def test_a_required_validation_needs_a_receipt_or_pending(tmp_path, card):
    assert "neither a receipt nor" in evidence(tmp_path, card, None)[0]
    assert "no valid receipt" in evidence(tmp_path, card, "toy-a30-20260811.json")[0]
    assert evidence(tmp_path, card, None, requires=False) == []


def test_a_valid_receipt_satisfies_its_card(tmp_path, card):
    assert evidence(tmp_path, card, "toy-a30-20260811.json", made=receipt(card)) == []


def test_a_receipt_under_another_name_or_with_private_text_fails(tmp_path, card):
    made = receipt(card)
    assert "must be named" in evidence(tmp_path, card, "pending", made=made, name="toy.json")[0]
    assert len(evidence(tmp_path, card, "pending", made=made | {"host": "lab"})) == 2


def test_the_writer_refuses_a_row_of_other_sources(tmp_path, card):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"rows": [gpu_row(), gpu_row(adapter="gone")]}), encoding="utf-8")
    written, refused = receipts.write_receipts(tmp_path, [rows], tmp_path / "out", "2026-08-11")
    assert written == []
    assert refused == {
        "toy": "the sources of the run are not those of a commit",
        "gone": "no such adapter in this checkout",
    }
