"""Fetching one pinned file: a wheel through pip's configured index, or an archive from a URL."""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from auto_research.runtime.files import atomic_path
from auto_research.runtime.process import run_limited

TIMEOUT_SECONDS = 900
SOCKET_TIMEOUT_SECONDS = 60
MAX_BYTES = 4 * 1024**3
BLOCK = 1 << 20


class FetchFailed(Exception):
    """A source did not answer; the text is one short reason."""


def fetch_wheel(package: str, version: str, file: str, target: Path) -> None:
    """Download the wheel `file` of `package==version` to `target` through pip's own configuration.

    Only wheels are accepted, so no code of the package runs and nothing is installed. Raises FetchFailed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        log = Path(folder) / "pip.log"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--ignore-requires-python", "--disable-pip-version-check", "--no-input", "--retries", "2"]
        command += ["--progress-bar", "off", "--dest", folder, f"{package}=={version}"]
        done = run_limited(command, timeout=TIMEOUT_SECONDS, env={"PIP_REQUIRE_VIRTUALENV": "0"}, log=log)
        fetched = Path(folder) / file
        if done.returncode != 0 or not fetched.is_file():
            raise FetchFailed(_pip_reason(log, done.timed_out))
        os.replace(fetched, target)


def _pip_reason(log: Path, timed_out: bool) -> str:
    if timed_out:
        return f"no answer within {TIMEOUT_SECONDS} s"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") or "No module named" in line]
    return (errors[-1] if errors else "pip gave no reason")[:160]


def fetch_url(url: str, target: Path) -> None:
    """Download `url` to `target` (written under a temporary name, then renamed). Raises FetchFailed."""
    request = urllib.request.Request(url, headers={"User-Agent": "auto-research"})
    try:
        with urllib.request.urlopen(request, timeout=SOCKET_TIMEOUT_SECONDS) as answer, atomic_path(target) as part:
            size = 0
            with open(part, "wb") as handle:
                while block := answer.read(BLOCK):
                    size += len(block)
                    if size > MAX_BYTES:
                        raise FetchFailed(f"more than {MAX_BYTES} bytes")
                    handle.write(block)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise FetchFailed(str(getattr(error, "reason", error))[:160]) from error
