"""Summarise an audit: results/audit/<device>/summary.json, .md and .html from the shard documents.

python scripts/audit_summary.py --device cpu --shards 3
python scripts/audit_summary.py --rows shard-0.json shard-1.json shard-2.json --out merged
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works where the project is not installed

from auto_research.audit.commands import summary_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(summary_main))
