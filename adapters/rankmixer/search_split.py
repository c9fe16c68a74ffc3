"""Data split of the search: development rows (train and validation) apart from the sealed test. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from auto_research.data.folder import read_manifest, read_tables, write_folder
from auto_research.data.interactions import TABLES
from auto_research.data.request_index import RequestIndex
from auto_research.runtime.errors import RunFailure

TABLE = "requests"


def prepare(config: dict, source: Callable[[str], Path], dev: Path, sealed: Path) -> None:
    """Write dev/requests (every row before a user's test part) and sealed/requests (test rows with their histories)."""
    folder = source(TABLE)
    manifest = {key: value for key, value in read_manifest(folder).items() if key not in ("files", "counts")}
    tables = read_tables(folder, (*TABLES, TABLE))
    index = RequestIndex.of_table(tables[TABLE])
    kept, rows = development_rows(index, tables["ratings"].num_rows)
    write_folder(
        dev / TABLE,
        {
            **{name: tables[name] for name in TABLES},
            "ratings": tables["ratings"].filter(rows),
            TABLE: renumbered(index, kept, rows).table(),
        },
        {**manifest, "part": "train and validation"},
    )
    write_folder(sealed / TABLE, tables, {**manifest, "part": "test rows with their histories"})


def development_rows(index: RequestIndex, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(bool[R] requests, bool[N] rating rows) whose fraction of earlier ratings of the user is below 0.9."""
    total = np.zeros(int(index.user.max()) + 1, dtype=np.int64)
    np.add.at(total, index.user, index.stop - index.start)
    kept = 10 * (index.start - index.first) < 9 * total[index.user]
    rows = np.repeat(kept, index.stop - index.start)
    if len(rows) != n_rows:
        raise RunFailure(f"request index covers {len(rows)} of {n_rows} ratings")
    return kept, rows


def renumbered(index: RequestIndex, kept: np.ndarray, rows: np.ndarray) -> RequestIndex:
    """The kept requests with row numbers of the filtered ratings."""
    position = np.concatenate([[0], np.cumsum(rows)])
    return RequestIndex(
        index.user[kept],
        index.time[kept],
        position[index.first[kept]],
        position[index.start[kept]],
        position[index.stop[kept]],
        index.split[kept],
        index.train_row[rows],
    )
