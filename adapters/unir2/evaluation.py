"""Recall on the last event, ranking on the test rows, code accuracy, serving cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from adapters.unir2.events import UnifiedSplit, requests_at, seen_items
from adapters.unir2.features import PrefixTokens
from adapters.unir2.model import TASKS, THRESHOLDS, Served, UniR2
from auto_research.baselines.sasrec import SASRec
from auto_research.evaluate.next_list import Lister
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.cost import count_params, flops_of
from auto_research.metrics.ctr import user_auc
from auto_research.runtime.errors import RunFailure

CHUNK = 64
GRID = (0.0, 0.5, 1.0)
WARM_UP, TIMED = 1, 5
RANKED = 40  # candidates that ranking cost is stated for


def unified_score(served: Served, levels: int, alpha: float, weights: tuple[float, ...]) -> Tensor:
    """alpha log p(s_v | u) / L + sum_t w_t log p_t(u, v), float32 [B, w]; -inf where there is no item."""
    score = alpha * served.logp.float().masked_fill(served.item == 0, 0.0) / levels
    if served.tasks is not None:
        chance = nn.functional.logsigmoid(served.tasks.float())
        score = score + (chance * chance.new_tensor(list(weights))).sum(2)
    return score.masked_fill(served.item == 0, -torch.inf)


class Server:
    """Beams of one trained model over a split; each split is served once and re-ordered as often as wanted."""

    def __init__(self, model: nn.Module, data: UnifiedSplit, device: torch.device, rule, *, width: int, levels: int):
        self.model, self.data, self.device, self.rule = model, data, device, rule
        self.width, self.levels = width, levels

    def request(self, split: str, positions: np.ndarray):
        rows = self.data.cut(split)[positions]
        request = requests_at(self.data, rows, self.rule.history, self.rule.hashed, strict=False)
        return request.to(self.device), seen_items(self.data, rows).to(self.device)

    def serve(self, split: str, positions: np.ndarray) -> Served:
        self.model.eval()
        request, seen = self.request(split, positions)
        return self.model.serve(request, seen, width=self.width)

    def lister(self, alpha: float, weights: tuple[float, ...]) -> Lister:
        """Lists of a beam in the order of the unified score."""

        def lists(split: str, positions: np.ndarray) -> np.ndarray:
            served = self.serve(split, positions)
            return ordered(served, unified_score(served, self.levels, alpha, weights)).cpu().numpy()

        return lists

    def catalogue_scores(
        self, split: str, positions: np.ndarray, alpha: float, weights: tuple[float, ...]
    ) -> np.ndarray:
        """Unified scores [B, I + 1] of every item."""
        self.model.eval()
        request, _ = self.request(split, positions)
        logp, tasks = self.model.catalogue(request)
        item = torch.arange(logp.shape[1], device=logp.device).expand(len(logp), -1)
        score = unified_score(Served(item, logp, tasks), self.levels, alpha, weights)
        return score.clamp(min=-1e9).cpu().numpy()

    def choose_weights(self) -> tuple[dict[str, float], dict[str, float]]:
        """(weights alpha, click, longview, gift; ndcg@10 by name) of the best grid point by validation ndcg@10.

        Generation order (alpha 1, no task) is in the grid, and wins ties.
        """
        parts = [
            self.serve("valid", np.arange(a, min(a + CHUNK, len(self.data)))) for a in range(0, len(self.data), CHUNK)
        ]
        target = torch.from_numpy(self.data.target("valid")).to(self.device)
        found: dict[tuple[float, ...], float] = {}
        ranked = parts[0].tasks is not None
        grid = [(1.0, 0.0, 0.0, 0.0)]
        if ranked:
            grid += [(alpha, 1.0, *rest) for alpha, *rest in itertools.product(GRID, repeat=3)]
        for alpha, *weights in grid:
            gains = []
            for k, served in enumerate(parts):
                top = ordered(served, unified_score(served, self.levels, alpha, tuple(weights)))[:, :10]
                hit = top == target[k * CHUNK : k * CHUNK + len(top), None]
                place = torch.arange(top.shape[1], device=hit.device)
                gains.append((hit / torch.log2(place + 2.0)).sum(1))
            found[(alpha, *weights)] = float(torch.cat(gains).mean())
        best = max(found, key=lambda key: found[key])
        names = ("alpha", *TASKS)
        return dict(zip(names, best, strict=True)), {"generation_order": found[grid[0]], "chosen": found[best]}


def ordered(served: Served, score: Tensor) -> Tensor:
    """Items int64 [B, w] by falling score, ties in the order of the beam."""
    return served.item.gather(1, score.sort(dim=1, descending=True, stable=True).indices)


@torch.no_grad()
def ranked_rows(model: nn.Module, data: UnifiedSplit, split: str, device: torch.device, rule, limit: int | None = None):
    """Users int64[N], ratings float[N] and task logits float32[N, tasks] of a split's rows, strictly earlier history."""
    model.eval()
    rows, logits = data.rows(split)[:limit], []
    for start in range(0, len(rows), 4 * CHUNK):
        part = rows[start : start + 4 * CHUNK]
        request = requests_at(data, part, rule.history, rule.hashed, strict=True).to(device)
        item = torch.from_numpy(data.interactions.item[part].astype(np.int64)).to(device)
        logits.append(model.rank(request, item[:, None])[:, 0].cpu().numpy())
    return data.interactions.user[rows], data.interactions.rating[rows], np.concatenate(logits)


def impression_uauc(user: np.ndarray, label: np.ndarray, score: np.ndarray) -> float:
    """Mean AUC of the users with both labels, weighted by their rows."""
    inside = user_auc(user, label, score)
    if not len(inside.user):
        raise RunFailure("no user has both labels")
    return float(np.average(inside.auc, weights=inside.rows))


def ranking_metrics(user: np.ndarray, rating: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """auc_<task> and uauc_<task>."""
    from sklearn.metrics import roc_auc_score

    found = {}
    for k, (name, least) in enumerate(zip(TASKS, THRESHOLDS, strict=True)):
        label = (rating >= least).astype(np.int64)
        found[f"auc_{name}"] = float(roc_auc_score(label, logits[:, k]))
        found[f"uauc_{name}"] = impression_uauc(user, label, logits[:, k].astype(np.float64))
    return found


@torch.no_grad()
def code_accuracy(model: UniR2, data: UnifiedSplit, server: Server) -> dict[str, float]:
    """Share of test targets whose code of a level is the most likely one, the codes before it given."""
    hits = []
    for start in range(0, len(data), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(data)))
        request, _ = server.request("test", positions)
        codes = model.codes[torch.from_numpy(data.target("test")[positions]).to(server.device)].unsqueeze(1)
        states, _ = model.generator.whole(codes, model.read(request))
        best = [model.generator.logits(states[:, 0, level], level).argmax(1) for level in range(codes.shape[2])]
        hits.append((torch.stack(best, dim=1) == codes[:, 0]).float().cpu())
    return {f"code_accuracy_{k + 1}": float(value) for k, value in enumerate(torch.cat(hits).mean(0))}


def add_user_units(measured: Measurement, data: UnifiedSplit, user, rating, logits) -> None:
    """AUC inside users of the long-view task, whose plain mean is uauc_longview_mean."""
    inside = user_auc(user, (rating >= THRESHOLDS[1]).astype(np.int64), logits[:, 1].astype(np.float64))
    measured.metrics["uauc_longview_mean"] = float(inside.auc.mean())
    measured.units["uauc_longview_mean"] = Units("user", inside.user, inside.auc)


class EncoderCalls:
    """Counts how often a user's events are encoded while it is entered."""

    def __init__(self, model: nn.Module):

        self.encoders = [m for m in model.modules() if isinstance(m, PrefixTokens | SASRec)]
        self.calls = 0

    def __enter__(self) -> EncoderCalls:
        def count(module: nn.Module, args, output) -> None:
            self.calls += 1

        self.hooks = [encoder.register_forward_hook(count) for encoder in self.encoders]
        return self

    def __exit__(self, *_exception: object) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def serving_cost(server: Server) -> dict[str, float]:
    """One request: parameters, encodings of the user, milliseconds of recall and of ranking, FLOPs per candidate."""
    model = server.model.eval()
    request, seen = server.request("test", np.zeros(1, dtype=np.int64))

    def timed(work: Callable[[], object]) -> float:
        return 1e3 * median_seconds(work, server.device, WARM_UP, TIMED)

    with EncoderCalls(model) as counted:
        served = model.serve(request, seen, width=server.width)
    found = {
        "params": float(count_params(model)),
        "user_encodings_per_request": float(counted.calls),
        "flops": float(flops_of(lambda: model.serve(request, seen, width=server.width))),
        "request_ms": timed(lambda: model.serve(request, seen, width=server.width)),
    }
    if served.tasks is not None:
        many = torch.arange(1, RANKED + 1, device=server.device).unsqueeze(0) % (server.data.n_items + 1)
        found["flops_rank_per_candidate"] = float(ranking_flops(model, request, many))
        found["rank_ms"] = timed(lambda: model.rank(request, many))
    return found


def ranking_flops(model: nn.Module, request, items: Tensor) -> float:
    """FLOPs that ranking one more candidate costs; of UniR2 without the code states, which the beam has made."""
    if isinstance(model, UniR2):
        ctx = model.read(request)
        _, made = model.generator.whole(model.codes[items], ctx)
        tokens = model.ranking.tokens(request, items)
        return flops_of(lambda: model.ranking(model.generator, ctx, made, tokens)) / items.shape[1]
    half = items.shape[1] // 2
    few, all_of_them = (flops_of(lambda part=part: model.rank(request, part)) for part in (items[:, :half], items))
    return (all_of_them - few) / (items.shape[1] - half)
