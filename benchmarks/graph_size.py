"""Dry-run and no-op time of a large graph: synthetic adapters in a temporary code root.

python benchmarks/graph_size.py --adapters 64 --arms 8 --artifacts 3 --seeds 3

The jobs are not run: outputs and Snakemake's records are made by `--touch`, so that the no-op call judges every file.
Wall seconds depend on what else the machine does; CPU seconds do not.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parents[1]
TARGET = 10.0


def write_adapter(folder: Path, key: str, arms: int, artifacts: int, seeds: int) -> None:
    """One adapter with a card of the usual size, a model and an experiment."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    artifact_names = [f"artifact_{index}" for index in range(artifacts)]
    arm_names = [f"arm_{index}" for index in range(arms)]
    budget = {"seeds": list(range(42, 42 + seeds)), "epochs": 3, "width": 64}
    card = {
        "key": key,
        "paper": {"title": f"Synthetic paper {key}", "id": "arXiv:0000.00000", "organization": "none",
                  "published": "2024-01-01", "topics": ["ctr"]},
        "fidelity": "concept_demo", "family": "synthetic", "task": "next_item", "problem": "A problem. " * 200,
        "boundary": ["Something is replaced. " * 10] * 5,
        "data": {"default": "movielens-100k", "needs": ["sequences"]},
        "metrics": {"primary": "ndcg@10", "also": ["hit@10"], "direction": "max"},
        "artifacts": {name: {"what": "text " * 20, "needs": ["sequences"]} for name in artifact_names},
        "arms": {name: {"role": "floor" if index == 0 else "treatment", "what": "text " * 20,
                        "needs": ["sequences", *artifact_names[:1 + index % max(1, artifacts)]]}
                 for index, name in enumerate(arm_names)},
        "comparisons": [{"arm": arm_names[-1], "against": arm_names[0]}],
        "budgets": dict.fromkeys(("tiny", "smoke", "standard", "full"), budget),
        "gpu": {"path": False},
    }  # fmt: skip
    (folder / "card.yaml").write_text(yaml.safe_dump(card, sort_keys=False))
    (folder / "model.py").write_text("from auto_research.blocks import pairs\n\nWIDTH = 8\n")
    functions = "".join(f"\n\n@experiment.artifact\ndef {name}(ctx): ...\n" for name in artifact_names)
    functions += "".join(f"\n\n@experiment.arm\ndef {name}(ctx): ...\n" for name in arm_names)
    module = key.replace("-", "_")
    head = f"from adapters.{module} import model\nfrom auto_research.experiment.contract import Experiment\n\n"
    (folder / "experiment.py").write_text(f'{head}experiment = Experiment("{key}")\n{functions}')


def timed(command: list[str], cwd: Path, env: dict[str, str]) -> tuple[float, float, str]:
    """(wall seconds, CPU seconds, output) of a command that must succeed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout + done.stderr
    if done.returncode:
        sys.exit(output[-3000:])
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def main() -> None:
    """Build the root, time the calls, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 64), ("arms", 8), ("artifacts", 3), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "adapters").mkdir()
        (base / "adapters" / "__init__.py").write_text("")
        for index in range(options.adapters):
            key = f"paper-{index}"
            write_adapter(
                base / "adapters" / key.replace("-", "_"), key, options.arms, options.artifacts, options.seeds
            )
        measure(base, options)


def measure(base: Path, options: argparse.Namespace) -> None:
    """Time dry-run and no-op calls in `base` and print them."""
    env = {**os.environ, "AUTO_RESEARCH_ROOT": str(base)}
    snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile")]
    snakemake += ["--workflow-profile", str(CHECKOUT / "profiles" / "default")]
    rows = [("start of snakemake (--version)", *timed([*snakemake[:3], "--version"], base, env)[:2])]
    wall, cpu, output = timed([*snakemake, "reproduce_all", "-n"], base, env)
    jobs = next(line.split()[-1] for line in output.splitlines() if line.startswith("total "))
    rows.append((f"dry-run of {jobs} jobs, nothing built", wall, cpu))
    rows.append(
        ("dry-run of one adapter, nothing built", *timed([*snakemake, "reproduce_paper_0", "-n"], base, env)[:2])
    )
    make_outputs(base, output)
    timed([*snakemake, "reproduce_all", "--touch"], base, env)
    wall, cpu, output = timed([*snakemake, "reproduce_all"], base, env)
    if "Nothing to be done" not in output:
        sys.exit("the no-op call found something to do:\n" + output[-2000:])
    rows.append((f"no-op of {jobs} jobs", wall, cpu))
    rows.append(("no-op of one adapter", *timed([*snakemake, "reproduce_paper_0"], base, env)[:2]))
    print(
        f"{options.adapters} adapters x {options.artifacts} artifacts x {options.arms} arms x {options.seeds} seeds\n"
    )
    print("| call | wall s | CPU s | target |\n| --- | ---: | ---: | ---: |")
    for name, wall, cpu in rows:
        print(f"| {name} | {wall:.1f} | {cpu:.1f} | {'' if 'version' in name else f'< {TARGET:.0f}'} |")


def make_outputs(base: Path, dry_run: str) -> None:
    """Empty files at every output a dry-run names: `--touch` gives them Snakemake's records."""
    for line in dry_run.splitlines():
        text = line.strip()
        if text.startswith("Reason: Missing output files: "):
            names = text.removeprefix("Reason: Missing output files: ").split(";")[0].split(", ")
            for name in names:
                (base / name).parent.mkdir(parents=True, exist_ok=True)
                (base / name).write_text("{}\n")
    for result in base.glob("results/reproduce/*/*/*/result.json"):
        for sibling in ("report.md", "curves.svg"):
            (result.parent / sibling).write_text("\n")


if __name__ == "__main__":
    main()
