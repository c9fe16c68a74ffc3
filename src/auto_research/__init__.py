"""auto-research: paper mechanisms, searches over them and audits of both as one Snakemake graph."""

__version__ = "0.1.0"
