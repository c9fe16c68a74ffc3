"""LSTM, GRU and their cells: the CPU's values and gradients, cuDNN's demand on the hidden state."""

from __future__ import annotations

import pytest
import torch
from both_devices import assert_equal_runs
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LAYERS = {
    "gru": lambda: nn.GRU(3, 4, num_layers=2, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 4, batch_first=True),
    "gru with dropout": lambda: nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True),
}


def _state(out):
    return list(out) if isinstance(out, tuple) else [out]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_cpu(name, packed):
    def program(device):
        layer = LAYERS[name]().to(device)
        x = torch.randn(3, 5, 3).to(device).requires_grad_()
        if packed:
            out, state = layer(pack_padded_sequence(x, torch.tensor([5, 2, 3]), batch_first=True, enforce_sorted=False))
            out, lengths = pad_packed_sequence(out, batch_first=True)
            assert lengths.device.type == "cpu"
        else:
            out, state = layer(x)
        (out.square().sum() + _state(state)[-1].sum()).backward()
        return [out, *_state(state), x.grad, *(p.grad for p in layer.parameters())]

    assert_equal_runs(program)


def test_initial_state_gets_a_gradient():
    def program(device):
        layer = nn.LSTM(3, 4).to(device)
        h, c = (torch.randn(1, 2, 4).to(device).requires_grad_() for _ in range(2))
        out, _ = layer(torch.randn(5, 2, 3).to(device), (h, c))
        out.sum().backward()
        return [out, h.grad, c.grad]

    assert_equal_runs(program)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_cell_equals_cpu(kind):
    def program(device):
        cell = kind(3, 4).to(device)
        x = torch.randn(5, 2, 3).to(device).requires_grad_()
        state = None
        for step in x:
            state = cell(step, state)
        sum(s.square().sum() for s in _state(state)).backward()
        return [*_state(state), x.grad, *(p.grad for p in cell.parameters())]

    assert_equal_runs(program)


def test_inference_mode_equals_cpu():
    def program(device):
        with torch.inference_mode():
            return list(nn.GRU(3, 4).to(device)(torch.randn(5, 2, 3).to(device)))

    assert_equal_runs(program)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_hidden_state_that_is_not_contiguous_raises(kind, inference):
    layer, x = kind(3, 4).to("shadow"), torch.randn(5, 2, 3).to("shadow")
    with torch.inference_mode(inference):
        h = torch.zeros(1, 4, 2, device="shadow").transpose(1, 2)
        assert not h.is_contiguous()

        def state(h):
            return (h, h) if kind is nn.LSTM else h

        with pytest.raises(RuntimeError, match="hx is not contiguous"):
            layer(x, state(h))
        layer(x, state(h.contiguous()))


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_cells_demand_it_too(kind):
    cell, h = kind(3, 4).to("shadow"), torch.zeros(4, 2, device="shadow").T
    with pytest.raises(RuntimeError, match="hx is not contiguous"):
        cell(torch.zeros(2, 3, device="shadow"), (h, h) if kind is nn.LSTMCell else h)


def test_lengths_stay_on_cpu():
    with pytest.raises(RuntimeError, match="lengths"):
        pack_padded_sequence(torch.zeros(2, 3, 1, device="shadow"), torch.tensor([3, 2], device="shadow"), True)


def test_weights_of_another_dtype_raise():
    with pytest.raises(RuntimeError, match=r"dtype"):
        nn.GRUCell(3, 4).to("shadow")(torch.zeros(2, 3, device="shadow", dtype=torch.bfloat16))
