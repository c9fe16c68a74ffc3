"""Recall on the last event, ranking on the test rows, code accuracy, serving cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adapters.unir2.events import Requests, UnifiedSplit, requests_at, seen_items
from adapters.unir2.features import PrefixTokens
from adapters.unir2.model import TASKS, THRESHOLDS, Served, UniR2
from adapters.unir2.training import BatchRule
from auto_research.baselines.sasrec import SASRec
from auto_research.evaluate.next_list import Lister
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.cost import count_params, flops_of
from auto_research.metrics.ctr import user_auc
from auto_research.runtime.errors import RunFailure

CHUNK = 64
GRID = (0.0, 0.5, 1.0)
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # alpha / L: the same weights of log p for every number of levels
WARM_UP, TIMED = 1, 5


class Weights(NamedTuple):
    """alpha of log p / L, and the weight of every task."""

    alpha: float
    tasks: tuple[float, ...]

    @classmethod
    def of(cls, point: tuple[float, ...]) -> Weights:
        return cls(point[0], tuple(point[1:]))

    def named(self) -> dict[str, float]:
        return {"alpha": self.alpha, **dict(zip(TASKS, self.tasks, strict=True))}


GENERATION_ORDER = Weights(1.0, (0.0, 0.0, 0.0))


def unified_score(served: Served, levels: int, alpha: float, weights: tuple[float, ...]) -> Tensor:
    """alpha log p(s_v | u) / L + sum_t w_t log p_t(u, v), float32 [B, w]; -inf where there is no item."""
    score = alpha * served.logp.float().masked_fill(served.item == 0, 0.0) / levels
    if served.tasks is not None:
        chance = nn.functional.logsigmoid(served.tasks.float())
        score = score + (chance * chance.new_tensor(list(weights))).sum(2)
    return score.masked_fill(served.item == 0, -torch.inf)


class Server:
    """Beams of one model over a split. keep: the model is trained, so users are served once and re-ordered after that."""

    def __init__(
        self,
        model: nn.Module,
        data: UnifiedSplit,
        device: torch.device,
        rule: BatchRule,
        *,
        width: int,
        levels: int,
        keep: bool = False,
    ):
        self.model, self.data, self.device, self.rule = model, data, device, rule
        self.width, self.levels = width, levels
        self.kept: dict[tuple[str, bytes], Served] | None = {} if keep else None

    def request(self, split: str, positions: np.ndarray):
        rows = self.data.cut(split)[positions]
        request = requests_at(self.data, rows, self.rule.history, self.rule.hashed, strict=False)
        return request.to(self.device), seen_items(self.data, rows).to(self.device)

    def serve(self, split: str, positions: np.ndarray) -> Served:
        key = (split, positions.tobytes())
        if self.kept is not None and key in self.kept:
            return self.kept[key]
        self.model.eval()
        request, seen = self.request(split, positions)
        served = self.model.serve(request, seen, width=self.width)
        if self.kept is not None:
            self.kept[key] = served
        return served

    def lister(self, weights: Weights) -> Lister:
        """Lists of a beam in the order of the unified score."""

        def lists(split: str, positions: np.ndarray) -> np.ndarray:
            served = self.serve(split, positions)
            return ordered(served, unified_score(served, self.levels, *weights)).cpu().numpy()

        return lists

    def catalogue_scores(self, split: str, positions: np.ndarray, weights: Weights) -> np.ndarray:
        """Unified scores [B, I + 1] of every item."""
        self.model.eval()
        request, _ = self.request(split, positions)
        logp, tasks = self.model.catalogue(request)
        item = torch.arange(logp.shape[1], device=logp.device).expand(len(logp), -1)
        score = unified_score(Served(item, logp, tasks), self.levels, *weights)
        return score.clamp(min=-1e9).cpu().numpy()

    def choose_weights(self) -> tuple[Weights, Weights | None, dict[str, float]]:
        """The best weights on the grid by validation ndcg@10, the best with alpha 0, and ndcg@10 by name.

        Generation order (alpha 1, no task) is in the grid, and wins ties. None without ranking.
        """
        parts = [
            self.serve("valid", np.arange(a, min(a + CHUNK, len(self.data)))) for a in range(0, len(self.data), CHUNK)
        ]
        target = torch.from_numpy(self.data.target("valid")).to(self.device)
        found: dict[tuple[float, ...], float] = {}
        ranked = parts[0].tasks is not None
        grid = [(1.0, 0.0, 0.0, 0.0)]
        if ranked:
            grid += [(share * self.levels, 1.0, *rest) for share, *rest in itertools.product(SHARES, GRID, GRID)]
        for point in grid:
            gains = []
            for k, served in enumerate(parts):
                top = ordered(served, unified_score(served, self.levels, *Weights.of(point)))[:, :10]
                hit = top == target[k * CHUNK : k * CHUNK + len(top), None]
                place = torch.arange(top.shape[1], device=hit.device)
                gains.append((hit / torch.log2(place + 2.0)).sum(1))
            found[point] = float(torch.cat(gains).mean())
        best = max(found, key=lambda key: found[key])
        values = {"generation_order": found[grid[0]], "chosen": found[best]}
        if not ranked:
            return Weights.of(best), None, values
        ranking = max((key for key in found if key[0] == 0), key=lambda key: found[key])
        return Weights.of(best), Weights.of(ranking), values | {"ranking_order": found[ranking]}


def ordered(served: Served, score: Tensor) -> Tensor:
    """Items int64 [B, w] by falling score, ties in the order of the beam."""
    return served.item.gather(1, score.sort(dim=1, descending=True, stable=True).indices)


@torch.no_grad()
def ranked_rows(
    model: nn.Module, data: UnifiedSplit, split: str, device: torch.device, rule: BatchRule, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


def add_user_units(measured: Measurement, user: np.ndarray, rating: np.ndarray, logits: np.ndarray) -> None:
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
    """One request: parameters, encodings of the user, milliseconds of recall and of ranking, FLOPs per candidate.

    Recall is reading the user and the beam; ranking is what is done with the candidates found, in a cascade with another
    reading of the user.
    """
    model, width = server.model.eval(), server.width
    request, seen = server.request("test", np.zeros(1, dtype=np.int64))

    def timed(work: Callable[[], object]) -> float:
        return 1e3 * median_seconds(work, server.device, WARM_UP, TIMED)

    with EncoderCalls(model) as counted:
        served = model.serve(request, seen, width=width)
    retrieved = model.retrieve(request, seen, width=width)
    found = {
        "params": float(count_params(model)),
        "user_encodings_per_request": float(counted.calls),
        "flops": float(flops_of(lambda: model.serve(request, seen, width=width))),
        "request_ms": timed(lambda: model.serve(request, seen, width=width)),
        "recall_ms": timed(lambda: model.retrieve(request, seen, width=width)),
    }
    if served.tasks is not None:
        found["flops_rank_per_candidate"] = ranking_flops(model, request, seen, width)
        found["rank_ms"] = timed(lambda: model.rank_found(request, retrieved))
    return found


def ranking_flops(model: nn.Module, request: Requests, seen: Tensor, width: int) -> float:
    """FLOPs that ranking one more of `width` candidates costs, with the code state that a beam does not make."""
    half = width // 2
    retrieved = [model.retrieve(request, seen, width=count) for count in (half, width)]
    few, all_of_them = (flops_of(lambda found=found: model.rank_found(request, found)) for found in retrieved)
    return (all_of_them - few) / (width - half)
