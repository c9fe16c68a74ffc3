"""Error types people meet, and the guard that turns any of them into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable


class AutoResearchError(Exception):
    """Base of the project's errors; its text is one line that says what, where and what to do."""

    exit_code = 1


class UserError(AutoResearchError):
    """The person can mend it by changing the command, the configuration or the machine. Exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A value in a card, configuration file or flag is wrong."""


class UnknownName(UserError):
    """A paper, track, dataset, arm or operator that does not exist."""


class DeviceUnavailable(UserError):
    """An accelerator was asked for and is not there."""


class DataMissing(UserError):
    """Data is not on disk and cannot be fetched."""


class ChecksumMismatch(UserError):
    """A file's sha256 differs from the pinned one."""


class CorruptFile(UserError):
    """A file exists and cannot be read as what it should be."""


class RunFailure(AutoResearchError):
    """A run started correctly and did not finish. Exit code 1."""


class NonFinite(RunFailure):
    """Loss or metric became NaN or infinite."""


class OutOfMemory(RunFailure):
    """Host or device memory is exhausted."""


class TimeLimit(RunFailure):
    """A hard time limit ended the run."""


_OUT_OF_MEMORY = (
    "out of memory while {what}: use a smaller batch, fewer workers (--workers 1), a smaller tier or another device"
)
_OS_ERRORS = {
    errno.ENOSPC: ("disk full while writing {path}: free space, then run the same command again", 1),
    errno.EDQUOT: ("disk quota used up while writing {path}: free space, then run the same command again", 1),
    errno.EACCES: ("no permission for {path}: change its owner or mode, or work in another folder", 2),
    errno.EPERM: ("no permission for {path}: change its owner or mode, or work in another folder", 2),
    errno.EROFS: ("{path} is on a read-only file system: work in a writable folder", 2),
}


EXIT_CODES = "AUTO_RESEARCH_EXIT_CODES"  # file that collects the exit codes of failed jobs


def debug_enabled() -> bool:
    """True when AUTO_RESEARCH_DEBUG is set to anything but empty or 0."""
    return os.environ.get("AUTO_RESEARCH_DEBUG", "") not in ("", "0")


def describe_error(error: BaseException) -> tuple[str, int]:
    """Return (one line without the leading 'error:', exit code) for any exception."""
    if isinstance(error, AutoResearchError):
        return _one_line(str(error) or type(error).__name__), error.exit_code
    if _is_out_of_memory(error):
        where = "using the accelerator" if "CUDA" in str(error) or "MPS" in str(error) else "allocating host memory"
        return _OUT_OF_MEMORY.format(what=where), OutOfMemory.exit_code
    if isinstance(error, OSError) and error.errno in _OS_ERRORS:
        text, code = _OS_ERRORS[error.errno]
        return _one_line(text.format(path=error.filename or "the output folder")), code
    if isinstance(error, FileNotFoundError):
        return _one_line(f"file not found: {error.filename or error}"), UserError.exit_code
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return _one_line(f"{text}{place}; run with --debug for the traceback"), 1


def guard(main: Callable[..., int | None], *arguments) -> int:
    """Run an entry point and return its exit code: `sys.exit(guard(main))`.

    Any exception becomes one line `error: ...` on stderr; the traceback is printed only when
    AUTO_RESEARCH_DEBUG is set (the flag --debug sets it). Ctrl-C gives 130, a closed output pipe 141.
    """
    try:
        code = main(*arguments)
        return 0 if code is None else int(code)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0)
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:
        if debug_enabled():
            traceback.print_exc()
        line, code = describe_error(error)
        print(f"error: {line}", file=sys.stderr)
        _record_exit(code)
        return code


def _record_exit(code: int) -> None:
    """Tell the command line, which sees only Snakemake's own exit code 1, with which code this job ended."""
    path = os.environ.get(EXIT_CODES)
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as sink:
            sink.write(f"{code}\n")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
