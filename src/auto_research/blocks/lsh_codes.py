"""Codes from random hyperplanes: the tokenizer without training that TIGER (arXiv:2305.05065) compares with."""

from __future__ import annotations

import numpy as np

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng

MOST_BITS = 20


def lsh_codes(x: np.ndarray, levels: int, bits: int, *, seed: int) -> np.ndarray:
    """int64[I, levels] codes in 0..2**bits - 1 of x float[I, D]: the sides of `bits` hyperplanes a level.

    The planes pass through the mean of x, otherwise most rows of vectors that point the same way share a code. Bit b of
    a code is set where the row lies on the positive side of plane b.
    """
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 2 or not x.size or levels < 1 or not 1 <= bits <= MOST_BITS:
        raise ConfigError(f"hyperplane codes need vectors, a level and 1 to {MOST_BITS} bits, got {levels} x {bits}")
    planes = stable_rng("lsh-codes", seed, levels, bits, x.shape[1]).standard_normal((x.shape[1], levels * bits))
    side = ((x - x.mean(axis=0)) @ planes > 0).reshape(len(x), levels, bits)
    return (side.astype(np.int64) << np.arange(bits)).sum(axis=2)
