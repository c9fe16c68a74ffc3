"""Stages of G2Rec: graph and profiles, floors, SASRec, and one decoder with and without interest tokens.

What makes an arm differ is its `switch` in card.yaml; sizes are in the budget.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from adapters.g2rec.evaluation import measure
from adapters.g2rec.graph import (
    Graph,
    Modularity,
    ascent,
    climb,
    effective_clusters,
    full_graph,
    hard_profiles,
    louvain_labels,
    one_hot,
    permuted_profiles,
    sampled_graph,
    soft_clusters,
    window_graph,
)
from adapters.g2rec.model import G2Rec, G2RecConfig
from auto_research.baselines import ease as ease_baseline
from auto_research.baselines import itemknn as itemknn_baseline
from auto_research.baselines import sasrec as sasrec_baseline
from auto_research.blocks.causal_lm import load_layers
from auto_research.blocks.semantic_ids import require_hash
from auto_research.data.item_vectors import item_cf_vectors
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.texts import load_text_vectors
from auto_research.evaluate.next_item import validation_metrics
from auto_research.evaluate.serving import median_seconds
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.metrics.cost import count_params
from auto_research.runtime.devices import device_for
from auto_research.runtime.files import read_json, sha256_bytes, write_json
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model, settings
from auto_research.train.next_item import (
    EpochWindows,
    NextItemBudget,
    load_sequences,
    model_scorer,
    next_item_loss,
    recent_items,
    sequence_flops,
)
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

experiment = Experiment("g2rec")

KINDS = ("soft", "hard", "random", "louvain")
GRAPHS = ("sampled", "window", "full")
TIMED_USERS = 64


# Graph and profiles


def build_graph(kind: str, sequences: LeaveTwoOut, seed: int, draws: int | None = None) -> Graph:
    """Graph of a kind of train events; seed and draws are those of `sampled_graph`."""
    if kind not in GRAPHS:
        raise ValueError(f"unknown graph {kind!r}; known: {', '.join(GRAPHS)}")
    if kind == "sampled":
        return sampled_graph(sequences, seed, draws)
    return window_graph(sequences) if kind == "window" else full_graph(sequences)


@experiment.artifact
def profiles(ctx: Context) -> None:
    """Graph of the switch, soft profiles of its items, Louvain communities, and what the profiles are worth elsewhere."""
    from safetensors.numpy import save_file

    device, sequences, budget = device_for(ctx.device), load_sequences(ctx), ctx.budget
    graphs = {kind: build_graph(kind, sequences, ctx.seed, budget.get("draws")) for kind in GRAPHS}
    graph = graphs[(ctx.switch or {}).get("graph", "sampled")]
    vectors = item_cf_vectors(sequences, width=budget.vectors)
    found = soft_clusters(
        graph, vectors, clusters=budget.clusters, rho=budget.rho, steps=budget.cluster_steps,
        restarts=budget.restarts, seed=ctx.seed, device=device,
    )  # fmt: skip
    soft = found.profiles.numpy()
    labels = louvain_labels(graph, ctx.seed)
    arrays = {"profiles": soft, "louvain": labels, "i": graph.i, "j": graph.j, "w": graph.w}
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, ctx.out / "profiles.safetensors")
    quality = Modularity(graph)
    q = {name: float(quality(torch.from_numpy(variant(soft, labels, name, ctx.seed)))) for name in KINDS}
    others = {kind: {"pairs": len(g.i), "q_soft": float(Modularity(g)(found.profiles))} for kind, g in graphs.items()}
    facts = {
        "q": q, "q_start": found.start, "q_of_restarts": found.best, "graphs": others, "pairs": len(graph.i),
        "edges_vs_full_pairs": len(graph.i) / len(graphs["full"].i), "weight": graph.total,
        "without_edges": int((graph.degree()[1:] == 0).sum()),
        "effective_clusters": effective_clusters(soft), "louvain_communities": len(np.unique(labels[1:])),
        "mean_largest_entry": float(soft[1:].max(1).mean()), "hash": profile_hash(soft),
    }  # fmt: skip
    write_json(ctx.out / "facts.json", facts)


def profile_hash(soft: np.ndarray) -> str:
    return sha256_bytes(np.ascontiguousarray(soft, dtype="<f4").tobytes())


def variant(soft: np.ndarray, labels: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """Profiles of a kind, float32[n_items + 1, C]."""
    if kind not in KINDS:
        raise ValueError(f"unknown profiles {kind!r}; known: {', '.join(KINDS)}")
    if kind == "hard":
        return hard_profiles(soft)
    if kind == "random":
        return permuted_profiles(soft, seed)
    return one_hot(labels) if kind == "louvain" else soft


def load_profiles(ctx: Context, n_items: int) -> tuple[np.ndarray, Graph, dict[str, Any]]:
    """Profiles of the switch, the graph, and the artifact's facts. ConfigError when they do not belong together."""
    from safetensors.numpy import load_file

    folder = ctx.artifact("profiles")
    arrays, facts = load_file(folder / "profiles.safetensors"), read_json(folder / "facts.json")
    require_hash(facts["hash"], profile_hash(arrays["profiles"]), "facts.json of the profiles")
    kind = (ctx.switch or {}).get("profiles", "soft")
    graph = Graph(arrays["i"], arrays["j"], arrays["w"], n_items)
    return variant(arrays["profiles"], arrays["louvain"], kind, ctx.seed), graph, facts


# Training


class Trainer:
    """Data, profiles and training of one arm on one device."""

    def __init__(self, ctx: Context, device: torch.device):
        self.ctx, self.device, self.sequences = ctx, device, load_sequences(ctx)
        self.config = settings(G2RecConfig, ctx)
        self.windows = NextItemBudget.of(ctx.budget)
        self.profiles, self.graph, self.facts = np.zeros((self.sequences.n_items + 1, 1), np.float32), None, {}
        if self.config.interest in ("token", "sum") or self.config.weight:
            self.profiles, self.graph, self.facts = load_profiles(ctx, self.sequences.n_items)
        self.text = torch.from_numpy(load_text_vectors(ctx.data("texts")))

    def build(self, config: G2RecConfig) -> G2Rec:
        lm = None
        if config.backbone == "causal_lm":
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            lm = load_layers(self.ctx.data("causal_lm"), config.lm_layers, dtype)
        return G2Rec(config, torch.from_numpy(self.profiles), self.text, lm)

    def batches(self, epoch: int) -> EpochWindows:
        return EpochWindows(self.sequences, self.windows, self.ctx.seed, epoch, self.device)

    def scorer(self, model: G2Rec, sequences: LeaveTwoOut | None = None):
        return model_scorer(model, sequences or self.sequences, self.config.length, self.device)

    def train(self) -> tuple[Trained, list[dict[str, Any]]]:
        """Joint training of item table, heads and backbone; the epoch is chosen by validation ndcg@10."""
        ctx = self.ctx

        def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
            seed_everything(ctx.seed)
            return fit_model(
                ctx,
                self.build(self.config).to(self.device),
                hyperparameters,
                state,
                budget=FitBudget.of(ctx.budget),
                batches=self.batches,
                loss=next_item_loss,
                validate=lambda model: validation_metrics(self.scorer(model), self.sequences),
                key="ndcg@10",
            )

        trained, records = best_of_trials(ctx, run, "ndcg@10")
        model = trained.model.eval()
        ctx.observe(
            "trained",
            model=model,
            data=self.sequences,
            score=lambda data, split, positions: self.scorer(model, data)(split, positions),
            validation=trained.validation,
        )
        return trained, records


def train(ctx: Context, device: torch.device) -> Measurement:
    """Train one arm and measure it."""
    trainer = Trainer(ctx, device)
    trained, records = trainer.train()
    model = trained.model
    measured = measure(trainer.scorer(model), trainer.sequences)
    measured.validation, measured.curve = trained.validation, trained.curve
    measured.hyperparameters, measured.trials = trained.hyperparameters, records
    measured.cost |= trained.cost | {
        "params": count_params(model),
        "flops": sequence_flops(model, trainer.sequences, trainer.config.length, device),
        "tokens_per_user": 1 + trainer.config.length * trainer.config.stride,
    }
    if trainer.graph is not None:
        soft = torch.from_numpy(trainer.profiles)
        measured.metrics["modularity_soft"] = float(Modularity(trainer.graph)(soft))
        measured.metrics["modularity_louvain"] = trainer.facts["q"]["louvain"]
        measured.metrics["effective_clusters"] = effective_clusters(trainer.profiles)
        measured.cost["edges_vs_full_pairs"] = trainer.facts["edges_vs_full_pairs"]
        measured.extra["profiles"] = trainer.facts
    if model.to_profile is not None:
        measured.metrics["profile_kl"] = mean_profile_kl(trainer, model)
    if (ctx.switch or {}).get("timed"):
        measured.cost |= added_costs(trainer)
    return measured


@torch.no_grad()
def mean_profile_kl(trainer: Trainer, model: G2Rec) -> float:
    """Mean KL(p || F) over the items of the test histories."""
    total, count = 0.0, 0
    for start in range(0, len(trainer.sequences), 256):
        positions = np.arange(start, min(start + 256, len(trainer.sequences)))
        items = torch.from_numpy(recent_items(trainer.sequences, "test", positions, trainer.config.length))
        found = model.profile_kl(items.to(trainer.device))
        total, count = total + float(found.sum()), count + len(found)
    return total / max(1, count)


def added_costs(trainer: Trainer) -> dict[str, float]:
    """Milliseconds that interest tokens and profile loss add to the widest batch, seconds of one step of clustering, and
    seconds to build each graph."""
    device, models = trainer.device, []
    for config in (trainer.config, replace(trainer.config, interest="none", weight=0.0)):
        seed_everything(trainer.ctx.seed)
        models.append(trainer.build(config).to(device).train())
    batch = max(trainer.batches(0), key=lambda batch: (batch.items.shape[1], len(batch.items)))
    users = np.arange(min(TIMED_USERS, len(trainer.sequences)))
    train = [lambda model=model: model.training_loss(batch).backward() for model in models]
    infer = [partial(trainer.scorer(model), "valid", users) for model in models]
    found = {
        "added_train_ms": 1e3 * added_seconds(*train, device),
        "added_infer_ms": 1e3 * added_seconds(*infer, device),
    }
    quality, budget = Modularity(trainer.graph).to(device), trainer.ctx.budget
    logits, optimizer = ascent(trainer.profiles[1:], device)
    found["clustering_step_s"] = median_seconds(lambda: climb(quality, logits, optimizer, budget.rho), device)
    for kind in GRAPHS:
        build = partial(build_graph, kind, trainer.sequences, trainer.ctx.seed, budget.get("draws"))
        found[f"{kind}_graph_s"] = median_seconds(build, device, 0, 3)
    return found


def added_seconds(full: Callable, plain: Callable, device: torch.device) -> float:
    """Median of 20 differences in seconds; run in turns, so that a busy machine slows both alike."""
    for work in (full, plain):
        median_seconds(work, device, timed=1)
    pairs = ([median_seconds(work, device, 0, 1) for work in (full, plain)] for _ in range(20))
    return median(slow - fast for slow, fast in pairs)


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    device_for(ctx.device)
    sequences = load_sequences(ctx)
    counts = sequences.popularity().astype(np.float64)
    return measure(lambda split, positions: np.tile(counts, (len(positions), 1)), sequences)


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    return itemknn_baseline.run(ctx, device=device_for(ctx.device), measure=measure)


@experiment.arm
def ease(ctx: Context) -> Measurement:
    return ease_baseline.run(ctx, device=device_for(ctx.device), measure=measure)


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    """The recipe of the baseline; the budget's `sasrec` changes it, other keys of the budget do not."""
    chosen = {**sasrec_baseline.SIZES, **sasrec_baseline.RECIPE, "steps": None, **ctx.budget.get("sasrec", {})}
    return sasrec_baseline.run(ctx, device=device_for(ctx.device), measure=measure, **chosen)


@experiment.arm
def item_only(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def item_only_wide(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def g2rec_random_profiles(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def g2rec_hard(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def g2rec_lambda0(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def g2rec(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def g2rec_smollm2(ctx: Context) -> Measurement:
    device = device_for(ctx.device)
    measured = train(ctx, device)
    checkpoint = read_json(ctx.data("causal_lm") / "manifest.json")
    source = checkpoint["source"]
    measured.extra["language_model"] = {"checkpoint": checkpoint["checkpoint"], "source": source["name"]}
    depth = ctx.budget.get("lm_layers")
    notes = [f"the first {depth} layers" if depth else "all layers", f"of {checkpoint['checkpoint']}"]
    if "dequantised_from" in source:
        notes.append(f"dequantised from {source['dequantised_from']}")
    measured.notes.append(f"Backbone: {' '.join(notes)}.")
    return measured
