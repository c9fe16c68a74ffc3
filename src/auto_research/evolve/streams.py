"""Private random streams: a generator per decision, none survives between calls."""

from __future__ import annotations

import numpy as np

from auto_research.runtime.seeds import stable_rng


def stream(track: str, run_seed: int, purpose: str, generation: int, slot: int, attempt: int) -> np.random.Generator:
    """PCG64 seeded with the first 8 bytes (big-endian) of sha256(``track|run_seed|purpose|generation|slot|attempt``)."""
    return stable_rng(track, run_seed, purpose, generation, slot, attempt)
