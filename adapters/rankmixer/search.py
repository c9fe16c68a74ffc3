"""RankMixer as a host of the evolutionary search: data split, training of one genome, validation and sealed test.

A genome fills the operator slots of `RankMixerConfig` and the optimiser's settings; every trial of a run sees the same
requests in the same order, cut into batches of the size its gene says. Only rows of `dev/` are read before the sealed test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from adapters.rankmixer.model import RankMixer, RankMixerConfig
from adapters.rankmixer.search_scoring import ThreeViews, evaluate_split, floor_metrics
from adapters.rankmixer.search_split import TABLE, prepare
from auto_research.baselines import bias, gbdt, popularity
from auto_research.baselines.prefix import RECENT
from auto_research.data.requests import RequestBatch, RequestTable
from auto_research.evaluate.ctr import Scorer, model_scorer, rated_batches, rated_metrics, score_rated
from auto_research.experiment.search import Evaluation, SearchHost, TrialRequest, refuse_sealed
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.devices import device_for, peak_memory, reset_peak_memory
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.runtime.threads import set_threads
from auto_research.train.ctr import training_loss
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw, decay_groups
from auto_research.train.state import StateFolder

WARM_UP_SHARE = 0.1
CURVE_POINTS = 100
FLOP_CANDIDATES = 64

host = SearchHost("rankmixer", needs=(TABLE,))


host.register(prepare)


def development_table(config: dict, dev: Path) -> RequestTable:
    """Training and validation requests of the run's users; refuses a sealed path."""
    return _restricted(RequestTable.load(refuse_sealed(dev) / TABLE), config)


def _restricted(table: RequestTable, config: dict) -> RequestTable:
    users = config["host"]["users"]
    return table if users is None else table.restrict(users)


def model_config(genome: dict, settings: dict) -> RankMixerConfig:
    """Slots and sizes of a genome; `settings` is the host part of the budget."""
    return RankMixerConfig(
        tokens=settings["tokens"],
        width=genome["dimensions"],
        blocks=genome["layers"],
        history=genome["sequence_length"],
        token_mixer=genome["block"],
        seq_summary=genome["seq_summary"],
        channel=genome["channel"],
        experts=genome["experts"],
        dropout=settings["dropout"],
        unit_hidden=tuple(settings["unit_hidden"]),
    )


def build_optimizer(model: nn.Module, genome: dict, settings: dict) -> torch.optim.Optimizer:
    """adamw decays matrices, adam and adagrad decay nothing."""
    rate = genome["learning_rate"]
    if genome["optimizer"] == "adamw":
        return adamw(model, rate, settings["weight_decay"])
    kind = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[genome["optimizer"]]
    return kind(decay_groups(model, 0.0), lr=rate)


class TrainingRequests:
    """The run's requests in batches of the genome's size; each item is a list of micro-batches.

    Order is a function of (seed, epoch) alone, so that batch sizes differ in steps and never in requests. With `steps`
    set (quick) one epoch holds `steps` x `base` requests, drawn from as many permutations as that needs.
    """

    def __init__(self, table: RequestTable, request: TrialRequest, device: torch.device, epoch: int) -> None:
        self.table, self.request, self.device, self.epoch = table, request, device, epoch
        self.size = request.genome["batch_size"]
        self.order = request_order(table, request.config, request.seed, epoch)

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, index: int) -> list[RequestBatch]:
        chosen = self.order[index * self.size : (index + 1) * self.size]
        rng = stable_rng("search-negatives", self.request.seed, self.epoch, index)
        return [
            self.table.batch(
                part,
                history=self.request.genome["sequence_length"],
                negatives=self.request.config["host"]["negatives"],
                rng=rng,
            ).to(self.device)
            for part in np.array_split(chosen, min(self.request.accumulate, len(chosen)))
        ]


def request_order(table: RequestTable, config: dict, seed: int, epoch: int) -> np.ndarray:
    """int64 request numbers that one epoch trains on, the same for every genome of the run."""
    requests = table.requests("train")
    if config["steps"] is None:
        return requests[stable_rng("search-order", seed, epoch).permutation(len(requests))]
    wanted = config["steps"] * config["host"]["batch"]
    rounds = [
        requests[stable_rng("search-order", seed, epoch, number).permutation(len(requests))]
        for number in range(-(-wanted // len(requests)))
    ]
    return np.concatenate(rounds)[:wanted]


class LossCurve:
    """About CURVE_POINTS training losses; saved and restored with the training state."""

    def __init__(self, total: int) -> None:
        self.every = max(1, total // CURVE_POINTS)
        self.step = 0
        self.points: list[list[float]] = []

    def add(self, loss: torch.Tensor) -> None:
        self.step += 1
        if self.step % self.every == 0:
            self.points.append([self.step, float(loss)])

    def state_dict(self) -> dict:
        return {"step": self.step, "points": [list(point) for point in self.points]}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.points = state["step"], [list(point) for point in state["points"]]


def warm_up(step: int, total: int) -> float:
    """Linear warm-up over the first tenth, then the peak rate."""
    return min(1.0, (step + 1) / max(1.0, WARM_UP_SHARE * total))


def train(request: TrialRequest, table: RequestTable, device: torch.device) -> tuple[RankMixer, list[dict], int]:
    """Train the genome, or go on from its state; returns (model in eval mode, curve, requests seen).

    With several epochs the one with the best validation AUC is restored; training never stops early, because all trials
    are to see the same requests.
    """
    settings = request.config["host"]
    seed_everything(request.seed)
    model = RankMixer(model_config(request.genome, settings), table.vocab, torch.from_numpy(table.item_genres)).to(
        device
    )
    epochs = settings["epochs"] if request.config["steps"] is None else 1
    per_epoch = len(TrainingRequests(table, request, device, 0))
    curve = LossCurve(per_epoch * epochs)
    validation = rated_batches(table, "valid", history=request.genome["sequence_length"]) if epochs > 1 else None

    def loss(model: nn.Module, parts: list[RequestBatch]) -> torch.Tensor:
        value = accumulated_loss(model, parts)
        curve.add(value.detach())
        return value

    def validate(model: nn.Module) -> dict[str, float]:
        return rated_metrics(score_rated(model_scorer(model, device), validation))

    fitted = fit(
        model,
        build_optimizer(model, request.genome, settings),
        Plan(epochs, key="auc" if validation else None),
        batches=lambda epoch: TrainingRequests(table, request, device, epoch),
        loss=loss,
        state=StateFolder(request.state),
        validate=validate if validation else None,
        schedule=warm_up,
        on_step=lambda model, step, total: model.after_step(step, total),
        progress=request.progress,
        extras={"curve": curve},
    )
    points = [{"step": step, "loss": value} for step, value in curve.points]
    for entry in fitted.history if validation else ():
        points.append({key: entry[key] for key in ("epoch", "step", "auc", "logloss")})
    seen = sum(len(request_order(table, request.config, request.seed, epoch)) for epoch in range(epochs))
    return model.eval(), points, seen


def accumulated_loss(model: nn.Module, parts: list[RequestBatch]) -> torch.Tensor:
    """Loss of the whole batch from its micro-batches; all but the last are already propagated.

    The losses are means over pairs and over rated items; a batch has 1 + negatives pairs a rated item, so that rated
    items are the weights of both.
    """
    rated = torch.stack([part.rated.sum() for part in parts])
    *first, last = rated / rated.sum()  # on the device: no synchronisation
    done = torch.zeros((), device=rated.device)
    for part, share in zip(parts[:-1], first, strict=True):
        value = training_loss(model, part) * share
        value.backward()
        done = done + value.detach()
    return training_loss(model, parts[-1]) * last + done


def measured(
    request: TrialRequest, table: RequestTable, split: str, model: RankMixer, device: torch.device
) -> Evaluation:
    """Fitness, metrics and bootstrap replicates of a trained model on one split."""
    settings = request.config["host"]
    result = evaluate_split(
        ThreeViews(model),
        table,
        split,
        history=request.genome["sequence_length"],
        users=request.config["evaluation_users"],
        chunk=settings["chunk"],
        slice_users=settings["slice_users"],
        resamples=settings["bootstraps" if split == "valid" else "test_bootstraps"],
        device=device,
        progress=request.progress,
    )
    sample = table.score_batch(
        int(table.requests(split)[-1]), np.arange(1, FLOP_CANDIDATES + 1), history=request.genome["sequence_length"]
    )
    batch = sample.to(device)
    with torch.no_grad():
        flops = flops_of(lambda: model(batch)) / batch.pairs()
    batch_size = request.genome["batch_size"]
    return replace(
        result,
        parameters=count_params(model),
        flops=flops,
        micro_batch=math.ceil(batch_size / request.accumulate),
        peak_memory_bytes=peak_memory(device),
    )


@host.register
def trial(request: TrialRequest) -> Evaluation:
    """Train on dev/ and measure on its validation requests."""
    device = device_for(request.device)
    set_threads(request.threads)
    reset_peak_memory(device)
    table = development_table(request.config, request.dev)
    model, curve, seen = train(request, table, device)
    return replace(measured(request, table, "valid", model, device), curve=curve, spent={"requests": seen})


@host.register
def test(request: TrialRequest, unseal: Callable[[], Path]) -> Evaluation:
    """Train on dev/ again, then open the sealed folder and measure on the test requests."""
    device = device_for(request.device)
    set_threads(request.threads)
    reset_peak_memory(device)
    model, curve, seen = train(request, development_table(request.config, request.dev), device)
    table = _restricted(RequestTable.load(unseal() / TABLE), request.config)
    return replace(measured(request, table, "test", model, device), curve=curve, spent={"requests": seen})


@host.register
def floors(config: dict, dev: Path, unseal: Callable[[], Path]) -> dict:
    """Popularity, bias and gradient-boosted trees, fitted on train rows, chosen on validation, on both splits."""
    table = development_table(config, dev)
    seed = config["run_seed"]
    validation = rated_batches(table, "valid", history=RECENT)
    negatives = config["host"]["negatives"]
    biases = [bias.bias_scorer(table, trial["pseudo_rows"], negatives) for trial in bias.TRIALS]
    rows = gbdt.training_rows(table, negatives, seed)
    trees = [gbdt.gbdt_scorer(rows, trial, seed, table.item_genres) for trial in gbdt.TRIALS]

    def best(scorers: list) -> Scorer:
        return max(scorers, key=lambda scorer: rated_metrics(score_rated(scorer, validation))["auc"])

    scorers = {"popularity": popularity.popularity_scorer(table, negatives), "bias": best(biases), "gbdt": best(trees)}
    users = config["evaluation_users"]
    result = {name: {"validation": floor_metrics(scorer, table, "valid", users)} for name, scorer in scorers.items()}
    sealed = _restricted(RequestTable.load(unseal() / TABLE), config)
    for name, scorer in scorers.items():
        result[name]["test"] = floor_metrics(scorer, sealed, "test", users)
    return result
