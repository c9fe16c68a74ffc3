"""Preparation: a source file becomes the canonical folder, and the canonical folder becomes derived tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from auto_research.data import requests, sequences
from auto_research.data.folder import MANIFEST, read_manifest
from auto_research.data.interactions import canonical_folder, write_canonical
from auto_research.data.readers import read_source
from auto_research.data.sources import dataset_entry, fetch_source
from auto_research.runtime.errors import UnknownName
from auto_research.runtime.files import sha256_file

DERIVED: dict[str, Callable[[Path, Path, dict], dict]] = {
    "sequences": sequences.write_folder_of,
    "requests": requests.write_folder_of,
}
TABLE_NAMES = ("canonical", *DERIVED)


def prepare(dataset: str, out: Path | str, dataset_dir: Path | str, offline: bool = False) -> dict:
    """Fetch, check, read and order a data set into `out`; returns the manifest.

    Writes ratings.parquet, users.parquet, items.parquet, and manifest.json last. Prints the licence note once.
    Raises UnknownName, DataMissing, ChecksumMismatch, CorruptFile.
    """
    entry = dataset_entry(dataset)
    path, source_name = fetch_source(dataset, dataset_dir, offline, entry)
    source = entry.source(source_name)
    print(f"{entry.title}: {entry.licence}", file=sys.stderr, flush=True)
    manifest = {
        "title": entry.title,
        "licence": entry.licence,
        "decades": list(entry.decades),
        "source": {"name": source_name, "file": source.file, "sha256": sha256_file(path)},
    }
    return write_canonical(read_source(path, source.layout, dataset), dataset, Path(out), manifest)


def prepare_table(dataset_folder: Path | str, table: str, out: Path | str) -> dict:
    """Build a derived table from the canonical folder (or the data set's folder above it); returns its manifest.

    Raises UnknownName for a table that does not exist, DataMissing when the canonical folder is not prepared.
    """
    if table not in DERIVED:
        raise UnknownName(f"unknown table '{table}'; known: {', '.join(TABLE_NAMES)}")
    folder = canonical_folder(Path(dataset_folder))
    parent = read_manifest(folder)
    keep = {key: parent[key] for key in ("dataset", "title", "licence", "decades", "source")}
    keep["canonical_sha256"] = sha256_file(folder / MANIFEST)
    return DERIVED[table](folder, Path(out), {**keep, "table": table})


def prepare_all(dataset: str, folder: Path | str, dataset_dir: Path | str, offline: bool = False) -> None:
    """Canonical folder and every derived table below `folder` (`results/data/<dataset>`)."""
    folder = Path(folder)
    prepare(dataset, folder / "canonical", dataset_dir, offline)
    for table in DERIVED:
        prepare_table(folder / "canonical", table, folder / table)
