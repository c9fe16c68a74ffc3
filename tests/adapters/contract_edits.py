"""Counterfactual data: what a model must not see, and what it must, edited."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol, runtime_checkable

import numpy as np

from auto_research.blocks.title_encoder import ENCODED
from auto_research.data.folder import read_manifest, read_tables, write_folder
from auto_research.data.interactions import TABLES, Interactions
from auto_research.data.prepare import DERIVED, prepare_table
from auto_research.data.request_index import SPLITS
from auto_research.data.requests import RequestTable
from auto_research.data.sequences import MIN_EVENTS, LeaveTwoOut
from auto_research.experiment.layout import CHECKPOINTS

CANDIDATES = 24


@runtime_checkable
class OwnSplit(Protocol):
    """A split that an adapter makes itself out of canonical interactions; `len` counts the users that are scored.

    Its arms show it to the observer as `data`, with `score(data, split, positions) -> [B, n_items + 1]`, positions being
    int64[B] of its users. A split that cuts the canonical order by position, as leave-two-out does, has
    `inside_seconds = True`: its cuts may lie between two ratings of one second, whose order holds no information.
    A split whose targets move when ratings are mirrored on the scale may have `other_ratings() -> float32[N]`, what edits
    put in place of a rating.
    """

    interactions: Interactions

    def __len__(self) -> int: ...

    def hidden(self, split: str) -> np.ndarray:
        """bool[N] rows of the scored users that no score of 'valid' or 'test' may depend on: all from some second on."""

    def tested(self) -> np.ndarray:
        """bool[N] rows that neither training nor selection may depend on."""

    def fixed(self) -> np.ndarray:
        """bool[N] rows whose rating decides what the targets are. Edits change their items, not their ratings."""

    def edited(self, *, item: np.ndarray, rating: np.ndarray) -> OwnSplit:
        """The same split over other values."""


def scores(trained: SimpleNamespace, data=None, request: int | None = None, split: str = "test") -> np.ndarray:
    """Scores of one request's first items (request table) or of two users (sequences), on `data` or the arm's own."""
    data = trained.data if data is None else data
    if isinstance(data, RequestTable):
        request = int(data.requests("test")[0]) if request is None else request
        return np.asarray(trained.score(data, request, np.arange(1, CANDIDATES + 1)))
    return np.asarray(trained.score(data, split, np.arange(min(2, len(data)))))


def edges(table: RequestTable) -> list[int]:
    """The first and the last test request in time."""
    requests = table.requests("test")
    time = table.request_time[requests]
    return sorted({int(requests[time.argmin()]), int(requests[time.argmax()])})


class EditedTables:
    """Edited request tables; arms with the same split share them."""

    def __init__(self) -> None:
        self._made: dict[tuple, RequestTable] = {}

    def future(self, table: RequestTable, request: int) -> RequestTable:
        """Value and item of every rating at or after the request's second changed, whoever gave it."""
        rows = table.interactions.timestamp >= table.request_time[request]
        return self._edited("future", table, request, rows)

    def past(self, table: RequestTable, request: int) -> RequestTable:
        """Value and item of everything the request's user rated before it changed."""
        rows = np.zeros(len(table.interactions), dtype=bool)
        rows[table.index.first[request] : table.index.start[request]] = True
        return self._edited("past", table, request, rows)

    def _edited(self, what: str, table: RequestTable, request: int, rows: np.ndarray) -> RequestTable:
        data, index = table.interactions, table.index
        split = hashlib.sha256(index.split.tobytes() + index.train_row.tobytes()).digest()
        key = (what, type(table), data.dataset, len(data), split, request)
        if key not in self._made:
            item, rating = changed(data.item, data.rating, rows)
            self._made[key] = table.edited(item=item, rating=rating)
        return self._made[key]


def changed(item: np.ndarray, rating: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Items of `rows` in reverse order and their ratings mirrored on the scale 1..5."""
    item, rating = item.copy(), rating.copy()
    item[rows] = item[rows][::-1]
    rating[rows] = 6 - rating[rows]
    return item, rating


def other_ratings(data: OwnSplit, rows: np.ndarray) -> np.ndarray:
    """Ratings with those of `rows` changed, fixed ones kept."""
    table = data.interactions
    if hasattr(data, "other_ratings"):
        return np.where(rows & ~data.fixed(), data.other_ratings(), table.rating)
    return np.where(rows & ~data.fixed(), 6 - table.rating, table.rating)


def other_future(data: OwnSplit, split: str) -> OwnSplit:
    """Other items and ratings wherever no score of `split` may look, the targets in the same places."""
    return data.edited(**_kept(data, data.hidden(split)))


def other_past(data: OwnSplit) -> OwnSplit:
    """Other items in everything before the test targets; the ratings, which may decide the split, stay."""
    item, _ = changed(data.interactions.item, data.interactions.rating, ~data.hidden("test"))
    return data.edited(item=item, rating=data.interactions.rating)


def _kept(data: OwnSplit, rows: np.ndarray) -> dict[str, np.ndarray]:
    item, _ = changed(data.interactions.item, data.interactions.rating, rows)
    return {"item": item, "rating": other_ratings(data, rows)}


def blind_spot(data: OwnSplit) -> str:
    """What is wrong with the rows that an adapter's split calls hidden, '' if nothing: a check on them must mean something."""
    user, second = data.interactions.user, data.interactions.timestamp
    same_user = user[1:] == user[:-1]
    for split in ("valid", "test"):
        hidden = data.hidden(split)
        if len(np.unique(user[hidden])) != len(data):
            return f"not every scored user has hidden {split} rows"
        if (hidden[:-1] & ~hidden[1:] & same_user).any():
            return f"a user's hidden {split} rows end before the last rating"
        by_time = not getattr(data, "inside_seconds", False)
        if by_time and (~hidden[:-1] & hidden[1:] & same_user & (second[1:] == second[:-1])).any():
            return f"the hidden {split} rows begin inside a second"
        if data.fixed()[hidden].mean() > 0.5:
            return f"most ratings of the hidden {split} rows are fixed"
    if (data.hidden("test") & ~(data.hidden("valid") & data.tested())).any():
        return "a hidden test row is seen by validation or training"
    return ""


def other_targets(sequences: LeaveTwoOut, split: str) -> LeaveTwoOut:
    """Other items as the target of `split` and in everything after it."""

    def another(items: np.ndarray) -> np.ndarray:
        return items % sequences.n_items + 1

    edited = replace(sequences, test_target=another(sequences.test_target))
    return edited if split == "test" else replace(edited, valid_target=another(sequences.valid_target))


def other_history(sequences: LeaveTwoOut) -> LeaveTwoOut:
    return replace(sequences, train_items=sequences.train_items % sequences.n_items + 1)


def tested_rows(data: RequestTable | LeaveTwoOut | OwnSplit, user: np.ndarray) -> np.ndarray:
    """bool[N] rows of the canonical order that are test rows of the split which `data` uses. user: int[N]."""
    if isinstance(data, OwnSplit):
        return data.tested()
    if isinstance(data, RequestTable):
        return np.repeat(data.index.split == SPLITS.index("test"), data.index.stop - data.index.start)
    last = np.append(user[1:] != user[:-1], True)
    return last & (np.bincount(user)[user] >= MIN_EVENTS)


def link_checkpoints(root: Path, pretrained: dict[str, Path]) -> None:
    """Put prepared pretrained models where adapters look for them below a data root."""
    for need, folder in pretrained.items():
        (root / CHECKPOINTS[need]).mkdir()
        (root / CHECKPOINTS[need] / "checkpoint").symlink_to(folder)


class EditedFolders:
    """Prepared folders in which value and item of all test rows are changed; one per split, shared by all adapters."""

    def __init__(self, prepared: Path, dataset: str, folder: Path, pretrained: dict[str, Path] | None = None) -> None:
        self.prepared, self.dataset, self.folder, self.pretrained = prepared, dataset, folder, pretrained or {}

    def root(self, data: RequestTable | LeaveTwoOut | OwnSplit) -> Path:
        """A data root for runs that must not notice."""
        tables = read_tables(self.prepared / "canonical", TABLES)
        column = {name: tables["ratings"][name].to_numpy() for name in tables["ratings"].column_names}
        rows = tested_rows(data, column["user"])
        item, rating = changed(column["item"], column["rating"], rows)
        if isinstance(data, OwnSplit):
            rating = other_ratings(data, rows)
        root = self.folder / hashlib.sha256(rows.tobytes() + rating.tobytes()).hexdigest()[:12]
        if not root.is_dir():
            self._write(root / self.dataset, tables, column | {"item": item, "rating": rating})
            link_checkpoints(root, self.pretrained)
        return root

    def _write(self, out: Path, tables: dict, column: dict[str, np.ndarray]) -> None:
        import pyarrow as pa

        manifest = read_manifest(self.prepared / "canonical")
        write_folder(out / "canonical", {**tables, "ratings": pa.table(column)}, manifest)
        for name in DERIVED:
            prepare_table(out / "canonical", name, out / name)
        for name in ENCODED:  # texts know no ratings
            (out / name).symlink_to(self.prepared / name)
