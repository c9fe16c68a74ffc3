"""Audit: what runs on which device. One isolated job per adapter, shard documents, one summary per device."""

from auto_research.audit.graph import AuditGraph, audit_device, papers_of

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
AUDIT_FLAGS = " ".join(map(shlex.quote, AUDIT.flags()))
AUDIT_TIMEOUT = float(setting("audit_timeout_seconds", 600))

if "audit_all" in sys.argv:
    partial_summary(PYTHON, f"{SCRIPTS}/audit_summary.py", "--partial", *AUDIT.flags())


rule audit_row:
    input:
        lambda wildcards: AUDIT.data_files(wildcards.key),
    output:
        "results/audit/{device}/rows/{key}.json",
    log:
        "results/audit/{device}/logs/{key}.log",
    params:
        fingerprint=lambda wildcards: checked(AUDIT.fingerprint, wildcards.key),
        dataset=lambda wildcards: AUDIT.dataset_of(wildcards.key),
        failure=lambda wildcards: str(AUDIT.failure(wildcards.key)),
    wildcard_constraints:
        device="cpu|mps|shadow|cuda(-[0-9]+)?",
    threads: THREADS
    resources:
        gpu=gpu_of(AUDIT.device),
        worker=1,
        mem_mb=8000,
        runtime=int(AUDIT_TIMEOUT // 60) + 5,
    conda:
        "../envs/cpu.yaml"
    message:
        "audit on {wildcards.device}: {wildcards.key}"
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/audit_row.py --adapter {wildcards.key} --device {AUDIT.device} --tier {AUDIT.tier}"
        " --dataset {params.dataset} --timeout-seconds {AUDIT_TIMEOUT:g} --cpu-threads {threads}"
        " --dataset-dir {DATASET_DIR:q} --fingerprint {params.fingerprint} --out {output} --failure {params.failure}"
        " --log {log} > {log} 2>&1"


rule audit_shard:
    input:
        lambda wildcards: AUDIT.rows_of(int(wildcards.index)),
    output:
        "results/audit/{device}/shards/{index}-of-{shards}.json",
    log:
        "results/audit/{device}/logs/shard-{index}-of-{shards}.log",
    params:
        fingerprint=lambda wildcards: checked(AUDIT.summary_fingerprint),
    wildcard_constraints:
        device="cpu|mps|shadow|cuda(-[0-9]+)?",
        index="[0-9]+",
        shards="[0-9]+",
    conda:
        "../envs/cpu.yaml"
    message:
        "audit on {wildcards.device}: shard {wildcards.index} of {wildcards.shards}"
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/audit_shard.py {AUDIT_FLAGS} --shard-index {wildcards.index} > {log} 2>&1"


rule audit_summary:
    input:
        lambda wildcards: AUDIT.shard_files(),
    output:
        json="results/audit/{device}/summary.json",
        markdown="results/audit/{device}/summary.md",
        html=report(
            "results/audit/{device}/summary.html",
            caption="captions/audit.rst",
            category="Audits",
            labels={"device": "{device}"},
        ),
    log:
        "results/audit/{device}/logs/summary.log",
    params:
        fingerprint=lambda wildcards: checked(AUDIT.summary_fingerprint),
    wildcard_constraints:
        device="cpu|mps|shadow|cuda(-[0-9]+)?",
    conda:
        "../envs/cpu.yaml"
    message:
        "audit on {wildcards.device}: summary"
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/audit_summary.py {AUDIT_FLAGS} > {log} 2>&1"


rule audit_all:
    input:
        lambda wildcards: checked(AUDIT.targets),
