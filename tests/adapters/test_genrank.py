"""Mechanism tests of card genrank, with the numbers of its specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch

from adapters.genrank.efficiency import KERNELS, efficiency_studies, longest_windows
from adapters.genrank.model import CHOICES, PREFIX, GenRank, GenRankConfig
from adapters.genrank.windows import EpochWindows, WindowTable, _windows
from auto_research.blocks.attention_bias import Alibi, RelativeBias
from auto_research.data.requests import RequestTable
from auto_research.evaluate.ctr import split_pairs
from auto_research.train.ctr import training_loss

SMALL = GenRankConfig(width=16, heads=4, layers=2, window=12, expansion=2, dropout=0.1)
VARIANTS = {
    "genrank": {},
    "interleaved_rab": {"organisation": "interleaved", "bias": "relative"},
    "interleaved_alibi": {"organisation": "interleaved"},
    "action_rab": {"bias": "relative"},
    "position": {"inputs": "position"},
    "id": {"items": "id"},
    "together": {"candidates": "together"},
}
ISOLATED = {name: switches for name, switches in VARIANTS.items() if name != "together"}
each_variant = pytest.mark.parametrize("switches", VARIANTS.values(), ids=VARIANTS)
each_isolated = pytest.mark.parametrize("switches", ISOLATED.values(), ids=ISOLATED)


@pytest.fixture(scope="module")
def table():
    return WindowTable.of(synthetic.request_table())


@pytest.fixture(scope="module")
def batch(table):
    return windows_of(table)


def windows_of(table, count=4, length=12):
    windows = table.train_windows(length).take(np.arange(count))
    return table.window_batch(windows, negatives=3, rng=np.random.default_rng(1))


def build(table, config=SMALL, seed=0, **switches) -> GenRank:
    torch.manual_seed(seed)
    model = GenRank(replace(config, **switches), table.vocab, torch.as_tensor(table.item_genres))
    with torch.no_grad():  # attention that tells its keys apart
        for block in model.transformer.blocks:
            block.qkv.weight *= 3
    return model


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


def row_of(table, event_time, event_item):
    data = table.interactions
    return int(np.flatnonzero((data.timestamp == event_time) & (data.item == event_item))[0])


# Windows


def test_windows_never_cut_a_second_and_score_every_train_request_once(table):
    windows = table.train_windows(12)
    scored = np.concatenate([table.scored(windows, w) for w in range(len(windows))])
    assert sorted(scored.tolist()) == table.requests("train").tolist()
    starts = set(table.index.start.tolist())
    assert set(windows.start.tolist()) <= starts
    assert set(windows.scored.tolist()) <= starts
    assert set((windows.stop - 1).tolist()) <= set((table.index.stop - 1).tolist())
    assert (windows.stop - windows.start).max() <= 12


def test_later_windows_begin_half_a_window_before_the_end_of_the_last_one():
    """200 events in seconds of one event each: [0, 96), then 48 new events each time."""
    assert _windows(np.arange(201), 96) == [(0, 96, 0), (48, 144, 96), (96, 192, 144), (144, 200, 192)]
    edges = np.arange(0, 201, 10)  # seconds of ten events
    found = _windows(edges, 96)
    assert found[:3] == [(0, 90, 0), (50, 140, 90), (100, 190, 140)]
    assert all(stop - start <= 96 for start, stop, _ in found)
    assert _windows(np.array([0, 3, 40, 41]), 8) == [(0, 3, 0), (0, 40, 3), (40, 41, 40)]  # a second of 37 events


def test_requests_of_later_windows_see_about_half_a_window(table):
    windows = table.train_windows(12)
    first = np.isin(windows.start, table.index.first)
    batch = table.window_batch(windows.take(np.flatnonzero(~first)), negatives=0, rng=None)
    largest = int((table.index.stop - table.index.start).max())
    assert batch.position.min() >= 6 - largest
    assert batch.position.max() < 12


def test_windows_of_the_real_table(movielens_100k):
    """Every train row once, 40 to 95 earlier events where a user has them. The specification lists 2,094 windows and 37
    events; windows of up to 96 events whose first one scores all of its requests are 1,643 (sum of ceil(N / 48) over the
    users, first windows of 48 events, would be 2,146)."""
    table = WindowTable.of(RequestTable.load(movielens_100k / "requests"))
    windows = table.train_windows(96)
    assert len(windows) == 1_643
    scored = [table.scored(windows, w) for w in range(len(windows))]
    requests = np.concatenate(scored)
    assert len(np.unique(requests)) == len(requests)
    assert (table.index.stop - table.index.start)[requests].sum() == table.rows("train") == 75_993
    seen = table.index.start[requests] - np.repeat(windows.start, [len(s) for s in scored])
    far = table.index.start[requests] - table.index.first[requests] >= 96
    assert (seen[far].min(), seen.max()) == (40, 95)


def test_a_window_holds_its_events_in_order_with_features_of_their_own_time(table, batch):
    data = table.interactions
    for w in range(len(batch.event_item)):
        mask = batch.event_mask[w]
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)  # right-padded
        start = row_of(table, int(batch.event_time[w, 0]), int(batch.event_item[w, 0]))
        rows = np.arange(start, start + int(mask.sum()))
        assert batch.event_item[w][mask].tolist() == data.item[rows].tolist()
        assert batch.event_rating[w][mask].tolist() == data.rating[rows].astype(int).tolist()
        np.testing.assert_array_equal(batch.event_popularity[w][mask].numpy(), table._row_popularity[rows])
        ordinal = np.unique(data.timestamp[rows], return_inverse=True)[1]
        assert batch.event_ordinal[w][mask].tolist() == ordinal.tolist()
        assert batch.event_position[w][mask].tolist() == list(range(len(rows)))


def test_request_places_continue_those_of_the_events(table, batch):
    for r in range(len(batch.time)):
        w = batch.window_of[r]
        earlier = batch.event_mask[w] & (batch.event_time[w] < batch.time[r])
        assert batch.position[r] == earlier.sum()
        own = batch.event_time[w] == batch.time[r]
        assert (batch.event_ordinal[w][own] == batch.ordinal[r]).all()
        assert (batch.event_gap[w][own] == batch.gap[r]).all()


def test_an_epoch_of_windows_is_a_function_of_seed_and_epoch(table):
    windows = table.train_windows(12)

    def epoch(seed, number):
        return EpochWindows(table, windows, batch=5, negatives=3, seed=seed, epoch=number, device="cpu")

    one, other = epoch(1, 0), epoch(1, 0)
    assert sum(len(one[i].event_item) for i in range(len(one))) == len(windows)
    rows = sum(int(one[i].rated.sum()) for i in range(len(one)))
    assert rows == table.rows("train")
    assert torch.equal(one[2].item, other[2].item)
    assert not torch.equal(one[0].time, epoch(1, 1)[0].time)
    assert not torch.equal(one[0].time, epoch(2, 0)[0].time)


# Tokens


def test_token_counts(table):
    request = int(table.requests("test")[0])
    batch = table.score_batch(request, np.arange(1, 41), history=96)
    events = int(batch.event_mask.sum())
    assert events == min(96, int(table.index.start[request] - table.index.first[request]))
    action, both = build(table), build(table, organisation="interleaved")
    assert action.tokens(batch) == 1 + events + 40
    assert both.tokens(batch) == 1 + 2 * events + 40
    with torch.no_grad():
        assert action.event_tokens(batch).shape[1] == 1 + 96
        assert both.event_tokens(batch).shape[1] == 1 + 2 * 96


def test_a_token_is_the_sum_of_its_parts(table, batch):
    model = build(table)
    with torch.no_grad():
        tokens, candidates = model.event_tokens(batch), model.candidate_tokens(batch)
        both = build(table, organisation="interleaved")
        both.load_state_dict(model.state_dict(), strict=False)
        pairs = both.event_tokens(batch)
        item = model.item(batch.event_item, batch.event_decade, batch.event_popularity)
        place = model.place(batch.event_position, batch.event_ordinal, batch.event_gap)
        action = model.action(batch.event_rating)
        torch.testing.assert_close(tokens[:, 1:], item + action + place)
        torch.testing.assert_close(pairs[:, 1::2], item + place)
        torch.testing.assert_close(pairs[:, 2::2], action + place)
        torch.testing.assert_close(candidates - both.candidate_tokens(batch), model.mask.expand_as(candidates))
    four = model.action(torch.tensor([4]))
    torch.testing.assert_close(
        four, model.action.rating.weight[4:5] + model.action.like.weight[1] + model.action.love.weight[0]
    )


# Who reads whom


@each_isolated
def test_a_candidate_scores_the_same_alone_with_others_and_permuted(table, switches):
    model, request = build(table, **switches), int(table.requests("test")[4])
    items = np.arange(1, 41)
    together = logits(model, table.score_batch(request, items, history=11))
    alone = torch.cat([logits(model, table.score_batch(request, [item], history=11)) for item in items[:5]])
    torch.testing.assert_close(alone, together[:5], atol=1e-6, rtol=0)
    order = np.random.default_rng(0).permutation(40)
    permuted = logits(model, table.score_batch(request, items[order], history=11))
    torch.testing.assert_close(permuted, together[order], atol=1e-6, rtol=0)
    assert not torch.allclose(together[0], together[1], atol=1e-4)


def test_without_the_mask_a_candidate_depends_on_the_others(table):
    model, request = build(table, candidates="together"), int(table.requests("test")[4])
    together = logits(model, table.score_batch(request, np.arange(1, 41), history=11))
    alone = logits(model, table.score_batch(request, [1], history=11))
    assert not torch.allclose(alone[0], together[0], atol=1e-4)


@each_variant
def test_no_action_leaks_into_its_own_request(table, switches):
    windows = table.train_windows(12).take(np.arange(1, 2))
    model = build(table, **switches)

    def scored(source):
        return logits(model, source.window_batch(windows, negatives=3, rng=np.random.default_rng(1)))

    batch = table.window_batch(windows, negatives=3, rng=np.random.default_rng(1))
    before, data = scored(table), table.interactions
    middle = len(batch.time) // 2
    own = data.user == data.user[windows.start[0]]

    def flipped(rows):  # the rating alone, not the popularity that other users read
        edited = WindowTable.of(table)
        edited._rating = np.where(rows, 6 - data.rating, data.rating).astype(np.float32)
        return edited

    after = scored(flipped(own & (data.timestamp >= int(batch.time[middle]))))
    upto = batch.request_of <= middle
    assert torch.equal(after[upto], before[upto])
    changed = own & (data.timestamp < int(batch.time[middle])) & (data.rating != 3)
    assert changed.any()
    after = scored(flipped(changed))
    assert not torch.allclose(after[batch.request_of == middle], before[batch.request_of == middle], atol=1e-5)


@pytest.mark.parametrize("organisation", ["action", "interleaved"])
def test_events_of_one_second_do_not_read_each_other(table, batch, organisation):
    model = build(table, organisation=organisation)
    visible, (mask, _, time) = model.event_visible(batch), model.keys(batch)
    tied = (time.unsqueeze(1) == time.unsqueeze(2)) & mask.unsqueeze(1) & mask.unsqueeze(2)
    tied &= ~torch.eye(tied.shape[1], dtype=torch.bool)
    assert tied[:, 1:, 1:].any()
    if organisation == "action":
        assert not (visible & tied).any()
        assert torch.equal(visible[:, 1:, 0], mask[:, 1:])  # every event reads U
        assert not visible[:, 0].any()  # U reads itself, which the Transformer adds
    else:
        _, q, k = (visible & tied).nonzero().T
        assert (q == k + 1).all()  # an action token its own item token, and nothing else of its second
        assert (q % 2 == 0).all()
        assert len(q) == int(batch.event_item.numel() - (~batch.event_mask).sum())
    seen = model.candidate_visible(batch)
    assert (
        time[batch.window_of[batch.request_of]][seen] < batch.time[batch.request_of].repeat_interleave(seen.sum(1))
    ).all()


def test_attention_weight_between_tied_events_is_exactly_zero(table, batch):
    """The value of one of two tied events is changed: the other's key and value in the next layer stay bitwise equal."""
    model = build(table).eval()
    w, j = next(
        (w, j)
        for w in range(4)
        for j in range(1, 12)
        if batch.event_mask[w, j] and batch.event_time[w, j] == batch.event_time[w, j - 1]
    )
    rating = batch.event_rating.clone()
    rating[w, j] = 6 - rating[w, j] if rating[w, j] != 3 else 5
    with torch.no_grad():
        before, after = model.prepare(batch), model.prepare(replace(batch, event_rating=rating))
    assert torch.equal(before.keys[1][w, :, j], after.keys[1][w, :, j])  # token j sits behind U: event j - 1
    assert not torch.equal(before.keys[1][w, :, j + 1], after.keys[1][w, :, j + 1])


# Bias


def test_slopes_and_weights_by_hand():
    bias = Alibi(4)
    assert bias.slopes.tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    scores = bias(torch.tensor([3]), torch.tensor([2, 1, 0]))[0, 0]
    assert torch.softmax(scores, 0).tolist() == pytest.approx([0.4192, 0.3265, 0.2543], abs=1e-4)
    scores = bias(torch.tensor([3]), torch.tensor([3, 2, 1, 0]))[0, 0]
    assert torch.softmax(scores, 0).tolist() == pytest.approx([0.3499, 0.2725, 0.2122, 0.1653], abs=1e-4)


def test_the_profile_token_is_at_distance_zero():
    position = torch.tensor([PREFIX, 0, 1, 9])
    assert Alibi(4)(position, position)[0, 3].tolist() == [0, -9 / 4, -2, 0]
    assert Alibi(4)(position, position)[0, 0].tolist() == [0, 0, 0, 0]
    table = RelativeBias(4)
    time = torch.tensor([0, 800_000_000, 800_000_100, 800_000_900])
    found = table(position, position, time, time)
    torch.testing.assert_close(found[:, 3, 0], table.position[0] + table.time[0])
    torch.testing.assert_close(found[:, 3, 1], table.position[9] + table.time[int(math.log2(901))])


def test_both_tokens_of_an_event_carry_its_position(table, batch):
    _, position, _ = build(table, organisation="interleaved").keys(batch)
    assert position[0].tolist() == [PREFIX, *(p for p in range(12) for _ in range(2))]


def test_only_the_relative_arm_has_bias_parameters(table):
    def names(**switches):
        return [
            n
            for n in build(table, **switches).state_dict()
            if "bias.position" in n or "bias.time" in n or "slopes" in n
        ]

    assert names() == []
    assert len(names(bias="relative")) == 2 * SMALL.layers
    tables = build(table, bias="relative").transformer.blocks[0].bias
    assert (tables.position.shape, tables.time.shape) == ((128, 4), (32, 4))


# Samples, cache, loss


@each_variant
def test_a_window_equals_one_sample_per_request(table, batch, switches):
    model = build(table, **switches)
    singles = batch.single_requests()
    assert len(singles.event_item) == len(batch.time) > 4
    torch.testing.assert_close(logits(model, batch), logits(model, singles), atol=1e-5, rtol=0)


@each_variant
def test_cached_scores_equal_the_full_forward(table, batch, switches):
    model = build(table, **switches).eval()
    with torch.no_grad():
        full, _ = model.full(batch)
    torch.testing.assert_close(logits(model, batch), full, atol=1e-5, rtol=0)


def test_event_states_do_not_depend_on_candidates(table, batch):
    model = build(table).eval()
    other = replace(batch, item=batch.item.flip(0), popularity=batch.popularity + 1)
    with torch.no_grad():
        (a, before), (b, after) = model.full(batch), model.full(other)
    torch.testing.assert_close(before, after, atol=1e-6, rtol=0)
    assert not torch.allclose(a, b, atol=1e-4)


@each_isolated
def test_chunked_serving_equals_one_batch(table, switches):
    model = build(table, **switches).eval()
    batch = table.score_batch(int(table.requests("test")[3]), np.arange(1, 31), history=11)
    with torch.no_grad():
        cache = model.prepare(batch)
        parts = torch.cat([model.score(cache, part) for part in split_pairs(batch, 7)])
    torch.testing.assert_close(parts, logits(model, batch), atol=1e-6, rtol=0)


@each_variant
def test_history_has_no_loss_of_its_own(table, batch, switches):
    model = build(table, **switches).eval()
    rows = []
    model.head.register_forward_hook(lambda layer, given, out: rows.append(len(given[0])))
    training_loss(model, batch).backward()
    assert rows == [batch.pairs()]
    assert model.action.rating.weight.grad.any()  # through attention
    model.zero_grad()
    with torch.no_grad():
        for block in model.transformer.blocks:
            block.out.weight.zero_()
    training_loss(model, batch).backward()
    assert not model.action.rating.weight.grad.any()  # and in no other way
    assert model.item.item.weight.grad.any()


def test_an_empty_history_is_finite(table):
    batch = table.score_batch(int(table.requests("train")[0]), [1, 2], history=11)
    batch.event_mask[:] = False
    for switches in VARIANTS.values():
        model = build(table, **switches)
        out = model(batch)
        assert out.isfinite().all()
        out.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@each_variant
def test_every_parameter_learns(table, batch, switches):
    model = build(table, **switches).train()
    training_loss(model, batch).backward()
    still = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert not still


def test_nothing_at_or_after_the_request_is_read(table):
    data, request = table.interactions, int(table.requests("valid")[5])
    later = data.timestamp >= table.request_time[request]
    item = data.item.copy()
    item[later] = item[later][::-1]
    edited = table.edited(rating=np.where(later, 6 - data.rating, data.rating).astype(np.float32), item=item)
    model, items = build(table), np.arange(1, synthetic.ITEMS + 1)
    before, after = (t.score_batch(request, items, history=11) for t in (table, edited))
    assert torch.equal(logits(model, before), logits(model, after))


def test_unknown_choices_are_refused():
    for name in CHOICES:
        with pytest.raises(ValueError, match=name):
            replace(SMALL, **{name: "other"})


# Cost


def test_interleaving_nearly_doubles_the_cost_and_the_bias_kind_costs_no_products(table):
    def studied(**switches):
        device = torch.device("cpu")
        return efficiency_studies(build(table, **switches), table, device=device, histories=(16, 28), timed=1)

    action, both, relative = studied(), studied(organisation="interleaved"), studied(bias="relative")
    windows = longest_windows(table, 28, 8)
    batch = table.window_batch(windows, negatives=3, rng=np.random.default_rng(0))
    events, candidates = float((windows.stop - windows.start).mean()), batch.pairs() / len(windows)
    last = [found["tokens_per_window"]["lines"][""][-1][1] for found in (action, both)]
    assert last == pytest.approx([1 + events + candidates, 1 + 2 * events + candidates])
    flops = [found["window_flops"]["lines"][""][-1][1] for found in (action, both, relative)]
    assert flops[1] > 1.1 * flops[0]
    assert flops[2] == flops[0]
    for name in ("train_step_ms", "request_ms"):
        lines = action[name]["lines"]
        assert list(lines) == list(KERNELS)
        assert [[x for x, _ in points] for points in lines.values()] == [[16, 28]] * 2


def test_eager_timings_use_the_plain_products(table):
    model = build(table).eval()
    batch = table.window_batch(longest_windows(table, 16, 2), negatives=1, rng=np.random.default_rng(0))

    def kernels(name: str) -> set[str]:
        with KERNELS[name](), torch.no_grad(), torch.profiler.profile() as seen:
            model(batch)
        return {event.key for event in seen.key_averages() if "scaled_dot_product" in event.key}

    plain = "aten::_scaled_dot_product_attention_math"
    assert plain in kernels("eager")
    assert plain not in kernels("kernel chosen by the library")
