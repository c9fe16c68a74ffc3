"""What rules/common.smk needs from the engine: refusals, the run lock, and the machine's facts for jobs."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from auto_research.experiment.commands import PARENT
from auto_research.runtime.devices import check_device_text
from auto_research.runtime.errors import UserError
from auto_research.runtime.paths import code_root

DRY = {"-n", "--dry-run", "--dryrun"}
# glibc hands large blocks back to the system when they are freed, and every training step faults them in again: 10 to 30%
# of a step on a CPU. Other systems ignore these names.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
_OFFLINE = ("AUTO_RESEARCH_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Machine:
    """Facts that reach jobs by environment.

    In a shell line they would have to be params, and a new device or a moved interpreter would rerun everything.
    """

    python: str
    scripts: str
    root: Path
    device: str
    threads: int
    dataset_dir: str
    offline: bool

    @property
    def gpu(self) -> int:
        """The `gpu` resource of a job on this device."""
        return gpu_of(self.device)

    def export(self) -> Machine:
        """Put the facts into the environment of this process and so of every job."""
        os.environ["AUTO_RESEARCH_PYTHON"] = self.python
        os.environ["AUTO_RESEARCH_SCRIPTS"] = self.scripts
        os.environ["AUTO_RESEARCH_ROOT"] = str(self.root)
        os.environ["AUTO_RESEARCH_DEVICE"] = self.device
        os.environ["AUTO_RESEARCH_DATASET_DIR"] = self.dataset_dir
        os.environ[PARENT] = str(os.getpid())
        for name, value in ALLOCATOR.items():
            os.environ.setdefault(name, value)
        if self.offline:
            os.environ.update(dict.fromkeys(_OFFLINE, "1"))
        return self


def machine(config: dict[str, Any], basedir: Path) -> Machine:
    """Machine facts from configuration, environment and, weakest, a profile's `default_*` keys.

    basedir: folder of the Snakefile; it is the code root when the working directory lies in no checkout.
    """
    here = Path.cwd().resolve()
    if not any((folder / "adapters" / "__init__.py").is_file() for folder in (here, *here.parents)):
        os.environ.setdefault("AUTO_RESEARCH_ROOT", str(Path(basedir).resolve()))
    return Machine(
        python=sys.executable,
        scripts=str(Path(basedir).resolve() / "scripts"),
        root=code_root(),
        device=check_device_text(_chosen(config, "device", "AUTO_RESEARCH_DEVICE", "auto")),
        threads=int(_chosen(config, "cpu_threads", "AUTO_RESEARCH_CPU_THREADS", 2)),
        dataset_dir=str(_chosen(config, "dataset_dir", "AUTO_RESEARCH_DATASET_DIR", "data")),
        offline=bool(config.get("offline")),
    )


def gpu_of(device: str) -> int:
    """1 for CUDA, and for auto where the machine has a CUDA device node; torch is not asked."""
    return int(device.startswith("cuda") or (device == "auto" and Path("/dev/nvidia0").exists()))


def refuse(text: object) -> None:
    """One line on stderr and exit code 2: a person's mistake, found while the Snakefile is read."""
    print(f"error: {' '.join(str(text).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def checked(function: Callable, *arguments: Any) -> Any:
    """Call, with a user's error turned into `refuse`."""
    try:
        return function(*arguments)
    except UserError as error:
        refuse(error)


def hold_run_lock(is_main_process: bool) -> IO[str] | None:
    """Delete locks of a run that was killed; hold a shared lock for as long as the returned handle lives.

    Snakemake leaves `.snakemake/locks` behind after kill -9. Whoever gets the file lock exclusively knows that no run is
    alive in this folder.
    """
    if not is_main_process or DRY & set(sys.argv):
        return None
    folder = Path(".snakemake")
    try:
        folder.mkdir(exist_ok=True)
        handle = open(folder / "run.lock", "a")  # noqa: SIM115 (the open handle is the lock)
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


def _chosen(config: dict[str, Any], name: str, variable: str, fallback: Any) -> Any:
    for value in (config.get(name), os.environ.get(variable), config.get(f"default_{name}")):
        if value not in (None, ""):
            return value
    return fallback
