"""`auto-research-install-runtime`: add optional packages to an environment without touching its torch.

pip plans first (`--dry-run --report`); when the plan would replace the installed torch, nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from auto_research.runtime.errors import ConfigError, RunFailure, UnknownName, UserError, guard

EXTRAS = ("llm", "cluster", "dev")
OLDER_NAMES = {"neural-recs": "llm", "llm-evolution": "llm", "plum": "llm"}
OLDEST_TORCH = (2, 7)


def extra_names(text: str) -> list[str]:
    """'llm,plum,dev' -> ['llm', 'dev']; older names are translated; UnknownName names what exists."""
    names = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name = OLDER_NAMES.get(part, part)
        if name not in EXTRAS:
            raise UnknownName(f"unknown extra {part!r}; known: {', '.join((*EXTRAS, *OLDER_NAMES))}")
        if name not in names:
            names.append(name)
    if not names:
        raise ConfigError(f"--extras names nothing; known: {', '.join((*EXTRAS, *OLDER_NAMES))}")
    return names


def extra_requirements(extras: Sequence[str], declared: Sequence[str] | None = None) -> list[str]:
    """Requirements that the extras add to the project's own (`declared`: None reads the installed package)."""
    lines = declared if declared is not None else metadata.requires("auto-research") or []
    found = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        if any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            requirement.marker = None
            found.append(str(requirement))
    return found


def torch_satisfies(version: str) -> bool:
    """True for torch 2.7 or later, vendor builds and pre-releases of 2.7 included ('2.7.0a0+vendor')."""
    return Version(version).release[:2] >= OLDEST_TORCH


def installed_torch(python: str) -> str | None:
    """Version of torch in the environment of an interpreter, None when it has none. Does not import torch."""
    code = "from importlib import metadata\ntry: print(metadata.version('torch'))\nexcept metadata.PackageNotFoundError: pass"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip() or None


def plan(python: str, requirements: Sequence[str], pip_options: Sequence[str] = ()) -> dict[str, str]:
    """What pip would install: canonical name -> version. RunFailure with pip's reason when it finds no plan."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", str(report), *pip_options]
        answer = subprocess.run([*command, *requirements], capture_output=True, text=True)
        if answer.returncode:
            raise RunFailure(f"pip finds no plan: {_reason(answer.stderr)}")
        entries = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in entries}


def check_torch(before: str | None, planned: dict[str, str]) -> None:
    """UserError when the plan replaces an installed torch with another version; both are named."""
    after = planned.get("torch")
    if before is None or after is None or after == before:
        return
    raise UserError(
        f"nothing installed: pip would replace torch {before} with torch {after}; "
        "install packages that fit this torch, or pass --allow-torch-change"
    )


def install(
    python: str,
    requirements: Sequence[str],
    pip_options: Sequence[str] = (),
    *,
    allow_torch_change: bool,
    dry_run: bool,
) -> dict[str, str]:
    """Plan, guard torch, install; returns the plan. A torch requirement that the present build meets is left out."""
    before = installed_torch(python)
    if before is not None and torch_satisfies(before) and not allow_torch_change:
        requirements = [line for line in requirements if canonicalize_name(Requirement(line).name) != "torch"]
    planned = plan(python, requirements, pip_options) if requirements else {}
    if not allow_torch_change:
        check_torch(before, planned)
    if planned and not dry_run:
        command = [python, "-m", "pip", "install", "--no-input", *pip_options, *requirements]
        if subprocess.run(command).returncode:
            raise RunFailure("pip stopped; its own message stands above")
    return planned


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, install, report."""
    parser = argparse.ArgumentParser(
        prog="auto-research-install-runtime",
        description="Install optional packages; stops before installing anything when that would replace torch.",
        epilog="Arguments after -- go to pip, for example -- --index-url URL",
    )
    known = ", ".join((*EXTRAS, *OLDER_NAMES))
    parser.add_argument("--extras", required=True, help=f"comma-separated: {known}")
    parser.add_argument("--allow-torch-change", action="store_true", help="let pip replace the installed torch")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    if options.debug:
        os.environ["AUTO_RESEARCH_DEBUG"] = "1"
    planned = install(
        sys.executable,
        extra_requirements(extra_names(options.extras)),
        given[cut + 1 :],
        allow_torch_change=options.allow_torch_change,
        dry_run=options.dry_run,
    )
    verb = "would install" if options.dry_run else "installed"
    listed = ", ".join(f"{name} {version}" for name, version in sorted(planned.items()))
    print(f"{verb}: {listed}" if planned else "nothing to do: everything is installed")
    return 0


def _reason(text: str) -> str:
    errors = [line.removeprefix("ERROR:").strip() for line in text.splitlines() if line.startswith("ERROR:")]
    return (errors[0] if errors else (text.strip().splitlines() or ["no message"])[-1])[:300]


def entry() -> None:
    """Console entry point."""
    sys.exit(guard(main))


if __name__ == "__main__":
    entry()
