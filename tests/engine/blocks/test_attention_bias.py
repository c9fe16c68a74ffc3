"""Position and time biases: slopes, buckets, tables and rotations by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from auto_research.blocks.attention_bias import (
    Alibi,
    NoBias,
    RelativeBias,
    Rotary,
    alibi_slopes,
    attention_bias,
    log2_distance,
)
from auto_research.data.prefix import log2_bucket


def test_alibi_by_hand():
    """Card genrank: four slopes, and head 1's weights over distances 1, 2, 3 alone and with distance 0."""
    assert alibi_slopes(4).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    bias = Alibi(4)(torch.tensor([3]), torch.tensor([3, 2, 1, 0]))[0, 0]
    expected = torch.tensor([0.3499, 0.2725, 0.2122, 0.1653])
    torch.testing.assert_close(torch.softmax(bias, 0), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.softmax(bias[1:], 0), torch.tensor([0.4192, 0.3265, 0.2543]), atol=1e-4, rtol=0)
    assert not Alibi(4).state_dict()


@given(st.integers(0, 10**10))
def test_time_buckets_are_those_of_the_request_table(seconds):
    start = 893_286_638  # a Unix time float32 cannot hold
    found = log2_distance(torch.tensor(start + seconds), torch.tensor(start), 32)
    assert int(found) == int(log2_bucket(seconds))


def test_relative_tables_by_hand():
    bias = RelativeBias(1, positions=3, times=4)
    with torch.no_grad():
        bias.position.copy_(torch.tensor([[0.0], [10.0], [20.0]]))
        bias.time.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    found = bias(torch.tensor([5]), torch.tensor([5, 4, 0]), torch.tensor([100]), torch.tensor([100, 99, 0]))
    assert found.tolist() == [[[1.0, 12.0, 24.0]]]  # distance 5 shares the last row, 100 s the last bucket
    with pytest.raises(ValueError, match="times"):
        bias(torch.tensor([5]), torch.tensor([5]))
    assert RelativeBias(2, 3, 0)(torch.tensor([1]), torch.tensor([1, 0])).shape == (2, 1, 2)


def test_rotary_products_depend_on_the_distance_only():
    torch.manual_seed(0)
    rotary, q, k = Rotary(4), torch.randn(1, 1, 4), torch.randn(1, 1, 4)

    def product(a, b):
        turned = rotary.turn(q, torch.tensor([a])), rotary.turn(k, torch.tensor([b]))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 4), product(3, 0), atol=1e-5, rtol=1e-5)
    assert not torch.isclose(product(7, 4), product(7, 5), atol=1e-3)
    torch.testing.assert_close(rotary.turn(q, torch.tensor([0])), q)
    turned = Rotary(2).turn(torch.tensor([[[1.0, 0.0]]]), torch.tensor([1]))
    torch.testing.assert_close(turned.flatten(), torch.tensor([0.5403, 0.8415]), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="even"):
        Rotary(3)


def test_kinds():
    assert isinstance(attention_bias("rotary", 2), NoBias)
    assert isinstance(attention_bias("relative", 2), RelativeBias)
    with pytest.raises(ValueError, match="unknown attention bias"):
        attention_bias("learned", 2)
