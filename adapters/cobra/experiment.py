"""Stages of COBRA: coarse ids, the cascade with each part taken away, and what it is compared with.

What makes an arm differ is its `switch` in card.yaml: fields of CobraConfig, `ids_of` (the artifact with its codes) and
`fused` (the order of the candidates). Sizes are in the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adapters.cobra.model import Cobra, CobraBatch, CobraConfig
from adapters.cobra.serving import Fusion, Server, cell_facts, phase_times, tune
from adapters.cobra.text_encoder import PackedTexts
from auto_research.baselines import ease as ease_baseline
from auto_research.baselines import itemknn as itemknn_baseline
from auto_research.baselines import popularity as popularity_baseline
from auto_research.baselines import sasrec as sasrec_baseline
from auto_research.baselines import tiger as tiger_baseline
from auto_research.baselines.tiger import TokenizerConfig, fit_semantic_ids
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.blocks.title_encoder import load_text_layers, word_pieces
from auto_research.data.interactions import load_interactions
from auto_research.data.item_vectors import item_texts
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.texts import load_text_states, load_text_vectors
from auto_research.evaluate.next_item import Measure, measure_next_item
from auto_research.evaluate.next_list import Lister, Lists, genre_entropy, split_lists, validation_lists
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement, Units
from auto_research.runtime.devices import device_for
from auto_research.train.fitting import settings
from auto_research.train.next_item import EpochWindows, NextItemBudget, load_sequences
from auto_research.train.sid import SIDBudget, beam_lister, fit_sid, measure_sid

if TYPE_CHECKING:
    from transformers import PreTrainedModel

experiment = Experiment("cobra")

DEEP = (50, 100)  # cut-offs of the long lists


@dataclass(frozen=True)
class SearchConfig:
    """cells: M beams; inside: N items of each; deep_cells: M for recall@50 and recall@100."""

    cells: int = 16
    inside: int = 32
    deep_cells: int = 64


# Codes --------------------------------------------------------------------------------------------------------------


@experiment.artifact
def cells(ctx: Context) -> None:
    popularity = load_sequences(ctx).popularity()
    fit_semantic_ids(
        ctx,
        load_text_vectors(ctx.data("texts")),
        settings(TokenizerConfig, ctx),
        device=device_for(ctx.device),
        popularity=popularity,
    )


@experiment.artifact
def item_ids(ctx: Context) -> None:
    vectors = load_text_vectors(ctx.data("texts"))
    fit_semantic_ids(ctx, vectors, settings(TokenizerConfig, ctx), device=device_for(ctx.device))


# The cascade --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _texts(folder: str, modified_ns: int) -> PackedTexts:
    return PackedTexts(*load_text_states(folder))


def texts_of(ctx: Context, config: CobraConfig) -> PackedTexts | None:
    if not config.dense:
        return None
    folder = Path(ctx.data("text_states"))
    if config.finetuned:
        states, mask = load_text_states(folder)
        texts = item_texts(load_interactions(ctx.data("canonical")))
        return PackedTexts(states, mask, word_pieces(ctx.data("text_encoder"), texts, mask))
    return _texts(str(folder.resolve()), (folder / "manifest.json").stat().st_mtime_ns)


def pretrained_of(ctx: Context, config: CobraConfig) -> PreTrainedModel | None:
    """The encoder that made the stored states, anew, where the arm trains it."""
    if not config.finetuned:
        return None
    return load_text_layers(ctx.data("text_encoder"), config.text_layers)


class CobraWindows(Sequence):
    """The windows of an epoch with their distinct items, made on the CPU and then moved."""

    def __init__(self, sequences, texts, budget: SIDBudget, seed: int, device: torch.device, epoch: int):
        windows = NextItemBudget(length=budget.length, batch=budget.batch)
        self.windows = EpochWindows(sequences, windows, seed, epoch, torch.device("cpu"))
        self.texts, self.device = texts, device

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> CobraBatch:
        batch = self.windows[index]
        return CobraBatch.of(batch.items.numpy(), batch.target.numpy(), self.texts).to(self.device)


def lister_of(server: Server, fusion: Fusion, search: SearchConfig, budget: SIDBudget, count: int = 10) -> Lister:
    """How the arm answers: fused candidates, cosine alone (wo_id), or a beam over item ids (wo_dense)."""
    config = server.model.config
    if not config.ids:
        return server.dense_lister(count)
    if not config.dense:
        return beam_lister(
            server.model,
            server.sequences,
            server.trie,
            width=max(budget.beam, count),
            length=budget.length,
            device=server.device,
            count=count,
        )
    wide = count > 10
    return server.lister(
        fusion,
        cells=search.deep_cells if wide else search.cells,
        inside=max(search.inside, server.trie.group.shape[1]) if wide else search.inside,
        count=count,
    )


def cascade(ctx: Context) -> Measurement:
    """Train and measure one arm of the cascade."""
    device, sequences = device_for(ctx.device), load_sequences(ctx)
    switch = ctx.switch or {}
    table = SIDTable.load(ctx.artifact(switch.get("ids_of", "cells")))
    config, budget, search = settings(CobraConfig, ctx), settings(SIDBudget, ctx), settings(SearchConfig, ctx)
    fusion = Fusion(fused=switch.get("fused", True))
    texts, trie = texts_of(ctx, config), PrefixTrie.of(table, device)

    def served(model: Cobra, data: LeaveTwoOut) -> Server:
        return Server(model, data, trie, device)

    def validate(model: Cobra) -> dict[str, float]:
        narrow = replace(budget, beam=budget.validation_beam)
        lister = lister_of(served(model, sequences), Fusion(), search, narrow)
        return validation_lists(lister, sequences, users=budget.validation_users)

    def scorer(model: Cobra, data: LeaveTwoOut):
        return served(model, data).scorer(fusion) if config.ids else served(model, data).dense_scorer()

    trained, records = fit_sid(
        ctx,
        lambda _, data: Cobra(table, config, texts, pretrained_of(ctx, config)),
        table=table,
        device=device,
        sequences=sequences,
        budget=budget,
        batches=partial(CobraWindows, sequences, texts, budget, ctx.seed, device),
        loss=lambda model, batch: model.training_loss(batch),
        validate=validate,
        scorer=scorer if config.dense else None,
    )
    server, cascaded = served(trained.model, sequences), config.ids and config.dense
    tuned: dict[str, float] = {}
    if cascaded and fusion.fused:
        fusion, tuned = tune(server, cells=search.cells, inside=search.inside)
    measured = measure_sid(
        trained,
        records,
        sequences,
        table,
        budget,
        device=device,
        also=more_metrics(ctx),
        lister=lister_of(server, fusion, search, budget),
    )
    add_deep_recall(measured, lister_of(server, fusion, search, budget, max(DEEP)), sequences)
    tokens = 1 + np.minimum(np.diff(sequences.train_starts) + 1, budget.length) * trained.model.sid.per_item
    measured.cost["tokens_per_user"] = float(tokens.mean())
    measured.extra["semantic_ids"] = table.statistics() | {"hash": table.content_hash}
    if cascaded:
        measured.metrics |= cell_facts(server, cells=search.cells)
        measured.cost |= phase_times(server, fusion, cells=search.cells, inside=search.inside)
    if tuned:
        measured.extra["fusion"] = {"tau": fusion.tau, "psi": fusion.psi, "validation": tuned}
    return measured


def more_metrics(ctx: Context) -> Callable[[Lists], dict[str, np.ndarray]]:
    """What the card lists beside the protocol's metrics, from lists of ten."""
    genres = load_interactions(ctx.data("canonical")).item_genres
    return lambda lists: {"genre_entropy@10": genre_entropy(lists.items[:, :10], genres)}


def deep_recall(lists: Lists) -> dict[str, np.ndarray]:
    """float64[U] each; needs the place of the target among max(DEEP) items."""
    return {f"recall@{k}": lists.recall(k) for k in DEEP}


def add_deep_recall(measured: Measurement, lister: Lister, sequences: LeaveTwoOut) -> None:
    """recall@50 and recall@100 of lists of 100, which may come from a wider search than the ten of the other metrics."""
    found = deep_recall(split_lists(lister, sequences, "test"))
    measured.metrics |= {name: float(values.mean()) for name, values in found.items()}
    measured.units |= {name: Units("user", sequences.users, values) for name, values in found.items()}


def every_metric(ctx: Context) -> Measure:
    """How an arm that scores every item is measured, so that it has all metrics of the card."""
    more = more_metrics(ctx)
    return partial(measure_next_item, at=(5,), also=lambda lists: more(lists) | deep_recall(lists))


@experiment.arm
def cobra(ctx: Context) -> Measurement:
    return cascade(ctx)


@experiment.arm
def cobra_wo_id(ctx: Context) -> Measurement:
    return cascade(ctx)


@experiment.arm
def cobra_wo_dense(ctx: Context) -> Measurement:
    return cascade(ctx)


@experiment.arm
def cobra_wo_beamfusion(ctx: Context) -> Measurement:
    return cascade(ctx)


@experiment.arm
def cobra_frozen_dense(ctx: Context) -> Measurement:
    return cascade(ctx)


@experiment.arm
def cobra_minilm(ctx: Context) -> Measurement:
    return cascade(ctx)


# Beside it ----------------------------------------------------------------------------------------------------------


@experiment.arm
def tiger(ctx: Context) -> Measurement:
    """Encoder-decoder over item ids, `baselines.tiger`."""
    device, sequences = device_for(ctx.device), load_sequences(ctx)
    table, budget = SIDTable.load(ctx.artifact("item_ids")), settings(SIDBudget, ctx)
    measured, trained = tiger_baseline.train_generator(
        ctx, table, device=device, sequences=sequences, also=more_metrics(ctx)
    )
    wide = beam_lister(
        trained.model,
        sequences,
        PrefixTrie.of(table, device),
        width=max(budget.beam, max(DEEP)),
        length=budget.length,
        device=device,
        count=max(DEEP),
    )
    add_deep_recall(measured, wide, sequences)
    return measured


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    """The tuned baseline, with its own sizes and recipe but for what the budget says under `sasrec_recipe`."""
    recipe: dict[str, Any] = {**sasrec_baseline.SIZES, **sasrec_baseline.RECIPE, **ctx.budget.get("sasrec_recipe", {})}
    return sasrec_baseline.run(ctx, device=device_for(ctx.device), measure=every_metric(ctx), **recipe)


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    return popularity_baseline.run(ctx, device=device_for(ctx.device), measure=every_metric(ctx))


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    return itemknn_baseline.run(ctx, device=device_for(ctx.device), measure=every_metric(ctx))


@experiment.arm
def ease(ctx: Context) -> Measurement:
    return ease_baseline.run(ctx, device=device_for(ctx.device), measure=every_metric(ctx))
