"""Make gen<g>/selection.json from the candidates and all their trials."""

import sys

from auto_research.evolve.commands import select_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(select_main))
