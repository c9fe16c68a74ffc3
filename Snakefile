"""Targets: all, reproduce_<key>, reproduce_all, evolve_<track>, audit_all, site. Rules live in rules/.

snakemake reproduce_rankmixer --config tier=smoke
"""

from pathlib import Path


configfile: Path(workflow.basedir) / "config" / "config.yaml"


wildcard_constraints:
    key="[a-z0-9][a-z0-9_-]*",
    tier="tiny|smoke|standard|full",
    dataset="[a-z0-9][a-z0-9_-]*",
    seed="[0-9]+",
    arm="[a-z][a-z0-9_]*",
    artifact="[a-z][a-z0-9_]*",


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/reproduce.smk"
include: "rules/evolve.smk"
include: "rules/audit.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        tour_results,


onerror:
    write_partial_summaries()
