"""Fetch and prepare data sets: results/data/<dataset>/<table>/, each folder's manifest.json last."""


rule canonical:
    output:
        "results/data/{dataset}/canonical/manifest.json",
    log:
        "results/data/{dataset}/logs/canonical.log",
    params:
        fingerprint=canonical_fingerprint,
    conda:
        "../envs/cpu.yaml"
    message:
        "fetching and preparing {wildcards.dataset}"
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/prepare_data.py --dataset {wildcards.dataset} --table canonical"
        " --dataset-dir {DATASET_DIR:q} {OFFLINE} > {log} 2>&1"


rule table:
    input:
        "results/data/{dataset}/canonical/manifest.json",
    output:
        "results/data/{dataset}/{table}/manifest.json",
    log:
        "results/data/{dataset}/logs/{table}.log",
    params:
        fingerprint=table_fingerprint,
    wildcard_constraints:
        table="sequences|requests",
    conda:
        "../envs/cpu.yaml"
    message:
        "building {wildcards.table} of {wildcards.dataset}"
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/prepare_data.py --dataset {wildcards.dataset} --table {wildcards.table}"
        " --dataset-dir {DATASET_DIR:q} {OFFLINE} > {log} 2>&1"
