"""Translate a request into a Snakemake call, print it, follow it.

Free text never travels through a shell line or `--config`: the request is a JSON file handed over with `--configfile`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from auto_research.cli.follow import Follower
from auto_research.runtime.files import canonical_json, sha256_text, write_text
from auto_research.runtime.paths import code_root


def write_request(kind: str, request: dict) -> Path:
    """Write the request below `results/requests/`, named by its content, and return the path."""
    settings = {key: value for key, value in sorted(request.items()) if value is not None}
    path = Path("results/requests") / f"{kind}-{sha256_text(canonical_json(settings))[:12]}.json"
    write_text(path, json.dumps(settings, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return path


def call(targets: list[str], kind: str, request: dict, extra: list[str]) -> int:
    """Run Snakemake for `targets` and return its exit code.

    Targets stand before options because `--config` and `-q` swallow what follows them.
    """
    root = code_root()
    command = [sys.executable, "-m", "snakemake", *targets]
    if Path.cwd() != root:
        command += ["--snakefile", str(root / "Snakefile"), "--workflow-profile", str(root / "profiles" / "default")]
    command += ["--configfile", str(write_request(kind, request)), *extra]
    print("$ " + shlex.join(["snakemake", *command[3:]]), file=sys.stderr, flush=True)
    environment = {**os.environ, "AUTO_RESEARCH_ROOT": str(root)}
    if any(flag in extra for flag in ("-n", "--dry-run", "--dryrun", "--summary", "--report", "--dag", "--rulegraph")):
        return subprocess.run(command, env=environment, check=False).returncode
    return Follower(command, environment).run()
