"""Seeded orders and padded windows; every draw is a function of named parts, so a run can stop and go on anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.seeds import stable_rng


def epoch_batches(ids: np.ndarray, size: int, *parts: Any) -> Iterator[np.ndarray]:
    """`ids` [n] in the order seeded by `parts` (for example "request-order", seed, epoch), `size` at a time."""
    order = np.asarray(ids)[stable_rng(*parts).permutation(len(ids))]
    for start in range(0, len(order), size):
        yield order[start : start + size]


def left_padded(sequences: Sequence[np.ndarray], length: int) -> np.ndarray:
    """int64[B, length]: the last `length` items of each sequence, oldest first, 0 on the left."""
    out = np.zeros((len(sequences), length), dtype=np.int64)
    for row, items in enumerate(sequences):
        kept = items[-length:] if length else items[:0]
        out[row, length - len(kept) :] = kept
    return out


def next_item_windows(split: LeaveTwoOut, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets int64[U, length] for training at all positions; target 0 = no loss there.

    The target of a position is the next train item; validation and test items never appear.
    """
    inputs = left_padded([items[:-1] for items in split.train], length)
    targets = left_padded([items[1:] for items in split.train], length)
    return inputs, targets


def histories(split: LeaveTwoOut, name: str, length: int) -> np.ndarray:
    """int64[U, length] model inputs for predicting the 'valid' or 'test' target."""
    return left_padded([split.history(name, i) for i in range(len(split))], length)
