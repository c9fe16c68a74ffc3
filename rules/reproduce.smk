"""Reproduce papers: artifacts, arms and comparison of every adapter, and one target reproduce_<key> each."""


rule artifact:
    input:
        artifact_inputs,
    output:
        "results/reproduce/{key}/{tier}/{dataset}/seed{seed}/artifacts/{artifact}/manifest.json",
    log:
        "results/reproduce/{key}/{tier}/{dataset}/seed{seed}/logs/artifact-{artifact}.log",
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        gpu=GPU,
    params:
        fingerprint=artifact_fingerprint,
    message:
        "{wildcards.key} {wildcards.tier}: artifact {wildcards.artifact}, seed {wildcards.seed}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/run_artifact.py --adapter {wildcards.key} --artifact {wildcards.artifact}'
        " --tier {wildcards.tier} --dataset {wildcards.dataset} --seed {wildcards.seed}"
        " --cpu-threads {threads} --fingerprint {params.fingerprint} --log {log} > {log} 2>&1"


rule arm:
    input:
        arm_inputs,
    output:
        "results/reproduce/{key}/{tier}/{dataset}/seed{seed}/arms/{arm}.json",
    log:
        "results/reproduce/{key}/{tier}/{dataset}/seed{seed}/logs/arm-{arm}.log",
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        gpu=GPU,
    params:
        fingerprint=arm_fingerprint,
    message:
        "{wildcards.key} {wildcards.tier}: arm {wildcards.arm}, seed {wildcards.seed}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/run_arm.py --adapter {wildcards.key} --arm {wildcards.arm}'
        " --tier {wildcards.tier} --dataset {wildcards.dataset} --seed {wildcards.seed}"
        " --cpu-threads {threads} --fingerprint {params.fingerprint} --log {log} > {log} 2>&1"


rule compare:
    input:
        compare_inputs,
    output:
        result="results/reproduce/{key}/{tier}/{dataset}/result.json",
        report=report(
            "results/reproduce/{key}/{tier}/{dataset}/report.md",
            caption="captions/report.rst",
            category="Reproductions",
            subcategory="{key}",
            labels={"tier": "{tier}", "data": "{dataset}", "kind": "report"},
        ),
        curves=report(
            "results/reproduce/{key}/{tier}/{dataset}/curves.svg",
            caption="captions/curves.rst",
            category="Reproductions",
            subcategory="{key}",
            labels={"tier": "{tier}", "data": "{dataset}", "kind": "curves"},
        ),
    log:
        "results/reproduce/{key}/{tier}/{dataset}/logs/compare.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=compare_fingerprint,
        seeds=seeds_text,
    message:
        "{wildcards.key} {wildcards.tier}: comparing arms"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/compare_arms.py --adapter {wildcards.key} --tier {wildcards.tier}'
        " --dataset {wildcards.dataset} --seeds '{params.seeds}' --fingerprint {params.fingerprint}"
        " --log {log} > {log} 2>&1"


for key in CARDS:

    rule:
        name:
            TARGET_OF[key]
        input:
            results_of(key),


rule reproduce_all:
    input:
        all_results,
