"""Mechanism tests of card genrank, with the numbers of its specification."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import synthetic
import torch

from adapters.genrank import experiment
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


def test_a_train_request_alone_sees_what_its_window_shows_it(table):
    windows = table.train_windows(12)
    shown = table.window_batch(windows, negatives=0, rng=None).single_requests()
    requests = np.concatenate([table.scored(windows, w) for w in range(len(windows))])
    alone = table.batch(requests, history=11)
    assert 0 < alone.event_mask.sum() == shown.event_mask.sum()
    for name in ("time", "position", "ordinal", "gap"):
        assert torch.equal(getattr(alone, name), getattr(shown, name)), name
    for name in (f.name for f in fields(alone) if f.name.startswith("event_")):
        one, other = getattr(alone, name), getattr(shown, name)[:, :11]
        assert torch.equal(one[alone.event_mask], other[alone.event_mask]), name
    assert torch.equal(alone.event_mask, shown.event_mask[:, :11])


@pytest.mark.parametrize("split", ["valid", "test"])
def test_requests_outside_training_see_the_same_range_of_events(table, split):
    requests = table.requests(split)
    batch = table.batch(requests, history=11)
    largest = int((table.index.stop - table.index.start).max())
    assert batch.position.min() >= 6 - largest
    assert batch.position.max() <= 11
    assert len(batch.position.unique()) > 3  # not always the last 11
    for r, request in enumerate(requests):
        rows = np.arange(table.index.start[request] - int(batch.position[r]), table.index.start[request])
        assert rows.size == 0 or rows[0] >= table.index.first[request]
        assert batch.event_item[r][batch.event_mask[r]].tolist() == table.interactions.item[rows].tolist()


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
    alone = table.index.start[requests] - table._starts(95)[requests]
    np.testing.assert_array_equal(alone, seen)


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


def test_token_counts():
    """n = 96 events and m = 40 candidates: 1 + n + m and 1 + 2 n + m tokens."""
    table = WindowTable.of(synthetic.request_table(users=2, items=150, ratings=140))
    batch = table.longest_request(np.arange(1, 41), 96)
    for organisation, tokens in (("action", 137), ("interleaved", 233)):
        model = build(table, window=96, organisation=organisation)
        assert model.tokens(batch) == tokens
        with torch.no_grad():
            assert model.event_tokens(batch).shape[1] + len(model.candidate_tokens(batch)) == tokens


def test_padding_is_no_token(table):
    batch = table.batch(table.requests("test"), history=11)
    events = int(batch.position.sum())
    assert events < batch.event_item.numel()
    assert build(table).tokens(batch) == len(batch.time) + events + batch.pairs()


def test_the_longest_request_has_no_padding(table):
    items, data = np.arange(1, 8), table.interactions
    batch = table.longest_request(items, 9)
    stop = row_of(table, int(batch.event_time[0, -1]), int(batch.event_item[0, -1])) + 1
    assert batch.event_mask.shape == (1, 9)
    assert batch.event_mask.all()
    assert (batch.position.tolist(), batch.item.tolist()) == ([9], items.tolist())
    assert batch.event_item[0].tolist() == data.item[stop - 9 : stop].tolist()
    assert data.timestamp[stop] == batch.time[0]
    tests = table.requests("test")
    most = int((table.index.start[tests] - table.index.first[tests]).max())
    assert table.longest_request(items, 1_000).event_mask.shape == (1, most)


def test_without_ordinal_and_gap_a_token_knows_its_position_alone(table, batch):
    def moved(inputs, **columns):
        model = build(table, inputs=inputs)
        return not torch.equal(logits(model, batch), logits(model, replace(batch, **columns)))

    changes = {name: (getattr(batch, name) + 1) % 30 for name in ("ordinal", "gap", "event_ordinal", "event_gap")}
    for name, column in changes.items():
        assert moved("all", **{name: column})
        assert not moved("position", **{name: column})
    assert moved("position", position=batch.position + 1)


def test_items_by_id_read_nothing_else(table, batch):
    def moved(items, **columns):
        model = build(table, items=items)
        return not torch.equal(logits(model, batch), logits(model, replace(batch, **columns)))

    changes = {name: (getattr(batch, name) + 1) % 10 for name in ("decade", "event_decade")}
    changes |= {name: getattr(batch, name) + 1 for name in ("popularity", "event_popularity")}
    for name, column in changes.items():
        assert moved("full", **{name: column})
        assert not moved("id", **{name: column})
    assert moved("id", item=batch.item % synthetic.ITEMS + 1)
    model = build(table)
    before = logits(model, batch)
    model.item.item_genres = 1 - model.item.item_genres
    assert not torch.equal(logits(model, batch), before)
    assert not hasattr(build(table, items="id").item, "genres")


@pytest.mark.parametrize("items", ["full", "id"])
def test_dropout_is_on_the_input_vectors_and_ffns_and_not_after_attention(table, batch, items):
    model = build(table, items=items, dropout=0.5)
    zeros = {}
    for name, layer in (("user", model.user), ("item", model.item.out)):
        layer.register_forward_pre_hook(
            lambda _, given, name=name: zeros.update({name: (given[0] == 0).float().mean()})
        )
    model.eval().event_tokens(batch), model.candidate_tokens(batch)
    assert max(zeros.values()) == 0
    model.train().event_tokens(batch), model.candidate_tokens(batch)
    assert all(0.3 < share < 0.7 for share in zeros.values())
    for block in model.transformer.blocks:
        assert (block.dropout.rate, block.attention_dropout.rate) == (0.5, 0.0)


def test_a_token_is_the_sum_of_its_parts(table, batch):
    model = build(table).eval()
    with torch.no_grad():
        tokens, candidates = model.event_tokens(batch), model.candidate_tokens(batch)
        both = build(table, organisation="interleaved").eval()
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
    """In every window the ratings from its middle request on are flipped, then those before it."""
    every, data, model = table.train_windows(12), table.interactions, build(table, **switches)
    owner = data.user[every.start]
    nth = np.arange(len(every)) - np.searchsorted(owner, owner)  # windows of a user overlap: one of each at a time
    for windows in (every.take(np.flatnonzero(nth == n)) for n in range(nth.max() + 1)):

        def made(source, windows=windows):
            return source.window_batch(windows, negatives=3, rng=np.random.default_rng(1))

        def flipped(rows):  # the rating alone, not the popularity that other users read
            edited = WindowTable.of(table)
            edited._rating = np.where(rows, data.rating % 5 + 1, data.rating).astype(np.float32)
            return edited

        batch = made(table)
        count = torch.bincount(batch.window_of)
        middle = count.cumsum(0) - count + count // 2
        since = np.full(data.n_users + 1, np.iinfo(np.int64).max)
        since[data.user[windows.start]] = batch.time[middle]
        later, known = data.timestamp >= since[data.user], np.isin(data.user, data.user[windows.start])
        edited = made(flipped(later))
        own = batch.event_mask & (batch.event_time == batch.time[middle].unsqueeze(1))
        assert own.any(1).all()
        assert (edited.event_rating != batch.event_rating)[own].all()
        before, after = logits(model, batch), logits(model, edited)
        upto = (batch.request_of <= middle[batch.window_of[batch.request_of]]).numpy()
        assert torch.equal(after[upto], before[upto])
        after = logits(model, made(flipped(~later & known)))
        for request in middle[batch.position[middle] > 0].tolist():
            rows = batch.request_of == request
            assert not torch.allclose(after[rows], before[rows], atol=1e-5)


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


@pytest.mark.parametrize("organisation", ["action", "interleaved"])
@pytest.mark.parametrize("flipped", [0, 1])
def test_attention_weight_between_tied_events_is_exactly_zero(table, batch, organisation, flipped):
    """The rating of one of two tied events is changed: the other's keys in the next layer stay bitwise equal."""
    model = build(table, organisation=organisation).eval()
    w, j = next(
        (w, j)
        for w in range(4)
        for j in range(1, 12)
        if batch.event_mask[w, j] and batch.event_time[w, j] == batch.event_time[w, j - 1]
    )
    edited, other = (j, j - 1) if flipped else (j - 1, j)
    rating = batch.event_rating.clone()
    rating[w, edited] = rating[w, edited] % 5 + 1
    with torch.no_grad():
        before, after = model.prepare(batch), model.prepare(replace(batch, event_rating=rating))
    same = (before.keys[1][w] == after.keys[1][w]).all(2).all(0)[1:].reshape(12, -1)  # (event, its tokens), behind U
    assert same[other].all()
    assert not same[edited, -1]
    if organisation == "interleaved":
        assert same[edited, 0]  # an item token does not read its own action


# Bias


def test_slopes_and_weights_by_hand():
    bias = Alibi(4)
    assert bias.slopes.tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    scores = bias(torch.tensor([3]), torch.tensor([2, 1, 0]))[0, 0]
    assert torch.softmax(scores, 0).tolist() == pytest.approx([0.4192, 0.3265, 0.2543], abs=1e-4)
    scores = bias(torch.tensor([3]), torch.tensor([3, 2, 1, 0]))[0, 0]
    assert torch.softmax(scores, 0).tolist() == pytest.approx([0.3499, 0.2725, 0.2122, 0.1653], abs=1e-4)


def test_attention_weights_are_those_of_the_slopes(table):
    """Zero queries and keys, one-hot values: what attention returns are its weights over distances 3, 2, 1, 0."""
    transformer = build(table, layers=1).eval().transformer
    block, found = transformer.blocks[0], []
    with torch.no_grad():
        block.qkv.weight[:32], block.qkv.bias[:32] = 0, 0
    project = block.project

    def one_hot(x, position):
        q, k, v = project(x, position)
        return q, k, torch.eye(4)[position].unsqueeze(1).expand_as(v)

    def finish(x, read):
        found.append(read[0, :, -1])
        return x

    block.project, block.finish = one_hot, finish
    x, mask = torch.randn(1, 4, 16), torch.ones(1, 4, dtype=torch.bool)
    with torch.no_grad():
        transformer(x, mask)
        cache = transformer.cache(x[:, :3], mask[:, :3])
        transformer.candidates(x[:, 3], cache, torch.tensor([0]), position=torch.tensor([3]))
    for weights in found:  # (H, 4)
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]).unsqueeze(1)
        torch.testing.assert_close(weights, torch.softmax(-slopes * torch.tensor([3, 2, 1, 0]), dim=1))
        assert weights[0].flip(0).tolist() == pytest.approx([0.3499, 0.2725, 0.2122, 0.1653], abs=1e-4)
    assert len(found) == 2


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


def test_the_learning_rate_warms_up_linearly():
    factor = experiment.warm_up(100)
    assert [factor(step, 1_000) for step in (0, 49, 99, 999)] == [0.01, 0.5, 1.0, 1.0]


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
