"""Which rows form a request, and which split each request belongs to.

A request is all ratings of one user at one second. Split by the fraction of the user's ratings that precede it: below
0.8 train, below 0.9 validation, else test. With fewer than five earlier ratings it only serves as history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from auto_research.data.interactions import Interactions

if TYPE_CHECKING:
    import pyarrow as pa

MIN_EARLIER = 5
SPLITS = ("train", "valid", "test")
HISTORY_ONLY = -1


@dataclass(frozen=True)
class RequestIndex:
    """Where the requests are: rows [start, stop) of the interactions; first = first row of the user; all int64[R].

    split: int8[R], position in SPLITS or HISTORY_ONLY; train_row: bool[N], rows with a fraction below 0.8.
    """

    user: np.ndarray
    time: np.ndarray
    first: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    split: np.ndarray
    train_row: np.ndarray

    @classmethod
    def build(cls, data: Interactions) -> RequestIndex:
        """Group canonical rows by (user, second) and split them; fractions are compared in whole numbers."""
        user, time = data.user.astype(np.int64), data.timestamp
        fresh = np.ones(len(user), dtype=bool)
        fresh[1:] = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
        start = np.flatnonzero(fresh).astype(np.int64)
        stop = np.append(start[1:], len(user)).astype(np.int64)
        starts = data.user_starts()
        owner = user[start]
        earlier = start - starts[owner]
        total = starts[owner + 1] - starts[owner]
        phase = (10 * earlier >= 8 * total).astype(np.int8) + (10 * earlier >= 9 * total).astype(np.int8)
        split = np.where(earlier < MIN_EARLIER, HISTORY_ONLY, phase).astype(np.int8)
        train_row = np.repeat(phase == 0, stop - start)
        return cls(owner, time[start], starts[owner], start, stop, split, train_row)

    def table(self) -> pa.Table:
        """Arrow table of the requests: user, timestamp, row range, split name, whether its rows are train rows."""
        import pyarrow as pa

        names = pa.array([*SPLITS, "history"])
        columns = {name: getattr(self, name).astype(np.int32) for name in ("user", "first", "start", "stop")}
        columns["timestamp"] = self.time
        columns["split"] = names.take(pa.array(np.where(self.split == HISTORY_ONLY, len(SPLITS), self.split)))
        columns["train_rows"] = self.train_row[self.start]
        return pa.table(columns)

    @classmethod
    def of_table(cls, table: pa.Table) -> RequestIndex:
        """Inverse of `table`."""
        column = {name: table[name].to_numpy() for name in table.column_names}
        user, first, start, stop = (column[name].astype(np.int64) for name in ("user", "first", "start", "stop"))
        code = {name: i for i, name in enumerate(SPLITS)}
        split = np.array([code.get(name, HISTORY_ONLY) for name in column["split"]], dtype=np.int8)
        train_row = np.repeat(column["train_rows"], stop - start)
        return cls(user, column["timestamp"], first, start, stop, split, train_row)
