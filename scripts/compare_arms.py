"""Join the arms of an adapter over seeds: result.json, report.md and curves.svg beside them.

    python scripts/compare_arms.py --adapter rankmixer --tier smoke

Refuses arms whose recorded fingerprint is not the current one. Imports no torch.
"""

import sys

from auto_research.experiment.commands import compare_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(compare_main))
