"""Parameters, floating point operations, time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auto_research.metrics.cost import Stopwatch, count_params, flops_of


def test_shared_and_frozen_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
    assert count_params(model) == 12 + 4 + 12
    model[1].weight.requires_grad_(False)
    assert count_params(model) == 16
    assert count_params(model, trainable_only=False) == 28
    tied = nn.ModuleList([nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)])
    tied[1].weight = tied[0].weight
    assert count_params(tied) == 10


def test_flops_of_a_matrix_product_forward_and_backward():
    left, right = torch.randn(4, 5), torch.randn(5, 6, requires_grad=True)
    assert flops_of(lambda: left @ right) == 2 * 4 * 5 * 6
    assert flops_of(lambda: (left @ right).sum().backward()) == 2 * (2 * 4 * 5 * 6)


def test_stopwatch_adds_up_and_stops_on_errors():
    watch = Stopwatch(torch.device("cpu"))
    with watch:
        sum(range(1000))
    first = watch.seconds
    assert first > 0
    with pytest.raises(RuntimeError, match="stop"), watch:
        raise RuntimeError("stop")
    assert watch.seconds > first
    assert watch.peak_memory_bytes >= 0


def test_flops_equal_those_of_pytorchs_own_counter():
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(2, 5, 16)

    def work():
        torch.einsum("btd,de->bte", layer(x), torch.randn(16, 3)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        work()
    assert flops_of(work) == counter.get_total_flops() > 0


def test_fused_attention_of_the_cpu_is_counted():
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    assert flops_of(forward) == 2 * 3 * 4 * 5 * 7 * 8
    assert flops_of(lambda: forward().sum().backward()) == (1 + 2.5) * flops_of(forward)  # scores once more
