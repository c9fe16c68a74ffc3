"""A small request table with everything that can go wrong in it: ties inside a second, empty and full histories."""

import numpy as np

from auto_research.data.interactions import Interactions
from auto_research.data.requests import RequestBatch, RequestTable

GENRES = 5
ITEMS = 60


def interactions(users: int = 16, items: int = ITEMS, ratings: int = 40, seed: int = 0) -> Interactions:
    """`ratings` ratings per user in canonical order; about half of them share their second with the previous one."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(1, users + 1), ratings).astype(np.int32)
    item = np.concatenate([rng.choice(items, ratings, replace=False) + 1 for _ in range(users)]).astype(np.int32)
    gaps = np.where(rng.random((users, ratings)) < 0.5, 0, rng.integers(1, 90_000, (users, ratings)))
    genres = (rng.random((items + 1, GENRES)) < 0.4).astype(np.float32)
    genres[np.arange(1, items + 1), rng.integers(0, GENRES, items)] = 1
    genres[0] = 0

    def field(size: int) -> np.ndarray:
        values = rng.integers(1, size, users + 1)
        values[0] = 0
        return values

    sizes = {"age": 8, "gender": 3, "occupation": 22, "zip": 12, "decade": 10}
    decade = rng.integers(1, sizes["decade"], items + 1)
    decade[0] = 0
    return Interactions(
        user=user,
        item=item,
        rating=rng.integers(1, 6, users * ratings).astype(np.float32),
        timestamp=(880_000_000 + gaps.cumsum(1)).ravel().astype(np.int64),
        n_users=users,
        n_items=items,
        user_fields={name: field(sizes[name]) for name in ("age", "gender", "occupation", "zip")},
        item_genres=genres,
        item_decade=decade,
        item_title=["", *(f"Film {i}" for i in range(1, items + 1))],
        genre_names=[f"genre {i}" for i in range(GENRES)],
        vocab=sizes,
        dataset="synthetic",
    )


def request_table(**size: int) -> RequestTable:
    return RequestTable(interactions(**size))


def training_batch(table: RequestTable, requests: int = 12, history: int = 9, negatives: int = 3) -> RequestBatch:
    """The first `requests` training requests with negatives."""
    chosen = table.requests("train")[:requests]
    return table.batch(chosen, history=history, negatives=negatives, rng=np.random.default_rng(1))
