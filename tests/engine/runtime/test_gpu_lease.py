"""Two local jobs never share a card; a killed holder's card is free again."""

import os
import subprocess
import sys
import textwrap

import pytest

from auto_research.runtime import lease
from auto_research.runtime.errors import DeviceUnavailable, TimeLimit


@pytest.fixture(autouse=True)
def no_assignment(monkeypatch):
    for name in (lease.HELD, lease.VISIBLE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# Claims the leased card with an exclusive file: a second holder of the same card would fail to create it.
CLAIM = """
    import os, sys
    from auto_research.runtime.lease import gpu_lease
    folder, rounds = sys.argv[1], int(sys.argv[2])
    for _ in range(rounds):
        with gpu_lease([0, 1], folder) as card:
            assert os.environ["CUDA_VISIBLE_DEVICES"] == card
            claim = os.path.join(folder, "card" + card)
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
            sum(range(200_000))
            os.unlink(claim)
        print(card)
    """


def test_eight_processes_over_two_indices_never_share(tmp_path):
    running = [start(CLAIM, tmp_path, 3) for _ in range(8)]
    cards = []
    for process in running:
        out, _ = process.communicate()
        assert process.returncode == 0
        cards += out.split()
    assert len(cards) == 24
    assert set(cards) <= {"0", "1"}  # a lucky schedule may get by with one card


HOLD = """
    import sys
    from auto_research.runtime.lease import gpu_lease
    with gpu_lease([0], sys.argv[1]) as card:
        print(card, flush=True)
        sys.stdin.read()
    """


def test_the_second_holder_gets_the_other_card(tmp_path):
    holder = start(HOLD, tmp_path)
    assert holder.stdout.readline().strip() == "0"
    with lease.gpu_lease([0, 1], tmp_path, timeout=0) as card:
        assert card == "1"
    holder.communicate()


def test_a_killed_holder_frees_its_card(tmp_path):
    holder = start(HOLD, tmp_path)
    assert holder.stdout.readline().strip() == "0"
    with pytest.raises(TimeLimit, match="no free GPU among 0"), lease.gpu_lease([0], tmp_path, timeout=0):
        pass
    holder.kill()
    holder.communicate()
    with lease.gpu_lease([0], tmp_path, timeout=0) as card:
        assert card == "0"


def test_environment_is_restored_and_a_child_inherits_the_lease(tmp_path):
    with lease.gpu_lease(2, tmp_path, timeout=0) as card:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == card == "0"
        with lease.gpu_lease(1, tmp_path, timeout=0) as inner:
            assert inner is None
    assert lease.VISIBLE not in os.environ
    assert lease.HELD not in os.environ


def test_visible_devices_isolate(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with lease.gpu_lease(2, tmp_path, timeout=0) as card:
        assert card == "3"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_a_scheduler_assignment_is_respected(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with lease.gpu_lease(2, tmp_path, timeout=0) as card:
        assert card is None
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_lease(tmp_path):
    with pytest.raises(DeviceUnavailable, match="no CUDA device"), lease.gpu_lease(0, tmp_path):
        pass


@pytest.fixture
def two_cards(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_an_explicit_index_locks_that_card_and_keeps_its_meaning(tmp_path, two_cards, monkeypatch):
    with lease.lease_for("cuda:1", tmp_path, timeout=0) as card:
        assert card == "1"
        assert lease.VISIBLE not in os.environ
        assert os.environ[lease.HELD] == "1"
        monkeypatch.delenv(lease.HELD)
        with pytest.raises(TimeLimit), lease.lease_for("cuda:1", tmp_path, timeout=0):
            pass
        with lease.lease_for("cuda", tmp_path, timeout=0) as other:
            assert other == "0"
    assert lease.HELD not in os.environ


@pytest.mark.parametrize("device", ["cpu", "mps", "shadow"])
def test_devices_without_cards_lease_nothing(tmp_path, two_cards, device):
    with lease.lease_for(device, tmp_path, timeout=0) as card:
        assert card is None
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_any_free_card(tmp_path, two_cards):
    with lease.lease_for("auto", tmp_path, timeout=0) as card:
        assert card == "0"
    with pytest.raises(DeviceUnavailable, match="cuda:5"), lease.lease_for("cuda:5", tmp_path):
        pass
