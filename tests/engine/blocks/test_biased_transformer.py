"""Causality, cache equality and candidate isolation of the Transformer with attention bias, for every kind of bias."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from auto_research.blocks.attention_bias import BIAS_KINDS
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.metrics.cost import flops_of

LENGTH, WIDTH = 6, 8


@pytest.fixture(params=BIAS_KINDS)
def model(request):
    torch.manual_seed(0)
    config = BiasedConfig(width=WIDTH, heads=2, layers=2, hidden=16, bias=request.param, positions=8, times=6)
    trunk = BiasedTransformer(config).eval()
    with torch.no_grad():
        for block in trunk.blocks:
            for table in block.bias.parameters():
                table.normal_()  # the small start would hide a wrong bias
    return trunk


def events(batch: int = 3):
    torch.manual_seed(1)
    x = torch.randn(batch, LENGTH, WIDTH)
    mask = torch.ones(batch, LENGTH, dtype=torch.bool)
    mask[1:2, :2] = False
    time = torch.randint(0, 9, (batch, LENGTH)).cumsum(1)
    return x, mask, time


def test_the_future_and_padding_change_nothing(model):
    x, mask, time = events()
    before = model(x, mask, time=time)
    later, padded = x.clone(), x.clone()
    later[:, 4:] = torch.randn(3, 2, WIDTH)
    padded[1, :2] = 1e3
    torch.testing.assert_close(model(later, mask, time=time)[:, :4], before[:, :4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(padded, mask, time=time)[1, 2:], before[1, 2:], atol=1e-5, rtol=1e-5)
    assert model(x, torch.zeros_like(mask), time=time).isfinite().all()


def test_the_cache_alone_is_that_of_prefill_for_less(model):
    x, mask, time = events()
    kept, alone = model.prefill(x, mask, time=time)[1], model.cache(x, mask, time=time)
    for a, b in zip((*kept.keys, *kept.values), (*alone.keys, *alone.values), strict=True):
        assert torch.equal(a, b)
    assert flops_of(lambda: model.cache(x, mask, time=time)) < flops_of(lambda: model.prefill(x, mask, time=time))


def test_cached_tokens_equal_the_whole_sequence(model):
    x, mask, time = events()
    whole = model(x, mask, time=time)
    first, cache = model.prefill(x[:, :3], mask[:, :3], time=time[:, :3])
    middle, cache = model.extend(x[:, 3:5], cache, mask[:, 3:5], time=time[:, 3:5])
    last, cache = model.extend(x[:, 5:], cache, time=time[:, 5:])
    torch.testing.assert_close(torch.cat([first, middle, last], 1), whole, atol=1e-5, rtol=1e-5)
    assert cache.mask.shape == (3, LENGTH)
    assert cache.bytes() == 2 * 2 * 3 * LENGTH * WIDTH * 4


def test_a_candidate_is_the_last_token_of_its_request(model):
    """Each pair scored against the cache equals a sequence of the request's events followed by that candidate alone."""
    x, mask, time = events()
    request_of = torch.tensor([0, 0, 1, 2, 2, 2])
    candidate, when = torch.randn(6, WIDTH), time[request_of, -1] + 3
    _, cache = model.prefill(x, mask, time=time)
    found = model.candidates(candidate, cache, request_of, time=when)
    for p, r in enumerate(request_of.tolist()):
        sequence = torch.cat([x[r], candidate[p, None]])[None]
        seen = torch.cat([mask[r], mask.new_ones(1)])[None]
        alone = model(sequence, seen, time=torch.cat([time[r], when[p, None]])[None])[0, -1]
        torch.testing.assert_close(found[p], alone, atol=1e-5, rtol=1e-5)


def test_hidden_events_are_not_read(model):
    x, mask, time = events(1)
    request_of, candidate = torch.zeros(2, dtype=torch.int64), torch.randn(2, WIDTH)
    pair_mask = torch.ones(2, LENGTH, dtype=torch.bool)
    pair_mask[0, 4:] = False
    options = {"time": torch.tensor([60, 60]), "position": torch.tensor([4, 6])}
    _, cache = model.prefill(x, mask, time=time)
    found = model.candidates(candidate, cache, request_of, pair_mask=pair_mask, **options)
    _, short = model.prefill(x[:, :4], mask[:, :4], time=time[:, :4])
    options = {name: value[:1] for name, value in options.items()}
    expected = model.candidates(candidate[:1], short, request_of[:1], **options)
    torch.testing.assert_close(found[:1], expected, atol=1e-5, rtol=1e-5)


def test_events_of_one_second_do_not_see_each_other(model):
    x, mask, _ = events(1)
    time = torch.tensor([[0, 5, 5, 5, 9, 9]])
    visible = time.unsqueeze(1) < time.unsqueeze(2)
    before = model(x, mask, time=time, visible=visible)
    moved = x.clone()
    moved[:, 1] = torch.randn(1, WIDTH)
    after = model(moved, mask, time=time, visible=visible)
    torch.testing.assert_close(after[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert not torch.allclose(after[:, 4], before[:, 4])


@pytest.mark.parametrize("config", [{"norm": "rms", "ffn": "swiglu"}, {"norm": "layer", "ffn": "gelu"}])
def test_declared_flops_are_counted_flops(config):
    trunk = BiasedTransformer(BiasedConfig(width=WIDTH, heads=2, layers=2, hidden=16, bias="alibi", **config))
    x, mask, _ = events()
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no formula for the fused CPU kernel
        assert flops_of(lambda: trunk(x, mask)) == trunk.flops(3 * LENGTH, LENGTH)


def test_bad_choices_are_refused():
    with pytest.raises(ValueError, match="divisible"):
        BiasedConfig(width=10, heads=4)
    with pytest.raises(ValueError, match="norm"):
        BiasedConfig(norm="batch")
