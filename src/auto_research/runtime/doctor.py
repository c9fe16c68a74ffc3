"""What works on this machine, what is missing, and the command that mends it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from auto_research.runtime import devices, threads
from auto_research.runtime.errors import AutoResearchError, UserError, describe_error
from auto_research.runtime.files import read_json
from auto_research.runtime.paths import checkout_root, code_root, config_dir, dataset_dir, results_dir
from auto_research.runtime.schema import load_yaml

NEEDED = ("snakemake", "torch", "numpy", "pandas", "pyarrow", "scikit-learn", "safetensors")
OPTIONAL = {"transformers": "llm", "peft": "llm", "snakemake-executor-plugin-slurm": "cluster", "pytest": "dev"}
_FREE_BYTES = 5 << 30


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    status: 'ok', 'warning' (optional thing absent or doubtful) or 'missing' (something needed is absent);
    detail: what was found; fix: the command that mends it, '' when nothing is to be done.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def doctor(folder: str | os.PathLike | None = None) -> list[Check]:
    """Every check of this machine, in the order a person would read them; `folder` is the dataset folder.

    Never raises: a check that fails by itself becomes a 'missing' line with its error.
    """

    def data() -> list[Check]:
        return _data(dataset_dir(folder))

    checks: list[Check] = []
    for part in (_python, _packages, _device, _threads, _code, data, _disk, _profiles):
        checks += _guarded(part)
    return checks


def snakemake_folder() -> Path:
    """The user's Snakemake configuration folder: $XDG_CONFIG_HOME/snakemake or the platform's default."""
    named = os.environ.get("XDG_CONFIG_HOME")
    if named:
        return Path(named) / "snakemake"
    import platformdirs  # what Snakemake itself asks

    return Path(platformdirs.user_config_dir("snakemake", "snakemake"))


def link_profiles(target: str | os.PathLike | None = None) -> list[str]:
    """Link every folder of `profiles/` but `default` into `target` (None: the user's Snakemake folder).

    Returns one line per profile. A right link stays, a link of ours to another checkout or to nothing is renewed; a
    foreign file or folder is never touched: UserError, before anything is linked.
    """
    folder = Path(target) if target is not None else snakemake_folder()
    profiles = _profile_folders()
    for profile in profiles:
        link = folder / profile.name
        if os.path.lexists(link) and not _is_ours(link):
            raise UserError(f"{link} exists and is not a link of this project: move it away, then link again")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for profile in profiles:
        link = folder / profile.name
        if link.is_symlink() and link.resolve() == profile.resolve():
            lines.append(f"{profile.name}: already linked ({link})")
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(profile.resolve(), target_is_directory=True)
        lines.append(f"{profile.name}: linked ({link})")
    return lines


def _profile_folders() -> list[Path]:
    folder = code_root() / "profiles"
    return sorted(path.parent for path in folder.glob("*/config.yaml") if path.parent.name != "default")


def _is_ours(link: Path) -> bool:
    """A symbolic link to a folder `profiles/<same name>` of some checkout, existing or not."""
    if not link.is_symlink():
        return False
    goal = Path(os.readlink(link))
    return goal.name == link.name and goal.parent.name == "profiles"


def _guarded(part: Callable[[], list[Check]]) -> list[Check]:
    try:
        return part()
    except Exception as error:
        return [Check(part.__name__.strip("_"), "missing", describe_error(error)[0])]


def _python() -> list[Check]:
    fits = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [Check("python", "ok" if fits else "missing", detail, "" if fits else "install Python 3.11 or later")]


def _packages() -> list[Check]:
    checks = []
    for name in NEEDED:
        version = _version(name)
        fix = "" if version else "python -m pip install -e ."
        checks.append(Check(name, "ok" if version else "missing", version or "not installed", fix))
    for name, extra in OPTIONAL.items():
        version = _version(name)
        fix = "" if version else f"auto-research-install-runtime --extras {extra}"
        checks.append(Check(name, "ok" if version else "warning", version or f"not installed (extra {extra})", fix))
    return checks


def _version(name: str) -> str | None:
    try:
        return devices.public_version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _device() -> list[Check]:
    found = devices.available_devices()
    requested = devices.requested_device()
    try:
        device = devices.resolve_device(requested)
    except AutoResearchError as error:
        return [Check("device", "missing", str(error), "export AUTO_RESEARCH_DEVICE=auto")]
    detail = f"{requested} resolves to {device} ({devices.hardware_name(device)}); present: {', '.join(found)}"
    checks = [Check("device", "ok", detail)]
    if found == ["cpu"] and shutil.which("nvidia-smi"):
        fix = "./demo-linux-gpu.sh (makes an environment with a CUDA build of torch)"
        checks.append(Check("cuda", "warning", "nvidia-smi is here, but this torch sees no CUDA device", fix))
    return checks


def _threads() -> list[Check]:
    import torch

    wanted = threads.requested_threads()
    detail = f"{wanted or torch.get_num_threads()} per worker, {threads.available_cores()} cores"
    warning = threads.oversubscription(1, wanted) if wanted else None
    return [
        Check("threads", "warning" if warning else "ok", detail, "unset AUTO_RESEARCH_CPU_THREADS" if warning else "")
    ]


def _code() -> list[Check]:
    root = code_root()
    count = sum(1 for _ in (root / "adapters").glob("*/card.yaml"))
    checks = [Check("adapters", "ok" if count else "missing", f"{count} cards in {root / 'adapters'}")]
    if root != checkout_root() and (root / "src" / "auto_research").is_dir():
        detail = f"the package is installed from {checkout_root()}, this folder is another checkout"
        checks.append(Check("package", "warning", detail, f"python -m pip install -e {root}"))
    return checks


def _data(folder: Path) -> list[Check]:
    registry = load_yaml(config_dir() / "datasets.yaml") or {}
    checks = []
    for name, entry in registry.items():
        fix = f"auto-research data prepare --dataset {name}"
        if all(source.get("kind") == "file" for source in entry.get("sources", ())):
            fix = f"put its file into {folder / 'downloads'} (docs say where it comes from), then {fix}"
        manifest = results_dir() / "data" / name / "canonical" / "manifest.json"
        files = [source["file"] for source in entry.get("sources", ()) if source.get("file")]
        present = [file for file in files if (folder / "downloads" / file).is_file() or (folder / file).is_file()]
        if manifest.is_file():
            read_json(manifest)
            checks.append(Check(f"data {name}", "ok", "prepared"))
        elif present:
            checks.append(Check(f"data {name}", "warning", f"downloaded ({present[0]}), not prepared", fix))
        else:
            checks.append(Check(f"data {name}", "warning", f"not in {folder}", fix))
    return checks


def _disk() -> list[Check]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    checks = [
        Check(
            "disk",
            "ok" if free >= _FREE_BYTES else "warning",
            f"{free / 2**30:.1f} GiB free here",
            "" if free >= _FREE_BYTES else "free space: runs with checkpoints want 5 GiB",
        )
    ]
    place = results_dir() if results_dir().exists() else here
    if not os.access(place, os.W_OK):
        checks.append(Check("results", "missing", f"{place} is not writable", "work in a writable folder"))
    return checks


def _profiles() -> list[Check]:
    folder = snakemake_folder()
    absent = [p.name for p in _profile_folders() if (folder / p.name).resolve() != p.resolve()]
    if absent:
        detail = f"not linked: {', '.join(absent)} (snakemake --profile profiles/<name> works without)"
        return [Check("profiles", "warning", detail, "auto-research profiles link")]
    return [Check("profiles", "ok", f"linked in {folder}")]
