"""Make final/g<G>/test_<which>.json: retrain baseline or champion (or the floors) and read the sealed test."""

import sys

from auto_research.evolve.commands import final_test_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(final_test_main))
