"""``python -m auto_research.evolve.child JOB.json``: entry of the supervised child process."""

from __future__ import annotations

import sys
from pathlib import Path

from auto_research.evolve.worker import work

if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
