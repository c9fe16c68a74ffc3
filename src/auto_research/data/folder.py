"""A prepared folder: parquet tables, then `manifest.json` (written last) with the sha256 of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from auto_research.runtime.errors import ConfigError, CorruptFile, DataMissing
from auto_research.runtime.files import atomic_path, read_json, sha256_file, write_json

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


def write_folder(out: Path, tables: dict[str, pa.Table], manifest: dict) -> dict:
    """Write every table as `<name>.parquet`, then the manifest. Returns the manifest as written."""
    import pyarrow.parquet as pq

    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    files = {}
    for name, table in tables.items():
        path = out / f"{name}.parquet"
        with atomic_path(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
        files[path.name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size, "rows": table.num_rows}
    manifest = {**manifest, "format_version": FORMAT_VERSION, "files": files}
    write_json(out / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path, command: str = "python scripts/prepare_data.py") -> dict:
    """Manifest of a prepared folder. Raises DataMissing (not prepared), CorruptFile, ConfigError (other version)."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataMissing(f"{folder}: not prepared (no {MANIFEST}); run: {command}")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "files" not in manifest:
        raise CorruptFile(f"{path}: not a data manifest; delete {folder} and run: {command}")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"{folder}: prepared by another version; delete it and run: {command}")
    return manifest


def read_tables(folder: Path, names: tuple[str, ...]) -> dict[str, pa.Table]:
    """Tables of a prepared folder, each checked against the sha256 of the manifest. Raises CorruptFile."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    manifest = read_manifest(folder)
    tables = {}
    for name in names:
        path = folder / f"{name}.parquet"
        entry = manifest["files"].get(path.name)
        if entry is None or not path.is_file():
            raise CorruptFile(f"{path}: missing; delete {folder} and prepare the data again")
        if path.stat().st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
            raise CorruptFile(f"{path}: does not match its manifest; delete {folder} and prepare the data again")
        try:
            tables[name] = pq.read_table(path, memory_map=False)
        except (pa.ArrowException, OSError) as error:
            raise CorruptFile(f"{path}: unreadable ({str(error).splitlines()[0]}); prepare the data again") from error
    return tables
