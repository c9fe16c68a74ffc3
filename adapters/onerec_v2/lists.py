"""Lists by trie beam search over one shared context, log-probabilities of events, and metrics by feedback label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from adapters.onerec_v2.events import ContextBatch, EventStream, Stream, StreamRule
from adapters.onerec_v2.model import OneRecV2
from auto_research.blocks.beam_search import constrained_beam, exhaustive_sid_scores, sample_paths
from auto_research.blocks.branch_cache import Memory
from auto_research.blocks.preference import k3
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.blocks.sid_models import SIDStep, path_logprob
from auto_research.evaluate.next_list import Lister
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.bootstrap import interval_mean
from auto_research.runtime.seeds import torch_generator

TOP = 10
CHUNK = 256
KL_USERS, KL_SAMPLES = 256, 8


class Decoder:
    """Decoding with one generator and the trie of its codes, all on one device."""

    def __init__(self, model: OneRecV2, table: SIDTable, device: torch.device, *, beams: int):
        self.model, self.table, self.device, self.beams = model, table, device, beams
        self.trie = PrefixTrie.of(table, device)

    def contexts(self, stream: EventStream, rows: np.ndarray) -> ContextBatch:
        config = self.model.config
        return stream.contexts(rows, config.history, config.user_slots).to(self.device)

    @torch.no_grad()
    def lists(self, stream: EventStream, rows: np.ndarray) -> np.ndarray:
        """int64[B, 10] best unseen items before each target row; the context is read once for all beams."""
        self.model.eval()
        parts = []
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            seen = torch.from_numpy(_padded([stream.history(row) for row in part])).to(self.device)
            ctx = self.model.read(self.contexts(stream, part))
            beams = constrained_beam(SIDStep(self.model.sid), ctx, self.trie, self.beams, alive=self.trie.alive(seen))
            parts.append(self.trie.expand(beams.leaf[..., 0], TOP, seen=seen).cpu().numpy())
        return np.concatenate(parts) if parts else np.zeros((0, TOP), dtype=np.int64)

    def lister(self, stream: EventStream) -> Lister:
        return lambda split, positions: self.lists(stream, stream.targets[split][positions])

    @torch.no_grad()
    def scores(self, stream: EventStream, split: str, positions: np.ndarray) -> np.ndarray:
        """log pi of every item float32[B, n_items + 1], column 0 below all others."""
        self.model.eval()
        ctx = self.model.read(self.contexts(stream, stream.targets[split][positions]))
        scores = exhaustive_sid_scores(self.model.sid, ctx, self.table).cpu().numpy()
        scores[:, 0] = scores[:, 1:].min(1) - 1
        return scores

    @torch.no_grad()
    def divergence(self, other: Decoder, stream: EventStream, rows: np.ndarray, *, seed: int) -> float:
        """KL(self || other) of code tuples after the contexts of some rows, k3 on sampled tuples."""
        rows = rows[:KL_USERS]
        context, noise = self.contexts(stream, rows), torch_generator("cpu", "kl", seed)
        mine, theirs = self.model.eval().read(context), other.model.eval().read(context)
        drawn = sample_paths(
            SIDStep(self.model.sid), mine, self.trie, KL_SAMPLES, constrained=False, generator=noise
        ).codes
        valid = (drawn >= 0).all(2) & (drawn < torch.tensor(self.table.sizes, device=self.device)).all(2)
        drawn = torch.where(valid.unsqueeze(2), drawn, 0)
        values = k3(path_logprob(self.model.sid, mine, drawn), path_logprob(other.model.sid, theirs, drawn))
        return float(values[valid].mean())

    @torch.no_grad()
    def context_bytes(self, batch: ContextBatch) -> int:
        """Bytes a user's context takes while its beams are spelled; a tensor that is key and value counts once."""
        ctx = self.model.eval().read(batch)
        if isinstance(ctx, Memory):
            kept = (*ctx.keys, *ctx.values)
        else:
            shared = getattr(ctx, "shared", ctx)
            kept = (*shared.keys, *shared.values)
        return sum({id(t): t.numel() * t.element_size() for t in kept}.values())


@torch.no_grad()
def pair_gap(decoder: Decoder, stream: EventStream, label: np.ndarray, rule: StreamRule) -> dict[str, float]:
    """Mean log pi of the test events by label, and gap: that of A = +1 less that of A = -1 (0 without either)."""
    decoder.model.eval()
    rows = stream.targets["test"]
    reader = Stream(stream, rule, ("read",), decoder.device)
    parts = [reader.read(part) for part in np.array_split(rows, -(-len(rows) // CHUNK))]
    logp = torch.cat([decoder.model.logp(part.context, part.target) for part in parts]).cpu().numpy().astype(np.float64)
    found = {}
    for name, wanted in (("positive", 1), ("neutral", 0), ("negative", -1)):
        mine = logp[label[rows] == wanted]
        found |= {name: float(mine.mean()) if len(mine) else 0.0, f"{name}_events": float(len(mine))}
    both = found["positive_events"] and found["negative_events"]
    return found | {"gap": found["positive"] - found["negative"] if both else 0.0}


def feedback_metrics(measured: Measurement, label: np.ndarray) -> None:
    """Adds recall@10, ndcg@10_on_positive_A and dislike_hit@10 from a next-item measurement's contributions.

    label: A int64[U] of the test events in the order of the contributions. Without an event of a label the value is 0.
    """
    units = measured.units
    ids, ndcg, hit = np.array(units["ndcg@10"].ids), np.array(units["ndcg@10"].values), np.array(units["hit@10"].values)
    measured.metrics["recall@10"] = measured.metrics["hit@10"]
    measured.units["recall@10"] = Units("user", ids, hit)
    for name, values, wanted in (("ndcg@10_on_positive_A", ndcg, 1), ("dislike_hit@10", hit, -1)):
        chosen = label == wanted
        measured.metrics[name] = float(values[chosen].mean()) if chosen.any() else 0.0
        if chosen.any():
            measured.units[name] = Units("user", ids[chosen], values[chosen])


def time_report(stream: EventStream, lists: Callable[[np.ndarray], np.ndarray], label: np.ndarray) -> dict[str, Any]:
    """Metrics on the targets of the global time split: ndcg@10 with its interval over users, recall@10, by label.

    lists: target rows -> int64[B, 10]. label: A int64[N].
    """
    rows = stream.targets["test"]
    if not len(rows):
        return {"targets": 0}
    found = lists(rows)
    hit = found == stream.item[rows][:, None]
    ndcg = (hit / np.log2(2 + np.arange(found.shape[1]))).sum(1)
    user = stream.user(rows)
    known = np.isin(user, stream.user(stream.train))
    per_user = np.array([ndcg[user == u].mean() for u in np.unique(user)])
    interval = interval_mean(per_user)
    facts = {
        "targets": len(rows), "users": len(per_user), "targets_of_new_users": int((~known).sum()),
        "ndcg@10": float(ndcg.mean()), "recall@10": float(hit.any(1).mean()),
        "ndcg@10_by_user": [interval.delta, interval.low, interval.high],
    }  # fmt: skip
    for name, wanted in (("positive", 1), ("negative", -1)):
        chosen = label[rows] == wanted
        facts[f"recall@10_on_{name}"] = float(hit[chosen].any(1).mean()) if chosen.any() else 0.0
    return facts


def _padded(lists: list[np.ndarray]) -> np.ndarray:
    grid = np.zeros((len(lists), max((len(x) for x in lists), default=0)), dtype=np.int64)
    for row, items in enumerate(lists):
        grid[row, : len(items)] = items
    return grid
