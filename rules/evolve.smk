"""Searches: freeze, prepare, propose (checkpoint), trial, select, lock, sealed test, report; targets evolve_<track>[_search].

The functions these rules name are in evolve_functions.smk.
"""


include: "evolve_functions.smk"


wildcard_constraints:
    track="[a-z0-9][a-z0-9_-]*",
    run="[a-z0-9][a-z0-9_-]*",
    g="[0-9]+",
    G="[0-9]+",
    trial="g[0-9]+-s[0-9]+-[0-9a-f]{8}",
    which="baseline|champion",


rule freeze:
    output:
        "results/evolve/{track}/{run}/config.yaml",
    log:
        "results/evolve/{track}/{run}/logs/freeze.log",
    conda:
        "../envs/cpu.yaml"
    message:
        "search {wildcards.track}/{wildcards.run}: freezing the request"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_freeze.py --track {wildcards.track} --run {wildcards.run} > {log} 2>&1'


rule prepare:
    input:
        search_data,
        config="results/evolve/{track}/{run}/config.yaml",
    output:
        "results/evolve/{track}/{run}/dev/manifest.json",
        "results/evolve/{track}/{run}/sealed/manifest.json",
    log:
        "results/evolve/{track}/{run}/logs/prepare.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=prepare_fingerprint,
    message:
        "search {wildcards.track}/{wildcards.run}: separating development and sealed data"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_prepare.py --track {wildcards.track} --run {wildcards.run} > {log} 2>&1'


checkpoint propose:
    input:
        previous_selection,
        config="results/evolve/{track}/{run}/config.yaml",
    output:
        "results/evolve/{track}/{run}/gen{g}/candidates.json",
    log:
        "results/evolve/{track}/{run}/logs/propose-{g}.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=propose_fingerprint,
    message:
        "search {wildcards.track}/{wildcards.run}: proposing generation {wildcards.g}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_propose.py --track {wildcards.track} --run {wildcards.run}'
        " --generation {wildcards.g} > {log} 2>&1"


rule trial:
    input:
        candidates="results/evolve/{track}/{run}/gen{g}/candidates.json",
        dev="results/evolve/{track}/{run}/dev/manifest.json",
    output:
        "results/evolve/{track}/{run}/gen{g}/trials/{trial}/trial.json",
    log:
        "results/evolve/{track}/{run}/logs/trial-{g}-{trial}.log",
    retries: 1
    conda:
        "../envs/cpu.yaml"
    threads: trial_threads
    resources:
        gpu=GPU,
        worker=1,
    params:
        fingerprint=trial_fingerprint,
    message:
        "search {wildcards.track}/{wildcards.run}: generation {wildcards.g}, trial {wildcards.trial}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_trial.py --track {wildcards.track} --run {wildcards.run}'
        " --generation {wildcards.g} --trial {wildcards.trial}"
        " --fingerprint {params.fingerprint} > {log} 2>&1"


rule select:
    input:
        trial_files,
        previous_selection,
        candidates="results/evolve/{track}/{run}/gen{g}/candidates.json",
    output:
        "results/evolve/{track}/{run}/gen{g}/selection.json",
    log:
        "results/evolve/{track}/{run}/logs/select-{g}.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=select_fingerprint,
    message:
        "search {wildcards.track}/{wildcards.run}: selecting in generation {wildcards.g}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_select.py --track {wildcards.track} --run {wildcards.run}'
        " --generation {wildcards.g} > {log} 2>&1"


rule lock:
    input:
        "results/evolve/{track}/{run}/gen{G}/selection.json",
    output:
        "results/evolve/{track}/{run}/final/g{G}/LOCK.json",
    log:
        "results/evolve/{track}/{run}/logs/lock-{G}.log",
    conda:
        "../envs/cpu.yaml"
    message:
        "search {wildcards.track}/{wildcards.run}: locking the champion of {wildcards.G} generations"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_lock.py --track {wildcards.track} --run {wildcards.run}'
        " --generations {wildcards.G} > {log} 2>&1"


# The only rules that name sealed/. Inputs are ancient: an existing test is never computed again.
rule final_test:
    input:
        ancient("results/evolve/{track}/{run}/final/g{G}/LOCK.json"),
        ancient("results/evolve/{track}/{run}/sealed/manifest.json"),
        ancient("results/evolve/{track}/{run}/dev/manifest.json"),
    output:
        "results/evolve/{track}/{run}/final/g{G}/test_{which}.json",
    log:
        "results/evolve/{track}/{run}/logs/test-{G}-{which}.log",
    retries: 1
    conda:
        "../envs/cpu.yaml"
    threads: trial_threads
    resources:
        gpu=GPU,
        worker=1,
    params:
        which="{which}",
    message:
        "search {wildcards.track}/{wildcards.run}: sealed test of the {params.which}"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_final_test.py --track {wildcards.track} --run {wildcards.run}'
        " --generations {wildcards.G} --which {params.which} > {log} 2>&1"


# The longest of the three goes first, so that two workers end together.
use rule final_test as floors_test with:
    output:
        "results/evolve/{track}/{run}/final/g{G}/test_floors.json",
    log:
        "results/evolve/{track}/{run}/logs/test-{G}-floors.log",
    priority: 1
    params:
        which="floors",


rule search_report:
    input:
        report_inputs,
    output:
        json="results/evolve/{track}/{run}/final/g{G}/report.json",
        text="results/evolve/{track}/{run}/final/g{G}/report.md",
        board=report(
            "results/evolve/{track}/{run}/final/g{G}/index.html",
            caption="captions/search.rst",
            category="Searches",
            subcategory="{track}",
            labels={"run": "{run}", "generations": "{G}"},
        ),
    log:
        "results/evolve/{track}/{run}/logs/report-{G}.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=report_fingerprint,
    message:
        "search {wildcards.track}/{wildcards.run}: writing the board"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/evolve_report.py --track {wildcards.track} --run {wildcards.run}'
        " --generations {wildcards.G} > {log} 2>&1"


for track in SEARCH_TRACKS:

    rule:
        name:
            f"evolve_{module_name(track)}"
        input:
            final_files(track),

    rule:
        name:
            f"evolve_{module_name(track)}_search"
        input:
            searched_files(track),
