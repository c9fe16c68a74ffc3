"""Byte counter of the shadow device: what its tensors hold now, and the most they held at once.

One `Held` belongs to one block of values and is shared by every view of it, so a block is counted once and
leaves the count when its last view is collected. Workspace inside an operator is not seen.
"""

from __future__ import annotations

_NOW, _PEAK = 0, 1
_bytes = [0, 0]


class Held:
    """A token that keeps `size` bytes in the count for as long as it lives."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size
        _bytes[_NOW] += size
        if _bytes[_NOW] > _bytes[_PEAK]:
            _bytes[_PEAK] = _bytes[_NOW]

    def __del__(self, _bytes=_bytes) -> None:
        # The default argument outlives the module's names when the interpreter ends.
        _bytes[0] -= self.size


def allocated() -> int:
    """Bytes held by living shadow tensors."""
    return _bytes[_NOW]


def peak() -> int:
    """Most bytes held at once since the start or the last `reset_peak`."""
    return _bytes[_PEAK]


def reset_peak() -> None:
    """Start a new peak from what is held now."""
    _bytes[_PEAK] = _bytes[_NOW]
