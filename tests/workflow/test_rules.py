import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
RULES = [CHECKOUT / "Snakefile", *sorted((CHECKOUT / "rules").glob("*.smk"))]


@pytest.mark.workflow
def test_snakemake_lint_is_clean():
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--lint"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_are_formatted():
    command = [sys.executable, "-m", "snakefmt", "--check", *map(str, RULES)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_jobs_are_execs_of_scripts_and_locks_are_never_forced():
    text = "\n".join(path.read_text() for path in RULES)
    assert "--unlock" not in text
    assert "--nolock" not in text
    assert "\n    run:" not in text


def test_the_default_profile_holds_neutral_keys_only():
    keys = yaml.safe_load((CHECKOUT / "profiles" / "default" / "config.yaml").read_text())
    assert set(keys) == {"cores", "rerun-incomplete", "keep-going", "rerun-triggers", "show-failed-logs"}
    assert keys["rerun-triggers"] == ["mtime", "params", "input"]
    for name in ("linux-cpu", "mac", "gpu-a30"):
        assert not set(yaml.safe_load((CHECKOUT / "profiles" / name / "config.yaml").read_text())) & set(keys)
