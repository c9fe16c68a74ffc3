"""Mechanism tests of card rocs, with the numbers of its specification."""

from dataclasses import fields, replace

import numpy as np
import pytest
import synthetic
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.rocs.dense import DenseROCS
from adapters.rocs.layers import MaskedLayer, ROCSConfig
from adapters.rocs.model import REQUEST_SLOTS, ROCS, RequestInputs
from adapters.rocs.towers import LateROCS, TwoTower
from auto_research.blocks.biased_transformer import BiasedBlock
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.two_sided import bcast_linear, block_mask
from auto_research.data.requests import RequestBatch
from auto_research.evaluate.ctr import split_pairs
from auto_research.metrics.cost import flops_of, saved_bytes

SMALL = ROCSConfig(width=8, layers=3, fm_hidden=12, head_hidden=10, heads=2, history=9, field=4, dropout=0.0)
COUNTS = (1, 3, 17)
KINDS = (ROCS, DenseROCS, LateROCS, TwoTower)


@pytest.fixture(scope="module")
def table():
    return synthetic.request_table()


def build(table, kind=ROCS, seed=0, config=SMALL, **switches):
    torch.manual_seed(seed)
    return kind(replace(config, **switches), table.vocab, table.item_genres).eval()


def joined(batches: list[RequestBatch]) -> RequestBatch:
    """Several requests in one batch."""
    values = {f.name: torch.cat([getattr(b, f.name) for b in batches]) for f in fields(RequestBatch)}
    values["request_of"] = torch.arange(len(batches)).repeat_interleave(torch.tensor([b.pairs() for b in batches]))
    return RequestBatch(**values)


def ragged(table, counts=COUNTS, history=SMALL.history) -> RequestBatch:
    """Requests of different users with `counts` candidates."""
    requests = table.requests("test")[:: max(1, len(table.requests("test")) // len(counts))]
    rng = np.random.default_rng(3)
    return joined(
        [
            table.score_batch(int(request), rng.choice(synthetic.ITEMS, count, replace=False) + 1, history=history)
            for request, count in zip(requests, counts, strict=False)
        ]
    )


def blocks(model: ROCS, dense: DenseROCS):
    """(parameter of ROCS, parameter of the dense reference, its part [rows, columns]) for every weight behind the slots."""
    every = slice(None)
    for ours, theirs in zip(model.layers, dense.layers, strict=True):
        for name, p in ours.events.named_parameters():
            yield p, theirs.events.get_parameter(name), every
        for masked, full in ((ours.queries, theirs.queries.weight), (ours.linear, theirs.linear.weight)):
            (n_r, m_r), m_c = masked.rr.shape, masked.cc.shape[1]
            yield masked.rr, full, (slice(n_r), slice(m_r))
            yield masked.cr, full, (slice(n_r, None), slice(m_r))
            yield masked.cc, full, (slice(n_r, None), slice(m_r, m_r + m_c))
        hidden, fm_r = model.config.fm_hidden, ours.request_dots.outputs
        yield ours.request_hidden.weight, theirs.hidden.weight, (slice(hidden), slice(fm_r))
        yield ours.request_hidden.bias, theirs.hidden.bias, slice(hidden)
        yield ours.pair_hidden.bias, theirs.hidden.bias, slice(hidden, None)
        yield ours.pair_hidden.request, theirs.hidden.weight, (slice(hidden, None), slice(fm_r))
        yield ours.pair_hidden.pair, theirs.hidden.weight, (slice(hidden, None), slice(fm_r, None))
        for name in ("request_out", "pair_out", "request_norm", "pair_norm"):
            for end in ("weight", "bias"):
                yield getattr(ours, name).get_parameter(end), getattr(theirs, name).get_parameter(end), every
    width = len(model.head.first.request)
    yield model.head.first.request, dense.first.weight, (every, slice(width))
    yield model.head.first.pair, dense.first.weight, (every, slice(width, None))
    yield model.head.first.bias, dense.first.bias, every
    for end in ("weight", "bias"):
        yield model.head.out.get_parameter(end), dense.out.get_parameter(end), every


def transposed(ours: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return ours if ours.shape == part.shape else ours.t()


def reference_of(model: ROCS, table) -> DenseROCS:
    """Dense weights times the 0/1 mask: the layers of full_broadcast holding ROCS' weights and zeros elsewhere."""
    dense = build(table, DenseROCS, config=model.config)
    dense.input.load_state_dict(model.input.state_dict())
    with torch.no_grad():
        for name, p in dense.named_parameters():
            if not name.startswith("input."):
                p.zero_()
        for ours, theirs, where in blocks(model, dense):
            theirs[where] = transposed(ours, theirs[where])
    return dense


# Equivalence with the reference that broadcasts its inputs


def in_double(batch: RequestBatch) -> RequestBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(RequestBatch)}
    return RequestBatch(**{name: x.double() if x.is_floating_point() else x for name, x in values.items()})


def test_decomposed_forward_equals_the_dense_masked_reference(table, monkeypatch):
    model, batch = build(table), ragged(table)
    dense = reference_of(model, table)
    torch.testing.assert_close(model(batch), dense.broadcast(batch), atol=1e-5, rtol=0)
    assert batch.pairs() == sum(COUNTS)
    model, dense, batch = model.double(), dense.double(), in_double(batch)
    monkeypatch.setattr(torch, "float32", torch.float64)  # attention computes in float32 whatever its inputs are
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    ours, theirs = model(batch), dense.broadcast(batch)
    torch.manual_seed(1)
    direction = torch.randn_like(ours)
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    compared = [(a.grad, transposed_back(a.grad, b.grad[where])) for a, b, where in blocks(model, dense)]
    compared += [
        (p.grad, dense.input.get_parameter(name).grad)
        for name, p in model.input.named_parameters()
        if not name.endswith("key_constant")
    ]
    assert ours.dtype == torch.float64
    assert all(a.abs().max() > 0 for a, _ in compared)
    for a, b in compared:
        assert (a - b).abs().max() <= 1e-9 * a.abs().max()


def transposed_back(ours: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return part if ours.shape == part.shape else part.t()


def test_every_weight_behind_the_slots_is_in_the_reference(table):
    model = build(table)
    covered = {id(p) for p, *_ in blocks(model, build(table, DenseROCS))}
    behind = {name for name, p in model.named_parameters() if not name.startswith("input.") and id(p) not in covered}
    assert not behind


def test_masked_weights_are_dense_weights_times_the_mask(table):
    layer: MaskedLayer = build(table).layers[1]
    for masked in (layer.queries, layer.linear):
        (n_r, m_r), (n_c, m_c) = masked.rr.shape, masked.cc.shape
        mask = block_mask((m_r, n_r), (m_c, n_c))
        assert torch.equal(masked.dense() != 0, mask.bool())


@pytest.mark.parametrize("switches", [{}, {"attention": "mean"}, {"request_head": False}], ids=str)
def test_broadcast_execution_gives_the_same_logits(table, switches):
    model, batch = build(table, **switches), ragged(table)
    torch.testing.assert_close(model(batch), model.broadcast(batch), atol=1e-5, rtol=0)


def test_sharing_the_sequence_changes_nothing_without_the_mask(table):
    model, batch = build(table, DenseROCS), ragged(table)
    torch.testing.assert_close(model(batch), model.broadcast(batch), atol=1e-5, rtol=0)


def test_one_candidate_per_request_costs_the_same_either_way(table):
    model, batch = build(table), ragged(table, (1, 1, 1))
    torch.testing.assert_close(model(batch), model.broadcast(batch), atol=1e-6, rtol=0)
    with torch.no_grad():
        assert flops_of(lambda: model(batch)) == flops_of(lambda: model.broadcast(batch))


# Mask


def request_gradients(dense: DenseROCS, batch: RequestBatch) -> list[torch.Tensor]:
    """d(random projection of X_r^n) / d(candidate input) after every layer."""
    torch.manual_seed(2)
    state, x_c = dense.prepare(batch), dense.input.pairs(batch).detach().requires_grad_()
    outputs = []
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in dense.layers]
    dense.rank(state, x_c, batch.request_of)
    for hook in hooks:
        hook.remove()
    slots = 2 * dense.config.request_outputs
    return [
        torch.autograd.grad((x[:, :slots] * torch.randn_like(x[:, :slots])).sum(), x_c, retain_graph=True)[0]
        for x in outputs
    ]


def test_request_slots_never_read_candidates_and_do_without_the_mask(table):
    batch = ragged(table)
    for gradient in request_gradients(reference_of(build(table), table), batch):
        assert gradient.abs().max() == 0
    for gradient in request_gradients(build(table, DenseROCS), batch):
        assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("kind", [ROCS, LateROCS])
def test_nothing_prepared_for_a_request_changes_with_its_candidates(table, kind):
    model, batch = build(table, kind), ragged(table)
    other = replace(
        batch,
        item=batch.item.flip(0),
        decade=batch.decade.flip(0),
        popularity=batch.popularity + 1,
        cross=batch.cross + 1,
    )
    one, two = model.prepare(batch), model.prepare(other)
    assert not torch.equal(batch.item, other.item)
    assert torch.equal(one.head, two.head)
    for a, b in zip(one.layers, two.layers, strict=True):
        parts = zip((*a[:4], *a.keys), (*b[:4], *b.keys), strict=True)
        assert all(torch.equal(x, y) for x, y in parts)


def test_request_slots_of_every_layer_are_those_of_the_masked_reference(table):
    model, batch = build(table), ragged(table)
    dense, outputs = reference_of(model, table), []
    for layer in dense.layers:
        layer.register_forward_hook(lambda _, __, out: outputs.append(out))
    dense(batch)
    states, slots = model.prepare(batch).layers, 2 * SMALL.request_outputs
    for x, state in zip(outputs[:-1], states[1:], strict=True):
        torch.testing.assert_close(x[:, :slots], state.slots[batch.request_of][:, :slots], atol=1e-5, rtol=0)


def test_candidate_slots_read_the_request_at_every_layer(table):
    model, batch = build(table), ragged(table)
    inputs = RequestInputs(*(x.detach() for x in model.input.request(batch)))
    inputs = inputs._replace(slots=inputs.slots.requires_grad_(), events=inputs.events.requires_grad_())
    state, x = model.request_path(inputs), model.input.pairs(batch)
    torch.manual_seed(4)
    for layer, of_request in zip(model.layers, state.layers, strict=True):
        x = layer.pairs(of_request, x.detach(), batch.request_of)
        gradients = torch.autograd.grad(
            (x * torch.randn_like(x)).sum(), (inputs.slots, inputs.events), retain_graph=True
        )
        assert all(gradient.abs().max() > 1e-4 for gradient in gradients)


# Isolation


@pytest.mark.parametrize("kind", KINDS)
def test_a_candidate_does_not_depend_on_the_others(table, kind):
    model = build(table, kind, seed=5)
    request, items = int(table.requests("test")[0]), np.array([7, 3, 11, 20, 2])
    with torch.no_grad():
        together = model(table.score_batch(request, items, history=9))
        order = np.array([4, 2, 0])
        torch.testing.assert_close(model(table.score_batch(request, items[order], history=9)), together[order])
        torch.testing.assert_close(model(table.score_batch(request, items[:1], history=9)), together[:1])
    assert (together[0] - together[1]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_a_batch_do_not_affect_each_other(table, kind):
    model, requests = build(table, kind), table.requests("valid")[:24]
    with torch.no_grad():
        alone = torch.cat([model(table.batch([r], history=9)) for r in requests])
        torch.testing.assert_close(model(table.batch(requests, history=9)), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_serving_in_chunks_equals_the_training_path(table, kind):
    model = build(table, kind)
    batch = table.score_batch(int(table.requests("test")[1]), np.arange(1, 41), history=9)
    with torch.no_grad():
        state = model.prepare(batch)
        served = torch.cat([model.score(state, part) for part in split_pairs(batch, 7)])
        torch.testing.assert_close(served, model(batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_history_is_readable(table, kind):
    batch = synthetic.training_batch(table)
    batch.hist_mask[:] = False
    model = build(table, kind)
    logits = model.train()(batch)
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    other = replace(batch, hist_item=batch.hist_item * 0 + 3, hist_rating=batch.hist_rating * 0 + 2)
    assert torch.equal(model.eval()(batch), model(other))


# Decomposition by hand


def test_bcast_linear_by_hand():
    x_r, x_c = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    out = bcast_linear(x_r, x_c, torch.tensor([0, 0]), torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0]]))
    assert out.flatten().tolist() == [9, 11]


class Shapes(TorchDispatchMode):
    """Shapes of every tensor that an operation returns; views count as well."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.seen.add(tuple(value.shape))
        return out


def test_no_request_content_is_copied_per_candidate(table):
    counts = (1, 3, 17, 2)
    config = replace(SMALL, layers=2, history=12, request_outputs=10)  # every size below is told apart by its number
    model, batch = build(table, config=config), ragged(table, counts, history=12)
    pairs, requests, widest = batch.pairs(), len(counts), max(counts)
    request_slots = {9, 11, 20, 22}  # of both layers, before and after deep cross attention
    content = request_slots | {n * config.width for n in request_slots} | {config.history + 1}

    def copies(seen: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
        leads = [s[1:] for s in seen if s[:1] in ((pairs,), (requests * widest,))]
        leads += [s[2:] for s in seen if s[:2] == (requests, widest)]
        return [rest for rest in leads if content & set(rest)]

    assert pairs == 23
    inputs, x_c = model.input.request(batch), model.input.pairs(batch)
    with torch.no_grad(), Shapes() as decomposed:
        model.pair_path(model.request_path(inputs), x_c, batch.request_of)
    assert not copies(decomposed.seen)
    with torch.no_grad(), Shapes() as broadcast:
        inputs = inputs.copied(batch.request_of)
        model.pair_path(model.request_path(inputs), x_c, torch.arange(pairs))
    assert copies(broadcast.seen)


def test_request_modules_run_at_request_rows(table):
    model, batch = build(table), ragged(table)
    rows = []
    for layer in model.layers:
        for part in (layer.request_hidden, layer.request_out, layer.events.request_mlp, layer.events.block.ffn):
            part.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    model(batch)
    assert rows == [len(COUNTS)] * (4 * SMALL.layers)
    rows.clear()
    model.broadcast(batch)
    assert rows == [sum(COUNTS)] * (4 * SMALL.layers)


def test_cost_is_a_plus_b_times_candidates(table):
    model = build(table, width=16, heads=4)
    dense, length = reference_of(model, table), SMALL.history

    def measured(count: int) -> tuple[int, int, int]:
        batch = ragged(table, (count,))
        inputs, x_c = model.input.request(batch), model.input.pairs(batch)
        inputs, own = RequestInputs(*(x.detach() for x in inputs)), torch.arange(count)
        x_c, copied = x_c.detach(), inputs.copied(batch.request_of)
        return (
            flops_of(lambda: model.pair_path(model.request_path(inputs), x_c, batch.request_of)),
            flops_of(lambda: model.pair_path(model.request_path(copied), x_c, own)),
            flops_of(lambda: dense.rank(dense.sequence(copied), x_c, own)),
        )

    costs = {count: measured(count) for count in (1, 8, 50)}
    b = (costs[50][0] - costs[1][0]) / 49
    a = costs[1][0] - b
    assert costs[8][0] == a + 8 * b
    assert b == pytest.approx(model.flops(1, length, requests=0), rel=0.02)
    assert a == pytest.approx(model.flops(0, length), rel=0.02)
    assert a > 2 * b  # most of a request is shared
    for count, (_, broadcast, reference) in costs.items():
        assert broadcast == count * (a + b)
        assert reference > broadcast


@pytest.mark.parametrize("switches", [{"attention": "mean"}, {"request_head": False}, {"layers": 1}], ids=str)
def test_declared_flops_of_the_ablations(table, switches):
    model, batch = build(table, **switches), ragged(table)
    inputs, x_c = RequestInputs(*(x.detach() for x in model.input.request(batch))), model.input.pairs(batch).detach()
    counted = flops_of(lambda: model.pair_path(model.request_path(inputs), x_c, batch.request_of))
    padded = len(COUNTS) * max(COUNTS) / sum(COUNTS)  # products with request content run on the padded block
    declared = model.flops(sum(COUNTS), SMALL.history, len(COUNTS))
    assert declared <= counted <= padded * declared
    single = ragged(table, (5,))
    inputs, x_c = RequestInputs(*(x.detach() for x in model.input.request(single))), model.input.pairs(single).detach()
    counted = flops_of(lambda: model.pair_path(model.request_path(inputs), x_c, single.request_of))
    assert counted == model.flops(5, SMALL.history)


# Ablations and variants


def test_ablations_drop_what_they_say(table):
    plain = build(table)
    mean, headless = build(table, attention="mean"), build(table, request_head=False)
    assert not [name for name, _ in mean.named_parameters() if "events.block" in name or "queries" in name]
    assert mean.layers[0].request_dots.slots == 10
    assert plain.layers[0].request_dots.slots == 11
    assert plain.layers[1].request_dots.slots == plain.layers[1].pair_dots.slots == 10
    assert mean.layers[1].request_dots.slots == mean.layers[1].pair_dots.slots == 8
    batch = ragged(table)
    events, mask = mean.input.request(batch)[1:]
    by_hand = torch.stack([row[seen].mean(0) for row, seen in zip(events, mask, strict=True)])
    torch.testing.assert_close(mean.prepare(batch).layers[0].slots[:, REQUEST_SLOTS], by_hand)
    assert headless.prepare(batch).head is None
    with pytest.raises(ValueError, match="attention"):
        ROCSConfig(attention="none")


def test_without_the_request_head_no_weight_of_the_last_request_outputs_is_left(table):
    plain, headless, batch = build(table), build(table, request_head=False), ragged(table)
    assert headless.head.first.in_features == 2 * SMALL.pair_outputs * SMALL.width
    idle = {f"layers.{SMALL.layers - 1}.{name}" for name in ("request_hidden", "request_out", "request_norm")}
    names = {name.rsplit(".", 1)[0] for name, _ in plain.named_parameters()}
    assert idle <= names
    assert not idle & {name.rsplit(".", 1)[0] for name, _ in headless.named_parameters()}
    last = headless.layers[-1]
    assert last.linear.rr.numel() == 0
    assert last.request(*request_inputs(headless, batch))[0].shape[1] == 0
    headless(batch).square().sum().backward()
    assert not [n for n, p in headless.named_parameters() if p.numel() and p.grad is None and "key_constant" not in n]
    with torch.no_grad():
        logits, norm = plain(batch), plain.layers[-1].request_norm
        norm.bias += torch.randn_like(norm.bias)  # where the head reads the request, its last outputs matter
        assert (plain(batch) - logits).abs().max() > 1e-4


def request_inputs(model: ROCS, batch: RequestBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots of the last layer [R, 2 n_r, d], events [R, L + 1, d] and their mask."""
    _, events, mask = model.input.request(batch)
    slots = model.prepare(batch).layers[-1].slots[:, : 2 * model.config.request_outputs]
    return slots, events, mask


def test_late_candidates_meet_the_request_in_the_last_layer_only(table):
    model, batch = build(table, LateROCS), ragged(table)
    for layer in model.item_layers:  # no module before the last layer has a request row to read
        layer.register_forward_hook(lambda _, args, __: rows.append(args[0]))
    rows: list[torch.Tensor] = []
    other = replace(
        batch, user_stats=batch.user_stats + 1, hist_item=batch.hist_item.flip(1), user_id=batch.user_id.flip(0)
    )
    first, second = model(batch), model(other)
    half = len(rows) // 2
    assert half == SMALL.layers - 1
    assert all(torch.equal(a, b) for a, b in zip(rows[:half], rows[half:], strict=True))
    assert (first - second).abs().max() > 1e-4
    with pytest.raises(ValueError, match="two layers"):
        build(table, LateROCS, layers=1)


def test_late_scores_from_the_item_table_equal_those_computed_anew(table):
    model = build(table, LateROCS)
    decade = torch.as_tensor(table.interactions.item_decade)
    items = model.item_table(decade)
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, synthetic.ITEMS + 1), history=9)
    with torch.no_grad():
        served, anew = model.score(model.prepare(batch), batch, items), model(batch)
    torch.testing.assert_close(served, anew, atol=1e-5, rtol=1e-4)
    assert items.shape == (synthetic.ITEMS + 1, 2 * SMALL.pair_outputs, SMALL.width)
    assert (model.score(model.prepare(batch), batch, items.flip(0)) - anew).abs().max() > 1e-3


def test_two_towers_meet_in_a_dot_product_only(table):
    model = build(table, TwoTower)
    users, items = ragged(table, (6, 6)), np.arange(1, 7)
    requests = table.requests("test")[[0, -1]]
    one, two = (table.score_batch(int(r), items, history=9) for r in requests)
    two = replace(two, popularity=one.popularity)
    with torch.no_grad():
        logits = torch.stack([model(batch)[:, 1] - model.offset[1] for batch in (one, two)])  # (2, 6)
        changed = model(replace(one, cross=one.cross + 1))
        assert torch.equal(changed, model(one))  # a feature of user and item has no place in either tower
        u = torch.stack([model.prepare(batch).u[0, 1] for batch in (one, two)])
    solution = torch.linalg.lstsq(u, logits).solution  # item vectors that explain both requests' scores
    torch.testing.assert_close(u @ solution, logits, atol=1e-4, rtol=1e-3)
    assert users.pairs() == 12


def test_the_item_table_spares_embedding_and_layers_of_the_items(table):
    model, calls = build(table, LateROCS), []
    items = model.item_table(torch.as_tensor(table.interactions.item_decade))
    batch = table.score_batch(int(table.requests("test")[2]), np.arange(1, synthetic.ITEMS + 1), history=9)
    for part in (model.input.item_slots, model.input.encoder.decade, *model.item_layers):
        part.register_forward_hook(lambda module, *_: calls.append(module))
    model.score(model.prepare(batch), batch, items)
    assert not calls
    model(batch)
    assert len(calls) == SMALL.layers + 1


# Start and regularisation


@pytest.mark.parametrize("kind", KINDS)
def test_the_catalogue_is_embedded_once_per_forward_pass(table, kind):
    model, calls = build(table, kind), []
    model.input.encoder.genres.register_forward_hook(lambda *_: calls.append(1))
    model(ragged(table))
    assert len(calls) == 1


def test_dropout_reaches_events_slots_interactions_and_head(table):
    config = replace(SMALL, dropout=0.5, layers=2, fm_hidden=14, head_hidden=11)
    model, batch, seen = build(table, config=config).train(), ragged(table), []
    requests, pairs, w, length = len(COUNTS), sum(COUNTS), config.field, config.history + 1

    def record(_, args, out):
        x = args[0]
        dropped = (out == 0) & (x != 0)
        torch.testing.assert_close(out[~dropped], 2 * x[~dropped])
        seen.append((tuple(x.shape), bool(dropped.any())))

    for module in model.modules():
        if isinstance(module, Dropout) and module.rate:
            module.register_forward_hook(record)
    torch.manual_seed(6)
    model(batch)
    inputs = [(requests, 8 * w), (requests, w), (requests, length - 1, 3 * w), (pairs, 3 * w), (pairs, 2 * w)]
    layer = [(requests, length, config.width), (requests, 14), (pairs, 14)]  # FFN of the events, both interactions
    assert all(module.attention_dropout.rate == 0 for module in model.modules() if isinstance(module, BiasedBlock))
    shapes = [shape for shape, dropped in seen if dropped]
    assert sorted(shapes) == sorted([*inputs, *layer, *layer, (pairs, 11)])


def test_numeric_slots_do_not_outweigh_ids_at_the_start(table):
    model, batch = build(table, config=ROCSConfig(width=16, field=8, history=9)), ragged(table)
    with torch.no_grad():
        request, pairs = model.input.request(batch).slots, model.input.pairs(batch)
        large = model.input.pairs(replace(batch, popularity=batch.popularity * 100))
    for numeric in (request[:, 8], pairs[:, 3], pairs[:, 4], large[:, 3]):
        assert numeric.square().mean().sqrt() == pytest.approx(0.2, rel=0.02)
    assert not torch.equal(large[:, 3], pairs[:, 3])
    own = pairs[:, 0]  # the id slot: what items share is smaller than what tells them apart
    assert own.mean(0).square().mean().sqrt() < 0.7 * own.std(0).square().mean().sqrt()


@pytest.mark.parametrize("kind", KINDS)
def test_dense_parameters_are_all_but_those_of_the_input(table, kind):
    model = build(table, kind)
    inputs = sum(p.numel() for p in model.input.parameters())
    assert model.dense_params() == sum(p.numel() for p in model.parameters()) - inputs


def test_activation_bytes_leave_parameters_out():
    layer, x = torch.nn.Linear(8, 16), torch.ones(4, 8, requires_grad=True)
    weight_and_input = saved_bytes(lambda: layer(x))
    assert weight_and_input - saved_bytes(lambda: layer(x), without=layer) == 4 * 8 * 16


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_logits_stay_close(table, kind):
    model, batch = build(table, kind), ragged(table)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(batch)
    with torch.no_grad():
        assert (half.float() - model(batch)).abs().max() < 0.1
