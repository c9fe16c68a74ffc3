"""Make final/g<G>/report.json, report.md and index.html from every selection, trial and sealed test of a run."""

import sys

from auto_research.evolve.commands import report_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(report_main))
