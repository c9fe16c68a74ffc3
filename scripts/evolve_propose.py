"""Make gen<g>/candidates.json from config.yaml and the selection of the generation before."""

import sys

from auto_research.evolve.commands import propose_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(propose_main))
