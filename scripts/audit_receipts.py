"""Write receipts for the passes of an audit on a real, accepted GPU: docs/gpu-validations/<key>-<accelerator>-<date>.json.

python scripts/audit_receipts.py results/gpu-audit/audit.json --date 2026-08-11
"""

import sys

from auto_research.audit.commands import receipts_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(receipts_main))
