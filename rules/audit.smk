"""Audit: what runs on which device. One isolated job per adapter, shard documents, one summary per device.

The functions these rules name are in audit_functions.smk.
"""


include: "audit_functions.smk"


# Seconds of joining JSON: not worth a place in a cluster's queue.
localrules:
    audit_shard,
    audit_summary,


rule audit_row:
    input:
        audit_data,
    output:
        "results/audit/{device}/rows/{key}.json",
    log:
        "results/audit/{device}/logs/{key}.log",
    wildcard_constraints:
        device="cpu|mps|shadow|cuda(-[0-9]+)?",
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        gpu=gpu_of(AUDIT.device),
        worker=1,
        mem_mb=8000,
        runtime=int(AUDIT_TIMEOUT // 60) + 5,
    params:
        fingerprint=audit_fingerprint,
        flags=audit_row_flags,
    message:
        "audit on {wildcards.device}: {wildcards.key}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/audit_row.py --adapter {wildcards.key} {params.flags}'
        " --cpu-threads {threads} --fingerprint {params.fingerprint} --out {output} --log {log} > {log} 2>&1"


rule audit_shard:
    input:
        audit_shard_rows,
    output:
        "results/audit/{device}/shards/{index}-of-{shards}.json",
    log:
        "results/audit/{device}/logs/shard-{index}-of-{shards}.log",
    wildcard_constraints:
        device="cpu|mps|shadow|cuda(-[0-9]+)?",
        index="[0-9]+",
        shards="[0-9]+",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=audit_summary_fingerprint,
        flags=audit_flags,
    message:
        "audit on {wildcards.device}: shard {wildcards.index} of {wildcards.shards}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/audit_shard.py {params.flags}'
        " --shard-index {wildcards.index} > {log} 2>&1"


rule audit_summary:
    input:
        audit_shard_files,
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
    wildcard_constraints:
        device="cpu|mps|shadow|cuda(-[0-9]+)?",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=audit_summary_fingerprint,
        flags=audit_flags,
    message:
        "audit on {wildcards.device}: summary"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/audit_summary.py {params.flags} > {log} 2>&1'


rule audit_all:
    input:
        audit_targets,
