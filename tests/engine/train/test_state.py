"""Training state on disk."""

import multiprocessing

import pytest
import torch

from auto_research.runtime.errors import ConfigError, RunFailure
from auto_research.train.state import StateFolder


def test_saved_state_comes_back(tmp_path):
    state = StateFolder(tmp_path / "a")
    assert state.load() is None
    state.save({"x": torch.arange(3), "nested": {"n": 2**80, "t": (1, "a", None)}})
    loaded = state.load()
    assert torch.equal(loaded["x"], torch.arange(3))
    assert loaded["nested"] == {"n": 2**80, "t": (1, "a", None)}


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"not a state"])
def test_a_damaged_state_is_no_state(tmp_path, damage, capsys):
    state = StateFolder(tmp_path / "a")
    state.save({"x": torch.arange(1000)})
    state.file.write_bytes(damage(state.file.read_bytes()))
    assert state.load() is None
    assert "cannot be read" in capsys.readouterr().err
    assert not state.file.exists()


def test_a_failed_save_leaves_the_old_state(tmp_path):
    state = StateFolder(tmp_path / "a")
    state.save({"step": 1})
    with pytest.raises(Exception, match="pickle"):
        state.save({"step": 2, "bad": lambda: None})
    assert state.load() == {"step": 1}
    assert [path.name for path in state.path.iterdir()] == ["state.pt"]


def test_code_in_a_state_is_not_run(tmp_path, capsys):
    import pickle

    state = StateFolder(tmp_path / "a")
    state.path.mkdir()
    state.file.write_bytes(pickle.dumps(_Evil(tmp_path / "proof")))
    assert state.load() is None
    assert not (tmp_path / "proof").exists()


class _Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_discard_removes_children_and_is_repeatable(tmp_path):
    state = StateFolder(tmp_path / "a")
    state.child("trial-0").save({"step": 1})
    state.discard()
    state.discard()
    assert not state.path.exists()


def test_child_names_cannot_leave_the_folder(tmp_path):
    with pytest.raises(ConfigError):
        StateFolder(tmp_path).child("../b")


def _hold(path, held, release):
    with StateFolder(path).lock():
        held.set()
        release.wait()


def test_only_one_process_trains_in_a_folder(tmp_path):
    spawn = multiprocessing.get_context("fork")
    held, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=_hold, args=(tmp_path / "a", held, release))
    other.start()
    held.wait()
    with pytest.raises(RunFailure, match="another process"), StateFolder(tmp_path / "a").lock(timeout=0):
        pass
    release.set()
    other.join()
    with StateFolder(tmp_path / "a").lock(timeout=0):
        pass
