"""Item vectors that tokenizers cut into codes: collaborative vectors from train sequences, and text beside them.

Arrays are float32[n_items + 1, width] with a zero row for the padding item, like the title vectors of `data.titles`.
Everything is computed on the CPU in float64 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auto_research.data.interactions import Interactions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.errors import ConfigError

CF_WIDTH = 16
TEXT_WIDTH = 48
EPS = 1e-12


def item_texts(data: Interactions) -> list[str]:
    """Text of items 1..n for a sentence encoder: "<title>. Genres: <comma list>", the title alone without genres."""
    texts = []
    for item in range(1, data.n_items + 1):
        genres = [name for name, flag in zip(data.genre_names, data.item_genres[item], strict=True) if flag]
        texts.append(data.item_title[item] + (f". Genres: {', '.join(genres)}" if genres else ""))
    return texts


def co_occurrence(sequences: Sequence[np.ndarray], n_items: int):
    """Sparse symmetric float64[n_items + 1, n_items + 1]: number of sequences holding both items, zero diagonal."""
    from scipy import sparse

    lengths = [len(items) for items in sequences]
    user = np.repeat(np.arange(len(sequences)), lengths)
    item = np.concatenate([np.zeros(0, dtype=np.int64), *sequences])
    held = sparse.csr_matrix((np.ones(len(item)), (user, item)), shape=(len(sequences), n_items + 1))
    held.data[:] = 1.0  # duplicates are summed on construction; an item counts once a sequence
    together = (held.T @ held).tocsr()
    together.setdiag(0)
    together.eliminate_zeros()
    return together


def item_cf_vectors(train: LeaveTwoOut | Sequence[np.ndarray], n_items: int | None = None, *, width: int = CF_WIDTH):
    """float32[n_items + 1, width]: U sqrt(S) of the SVD of log(1 + train co-occurrence), zero diagonal.

    train: leave-two-out sequences (their train part) or one int array of train items per user with `n_items`.
    Columns fall in size; the entry of largest magnitude of each is positive (ties: the lowest item). An item that
    never shares a sequence has a zero row. Raises ConfigError when the matrix has fewer than width + 1 items in it.
    """
    from scipy.sparse.linalg import eigsh

    if isinstance(train, LeaveTwoOut):
        train, n_items = train.train, train.n_items
    elif n_items is None:
        raise ConfigError("item_cf_vectors needs the number of items beside plain sequences")
    matrix = co_occurrence(train, n_items)
    matrix.data = np.log1p(matrix.data)
    together = np.diff(matrix.indptr) > 0
    if int(together.sum()) <= width:
        raise ConfigError(f"{width} collaborative dimensions need more than {width} items that occur with another")
    inner = matrix[together][:, together]
    # Of a symmetric matrix, singular values are the magnitudes of eigenvalues and left vectors are eigenvectors.
    start = inner @ np.ones(inner.shape[0])
    values, vectors = eigsh(inner, k=width, which="LM", v0=start, tol=0)
    order = np.argsort(-np.abs(values), kind="stable")
    columns = _signed(vectors[:, order]) * np.sqrt(np.abs(values[order]))
    result = np.zeros((n_items + 1, width), dtype=np.float32)
    result[together] = columns
    return result


def principal_components(vectors: np.ndarray, width: int = TEXT_WIDTH) -> np.ndarray:
    """float32[n_items + 1, width] scores of items 1..n on the first principal components, row 0 zero.

    vectors: float[n_items + 1, D] with a padding row 0, which is left out of mean and components. Signs as in
    `item_cf_vectors`.
    """
    items = np.asarray(vectors, dtype=np.float64)[1:]
    if width > min(items.shape):
        raise ConfigError(f"{width} principal components cannot be taken from vectors {list(items.shape)}")
    centred = items - items.mean(axis=0)
    values, axes = np.linalg.eigh(centred.T @ centred)
    chosen = np.argsort(-values, kind="stable")[:width]
    return _padded(_signed(centred @ axes[:, chosen]))


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """float32 rows of length 1; zero rows stay zero."""
    vectors = np.asarray(vectors, dtype=np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norms, EPS)).astype(np.float32)


def text_and_cf_vectors(text: np.ndarray, cf: np.ndarray, *, text_width: int = TEXT_WIDTH) -> np.ndarray:
    """float32[n_items + 1, text_width + width]: principal components of text and collaborative vectors, each half of
    every row scaled to length 1 (cards onerec, onerec-v2, unir2, gryphon-v2).

    text: float[n_items + 1, D] (`load_title_vectors`); cf: float[n_items + 1, width] (`item_cf_vectors`).
    """
    if len(text) != len(cf):
        raise ConfigError(f"text vectors of {len(text) - 1} items do not fit collaborative vectors of {len(cf) - 1}")
    return np.concatenate([unit_rows(principal_components(text, text_width)), unit_rows(cf)], axis=1)


def _signed(columns: np.ndarray) -> np.ndarray:
    """Columns whose entry of largest magnitude is positive."""
    peak = np.abs(columns).argmax(axis=0)
    return columns * np.where(columns[peak, np.arange(columns.shape[1])] < 0, -1.0, 1.0)


def _padded(items: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((1, items.shape[1])), items]).astype(np.float32)
