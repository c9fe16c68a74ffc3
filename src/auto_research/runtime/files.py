"""Files that are either complete or absent, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from auto_research.runtime.errors import CorruptFile


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it replaces `path`, on error it is removed.

    The temporary name keeps the suffix, so writers that look at it (parquet, png) behave. Parent folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write UTF-8 text atomically, line ends as given."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Write JSON atomically: sorted keys, one space of indent, newline at the end; NaN and infinity raise ValueError."""
    write_text(path, json.dumps(obj, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Read JSON; CorruptFile when it does not parse, FileNotFoundError when it is absent."""
    data = Path(path).read_bytes()
    try:
        return json.loads(data)
    except ValueError as error:
        raise CorruptFile(f"{path} is not valid JSON ({error}): delete it and run the command again") from None


def canonical_json(obj: Any) -> str:
    """One spelling per value: sorted keys, no blanks, UTF-8 kept; for hashing and comparison."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_text(text: str) -> str:
    """Hex sha256 of the text's UTF-8 bytes."""
    return sha256_bytes(text.encode("utf-8"))


def sha256_file(path: str | os.PathLike) -> str:
    """Hex sha256 of a file, read in blocks."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
