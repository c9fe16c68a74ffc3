"""Sessions by beam search over codes, and the ranked list that is read off them.

    score(i) = log sum_{b: i in S_b} p(S_b | H),   list = the ten best

Beams of a session share most of their items; where fewer than ten are in them, the list goes on with the items that are
likeliest to open a session.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.onerec.model import SessionGenerator
from adapters.onerec.sessions import SessionSplit, histories
from auto_research.blocks.beam_search import Beams, constrained_beam, exhaustive_sid_scores, sample_paths
from auto_research.blocks.branch_cache import Memory
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.blocks.sid_models import SIDStep

TOP = 10
CHUNK = 64


class Sessions(NamedTuple):
    """Sessions of U contexts, best first: items int64[U, N, m] (0 = none), logp float32[U, N]."""

    items: np.ndarray
    logp: np.ndarray


class Ranking(NamedTuple):
    """Lists of U contexts and what they are made of.

    items: int64[U, 10].  sessions: behind them.  opening: int64[U, >= 10] items likeliest to open a session.
    open: bool[U, 10] slots that the sessions left to `opening`.
    """

    items: np.ndarray
    sessions: Sessions
    opening: np.ndarray
    open: np.ndarray

    def first_beam(self) -> np.ndarray:
        """Ablation int64[U, 10]: the sessions are read in order, and open slots filled alike."""
        return fill(first_beam_list(self.sessions), self.opening)


class Decoder:
    """Decoding with one generator and the trie of its codes; all on one device."""

    def __init__(self, model: SessionGenerator, table: SIDTable, device: torch.device, *, beams: int = 16):
        self.model, self.table, self.device, self.beams = model, table, device, beams
        self.trie = PrefixTrie.of(table, device)

    @property
    def m(self) -> int:
        return self.model.settings.session

    def memory(self, history: np.ndarray) -> Memory:
        return self.model.read(torch.from_numpy(history).to(self.device))

    def alive(self, seen: list[np.ndarray]) -> Tensor:
        return self.trie.alive(torch.from_numpy(padded(seen)).to(self.device))

    @torch.no_grad()
    def sessions(self, history: np.ndarray, seen: list[np.ndarray], beams: int | None = None) -> Sessions:
        """The best sessions without items of `seen` and without repeats. history: int64[U, n]."""
        parts = []
        for rows in chunks(len(history)):
            memory, alive = self.memory(history[rows]), self.alive(seen[rows])
            found = self._beam(memory, alive, beams or self.beams, self.m)
            parts.append((self.items(found.leaf), found.logp.cpu().numpy()))
        items, logp = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Sessions(items, logp)

    @torch.no_grad()
    def samples(self, history: np.ndarray, seen: list[np.ndarray], count: int, generator: torch.Generator) -> Sessions:
        """`count` random sessions of each context from the served policy: the model's softmax over the codes that lead
        to an item neither seen nor made yet. logp is the model's over the whole vocabulary. generator: on the CPU.
        """
        parts = []
        for rows in chunks(len(history)):
            memory, alive = self.memory(history[rows]), self.alive(seen[rows])
            found = sample_paths(
                SIDStep(self.model), memory, self.trie, count, alive=alive, items=self.m, generator=generator
            )
            parts.append((self.items(found.leaf), found.logp.cpu().numpy()))
        items, logp = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Sessions(items, logp)

    @torch.no_grad()
    def lists(self, history: np.ndarray, seen: list[np.ndarray]) -> Ranking:
        """Ranked lists of ten."""
        width = max(self.beams, TOP)
        opening = sessions = self.sessions(history, seen, width if self.m == 1 else self.beams)
        if self.m > 1:
            parts = []
            for rows in chunks(len(history)):
                found = self._beam(self.memory(history[rows]), self.alive(seen[rows]), width, 1)
                parts.append((self.items(found.leaf), found.logp.cpu().numpy()))
            opening = Sessions(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        scores = item_scores(sessions, self.table.n_items)
        ranked = best_of_scores(scores)
        first = opening.items[:, :, 0]
        filled = fill(ranked, first)
        return Ranking(filled, sessions, first, (ranked == 0) & (filled > 0))

    def choices(self, seen: list[np.ndarray], sessions: Tensor) -> list[Tensor]:
        """bool[U, N, K_l] for each of the m L' codes of sessions int64[U, N, m]: what the served policy may choose."""
        users, count, m = sessions.shape
        known = torch.from_numpy(padded(seen)).to(self.device).repeat_interleave(count, 0)
        made, codes = sessions.flatten(0, 1), self.model.item_codes[sessions].flatten(0, 1)  # (U N, m), (U N, m, L')
        masks = []
        for n in range(m):
            alive = self.trie.alive(torch.cat([known, made[:, :n]], dim=1))
            masks += [x.view(users, count, -1) for x in self.trie.path_masks(codes[:, n : n + 1], alive)]
        return masks

    @torch.no_grad()
    def opening_scores(self, data: SessionSplit, split: str, positions: np.ndarray) -> np.ndarray:
        """log p(first item of the session) of every item, float32[B, n_items + 1], column 0 very low."""
        self.model.eval()
        start = data.target_start(split)[positions]
        memory = self.memory(histories(data, start, positions, self.model.settings.history))
        scores = exhaustive_sid_scores(self.model, memory, self.table).cpu().numpy()
        scores[:, 0] = scores[:, 1:].min(1) - 1
        return scores

    def _beam(self, memory: Memory, alive: Tensor, beams: int, items: int) -> Beams:
        return constrained_beam(SIDStep(self.model), memory, self.trie, beams, alive=alive, items=items)

    def items(self, leaf: Tensor) -> np.ndarray:
        """Item of every leaf [.., m]; every leaf holds one (suffix mode)."""
        return self.trie.group[leaf.clamp(min=0), 0].masked_fill(leaf < 0, 0).cpu().numpy()


def item_scores(sessions: Sessions, n_items: int) -> np.ndarray:
    """score(i) float64[U, n_items + 1], -inf for items in no session."""
    users, _, m = sessions.items.shape
    logp = sessions.logp.astype(np.float64)
    top = logp.max(1, keepdims=True)
    weight = np.where(np.isfinite(logp), np.exp(logp - np.where(np.isfinite(top), top, 0)), 0)  # (U, N)
    total = np.zeros((users, n_items + 1))
    np.add.at(total, (np.arange(users)[:, None, None], sessions.items), np.repeat(weight[:, :, None], m, 2))
    total[:, 0] = 0
    with np.errstate(divide="ignore"):
        return np.log(total) + top


def best_of_scores(scores: np.ndarray, count: int = TOP) -> np.ndarray:
    """int64[U, count] items of the largest finite scores, ties to the lower item, then 0."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.where(np.isfinite(np.take_along_axis(scores, order, 1)), order, 0)


def first_beam_list(sessions: Sessions, count: int = TOP) -> np.ndarray:
    """Ablation: the items of the best session in order, then new items of the next ones; int64[U, count]."""
    flat = sessions.items.reshape(len(sessions.items), -1)
    return fill(np.zeros((len(flat), count), dtype=np.int64), flat)


def fill(lists: np.ndarray, more: np.ndarray) -> np.ndarray:
    """lists int64[U, k] whose empty slots (0, at the end) take the first items of `more` [U, *] not yet in the list."""
    out = lists.copy()
    for row in np.flatnonzero((lists == 0).any(1)):
        kept = [item for item in lists[row] if item]
        known = set(kept)
        for item in more[row]:
            if len(kept) == lists.shape[1]:
                break
            if item and item not in known:
                kept.append(item), known.add(item)
        out[row, : len(kept)] = kept
    return out


def padded(lists: list[np.ndarray]) -> np.ndarray:
    """int64[U, longest], filled with 0."""
    grid = np.zeros((len(lists), max((len(x) for x in lists), default=0)), dtype=np.int64)
    for row, items in enumerate(lists):
        grid[row, : len(items)] = items
    return grid


def chunks(count: int, size: int = CHUNK):
    """Slices of at most `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
