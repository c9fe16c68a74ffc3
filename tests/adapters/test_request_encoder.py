"""Item vectors of the request encoder: a few rows are projected alone, many are looked up in one projection."""

import pytest
import synthetic
import torch

from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.metrics.cost import flops_of


@pytest.fixture(scope="module")
def table():
    return synthetic.request_table()


@pytest.fixture(scope="module")
def encoder(table):
    torch.manual_seed(0)
    return RequestEncoder(table.vocab, torch.as_tensor(table.item_genres), field=4)


def test_rows_alone_are_rows_of_the_whole_table(encoder):
    few = torch.tensor([[0, 3], [5, 3]])
    many = torch.arange(len(encoder.item_genres)).repeat(2)
    assert encoder.few(few)
    assert not encoder.few(many)
    whole = encoder.item_vectors()
    torch.testing.assert_close(encoder.look_up(few), whole[few])
    torch.testing.assert_close(encoder.look_up(many), whole.repeat(2, 1))
    encoder.look_up(few).sum().backward()
    assert encoder.item.weight.grad[0].abs().max() == 0  # padding stays what it is
    assert encoder.item.weight.grad[3].abs().min() > 0


def test_one_request_does_not_pay_for_the_catalogue(table, encoder):
    one = table.batch(table.requests("valid")[:1], history=6)
    vectors = encoder.item_vectors()
    cheap, dear = encoder(one), (encoder.request(one, vectors), encoder.pairs(one, vectors))
    for short, long in zip((cheap[0].events, cheap[1].key), (dear[0].events, dear[1].key), strict=True):
        torch.testing.assert_close(short, long)
    genres = encoder.item_genres.shape[1]
    with torch.no_grad():
        saved = flops_of(lambda: encoder.pairs(one, encoder.item_vectors())) - flops_of(lambda: encoder.pairs(one))
    assert saved == 2 * genres * 4 * (len(encoder.item_genres) - len(one.item))
