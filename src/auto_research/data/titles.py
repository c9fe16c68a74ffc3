"""Title vectors: one float32 vector per item, row 0 (padding) zero, as a prepared table `titles`.

Built once by `auto_research.blocks.title_encoder`; adapters read it with `load_title_vectors(ctx.data("titles"))`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from auto_research.data.folder import read_manifest, read_tables, write_folder
from auto_research.runtime.errors import CorruptFile


def write_title_vectors(out: Path, vectors: np.ndarray, manifest: dict) -> dict:
    """Write float32[n_items + 1, width] as titles.parquet (items 1..n) and the manifest; returns the manifest."""
    return write_vectors(out, "titles", vectors, manifest)


def load_title_vectors(folder: Path | str) -> np.ndarray:
    """float32[n_items + 1, width] of a prepared `titles` folder, row 0 zero. Raises DataMissing, CorruptFile."""
    return read_vectors(folder, "titles")


def write_vectors(out: Path, name: str, vectors: np.ndarray, manifest: dict) -> dict:
    """Write float32[n_items + 1, width] as <name>.parquet (items 1..n) and the manifest; returns the manifest."""
    import pyarrow as pa

    items, width = len(vectors) - 1, vectors.shape[1]
    flat = pa.array(np.ascontiguousarray(vectors[1:], dtype=np.float32).ravel())
    columns = {
        "item": pa.array(range(1, items + 1), pa.int32()),
        "vector": pa.FixedSizeListArray.from_arrays(flat, width),
    }
    counts = {"items": items, "width": width}
    return write_folder(out, {name: pa.table(columns)}, {**manifest, "table": name, "counts": counts})


def read_vectors(folder: Path | str, name: str) -> np.ndarray:
    """float32[n_items + 1, width] of a folder written by `write_vectors`, row 0 zero. Raises DataMissing, CorruptFile."""
    folder = Path(folder)
    manifest = read_manifest(folder, f"python scripts/prepare_data.py --table {name}")
    table = read_tables(folder, (name,))[name]
    items, width = manifest["counts"]["items"], manifest["counts"]["width"]
    values = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if table["item"].to_pylist() != list(range(1, items + 1)) or len(values) != items * width:
        raise CorruptFile(f"{folder}: vectors do not match their manifest; delete it and prepare the data again")
    vectors = np.zeros((items + 1, width), dtype=np.float32)
    vectors[1:] = values.reshape(items, width)
    return vectors
