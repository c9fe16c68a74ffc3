"""What the workflow costs beside the work: wall time of a tiny-tier adapter as jobs minus its stages' own seconds.

python benchmarks/job_overhead.py --adapter rankmixer

The data is prepared first and not counted. Also timed: the same stages in one process (`run_adapter`), as the audit does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
INLINE = (
    "import sys, pathlib; from auto_research.experiment.inline import run_adapter; "
    "run_adapter(sys.argv[1], 'tiny', workdir=pathlib.Path('inline'), device='cpu', threads=1, "
    "data_root=pathlib.Path('results/data').resolve())"
)


def timed(command: list[str], cwd: Path) -> float:
    """Wall seconds of a command that must succeed."""
    env = {
        **os.environ,
        "AUTO_RESEARCH_DATASET_DIR": os.environ.get("AUTO_RESEARCH_DATASET_DIR", str(CHECKOUT / "data")),
    }
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-3000:])
    return time.perf_counter() - start


def main() -> None:
    """Prepare, run as a graph, run in one process, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", default="rankmixer")
    options = parser.parse_args()
    from auto_research.experiment.card import find_card

    card = find_card(CHECKOUT, options.adapter)
    snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile")]
    snakemake += ["--workflow-profile", str(CHECKOUT / "profiles" / "default")]
    dataset = card.dataset()
    tables = [f"results/data/{dataset}/{table}/manifest.json" for table in card.data["needs"]]
    settings = ["--config", "tier=tiny", "device=cpu", "cpu_threads=1"]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        timed([*snakemake, *tables], base)
        wall = timed([*snakemake, f"reproduce_{card.module}", *settings], base)
        noop = timed([*snakemake, f"reproduce_{card.module}", *settings], base)
        inline = timed([sys.executable, "-c", INLINE, card.key], base)
        pattern = f"results/reproduce/{card.key}/tiny/{dataset}/seed*/"
        arms = [json.loads(path.read_text())["measurement"]["cost"] for path in base.glob(f"{pattern}arms/*.json")]
        made = [json.loads(path.read_text())["cost"] for path in base.glob(f"{pattern}artifacts/*/manifest.json")]
    own = sum(cost["seconds"] for cost in arms + made)
    jobs = len(arms) + len(made)
    print(f"{card.key}, tier tiny: {jobs} jobs and one comparison on {os.cpu_count()} cores\n")
    print("| what | seconds |\n| --- | ---: |")
    print(f"| graph, wall | {wall:.1f} |\n| the stages' own seconds, summed over jobs | {own:.1f} |")
    print(f"| wall minus own work, a job | {(wall - own / (os.cpu_count() or 1)) / jobs:.2f} |")
    print(f"| one process for all stages, wall | {inline:.1f} |\n| second identical call | {noop:.1f} |")


if __name__ == "__main__":
    main()
