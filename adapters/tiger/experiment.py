"""Stages of TIGER: codes from five tokenizers, a generator over each, and items without history.

What makes an arm differ is its `switch` in card.yaml: `ids` names the artifact with its codes, everything else changes
the generator or its training. Sizes are in the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from adapters.tiger import cold_start
from adapters.tiger.serving import Served, temperatures, unconstrained
from adapters.tiger.tokenizers import content_vectors, hyperplane_table, kmeans_table, random_table
from auto_research.baselines import ease as ease_baseline
from auto_research.baselines import itemknn as itemknn_baseline
from auto_research.baselines import popularity as popularity_baseline
from auto_research.baselines import sasrec as sasrec_baseline
from auto_research.baselines import tiger as tiger_baseline
from auto_research.baselines.tiger import TokenizerConfig, code_facts, fit_semantic_ids, save_semantic_ids
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.data.interactions import load_interactions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_item import Measure, measure_next_item
from auto_research.evaluate.next_list import Lists, genre_entropy, split_lists
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import study
from auto_research.metrics.ranking import TOP_K
from auto_research.runtime.devices import device_for
from auto_research.train.fitting import settings
from auto_research.train.next_item import load_sequences
from auto_research.train.sid import SIDBudget, beam_lister

experiment = Experiment("tiger")

EPSILON = 0.1


# Codes --------------------------------------------------------------------------------------------------------------


def chosen(ctx: Context, name: str, default: str) -> str:
    """An option of the tokenizers and arms, from the switch, else the budget."""
    return {**ctx.budget, **(ctx.switch or {})}.get(name, default)


def popularity_for(ctx: Context, config: TokenizerConfig) -> np.ndarray | None:
    """What orders the items of a shared id, where ids may be shared."""
    return load_sequences(ctx).popularity() if config.collisions == "group" else None


def rqvae_ids(ctx: Context) -> None:
    config = settings(TokenizerConfig, ctx)
    vectors = content_vectors(ctx, chosen(ctx, "content", "text"))
    fit_semantic_ids(ctx, vectors, config, device=device_for(ctx.device), popularity=popularity_for(ctx, config))


@experiment.artifact
def semantic_ids(ctx: Context) -> None:
    rqvae_ids(ctx)


@experiment.artifact
def coarse_ids(ctx: Context) -> None:
    rqvae_ids(ctx)


@experiment.artifact
def random_ids(ctx: Context) -> None:
    table = SIDTable.load(ctx.artifact("semantic_ids"))
    save_semantic_ids(ctx.out, random_table(table, ctx.seed), settings(TokenizerConfig, ctx).levels)


@experiment.artifact
def lsh_ids(ctx: Context) -> None:
    config = settings(TokenizerConfig, ctx)
    vectors = content_vectors(ctx, chosen(ctx, "content", "text"))
    save_semantic_ids(ctx.out, hyperplane_table(vectors, config, ctx.seed, popularity_for(ctx, config)), config.levels)


@experiment.artifact
def rqkmeans_ids(ctx: Context) -> None:
    config = settings(TokenizerConfig, ctx)
    vectors = content_vectors(ctx, chosen(ctx, "content", "text"))
    save_semantic_ids(ctx.out, kmeans_table(vectors, config, ctx.seed, popularity_for(ctx, config)), config.levels)


# Generators ---------------------------------------------------------------------------------------------------------


def list_entropy(genres: np.ndarray) -> Callable[[Lists], dict[str, np.ndarray]]:
    """Genre entropy of the first ten items; genres float[n_items + 1, G]."""
    return lambda lists: {"topk_genre_entropy": genre_entropy(lists.items[:, :TOP_K], genres)}


def codes_of(ctx: Context) -> SIDTable:
    """The arm's table of semantic ids."""
    return SIDTable.load(ctx.artifact(chosen(ctx, "ids", "semantic_ids")))


def generate(ctx: Context) -> Measurement:
    """Train and measure a generator over the arm's codes."""
    device, table = device_for(ctx.device), codes_of(ctx)
    genres = load_interactions(ctx.data("canonical")).item_genres
    measured, trained = tiger_baseline.train_generator(ctx, table, device=device, also=list_entropy(genres))
    sequences, budget = load_sequences(ctx), settings(SIDBudget, ctx)
    served = Served(trained.model.eval(), sequences, PrefixTrie.of(table, device), budget.length, device)
    measured.metrics |= code_facts(table, settings(TokenizerConfig, ctx).levels)
    measured.metrics |= unconstrained(served, max(budget.beam, TOP_K))
    if (ctx.switch or {}).get("temperatures"):
        found = temperatures(served, genres, ctx.seed)
        measured.extra["studies"] = {
            f"{name}_by_temperature": study("temperature", name, {"": points}, log=False)
            for name, points in found.items()
        }
    return measured


@experiment.arm
def tiger(ctx: Context) -> Measurement:
    return generate(ctx)


@experiment.arm
def tiger_flat_cuts(ctx: Context) -> Measurement:
    return generate(ctx)


@experiment.arm
def tiger_random_id(ctx: Context) -> Measurement:
    return generate(ctx)


@experiment.arm
def tiger_lsh_id(ctx: Context) -> Measurement:
    return generate(ctx)


@experiment.arm
def tiger_rqkmeans(ctx: Context) -> Measurement:
    return generate(ctx)


@experiment.arm
def tiger_no_user_token(ctx: Context) -> Measurement:
    return generate(ctx)


# Items without history ----------------------------------------------------------------------------------------------


def cold_recall(lists: np.ndarray, target: np.ndarray, cold: np.ndarray) -> float:
    """Share of the users with a cold target int64[U] whose list int64[U, K] holds it; 0 when there is no such user."""
    users = cold[target]
    return float((lists[users] == target[users, None]).any(1).mean()) if users.any() else 0.0


def cold_run(ctx: Context) -> Measurement:
    """Take items out of all data, train, and let at most floor(epsilon K) of them into every list of K."""
    device, table = device_for(ctx.device), codes_of(ctx)
    cold = cold_start.cold_items(table.n_items, ctx.seed)
    sequences = cold_start.without_items(load_sequences(ctx), cold)
    levels, budget = settings(TokenizerConfig, ctx).levels, settings(SIDBudget, ctx)
    offered = torch.from_numpy(~cold).to(device)
    measured, trained = tiger_baseline.train_generator(
        ctx, table, device=device, sequences=sequences, inventory=offered
    )
    lister = beam_lister(
        trained.model,
        sequences,
        PrefixTrie.of(table, device),
        width=budget.beam,
        length=budget.length,
        device=device,
        inventory=offered,
    )
    lists = split_lists(lister, sequences, "test").items
    measured.metrics |= code_facts(table, levels)
    return with_cold_items(ctx, measured, lists, sequences, table, cold, levels)


def with_cold_items(
    ctx: Context,
    measured: Measurement,
    lists: np.ndarray,
    sequences: LeaveTwoOut,
    table: SIDTable,
    cold: np.ndarray,
    levels: int,
) -> Measurement:
    """Add cold_recall@10 and its sweep over epsilon: by shared codes, by vectors (semantic_knn), by shuffled codes."""
    codes = cold_start.code_neighbours(table, cold, levels)
    shuffled = table.codes.copy()
    shuffled[cold] = np.random.default_rng(ctx.seed).permutation(shuffled[cold])
    control = cold_start.code_neighbours(table, cold, levels, shuffled)
    vectors = cold_start.vector_neighbours(content_vectors(ctx), cold)
    last = np.array([sequences.history("test", i)[-1] for i in range(len(sequences))])
    target = sequences.test_target
    lines: dict[str, list[tuple[float, float]]] = {"shared codes": [], "shuffled codes": [], "nearest vectors": []}
    warm = []
    for epsilon in ctx.budget.epsilons:
        own = cold_start.mixed(lists, codes, epsilon)
        lines["shared codes"].append((epsilon, cold_recall(own, target, cold)))
        lines["shuffled codes"].append((epsilon, cold_recall(cold_start.mixed(lists, control, epsilon), target, cold)))
        knn = cold_start.knn_mixed(lists, last, vectors, epsilon)
        lines["nearest vectors"].append((epsilon, cold_recall(knn, target, cold)))
        warm.append((epsilon, float((own == target[:, None]).any(1)[~cold[target]].mean())))
    own = cold_start.mixed(lists, codes, EPSILON)
    shown = [cold_start.mixed(lists, codes, e) for e in (0.0, EPSILON)]
    measured.metrics["cold_recall@10"] = cold_recall(own, target, cold)
    measured.metrics["cold_users"] = int(cold[target].sum())
    ids = np.flatnonzero(cold)
    warm_codes = {tuple(row) for row in table.codes[1:][~cold[1:], :levels]}
    warm_pairs = {row[:2] for row in warm_codes}
    measured.extra["cold_start"] = {
        "cold_items": len(ids),
        "with_all_codes_of_a_warm_item": float(np.mean([tuple(table.codes[i, :levels]) in warm_codes for i in ids])),
        "with_two_codes_of_a_warm_item": float(np.mean([tuple(table.codes[i, :2]) in warm_pairs for i in ids])),
        "cold_items_per_list": [float(cold[items].sum(1).mean()) for items in shown],
    }
    measured.extra["studies"] = {
        "cold_recall@10": study("epsilon", "cold recall@10", lines, log=False),
        "warm_recall@10": study("epsilon", "recall@10 of warm targets", {"shared codes": warm}, log=False),
    }
    return measured


@experiment.arm
def cold_start_fine(ctx: Context) -> Measurement:
    return cold_run(ctx)


@experiment.arm
def cold_start_coarse(ctx: Context) -> Measurement:
    return cold_run(ctx)


# Beside it ----------------------------------------------------------------------------------------------------------


def further(ctx: Context) -> Measure:
    """The generators' metrics of lists, for scorers."""
    genres = load_interactions(ctx.data("canonical")).item_genres
    return partial(measure_next_item, at=(5,), also=list_entropy(genres))


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    return popularity_baseline.run(ctx, device=device_for(ctx.device), measure=further(ctx))


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    return itemknn_baseline.run(ctx, device=device_for(ctx.device), measure=further(ctx))


@experiment.arm
def ease(ctx: Context) -> Measurement:
    return ease_baseline.run(ctx, device=device_for(ctx.device), measure=further(ctx))


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    """The tuned baseline, with its own sizes and recipe but for what the budget says under `sasrec`."""
    recipe = {**sasrec_baseline.SIZES, **sasrec_baseline.RECIPE, **ctx.budget.get("sasrec_recipe", {})}
    return sasrec_baseline.run(ctx, device=device_for(ctx.device), measure=further(ctx), **recipe)
