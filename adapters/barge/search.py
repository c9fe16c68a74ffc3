"""Serving of BARGE: one encoding, a path-guided beam per channel, fusion of the channels' lists in item space.

beam key at level l:  log p(c_1 .. c_l) + eta cos(u^l, v^l)     of the best 3 w expansions; only log p is carried on
                      (the suffix level, which has no tower, keeps the cosine of the path above it)
OR-fusion:            (min rank, sum of ranks, - larger log p)  ascending; a missing rank is w + 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.barge.model import Barge, Channel
from auto_research.blocks.beam_search import (
    NEVER,
    Beams,
    Expansion,
    constrained_beam,
    exhaustive_sid_scores,
    first_largest,
)
from auto_research.blocks.branch_cache import Memory
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Scorer
from auto_research.evaluate.next_list import Lister
from auto_research.train.sid import CHUNK, read_history, seen_items

PRESELECT = 3
FUSIONS = ("or", "and", "logsum")
Hook = Callable[[Expansion], Tensor]


def path_hook(channel: Channel, memory: Memory, eta: float) -> Hook:
    """Key of a beam's candidates: log p + eta * cos(context, path), the path without the suffix."""
    reranker = channel.reranker
    if not eta or reranker is None:
        return lambda expansion: expansion.logp
    h = channel.opening(memory)

    def key(expansion: Expansion) -> Tensor:
        level = min(expansion.position, reranker.levels - 1)
        v = reranker.v(level, channel.paths(expansion.codes[..., : level + 1])[..., -1, :])  # (B, c, D)
        return expansion.logp + eta * (v @ reranker.u(level, h).unsqueeze(2)).squeeze(2)

    return key


def watched(hook: Hook, width: int, codes: Tensor, kept: list[Tensor]) -> Hook:
    """The same hook; appends to `kept`, level by level, bool[B]: the prefix of codes [B, L'] is among the beams."""

    def key(expansion: Expansion) -> Tensor:
        value = hook(expansion).float()
        stay = first_largest(torch.where(expansion.logp > NEVER, value, NEVER), width)
        wanted = codes[:, None, : expansion.position + 1]
        mine = (expansion.codes == wanted).all(2) & (expansion.logp > NEVER)
        kept.append(mine.gather(1, stay).any(1))
        return value

    return key


def channel_beam(
    channel: Channel, memory: Memory, trie: PrefixTrie, width: int, hook: Hook, alive: Tensor | None = None
) -> Beams:
    """Beams of one channel under a hook."""
    step = SIDStep(channel)
    return constrained_beam(step, memory, trie, width, on_level=hook, alive=alive, preselect=PRESELECT)


class ChannelLists(NamedTuple):
    """Per channel the ranked unseen items int64[B, w] (0 = none) and their log p float32[B, w].

    survived: bool[B, L'] per channel, the target's prefix stayed in the beam; None where nobody asked.
    """

    items: list[np.ndarray]
    logp: list[np.ndarray]
    survived: list[np.ndarray] | None = None

    def only(self, channel: int) -> ChannelLists:
        """The lists of one channel."""
        return ChannelLists([self.items[channel]], [self.logp[channel]])

    def survival(self) -> dict[str, np.ndarray]:
        """float64[U] per level: share of the channels that kept the target's prefix, and whether any of them did."""
        return survival(np.stack(self.survived))

    def overlap(self) -> np.ndarray:
        """float64[B] share of the first channel's items that the second has too."""
        first, second = self.items
        both = ((first[:, :, None] == second[:, None, :]) & (first > 0)[:, :, None]).any(2)
        return both.sum(1) / np.maximum((first > 0).sum(1), 1)


def survival(kept: np.ndarray) -> dict[str, np.ndarray]:
    """Contributions float64[U] per level of kept bool[C, U, L']: mean over the channels, and any of them."""
    found = {}
    for level in range(kept.shape[2]):
        found[f"beam_prefix_survival@{level + 1}"] = kept[..., level].mean(0)
        found[f"beam_prefix_survival_any@{level + 1}"] = kept[..., level].any(0).astype(np.float64)
    return found


def expansions(width: int, trie: PrefixTrie) -> int:
    """Prefixes that a beam of `width` extends over all levels, the root included; a level has no more than it has nodes."""
    return sum(min(width, trie.starts[level + 1] - trie.starts[level]) for level in range(trie.levels))


class DualSearch:
    """Lists of a trained model for users of leave-two-out sequences.

    tables: of the channels that are used, the first ones of the model.  width: beams of each.
    """

    def __init__(
        self, model: Barge, sequences: LeaveTwoOut, tables: Sequence[SIDTable], width: int, device: torch.device
    ):
        self.model, self.sequences, self.width, self.device = model, sequences, width, device
        self.tries = [PrefixTrie.of(table, device) for table in tables]

    @torch.no_grad()
    def lists(self, split: str, positions: np.ndarray, eta: float, survival: bool = False) -> ChannelLists:
        """Ranked lists of every channel; survival: also look for the split's targets in the beams."""
        memories = read_history(self.model, self.sequences, split, positions, self.model.config.length, self.device)
        seen = torch.from_numpy(seen_items(self.sequences, split, positions)).to(self.device)
        target = torch.from_numpy(self.sequences.target(split)[positions]).to(self.device) if survival else None
        found = ChannelLists([], [], [] if survival else None)
        for channel, memory, trie in zip(self.model.channels, memories, self.tries, strict=False):
            kept: list[Tensor] = []
            hook = path_hook(channel, memory, eta)
            if survival:
                hook = watched(hook, self.width, channel.codes[target], kept)
            beams = channel_beam(channel, memory, trie, self.width, hook, trie.alive(seen))
            found.items.append(trie.expand(beams.leaf[..., 0], self.width).cpu().numpy())
            found.logp.append(beams.logp.cpu().numpy())
            if survival:
                found.survived.append(torch.stack(kept, dim=1).cpu().numpy())
        return found

    def lister(self, eta: float, fusion: str = "or", count: int = 10) -> Lister:
        """Lister of the fused lists."""
        return lambda split, positions: fuse(self.lists(split, positions, eta), fusion, count)

    def everyone(self, split: str, eta: float) -> ChannelLists:
        """Lists with survival of all users, chunk by chunk."""
        users = np.arange(len(self.sequences))
        parts = [self.lists(split, users[a : a + CHUNK], eta, True) for a in range(0, len(users), CHUNK)]
        return ChannelLists(
            *([np.concatenate(x) for x in zip(*column, strict=True)] for column in zip(*parts, strict=True))
        )


def fuse(lists: ChannelLists, mode: str = "or", count: int = 10, missing: int | None = None) -> np.ndarray:
    """int64[B, count] items of the channels' union, best first, ties by lower item, 0 = none.

    mode: "or", or "and" (items of both channels come first), or "logsum" (logaddexp of the log p).
    missing: rank of an item that a channel does not have, default one more than the longest list.
    """
    if mode not in FUSIONS:
        raise ValueError(f"unknown fusion {mode!r}; known: {', '.join(FUSIONS)}")
    missing = missing or 1 + max(items.shape[1] for items in lists.items)
    union = np.concatenate(lists.items, axis=1)  # (B, W)
    earlier = np.tril(np.ones((union.shape[1],) * 2, dtype=bool), -1)
    repeated = ((union[:, :, None] == union[:, None, :]) & earlier).any(2)
    ranks, logps = zip(
        *(_places(union, *part, missing) for part in zip(lists.items, lists.logp, strict=True)), strict=True
    )
    rank, logp = np.stack(ranks), np.stack(logps)  # (C, B, W)
    lost = repeated | (union == 0)
    if mode == "logsum":
        keys = [union, -np.logaddexp.reduce(logp, axis=0)]
    else:
        keys = [union, -logp.max(axis=0), rank.sum(axis=0), rank.min(axis=0)]
        if mode == "and":
            keys.append((rank == missing).any(axis=0))
    order = np.lexsort([*keys, lost], axis=-1)[:, :count]
    chosen = np.where(lost, 0, union)
    chosen = np.take_along_axis(chosen, order, axis=1)
    return np.pad(chosen, ((0, 0), (0, count - chosen.shape[1])))


def _places(union: np.ndarray, items: np.ndarray, logp: np.ndarray, missing: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank int64 (from 1) and log p float64 of the union's items [B, W] in a list [B, w]."""
    same = (union[:, :, None] == items[:, None, :]) & (items > 0)[:, None, :]
    has, at = same.any(2), same.argmax(2)
    found = np.take_along_axis(logp.astype(np.float64), at, axis=1)
    return np.where(has, at + 1, missing), np.where(has, found, -np.inf)


def scorer(model: Barge, sequences: LeaveTwoOut, tables: Sequence[SIDTable], device: torch.device) -> Scorer:
    """Exhaustive scores: log of the summed probabilities of an item's ids in the channels of `tables`."""

    def score(split: str, positions: np.ndarray) -> np.ndarray:
        memories = read_history(model, sequences, split, positions, model.config.length, device)
        parts = [
            exhaustive_sid_scores(channel, memory, table)
            for channel, memory, table in zip(model.channels, memories, tables, strict=False)
        ]
        return torch.stack(parts).logsumexp(0).cpu().numpy()

    return score
