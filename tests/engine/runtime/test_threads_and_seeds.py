"""Threads of a worker and reproducible random streams."""

import hashlib
import random

import numpy as np
import pytest
import torch

from auto_research.runtime import seeds, threads
from auto_research.runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def keep_globals(monkeypatch):
    for name in ("AUTO_RESEARCH_CPU_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(deterministic)


def test_argument_beats_environment(monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_CPU_THREADS", "2")
    assert threads.set_threads(None) == 2
    assert threads.set_threads(1) == 1
    assert torch.get_num_threads() == 1
    assert threads.requested_threads() == 1  # exported to children


@pytest.mark.parametrize("value", [0, -1, "x", "1.5", ""])
def test_bad_thread_counts(value):
    with pytest.raises(ConfigError, match="cpu threads"):
        threads.check_threads(value)


def test_warning_above_the_cores():
    cores = threads.available_cores()
    assert threads.oversubscription(cores, 1) is None
    assert f"{cores + 1} workers x 1 threads exceed the {cores} cores" in threads.oversubscription(cores + 1, 1)


def test_same_seed_same_draws():
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seeds.seed_everything(5)
    first = draws()
    seeds.seed_everything(5)
    assert draws() == first
    seeds.seed_everything(6)
    assert draws() != first


def test_stable_seed_is_the_head_of_sha256():
    assert seeds.stable_seed("a", 1, "c") == int(hashlib.sha256(b"a|1|c").hexdigest()[:16], 16)
    expected = np.random.Generator(np.random.PCG64(seeds.stable_seed("x"))).integers(1 << 30, size=4)
    assert seeds.stable_rng("x").integers(1 << 30, size=4).tolist() == expected.tolist()


def test_streams_of_different_parts_differ():
    first = torch.rand(4, generator=seeds.torch_generator("cpu", "run", 1))
    again = torch.rand(4, generator=seeds.torch_generator("cpu", "run", 1))
    other = torch.rand(4, generator=seeds.torch_generator("cpu", "run", 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_state_survives_a_safe_checkpoint(tmp_path):
    seeds.seed_everything(1)
    random.gauss(0, 1), np.random.randn(), torch.randn(3)
    torch.save(seeds.rng_state(), tmp_path / "rng.pt")
    wanted = [random.gauss(0, 1), random.random(), float(np.random.randn()), *torch.randn(3).tolist()]
    seeds.seed_everything(2)
    seeds.restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [random.gauss(0, 1), random.random(), float(np.random.randn()), *torch.randn(3).tolist()] == wanted
