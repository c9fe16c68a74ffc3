"""Coarse to fine: a beam over cells, one step for the vector of each, the nearest items inside, and BeamFusion.

Phi(k, a) = softmax_k(tau phi)[k] * softmax_(k', a')(psi cos(vhat^k', v_a'))[(k, a)]
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapters.cobra.model import Cobra, unit
from auto_research.blocks.beam_search import constrained_beam
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Scorer
from auto_research.evaluate.next_list import Lister
from auto_research.metrics.ranking import top_items
from auto_research.runtime.devices import synchronize
from auto_research.runtime.precision import float32_region
from auto_research.train.sid import read_history, seen_items

NOTHING = -1e4  # finite: a mask in low precision must not meet an infinity
TAUS, PSIS = (0.3, 0.9, 2.0), (4.0, 16.0, 32.0)


class Found(NamedTuple):
    """Candidates of M beams: phi float[B, M] (NOTHING where there is no beam), cosine float[B, M, N] (NOTHING where there
    is no item), items int64[B, M, N] (0 there), best first inside a beam; leaf int64[B, M]."""

    phi: Tensor
    cosine: Tensor
    items: Tensor
    leaf: Tensor


@torch.no_grad()
def search(model: Cobra, trie: PrefixTrie, ctx, seen: Tensor, *, cells: int, inside: int, clock=None) -> Found:
    """`cells` ids by beam search and the `inside` nearest unseen items of each. clock: called between the phases."""
    tick = clock or (lambda name: None)
    beams = constrained_beam(SIDStep(model.sid), ctx, trie, cells, alive=trie.alive(seen))
    tick("beam")
    vhat = refined(model, beams)
    tick("refine")
    found = nearest_inside(vhat, model.catalogue, trie, beams.leaf[..., 0], seen, inside)
    phi = torch.where(beams.found(), beams.logp, NOTHING)
    tick("search")
    return Found(phi, *found, beams.leaf[..., 0])


def refined(model: Cobra, beams) -> Tensor:
    """vhat [B, M, D]: one more token, the last code of each beam, on the cache that the beam search has left."""
    ctx, own = beams.state
    codes = beams.codes.clamp(min=0)
    if model.config.parallel:
        return model.expected(ctx, codes)
    last = codes[..., -1:] + model.sid.offset[-1]
    own = None if own is None else own.reorder(beams.parent)
    return model.dense_head(model.sid.spell(last, ctx, own)[0][:, :, -1])


def nearest_inside(
    vhat: Tensor, catalogue: Tensor, trie: PrefixTrie, leaf: Tensor, seen: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Cosines and items [B, M, N] of the nearest unseen items of each cell, leaf int64[B, M] (-1 = none)."""
    group = trie.group[leaf.clamp(min=0)]  # (B, M, G)
    fresh = torch.ones(len(leaf), trie.n_items + 1, dtype=torch.bool, device=leaf.device).scatter(1, seen, False)
    real = (group > 0) & (leaf >= 0).unsqueeze(-1) & fresh.gather(1, group.flatten(1)).view_as(group)
    with float32_region(vhat.device):
        cosine = torch.einsum("bmd,bmgd->bmg", unit(vhat), unit(catalogue)[group])
    cosine = torch.where(real, cosine, NOTHING)
    best = cosine.sort(dim=-1, descending=True, stable=True)
    items = torch.where(best.values > NOTHING, group.gather(-1, best.indices), 0)
    return best.values[..., :count], items[..., :count]


def beam_fusion(phi: Tensor, cosine: Tensor, tau: float, psi: float) -> Tensor:
    """Phi float32[B, M, N]; 0 where there is no item. The second softmax is over all candidates of a request."""
    real = cosine > NOTHING
    beam = torch.where(phi > NOTHING, tau * phi.float(), NOTHING).softmax(-1)
    within = torch.where(real, psi * cosine.float(), NOTHING).flatten(1).softmax(-1).view_as(cosine)
    return torch.where(real, beam.unsqueeze(-1) * within, 0.0)


def unfused(phi: Tensor, cosine: Tensor) -> Tensor:
    """Scores [B, M, N] > 0 that order by beam first, by cosine inside a beam."""
    order = torch.arange(phi.shape[1], 0, -1, device=phi.device, dtype=torch.float32).view(1, -1, 1)
    return torch.where(cosine > NOTHING, 4 * order + cosine.float(), 0.0)


def ranked(score: Tensor, items: Tensor, count: int) -> Tensor:
    """int64[B, count] items by score [B, M, N], filled up with 0; an item is in one cell, so none is there twice."""
    best = score.flatten(1).sort(dim=1, descending=True, stable=True)
    found = torch.where(best.values > 0, items.flatten(1).gather(1, best.indices), 0)[:, :count]
    return F.pad(found, (0, count - found.shape[1]))


class Fusion(NamedTuple):
    """How candidates are ordered: by Phi, or (fused False) by beam and then cosine."""

    tau: float = 0.9
    psi: float = 16.0
    fused: bool = True

    def score(self, found: Found) -> Tensor:
        if not self.fused:
            return unfused(found.phi, found.cosine)
        return beam_fusion(found.phi, found.cosine, self.tau, self.psi)


class Server(NamedTuple):
    """A model over a split; trie on `device`."""

    model: Cobra
    sequences: LeaveTwoOut
    trie: PrefixTrie
    device: torch.device

    def read(self, split: str, positions: np.ndarray):
        ctx = read_history(self.model, self.sequences, split, positions, self.model.config.length, self.device)
        return ctx, torch.from_numpy(seen_items(self.sequences, split, positions)).to(self.device)

    def find(self, split: str, positions: np.ndarray, *, cells: int, inside: int, clock=None) -> Found:
        """The catalogue must have been encoded (`Cobra.index`)."""
        ctx, seen = self.read(split, positions)
        return search(self.model, self.trie, ctx, seen, cells=cells, inside=inside, clock=clock)

    def lister(self, fusion: Fusion, *, cells: int, inside: int, count: int = 10) -> Lister:
        self.model.index()

        def answer(split: str, positions: np.ndarray) -> np.ndarray:
            found = self.find(split, positions, cells=cells, inside=inside)
            return ranked(fusion.score(found), found.items, count).cpu().numpy()

        return answer

    def scorer(self, fusion: Fusion) -> Scorer:
        """Scores of every item: all cells, all items inside, which is what the search approximates; -inf for seen items."""
        self.model.index()

        def score(split: str, positions: np.ndarray) -> np.ndarray:
            found = self.find(split, positions, cells=self.trie.n_leaves, inside=self.trie.group.shape[1])
            scores = torch.full((len(positions), self.trie.n_items + 1), -torch.inf, device=self.device)
            scores = scores.scatter(1, found.items.flatten(1), fusion.score(found).flatten(1))
            scores[:, 0] = -torch.inf
            return scores.cpu().numpy()

        return score

    def dense_scorer(self) -> Scorer:
        """wo_id: cosine with every item."""
        self.model.index()

        def score(split: str, positions: np.ndarray) -> np.ndarray:
            ctx, _ = self.read(split, positions)
            with torch.no_grad():
                vhat = self.model.expected(ctx, torch.zeros(len(positions), 1, 1, dtype=torch.int64))
                with float32_region(self.device):
                    return (unit(vhat[:, 0]) @ unit(self.model.catalogue).t()).cpu().numpy()

        return score

    def dense_lister(self, count: int = 10) -> Lister:
        score = self.dense_scorer()

        def answer(split: str, positions: np.ndarray) -> np.ndarray:
            return top_items(score(split, positions), [self.sequences.history(split, int(i)) for i in positions], count)

        return answer


def chunks(count: int, size: int = 256) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def tune(server: Server, *, cells: int, inside: int) -> tuple[Fusion, dict[str, float]]:
    """tau and psi by validation ndcg@10 from one search, the first of equals; and the value of every pair."""
    server.model.index()
    gains: dict[tuple[float, float], list[np.ndarray]] = {(tau, psi): [] for tau in TAUS for psi in PSIS}
    target = server.sequences.valid_target
    for positions in chunks(len(server.sequences)):
        found = server.find("valid", positions, cells=cells, inside=inside)
        for (tau, psi), values in gains.items():
            top = ranked(beam_fusion(found.phi, found.cosine, tau, psi), found.items, 10).cpu().numpy()
            hit = top == target[positions][:, None]
            values.append(np.where(hit.any(1), 1 / np.log2(2 + hit.argmax(1)), 0.0))
    means = {pair: float(np.concatenate(values).mean()) for pair, values in gains.items()}
    best = max(means, key=means.get)
    return Fusion(*best), {f"tau {tau:g}, psi {psi:g}": value for (tau, psi), value in means.items()}


def cell_facts(server: Server, *, cells: int) -> dict[str, float]:
    """cell_hit_rate: share of users whose test item lies in one of the `cells` beams; in_cell_mrr: mean of 1 / rank of
    the test item inside its own cell, by the vector that knows this cell, 0 where it may not be offered."""
    model, trie = server.model, server.trie
    model.index()
    hits, inverse = [], []
    for positions in chunks(len(server.sequences)):
        ctx, seen = server.read("test", positions)
        target = torch.from_numpy(server.sequences.test_target[positions]).to(server.device)
        leaf = trie.leaf_of[target].unsqueeze(1)
        beams = constrained_beam(SIDStep(model.sid), ctx, trie, cells, alive=trie.alive(seen))
        hits.append((beams.leaf[..., 0] == leaf).any(1))
        with torch.no_grad():
            vhat = model.expected(ctx, model.codes[target].unsqueeze(1))
        _, items = nearest_inside(vhat, model.catalogue, trie, leaf, seen, trie.group.shape[1])
        hit = items[:, 0] == target.unsqueeze(1)
        inverse.append(torch.where(hit.any(1), 1 / (1 + hit.int().argmax(1)).double(), 0.0))
    return {
        "cell_hit_rate": float(torch.cat(hits).double().mean()),
        "in_cell_mrr": float(torch.cat(inverse).mean()),
    }


def phase_times(server: Server, fusion: Fusion, *, cells: int, inside: int, users: int = 256) -> dict[str, float]:
    """Milliseconds per user of the phases of an answer to a batch of users: read_ms (history through the decoder),
    beam_ms, refine_ms, search_ms (nearest inside the cells), fuse_ms (scores and ten items); and index_ms of encoding
    the catalogue once."""
    spent: dict[str, float] = {}
    started = 0.0

    def clock(name: str) -> None:
        nonlocal started
        synchronize(server.device)
        now = time.perf_counter()
        spent[name] = now - started
        started = now

    positions = np.arange(min(users, len(server.sequences)))
    for _ in range(2):  # the first answer warms up
        synchronize(server.device)
        started = time.perf_counter()
        server.model.index()
        clock("index")
        ctx, seen = server.read("test", positions)
        clock("read")
        found = search(server.model, server.trie, ctx, seen, cells=cells, inside=inside, clock=clock)
        ranked(fusion.score(found), found.items, 10)
        clock("fuse")
    index = 1e3 * spent.pop("index")
    return {f"{name}_ms": 1e3 * seconds / len(positions) for name, seconds in spent.items()} | {"index_ms": index}
