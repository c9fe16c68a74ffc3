"""Faults that once broke GPU runs and that need no accelerator to find, against the project's own helpers."""

import json

import audit_toys
import pytest
import torch
from torch import nn

from auto_research.audit.scan import has_device_path
from auto_research.blocks.language_models import (
    grow_embeddings,
    load_encoder,
    load_tokenizer,
    new_rows,
    rebuilt_linear,
)
from auto_research.experiment.card import TIERS, discover, load_card
from auto_research.runtime.errors import ConfigError, CorruptFile, UnknownName
from auto_research.runtime.paths import checkout_root
from auto_research.runtime.precision import cast_border, contiguous_state, hidden_of

transformers = pytest.importorskip("transformers")


@pytest.fixture
def no_lapack():
    from auto_research.shadow import lapack

    with lapack.without_lapack():
        yield


def tiny_llama(tie: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tie,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tiny_bert(folder, *, drop: tuple[str, ...] = ("model_type",)):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in facts.items() if key not in drop}))
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ndeep\nmodel\n##s\n", encoding="utf-8")
    return model


# torch without CPU LAPACK broke the vocabulary resize


@pytest.mark.usefixtures("no_lapack")
def test_the_fault_is_real_resizing_by_covariance_needs_lapack():
    with pytest.raises(RuntimeError, match="LAPACK"):
        tiny_llama(tie=True).resize_token_embeddings(16, mean_resizing=True)


@pytest.mark.usefixtures("no_lapack")
@pytest.mark.parametrize("tie", [True, False])
def test_the_vocabulary_grows_without_lapack(tie):
    model = tiny_llama(tie)
    old_input = model.get_input_embeddings().weight.detach().clone()
    old_output = model.get_output_embeddings().weight.detach().clone()
    grow_embeddings(model, 16)
    new_input, new_output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert new_input.shape == (16, 8)
    assert new_output.shape == (16, 8)
    assert torch.equal(new_input[:11], old_input)
    assert torch.equal(new_output[:11], old_output)
    assert (new_input is new_output) == tie
    assert model.config.vocab_size == 16
    assert model(input_ids=torch.tensor([[1, 15]])).logits.shape == (1, 2, 16)


def test_new_rows_are_near_the_mean_and_differ():
    table = torch.tensor([[1.0, -1.0], [3.0, -1.0]])
    rows = new_rows(table, 4000, noise=0.5)
    assert rows.mean(0) == pytest.approx(torch.tensor([2.0, -1.0]), abs=0.05)
    assert rows[:, 0].std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(rows[:, 1], torch.full((4000,), -1.0))
    assert torch.equal(rows, new_rows(table, 4000, noise=0.5))
    assert not torch.equal(rows, new_rows(table, 4000, noise=0.5, seed=1))
    assert new_rows(table.bfloat16(), 2).dtype == torch.bfloat16


def test_a_vocabulary_does_not_shrink():
    with pytest.raises(ConfigError):
        grow_embeddings(tiny_llama(tie=True), 5)


# an old BERT configuration names no model_type


def test_the_fault_is_real_auto_classes_need_the_type(tmp_path):
    tiny_bert(tmp_path)
    with pytest.raises(ValueError, match=r"model_type|Unrecognized"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("drop", [(), ("model_type",), ("model_type", "architectures")])
def test_an_encoder_loads_with_and_without_its_type(tmp_path, drop):
    saved = tiny_bert(tmp_path, drop=drop)
    loaded = load_encoder(tmp_path)
    tokens = torch.tensor([[2, 5, 3]])
    assert type(loaded) is transformers.BertModel
    assert torch.equal(hidden_of(loaded(tokens)), hidden_of(saved(tokens)))


def test_a_tokenizer_loads_without_the_type(tmp_path):
    tiny_bert(tmp_path)
    assert load_tokenizer(tmp_path)("deep models")["input_ids"] == [2, 5, 6, 7, 3]


def test_an_untyped_configuration_that_is_not_bert_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"d_model": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match="model_type"):
        load_encoder(tmp_path)
    with pytest.raises(CorruptFile):
        load_encoder(tmp_path / "nowhere")


# layers return a tensor in one version of transformers and a tuple in another


def test_hidden_states_keep_the_batch_in_every_shape_of_output():
    hidden = torch.arange(12.0).reshape(2, 3, 2)
    outputs = [hidden, (hidden,), (hidden, "cache"), [hidden], {"last_hidden_state": hidden}]
    outputs.append(transformers.modeling_outputs.BaseModelOutput(last_hidden_state=hidden))
    for output in outputs:
        assert torch.equal(hidden_of(output), hidden)
    layer = tiny_llama(tie=True).model.layers[0]
    x = torch.zeros(2, 3, 8)
    positions = (torch.ones(1, 3, 4), torch.zeros(1, 3, 4))
    assert hidden_of(layer(x, position_embeddings=positions)).shape == (2, 3, 8)
    with pytest.raises(TypeError):
        hidden_of("text")


# INT8 weights rebuilt as FP32 meet BF16 activations; a BF16 model meets an FP32 head


def test_rebuilt_weights_follow_the_activation():
    codes, scale = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), torch.tensor([[0.5], [1.0]])
    bias = torch.tensor([1.0, 0.0])
    x = torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        nn.functional.linear(x, codes.float() * scale, bias)
    out = rebuilt_linear(x, codes, scale, bias)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[1.0, 10.0]]
    assert rebuilt_linear(x.float(), codes, scale, None).dtype == torch.float32


def test_a_bf16_trunk_meets_an_fp32_head_through_one_cast():
    head = nn.Linear(2, 1)
    x = torch.ones(3, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        head(x)
    assert head(cast_border(x, head)).dtype == torch.float32


def test_recurrent_state_is_contiguous_at_the_border():
    state = torch.zeros(4, 2, 3).transpose(0, 1)
    assert not state.is_contiguous()
    assert contiguous_state(state).is_contiguous()
    assert all(part.is_contiguous() for part in contiguous_state((state, state)))


# formal step counts were used in a smoke run


def test_every_tier_has_its_own_budget_and_none_inherits_another(tmp_path):
    folder = audit_toys.plant(tmp_path, "toy")
    text = (folder / "card.yaml").read_text(encoding="utf-8")
    for tier, steps in zip(TIERS, (1, 2, 300, 4000), strict=True):
        text = text.replace(f"  {tier}: {{seeds: [42]}}", f"  {tier}: {{seeds: [42], steps: {steps}}}")
    (folder / "card.yaml").write_text(text, encoding="utf-8")
    card = load_card(folder)
    assert [card.budget(tier)["steps"] for tier in TIERS] == [1, 2, 300, 4000]
    with pytest.raises(UnknownName):
        card.budget("formal")
    (folder / "card.yaml").write_text(text.replace("  smoke: {seeds: [42], steps: 2}\n", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match="smoke"):
        load_card(folder)


def test_no_card_of_this_repository_runs_smoke_with_a_standard_budget():
    for key, card in discover(checkout_root()).items():
        assert card.budget("smoke") != card.budget("standard"), key
        assert card.budget("tiny") != card.budget("standard"), key


# the scanner inherited a neighbour's use of the GPU


def test_a_flat_neighbour_with_a_device_call_gives_nothing_to_the_folder(tmp_path):
    audit_toys.plant(tmp_path, "with-device")
    folder = audit_toys.plant(tmp_path, "without-device", audit_toys.NO_DEVICE)
    (folder / "experiment.py").write_text(
        (folder / "experiment.py").read_text() + "\nfrom adapters.with_device.experiment import treatment as other\n"
    )
    assert has_device_path(tmp_path / "adapters" / "with_device")
    assert not has_device_path(folder)
