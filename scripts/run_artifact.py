"""Make one shared artifact of an adapter: `.../seed<S>/artifacts/<name>/`, its manifest.json last.

python scripts/run_artifact.py --adapter rankmixer --artifact NAME --tier smoke --seed 42
"""

import sys

from auto_research.experiment.commands import stage_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(stage_main, "artifact"))
