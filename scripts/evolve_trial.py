"""Make gen<g>/trials/<id>/trial.json: train one candidate under a hard time limit; a failed candidate is data, exit 0."""

import sys

from auto_research.evolve.commands import trial_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(trial_main))
