"""Canonical interactions: one order, dense 1-based ids, and the side information of users and items.

Canonical order is (user, timestamp, sha256 hex of "<data set>:<user id>:<item id>" with the source's own ids). The
hash breaks ties inside a second without any information; item ids and file order would leak popularity and release
date into the sequence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from auto_research.data.folder import MANIFEST, read_manifest, read_tables, write_folder
from auto_research.data.readers import RawData, UserRecord
from auto_research.runtime.errors import CorruptFile

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = ("ratings", "users", "items")
AGE_EDGES = (18, 25, 35, 45, 50, 56)
GENRE_PREFIX = "genre_"


@dataclass(frozen=True)
class Interactions:
    """All ratings of a data set in canonical order. Ids are 1-based and dense, 0 is padding.

    user, item: int32[N]; rating: float32[N]; timestamp: int64[N] (seconds).
    user_fields: name -> int64[n_users + 1] (age 1..7, gender 1..2, occupation, zip 1..11); empty when unknown.
    item_genres: float32[n_items + 1, G] multi-hot (row 0 is zero); item_decade: int64[n_items + 1] (0 padding).
    vocab: sizes of the embedding tables of user fields and decades, padding included.
    """

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    timestamp: np.ndarray
    n_users: int
    n_items: int
    user_fields: dict[str, np.ndarray]
    item_genres: np.ndarray
    item_decade: np.ndarray
    item_title: list[str]
    genre_names: list[str]
    vocab: dict[str, int]
    dataset: str = ""

    def __len__(self) -> int:
        return len(self.user)

    def user_starts(self) -> np.ndarray:
        """int64[n_users + 2]: rows of user u are [starts[u], starts[u + 1]); starts[0] == starts[1] == 0."""
        return np.searchsorted(self.user, np.arange(self.n_users + 2)).astype(np.int64)

    def edited(self, **columns: np.ndarray) -> Interactions:
        """A copy with other values in some columns (tests and counterfactuals)."""
        return replace(self, **columns)


def order_hash(dataset: str, user_id: str, item_id: str) -> str:
    """The tie breaker inside a second: sha256 hex of the UTF-8 text `<data set>:<user id>:<item id>`."""
    return hashlib.sha256(f"{dataset}:{user_id}:{item_id}".encode()).hexdigest()


def dense_ids(values: list[str]) -> list[str]:
    """Distinct ids in the order of their dense number: by value when all are digits, else by text."""
    distinct = set(values)
    return sorted(distinct, key=int) if all(v.isdecimal() for v in distinct) else sorted(distinct)


def canonical_tables(raw: RawData, dataset: str) -> dict[str, pa.Table]:
    """Arrow tables `ratings` (canonical order), `users`, `items` of raw data. Independent of the file order."""
    import pyarrow as pa

    users, items = dense_ids(raw.user_id), dense_ids(raw.item_id)
    user_number = {name: i for i, name in enumerate(users, start=1)}
    item_number = {name: i for i, name in enumerate(items, start=1)}
    user = np.array([user_number[u] for u in raw.user_id], dtype=np.int32)
    item = np.array([item_number[i] for i in raw.item_id], dtype=np.int32)
    rating = np.array(raw.rating, dtype=np.float32)
    timestamp = np.array(raw.timestamp, dtype=np.int64)
    tie = np.array([order_hash(dataset, u, i) for u, i in zip(raw.user_id, raw.item_id, strict=True)], dtype="S64")
    order = np.lexsort((rating, tie, timestamp, user))
    ratings = pa.table(
        {"user": user[order], "item": item[order], "rating": rating[order], "timestamp": timestamp[order]}
    )
    return {
        "ratings": ratings,
        "users": _user_table(users, raw.users),
        "items": _item_table(items, raw),
    }


def _user_table(names: list[str], records: dict[str, UserRecord]) -> pa.Table:
    import pyarrow as pa

    columns = {"user": pa.array(range(1, len(names) + 1), pa.int32()), "user_id": pa.array(names, pa.string())}
    if records:
        rows = _look_up(names, records, "user")
        columns["age"] = pa.array([r.age for r in rows], pa.int16())
        for field in ("gender", "occupation", "zip"):
            columns[field] = pa.array([getattr(r, field) for r in rows], pa.string())
    return pa.table(columns)


def _item_table(names: list[str], raw: RawData) -> pa.Table:
    import pyarrow as pa

    columns = {"item": pa.array(range(1, len(names) + 1), pa.int32()), "item_id": pa.array(names, pa.string())}
    rows = _look_up(names, raw.items, "item") if raw.items else None
    columns["title"] = pa.array([r.title for r in rows] if rows else names, pa.string())
    columns["year"] = pa.array([r.year for r in rows] if rows else [0] * len(names), pa.int16())
    if rows:
        strange = {g for r in rows for g in r.genres} - set(raw.genre_names)
        if strange:
            raise CorruptFile(f"items have unknown genres: {', '.join(sorted(strange))}")
    for genre in raw.genre_names:
        flags = [int(genre in r.genres) for r in rows] if rows else [1] * len(names)
        columns[GENRE_PREFIX + genre] = pa.array(flags, pa.uint8())
    return pa.table(columns)


def _look_up(names: list[str], records: dict, what: str) -> list:
    missing = [name for name in names if name not in records]
    if missing:
        raise CorruptFile(f"{len(missing)} rated {what}s have no {what} record (first: {missing[0]})")
    return [records[name] for name in names]


def write_canonical(raw: RawData, dataset: str, out: Path, manifest: dict) -> dict:
    """Write the canonical folder of raw data; returns its manifest."""
    tables = canonical_tables(raw, dataset)
    counts = {
        "ratings": tables["ratings"].num_rows,
        "users": tables["users"].num_rows,
        "items": tables["items"].num_rows,
    }
    return write_folder(out, tables, {**manifest, "dataset": dataset, "table": "canonical", "counts": counts})


def canonical_folder(folder: Path) -> Path:
    """The canonical folder, given itself or the data set's folder above it."""
    inside = folder / "canonical"
    return inside if (inside / MANIFEST).is_file() and not (folder / MANIFEST).is_file() else folder


def load_interactions(folder: Path | str) -> Interactions:
    """Load a prepared folder that holds the canonical tables. Raises DataMissing, CorruptFile."""
    folder = canonical_folder(Path(folder))
    manifest = read_manifest(folder)
    tables = read_tables(folder, TABLES)
    return interactions_of(tables, manifest["dataset"], tuple(manifest["decades"]))


def interactions_of(tables: dict[str, pa.Table], dataset: str, decades: tuple[int, int]) -> Interactions:
    """Interactions of canonical tables. decades: first and last release decade; other years count as unknown."""
    ratings, users, items = (tables[name] for name in TABLES)
    column = {name: ratings[name].to_numpy() for name in ratings.column_names}
    genre_names = [n.removeprefix(GENRE_PREFIX) for n in items.column_names if n.startswith(GENRE_PREFIX)]
    genres = np.zeros((items.num_rows + 1, len(genre_names)), dtype=np.float32)
    for position, name in enumerate(genre_names):
        genres[1:, position] = items[GENRE_PREFIX + name].to_numpy()
    fields, vocab = _user_fields(users)
    decade, vocab["decade"] = _decade_codes(items["year"].to_numpy().astype(np.int64), decades)
    return Interactions(
        user=column["user"],
        item=column["item"],
        rating=column["rating"],
        timestamp=column["timestamp"],
        n_users=users.num_rows,
        n_items=items.num_rows,
        user_fields=fields,
        item_genres=genres,
        item_decade=decade,
        item_title=["", *items["title"].to_pylist()],
        genre_names=genre_names,
        vocab=vocab,
        dataset=dataset,
    )


def _decade_codes(year: np.ndarray, decades: tuple[int, int]) -> tuple[np.ndarray, int]:
    """0 padding, 1.. = first..last decade, last code = unknown; returns (int64[n + 1], size)."""
    first, last = decades
    unknown = (last - first) // 10 + 2
    known = (year >= first) & (year < last + 10)
    codes = np.where(known, (year - first) // 10 + 1, unknown)
    return np.concatenate([[0], codes]).astype(np.int64), unknown + 1


def _user_fields(users: pa.Table) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    if "age" not in users.column_names:
        return {}, {}
    age = np.searchsorted(AGE_EDGES, users["age"].to_numpy(), side="right") + 1
    occupations = sorted(set(users["occupation"].to_pylist()))
    number = {name: i for i, name in enumerate(occupations, start=1)}
    first = [code[:1] for code in users["zip"].to_pylist()]
    codes = {
        "age": age.tolist(),
        "gender": [{"F": 1, "M": 2}[g] for g in users["gender"].to_pylist()],
        "occupation": [number[name] for name in users["occupation"].to_pylist()],
        "zip": [int(c) + 1 if c.isdecimal() else 11 for c in first],
    }
    fields = {name: np.array([0, *values], dtype=np.int64) for name, values in codes.items()}
    vocab = {"age": len(AGE_EDGES) + 2, "gender": 3, "occupation": len(occupations) + 1, "zip": 12}
    return fields, vocab
