"""Make final/g<G>/LOCK.json: the champion after G generations, before anything reads the test data."""

import sys

from auto_research.evolve.commands import lock_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(lock_main))
