"""Co-engagement graph of G2Rec (arXiv:2606.20554) and soft modularity clustering of its items.

    w_ij = w_ji = number of sampled co-engagements;   |E| = sum_i k_i
    Q(P) = (1/|E|) sum_(i,j) w_ij p_i . p_j - gamma || P^T k ||^2 / |E|^2

Items are numbered from 1; row 0 of every array is padding and zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.blocks.residual_kmeans import kmeans
from auto_research.data.item_vectors import co_occurrence
from auto_research.data.sequences import LeaveTwoOut
from auto_research.runtime.precision import float32_region
from auto_research.runtime.seeds import stable_rng
from auto_research.train.optimizer import AdamW

LOUDNESS, NOISE = 4.0, 0.1  # of the one-hot clusters that the logits start from
RATE = 0.05
DENSE_ITEMS = 4096
WINDOW = 3


class Graph(NamedTuple):
    """Undirected multigraph as directed pairs, both directions, each once, ascending: i, j, w int64[E]."""

    i: np.ndarray
    j: np.ndarray
    w: np.ndarray
    n_items: int

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray, n_items: int) -> Graph:
        """Graph of undirected edges given once each, int[M]; repeats add up, self-pairs are dropped."""
        real = first != second
        first, second = first[real].astype(np.int64), second[real].astype(np.int64)
        key = np.concatenate([first, second]) * (n_items + 1) + np.concatenate([second, first])
        key, weight = np.unique(key, return_counts=True)
        return cls(key // (n_items + 1), key % (n_items + 1), weight.astype(np.int64), n_items)

    @property
    def total(self) -> int:
        """|E|, the sum of w over directed pairs."""
        return int(self.w.sum())

    def degree(self) -> np.ndarray:
        """k int64[n_items + 1]."""
        return np.bincount(self.i, weights=self.w, minlength=self.n_items + 1).astype(np.int64)

    def matrix(self):
        """Sparse float64[n_items + 1, n_items + 1]."""
        from scipy import sparse

        return sparse.csr_matrix((self.w.astype(np.float64), (self.i, self.j)), shape=(self.n_items + 1,) * 2)


def sampled_graph(sequences: LeaveTwoOut, seed: int, draws: int | None = None) -> Graph:
    """Train co-engagements: `draws` partners (default ceil(ln M) of M train events) of every event, drawn uniformly with
    replacement from the other events of its user."""
    items, starts = sequences.train_items, sequences.train_starts
    size = np.diff(starts)
    owner = np.repeat(np.arange(len(size)), size)
    row = np.flatnonzero(size[owner] >= 2)
    many = draws or math.ceil(math.log(max(2, len(items))))
    begin, count = starts[:-1][owner[row]], size[owner[row]]
    rng = stable_rng("co-engagement", seed, len(items), many)
    step = 1 + (rng.random((len(row), many)) * (count - 1)[:, None]).astype(np.int64)
    partner = begin[:, None] + ((row - begin)[:, None] + step) % count[:, None]
    return Graph.of(np.repeat(items[row], many), items[partner].ravel(), sequences.n_items)


def window_graph(sequences: LeaveTwoOut, width: int = WINDOW) -> Graph:
    """Pairs at most `width` places apart in a train sequence."""
    items = sequences.train_items
    owner = np.repeat(np.arange(len(sequences)), np.diff(sequences.train_starts))
    first, second = [], []
    for gap in range(1, width + 1):
        near = np.flatnonzero(owner[gap:] == owner[:-gap])
        first.append(items[near]), second.append(items[near + gap])
    return Graph.of(np.concatenate(first), np.concatenate(second), sequences.n_items)


def full_graph(sequences: LeaveTwoOut) -> Graph:
    """All pairs of items that a user rated in the train part, weighted by users."""
    together = co_occurrence(sequences.train, sequences.n_items).tocoo()
    order = np.lexsort((together.col, together.row))
    return Graph(
        together.row[order].astype(np.int64),
        together.col[order].astype(np.int64),
        together.data[order].astype(np.int64),
        sequences.n_items,
    )


class Modularity(nn.Module):
    """Q of profiles [n_items + 1, C] on a graph: a dense product for small catalogues, else a sum over all edges."""

    def __init__(self, graph: Graph, gamma: float = 1.0):
        super().__init__()
        self.gamma, self.total = gamma, float(graph.total)
        self.register_buffer("degree", torch.from_numpy(graph.degree()).float())
        self.dense = graph.n_items <= DENSE_ITEMS
        if self.dense:
            self.register_buffer("w", torch.from_numpy(graph.matrix().toarray()).float())
        else:
            once = graph.i < graph.j
            for name in ("i", "j"):
                self.register_buffer(name, torch.from_numpy(getattr(graph, name)[once]))
            self.register_buffer("w", torch.from_numpy(graph.w[once]).float())

    def forward(self, profiles: Tensor) -> Tensor:
        with float32_region(profiles.device):
            p = profiles.float()
            if self.dense:
                inside = (p * (self.w @ p)).sum()
            else:
                inside = 2 * (self.w * (p[self.i] * p[self.j]).sum(1)).sum()
            expected = (self.degree @ p).square().sum()
            return inside / self.total - self.gamma * expected / self.total**2


def sparse_profiles(logits: Tensor, rho: int) -> Tensor:
    """Softmax over the rho largest logits of every row [N, C], 0 elsewhere."""
    value, index = logits.topk(min(rho, logits.shape[1]), dim=1)
    return torch.zeros_like(logits).scatter(1, index, value.softmax(1))


def start_logits(vectors: np.ndarray, clusters: int, *seed) -> np.ndarray:
    """float32[N, C]: 4 * one-hot of k-means of vectors [N, D], plus noise of spread 0.1."""
    code = kmeans(vectors, clusters, seed=("g2rec", *seed)).code
    noise = stable_rng("g2rec-noise", *seed).standard_normal((len(vectors), clusters)) * NOISE
    return (LOUDNESS * np.eye(clusters)[code] + noise).astype(np.float32)


class Clustered(NamedTuple):
    """profiles float32[n_items + 1, C] on the CPU; q of every restart, before and at its best step."""

    profiles: Tensor
    start: list[float]
    best: list[float]


def soft_clusters(
    graph: Graph,
    vectors: np.ndarray,
    *,
    clusters: int,
    rho: int,
    steps: int,
    restarts: int = 3,
    seed: int = 0,
    gamma: float = 1.0,
    device: torch.device | str = "cpu",
) -> Clustered:
    """Profiles of the restart with the highest Q, the best step of each kept; vectors [n_items + 1, D] start them.

    An item without edges gets the uniform profile on its rho logits.
    """
    quality = Modularity(graph, gamma).to(device)
    runs = [
        _ascend(quality, start_logits(vectors[1:], clusters, seed, restart), rho, steps, device)
        for restart in range(restarts)
    ]
    best = max(range(restarts), key=lambda n: runs[n][2])
    logits = runs[best][0]
    profiles = sparse_profiles(logits, rho)
    alone = quality.degree == 0
    profiles[alone] = (profiles[alone] > 0).float()
    profiles = profiles / profiles.sum(1, keepdim=True)
    profiles[0] = 0
    return Clustered(profiles.cpu(), [run[1] for run in runs], [run[2] for run in runs])


def ascent(start: np.ndarray, device: torch.device | str) -> tuple[nn.Parameter, AdamW]:
    """Logits [n_items + 1, C] of the items' start [n_items, C], and what steps them."""
    logits = nn.Parameter(torch.from_numpy(np.pad(start, ((1, 0), (0, 0)))).to(device))
    return logits, AdamW([logits], lr=RATE, weight_decay=0.0)


def climb(quality: Modularity, logits: nn.Parameter, optimizer: AdamW, rho: int) -> float:
    """One step up Q; the Q before it."""
    q = quality(sparse_profiles(logits, rho))
    optimizer.zero_grad()
    (-q).backward()
    optimizer.step()
    return float(q.detach())


def _ascend(quality: Modularity, start: np.ndarray, rho: int, steps: int, device) -> tuple[Tensor, float, float]:
    """Best logits [n_items + 1, C] of Adam steps up Q, Q at the start and the best Q."""
    logits, optimizer = ascent(start, device)
    kept, values = logits.detach().clone(), []
    for step in range(steps + 1):
        now = logits.detach().clone()
        last = step == steps
        value = float(quality(sparse_profiles(now, rho))) if last else climb(quality, logits, optimizer, rho)
        if value > max(values, default=-math.inf):
            kept = now
        values.append(value)
    return kept, values[0], max(values)


def one_hot(labels: np.ndarray) -> np.ndarray:
    """float32[n_items + 1, C] of labels int[n_items + 1] (row 0 is ignored and zero)."""
    table = np.eye(int(labels[1:].max()) + 1, dtype=np.float32)[labels]
    table[0] = 0
    return table


def hard_profiles(profiles: np.ndarray) -> np.ndarray:
    """One-hot of every item's largest membership."""
    table = np.zeros_like(profiles)
    table[np.arange(1, len(profiles)), profiles[1:].argmax(1)] = 1
    return table


def permuted_profiles(profiles: np.ndarray, seed: int) -> np.ndarray:
    """The rows of the items in a random order."""
    order = stable_rng("permuted-profiles", seed, len(profiles)).permutation(len(profiles) - 1) + 1
    return np.concatenate([profiles[:1], profiles[order]])


def louvain_labels(graph: Graph, seed: int) -> np.ndarray:
    """int64[n_items + 1] communities of networkx's Louvain method; items without edges get one each; row 0 is 0."""
    import networkx

    network = networkx.Graph()
    network.add_nodes_from(range(1, graph.n_items + 1))
    once = graph.i < graph.j
    network.add_weighted_edges_from(zip(*(x[once].tolist() for x in (graph.i, graph.j, graph.w)), strict=True))
    labels = np.zeros(graph.n_items + 1, dtype=np.int64)
    for number, members in enumerate(networkx.community.louvain_communities(network, seed=seed)):
        labels[list(members)] = number
    return labels


def effective_clusters(profiles: np.ndarray) -> float:
    """exp of the entropy of the items' mean profile."""
    share = profiles[1:].mean(0)
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))
