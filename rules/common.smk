"""Configuration, cards, fingerprints and input functions of all rules. Holds no rule.

For the other rule files: ROOT, PYTHON, SCRIPTS, CARDS, FINGERPRINTS, DEVICE, THREADS, GPU, SEEDS, `setting(name)`,
`refuse(text)`, `partial_summary(command)`.
"""

import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path

from auto_research.experiment.card import discover
from auto_research.experiment.commands import parse_seeds
from auto_research.experiment.fingerprint import Fingerprints
from auto_research.experiment.layout import Layout
from auto_research.experiment.stages import Stage, input_files
from auto_research.runtime.devices import check_device_text
from auto_research.runtime.errors import UserError
from auto_research.runtime.files import canonical_json
from auto_research.runtime.paths import code_root
from auto_research.runtime.schema import load_yaml, validate


def refuse(text):
    """One line on stderr and exit code 2: the person's mistake, found while the Snakefile is read."""
    print(f"error: {' '.join(str(text).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def checked(function, *arguments):
    """Call, with a user's error turned into `refuse`."""
    try:
        return function(*arguments)
    except UserError as error:
        refuse(error)


def hold_run_lock():
    """Delete locks of a run that was killed; keep a shared lock for as long as this process lives.

    Snakemake leaves `.snakemake/locks` behind after kill -9. Whoever gets the file lock exclusively knows that no run is
    alive. The handle must stay open, so the caller keeps it.
    """
    if not workflow.is_main_process or {"-n", "--dry-run", "--dryrun"} & set(sys.argv):
        return None
    folder = Path(".snakemake")
    try:
        folder.mkdir(exist_ok=True)
        handle = open(folder / "run.lock", "a")
    except OSError as error:
        refuse(f"cannot write {error.filename}: {error.strerror}; work in a writable folder")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in (folder / "locks").glob("*.lock"):
            stale.unlink()  # files only: Snakemake needs the folder
    except BlockingIOError:
        pass  # somebody is alive: Snakemake's own lock decides
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def find_root():
    """Code root, also exported to every job. A working directory without adapters uses this Snakefile's checkout."""
    here = Path.cwd().resolve()
    if not any((folder / "adapters" / "__init__.py").is_file() for folder in (here, *here.parents)):
        os.environ.setdefault("AUTO_RESEARCH_ROOT", str(Path(workflow.basedir).resolve()))
    root = code_root()
    os.environ["AUTO_RESEARCH_ROOT"] = str(root)
    return root


def setting(name, default=None):
    """A configuration value; null and absent give the default."""
    value = config.get(name)
    return default if value is None else value


checked(validate, config, "config", "config")
ROOT = checked(find_root)
PYTHON = sys.executable
SCRIPTS = str(Path(workflow.basedir) / "scripts")
RUN_LOCK = hold_run_lock()
CARDS = checked(discover, ROOT)
FINGERPRINTS = Fingerprints(ROOT, CARDS)
TIER = config["tier"]
SEEDS = checked(parse_seeds, setting("seeds"))
DEVICE = checked(
    check_device_text,
    setting("device") or os.environ.get("AUTO_RESEARCH_DEVICE") or setting("default_device", "auto"),
)
THREADS = int(setting("cpu_threads") or os.environ.get("AUTO_RESEARCH_CPU_THREADS") or setting("default_cpu_threads", 2))
DATASET_DIR = str(setting("dataset_dir") or os.environ.get("AUTO_RESEARCH_DATASET_DIR") or "data")
OFFLINE = "--offline" if setting("offline", False) else ""
TARGET_OF = {key: f"reproduce_{card.module}" for key, card in CARDS.items()}
PARTIAL_SUMMARIES = []

if OFFLINE:
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"


def gpu_of(device):
    """The `gpu` resource of a job on this device text; auto counts where a CUDA device node exists."""
    return int(device.startswith("cuda") or (device == "auto" and Path("/dev/nvidia0").exists()))


GPU = gpu_of(DEVICE)


def checked_fingerprint(function, *arguments):
    """A fingerprint, or one line and exit code 2 when a source file does not parse."""
    return checked(function, *arguments)


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
}
DATASETS = checked(load_yaml, ROOT / "config" / "datasets.yaml") if (ROOT / "config" / "datasets.yaml").is_file() else {}


def canonical_fingerprint(wildcards):
    code = checked(FINGERPRINTS.code, *DATA_CODE["canonical"])
    return FINGERPRINTS.combine(code, DATASETS.get(wildcards.dataset))


def table_fingerprint(wildcards):
    return checked(FINGERPRINTS.code, *DATA_CODE[wildcards.table])[:32]


# Failures -----------------------------------------------------------------------------------------------------------


def partial_summary(*command):
    """Register a command that `onerror` runs; it may write summary.partial.* only, never a declared output."""
    PARTIAL_SUMMARIES.append([str(part) for part in command])


def reproduce_partials():
    """Commands that summarise adapters with failure records, at any tier and data set."""
    for folder in sorted(Path("results/reproduce").glob("*/*/*/failures")):
        key, tier, dataset = folder.parts[-4:-1]
        if key in CARDS:
            command = [PYTHON, f"{SCRIPTS}/compare_arms.py", "--adapter", key, "--tier", tier, "--dataset", dataset]
            yield [*command, "--partial", *(["--seeds", seeds_text(None)] if SEEDS else [])]


def write_partial_summaries():
    """After a failed run: say what exists and what failed."""
    for command in [*reproduce_partials(), *PARTIAL_SUMMARIES]:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        text = (finished.stdout if finished.returncode == 0 else finished.stderr).strip()
        print(f"{'partial summary:' if finished.returncode == 0 else shlex.join(command)} {text}", file=sys.stderr)
