"""What a published record must not hold: anything that names the machine, the person or the installation."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WORDS_VARIABLE = "AUTO_RESEARCH_PRIVATE_WORDS"

_PATTERNS = {
    "an absolute path": re.compile(r"(?:^|[\s='\"(:,])(?:/[\w.~-]|~[/\w]|[A-Za-z]:[\\/]|\\\\\w)"),
    "a user at a host": re.compile(r"[\w.-]+@[\w.-]+"),
    "a network address": re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\bip-\d+-\d+-\d+-\d+\b"),
    "a host name": re.compile(
        r"\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:com|net|org|io|cn|local|internal|lan|corp|cloud|edu|localdomain)\b"
        r"|\b(?:node|host|server|worker|gpu|compute|dev|login)[-_]?\d[\w-]*\b",
        re.IGNORECASE,
    ),
    "a driver or library build": re.compile(
        r"\b\d{3}\.\d{2,3}(?:\.\d{2,3})?\b|\+[a-z]+\w*|\bcu1\d{2}\b|\bcuda[ _-]?1\d\.\d|\bcudnn\b|\bdriver\b|\bnvcc\b"
        r"|\.dev\d{6,}|\bnightly\b|\b(?:gcc|clang) \d",
        re.IGNORECASE,
    ),
}


def machine_words() -> set[str]:
    """Names of this machine and this person, and the words of AUTO_RESEARCH_PRIVATE_WORDS (an SSH alias, say)."""
    words = {socket.gethostname(), platform.node(), Path.home().name}
    words |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME")}
    with contextlib.suppress(KeyError, OSError):
        words.add(getpass.getuser())
    words |= {word.split(".")[0] for word in words}
    words |= set(os.environ.get(WORDS_VARIABLE, "").split(","))
    return {word.strip().lower() for word in words if len(word.strip()) > 1}


def problems(document: Any, words: Iterable[str] = ()) -> list[str]:
    """One sentence per private text in a nested JSON value, keys included; empty when there is none.

    words: also refused, as whole words, whatever their case.
    """
    found = []
    named = {word: re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])", re.IGNORECASE) for word in words if word}
    for where, text in _texts(document, ""):
        found += [f"{where}: {what} ({text!r})" for what, pattern in _PATTERNS.items() if pattern.search(text)]
        found += [
            f"{where}: a name of this machine or person ({text!r})"
            for pattern in named.values()
            if pattern.search(text)
        ]
    return found


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where or "text", value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield f"{where}.{key}".lstrip("."), str(key)
            yield from _texts(child, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _texts(child, f"{where}[{index}]")
