"""Layers of the real pretrained model as a trunk: the weights are the model's own, only LoRA and projections learn."""

from __future__ import annotations

import json

import pytest
import torch

from auto_research.blocks.causal_lm import LanguageModelTrunk, load_layers
from auto_research.runtime.errors import ConfigError, CorruptFile


@pytest.fixture
def trunk(causal_lm):
    torch.manual_seed(0)
    return LanguageModelTrunk(16, load_layers(causal_lm, 2))


def test_all_layers_give_the_states_of_the_whole_model(causal_lm):
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(causal_lm, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(causal_lm, local_files_only=True)
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    layers = load_layers(causal_lm)
    with torch.no_grad():
        expected = whole(tokens)
        states = layers(inputs_embeds=whole.get_input_embeddings()(tokens), use_cache=False).last_hidden_state
        logits = whole.lm_head(states)
    assert torch.allclose(logits, expected.logits, atol=1e-3)
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert whole.lm_head.weight is whole.get_input_embeddings().weight
    assert sum(p.numel() for p in whole.parameters()) == 134_515_008


def test_only_lora_and_projections_learn(trunk):
    learning = {name for name, p in trunk.named_parameters() if p.requires_grad}
    lora = {name for name in learning if ".lora_" in name}
    assert len(lora) == 2 * 4 * 2  # layers, projections, A and B
    assert learning - lora == {"inward.weight", "inward.bias", "outward.weight", "outward.bias"}
    assert sum(trunk.get_parameter(name).numel() for name in lora) == 2 * 8 * (4 * 576 + 576 + 192 + 192 + 576)
    trunk(torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)).square().sum().backward()
    for name, p in trunk.named_parameters():
        moved = p.grad is not None and bool(p.grad.abs().sum() > 0)
        assert moved == (name in learning and "lora_A" not in name), (
            name
        )  # B is 0 at the start, so A has no gradient yet


def test_states_are_causal_and_padding_changes_nothing(trunk):
    x, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    with torch.no_grad():
        states, later = trunk(x, mask), x.clone()
        later[:, 3] += 1
        moved = (trunk(later, mask) - states).abs().amax(2) > 1e-5
        alone = trunk(x[1:, :4], mask[1:, :4])
    assert moved[0].tolist() == [False, False, False, True, True, True]
    assert torch.allclose(states[1, :4], alone[0], atol=1e-5)


def test_lora_stays_float32_under_bfloat16_layers(causal_lm):
    trunk = LanguageModelTrunk(16, load_layers(causal_lm, 1, torch.bfloat16))
    kinds = {p.dtype for name, p in trunk.layers.named_parameters() if not p.requires_grad}
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in trunk.parameters() if p.requires_grad} == {torch.float32}
    assert trunk(torch.randn(1, 3, 16), torch.ones(1, 3, dtype=torch.bool)).dtype == torch.float32


def test_wrong_checkpoints_are_one_line(causal_lm, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ConfigError, match="31 layers of a model that has 30"):
        load_layers(causal_lm, 31)
    (tmp_path / "config.json").write_text((causal_lm / "config.json").read_text())
    save_file({"model.norm.weight": torch.zeros(576)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFile, match=r"no weight model\.layers\.0"):
        load_layers(tmp_path, 1)


def test_the_manifest_says_where_the_weights_come_from(causal_lm):
    manifest = json.loads((causal_lm / "manifest.json").read_text())
    source = manifest["source"]
    assert (source["kind"], source.get("dequantised_from")) in (("gguf", "Q4_1"), ("hub", None))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["files"])
