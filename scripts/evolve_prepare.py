"""Make dev/ (train, validation) and sealed/ (test) of a run, each with manifest.json, from prepared data tables."""

import sys

from auto_research.evolve.commands import prepare_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(prepare_main))
