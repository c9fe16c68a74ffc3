"""Choice of adapters, input functions and parameters of the audit; AUDIT is the graph of this configuration."""

import shlex
import sys

from auto_research.audit.graph import AuditGraph, audit_device, export_timeout, papers_of

AUDIT = checked(
    AuditGraph,
    CARDS,
    audit_device(setting("audit_device"), DEVICE),
    setting("audit_tier", "smoke"),
    int(setting("audit_shards", 1)),
    setting("audit_shard_index"),
    papers_of(setting("paper")),
    bool(setting("include_concept_demos", False)),
    bool(setting("only_explicit_device_packages", False)),
    setting("dataset"),
    FINGERPRINTS,
)
AUDIT_TIMEOUT = float(setting("audit_timeout_seconds", 600))

# A parameter would rerun every row when the limit changes; a row that timed out reruns anyway.
export_timeout(AUDIT_TIMEOUT)

if "audit_all" in sys.argv:
    partial_summary(PYTHON, f"{SCRIPTS}/audit_summary.py", "--partial", *AUDIT.flags())


def audit_data(wildcards):
    return AUDIT.data_files(card_of(wildcards).key)


def audit_fingerprint(wildcards):
    return checked(AUDIT.fingerprint, wildcards.key)


def audit_row_flags(wildcards):
    flags = ["--device", AUDIT.device, "--tier", AUDIT.tier, "--dataset", AUDIT.dataset_of(wildcards.key)]
    return shlex.join([*flags, "--failure", str(AUDIT.failure(wildcards.key))])


def audit_flags(wildcards):
    return shlex.join(AUDIT.flags())


def audit_shard_rows(wildcards):
    return checked(AUDIT.rows_of, int(wildcards.index))


def audit_shard_files(wildcards):
    return AUDIT.shard_files()


def audit_summary_fingerprint(wildcards):
    return checked(AUDIT.summary_fingerprint)


def audit_targets(wildcards):
    return checked(AUDIT.targets)
