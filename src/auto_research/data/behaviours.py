"""Two behaviour sequences per request, liked events and others, and the time between an event and the one before it.

Cards hyformer and onetrans split the history by the sign of the rating (liked: rating >= 4), the newest L events of
each; cards onetrans and ccformer need the gap to the previous event in place of the age, which changes with every
request and so forbids caching across requests. All under the rule of the request table: strictly earlier seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from auto_research.data.prefix import LIKE_RATING, LOG_BUCKETS, log2_bucket
from auto_research.data.requests import RequestBatch, RequestTable

if TYPE_CHECKING:
    import torch

FIRST_GAP = LOG_BUCKETS - 1  # bucket of a user's very first rating


class EventWindow(NamedTuple):
    """One sequence of R requests, [R, L], left-padded, oldest first.

    item, rating (1..5), age and gap (log2 buckets 0..31 of seconds before the request, and after the user's previous
    rating of either sign): int64, 0 at padding. row: int64 position among all ratings, ascending with canonical order
    inside a user, -1 at padding. mask: bool.
    """

    item: torch.Tensor
    rating: torch.Tensor
    age: torch.Tensor
    gap: torch.Tensor
    row: torch.Tensor
    mask: torch.Tensor


@dataclass
class BehaviourBatch(RequestBatch):
    """A `RequestBatch` with the windows of liked and other events and the gaps of the whole history, all [R, L]."""

    hist_gap: torch.Tensor
    hist_row: torch.Tensor
    liked_item: torch.Tensor
    liked_rating: torch.Tensor
    liked_age: torch.Tensor
    liked_gap: torch.Tensor
    liked_row: torch.Tensor
    liked_mask: torch.Tensor
    other_item: torch.Tensor
    other_rating: torch.Tensor
    other_age: torch.Tensor
    other_gap: torch.Tensor
    other_row: torch.Tensor
    other_mask: torch.Tensor

    def window(self, name: str) -> EventWindow:
        """The sequence 'liked', 'other' or 'hist' (all events)."""
        return EventWindow(*(getattr(self, f"{name}_{field}") for field in EventWindow._fields))

    def to(self, device: torch.device | str) -> BehaviourBatch:
        """The same batch on a device."""
        return BehaviourBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def interleave(one: EventWindow, other: EventWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the events of two sequences by time: int64[R, La + Lb] into their concatenation, and its mask.

    Padding comes first, then canonical order. x of both windows: `torch.cat([a, b], 1).gather(1, order)`.
    """
    import torch

    row, mask = torch.cat([one.row, other.row], dim=1), torch.cat([one.mask, other.mask], dim=1)
    order = torch.argsort(row, dim=1, stable=True)
    return order, mask.gather(1, order)


class BehaviourTable(RequestTable):
    """Request table whose batches are `BehaviourBatch`es; `history` is the length of each sequence.

    `BehaviourTable.of(load_requests(ctx))` goes to `train_ctr(..., table=...)`.
    """

    @classmethod
    def of(cls, table: RequestTable) -> BehaviourTable:
        """The same table, restrictions included."""
        made = object.__new__(cls)
        made.__dict__.update(table.__dict__)
        made._prepare_behaviours()
        return made

    def _prepare_features(self) -> None:
        super()._prepare_features()
        self._prepare_behaviours()

    def _prepare_behaviours(self) -> None:
        data = self.interactions
        liked = data.rating >= LIKE_RATING
        self._rows_of = {"liked": np.flatnonzero(liked), "other": np.flatnonzero(~liked), "hist": np.arange(len(liked))}
        fresh = np.ones(len(liked), dtype=bool)
        fresh[1:] = data.user[1:] != data.user[:-1]
        since = np.diff(data.timestamp, prepend=data.timestamp[:1])
        self._event_gap = np.where(fresh, FIRST_GAP, log2_bucket(np.where(fresh, 0, since)))

    def _window(self, name: str, requests: np.ndarray, length: int) -> dict[str, np.ndarray]:
        rows = self._rows_of[name]
        stop = np.searchsorted(rows, self.index.start[requests])
        first = np.searchsorted(rows, self.index.first[requests])
        at = stop[:, None] + np.arange(-length, 0)[None, :]
        mask = at >= first[:, None]
        row = rows[np.where(mask, at, 0)] if len(rows) else np.zeros_like(at)
        age = self.request_time[requests][:, None] - self.interactions.timestamp[row]
        columns = {
            "item": self._item[row],
            "rating": np.rint(self._rating[row]).astype(np.int64),
            "age": log2_bucket(np.where(mask, age, 0)),
            "gap": self._event_gap[row],
        }
        columns = {field: np.where(mask, values, 0) for field, values in columns.items()}
        return {f"{name}_{f}": c for f, c in {**columns, "row": np.where(mask, row, -1), "mask": mask}.items()}

    def _assemble(self, requests: np.ndarray, history: int, pair: dict[str, np.ndarray]) -> BehaviourBatch:
        import torch

        base = super()._assemble(requests, history, pair)
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        extra: dict[str, np.ndarray] = {}
        for name in self._rows_of:
            extra |= self._window(name, requests, history)
        extra = {name: torch.from_numpy(np.ascontiguousarray(c)) for name, c in extra.items() if name not in known}
        return BehaviourBatch(**known, **extra)
