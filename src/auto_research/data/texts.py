"""Item texts "<title>. Genres: <list>" through a frozen encoder, as two prepared tables.

`texts`: one vector per item, masked mean and length 1; `load_text_vectors(ctx.data("texts"))`.
`text_states`: the last hidden state of every word piece; `load_text_states(ctx.data("text_states"))`.
Both are built once by `auto_research.blocks.title_encoder`. Row 0, the padding item, is zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from auto_research.data.folder import read_manifest, read_tables, write_folder
from auto_research.data.titles import read_vectors, write_vectors
from auto_research.runtime.errors import CorruptFile

COMMAND = "python scripts/prepare_data.py --table {}"


def write_text_vectors(out: Path, vectors: np.ndarray, manifest: dict) -> dict:
    """Write float32[n_items + 1, width] as texts.parquet (items 1..n) and the manifest; returns the manifest."""
    return write_vectors(out, "texts", vectors, manifest)


def load_text_vectors(folder: Path | str) -> np.ndarray:
    """float32[n_items + 1, width] of a prepared `texts` folder, row 0 zero. Raises DataMissing, CorruptFile."""
    return read_vectors(folder, "texts")


def write_text_states(out: Path, states: np.ndarray, mask: np.ndarray, manifest: dict) -> dict:
    """Write states float32[n_items + 1, T, width] where mask bool[n_items + 1, T] (filled from the left), and the
    manifest; returns the manifest."""
    import pyarrow as pa

    lengths = mask[1:].sum(1)
    if not np.array_equal(mask[1:], np.arange(mask.shape[1]) < lengths[:, None]) or mask[0].any():
        raise ValueError("token masks must be filled from the left, and empty for the padding item")
    items, width = len(lengths), states.shape[2]
    flat = np.ascontiguousarray(states[1:][mask[1:]], dtype=np.float32)
    tables = {
        "tokens": pa.table(
            {"item": pa.array(range(1, items + 1), pa.int32()), "tokens": pa.array(lengths, pa.int32())}
        ),
        "states": pa.table({"state": pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), width)}),
    }
    counts = {"items": items, "width": width, "tokens": int(lengths.sum())}
    return write_folder(out, tables, {**manifest, "table": "text_states", "counts": counts})


def load_text_states(folder: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """float32[n_items + 1, T, width] and mask bool[n_items + 1, T] of a prepared `text_states` folder.

    T is the longest text; states under the mask and row 0 are zero. Raises DataMissing, CorruptFile.
    """
    folder = Path(folder)
    counts = read_manifest(folder, COMMAND.format("text_states"))["counts"]
    tables = read_tables(folder, ("tokens", "states"))
    lengths = tables["tokens"]["tokens"].to_numpy().astype(np.int64)
    flat = tables["states"]["state"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    right = tables["tokens"]["item"].to_pylist() == list(range(1, counts["items"] + 1))
    if not right or lengths.sum() != counts["tokens"] or len(flat) != counts["tokens"] * counts["width"]:
        raise CorruptFile(f"{folder}: token states do not match their manifest; delete it and prepare the data again")
    lengths = np.concatenate([[0], lengths])
    mask = np.arange(lengths.max()) < lengths[:, None]
    states = np.zeros((*mask.shape, counts["width"]), dtype=np.float32)
    states[mask] = flat.reshape(-1, counts["width"])
    return states, mask
