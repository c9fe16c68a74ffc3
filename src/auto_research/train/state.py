"""Training state that outlives a killed process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from auto_research.runtime.errors import RunFailure
from auto_research.runtime.files import atomic_path
from auto_research.runtime.names import check_name

LOCK_SECONDS = 60.0
CHECKPOINT_SECONDS = 20.0


class StateFolder:
    """A folder with one saved state, `state.pt`, and child folders for stages of the same job.

    A state is a nested dict of tensors and plain values. It is replaced as a whole, so that a reader sees the old one or
    the new one; it is read with `weights_only=True`. Training loops save at least every `checkpoint_seconds`.

    pause_after: epochs after which a loop saves and returns though it is not done; the next call on the same folder
    without a pause goes on from there. Children have none.
    """

    def __init__(
        self, path: Path, checkpoint_seconds: float = CHECKPOINT_SECONDS, pause_after: int | None = None
    ) -> None:
        self.path = Path(path)
        self.checkpoint_seconds = checkpoint_seconds
        self.pause_after = pause_after

    @property
    def file(self) -> Path:
        return self.path / "state.pt"

    @contextmanager
    def lock(self, timeout: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the folder for this process; RunFailure when another one still holds it after `timeout` seconds.

        The lock file lies beside the folder, so that `discard` does not pull it away from a waiting process.
        """
        folder = self.path.parent / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / f"{self.path.name}.lock")
        try:
            held.acquire(timeout=timeout)
        except Timeout:
            raise RunFailure(f"another process is training in {self.path}; wait for it or end it") from None
        try:
            yield
        finally:
            held.release()

    def load(self) -> dict[str, Any] | None:
        """The saved state on CPU, None when there is none or it cannot be read (training then starts again)."""
        if not self.file.is_file():
            return None
        try:
            return torch.load(self.file, map_location="cpu", weights_only=True)
        except Exception as error:
            print(f"{self.file} cannot be read ({type(error).__name__}), training starts again", file=sys.stderr)
            self.file.unlink(missing_ok=True)
            return None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state."""
        with atomic_path(self.file) as temporary:
            torch.save(state, temporary)

    def child(self, name: str, *, pause_after: int | None = None) -> StateFolder:
        """State of a part of the job, below this folder."""
        return StateFolder(self.path / check_name(name, "state"), self.checkpoint_seconds, pause_after)

    def discard(self) -> None:
        """Remove the folder with its children; nothing happens when it does not exist."""
        shutil.rmtree(self.path, ignore_errors=True)
