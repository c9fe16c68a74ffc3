"""Pages for readers: the site with catalogue and leaderboards."""


rule site:
    input:
        site_inputs,
    output:
        report(
            "results/site/index.html",
            caption="captions/site.rst",
            category="Site",
            labels={"kind": "catalogue and leaderboards"},
        ),
    log:
        "results/site/site.log",
    conda:
        "../envs/cpu.yaml"
    params:
        fingerprint=site_fingerprint,
    message:
        "site: catalogue and leaderboards"
    shell:
        'exec "$AUTO_RESEARCH_PYTHON" "$AUTO_RESEARCH_SCRIPTS"/build_site.py > {log} 2>&1'
