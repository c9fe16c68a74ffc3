"""Check the committed GPU evidence: every card that requires a validation names a valid receipt or says `pending`.

    python scripts/validate_gpu_evidence.py

Runs in CI; needs neither torch nor a GPU. Exit code 2 when something is wrong.
"""

import sys

from auto_research.audit.commands import evidence_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(evidence_main))
