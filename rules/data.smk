"""Fetch and prepare data sets: results/data/<dataset>/<table>/, each folder's manifest.json last."""


rule canonical:
    output:
        "results/data/{dataset}/canonical/manifest.json",
    log:
        "results/data/{dataset}/logs/canonical.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=canonical_fingerprint,
    message:
        "fetching and preparing {wildcards.dataset}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/prepare_data.py --dataset {wildcards.dataset} --table canonical'
        " > {log} 2>&1"


rule table:
    input:
        "results/data/{dataset}/canonical/manifest.json",
    output:
        "results/data/{dataset}/{table}/manifest.json",
    log:
        "results/data/{dataset}/logs/{table}.log",
    wildcard_constraints:
        table="sequences|requests",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=table_fingerprint,
    message:
        "building {wildcards.table} of {wildcards.dataset}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/prepare_data.py --dataset {wildcards.dataset} --table {wildcards.table}'
        " > {log} 2>&1"


rule checkpoint:
    output:
        "results/data/{checkpoint}/checkpoint/manifest.json",
    log:
        "results/data/{checkpoint}/logs/checkpoint.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=checkpoint_fingerprint,
    message:
        "fetching the checkpoint {wildcards.checkpoint}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/prepare_data.py --dataset {wildcards.checkpoint} --table checkpoint'
        " > {log} 2>&1"


rule titles:
    input:
        "results/data/{dataset}/canonical/manifest.json",
        f"results/data/{TITLE_ENCODER}/checkpoint/manifest.json",
    output:
        "results/data/{dataset}/titles/manifest.json",
    log:
        "results/data/{dataset}/logs/titles.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=titles_fingerprint,
    message:
        "encoding the item titles of {wildcards.dataset}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/prepare_data.py --dataset {wildcards.dataset} --table titles'
        " > {log} 2>&1"
