"""TIGER (arXiv:2305.05065) as one arm: RQ-VAE semantic ids of item vectors, a generator over them, beam search.

For adapters that compare with it or build on it: `fit_semantic_ids` in an artifact stage, `train_generator` in an arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from auto_research.blocks.history_generator import GeneratorConfig, HistoryDecoder, HistoryGenerator
from auto_research.blocks.residual_kmeans import code_statistics
from auto_research.blocks.rqvae import RQVAEConfig
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab, resolve_collisions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_list import Lists
from auto_research.experiment.contract import Measurement
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import write_json
from auto_research.train.fitting import settings
from auto_research.train.next_item import load_sequences
from auto_research.train.sid import SIDBudget, fit_sid, measure_sid
from auto_research.train.tokenizer import TokenizerPlan, fit_rqvae
from auto_research.train.tuning import Trained

if TYPE_CHECKING:
    from auto_research.experiment.context import Context

STACKS = {"seq2seq": HistoryGenerator, "decoder": HistoryDecoder}
USER_TOKENS = 128


@dataclass(frozen=True)
class TokenizerConfig:
    """levels books of `codes` vectors of `rq_width`; encoder widths rq_hidden; rq_steps AdamW steps on rq_batch items.

    collisions: "suffix" (one more level) or "group" (items may share an id).
    """

    codes: int = 64
    levels: int = 3
    rq_hidden: tuple[int, ...] = (256, 128)
    rq_width: int = 32
    rq_steps: int = 1500
    rq_batch: int = 512
    rq_rate: float = 1e-3
    collisions: str = "suffix"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (int(self.codes),) * int(self.levels)


def fit_semantic_ids(
    ctx: Context,
    vectors: np.ndarray,
    config: TokenizerConfig,
    *,
    device: torch.device,
    popularity: np.ndarray | None = None,
) -> SIDTable:
    """Train an RQ-VAE on vectors float[n_items + 1, D] (row 0 is left out) and write codes and model into `ctx.out`.

    popularity: int[n_items + 1], for collisions "group".
    """
    model = RQVAEConfig((vectors.shape[1],), config.sizes, (tuple(config.rq_hidden),), config.rq_width)
    plan = TokenizerPlan(config.rq_steps, batch=config.rq_batch, learning_rate=config.rq_rate)
    fitted = fit_rqvae(
        vectors[1:], model, plan=plan, seed=ctx.seed, state=ctx.state, device=device, progress=ctx.progress
    )
    fitted.model.save(ctx.out)
    table = resolve_collisions(fitted.codes[0], config.sizes, config.collisions, popularity=popularity)
    save_semantic_ids(ctx.out, table, config.levels, {"rqvae": fitted.statistics})
    return table


def save_semantic_ids(folder: Path, table: SIDTable, levels: int, facts: dict[str, Any] | None = None) -> None:
    """Write a table, and its statistics (those of the first `levels` codes apart) as statistics.json."""
    table.save(folder)
    prefix = code_statistics(table.codes[1:, :levels], table.sizes[:levels])
    write_json(folder / "statistics.json", {"table": table.statistics(), "prefix": prefix, **(facts or {})})


def code_facts(table: SIDTable, levels: int) -> dict[str, float]:
    """codebook_usage: share of the codes of the first `levels` levels that items use; prefix_collision_rate: share of
    items whose first `levels` codes belong to another item too."""
    prefix = table.codes[1:, :levels]
    _, group, count = np.unique(prefix, axis=0, return_inverse=True, return_counts=True)
    used = [len(np.unique(prefix[:, level])) for level in range(levels)]
    return {
        "codebook_usage": sum(used) / sum(table.sizes[:levels]),
        "prefix_collision_rate": float((count[group.reshape(-1)] > 1).mean()),
    }


def builder(
    table: SIDTable, config: GeneratorConfig, *, stack: str = "seq2seq", users: int = USER_TOKENS
) -> Callable[[dict[str, Any], LeaveTwoOut], nn.Module]:
    """What `fit_sid` calls for a fresh generator. stack: "seq2seq" or "decoder" (flat source, last target)."""
    vocab = SIDVocab.of(table, users=users)
    return lambda _, sequences: STACKS[stack](table, vocab, config, sequences.n_users)


def train_generator(
    ctx: Context,
    table: SIDTable,
    *,
    device: torch.device,
    sequences: LeaveTwoOut | None = None,
    also: Callable[[Lists], dict[str, np.ndarray]] | None = None,
    inventory: torch.Tensor | None = None,
    **overrides: Any,
) -> tuple[Measurement, Trained]:
    """Tune, train and measure a generator over the ids of `table`.

    Sizes (GeneratorConfig), training (SIDBudget), `stack` and `user_tokens` come from overrides, else the arm's switch,
    else the budget.  also: more metrics of the test lists.  inventory: bool[n_items + 1] on the
    device, items that lists may hold in validation and test (None: every item).
    Raises ConfigError for a model that learns only one target a row where rows are windows.
    """
    sequences = sequences or load_sequences(ctx)
    config, budget = settings(GeneratorConfig, ctx, **overrides), settings(SIDBudget, ctx, **overrides)
    values = {**ctx.budget, **(ctx.switch or {}), **overrides}
    stack = values.get("stack", "seq2seq")
    if not budget.cuts and (stack == "decoder" or not config.causal):
        raise ConfigError("a generator that learns the last target of a row only needs cuts: true")
    users = values.get("user_tokens", USER_TOKENS) if config.user_token else 0
    trained, records = fit_sid(
        ctx,
        builder(table, config, stack=stack, users=users),
        table=table,
        device=device,
        sequences=sequences,
        budget=budget,
        trials=overrides.get("trials"),
        inventory=inventory,
    )
    measured = measure_sid(trained, records, sequences, table, budget, device=device, also=also, inventory=inventory)
    length = np.minimum(np.diff(sequences.train_starts) + 1, budget.length)
    per_item = 1 if config.source == "fused" and stack != "decoder" else table.levels
    measured.cost |= {
        "embedding_rows": trained.model.vocab.size,
        "embedding_rows_vs_items": trained.model.vocab.size / table.n_items,
        "encoder_tokens_per_user": float(length.mean()) * per_item + config.user_token,
    }
    measured.extra["semantic_ids"] = table.statistics() | {"hash": table.content_hash}
    return measured, trained
