"""Faults that once broke GPU runs, one test per kind that concerns dtype, layout or output shape at a border."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from auto_research.runtime.precision import align, cast_border, contiguous_state, dequantize, float32_region, hidden_of


def test_rebuilt_int8_weight_follows_a_bf16_activation():
    weight = torch.randn(6, 4)
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    bias = torch.randn(6)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        nn.functional.linear(x, codes.float() * scale, bias)  # the fault
    rebuilt = dequantize(codes, scale, x)
    out = nn.functional.linear(x, rebuilt, align(bias, x))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), x.float() @ weight.T + bias, atol=0.1, rtol=0.05)


def test_bf16_trunk_meets_a_float32_head():
    head = nn.Linear(4, 2)
    hidden = torch.randn(3, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        head(hidden)  # the fault
    assert head(cast_border(hidden, head)).dtype == torch.float32
    assert cast_border(hidden, nn.ReLU()) is hidden


def test_index_tensors_keep_their_dtype():
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert align(torch.tensor([3]), like).dtype == torch.int64
    assert align(torch.ones(2), torch.tensor([1])).dtype == torch.float32


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
def test_recurrent_state_is_contiguous_at_the_border(cell):
    state = torch.randn(5, 1, 4).transpose(0, 1)
    state = state.expand(2, 5, 4)
    given = (state, state) if cell is nn.LSTM else state
    mended = contiguous_state(given)
    for part in mended if cell is nn.LSTM else [mended]:
        assert part.is_contiguous()
        assert torch.equal(part, state)
    out, _ = cell(3, 4, num_layers=2, batch_first=True)(torch.randn(5, 7, 3), mended)
    assert out.shape == (5, 7, 4)


def test_hidden_of_takes_every_shape_of_output():
    hidden, other = torch.ones(1, 2, 3), torch.zeros(1, 2, 3)
    for output in (
        hidden,
        (hidden, other),
        [hidden],
        {"last_hidden_state": hidden, "hidden_states": (other,)},
        SimpleNamespace(last_hidden_state=hidden),
        SimpleNamespace(last_hidden_state=None, hidden_states=(other, hidden)),
    ):
        assert hidden_of(output) is hidden
    with pytest.raises(TypeError, match="no hidden states in SimpleNamespace"):
        hidden_of(SimpleNamespace(logits=hidden))


def test_hidden_of_a_real_transformers_layer_and_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.Qwen2Model(config).eval()
    seen = []
    model.layers[0].register_forward_hook(lambda _module, _inputs, output: seen.append(hidden_of(output)))
    output = model(torch.tensor([[1, 2, 3]]))
    assert seen[0].shape == (1, 3, 8)
    assert torch.equal(model.norm(seen[0]), hidden_of(output))


def test_float32_region_switches_autocast_off():
    a = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with float32_region("cpu"):
            assert (a @ a).dtype == torch.float32
