"""Windows of a user's events with all candidates of the requests they score: the samples of a generative ranker.

A window holds up to n consecutive train events of one user. The next one begins n/2 events before the end of the last
and scores what comes after it, so every train request is scored once and sees at least about n/2 - (events of a second)
earlier events where they exist. No window cuts a second. A request asked for alone (one request a sample, validation,
test, catalogue) sees the events from the start of the window that scores it when the user's chain goes on to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from auto_research.data.request_index import SPLITS
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.runtime.seeds import stable_rng

if TYPE_CHECKING:
    import torch

ORDINALS = 64  # requests of a window told apart


class Windows(NamedTuple):
    """Rows [start, stop) of every window, and the first row whose request it scores; int64[W]."""

    start: np.ndarray
    stop: np.ndarray
    scored: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: np.ndarray) -> Windows:
        return Windows(*(column[index] for column in self))


@dataclass
class WindowBatch(RequestBatch):
    """R requests with their P candidates, in B windows of L events (right-padded, oldest first).

    window_of, position (events of the window before the request), ordinal (of its second in the window), time:
    int64[R], requests of one window contiguous, every window with at least one request.
    event_item, event_rating, event_decade, event_position, event_ordinal, event_gap (log2 seconds between its request
    and the one before), event_time: int64[B, L]; event_popularity: float32[B, L, 2]; event_mask: bool[B, L].
    """

    window_of: torch.Tensor
    position: torch.Tensor
    ordinal: torch.Tensor
    time: torch.Tensor
    event_item: torch.Tensor
    event_rating: torch.Tensor
    event_decade: torch.Tensor
    event_position: torch.Tensor
    event_ordinal: torch.Tensor
    event_gap: torch.Tensor
    event_time: torch.Tensor
    event_popularity: torch.Tensor
    event_mask: torch.Tensor

    def to(self, device: torch.device | str) -> WindowBatch:
        """The same batch on a device."""
        return WindowBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def single_requests(self) -> WindowBatch:
        """The same requests, each in a window of its own that holds exactly what it may see."""
        names = [f.name for f in fields(self) if f.name.startswith("event_")]
        copies = {name: getattr(self, name)[self.window_of] for name in names}
        copies["event_mask"] = copies["event_mask"] & (copies["event_time"] < self.time.unsqueeze(1))
        own = self.window_of.new_tensor(range(len(self.window_of)))
        return replace(self, window_of=own, **copies)


class WindowTable(RequestTable):
    """Request table whose batches are `WindowBatch`es; `history` is n - 1, the most events a request can see."""

    @classmethod
    def of(cls, table: RequestTable) -> WindowTable:
        """The same table, restrictions included."""
        made = object.__new__(cls)
        made.__dict__.update(table.__dict__)
        made._prepare_rows()
        return made

    def _prepare_features(self) -> None:
        super()._prepare_features()
        self._prepare_rows()

    def _prepare_rows(self) -> None:
        size = self.index.stop - self.index.start
        self.row_request = np.repeat(np.arange(self.n_requests), size)
        self._window_starts: dict[int, np.ndarray] = {}

    def train_windows(self, length: int) -> Windows:
        """Windows of at most `length` train events, by user and time; those that score no train request are left out."""
        users = np.unique(self.request_user[self.requests("train")])
        found: list[tuple[int, int, int]] = []
        of_users = np.flatnonzero(np.isin(self.request_user, users) & self.index.train_row[self.index.start])
        for requests in np.split(of_users, np.flatnonzero(np.diff(self.request_user[of_users])) + 1):
            if len(requests):
                edges = np.append(self.index.start[requests], self.index.stop[requests[-1]])
                found += _windows(edges, length)
        windows = Windows(*np.array(found, dtype=np.int64).reshape(-1, 3).T)
        scores = [len(self.scored(windows, w)) > 0 for w in range(len(windows))]
        return windows.take(np.flatnonzero(scores))

    def scored(self, windows: Windows, w: int) -> np.ndarray:
        """Train requests that window w scores."""
        first, last = self.row_request[windows.scored[w]], self.row_request[windows.stop[w] - 1]
        requests = np.arange(first, last + 1)
        return requests[self.index.split[requests] == SPLITS.index("train")]

    def window_batch(self, windows: Windows, *, negatives: int, rng: np.random.Generator) -> WindowBatch:
        """The windows with all candidates of the requests they score."""
        scored = [self.scored(windows, w) for w in range(len(windows))]
        requests = np.concatenate(scored)
        window_of = np.repeat(np.arange(len(windows)), [len(s) for s in scored])
        base = self.batch(requests, history=0, negatives=negatives, rng=rng)
        length = int((windows.stop - windows.start).max())
        return replace(base, **self._events(requests, window_of, windows.start, windows.stop, length))

    def _assemble(self, requests: np.ndarray, history: int, pair: dict[str, np.ndarray]) -> WindowBatch:
        base = super()._assemble(requests, history, pair)
        start, stop = self._starts(history)[requests], self.index.start[requests]
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        return WindowBatch(**known, **self._events(requests, np.arange(len(requests)), start, stop, history))

    def _starts(self, history: int) -> np.ndarray:
        """First row every request sees in windows of history + 1 events, int64[all requests]; history 0: none.

        Those of train requests are the ones of `train_windows`: a window's start depends on the windows before it, and
        on whether the second it begins to score still fitted the last of them.
        """
        if history not in self._window_starts:
            start = self.index.start.copy()
            users = np.split(np.arange(self.n_requests), np.flatnonzero(np.diff(self.request_user)) + 1)
            for requests in users if history else []:
                firsts = self.index.start[requests]
                for begin, stop, scored in _windows(np.append(firsts, self.index.stop[requests[-1]]), history + 1):
                    start[requests[(firsts >= scored) & (firsts < stop)]] = begin
            self._window_starts[history] = start
        return self._window_starts[history]

    def longest_request(self, items: np.ndarray, length: int) -> WindowBatch:
        """Candidates int64[P] of the test request with most earlier events, after exactly its last `length` of them.

        No padding (fewer events where the user has fewer): the batch for timing.
        """
        tests = self.requests("test")
        requests = tests[[np.argmax(self.index.start[tests] - self.index.first[tests])]]
        stop = self.index.start[requests]
        start = np.maximum(self.index.first[requests], stop - length)
        base = self.score_batch(int(requests[0]), items, history=0)
        return replace(base, **self._events(requests, np.zeros(1, dtype=np.int64), start, stop, int((stop - start)[0])))

    def _events(
        self, requests: np.ndarray, window_of: np.ndarray, start: np.ndarray, stop: np.ndarray, length: int
    ) -> dict[str, torch.Tensor]:
        import torch

        row = start[:, None] + np.arange(length)[None, :]
        mask = row < stop[:, None]
        row = np.where(mask, row, 0)
        item, request = self._item[row], self.row_request[row]
        first = self.row_request[np.minimum(start, len(self.row_request) - 1)]
        columns = {
            "item": item,
            "rating": np.rint(self._rating[row]).astype(np.int64),
            "decade": self.interactions.item_decade[item],
            "position": np.broadcast_to(np.arange(length), row.shape),
            "ordinal": np.minimum(request - first[:, None], ORDINALS - 1),
            "gap": self._gap[request],
            "time": self.interactions.timestamp[row],
            "popularity": self._row_popularity[row],
        }
        shaped = {"popularity": mask[..., None]}
        events = {
            f"event_{name}": np.where(shaped.get(name, mask), c, 0).astype(c.dtype) for name, c in columns.items()
        }
        places = {
            "window_of": window_of,
            "position": self.index.start[requests] - start[window_of],
            "ordinal": np.minimum(requests - first[window_of], ORDINALS - 1),
            "time": self.request_time[requests],
        }
        arrays = {**places, **events, "event_mask": mask}
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}


def _windows(edges: np.ndarray, length: int) -> list[tuple[int, int, int]]:
    """(start, stop, scored) over rows edges[0] .. edges[-1]; edges: first rows of the seconds, and the end."""
    found = []
    start = scored = int(edges[0])
    while scored < edges[-1]:
        stop = int(edges[np.searchsorted(edges, start + length, side="right") - 1])
        if stop <= scored:  # one second longer than half a window: the window gives way, the second is not cut
            stop = int(edges[np.searchsorted(edges, scored, side="right")])
        found.append((start, stop, scored))
        scored = stop
        start = int(edges[np.searchsorted(edges, stop - length // 2)])
    return found


class EpochWindows:
    """Batches of one epoch: windows in a new order, negatives drawn anew, both functions of (seed, epoch, index)."""

    def __init__(
        self, table: WindowTable, windows: Windows, *, batch: int, negatives: int, seed: int, epoch: int, device
    ):
        self.table, self.batch, self.negatives, self.device = table, batch, negatives, device
        self.key = (seed, epoch)
        self.windows = windows.take(stable_rng("window-order", seed, epoch).permutation(len(windows)))

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch)

    def __getitem__(self, index: int) -> WindowBatch:
        chosen = self.windows.take(slice(index * self.batch, (index + 1) * self.batch))
        rng = stable_rng("window-negatives", *self.key, index)
        return self.table.window_batch(chosen, negatives=self.negatives, rng=rng).to(self.device)
