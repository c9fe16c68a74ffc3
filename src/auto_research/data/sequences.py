"""Leave-two-out sequences: per user the last event is test, the one before validation, the rest train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from auto_research.data.folder import read_manifest, read_tables, write_folder
from auto_research.data.interactions import Interactions, load_interactions
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng

HEAD_SHARE = 0.1
MIN_EVENTS = 3


def fixed_user_order(dataset: str, n_users: int) -> np.ndarray:
    """int64[n_users] user ids in a fixed shuffled order; `restrict(n)` takes its first n everywhere."""
    return stable_rng("user-order", dataset, n_users).permutation(n_users).astype(np.int64) + 1


def head_items(counts: np.ndarray) -> np.ndarray:
    """Ids of the 10% most rated items (rounded down, at least one) of counts int64[n_items + 1]; ties by lower id."""
    n_items = len(counts) - 1
    order = np.lexsort((np.arange(1, n_items + 1), -counts[1:]))
    return np.sort(order[: max(1, int(n_items * HEAD_SHARE))] + 1).astype(np.int64)


@dataclass(frozen=True)
class LeaveTwoOut:
    """Item sequences in canonical order; U users with at least three events, ids 1-based, 0 = padding.

    users, valid_target, test_target: int64[U]; train_items: int64[sum of train lengths];
    train_starts: int64[U + 1] (train events of user i are train_items[train_starts[i]:train_starts[i + 1]]).
    """

    n_users: int
    n_items: int
    users: np.ndarray
    train_items: np.ndarray
    train_starts: np.ndarray
    valid_target: np.ndarray
    test_target: np.ndarray
    dataset: str = ""

    @classmethod
    def build(cls, data: Interactions) -> LeaveTwoOut:
        """Split canonical interactions; users with fewer than three events are left out."""
        starts = data.user_starts()
        length = np.diff(starts)
        users = np.flatnonzero(length >= MIN_EVENTS).astype(np.int64)
        lengths = length[users] - 2
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts[users], lengths)
        item = data.item.astype(np.int64)
        ends = starts[users] + length[users]
        return cls(data.n_users, data.n_items, users, item[rows], offsets, item[ends - 2], item[ends - 1], data.dataset)

    @classmethod
    def load(cls, folder: Path | str) -> LeaveTwoOut:
        """Load a prepared `sequences` folder. Raises DataMissing, CorruptFile."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        tables = read_tables(folder, ("sequences", "train"))
        column = {name: tables["sequences"][name].to_numpy() for name in tables["sequences"].column_names}
        offsets = np.concatenate([[0], np.cumsum(column["train_length"])]).astype(np.int64)
        counts = manifest["counts"]
        return cls(
            counts["users"],
            counts["items"],
            column["user"].astype(np.int64),
            tables["train"]["item"].to_numpy().astype(np.int64),
            offsets,
            column["valid_target"].astype(np.int64),
            column["test_target"].astype(np.int64),
            manifest["dataset"],
        )

    def __len__(self) -> int:
        return len(self.users)

    @cached_property
    def train(self) -> list[np.ndarray]:
        """Per user (position in `users`) int64 train items, oldest first; views of `train_items`."""
        return np.split(self.train_items, self.train_starts[1:-1])

    def history(self, split: str, i: int) -> np.ndarray:
        """int64 items before the target of user position i: 'valid' -> train, 'test' -> train and validation item."""
        if split == "valid":
            return self.train[i]
        if split == "test":
            return np.append(self.train[i], self.valid_target[i])
        raise ConfigError(f"unknown split '{split}'; known: valid, test")

    def target(self, split: str) -> np.ndarray:
        """int64[U] target items of 'valid' or 'test'."""
        return {"valid": self.valid_target, "test": self.test_target}[split]

    def excluded(self, split: str) -> list[np.ndarray]:
        """Per user the items that are never candidates: the whole history before the target."""
        return [self.history(split, i) for i in range(len(self))]

    def restrict(self, users: int) -> LeaveTwoOut:
        """The first `users` users of a fixed shuffle, same ids; all of them when there are not more."""
        if users >= len(self):
            return self
        order = fixed_user_order(self.dataset, self.n_users)
        wanted = order[np.isin(order, self.users)][:users]
        keep = np.flatnonzero(np.isin(self.users, wanted))
        train = [self.train[i] for i in keep]
        lengths = [len(items) for items in train]
        return LeaveTwoOut(
            self.n_users,
            self.n_items,
            self.users[keep],
            np.concatenate(train) if train else np.zeros(0, dtype=np.int64),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            self.valid_target[keep],
            self.test_target[keep],
            self.dataset,
        )

    def popularity(self) -> np.ndarray:
        """int64[n_items + 1] number of train events of every item."""
        return np.bincount(self.train_items, minlength=self.n_items + 1).astype(np.int64)

    def head_items(self) -> np.ndarray:
        """int64 ids of the 10% most rated train items, ascending."""
        return head_items(self.popularity())


def write_folder_of(canonical: Path, out: Path, manifest: dict) -> dict:
    """Build sequences from a canonical folder and write them; returns the manifest."""
    import pyarrow as pa

    data = load_interactions(canonical)
    split = LeaveTwoOut.build(data)
    tables = {
        "sequences": pa.table(
            {
                "user": split.users,
                "train_length": np.diff(split.train_starts),
                "valid_target": split.valid_target,
                "test_target": split.test_target,
            }
        ),
        "train": pa.table({"item": split.train_items}),
    }
    counts = {
        "users": split.n_users,
        "items": split.n_items,
        "sequences": len(split),
        "train_events": len(split.train_items),
    }
    return write_folder(out, tables, {**manifest, "counts": counts})
