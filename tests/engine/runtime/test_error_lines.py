"""What people see when something is wrong: one line, the right exit code, no traceback."""

import errno
import sys

import pytest

from auto_research.runtime import errors


def failing(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (errors.UnknownName("no paper 'x': see auto-research list"), 2, "no paper 'x'"),
        (errors.CorruptFile("two\nlines"), 2, "two lines"),
        (errors.NonFinite("loss is nan at step 3"), 1, "loss is nan at step 3"),
        (errors.TimeLimit("over"), 1, "over"),
        (OSError(errno.ENOSPC, "No space left", "out.json"), 1, "disk full while writing out.json"),
        (OSError(errno.EROFS, "Read-only", "results"), 2, "results is on a read-only file system"),
        (PermissionError(errno.EACCES, "denied", "results"), 2, "no permission for results"),
        (FileNotFoundError(errno.ENOENT, "absent", "a.json"), 2, "file not found: a.json"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 1, "out of memory"),
        (ValueError("bad\nvalue"), 1, "ValueError: bad value (test_error_lines.py:"),
        (KeyError("k"), 1, "KeyError: 'k'"),
    ],
)
def test_one_line_and_exit_code(error, code, part, capsys, monkeypatch):
    monkeypatch.delenv("AUTO_RESEARCH_DEBUG", raising=False)
    assert errors.guard(failing(error)) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


def test_torch_out_of_memory_is_recognised(capsys):
    torch = pytest.importorskip("torch")
    assert errors.guard(failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))) == 1
    assert "out of memory while using the accelerator" in capsys.readouterr().err


def test_traceback_only_with_debug(capsys, monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_DEBUG", "1")
    errors.guard(failing(errors.ConfigError("wrong")))
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("AUTO_RESEARCH_DEBUG", "0")
    errors.guard(failing(errors.ConfigError("wrong")))
    assert "Traceback" not in capsys.readouterr().err


def test_codes_of_ordinary_ends(capsys):
    assert errors.guard(lambda: None) == 0
    assert errors.guard(lambda: 3) == 3
    assert errors.guard(sys.exit) == 0
    assert errors.guard(failing(SystemExit(2))) == 2
    assert errors.guard(failing(SystemExit("stop"))) == 1
    assert "stop" in capsys.readouterr().err
    assert errors.guard(failing(KeyboardInterrupt())) == 130
