"""What else a trained generator can answer: an ordinary beam without the trie, and lists drawn at a temperature."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from auto_research.blocks.beam_search import constrained_beam, sample_paths
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_list import Lister, genre_entropy, split_lists
from auto_research.metrics.ranking import TOP_K
from auto_research.runtime.seeds import torch_generator
from auto_research.train.sid import read_history, seen_items

TEMPERATURES = (1.0, 1.5, 2.0)


class Served(NamedTuple):
    """A trained generator with what it is asked about: sequences, the trie on `device`, items of a history."""

    model: nn.Module
    sequences: LeaveTwoOut
    trie: PrefixTrie
    length: int
    device: torch.device

    def read(self, split: str, positions: np.ndarray):
        """The model's ctx, and the seen items int64[B, S] on the device."""
        ctx = read_history(self.model, self.sequences, split, positions, self.length, self.device)
        return ctx, torch.from_numpy(seen_items(self.sequences, split, positions)).to(self.device)


def unconstrained(served: Served, width: int) -> dict[str, float]:
    """The paper's beam without a trie: share of paths that name no item, and ndcg@10 of what is left after invalid and
    seen ids are dropped."""
    invalid, paths = 0, 0

    def answer(split: str, positions: np.ndarray) -> np.ndarray:
        nonlocal invalid, paths
        ctx, seen = served.read(split, positions)
        beams = constrained_beam(SIDStep(served.model), ctx, served.trie, width, constrained=False)
        invalid += int(beams.invalid().sum())
        paths += int(beams.found().sum())
        return served.trie.expand(beams.leaf[..., 0], TOP_K, seen=seen).cpu().numpy()

    lists = split_lists(answer, served.sequences, "test")
    return {
        "invalid_sid_rate": invalid / max(1, paths),
        "unconstrained_ndcg@10": float(lists.ndcg(TOP_K).mean()),
        "unconstrained_short_lists": lists.short(),
    }


def drawn_lister(served: Served, temperature: float, seed: int) -> Lister:
    """Lists of distinct unseen items drawn from the trie at a temperature, in the order drawn."""

    def answer(split: str, positions: np.ndarray) -> np.ndarray:
        ctx, seen = served.read(split, positions)
        generator = torch_generator("cpu", "tiger-temperature", seed, temperature, int(positions[0]))
        beams = sample_paths(
            SIDStep(served.model),
            ctx,
            served.trie,
            TOP_K,
            alive=served.trie.alive(seen),
            temperature=temperature,
            distinct=True,
            generator=generator,
        )
        return served.trie.expand(beams.leaf[..., 0], TOP_K, seen=seen).cpu().numpy()

    return answer


def temperatures(served: Served, genres: np.ndarray, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Genre entropy (nats) and ndcg@10 of test lists drawn at each of TEMPERATURES."""
    entropy, ndcg = [], []
    for temperature in TEMPERATURES:
        lists = split_lists(drawn_lister(served, temperature, seed), served.sequences, "test")
        entropy.append((temperature, float(genre_entropy(lists.items, genres).mean())))
        ndcg.append((temperature, float(lists.ndcg(TOP_K).mean())))
    return {"topk_genre_entropy": entropy, "ndcg@10": ndcg}
