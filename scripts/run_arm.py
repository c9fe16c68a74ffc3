"""Train and measure one arm with one seed: `.../seed<S>/arms/<arm>.json`. Resumes by itself after a kill.

python scripts/run_arm.py --adapter rankmixer --arm NAME --tier smoke --seed 42
"""

import sys

from auto_research.experiment.commands import stage_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(stage_main, "arm"))
