"""Frozen sentence encoder over item titles and texts (Sentence-BERT).

Tables `titles` and `texts` hold the masked mean of the last hidden states, L2-normalised; `text_states` the states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from auto_research.data.checkpoints import checkpoint_manifest, fetch_checkpoint
from auto_research.data.folder import MANIFEST, read_manifest
from auto_research.data.interactions import load_interactions
from auto_research.data.item_vectors import item_texts
from auto_research.data.texts import write_text_states
from auto_research.data.titles import write_vectors
from auto_research.runtime.errors import ConfigError, CorruptFile
from auto_research.runtime.files import sha256_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINT = "minilm-l6-v2"
MAX_TOKENS = 128
ENCODED = ("titles", "texts", "text_states")


def need_transformers() -> None:
    """Raise ConfigError naming the extra when transformers is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "title vectors need transformers: install the extra 'llm' (pip install -e '.[llm]')"
        ) from None


def encode_batches(folder: Path, texts: list[str], *, batch: int = 64) -> Iterator[tuple[list[int], Any, Any]]:
    """Rows of a batch, their last hidden states [B, L, D] and mask [B, L], on the CPU in float32.

    folder: an encoder checkpoint. Texts are cut to 128 tokens; order and batches do not change a state beyond rounding.
    """
    need_transformers()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from auto_research.blocks.language_models import load_encoder, load_tokenizer

    tokenizer, model = load_tokenizer(folder), load_encoder(folder, dtype=torch.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # similar lengths share a batch: less padding
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        tokens = tokenizer(
            [texts[i] for i in chosen], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        yield chosen, hidden, tokens["attention_mask"]


def encode_texts(folder: Path, texts: list[str], *, batch: int = 64) -> np.ndarray:
    """float32[n, D] unit vectors of texts; see `encode_batches`."""
    rows = {}
    for chosen, hidden, mask in encode_batches(folder, texts, batch=batch):
        rows |= zip(chosen, unit_mean(hidden, mask).numpy(), strict=True)
    return np.stack([rows[row] for row in range(len(texts))])


def encode_text_states(folder: Path, texts: list[str], *, batch: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """float32[n, T, D] last hidden states of the word pieces of texts and their mask bool[n, T]; zero under the mask."""
    rows = {}
    for chosen, hidden, mask in encode_batches(folder, texts, batch=batch):
        rows |= {row: states[real.bool()].numpy() for row, states, real in zip(chosen, hidden, mask, strict=True)}
    lengths = np.array([len(rows[row]) for row in range(len(texts))])
    mask = np.arange(lengths.max()) < lengths[:, None]
    states = np.zeros((*mask.shape, rows[0].shape[1]), dtype=np.float32)
    states[mask] = np.concatenate([rows[row] for row in range(len(texts))])
    return states, mask


def word_pieces(folder: Path, texts: list[str], mask: np.ndarray) -> np.ndarray:
    """int64[n + 1, T] vocabulary entries of the texts, where the mask bool[n + 1, T] of their states has them.

    Raises CorruptFile when the tokenizer cuts a text into another number of pieces than its states have.
    """
    need_transformers()
    from auto_research.blocks.language_models import load_tokenizer

    cut = load_tokenizer(folder)(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
    lengths = np.array([0, *map(len, cut)])
    if not np.array_equal(lengths, mask.sum(1)):
        raise CorruptFile(f"{folder}: its tokenizer is not the one that made the states; prepare text_states again")
    pieces = np.zeros(mask.shape, dtype=np.int64)
    pieces[mask] = np.concatenate(cut)
    return pieces


def load_text_layers(folder: Path, layers: int | None = None) -> PreTrainedModel:
    """The encoder of a checkpoint with its first `layers` (None: all) layers, to be trained; its pooler is dropped.

    Raises ConfigError when it has fewer layers or the extra 'llm' is missing.
    """
    need_transformers()
    import torch

    from auto_research.blocks.language_models import load_encoder

    model = load_encoder(folder, dtype=torch.float32)
    if layers is not None:
        if not 1 <= layers <= len(model.encoder.layer):
            raise ConfigError(f"{layers} layers of an encoder that has {len(model.encoder.layer)}")
        model.encoder.layer = model.encoder.layer[:layers]
    model.pooler = None
    return model


def unit_mean(hidden, mask):
    """Masked mean over tokens, then length 1: hidden [B, L, D], mask [B, L] -> [B, D]."""
    weight = mask.unsqueeze(2).to(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    return mean / mean.norm(dim=1, keepdim=True).clamp(min=1e-12)


def prepare_titles(
    canonical: Path, out: Path, checkpoint: Path, dataset_dir: Path, offline: bool = False, *, name: str = CHECKPOINT
) -> dict:
    """Encode the item titles of a canonical folder into the table `titles`; see `prepare_encoded`."""
    return prepare_encoded("titles", canonical, out, checkpoint, dataset_dir, offline, name=name)


def prepare_encoded(
    table: str,
    canonical: Path,
    out: Path,
    checkpoint: Path,
    dataset_dir: Path,
    offline: bool = False,
    *,
    name: str = CHECKPOINT,
) -> dict:
    """Build one of ENCODED from a canonical folder; returns its manifest.

    checkpoint: folder of the unpacked checkpoint, fetched first when it is not there. Raises DataMissing,
    ChecksumMismatch, CorruptFile, and ConfigError without the extra 'llm'.
    """
    need_transformers()
    parent = read_manifest(Path(canonical))
    if not (Path(checkpoint) / MANIFEST).is_file():
        fetch_checkpoint(name, checkpoint, dataset_dir, offline)
    encoder = checkpoint_manifest(checkpoint, name)
    data = load_interactions(canonical)
    manifest = {key: parent[key] for key in ("dataset", "title", "licence", "decades", "source")}
    manifest["canonical_sha256"] = sha256_file(Path(canonical) / MANIFEST)
    manifest["encoder"] = {
        "checkpoint": encoder["checkpoint"],
        "licence": encoder["licence"],
        "source": encoder["source"],
        "weights_sha256": encoder["files"]["model.safetensors"]["sha256"],
        "max_tokens": MAX_TOKENS,
        "pooling": "none" if table == "text_states" else "masked mean, L2-normalised",
    }
    texts = data.item_title[1:] if table == "titles" else item_texts(data)
    if table == "text_states":
        states, mask = map(_with_padding_row, encode_text_states(Path(checkpoint), texts))
        return write_text_states(Path(out), states, mask, manifest)
    vectors = _with_padding_row(encode_texts(Path(checkpoint), texts))
    return write_vectors(Path(out), table, vectors, manifest)


def _with_padding_row(array: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(array[:1]), array])
