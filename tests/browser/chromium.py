"""A real headless Chromium, driven by its command line only."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


def browser() -> str:
    """Path of the browser; the test is skipped where none is installed."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return found


def call(page: Path, *flags: str) -> str:
    """Open a file in a fresh profile without network and return what the browser prints."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser(), *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


def dom(page: Path, width: int, height: int = 844) -> str:
    """The document after its scripts ran in a window of this size."""
    return call(page, f"--window-size={width},{height}", "--virtual-time-budget=2000", "--dump-dom")


def screenshot(page: Path, out: Path, width: int, height: int, *flags: str) -> tuple[int, int]:
    """Write a PNG and return its (width, height)."""
    call(page, f"--window-size={width},{height}", f"--screenshot={out}", *flags)
    return struct.unpack(">II", out.read_bytes()[16:24])


def measured(page: Path, folder: Path, width: int, script: str) -> str:
    """Text that ``script`` returns inside a frame of exactly ``width`` pixels showing the page.

    Headless windows cannot be narrower than about 500 pixels, so the phone is a frame.
    """
    content = page.read_text(encoding="utf-8")
    probe = f"<script>addEventListener('load', () => {{ const r = (() => {{ {script} }})(); parent.postMessage(r, '*'); }});</script>"
    (folder / "page.html").write_text(content.replace("</body>", probe + "</body>"), encoding="utf-8")
    outer = folder / "frame.html"
    outer.write_text(
        f"<!doctype html><body><iframe src='page.html' style='border:0;width:{width}px;height:844px'></iframe><pre id='r'></pre>"
        "<script>addEventListener('message', e => document.getElementById('r').textContent = 'RESULT' + e.data + 'END')</script>",
        encoding="utf-8",
    )
    text = call(
        outer, "--window-size=1200,1000", "--virtual-time-budget=4000", "--allow-file-access-from-files", "--dump-dom"
    )
    assert "RESULT" in text, text[-2000:]
    return text.split("RESULT", 1)[1].split("END", 1)[0]
