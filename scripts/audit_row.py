"""Audit one adapter on one device: its row in --out on a pass, else a record in --failure and exit code 1.

python scripts/audit_row.py --adapter din --device cpu --tier tiny --out row.json --failure failure.json
"""

import sys

from auto_research.audit.commands import row_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(row_main))
