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


rule encoded:
    input:
        "results/data/{dataset}/canonical/manifest.json",
        f"results/data/{TITLE_ENCODER}/checkpoint/manifest.json",
    output:
        "results/data/{dataset}/{table}/manifest.json",
    log:
        "results/data/{dataset}/logs/{table}.log",
    wildcard_constraints:
        table="titles|texts|text_states",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=encoded_fingerprint,
    message:
        "encoding {wildcards.table} of {wildcards.dataset}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/prepare_data.py --dataset {wildcards.dataset} --table {wildcards.table}'
        " > {log} 2>&1"
