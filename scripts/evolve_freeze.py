"""Make results/evolve/<track>/<run>/config.yaml (the frozen request) from a request file or the surrounding Snakemake call."""

import sys

from auto_research.evolve.commands import freeze_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(freeze_main))
