"""k-means and residual k-means tokenizers, plain and balanced, on the CPU with numpy.

    s^l = argmin_k || r^{l-1} - c^l_k ||^2,   r^l = r^{l-1} - c^l_{s^l},   r^0 = x

Plain: k-means++ start, Lloyd rounds, an empty cluster moves to the point that is farthest from its centroid (OneRec-V2,
arXiv:2508.20900). Balanced: clusters take their nearest unassigned points in index order, at most ceil(I / K) each
(OneRec, arXiv:2502.18965). Nothing here depends on threads, devices or a global generator, except that sums over many
numbers may be rounded differently by another BLAS; small inputs are therefore worked on in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng

ROUNDS = 50
CHUNK = 8192  # rows per distance product
DOUBLE_ELEMENTS = 2**22  # inputs up to this many numbers are worked on in float64
START_ROWS = 10_000  # k-means++ draws from a seeded sample of this many rows, or 20 K


class Clusters(NamedTuple):
    """code: int64[I] cluster of every row.  centroids: float32[K, D].  rounds: assignment passes used."""

    code: np.ndarray
    centroids: np.ndarray
    rounds: int


class ResidualCodes(NamedTuple):
    """codes: int64[I, L].  books: L arrays float32[K_l, D].  rounds: passes of every level.

    residual: mean squared norm (summed over dimensions) left after every level.
    """

    codes: np.ndarray
    books: list[np.ndarray]
    rounds: list[int]
    residual: list[float]


def rq_kmeans(
    x: np.ndarray, sizes: Sequence[int], *, balanced: bool = False, seed: int, rounds: int = ROUNDS
) -> ResidualCodes:
    """Residual k-means of x float[I, D] with sizes[l] codes on level l.

    The codes of the plain form are the nearest entries of the returned float32 books, level by level (`nearest_codes`
    gives them again); those of the balanced form are not, because capacities push items to farther clusters.
    Raises ConfigError for empty, non-finite or flat input and sizes below 1.
    """
    residual = _work_copy(x)
    sizes = [int(size) for size in sizes]
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"residual k-means needs at least one level of at least one code, got {sizes}")
    codes, books, used, left = [], [], [], []
    for level, size in enumerate(sizes):
        found = kmeans(residual, size, balanced=balanced, seed=(seed, level), rounds=rounds)
        for start in range(0, len(residual), CHUNK):
            rows = slice(start, start + CHUNK)
            residual[rows] -= found.centroids[found.code[rows]]
        codes.append(found.code)
        books.append(found.centroids)
        used.append(found.rounds)
        left.append(float(_squared_norms(residual).mean(dtype=np.float64)))
    return ResidualCodes(np.stack(codes, axis=1), books, used, left)


def nearest_codes(x: np.ndarray, books: Sequence[np.ndarray]) -> np.ndarray:
    """int64[I, L]: greedy residual codes of x float[I, D] in existing books, ties to the lower code."""
    residual = _work_copy(x)
    codes = []
    for book in books:
        code = _nearest(residual, book.astype(residual.dtype))
        residual -= book[code]
        codes.append(code)
    return np.stack(codes, axis=1)


def kmeans(
    x: np.ndarray,
    size: int,
    *,
    balanced: bool = False,
    seed: int | tuple = 0,
    rounds: int = ROUNDS,
    start: np.ndarray | None = None,
) -> Clusters:
    """Clusters of x float[I, D]. start: float[K, D] first centroids instead of k-means++.

    Passes of assignment and mean until the assignment stands still, at most `rounds` passes. Plain: afterwards every
    row gets its nearest centroid. Balanced: centroids are the means of the returned clusters. More clusters than
    distinct rows leave clusters empty.
    """
    x = np.asarray(x)
    x = x if x.dtype == _work_dtype(x) else x.astype(_work_dtype(x))
    if start is None:
        centroids = _plus_plus(x, size, stable_rng("k-means", seed))
    else:
        centroids = np.array(start, dtype=x.dtype)
    assign = _balanced_assignment if balanced else _lloyd_assignment
    sums = _Sums(x, size)
    code, used = None, 0
    while used < rounds:
        used += 1
        fresh = assign(x, centroids)
        if code is not None and np.array_equal(fresh, code):
            break
        code = fresh
        centroids = sums.means(code, centroids)
    stored = centroids.astype(np.float32)
    if not balanced:
        code = _nearest(x, stored.astype(x.dtype))
    return Clusters(code, stored, used)


def code_statistics(codes: np.ndarray, sizes: Sequence[int]) -> dict:
    """Use of codes int[I, L]: per level the share of codes in use and the perplexity (exp of the entropy in nats).

    Also the number of distinct tuples, the largest group and the share of items in a group of two or more.
    """
    usage, perplexity = [], []
    for level, size in enumerate(sizes):
        share = np.bincount(codes[:, level], minlength=size) / len(codes)
        used = share[share > 0]
        usage.append(len(used) / size)
        perplexity.append(float(np.exp(-(used * np.log(used)).sum())))
    group = np.unique(codes, axis=0, return_counts=True)[1]
    return {
        "utilisation": usage,
        "perplexity": perplexity,
        "distinct": len(group),
        "largest_group": int(group.max()),
        "shared_items": float(group[group > 1].sum() / len(codes)),
    }


def mutual_information(a: np.ndarray, b: np.ndarray, *, normalised: bool = False) -> float:
    """Mutual information in nats of two integer columns int[I] (plug-in estimate, positive by chance).

    normalised: divided by the mean of the two entropies, 0 to 1; 0 when both columns are constant.
    """
    _, joint = np.unique(np.stack([a, b]), axis=1, return_counts=True)
    entropies = [_entropy(np.unique(column, return_counts=True)[1]) for column in (a, b)]
    shared = max(0.0, sum(entropies) - _entropy(joint))
    if not normalised:
        return shared
    return shared / (sum(entropies) / 2) if sum(entropies) > 0 else 0.0


def _entropy(counts: np.ndarray) -> float:
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def _work_dtype(x: np.ndarray) -> type:
    return np.float64 if x.size <= DOUBLE_ELEMENTS else np.float32


def _work_copy(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    if x.ndim != 2 or not x.size:
        raise ConfigError(f"vectors must be a table [items, width], got shape {list(x.shape)}")
    if not np.isfinite(x).all():
        raise ConfigError("vectors to cluster hold NaN or infinity")
    return np.array(x, dtype=_work_dtype(x), order="C")


def _squared_norms(x: np.ndarray) -> np.ndarray:
    return np.einsum("id,id->i", x, x)


def _nearest(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Nearest centroid int64[I], ties to the lower index."""
    code = np.empty(len(x), dtype=np.int64)
    turned, norms = np.ascontiguousarray(-2 * centroids.T), _squared_norms(centroids)
    for start in range(0, len(x), CHUNK):
        rows = slice(start, start + CHUNK)
        part = x[rows] @ turned  # the row's own norm is the same for every centroid
        part += norms
        code[rows] = part.argmin(axis=1)
    return code


def _lloyd_assignment(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Nearest centroids; then every empty cluster takes the row that is farthest from its centroid."""
    code = _nearest(x, centroids)
    counts = np.bincount(code, minlength=len(centroids))
    if counts.all():
        return code
    distance = np.empty(len(x), dtype=x.dtype)
    for start in range(0, len(x), CHUNK):
        rows = slice(start, start + CHUNK)
        distance[rows] = _squared_norms(x[rows] - centroids[code[rows]])
    for empty in np.flatnonzero(counts == 0):
        candidate = np.where(counts[code] > 1, distance, 0)
        row = int(candidate.argmax())
        if not candidate[row] > 0:
            break
        counts[code[row]] -= 1
        counts[empty] += 1
        code[row] = empty
        distance = np.minimum(distance, ((x - x[row]) ** 2).sum(axis=1))
    return code


def _balanced_assignment(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Clusters in index order take their nearest ceil(I / K) unassigned rows, ties to the lower row."""
    capacity = math.ceil(len(x) / len(centroids))
    distance = np.empty((len(centroids), len(x)), dtype=x.dtype)
    norms = _squared_norms(centroids)[:, None]
    for start in range(0, len(x), CHUNK):
        rows = slice(start, start + CHUNK)
        distance[:, rows] = -2 * (centroids @ x[rows].T) + norms + _squared_norms(x[rows])
    code = np.empty(len(x), dtype=np.int64)
    free = np.arange(len(x))
    for cluster in range(len(centroids)):
        if len(free) <= capacity:
            code[free] = cluster
            break
        near = distance[cluster, free]
        edge = np.partition(near, capacity - 1)[capacity - 1]
        taken = near < edge
        at_edge = np.flatnonzero(near == edge)
        taken[at_edge[: capacity - int(taken.sum())]] = True
        code[free[taken]] = cluster
        free = free[~taken]
    return code


class _Sums:
    """Sums and counts of clusters, kept up to date in float64 by the rows that changed their cluster."""

    def __init__(self, x: np.ndarray, size: int) -> None:
        self.x, self.size = x, size
        self.code: np.ndarray | None = None

    def means(self, code: np.ndarray, centroids: np.ndarray) -> np.ndarray:
        """Mean of every cluster; an empty one keeps its centroid."""
        changed = None if self.code is None else np.flatnonzero(code != self.code)
        if changed is None or 2 * len(changed) > len(code):
            self.sums = self._sum(code, np.arange(len(code)))
        else:
            self.sums += self._sum(code[changed], changed) - self._sum(self.code[changed], changed)
        self.code = code
        counts = np.bincount(code, minlength=self.size)[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), centroids).astype(self.x.dtype)

    def _sum(self, code: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """float64[K, D] sums of some rows, added in ascending order chunk by chunk."""
        from scipy import sparse

        total = np.zeros((self.size, self.x.shape[1]))
        for start in range(0, len(rows), CHUNK):
            part, label = rows[start : start + CHUNK], code[start : start + CHUNK]
            values = np.ones(len(part), dtype=self.x.dtype)
            member = sparse.csr_matrix((values, (label, np.arange(len(part)))), shape=(self.size, len(part)))
            total += member @ self.x[part]
        return total


def _plus_plus(x: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """k-means++ start: rows drawn with probability proportional to the squared distance to the rows drawn before."""
    rows = max(START_ROWS, 20 * size)
    if len(x) > rows:
        x = x[np.sort(rng.choice(len(x), rows, replace=False))]
    norms = _squared_norms(x)
    chosen = np.empty(size, dtype=np.int64)
    distance = None
    for k in range(size):
        total = 0.0 if distance is None else float(distance.sum(dtype=np.float64))
        if total > 0:
            edges = np.cumsum(distance, dtype=np.float64)
            row = int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
            chosen[k] = min(row, len(x) - 1)
        else:
            chosen[k] = rng.integers(len(x))
        fresh = np.maximum(norms - 2 * (x @ x[chosen[k]]) + norms[chosen[k]], 0)
        fresh[chosen[k]] = 0
        distance = fresh if distance is None else np.minimum(distance, fresh)
    return x[chosen].copy()
