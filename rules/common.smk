"""Configuration, cards, fingerprints and input functions of the workflow.

Other .smk files find here: ROOT, PYTHON, SCRIPTS, CARDS, FINGERPRINTS, DEVICE, THREADS, GPU, DATASET_DIR, OFFLINE, SEEDS,
`setting(name)`, `refuse(text)`, `checked(function, ...)`, `gpu_of(device)`, `partial_summary(command)`.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from auto_research.experiment.card import discover
from auto_research.experiment.commands import parse_seeds
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.graph import checked, gpu_of, hold_run_lock, machine, refuse
from auto_research.experiment.layout import Layout
from auto_research.experiment.stages import Stage, input_files
from auto_research.runtime.paths import config_dir
from auto_research.runtime.schema import load_yaml, validate


def setting(name, default=None):
    """A configuration value; null and absent give the default."""
    value = config.get(name)
    return default if value is None else value


checked(validate, config, "config", "config")
MACHINE = checked(machine, config, Path(workflow.basedir)).export()
ROOT, PYTHON, SCRIPTS, DATASET_DIR, OFFLINE = (
    MACHINE.root,
    MACHINE.python,
    MACHINE.scripts,
    MACHINE.dataset_dir,
    MACHINE.offline,
)
DEVICE, THREADS, GPU = MACHINE.device, MACHINE.threads, MACHINE.gpu
RUN_LOCK = hold_run_lock(workflow.is_main_process)
CARDS = checked(discover, ROOT)
FINGERPRINTS = Fingerprints(ROOT, CARDS)
TIER = config["tier"]
SEEDS = checked(parse_seeds, setting("seeds"))
TARGET_OF = {key: f"reproduce_{card.module}" for key, card in CARDS.items()}
PARTIAL_SUMMARIES = []


# Reproduction -------------------------------------------------------------------------------------------------------


def card_of(wildcards):
    if wildcards.key not in CARDS:
        refuse(f"unknown adapter {wildcards.key!r}; known: {', '.join(CARDS)}")
    return CARDS[wildcards.key]


def stage_of(kind, name, wildcards):
    layout = Layout(wildcards.key, wildcards.tier, wildcards.dataset)
    return Stage(card_of(wildcards), layout, kind, name, int(wildcards.seed))


def artifact_inputs(wildcards):
    return [str(path) for path in input_files(stage_of("artifact", wildcards.artifact, wildcards)).values()]


def arm_inputs(wildcards):
    return [str(path) for path in input_files(stage_of("arm", wildcards.arm, wildcards)).values()]


def artifact_fingerprint(wildcards):
    return checked(FINGERPRINTS.stage, wildcards.key, "artifact", wildcards.artifact, wildcards.tier)


def arm_fingerprint(wildcards):
    return checked(FINGERPRINTS.stage, wildcards.key, "arm", wildcards.arm, wildcards.tier)


def compare_fingerprint(wildcards):
    return checked(FINGERPRINTS.compare, wildcards.key)


def arm_files(key, tier, dataset):
    """Every arm and seed of an adapter: inputs of compare and, again, of each public target."""
    card = CARDS[key]
    layout = Layout(key, tier, dataset)
    return [str(layout.arm(arm, seed)) for arm in card.arms for seed in card.seeds(tier, arm, SEEDS)]


def compare_inputs(wildcards):
    card_of(wildcards)
    return arm_files(wildcards.key, wildcards.tier, wildcards.dataset)


def seeds_text(wildcards):
    return ",".join(map(str, SEEDS or []))


def result_files(key, tier):
    """result.json of an adapter and everything below it: Snakemake remakes no missing file behind a target."""
    dataset = checked(CARDS[key].dataset, setting("dataset"))
    return [str(Layout(key, tier, dataset).result), *arm_files(key, tier, dataset)]


def results_of(key):
    """Input function of the target reproduce_<key>."""
    return lambda wildcards: result_files(key, TIER)


def all_results(wildcards):
    """Every adapter that runs on the configured data set."""
    wanted = setting("dataset")
    keys = [key for key, card in CARDS.items() if wanted is None or wanted in card.datasets]
    return [path for key in keys for path in result_files(key, TIER)]


def tour_results(wildcards):
    unknown = [key for key in setting("tour", []) if key not in CARDS]
    if unknown:
        refuse(f"config tour: unknown adapter {unknown[0]!r}; known: {', '.join(CARDS)}")
    return [path for key in setting("tour", []) for path in result_files(key, "smoke")]


# Data ---------------------------------------------------------------------------------------------------------------


DATA_CODE = {
    "canonical": ("auto_research.data.interactions", "auto_research.data.readers"),
    "sequences": ("auto_research.data.sequences",),
    "requests": ("auto_research.data.requests",),
    "encoded": ("auto_research.blocks.title_encoder",),
    "checkpoint": ("auto_research.data.checkpoints",),
}
TITLE_ENCODER = "minilm-l6-v2"
DATASETS = checked(load_yaml, config_dir() / "datasets.yaml")


def canonical_fingerprint(wildcards):
    code = checked(FINGERPRINTS.code, *DATA_CODE["canonical"])
    return FINGERPRINTS.combine(code, DATASETS.get(wildcards.dataset))


def table_fingerprint(wildcards):
    return checked(FINGERPRINTS.code, *DATA_CODE[wildcards.table])[:32]


def encoded_fingerprint(wildcards):
    return checked(FINGERPRINTS.code, *DATA_CODE["encoded"])[:32]


def checkpoint_fingerprint(wildcards):
    entry = checked(load_yaml, config_dir() / "checkpoints.yaml").get(wildcards.checkpoint)
    return FINGERPRINTS.combine(checked(FINGERPRINTS.code, *DATA_CODE["checkpoint"]), entry)


# Failures -----------------------------------------------------------------------------------------------------------


def partial_summary(*command):
    """Register a command that `onerror` runs; it may write summary.partial.* only, never a declared output."""
    PARTIAL_SUMMARIES.append([str(part) for part in command])


def reproduce_partials():
    """Commands that summarise adapters with failure records, at any tier and data set."""
    for folder in sorted(Path("results/reproduce").glob("*/*/*/failures")):
        key, tier, dataset = folder.parts[-4:-1]
        if key in CARDS:
            flags = f"--adapter {key} --tier {tier} --dataset {dataset} --partial".split()
            yield [PYTHON, f"{SCRIPTS}/compare_arms.py", *flags, *(["--seeds", seeds_text(None)] if SEEDS else [])]


def write_partial_summaries():
    """After a failed run: say what exists and what failed."""
    for command in [*reproduce_partials(), *PARTIAL_SUMMARIES]:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        text = (finished.stdout if finished.returncode == 0 else finished.stderr).strip()
        print(
            f"{'partial summary:' if finished.returncode == 0 else shlex.join(command)} {text}",
            file=sys.stderr,
        )


# Site ---------------------------------------------------------------------------------------------------------------


def site_inputs(wildcards):
    """What the pages show: the results, boards and audits that exist when the Snakefile is read."""
    patterns = (
        "results/reproduce/*/*/*/result.json",
        "results/evolve/*/*/final/*/report.json",
        "results/audit/*/summary.json",
    )
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def site_fingerprint(wildcards):
    code = checked(FINGERPRINTS.code, "auto_research.report.site", "auto_research.report.published")
    return FINGERPRINTS.combine(code, {key: card.facts for key, card in CARDS.items()})[:32]
