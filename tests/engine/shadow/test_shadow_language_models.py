"""transformers on the shadow device: forward, loss, gradients, generation, files, adapters of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from auto_research.blocks.language_models import grow_embeddings
from auto_research.shadow.dispatch import MixedDevices

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def _llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=2, pad_token_id=0, **options)
    return transformers.LlamaForCausalLM(config).eval()


def _bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=24)).eval()


IDS = torch.tensor([[5, 9, 31, 7, 2], [4, 4, 8, 30, 1]])


@pytest.mark.parametrize("build", [_llama, _bert])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_loss_logits_and_gradients_equal_cpu(build, attention):
    here = build()
    here.set_attn_implementation(attention)
    there = copy.deepcopy(here).to("shadow")
    want = here(input_ids=IDS, labels=IDS)
    have = there(input_ids=IDS.to("shadow"), labels=IDS.to("shadow"))
    want.loss.backward()
    have.loss.backward()
    assert have.logits.device.type == "shadow"
    torch.testing.assert_close(have.logits.cpu(), want.logits, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(have.loss.cpu(), want.loss)
    for (name, p), q in zip(here.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-6, msg=name)


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_p": 0.9, "top_k": 10},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_generation_equals_cpu(way):
    here = _llama()
    there = copy.deepcopy(here).to("shadow")
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    answers = []
    for model, place in ((here, "cpu"), (there, "shadow")):
        torch.manual_seed(3)
        out = model.generate(IDS.to(place), attention_mask=mask.to(place), max_new_tokens=6, **WAYS[way])
        assert out.device.type == place
        answers.append(out.tolist())
    assert answers[0] == answers[1]


def test_prompts_left_on_cpu_raise():
    model = _llama().to("shadow")
    with pytest.raises(MixedDevices, match="embedding"):
        model(input_ids=IDS)


def test_models_are_saved_and_loaded(tmp_path):
    model = _llama(tie_word_embeddings=True).to("shadow")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to("shadow")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(input_ids=IDS.to("shadow")).logits, model(input_ids=IDS.to("shadow")).logits)


def test_models_are_made_on_the_device():
    torch.manual_seed(0)
    with torch.device("shadow"):
        config = transformers.LlamaConfig(**SIZES, intermediate_size=24)
        model = transformers.LlamaForCausalLM(config)
    assert {p.device.type for p in model.parameters()} == {"shadow"}
    assert model(input_ids=IDS.to("shadow")).logits.isfinite().all()


def test_vocabulary_grows_on_the_device():
    model = _llama().to("shadow")
    grow_embeddings(model, 44)
    assert model(input_ids=torch.tensor([[43]], device="shadow")).logits.shape == (1, 1, 44)
    assert model.get_input_embeddings().weight.device.type == "shadow"


def test_bf16_training_with_checkpointing_gives_finite_gradients():
    model = _llama().to(device="shadow", dtype=torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=IDS.to("shadow"), labels=IDS.to("shadow"), use_cache=False).loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_lora_trains_only_its_own_weights():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    model = peft.get_peft_model(_llama(), config).to("shadow")
    model(input_ids=IDS.to("shadow"), labels=IDS.to("shadow")).loss.backward()
    assert {"lora_" in name for name, p in model.named_parameters() if p.grad is not None} == {True}


def test_operations_are_counted_as_on_cpu():
    counts = []
    for place in ("cpu", "shadow"):
        model = _llama().to(place)
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            model(input_ids=IDS.to(place))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
