"""Title vectors: pooling by hand, independence of batches, the prepared table, and what is said without transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from auto_research.blocks import title_encoder
from auto_research.blocks.title_encoder import (
    encode_text_states,
    encode_texts,
    need_transformers,
    prepare_encoded,
    prepare_titles,
    unit_mean,
)
from auto_research.data.folder import FORMAT_VERSION
from auto_research.data.interactions import load_interactions
from auto_research.data.item_vectors import item_texts
from auto_research.data.texts import load_text_states, load_text_vectors, write_text_states
from auto_research.data.titles import load_title_vectors, write_title_vectors
from auto_research.runtime.errors import ConfigError, CorruptFile, DataMissing
from auto_research.runtime.files import sha256_file, write_json

LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789(),'-!.:&/")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random two-layer BERT over letters, unpacked like a real checkpoint."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=128, initializer_range=0.5, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    files = {
        name: {"sha256": sha256_file(folder / name), "bytes": (folder / name).stat().st_size}
        for name in ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json")
    }
    facts = {"checkpoint": "letters", "title": "Letters", "licence": "free", "source": {"name": "hand"}}
    write_json(folder / "manifest.json", {**facts, "format_version": FORMAT_VERSION, "files": files})
    return folder


def test_masked_mean_by_hand():
    hidden = torch.tensor([[[3.0, 0.0], [3.0, 8.0], [100.0, 100.0]]])
    torch.testing.assert_close(unit_mean(hidden, torch.tensor([[1, 1, 0]])), torch.tensor([[0.6, 0.8]]))


def test_vectors_have_length_one_and_do_not_depend_on_the_batch(encoder):
    texts = ["toy story (1995)", "up", "land before time iii", "babe"]
    together = encode_texts(encoder, texts)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    for row, text in enumerate(texts):
        np.testing.assert_allclose(encode_texts(encoder, [text])[0], together[row], atol=1e-5)
    np.testing.assert_allclose(encode_texts(encoder, texts, batch=2), together, atol=1e-5)
    assert np.abs(together[0] - together[2]).max() > 1e-2


def test_titles_become_a_checked_table(encoder, movielens_100k, tmp_path):
    manifest = prepare_titles(movielens_100k / "canonical", tmp_path / "titles", encoder, tmp_path, name="letters")
    vectors = load_title_vectors(tmp_path / "titles")
    data = load_interactions(movielens_100k / "canonical")
    assert vectors.shape == (data.n_items + 1, 16)
    assert not vectors[0].any()
    np.testing.assert_allclose(vectors[7], encode_texts(encoder, [data.item_title[7]])[0], atol=1e-5)
    assert manifest["encoder"]["source"] == {"name": "hand"}
    assert manifest["dataset"] == "movielens-100k"
    assert manifest["encoder"]["weights_sha256"] == sha256_file(encoder / "model.safetensors")


def test_vectors_come_back_exactly(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    vectors[0] = 0
    write_title_vectors(tmp_path, vectors, {})
    assert np.array_equal(load_title_vectors(tmp_path), vectors)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["counts"]["items"] = 3
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(CorruptFile, match="do not match"):
        load_title_vectors(tmp_path)
    with pytest.raises(DataMissing, match="--table titles"):
        load_title_vectors(tmp_path / "nowhere")


def test_text_vectors_are_the_masked_means_of_the_text_states(encoder, movielens_100k, tmp_path):
    for table in ("texts", "text_states"):
        prepare_encoded(table, movielens_100k / "canonical", tmp_path / table, encoder, tmp_path, name="letters")
    vectors, (states, mask) = load_text_vectors(tmp_path / "texts"), load_text_states(tmp_path / "text_states")
    data = load_interactions(movielens_100k / "canonical")
    assert states.shape == (data.n_items + 1, mask.shape[1], 16)
    assert states.dtype == np.float32
    assert not states[~mask].any()
    assert not mask[0].any()
    assert not vectors[0].any()
    mean = unit_mean(torch.from_numpy(states[1:]), torch.from_numpy(mask[1:])).numpy()
    np.testing.assert_allclose(vectors[1:], mean, atol=1e-5)
    text = item_texts(data)[6]
    assert ". Genres: " in text
    np.testing.assert_allclose(vectors[7], encode_texts(encoder, [text])[0], atol=1e-5)
    alone, real = encode_text_states(encoder, [text])
    np.testing.assert_allclose(states[7][mask[7]], alone[0][real[0]], atol=1e-4)


def test_text_states_come_back_exactly_and_damage_is_seen(tmp_path):
    mask = np.array([[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=bool)
    states = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32) * mask[..., None]
    write_text_states(tmp_path, states, mask, {})
    again, found = load_text_states(tmp_path)
    assert np.array_equal(again, states)
    assert np.array_equal(found, mask)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["counts"]["tokens"] = 5
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(CorruptFile, match="do not match"):
        load_text_states(tmp_path)
    with pytest.raises(DataMissing, match="--table text_states"):
        load_text_states(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="from the left"):
        write_text_states(tmp_path, states, mask[:, ::-1], {})


def test_real_texts(movielens_100k):
    vectors = load_text_vectors(movielens_100k / "texts")
    states, mask = load_text_states(movielens_100k / "text_states")
    assert vectors.shape == (1683, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors[1:], axis=1), 1, rtol=1e-5)
    mean = unit_mean(torch.from_numpy(states[1:]), torch.from_numpy(mask[1:])).numpy()
    np.testing.assert_allclose(vectors[1:], mean, atol=1e-5)
    # COBRA's card says 33 and 14.8: with the year, "( 1995 )", which the canonical titles do not have
    assert mask.shape[1] == 33 - 3
    assert mask[1:].sum(1).mean() == pytest.approx(14.8 - 3, abs=0.05)


def test_without_transformers_one_line_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (need_transformers, lambda: prepare_titles(tmp_path, tmp_path, tmp_path, tmp_path)):
        with pytest.raises(ConfigError, match="'llm'"):
            call()


def test_the_workflow_and_the_script_name_the_same_encoder():
    text = (Path(__file__).resolve().parents[3] / "rules" / "common.smk").read_text()
    assert f'TITLE_ENCODER = "{title_encoder.CHECKPOINT}"' in text
