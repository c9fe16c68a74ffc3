"""Time and memory of fitting residual k-means to a large catalogue: 100,000 vectors of width 384, 3 levels of 256 codes.

python benchmarks/tokenizer_fit.py                       # plain
python benchmarks/tokenizer_fit.py --balanced
python benchmarks/tokenizer_fit.py --data noise          # no clusters: the slowest input

Prints one JSON line: wall seconds, CPU seconds (all threads), peak memory of the process (input included) and of the
interpreter with the input alone, passes per level and the error that is left. Wall time means what it says only on an
otherwise idle machine; CPU seconds divided by the threads is its floor on a busy one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time


def vectors(kind: str, items: int, width: int):
    """float32[items, width] unit rows: noise around 2,000 centres of unequal size, or noise alone."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((items, width), dtype=np.float32)
    if kind == "clusters":
        centres = rng.standard_normal((2000, width), dtype=np.float32)
        share = 1 / np.arange(1, 2001)
        x = 0.7 * x + centres[rng.choice(2000, items, p=share / share.sum())]
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def peak_mib() -> float:
    """Largest resident size of this process so far, MiB."""
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def main() -> None:
    """Fit once and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 256, 256])
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--data", choices=["clusters", "noise"], default="clusters")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    from auto_research.blocks.residual_kmeans import code_statistics, rq_kmeans

    x = vectors(options.data, options.items, options.width)
    before = peak_mib()
    wall, cpu = time.perf_counter(), time.process_time()
    found = rq_kmeans(x, options.sizes, balanced=options.balanced, seed=0)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    statistics = code_statistics(found.codes, options.sizes)
    result = {
        **vars(options),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mib": round(peak_mib()),
        "peak_mib_before": round(before),
        "passes": found.rounds,
        "residual": [round(value, 4) for value in found.residual],
        "utilisation": statistics["utilisation"],
        "distinct": statistics["distinct"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
