"""Item vectors and the codes that the arms cut them into."""

from __future__ import annotations

import numpy as np

from auto_research.baselines.tiger import TokenizerConfig
from auto_research.blocks.lsh_codes import lsh_codes
from auto_research.blocks.residual_kmeans import rq_kmeans
from auto_research.blocks.semantic_ids import SIDTable, random_codes, resolve_collisions
from auto_research.data.interactions import load_interactions
from auto_research.data.item_vectors import item_cf_vectors, text_and_cf_vectors, unit_rows
from auto_research.data.texts import load_text_vectors
from auto_research.experiment.context import Context
from auto_research.runtime.errors import ConfigError
from auto_research.train.next_item import load_sequences

CONTENT = ("text", "genres", "text_cf")


def content_vectors(ctx: Context, kind: str = "text") -> np.ndarray:
    """float32[n_items + 1, D] x_i: "text" (384, the paper's way), "genres" (multi-hot of length 1) or "text_cf"
    (principal components of text beside the SVD of train co-occurrence; not in the paper)."""
    if kind == "text":
        return load_text_vectors(ctx.data("texts"))
    if kind == "genres":
        return unit_rows(load_interactions(ctx.data("canonical")).item_genres)
    if kind == "text_cf":
        return text_and_cf_vectors(load_text_vectors(ctx.data("texts")), item_cf_vectors(load_sequences(ctx)))
    raise ConfigError(f"unknown item vectors '{kind}'; known: {', '.join(CONTENT)}")


def random_table(table: SIDTable, seed: int) -> SIDTable:
    """Unique tuples of the same levels and sizes as `table`, drawn uniformly: the control without meaning."""
    codes = random_codes(table.n_items, table.sizes, seed=seed)
    return resolve_collisions(codes, table.sizes, "group", popularity=np.zeros(table.n_items + 1))


def hyperplane_table(
    vectors: np.ndarray, config: TokenizerConfig, seed: int, popularity: np.ndarray | None = None
) -> SIDTable:
    """log2(codes) random hyperplanes a level through the mean of vectors [n_items + 1, D], and a suffix.

    popularity: int[n_items + 1], where config.collisions lets items share an id instead of a suffix.
    """
    bits = int(config.codes).bit_length() - 1
    if 1 << bits != config.codes:
        raise ConfigError(f"hyperplane codes need a power of two per level, not {config.codes}")
    codes = lsh_codes(vectors[1:], config.levels, bits, seed=seed)
    return resolve_collisions(codes, config.sizes, config.collisions, popularity=popularity)


def kmeans_table(
    vectors: np.ndarray, config: TokenizerConfig, seed: int, popularity: np.ndarray | None = None
) -> SIDTable:
    """Residual k-means of vectors [n_items + 1, D] without an autoencoder, and a suffix (or, as above, none)."""
    codes = rq_kmeans(vectors[1:], config.sizes, seed=seed).codes
    return resolve_collisions(codes, config.sizes, config.collisions, popularity=popularity)
