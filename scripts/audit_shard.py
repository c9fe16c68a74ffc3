"""Join the rows of one audit shard: results/audit/<device>/shards/<index>-of-<shards>.json.

python scripts/audit_shard.py --device cpu --shards 3 --shard-index 0
"""

import sys

from auto_research.audit.commands import shard_main
from auto_research.runtime.errors import guard

if __name__ == "__main__":
    sys.exit(guard(shard_main))
