"""Stages of G2Rec: graph and profiles, floors, SASRec, and one decoder with and without interest tokens.

What makes an arm differ is its `switch` in card.yaml; sizes are in the budget.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from adapters.g2rec.evaluation import measure
from adapters.g2rec.graph import (
    Graph,
    Modularity,
    effective_clusters,
    full_graph,
    hard_profiles,
    louvain_labels,
    one_hot,
    permuted_profiles,
    sampled_graph,
    soft_clusters,
    sparse_profiles,
    window_graph,
)
from adapters.g2rec.model import G2Rec, G2RecConfig
from auto_research.baselines import ease as ease_baseline
from auto_research.baselines import itemknn as itemknn_baseline
from auto_research.baselines import sasrec as sasrec_baseline
from auto_research.blocks.semantic_ids import require_hash
from auto_research.data.item_vectors import co_occurrence, item_cf_vectors
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
TIMED_USERS = 64


# Graph and profiles


def build_graph(ctx: Context, sequences: LeaveTwoOut) -> Graph:
    """The graph of the switch: sampled (default), window or full."""
    kind = (ctx.switch or {}).get("graph", "sampled")
    if kind == "sampled":
        return sampled_graph(sequences, ctx.seed, ctx.budget.get("draws"))
    return {"window": window_graph, "full": full_graph}[kind](sequences)


@experiment.artifact
def profiles(ctx: Context) -> None:
    """Graph of train events, soft profiles of its items, and Louvain communities beside them."""
    from safetensors.numpy import save_file

    device, sequences, budget = device_for(ctx.device), load_sequences(ctx), ctx.budget
    graph = build_graph(ctx, sequences)
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
    pairs = co_occurrence(sequences.train, sequences.n_items).nnz
    facts = {
        "q": q, "q_start": found.start, "q_of_restarts": found.best, "pairs": len(graph.i), "all_pairs": pairs,
        "edges_vs_full_pairs": len(graph.i) / pairs, "weight": graph.total, "without_edges": int((graph.degree()[1:] == 0).sum()),
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
        return G2Rec(config, torch.from_numpy(self.profiles), self.text)

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
        measured.metrics["effective_clusters"] = effective_clusters(trainer.profiles)
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
    """Milliseconds that interest tokens and profile loss add to a batch, and seconds of one step of clustering."""
    device, models = trainer.device, {}
    for name, config in {"full": trainer.config, "plain": replace(trainer.config, interest="none", weight=0.0)}.items():
        seed_everything(trainer.ctx.seed)
        models[name] = trainer.build(config).to(device)
    batch, users = trainer.batches(0)[0], np.arange(min(TIMED_USERS, len(trainer.sequences)))
    seconds = {}
    for name, model in models.items():
        model.train()
        seconds["train", name] = median_seconds(lambda model=model: model.training_loss(batch).backward(), device, 1, 5)
        score = trainer.scorer(model)
        seconds["infer", name] = median_seconds(lambda score=score: score("valid", users), device, 1, 5)
    found = {f"added_{k}_ms": 1e3 * (seconds[k, "full"] - seconds[k, "plain"]) for k in ("train", "infer")}
    quality, rho = Modularity(trainer.graph).to(device), trainer.ctx.budget.rho
    logits = torch.from_numpy(trainer.profiles).to(device).requires_grad_()
    step = median_seconds(lambda: quality(sparse_profiles(logits, rho)).backward(), device, 1, 3)
    return found | {"clustering_step_s": step}


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    device_for(ctx.device)
    sequences = load_sequences(ctx)
    counts = sequences.popularity().astype(np.float64)
    return measure(lambda split, positions: np.tile(counts, (len(positions), 1)), sequences)


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    return itemknn_baseline.run(ctx, device=device_for(ctx.device))


@experiment.arm
def ease(ctx: Context) -> Measurement:
    return ease_baseline.run(ctx, device=device_for(ctx.device))


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    """The recipe of the baseline; the budget's `sasrec` changes it, other keys of the budget do not."""
    chosen = {**sasrec_baseline.SIZES, **sasrec_baseline.RECIPE, "steps": None, **ctx.budget.get("sasrec", {})}
    return sasrec_baseline.run(ctx, device=device_for(ctx.device), **chosen)


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
