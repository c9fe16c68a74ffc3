"""Audit adapters on one device without Snakemake: one isolated process per adapter, every row on disk at once.

    python scripts/audit_gpu_paths.py --dataset-dir data --output results/gpu-audit/a30.json --timeout-seconds 600 \
        --only-explicit-device-packages --include-concept-demos --shards 3 --shard-index 0 --device cuda:0

Writes OUTPUT (rows) and OUTPUT's .summary.json, .md and .html. Exit code 1 unless every adapter passed. `--resume` keeps
the passes of OUTPUT whose sources are unchanged and repeats the rest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works where the project is not installed

from auto_research.audit.commands import session_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(session_main))
