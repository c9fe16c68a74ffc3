"""Make results/data/<dataset>/<table>/ from the data set's sources.

canonical: ratings.parquet, users.parquet, items.parquet in canonical order; sequences: leave-two-out;
requests: the request table; titles, texts, text_states: vectors of item titles, of titles with genres, and of the word
pieces of the latter (extra 'llm', not part of 'all'). A pretrained checkpoint is fetched by `--dataset <checkpoint> --table checkpoint`. Each folder ends with manifest.json. Needs no Snakemake.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from auto_research.blocks.title_encoder import CHECKPOINT, ENCODED, prepare_encoded
from auto_research.data.checkpoints import fetch_checkpoint
from auto_research.data.interactions import canonical_folder
from auto_research.data.prepare import TABLE_NAMES, prepare, prepare_all, prepare_table
from auto_research.runtime.errors import guard
from auto_research.runtime.names import check_name
from auto_research.runtime.paths import dataset_dir, results_dir
from auto_research.runtime.process import die_with_parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dataset",
        default="movielens-100k",
        help="name in config/datasets.yaml (checkpoint: in config/checkpoints.yaml)",
    )
    parser.add_argument(
        "--table",
        default="all",
        choices=["all", *TABLE_NAMES, *ENCODED, "checkpoint"],
        help="what to make (default: all)",
    )
    parser.add_argument("--out", type=Path, help="output folder (default: results/data/<dataset>[/<table>])")
    parser.add_argument("--canonical", type=Path, help="canonical folder a derived table is built from")
    parser.add_argument("--checkpoint", type=Path, help="folder of the encoder that makes titles and texts")
    parser.add_argument("--dataset-dir", type=Path, help="downloads (default: $AUTO_RESEARCH_DATASET_DIR or data)")
    parser.add_argument("--offline", action="store_true", help="use only files that are already there")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(arguments)


def main() -> int:
    """Prepare what the command line names."""
    options = parse()
    if options.debug:
        os.environ["AUTO_RESEARCH_DEBUG"] = "1"
    die_with_parent()
    check_name(options.dataset, "dataset")
    base = results_dir() / "data" / options.dataset
    downloads = dataset_dir(options.dataset_dir)
    if options.table == "all":
        prepare_all(options.dataset, options.out or base, downloads, options.offline)
    elif options.table == "canonical":
        prepare(options.dataset, options.out or base / "canonical", downloads, options.offline)
    elif options.table == "checkpoint":
        fetch_checkpoint(options.dataset, options.out or base / "checkpoint", downloads, options.offline)
    elif options.table in ENCODED:
        source = options.canonical or canonical_folder(options.out.parent if options.out else base)
        checkpoint = options.checkpoint or base.parent / CHECKPOINT / "checkpoint"
        out = options.out or base / options.table
        prepare_encoded(options.table, source, out, checkpoint, downloads, options.offline)
    else:
        source = options.canonical or canonical_folder(options.out.parent if options.out else base)
        prepare_table(source, options.table, options.out or base / options.table)
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
