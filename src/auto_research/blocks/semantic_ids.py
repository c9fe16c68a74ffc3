"""Semantic ids: the map between items and code tuples, and the token numbers of the codes.

An item is a tuple (c_1, .., c_L) of codes, c_l in 0..K_l - 1 (TIGER, arXiv:2305.05065). Items are numbered from 1 and
0 is padding, as everywhere in this package; code arrays of a tokenizer have no padding row (row i is item i + 1), the
arrays of a `SIDTable` have one (row 0 is -1).

Tables and vocabularies carry a content hash. Whoever stores something trained on them stores the hash beside it and
calls `require_hash` before using it with another table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from auto_research.runtime.errors import ConfigError, CorruptFile
from auto_research.runtime.files import atomic_path, canonical_json, read_json, sha256_bytes, sha256_file, write_json
from auto_research.runtime.seeds import stable_rng

MODES = ("suffix", "group")
NAME = "semantic_ids"


@dataclass(frozen=True, eq=False)
class SIDTable:
    """Items and their codes; L levels, S distinct tuples ("leaves").

    codes: int64[n_items + 1, L], row 0 is -1.  sizes: number of codes of every level.
    mode: "suffix" (every item has its own tuple) or "group" (items may share one).
    leaf_items: int64[n_items], the items of leaf 0, then those of leaf 1, ..; inside a leaf most popular first.
    """

    codes: np.ndarray
    sizes: tuple[int, ...]
    mode: str
    leaf_items: np.ndarray

    def __post_init__(self):
        _check_codes(self.codes[1:], self.sizes)
        if self.mode not in MODES:
            raise ConfigError(f"unknown collision mode '{self.mode}'; known: {', '.join(MODES)}")
        if not np.array_equal(np.sort(self.leaf_items), np.arange(1, self.n_items + 1)):
            raise ConfigError("the leaves of a table of semantic ids must hold every item once")
        if np.any(np.diff(self.leaf_of[self.leaf_items]) < 0):
            raise ConfigError("the items of a table of semantic ids are not sorted by their codes")
        if self.mode == "suffix" and len(self.leaves) != self.n_items:
            raise ConfigError("two items share a semantic id although collisions are resolved by a suffix")

    @property
    def n_items(self) -> int:
        return len(self.codes) - 1

    @property
    def levels(self) -> int:
        return len(self.sizes)

    @cached_property
    def _unique(self) -> tuple[np.ndarray, np.ndarray]:
        leaves, inverse = np.unique(self.codes[1:], axis=0, return_inverse=True)
        return leaves, inverse.reshape(-1)

    @property
    def leaves(self) -> np.ndarray:
        """int64[S, L] distinct tuples in lexicographic order."""
        return self._unique[0]

    @cached_property
    def leaf_of(self) -> np.ndarray:
        """int64[n_items + 1] leaf of every item, -1 for the padding row."""
        return np.concatenate([[-1], self._unique[1]]).astype(np.int64)

    @cached_property
    def leaf_starts(self) -> np.ndarray:
        """int64[S + 1]: the items of leaf s are leaf_items[leaf_starts[s]:leaf_starts[s + 1]]."""
        counts = np.bincount(self.leaf_of[1:], minlength=len(self.leaves))
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def group_items(self) -> np.ndarray:
        """int64[S, largest group] items of every leaf, most popular first, filled up with 0."""
        sizes = np.diff(self.leaf_starts)
        groups = np.zeros((len(sizes), int(sizes.max())), dtype=np.int64)
        groups[np.arange(groups.shape[1]) < sizes[:, None]] = self.leaf_items
        return groups

    @cached_property
    def _leaf_index(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): s for s, row in enumerate(self.leaves.tolist())}

    def code_of(self, item) -> np.ndarray:
        """int64[.., L] codes of item ids of any shape; the padding item 0 gives -1."""
        return self.codes[item]

    def leaf_of_code(self, code: Sequence[int]) -> int:
        """Leaf of a whole tuple, -1 when no item has it."""
        return self._leaf_index.get(tuple(int(c) for c in code), -1)

    def items_of(self, code: Sequence[int]) -> np.ndarray:
        """int64 items of a whole tuple, most popular first; empty when no item has it."""
        leaf = self.leaf_of_code(code)
        if leaf < 0:
            return np.zeros(0, dtype=np.int64)
        return self.leaf_items[self.leaf_starts[leaf] : self.leaf_starts[leaf + 1]]

    @cached_property
    def content_hash(self) -> str:
        """sha256 over codes, sizes, mode and the order inside the leaves; the same on every machine."""
        head = canonical_json({"sizes": list(self.sizes), "mode": self.mode}).encode()
        body = self.codes.astype("<i8").tobytes() + self.leaf_items.astype("<i8").tobytes()
        return sha256_bytes(head + b"\n" + body)

    def statistics(self) -> dict:
        """Counts for a report: distinct tuples, largest group, share of items in a shared tuple, codes used per level."""
        group = np.diff(self.leaf_starts)
        return {
            "items": self.n_items,
            "distinct": len(self.leaves),
            "largest_group": int(group.max()),
            "shared_items": float(group[group > 1].sum() / self.n_items),
            "codes_used": [len(np.unique(self.codes[1:, level])) for level in range(self.levels)],
            "distinct_prefixes": [len(np.unique(self.codes[1:, : n + 1], axis=0)) for n in range(self.levels)],
        }

    def save(self, folder: Path | str, name: str = NAME) -> None:
        """Write <name>.safetensors (the arrays) and then <name>.json (sizes, mode, hashes)."""
        from safetensors.numpy import save_file

        folder = Path(folder)
        arrays = folder / f"{name}.safetensors"
        with atomic_path(arrays) as temporary:
            save_file({"codes": self.codes, "leaf_items": self.leaf_items}, temporary)
        facts = {
            "sizes": list(self.sizes),
            "mode": self.mode,
            "content_hash": self.content_hash,
            "arrays_sha256": sha256_file(arrays),
        }
        write_json(folder / f"{name}.json", facts)

    @classmethod
    def load(cls, folder: Path | str, name: str = NAME, *, expect: str | None = None) -> SIDTable:
        """Read a saved table. expect: content hash it must have (ConfigError). Raises CorruptFile."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        try:
            facts = read_json(folder / f"{name}.json")
            arrays = folder / f"{name}.safetensors"
            if sha256_file(arrays) != facts["arrays_sha256"]:
                raise CorruptFile(f"{arrays} does not belong to {name}.json beside it; build the semantic ids again")
            tensors = load_file(arrays)
            table = cls(tensors["codes"], tuple(facts["sizes"]), facts["mode"], tensors["leaf_items"])
        except (FileNotFoundError, KeyError, SafetensorError) as error:
            raise CorruptFile(f"{folder}: no complete table of semantic ids ({error}); build them again") from None
        require_hash(facts["content_hash"], table.content_hash, f"{folder / name}.json")
        if expect is not None:
            require_hash(expect, table.content_hash, "the expected table")
        return table


def resolve_collisions(
    codes: np.ndarray,
    sizes: Sequence[int],
    mode: str = "suffix",
    *,
    popularity: np.ndarray | None = None,
    suffix_size: int | None = None,
) -> SIDTable:
    """Table of the codes int[n_items, L] of a tokenizer (row i is item i + 1).

    mode "suffix": one more level c_{L+1}(i) = |{j < i : c_{1..L}(j) = c_{1..L}(i)}|, also for items that are alone, so
    that every item has a tuple of its own. Its size is the largest group, or `suffix_size` where arms must agree.
    mode "group": no more levels; items of one tuple are ordered by `popularity` (int or float[n_items + 1] train
    counts), the larger first, ties by lower item.
    Raises ConfigError for codes outside their level, a suffix_size that is too small, groups without a popularity.
    """
    codes = np.asarray(codes)
    sizes = tuple(int(size) for size in sizes)
    _check_codes(codes, sizes)
    codes = codes.astype(np.int64)
    n_items = len(codes)
    if mode == "suffix":
        suffix = _order_in_group(codes)
        needed = int(suffix.max()) + 1
        if suffix_size is not None and suffix_size < needed:
            raise ConfigError(f"a suffix level of {suffix_size} is too small: {needed} items share one code tuple")
        codes = np.concatenate([codes, suffix[:, None]], axis=1)
        sizes = (*sizes, suffix_size or needed)
        rank = np.zeros(n_items)
    elif mode == "group":
        if popularity is None or len(popularity) != n_items + 1:
            raise ConfigError(f"collision mode 'group' needs the train popularity of the {n_items} items and padding")
        rank = -np.asarray(popularity, dtype=np.float64)[1:]
    else:
        raise ConfigError(f"unknown collision mode '{mode}'; known: {', '.join(MODES)}")
    order = np.lexsort((np.arange(n_items), rank, *codes.T[::-1]))
    padded = np.concatenate([np.full((1, codes.shape[1]), -1, dtype=np.int64), codes])
    return SIDTable(padded, sizes, mode, (order + 1).astype(np.int64))


def random_codes(n_items: int, sizes: Sequence[int], *, seed: int) -> np.ndarray:
    """int64[n_items, L] distinct tuples drawn uniformly; the control that keeps shapes and drops the meaning."""
    total = int(np.prod([int(size) for size in sizes], dtype=object))
    if total < n_items:
        raise ConfigError(f"levels of {list(sizes)} codes give {total} tuples, fewer than {n_items} items")
    rng = stable_rng("random-codes", seed, n_items, *sizes)
    if total <= 4 * n_items:
        chosen = rng.permutation(total)[:n_items]
    else:
        chosen = np.zeros(0, dtype=np.int64)
        while len(chosen) < n_items:
            drawn = np.concatenate([chosen, rng.integers(total, size=n_items)])
            _, first = np.unique(drawn, return_index=True)
            chosen = drawn[np.sort(first)]
        chosen = chosen[:n_items]
    return np.stack(np.unravel_index(chosen, tuple(int(size) for size in sizes)), axis=1).astype(np.int64)


def permuted_codes(codes: np.ndarray, *, seed: int) -> np.ndarray:
    """The rows of codes int[n_items, L] in a random order: same tuples and groups, given to the wrong items."""
    return codes[stable_rng("permuted-codes", seed, len(codes)).permutation(len(codes))]


@dataclass(frozen=True)
class SIDVocab:
    """One token space: token(level, code) = offset[level] + code, then BOS, PAD and `users` hashed user tokens.

    BOS and PAD stand before the user tokens, so that arms with and without a user token agree on every other number.
    """

    sizes: tuple[int, ...]
    users: int
    table_hash: str

    @classmethod
    def of(cls, table: SIDTable, *, users: int = 0) -> SIDVocab:
        """Vocabulary of a table with `users` user tokens."""
        return cls(tuple(table.sizes), int(users), table.content_hash)

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64[L] number of the first token of every level."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)

    @property
    def levels(self) -> int:
        return len(self.sizes)

    @property
    def n_codes(self) -> int:
        return int(sum(self.sizes))

    @property
    def bos(self) -> int:
        return self.n_codes

    @property
    def pad(self) -> int:
        return self.n_codes + 1

    @property
    def size(self) -> int:
        return self.n_codes + 2 + self.users

    def token(self, level: int, code):
        """Token of code(s) of one level (0-based); int, numpy or torch integers. The code must exist."""
        return code + int(self.offsets[level])

    def tokens(self, codes: np.ndarray) -> np.ndarray:
        """int64[.., L] tokens of codes int[.., L]; rows of the padding item (-1) give PAD."""
        codes = np.asarray(codes)
        return np.where(codes < 0, self.pad, codes + self.offsets[: codes.shape[-1]]).astype(np.int64)

    def codes(self, tokens: np.ndarray) -> np.ndarray:
        """Inverse of `tokens`: int64[.., L]; ConfigError for a token of another level."""
        tokens = np.asarray(tokens)
        offsets = self.offsets[: tokens.shape[-1]]
        codes = np.where(tokens == self.pad, -1, tokens - offsets)
        inside = (codes >= 0) & (codes < np.asarray(self.sizes)[: tokens.shape[-1]])
        if not np.all(inside | (tokens == self.pad)):
            raise ConfigError("a token is not a code of the level it stands at")
        return codes.astype(np.int64)

    def item_tokens(self, table: SIDTable) -> np.ndarray:
        """int64[n_items + 1, L] tokens of every item, row 0 is PAD. ConfigError for another table."""
        require_hash(self.table_hash, table.content_hash, "the vocabulary")
        return self.tokens(table.codes)

    def user_token(self, user) -> np.ndarray:
        """int64 token of user id(s): 64-bit mix (splitmix64) of the id modulo `users`."""
        if not self.users:
            raise ConfigError("this vocabulary has no user tokens")
        return (_mix64(np.asarray(user)) % np.uint64(self.users)).astype(np.int64) + self.n_codes + 2

    @cached_property
    def content_hash(self) -> str:
        """sha256 over everything that decides what a token number means, the table's codes included."""
        facts = {"sizes": list(self.sizes), "users": self.users, "table_hash": self.table_hash}
        return sha256_bytes(canonical_json(facts).encode())

    def require(self, other: str, what: str) -> None:
        """ConfigError unless `other`, the vocabulary hash kept by `what`, is this vocabulary's."""
        require_hash(other, self.content_hash, what)

    def save(self, folder: Path | str, name: str = "sid_vocab") -> None:
        """Write <name>.json."""
        facts = {"sizes": list(self.sizes), "users": self.users, "table_hash": self.table_hash}
        write_json(Path(folder) / f"{name}.json", {**facts, "content_hash": self.content_hash})

    @classmethod
    def load(cls, folder: Path | str, table: SIDTable, name: str = "sid_vocab") -> SIDVocab:
        """Read a saved vocabulary for `table`. ConfigError when it was made for other codes; CorruptFile."""
        path = Path(folder) / f"{name}.json"
        try:
            facts = read_json(path)
            vocab = cls(tuple(facts["sizes"]), facts["users"], facts["table_hash"])
            vocab.require(facts["content_hash"], str(path))
        except (FileNotFoundError, KeyError) as error:
            raise CorruptFile(f"{path}: no complete vocabulary ({error}); build the semantic ids again") from None
        require_hash(vocab.table_hash, table.content_hash, str(path))
        return vocab


def require_hash(expected: str, found: str, what: str) -> None:
    """ConfigError when `what` was made with other semantic ids than those in use."""
    if expected != found:
        raise ConfigError(
            f"{what} was made with semantic ids {expected[:12]}, but {found[:12]} are in use: build it again from them"
        )


def _check_codes(codes: np.ndarray, sizes: tuple[int, ...]) -> None:
    if codes.ndim != 2 or not len(codes) or codes.shape[1] != len(sizes) or codes.dtype.kind not in "iu":
        raise ConfigError(f"codes must be integers [items, {len(sizes)}], got {codes.dtype}{list(codes.shape)}")
    low, high = codes.min(axis=0), codes.max(axis=0)
    for level, size in enumerate(sizes):
        if low[level] < 0 or high[level] >= size:
            raise ConfigError(f"level {level} holds codes {low[level]}..{high[level]}, but has {size} codes")


def _order_in_group(codes: np.ndarray) -> np.ndarray:
    """int64[n]: number of earlier rows equal to row i."""
    order = np.lexsort(codes.T[::-1])  # stable: rows of one tuple keep their order
    ordered = codes[order]
    first = np.concatenate([[True], np.any(ordered[1:] != ordered[:-1], axis=1)])
    position = np.arange(len(codes))
    start = np.maximum.accumulate(np.where(first, position, 0))
    suffix = np.empty(len(codes), dtype=np.int64)
    suffix[order] = position - start
    return suffix


def _mix64(values: np.ndarray) -> np.ndarray:
    """uint64 splitmix64 finaliser of integers."""
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
