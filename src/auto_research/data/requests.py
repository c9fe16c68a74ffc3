"""The request table: all ratings of one user at one second form a request; features see strictly earlier ratings.

Protocol of the cards rankmixer and din. Split by the fraction of the user's ratings that precede the request:
below 0.8 train, below 0.9 validation, else test; requests with fewer than five earlier ratings only serve as history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from auto_research.data.folder import read_manifest, read_tables, write_folder
from auto_research.data.interactions import TABLES, Interactions, interactions_of
from auto_research.data.prefix import (
    LIKE_RATING,
    LOG_BUCKETS,
    LOVE_RATING,
    ItemPrefix,
    UnratedItems,
    UserPrefix,
    cross_features,
    log2_bucket,
    user_prefix,
)
from auto_research.data.request_index import SPLITS, RequestIndex
from auto_research.data.sequences import fixed_user_order, head_items
from auto_research.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

USER_FIELDS = ("age", "gender", "occupation", "zip")


@dataclass
class RequestBatch:
    """R requests with P candidate pairs (pairs of a request contiguous) and L history slots; torch tensors.

    user_id age gender occupation zip hour weekday gap: int64[R]; user_stats: float32[R, 3 + G];
    hist_item hist_rating hist_age: int64[R, L] left-padded, oldest first; hist_mask: bool[R, L];
    request_of item decade user_of_pair: int64[P]; popularity cross: float32[P, 2];
    engage like love: float32[P]; rated: bool[P] (False for negatives and arbitrary candidates, whose like and love
    are 0 and never count).
    """

    user_id: torch.Tensor
    age: torch.Tensor
    gender: torch.Tensor
    occupation: torch.Tensor
    zip: torch.Tensor
    hour: torch.Tensor
    weekday: torch.Tensor
    gap: torch.Tensor
    user_stats: torch.Tensor
    hist_item: torch.Tensor
    hist_rating: torch.Tensor
    hist_age: torch.Tensor
    hist_mask: torch.Tensor
    request_of: torch.Tensor
    item: torch.Tensor
    decade: torch.Tensor
    popularity: torch.Tensor
    cross: torch.Tensor
    engage: torch.Tensor
    like: torch.Tensor
    love: torch.Tensor
    rated: torch.Tensor
    user_of_pair: torch.Tensor

    def to(self, device: torch.device | str) -> RequestBatch:
        """The same batch on a device."""
        return RequestBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def pairs(self) -> int:
        """Number of candidate pairs P."""
        return int(self.item.shape[0])


@dataclass(frozen=True)
class CatalogueTasks:
    """Full-catalogue retrieval, one task per user: rank `target` among all items minus `excluded`, as of `request`.

    user, request, target: int64[U]; excluded: U arrays of int64 item ids rated at an earlier second.
    """

    user: np.ndarray
    request: np.ndarray
    target: np.ndarray
    excluded: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.user)


class RequestTable:
    """Requests of a data set with their strict-past features; batches are built on demand, vectorised.

    interactions: all ratings; n_requests: R; request_user, request_time: int64[R]; vocab: sizes of the embedding
    tables by batch field, padding included; item_genres: float32[n_items + 1, G]; genre_names.
    """

    def __init__(self, data: Interactions, index: RequestIndex | None = None):
        self.interactions = data
        self.index = RequestIndex.build(data) if index is None else index
        self.request_user, self.request_time = self.index.user, self.index.time
        self.n_requests = len(self.index.user)
        self.item_genres = data.item_genres
        self.genre_names = data.genre_names
        self._split = {name: np.flatnonzero(self.index.split == code) for code, name in enumerate(SPLITS)}
        self._prepare_features()

    @classmethod
    def build(cls, data: Interactions) -> RequestTable:
        """Table of canonical interactions."""
        return cls(data)

    @classmethod
    def load(cls, folder: Path | str) -> RequestTable:
        """Load a prepared `requests` folder. Raises DataMissing, CorruptFile."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        tables = read_tables(folder, (*TABLES, "requests"))
        data = interactions_of(tables, manifest["dataset"], tuple(manifest["decades"]))
        return cls(data, RequestIndex.of_table(tables["requests"]))

    def _prepare_features(self) -> None:
        data, index = self.interactions, self.index
        self._item = data.item.astype(np.int64)
        self._rating = data.rating
        self._prefix: UserPrefix = user_prefix(data, index.first, index.start)
        self._popularity = ItemPrefix(data, index.train_row)
        self._unrated = UnratedItems(data, index.train_row)
        self._genres = data.item_genres.astype(np.float64)
        self._fields = {
            name: data.user_fields.get(name, np.zeros(data.n_users + 1, dtype=np.int64)) for name in USER_FIELDS
        }
        has_earlier = index.start > index.first
        previous = np.where(has_earlier, data.timestamp[index.start - 1], index.time)
        self._gap = log2_bucket(index.time - previous)
        self._hour = (index.time // 3600) % 24
        self._weekday = (index.time // 86400 + 3) % 7  # 1970-01-01 was a Thursday; Monday = 0
        length = index.stop - index.start
        row_request = np.repeat(np.arange(self.n_requests), length)
        self._row_popularity = self._popularity.popularity(self._item, data.timestamp)
        self._row_cross = self._cross(row_request, self._item)

    def _cross(self, request: np.ndarray, item: np.ndarray) -> np.ndarray:
        prefix = self._prefix
        return cross_features(prefix.genre_rate[request], prefix.liked_genres[request], self._genres[item])

    @property
    def vocab(self) -> dict[str, int]:
        """Embedding sizes by batch field name, padding included."""
        data = self.interactions
        sizes = {name: data.vocab.get(name, 1) for name in USER_FIELDS}
        return {
            "user_id": data.n_users + 1,
            **sizes,
            "hour": 24,
            "weekday": 7,
            "gap": LOG_BUCKETS,
            "item": data.n_items + 1,
            "decade": data.vocab["decade"],
            "hist_item": data.n_items + 1,
            "hist_rating": 6,
            "hist_age": LOG_BUCKETS,
        }

    def requests(self, split: str) -> np.ndarray:
        """int64 request numbers of 'train', 'valid' or 'test', by user and time."""
        if split not in self._split:
            raise ConfigError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
        return self._split[split]

    def rows(self, split: str) -> int:
        """Number of rated target rows of a split."""
        chosen = self.requests(split)
        return int((self.index.stop[chosen] - self.index.start[chosen]).sum())

    def restrict(self, users: int, test_rows: int | None = None) -> RequestTable:
        """The first `users` users of a fixed shuffle; test may be cut to whole users with about `test_rows` rows.

        Ids, vocabulary, prefix statistics and negatives stay those of the full table.
        """
        order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)[:users]
        table = object.__new__(type(self))
        table.__dict__.update(self.__dict__)
        table._split = {name: r[np.isin(self.request_user[r], order)] for name, r in self._split.items()}
        if test_rows is not None:
            table._split["test"] = self._whole_users(table._split["test"], order, test_rows)
        return table

    def _whole_users(self, requests: np.ndarray, order: np.ndarray, rows: int) -> np.ndarray:
        size = self.index.stop[requests] - self.index.start[requests]
        per_user = np.bincount(self.request_user[requests], weights=size, minlength=self.interactions.n_users + 1)
        before = np.concatenate([[0], np.cumsum(per_user[order])[:-1]])
        return requests[np.isin(self.request_user[requests], order[before < rows])]

    def train_rows(self) -> np.ndarray:
        """int64 interaction rows with a fraction below 0.8 (the first five of a user included), all users."""
        return np.flatnonzero(self.index.train_row)

    def train_counts(self) -> np.ndarray:
        """int64[n_items + 1] train rows of every item."""
        items = self._item[self.index.train_row]
        return np.bincount(items, minlength=self.interactions.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        """int64 ids of the 10% most rated train items, ascending."""
        return head_items(self.train_counts())

    def batch(
        self,
        requests: Sequence[int] | np.ndarray,
        *,
        history: int,
        negatives: int = 0,
        rng: np.random.Generator | None = None,
    ) -> RequestBatch:
        """Rated rows of the requests, each request followed by `negatives` drawn items per rated item.

        negatives > 0 needs `rng`; they carry their own popularity and cross features as of the request.
        """
        requests = np.asarray(requests, dtype=np.int64)
        size = self.index.stop[requests] - self.index.start[requests]
        rated_of = np.repeat(np.arange(len(requests)), size)
        within = np.arange(len(rated_of)) - np.repeat(np.cumsum(size) - size, size)
        row = self.index.start[requests][rated_of] + within
        pair = {
            "request_of": rated_of,
            "item": self._item[row],
            "popularity": self._row_popularity[row],
            "cross": self._row_cross[row],
            "engage": np.ones(len(row), dtype=np.float32),
            "like": (self._rating[row] >= LIKE_RATING).astype(np.float32),
            "love": (self._rating[row] >= LOVE_RATING).astype(np.float32),
            "rated": np.ones(len(row), dtype=bool),
        }
        if negatives:
            pair = self._with_negatives(requests, size * negatives, pair, rng)
        return self._assemble(requests, history, pair)

    def _with_negatives(
        self, requests: np.ndarray, count: np.ndarray, pair: dict[str, np.ndarray], rng: np.random.Generator | None
    ) -> dict[str, np.ndarray]:
        if rng is None:
            raise ConfigError("batch(negatives=...) needs a seeded generator")
        request_of = np.repeat(np.arange(len(requests)), count)
        item = self._unrated.draw(self.request_user[requests][request_of], rng)
        drawn = self._candidates(requests, request_of, item)
        order = np.argsort(np.concatenate([pair["request_of"], request_of]), kind="stable")
        return {name: np.concatenate([pair[name], drawn[name]])[order] for name in pair}

    def score_batch(self, request: int, items: Sequence[int] | np.ndarray, *, history: int) -> RequestBatch:
        """Arbitrary candidate items of one request, as of its time; labels are 0 and `rated` is False."""
        requests = np.array([request], dtype=np.int64)
        item = np.asarray(items, dtype=np.int64)
        pair = self._candidates(requests, np.zeros(len(item), dtype=np.int64), item)
        return self._assemble(requests, history, pair)

    def _candidates(self, requests: np.ndarray, request_of: np.ndarray, item: np.ndarray) -> dict[str, np.ndarray]:
        absolute = requests[request_of]
        zero = np.zeros(len(item), dtype=np.float32)
        return {
            "request_of": request_of,
            "item": item,
            "popularity": self._popularity.popularity(item, self.request_time[absolute]),
            "cross": self._cross(absolute, item),
            "engage": zero,
            "like": zero,
            "love": zero,
            "rated": np.zeros(len(item), dtype=bool),
        }

    def _assemble(self, requests: np.ndarray, history: int, pair: dict[str, np.ndarray]) -> RequestBatch:
        import torch

        user = self.request_user[requests]
        columns = {
            "user_id": user,
            **{name: self._fields[name][user] for name in USER_FIELDS},
            "hour": self._hour[requests],
            "weekday": self._weekday[requests],
            "gap": self._gap[requests],
            "user_stats": self._prefix.stats[requests],
            **self._history(requests, history),
            **pair,
            "decade": self.interactions.item_decade[pair["item"]],
            "user_of_pair": user[pair["request_of"]],
        }
        return RequestBatch(**{name: torch.from_numpy(np.ascontiguousarray(c)) for name, c in columns.items()})

    def _history(self, requests: np.ndarray, length: int) -> dict[str, np.ndarray]:
        row = self.index.start[requests][:, None] + np.arange(-length, 0)[None, :]
        mask = row >= self.index.first[requests][:, None]
        row = np.where(mask, row, 0)
        age = log2_bucket(np.where(mask, self.request_time[requests][:, None] - self.interactions.timestamp[row], 0))
        return {
            "hist_item": np.where(mask, self._item[row], 0),
            "hist_rating": np.where(mask, np.rint(self._rating[row]).astype(np.int64), 0),
            "hist_age": np.where(mask, age, 0),
            "hist_mask": mask,
        }

    def catalogue_tasks(self, split: str, users: int | None = None) -> CatalogueTasks:
        """Per user of the split (the first `users` of the fixed shuffle) its first liked item in canonical order."""
        requests = self.requests(split)
        size = self.index.stop[requests] - self.index.start[requests]
        request = np.repeat(requests, size)
        within = np.arange(len(request)) - np.repeat(np.cumsum(size) - size, size)
        row = self.index.start[request] + within
        liked = np.flatnonzero(self._rating[row] >= LIKE_RATING)
        user, position = np.unique(self.request_user[request[liked]], return_index=True)
        chosen = liked[position]
        if users is not None:
            order = fixed_user_order(self.interactions.dataset, self.interactions.n_users)
            wanted = order[np.isin(order, user)][:users]
            keep = np.isin(user, wanted)
            user, chosen = user[keep], chosen[keep]
        tasks = request[chosen]
        excluded = [
            np.unique(self._item[a:b]) for a, b in zip(self.index.first[tasks], self.index.start[tasks], strict=True)
        ]
        return CatalogueTasks(user, tasks, self._item[row[chosen]], excluded)

    def edited(self, **columns: np.ndarray) -> RequestTable:
        """A table with other ratings or items but the same rows and splits (counterfactual and leakage checks)."""
        return type(self)(self.interactions.edited(**columns), replace(self.index))


def write_folder_of(canonical: Path, out: Path, manifest: dict) -> dict:
    """Write the request table of a canonical folder: its tables copied, and the request index; returns the manifest."""
    tables = read_tables(canonical, TABLES)
    data = interactions_of(tables, manifest["dataset"], tuple(manifest["decades"]))
    index = RequestIndex.build(data)
    table = RequestTable(data, index)
    counts = {"requests": table.n_requests}
    for name in SPLITS:
        counts[f"{name}_requests"], counts[f"{name}_rows"] = len(table.requests(name)), table.rows(name)
    return write_folder(out, {**tables, "requests": index.table()}, {**manifest, "counts": counts})
