"""Frozen sentence encoder over item titles: masked mean of the last hidden states, L2-normalised (Sentence-BERT)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from auto_research.data.checkpoints import checkpoint_manifest, fetch_checkpoint
from auto_research.data.folder import MANIFEST, read_manifest
from auto_research.data.interactions import load_interactions
from auto_research.data.titles import write_title_vectors
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import sha256_file

CHECKPOINT = "minilm-l6-v2"
MAX_TOKENS = 128


def need_transformers() -> None:
    """Raise ConfigError naming the extra when transformers is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "title vectors need transformers: install the extra 'llm' (pip install -e '.[llm]')"
        ) from None


def encode_texts(folder: Path, texts: list[str], *, batch: int = 64) -> np.ndarray:
    """float32[n, D] unit vectors of texts, on the CPU in float32.

    folder: an encoder checkpoint. Texts are cut to 128 tokens; order and batches do not change a vector beyond rounding.
    """
    need_transformers()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from auto_research.blocks.language_models import load_encoder, load_tokenizer

    tokenizer, model = load_tokenizer(folder), load_encoder(folder, dtype=torch.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # similar lengths share a batch: less padding
    vectors = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
    with torch.no_grad():
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            tokens = tokenizer(
                [texts[i] for i in chosen], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            )
            hidden = model(**tokens).last_hidden_state  # (B, L, D)
            vectors[chosen] = unit_mean(hidden, tokens["attention_mask"]).numpy()
    return vectors


def unit_mean(hidden, mask):
    """Masked mean over tokens, then length 1: hidden [B, L, D], mask [B, L] -> [B, D]."""
    weight = mask.unsqueeze(2).to(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    return mean / mean.norm(dim=1, keepdim=True).clamp(min=1e-12)


def prepare_titles(
    canonical: Path, out: Path, checkpoint: Path, dataset_dir: Path, offline: bool = False, *, name: str = CHECKPOINT
) -> dict:
    """Encode the item titles of a canonical folder into the table `titles`; returns its manifest.

    checkpoint: folder of the unpacked checkpoint, fetched first when it is not there. Raises DataMissing,
    ChecksumMismatch, CorruptFile, and ConfigError without the extra 'llm'.
    """
    need_transformers()
    parent = read_manifest(Path(canonical))
    if not (Path(checkpoint) / MANIFEST).is_file():
        fetch_checkpoint(name, checkpoint, dataset_dir, offline)
    encoder = checkpoint_manifest(checkpoint, name)
    data = load_interactions(canonical)
    vectors = encode_texts(Path(checkpoint), data.item_title[1:])
    vectors = np.concatenate([np.zeros((1, vectors.shape[1]), dtype=np.float32), vectors])
    manifest = {key: parent[key] for key in ("dataset", "title", "licence", "decades", "source")}
    manifest["canonical_sha256"] = sha256_file(Path(canonical) / MANIFEST)
    manifest["encoder"] = {
        "checkpoint": encoder["checkpoint"],
        "licence": encoder["licence"],
        "source": encoder["source"],
        "weights_sha256": encoder["files"]["model.safetensors"]["sha256"],
        "max_tokens": MAX_TOKENS,
        "pooling": "masked mean, L2-normalised",
    }
    return write_title_vectors(Path(out), vectors, manifest)
