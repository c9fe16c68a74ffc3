"""What is measured: ranked lists, the order of logged events by feedback, agreement with the teacher, serving cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from adapters.gryphon_v2.events import WINDOW, FeedbackSplit, event_windows, logged_events, seen_items
from adapters.gryphon_v2.model import Gryphon, rollout
from adapters.gryphon_v2.teacher import Teacher, weighted_pair_accuracy
from auto_research.blocks.beam_search import exhaustive_sid_scores
from auto_research.blocks.sid_models import path_logprob
from auto_research.evaluate.next_list import Lister, Lists, measure_next_list, split_lists
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.cost import count_params, flops_of
from auto_research.metrics.ranking import top_items

# (positions int64[B], stop rows int64[B], items int64[B, W] or None for all) -> scores [B, W] or [B, n_items + 1]
Scorer = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]

CHUNK = 64
WARM_UP, TIMED = 1, 5


def gryphon_scorer(model: Gryphon, data: FeedbackSplit, device: torch.device) -> Scorer:
    """s(u, i), or the log-probability of the semantic id where there is no ranking module."""

    @torch.no_grad()
    def score(positions: np.ndarray, stop: np.ndarray, item: np.ndarray | None = None) -> np.ndarray:
        model.eval()
        encoded = model.encode(event_windows(data, positions, stop, model.config.history).to(device))
        every = item is None
        if every:
            item = np.tile(np.arange(data.n_items + 1), (len(positions), 1))
        item = torch.from_numpy(item).to(device)
        if model.config.ranker:
            found = model.rank(encoded, item)
        elif model.config.decoder == "dot":
            found = model.retrieval_scores(encoded).gather(1, item)
        elif every:
            found = exhaustive_sid_scores(model.generator, encoded.memory, model.sid).clamp(min=-1e9)
        else:
            found = path_logprob(model.generator, encoded.memory, model.codes[item])
        return found.float().cpu().numpy()

    return score


def teacher_scorer(teacher: Teacher, data: FeedbackSplit, device: torch.device) -> Scorer:
    @torch.no_grad()
    def score(positions: np.ndarray, stop: np.ndarray, item: np.ndarray | None = None) -> np.ndarray:
        read = teacher.read(event_windows(data, positions, stop, teacher.config.long_history).to(device))
        if item is None:
            item = np.tile(np.arange(data.n_items + 1), (len(positions), 1))
        return teacher.score(read, torch.from_numpy(item).to(device)).cpu().numpy()

    return score


def score_lister(score: Scorer, data: FeedbackSplit, count: int) -> Lister:
    """Lists of the `count` best unseen items of the whole catalogue."""

    def lists(split: str, positions: np.ndarray) -> np.ndarray:
        scores = score(positions, data.cut(split)[positions], None)
        return top_items(scores, [data.history(split, int(i)) for i in positions], count)

    return lists


def gryphon_lister(
    model: Gryphon, data: FeedbackSplit, device: torch.device, *, width: int, count: int, order: str = "rank",
    judge: Scorer | None = None,
) -> Lister:  # fmt: skip
    """Lists of the candidates of a beam of `width` semantic ids, at most `count`.

    order: 'rank' by the ranking module (where there is one), 'beam' by semantic id and then train popularity, or
    'judge' by another scorer.
    """

    @torch.no_grad()
    def lists(split: str, positions: np.ndarray) -> np.ndarray:
        model.eval()
        stop = data.cut(split)[positions]
        window = event_windows(data, positions, stop, model.config.history).to(device)
        seen = seen_items(data, positions, stop).to(device)
        if order == "rank":
            return model.serve(window, seen, width=width, count=count, top=count).top.cpu().numpy()
        found = model.candidates(model.encode(window, rank=False), seen, width, count).cpu().numpy()
        if order == "beam":
            return found
        scores = np.where(found > 0, judge(positions, stop, found), -np.inf)
        return np.take_along_axis(found, np.argsort(-scores, axis=1, kind="stable"), axis=1)

    return lists


def measured(lister: Lister, score: Scorer, data: FeedbackSplit, count: int) -> Measurement:
    """Test metrics of lists of up to `count` items, and the weighted pair accuracy of the rating windows.

    candidate_recall is the recall of the whole list and candidates the number of items in it.
    """

    def also(lists: Lists) -> dict[str, np.ndarray]:
        return {"candidates": (lists.items > 0).sum(1).astype(np.float64)}

    found = measure_next_list(lister, data, at=(10, count), also=also, chunk=CHUNK)
    for table in (found.metrics, found.units):
        table.pop(f"ndcg@{count}")
        table["candidate_recall"] = table.pop(f"recall@{count}")
    add_units(found, {"weighted_pair_accuracy": pair_accuracy(score, data)})
    return found


def add_beam_order(found: Measurement, by_beam: Lister, data: FeedbackSplit) -> None:
    """Add beam_order_ndcg@10, of the same candidates in the order of the beam, and ranking_gain@10 = ndcg@10 less it."""
    beam = split_lists(by_beam, data, "test", chunk=CHUNK).ndcg(10)
    gain = np.asarray(found.units["ndcg@10"].values) - beam
    add_units(found, {"beam_order_ndcg@10": (data.users, beam), "ranking_gain@10": (data.users, gain)})


def add_units(found: Measurement, values: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Add metrics given by user ids and their contributions."""
    for name, (users, value) in values.items():
        found.metrics[name], found.units[name] = float(value.mean()), Units("user", users, value)


def pair_accuracy(score: Scorer, data: FeedbackSplit, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
    """User ids and weighted pair accuracy of the windows that have two different ratings, scored from before.

    split: test, the rating windows, or valid, the events from the validation target up to the test target (at most 10).
    """
    begin, end = data.window, data.end
    if split == "valid":
        begin, end = data.valid_target, np.minimum(data.valid_target + WINDOW, data.test_target)
    right, total = [], []
    for start in range(0, len(data), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(data)))
        window = begin[positions]
        item, rating = logged_events(window, end[positions], data)
        scores = torch.from_numpy(np.asarray(score(positions, window, item.numpy()), dtype=np.float64))
        parts = weighted_pair_accuracy(scores, rating)
        right.append(parts[0]), total.append(parts[1])
    right, total = torch.cat(right).numpy(), torch.cat(total).numpy()
    keep = total > 0
    return data.users[keep], right[keep] / total[keep]


@torch.no_grad()
def agreement(
    model: Gryphon, teacher: Teacher, generator: Gryphon, data: FeedbackSplit, device: torch.device, *, width: int,
    count: int,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """Student against teacher before every test target: user ids and contributions of each measure.

    distill_mae_rollout, kendall_tau: on rollouts of `generator`, which is not the model, so that every student answers
    for the same items.  distill_mae_impression: on the logged events from the target on.
    """
    generator.eval()
    ours, theirs = gryphon_scorer(model, data, device), teacher_scorer(teacher, data, device)
    values: dict[str, list[float]] = {"distill_mae_rollout": [], "distill_mae_impression": [], "kendall_tau": []}
    for start in range(0, len(data), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(data)))
        stop = data.test_target[positions]
        window = event_windows(data, positions, stop, generator.config.history).to(device)
        seen = seen_items(data, positions, stop).to(device)
        pools = {
            "rollout": rollout(generator, window, seen, width=width, count=count).cpu().numpy(),
            "impression": logged_events(stop, np.minimum(stop + WINDOW, data.end[positions]), data)[0].numpy(),
        }
        for name, item in pools.items():
            student, taught = ours(positions, stop, item), theirs(positions, stop, item)
            for s, t, real in zip(student, taught, item > 0, strict=True):
                values[f"distill_mae_{name}"].append(float(np.abs(s - t)[real].mean()) if real.any() else np.nan)
                if name == "rollout":
                    values["kendall_tau"].append(kendall_tau(s[real], t[real]) if real.sum() > 1 else np.nan)
    found = {name: np.array(column) for name, column in values.items()}
    return {name: (data.users[~np.isnan(v)], v[~np.isnan(v)]) for name, v in found.items()}


def kendall_tau(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's tau-a of two score vectors of one length >= 2."""
    above = np.triu_indices(len(a), 1)
    signs = np.sign(a[above[0]] - a[above[1]]) * np.sign(b[above[0]] - b[above[1]])
    return float(signs.mean())


class EncoderCalls:
    """Counts how often a history is encoded while it is entered."""

    def __init__(self, model: Gryphon):
        self.encoders = [model.generator.encoder]
        if model.config.ranker and model.config.separate:
            self.encoders.append(model.own_encoder)
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
def serving_cost(
    model: Gryphon, data: FeedbackSplit, device: torch.device, *, width: int, count: int
) -> dict[str, float]:
    """Cost of one request: parameters, encodings, FLOPs, and milliseconds of encoding, generation and ranking."""
    model.eval()
    position, stop = np.zeros(1, dtype=np.int64), data.test_target[:1]
    window = event_windows(data, position, stop, model.config.history).to(device)
    seen = seen_items(data, position, stop).to(device)

    def timed(work: Callable[[], object]) -> float:
        return 1e3 * median_seconds(work, device, WARM_UP, TIMED)

    def serve() -> object:
        return model.serve(window, seen, width=width, count=count)

    with EncoderCalls(model) as counted:
        serve()
    encoded = model.encode(window)
    item: Tensor = model.candidates(encoded, seen, width, count)
    found = {
        "params_served": float(count_params(model)),
        "user_encodings_per_request": float(counted.calls),
        "flops": float(flops_of(serve)),
        "encode_ms": timed(lambda: model.encode(window)),
        "decode_ms": timed(lambda: model.candidates(encoded, seen, width, count)),
        "request_ms": timed(serve),
    }
    if model.config.ranker:
        found["rank_ms"] = timed(lambda: model.rank(encoded, item))
    return found
