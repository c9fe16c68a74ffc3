"""What Mosaic adds to the request table: the label dislike, exported user vectors, row ranges, surfaces and authors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from auto_research.data.behaviours import BehaviourBatch, BehaviourTable
from auto_research.data.interactions import Interactions
from auto_research.data.requests import RequestTable

DISLIKE_RATING = 2
SURFACES = ("drama", "comedy", "rest")  # by the first matching genre; a film with both is drama


@dataclass
class MosaicBatch(BehaviourBatch):
    """A `BehaviourBatch` with dislike float32[P] and, where the table has them, exported vectors float32[R, K, D]."""

    dislike: Tensor
    vectors: Tensor | None = None

    def to(self, device: torch.device | str) -> MosaicBatch:
        """The same batch on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MosaicBatch(**{name: x if x is None else x.to(device) for name, x in values.items()})


class MosaicTable(BehaviourTable):
    """Request table of `MosaicBatch`es.

    `of(table)` keeps its restrictions; `between(low, high)` has other train rows; `reading(vectors)` attaches exported
    vectors to the batches of rated rows. Batches of arbitrary candidates never carry vectors: the model computes them.
    """

    vectors: np.ndarray | None = None  # float32[n_requests, K, D]
    row_of: np.ndarray | None = (
        None  # int64[n_requests]: whose vector a request reads (itself, unless exports are stale)
    )

    def _prepare_behaviours(self) -> None:
        super()._prepare_behaviours()
        data = self.interactions
        self._rating_of = np.zeros((data.n_users + 1, data.n_items + 1), dtype=np.int8)
        self._rating_of[data.user, data.item] = np.rint(data.rating)

    def _assemble(self, requests: np.ndarray, history: int, pair: dict[str, np.ndarray]) -> MosaicBatch:
        base = super()._assemble(requests, history, pair)
        rating = self._rating_of[base.user_of_pair.numpy(), pair["item"]]
        dislike = torch.from_numpy((pair["rated"] & (rating <= DISLIKE_RATING)).astype(np.float32))
        vectors = None
        if self.vectors is not None and pair["rated"].any():
            rows = requests if self.row_of is None else self.row_of[requests]
            vectors = torch.from_numpy(self.vectors[rows])
        return MosaicBatch(**{f.name: getattr(base, f.name) for f in fields(base)}, dislike=dislike, vectors=vectors)

    def between(self, low: float, high: float) -> MosaicTable:
        """The same table whose train requests have a fraction of earlier ratings in [low, high)."""
        table = self._copy()
        fraction = earlier_fraction(self)[self.requests("train")]
        chosen = self.requests("train")[(fraction >= low) & (fraction < high)]
        table._split = {**self._split, "train": chosen}
        return table

    def reading(self, vectors: np.ndarray, stale: bool = False) -> MosaicTable:
        """Batches of rated rows carry vectors[request]; stale: those of the user's first request of the split."""
        table = self._copy()
        table.vectors, table.row_of = vectors, first_of_split(self) if stale else None
        return table

    def _copy(self) -> MosaicTable:
        table = object.__new__(type(self))
        table.__dict__.update(self.__dict__)
        return table


def earlier_fraction(table: RequestTable) -> np.ndarray:
    """float64[n_requests]: share of the user's ratings before the request."""
    index = table.index
    total = np.bincount(table.interactions.user, minlength=table.interactions.n_users + 1)
    return (index.start - index.first) / total[index.user]


def first_of_split(table: RequestTable) -> np.ndarray:
    """int64[n_requests]: the user's first request of validation or test for requests of those, else the request."""
    rows = np.arange(table.n_requests)
    for split in ("valid", "test"):
        requests = table.requests(split)
        _, first, inverse = np.unique(table.request_user[requests], return_index=True, return_inverse=True)
        rows[requests] = requests[first][inverse]
    return rows


def item_surfaces(item_genres: np.ndarray, genre_names: Sequence[str]) -> np.ndarray:
    """int64[n_items + 1]: 0 drama, 1 comedy, 2 rest. Genres are found by name; without the name nothing is on it."""
    surface = np.full(len(item_genres), len(SURFACES) - 1, dtype=np.int64)
    names = [name.lower() for name in genre_names]
    for position in (1, 0):  # drama last, so that it wins
        if SURFACES[position] in names:
            surface[item_genres[:, names.index(SURFACES[position])] > 0] = position
    return surface


def item_authors(data: Interactions) -> tuple[np.ndarray, int]:
    """(author int64[n_items + 1], number of authors + 1): one id per distinct (genre set, decade), 0 for padding."""
    keys = np.column_stack([data.item_genres, data.item_decade])[1:]
    _, author = np.unique(keys, axis=0, return_inverse=True)
    return np.concatenate([[0], author.reshape(-1) + 1]).astype(np.int64), int(author.max()) + 2


def label_matrix(batch: MosaicBatch) -> Tensor:
    """engage, like, love, dislike of every pair, float32[P, 4]."""
    return torch.stack([batch.engage, batch.like, batch.love, batch.dislike], dim=1)


def rated_labels(table: RequestTable) -> np.ndarray:
    """int64[N, 3] like, love, dislike of the rated rows of the table's train requests."""
    index, requests = table.index, table.requests("train")
    size = index.stop[requests] - index.start[requests]
    row = np.repeat(index.start[requests], size) + np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    return labels_of(table.interactions.rating[row])


def labels_of(rating: np.ndarray) -> np.ndarray:
    """int64[N, 3]: like (4 and 5), love (5), dislike (1 and 2)."""
    rating = np.rint(rating)
    return np.column_stack([rating >= 4, rating >= 5, rating <= DISLIKE_RATING]).astype(np.int64)
