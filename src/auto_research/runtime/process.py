"""Child processes that end: hard time limits for whole process groups, and children that do not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DETACHED = "AUTO_RESEARCH_DETACHED"
_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
# Reads until the supervisor is gone (its end of the pipe closes however it dies), then kills the group $1.
_WATCHDOG = 'read -r _ || :; kill -s KILL -- "-$1" 2>/dev/null'


@dataclass(frozen=True)
class Finished:
    """How a limited process ended; `returncode` is negative for a signal, as in subprocess."""

    returncode: int
    timed_out: bool
    seconds: float


def run_limited(
    command: Sequence[str | os.PathLike],
    *,
    timeout: float | None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    log: str | os.PathLike | None = None,
) -> Finished:
    """Run `command` (a list, no shell) in its own process group and end the whole group when it is over.

    After `timeout` seconds (None: no limit) the group gets TERM, one second later KILL. The group also dies when
    this process dies, even by kill -9. `env` is laid over this process's environment; output goes to `log`
    (appended, folder made) or is inherited.
    """
    with contextlib.ExitStack() as stack:
        output = None
        if log is not None:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(open(log, "ab"))
        start = time.monotonic()
        child = subprocess.Popen(
            [os.fspath(part) for part in command],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
        timed_out = False
        with _watchdog(child.pid):
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                _signal_group(child.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE_SECONDS)
            finally:
                _signal_group(child.pid, signal.SIGKILL)
                child.wait()
        return Finished(child.returncode, timed_out, time.monotonic() - start)


def die_with_parent() -> None:
    """End this process when its parent dies, so that a killed Snakemake leaves no job behind.

    A daemon thread compares getppid(); on Linux the kernel also sends KILL. AUTO_RESEARCH_DETACHED=1 switches
    it off for a job that shall outlive its shell.
    """
    if os.environ.get(DETACHED, "") not in ("", "0"):
        return
    parent = os.getppid()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def _watchdog(group: int) -> Iterator[None]:
    reading, writing = os.pipe()
    try:
        watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(group)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(reading)
    try:
        yield
    finally:
        watchdog.kill()
        watchdog.wait()
        os.close(writing)


def _signal_group(group: int, number: signal.Signals) -> None:
    # macOS answers EPERM for a group of zombies
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
