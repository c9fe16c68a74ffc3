"""Items nobody has rated yet: they have a semantic id, so a generated neighbour in the code tree can bring them in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from auto_research.blocks.semantic_ids import SIDTable
from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng

COLD_SHARE = 0.05
SHORTEST_PREFIX = 2


def cold_items(n_items: int, seed: int, share: float = COLD_SHARE) -> np.ndarray:
    """bool[n_items + 1]: the seeded share of items that is taken out of all data."""
    chosen = stable_rng("tiger-cold", seed, n_items).permutation(n_items)[: round(share * n_items)] + 1
    cold = np.zeros(n_items + 1, dtype=bool)
    cold[chosen] = True
    return cold


def without_items(sequences: LeaveTwoOut, cold: np.ndarray) -> LeaveTwoOut:
    """Sequences whose training and histories hold no cold item; test targets stay, cold or not.

    A cold validation item is replaced by the last train item that is left; users with nothing left are dropped.
    """
    train, valid, keep = [], [], []
    for position, items in enumerate(sequences.train):
        items = items[~cold[items]]
        target = int(sequences.valid_target[position])
        if cold[target] and len(items):
            items, target = items[:-1], int(items[-1])
        if len(items) and not cold[target]:
            train.append(items), valid.append(target), keep.append(position)
    if not keep:
        raise ConfigError("no user is left without the cold items")
    return replace(
        sequences,
        users=sequences.users[keep],
        train_items=np.concatenate(train),
        train_starts=np.concatenate([[0], np.cumsum([len(items) for items in train])]).astype(np.int64),
        valid_target=np.array(valid, dtype=np.int64),
        test_target=sequences.test_target[keep],
    )


def code_neighbours(
    table: SIDTable, cold: np.ndarray, levels: int, codes: np.ndarray | None = None
) -> list[np.ndarray]:
    """Per item id the cold items that share its first codes: all `levels`, then one fewer, down to SHORTEST_PREFIX.

    Equals by lower id. codes: int[n_items + 1, L] other codes of the cold items (a control), default the table's.
    """
    codes = table.codes if codes is None else codes
    ids = np.flatnonzero(cold)
    result = []
    for item in range(table.n_items + 1):
        same = (codes[ids, :levels] == table.codes[item, :levels]).cumprod(1).sum(1)  # length of the common prefix
        near = np.flatnonzero(same >= min(SHORTEST_PREFIX, levels))
        result.append(ids[near[np.argsort(-same[near], kind="stable")]])
    return result


def vector_neighbours(vectors: np.ndarray, cold: np.ndarray) -> list[np.ndarray]:
    """Per item id all cold items by cosine to it, nearest first (semantic_knn). vectors: unit rows [n_items + 1, D]."""
    ids = np.flatnonzero(cold)
    order = np.argsort(-(vectors @ vectors[ids].T), axis=1, kind="stable")
    return list(ids[order])


def quota(epsilon: float, count: int) -> int:
    """floor(epsilon K), safe against 0.3 * 10 = 2.999..."""
    return int(np.floor(epsilon * count + 1e-9))


def mixed(lists: np.ndarray, neighbours: list[np.ndarray], epsilon: float, count: int = 10) -> np.ndarray:
    """Lists int64[B, count]: after every generated item of lists [B, M] its cold neighbours, quota(epsilon) at most."""
    result = np.zeros((len(lists), count), dtype=np.int64)
    for row, items in zip(result, lists, strict=True):
        room, taken = quota(epsilon, count), []
        for item in items[items > 0]:
            taken.append(int(item))
            fresh = [int(cold) for cold in neighbours[item] if cold not in taken][:room]
            room -= len(fresh)
            taken += fresh
        row[: min(count, len(taken))] = taken[:count]
    return result


def knn_mixed(lists: np.ndarray, last: np.ndarray, neighbours: list[np.ndarray], epsilon: float, count: int = 10):
    """The ablation: quota(epsilon) cold neighbours of the last history item [B] follow the first generated item."""
    room = quota(epsilon, count)
    result = np.zeros((len(lists), count), dtype=np.int64)
    for row, items, item in zip(result, lists, last, strict=True):
        items = items[items > 0]
        taken = np.concatenate([items[:1], neighbours[item][:room], items[1:]])[:count]
        row[: len(taken)] = taken
    return result
