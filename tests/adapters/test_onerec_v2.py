"""Mechanism tests of card onerec-v2, with the numbers of its specification."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch
from torch import nn

from adapters.onerec_v2 import experiment, training
from adapters.onerec_v2.events import ContextBatch, EventStream, Stream, StreamBatch, StreamRule
from adapters.onerec_v2.feedback import (
    LEVELS,
    OBJECTIVES,
    LargestGradient,
    PolicyConfig,
    Snapshot,
    labels,
    ntp_loss,
    policy_loss,
    post_training_loss,
)
from adapters.onerec_v2.lists import Decoder, feedback_metrics, pair_gap, time_report
from adapters.onerec_v2.model import LazyContext, OneRecV2, OneRecV2Config, lazy_flops
from auto_research.blocks.beam_search import constrained_beam
from auto_research.blocks.preference import frozen_reference, gbpo, weights_hash
from auto_research.blocks.semantic_ids import SIDTable, permuted_codes, random_codes, resolve_collisions
from auto_research.blocks.sid_models import SIDStep, token_logprob
from auto_research.data.interactions import load_interactions
from auto_research.data.rewards import Events, duration_bucket, rating_quantile_reward
from auto_research.data.sequences import LeaveTwoOut
from auto_research.experiment.context import Budget
from auto_research.experiment.contract import Measurement, Units
from auto_research.metrics.cost import flops_of
from auto_research.runtime.seeds import seed_everything
from auto_research.train.optimizer import adamw

CPU = torch.device("cpu")
SIZES = (4, 5, 6)
CONFIG = OneRecV2Config(
    width=16, heads=4, layers=4, hidden=20, head_width=4, feature_hidden=12, history=8, user_slots=16, dropout=0.1
)
RULE = StreamRule(batch=16, history=8, chunk=64, user_slots=16)


@pytest.fixture(scope="module")
def data():
    return synthetic.interactions(users=20)


@pytest.fixture(scope="module")
def stream(data):
    return EventStream.of_sequences(data, LeaveTwoOut.build(data))


@pytest.fixture(scope="module")
def table(data):
    codes = random_codes(data.n_items, SIZES, seed=0)
    codes[1::7] = codes[::7][: len(codes[1::7])]  # some tuples hold two items
    return resolve_collisions(codes, SIZES, "group", popularity=np.arange(data.n_items + 1))


def build(data, table, seed: int = 0, **switches) -> OneRecV2:
    torch.manual_seed(seed)
    sizes = tuple(data.vocab[name] for name in ("gender", "age", "occupation"))
    model = OneRecV2(replace(CONFIG, **switches), table, torch.as_tensor(data.item_genres), sizes)
    for embedding in model.modules():  # large enough that everything shows
        if isinstance(embedding, nn.Embedding):
            nn.init.normal_(embedding.weight, std=0.5)
    return model.eval()


def batch_of(stream, rows, advantage=None) -> StreamBatch:
    return Stream(stream, RULE, ("test",), CPU, advantage).read(rows)


# Lazy decoder


def test_cross_attention_projects_neither_keys_nor_values(data, stream, table):
    model = build(data, table)
    for block in model.sid.blocks:
        inside = CONFIG.heads * CONFIG.head_width
        cross = {name for name, _ in block.named_parameters() if not name.startswith(("qkv", "out", "ffn", "norm"))}
        assert cross == {"query.weight", "cross_out.weight"}
        assert block.query.weight.shape == (inside, CONFIG.width)
    context = model.read(batch_of(stream, stream.targets["test"][:3]).context)
    assert context.keys[0].data_ptr() == context.values[0].data_ptr()
    assert {model.sid.kv_set(layer) for layer in range(4)} == {0}
    tokens = 4 + CONFIG.history
    for layers in (2, 4):
        read = build(data, table, layers=layers).read(batch_of(stream, stream.targets["test"][:1]).context)
        assert read.bytes() == tokens * CONFIG.groups * CONFIG.head_width * 4
    apart = build(data, table, per_set=2, sets=0).read(batch_of(stream, stream.targets["test"][:1]).context)
    assert apart.bytes() == 8 * tokens * CONFIG.groups * CONFIG.head_width * 4
    assert apart.keys[0].data_ptr() != apart.values[0].data_ptr()


def test_layers_read_their_kv_set(data, stream, table):
    model = build(data, table, sets=2)
    assert [model.sid.kv_set(layer) for layer in range(4)] == [0, 0, 1, 1]
    batch = batch_of(stream, stream.targets["test"][:3])
    context = model.read(batch.context)
    path = model.item_codes[batch.target].unsqueeze(1)
    seen = []
    for j in range(2):
        keys = tuple(k if n == j else torch.zeros_like(k) for n, k in enumerate(context.keys))
        logits = model.sid.path_logits(LazyContext(keys, keys, context.mask), path)
        seen.append(logits[0])
    assert not torch.allclose(seen[0], seen[1], atol=1e-4)


def test_grouped_queries_equal_repeated_heads(data, stream, table):
    model = build(data, table)
    block = model.sid.blocks[0]
    torch.manual_seed(1)
    h = torch.randn(2, 3, 2, CONFIG.width)
    k, v = torch.randn(2, 2, 2, 5, CONFIG.head_width)
    mask = torch.tensor([[True] * 5, [False, False, True, True, True]])
    grouped = block.cross(h, k, v, mask)
    q = block.query(block.norm_cross(h)).view(2, 6, 4, CONFIG.head_width).transpose(1, 2)  # (B, H, w t, dh)
    full_k, full_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ full_k.transpose(2, 3) / math.sqrt(CONFIG.head_width)).masked_fill(~mask[:, None, None], -torch.inf)
    read = (scores.softmax(-1) @ full_v).transpose(1, 2).flatten(2)
    assert torch.allclose(grouped, h + block.cross_out(read).view_as(h), atol=1e-5)


def test_the_context_is_never_updated_and_has_no_order(data, stream, table):
    model = build(data, table)
    batch = batch_of(stream, stream.targets["test"][:4])
    context = model.read(batch.context)
    before = context.keys[0].clone()
    path = model.item_codes[batch.target].unsqueeze(1)
    model.sid.path_logits(context, path)
    assert torch.equal(context.keys[0], before)
    model.sid.path_logits(context, path.flip(2) % 4)
    assert torch.equal(context.keys[0], before)
    order = torch.arange(CONFIG.history)
    order[1], order[4] = 4, 1
    events = batch.context
    moved = ContextBatch(events.fields, *(x[:, order] for x in (events.item, events.rating, events.gap)))
    logp = model.token_logp(events, batch.target)
    assert not torch.allclose(model.token_logp(moved, batch.target), logp, atol=1e-4)  # recency is a feature
    with torch.no_grad():
        model.features.recency.copy_(model.features.recency[order])
    assert torch.allclose(model.token_logp(moved, batch.target), logp, atol=1e-5)


def test_padding_never_changes_the_output(data, stream, table):
    model = build(data, table)
    rows = np.array([int(stream.first[stream.targets["test"][0]]) + 3])  # three events before it
    batch = batch_of(stream, rows)
    assert (batch.context.item[0] > 0).sum() == 3
    base = model.logp(batch.context, batch.target)
    other = ContextBatch(*(x.clone() for x in batch.context))
    other.rating[0, :5], other.gap[0, :5] = 3, 7
    assert torch.allclose(model.logp(other, batch.target), base, atol=1e-6)
    nothing = batch_of(stream, np.array([int(rows[0]) - 3]))
    assert not nothing.context.item.any()
    assert model.logp(nothing.context, nothing.target).isfinite().all()  # the user tokens are always there


def test_the_generators_compared_share_context_features(data, stream, table):
    batch = batch_of(stream, stream.targets["test"][:3])
    for kind in ("encoder_decoder", "classic"):
        model = build(data, table, kind=kind)
        assert model.features(batch.context)[0].shape == (3, 12, CONFIG.width)
        assert model.logp(batch.context, batch.target).shape == (3,)
    assert len(build(data, table, kind="encoder_decoder").sid.encoder.blocks) == 2
    assert len(build(data, table, kind="encoder_decoder").sid.blocks) == 2
    assert len(build(data, table, kind="classic").sid.trunk.blocks) == 4


@pytest.mark.parametrize("kind", ["lazy", "encoder_decoder", "classic"])
def test_context_tokens_are_dropped_once(data, stream, table, kind):
    model = build(data, table, kind=kind).train()
    batch = batch_of(stream, stream.targets["test"][:3])
    torch.manual_seed(0)
    tokens = model.features(batch.context)[0]
    assert torch.equal(tokens, model.features(batch.context)[0]) == (kind != "lazy")
    assert not torch.equal(model.logp(batch.context, batch.target), model.logp(batch.context, batch.target))


@pytest.mark.parametrize("switches", [{"groups": 4}, {"per_set": 2, "sets": 0}])
def test_every_group_and_set_of_keys_and_values_is_read(data, stream, table, switches):
    model = build(data, table, **switches)
    batch = batch_of(stream, stream.targets["test"][:3])
    context, path = model.read(batch.context), model.item_codes[batch.target].unsqueeze(1)
    groups = switches.get("groups", CONFIG.groups)
    assert len(context.keys) == len(context.values) == (4 if "sets" in switches else 1)
    assert context.keys[0].shape == (3, groups, 4 + CONFIG.history, CONFIG.head_width)
    logp = token_logprob(model.sid, context, path)
    assert logp.isfinite().all()
    assert torch.equal(logp.squeeze(1), model.token_logp(batch.context, batch.target))
    torch.manual_seed(1)
    for name in ("keys", "values"):
        for j, group in itertools.product(range(len(context.keys)), range(groups)):
            kept = [x.clone() for x in getattr(context, name)]
            kept[j][:, group] += torch.randn_like(kept[j][:, group])
            moved = token_logprob(model.sid, context._replace(**{name: tuple(kept)}), path)
            assert (moved - logp).abs().max() > 1e-4, (name, j, group)


@pytest.mark.parametrize("kind", ["lazy", "encoder_decoder", "classic"])
def test_beam_over_one_context_equals_teacher_forcing(data, stream, table, kind):
    decoder = Decoder(build(data, table, kind=kind), table, CPU, beams=200)
    rows = stream.targets["test"][:3]
    exhaustive = decoder.scores(stream, "test", np.arange(3))
    with torch.no_grad():
        ctx = decoder.model.read(decoder.contexts(stream, rows))
        beams = constrained_beam(SIDStep(decoder.model.sid), ctx, decoder.trie, 200)
    for row in range(3):
        leaf = beams.leaf[row, beams.found()[row], 0]
        assert len(leaf) == len(table.leaves)
        first_item = decoder.trie.group[leaf, 0].numpy()
        assert np.allclose(beams.logp[row, : len(leaf)].numpy(), exhaustive[row, first_item], atol=1e-4)
        assert (np.diff(exhaustive[row, first_item]) <= 1e-5).all()
    lists = decoder.lists(stream, rows)
    for row, items in zip(rows, lists, strict=True):
        assert len(set(items.tolist()) - {0}) == 10
        assert not np.isin(items, stream.history(row)).any()


# The stream


def test_every_train_event_is_a_target_once_a_pass_and_time_goes_on(stream):
    passes = Stream(stream, RULE, ("s", 0), CPU)
    rows = np.concatenate([passes._ordered(0)])
    assert sorted(rows.tolist()) == sorted(stream.train.tolist())
    time = stream.interactions.timestamp[rows]
    chunks = [time[start : start + RULE.chunk] for start in range(0, len(time), RULE.chunk)]
    assert all(a.max() <= b.min() for a, b in itertools.pairwise(chunks))
    assert not (np.diff(time) >= 0).all()  # shuffled inside a chunk
    assert not np.array_equal(passes._ordered(0), passes._ordered(1))
    random = Stream(stream, replace(RULE, order="random"), ("s", 0), CPU)._ordered(0)
    early = stream.interactions.timestamp[random[: RULE.chunk]]
    assert early.max() > np.median(time)


def test_steps_end_a_pass_on_the_newest_events(stream):
    passes = Stream(stream, RULE, ("s", 0), CPU)
    n = passes.per_pass
    targets = [passes.at(step).target.tolist() for step in range(2 * n)]
    assert sum(len(items) for items in targets[:n]) == len(stream.train)
    third = passes.steps(3, first=n - 2)(1)
    assert [batch.target.tolist() for batch in third] == targets[n + 1 : n + 4]
    for length, total in ((5, 10), (4, 10), (7, n), (n, 2 * n)):
        epochs = -(-total // length)
        seen = [b.target.tolist() for e in range(epochs) for b in passes.steps_to_newest(length, total)(e)][:total]
        assert seen == (targets[n - total : n] if total <= n else targets)
    over = [b.target.tolist() for b in passes.steps_to_newest(n + 3, n + 3)(0)]
    assert over == targets[n - 3 :]


def test_the_policy_sees_the_newest_events_once(stream):
    rule = replace(RULE, chunk=16)  # one batch each, so that the window is exact
    passes, updates = Stream(stream, rule, ("policy", 0), CPU), 10
    rows = [passes._order(0)[part * 16 : (part + 1) * 16] for part in range(passes.per_pass)]
    newest = np.concatenate(rows[-updates:])
    order = stream.train[np.argsort(stream.interactions.timestamp[stream.train], kind="stable")]
    assert sorted(newest) == sorted(order[-len(newest) :])
    window = passes.steps_to_newest(5, updates)
    found = torch.cat([batch.target for epoch in range(2) for batch in window(epoch)])
    assert found.tolist() == stream.item[newest].tolist()


@pytest.mark.parametrize(("budget", "length"), [({"passes": 3, "epochs": 9}, 34), ({"epoch_steps": 7, "epochs": 2}, 7)])
def test_looks_follow_the_length_of_the_stream(budget, length):
    trainer = SimpleNamespace(ctx=SimpleNamespace(budget=Budget(budget)))
    assert training.Trainer.look_steps(trainer, 100) == length


def test_a_context_is_what_happened_before(data, stream):
    position = 4
    row = int(stream.targets["test"][position])
    context = stream.contexts(np.array([row]), 8, 16)
    rows = np.arange(row - 8, row)
    assert context.item[0].tolist() == data.item[rows].tolist()
    assert context.rating[0].tolist() == data.rating[rows].tolist()
    later = replace(stream, item=stream.item.copy())
    later.item[row:] = 1
    assert all(torch.equal(a, b) for a, b in zip(context, later.contexts(np.array([row]), 8, 16), strict=True))
    first = stream.contexts(stream.first[[row]] + 1, 8, 16)
    assert first.gap[0].tolist() == [0] * 7 + [1]
    assert int(first.fields[0, 0]) == data.user_fields["gender"][stream.user(np.array([row]))[0]]


def test_global_time_split_of_movielens(movielens_100k):
    data = load_interactions(movielens_100k / "canonical")
    stream = EventStream.of_time(data)
    rows = stream.targets["test"]
    user = stream.user(rows)
    known = np.isin(user, stream.user(stream.train))
    assert (len(rows), len(np.unique(user)), int((~known).sum())) == (742, 166, 477)
    assert np.bincount(user).max() <= 5
    assert (rows - stream.first[rows] >= 5).all()
    assert data.timestamp[stream.train].max() <= data.timestamp[rows].min()
    assert len(stream.train) == 80_000


def test_codes_of_the_time_split_know_nothing_later(movielens_100k, tmp_path, monkeypatch):
    data = load_interactions(movielens_100k / "canonical")
    users = LeaveTwoOut.build(data).restrict(200)
    split = EventStream.of_time(data, users.users)
    assert np.array_equal(np.concatenate(split.train_lists()), data.item[split.train])
    assert len(split.train_lists()) == len(np.unique(data.user[split.train]))
    before = np.zeros(len(data), dtype=bool)
    before[split.train] = True

    def made(name: str, edited: np.ndarray | None) -> bytes:
        item = data.item if edited is None else np.where(edited, data.item % data.n_items + 1, data.item)
        changed = data.edited(item=item)
        monkeypatch.setattr(experiment, "load_data", lambda ctx: (changed, LeaveTwoOut.build(changed).restrict(200)))
        out = tmp_path / name
        out.mkdir()
        budget = Budget({"codes": [8, 8, 8]})
        ctx = SimpleNamespace(
            out=out, seed=0, budget=budget, switch=None, device="cpu", data=lambda table: movielens_100k / table
        )
        experiment.codes_time(ctx)
        return b"".join(path.read_bytes() for path in sorted(out.iterdir()))

    as_it_is = made("same", None)
    assert made("later", ~before) == as_it_is
    assert made("earlier", before) != as_it_is


def test_models_of_the_time_split_read_its_codes(data, tmp_path, monkeypatch):
    for seed, name in enumerate(("codes", "codes_random", "codes_time")):
        (tmp_path / name).mkdir()
        codes = random_codes(data.n_items, SIZES, seed=seed)
        resolve_collisions(codes, SIZES, "group", popularity=np.ones(data.n_items + 1)).save(tmp_path / name)
    monkeypatch.setattr(training, "load_data", lambda ctx: (data, LeaveTwoOut.build(data)))

    def made_from(name: str, **options) -> bool:
        switch = {"codes": "codes_random"} if name == "codes_random" else {}
        ctx = SimpleNamespace(budget=Budget({}), switch=switch, artifact=lambda name: tmp_path / name)
        found = training.Trainer(ctx, CPU, **options).table.codes
        return np.array_equal(found, SIDTable.load(tmp_path / name).codes)

    assert made_from("codes")
    assert made_from("codes_random")
    assert made_from("codes_time", time_split=True)


# Feedback


def test_exposure_buckets_of_the_specification():
    assert duration_bucket(np.array([1, 10, 16, 300])).tolist() == [0, 3, 4, 8]


def test_shaped_labels_of_the_specification():
    rating = np.array([1, 2, 3, 4, 5, 5, 4, 3.0])
    events = Events(np.ones(8, dtype=np.int64), np.arange(1, 9), rating, 1, 8)
    reward = rating_quantile_reward(events, lambda train: np.zeros(9, dtype=np.int64))
    q = reward.quantile(events.user, events.item, rating)
    assert q.tolist() == [0.0625, 0.1875, 0.375, 0.625, 0.875, 0.875, 0.625, 0.375]
    assert reward.label(events.user, events.item, rating).tolist() == [-1, -1, 0, 0, 1, 1, 0, 0]


def test_test_events_change_no_train_label(data, stream):
    label = labels(stream)
    rating = data.rating.copy()
    held_out = np.concatenate([stream.targets["valid"], stream.targets["test"]])
    rating[held_out] = 6 - rating[held_out]
    item = stream.item.copy()
    item[held_out] = 1
    changed = labels(replace(stream, interactions=data.edited(rating=rating), item=item))
    assert np.array_equal(label[stream.train], changed[stream.train])
    assert not np.array_equal(label[held_out], changed[held_out])
    raw = labels(stream, "raw")
    assert raw.tolist() == np.where(data.rating >= 4, 1, np.where(data.rating <= 2, -1, 0)).tolist()
    assert not np.array_equal(raw[stream.train], label[stream.train])


# Policy


@pytest.mark.parametrize(
    ("advantage", "pi", "old", "value"),
    [(1, 0.2, 0.1, -1), (1, 0.1, 0.2, -0.5), (-1, 0.3, 0.1, 0.42857), (-1, 0.05, 0.98, 0.05102)],
)
def test_gbpo_values_of_the_specification(advantage, pi, old, value):
    logp = torch.tensor([math.log(pi)], requires_grad=True)
    logp_old = torch.tensor([math.log(old)], requires_grad=True)
    loss = gbpo(logp, logp_old, torch.tensor([advantage]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, abs=1e-5)
    assert logp.grad.item() == pytest.approx(value, abs=1e-5)  # the denominator carries no gradient
    assert logp_old.grad is None


def test_gbpo_gradient_is_bounded_by_that_of_cross_entropy():
    grid = torch.linspace(0.01, 0.99, 25)
    pi, old = (x.flatten() for x in torch.meshgrid(grid, grid, indexing="ij"))
    for advantage, bound in ((1.0, 1 / pi), (-1.0, 1 / (1 - pi))):
        value = pi.clone().requires_grad_()
        gbpo(value.log(), old.log(), torch.full_like(pi, advantage)).sum().backward()
        assert (value.grad.abs() <= bound * (1 + 1e-4)).all()


def test_neutral_events_give_the_policy_no_gradient(data, stream, table):
    model = build(data, table)
    snapshot = frozen_reference(model)
    rows = stream.train[:8]
    advantage = np.zeros(len(stream.item), dtype=np.int64)
    loss = policy_loss(model, snapshot, batch_of(stream, rows, advantage), PolicyConfig())
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    advantage[rows[:3]] = 1
    model.zero_grad()
    some = policy_loss(model, snapshot, batch_of(stream, rows, advantage), PolicyConfig())
    some.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    policy_loss(model, snapshot, batch_of(stream, rows[:3], advantage), PolicyConfig()).backward()
    for name, parameter in model.named_parameters():
        if name in gradient:
            assert torch.allclose(parameter.grad, gradient[name], atol=1e-6), name


@pytest.mark.parametrize("objective", ["gbpo", "ppo_clip", "ecpo", "unclipped"])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_objectives_push_liked_events_up_and_disliked_events_down(data, stream, table, objective, level):
    model = build(data, table)
    snapshot = frozen_reference(model)
    rows = stream.train[5:200:6]
    advantage = np.zeros(len(stream.item), dtype=np.int64)
    advantage[rows[::2]], advantage[rows[1::2]] = 1, -1
    batch = batch_of(stream, rows, advantage)
    config = PolicyConfig(objective=objective, level=level)
    logp = model.token_logp(batch.context, batch.target).detach().requires_grad_()
    liked = batch.advantage.float()
    now, weight = (logp.sum(1), liked) if level == "sequence" else (logp, liked.unsqueeze(1))
    value = OBJECTIVES[objective](now, now.detach(), weight).mean()
    assert policy_loss(model, snapshot, batch, config).item() == pytest.approx(value.item(), abs=1e-5)
    value.backward()
    assert (logp.grad[liked > 0] < 0).all()  # a step against the gradient raises them
    assert (logp.grad[liked < 0] > 0).all()
    for wanted in (1, -1):
        one = batch_of(stream, rows[advantage[rows] == wanted], advantage)
        stepped = build(data, table)
        optimizer = torch.optim.SGD(stepped.parameters(), lr=1e-2)
        before = stepped.logp(one.context, one.target).detach()
        policy_loss(stepped, snapshot, one, config).backward()
        optimizer.step()
        with torch.no_grad():
            assert wanted * (stepped.logp(one.context, one.target) - before).mean() > 0


def test_objectives_and_levels_differ_away_from_the_snapshot(data, stream, table):
    model = build(data, table)
    snapshot = frozen_reference(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in snapshot.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    rows = stream.train[5:200:6]
    advantage = np.zeros(len(stream.item), dtype=np.int64)
    advantage[rows[::2]], advantage[rows[1::2]] = 1, -1
    batch = batch_of(stream, rows, advantage)
    kinds = [PolicyConfig(objective=objective, level=level) for objective in OBJECTIVES for level in LEVELS]
    values = sorted(policy_loss(model, snapshot, batch, config).item() for config in kinds)
    assert min(np.diff(values)) > 1e-5


def test_largest_gradient_is_that_of_the_policy_loss_alone(data, stream, table):
    model, advantage = build(data, table).train(), labels(stream)
    snapshot, config = Snapshot(model, refresh=25), PolicyConfig()
    batches = [batch_of(stream, stream.train[start : start + 16], advantage) for start in (0, 40, 80)]

    def norm(batch: StreamBatch, weight: float = 1.0) -> float:
        model.zero_grad()
        (weight * policy_loss(model, snapshot.model, batch, config)).backward()
        found = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
        model.zero_grad()
        return found

    largest = LargestGradient(snapshot, config, every=2)
    post_training_loss(model, snapshot.model, batches[0], config).backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    largest(model, batches[0])
    assert all(torch.equal(kept[name], p.grad) for name, p in model.named_parameters() if name in kept)
    assert largest.value == pytest.approx(norm(batches[0]), rel=1e-5)
    resumed = LargestGradient(snapshot, config, every=2)
    resumed.load_state_dict(largest.state_dict())
    resumed.value = 0.0
    resumed(model, batches[1])
    assert resumed.value == 0  # between two looks
    resumed(model, batches[2])
    assert resumed.value > 0
    assert resumed.value == pytest.approx(norm(batches[2]), rel=1e-5)


def test_without_policy_weight_training_is_continued_supervision(data, stream, table):
    advantage = labels(stream)
    states = []
    for config in (PolicyConfig(weight=0.0), PolicyConfig(objective="none"), None):
        model = build(data, table).train()
        snapshot, optimizer = frozen_reference(model), adamw(model, 1e-3, 0.0)
        passes = Stream(stream, RULE, ("p", 0), CPU, advantage)
        seed_everything(3)
        for step in range(3):
            optimizer.zero_grad()
            batch = passes.at(step)
            loss = ntp_loss(model, batch) if config is None else post_training_loss(model, snapshot, batch, config)
            loss.backward()
            optimizer.step()
        states.append(weights_hash(model))
    assert len(set(states)) == 1


def test_snapshot_is_renewed_and_survives_a_restart(data, table):
    model = build(data, table)
    snapshot = Snapshot(model, refresh=2)
    start = weights_hash(snapshot.model)
    with torch.no_grad():
        model.sid.embedding.weight += 1
    snapshot.after_step(model, 1)
    assert weights_hash(snapshot.model) == start
    snapshot.after_step(model, 2)
    assert weights_hash(snapshot.model) == weights_hash(model) != start
    other = Snapshot(build(data, table, seed=5), refresh=2)
    other.load_state_dict(snapshot.state_dict())
    assert weights_hash(other.model) == weights_hash(snapshot.model)


def test_divergence_of_policies(data, stream, table):
    decoder, other = (Decoder(build(data, table, seed=s), table, CPU, beams=4) for s in (0, 1))
    rows = stream.targets["test"][:6]
    assert decoder.divergence(decoder, stream, rows, seed=0) == pytest.approx(0, abs=1e-6)
    assert decoder.divergence(other, stream, rows, seed=0) > 0.01


# Costs and metrics


def test_flop_audit():
    data = synthetic.interactions(users=6, items=80, ratings=60)
    table = resolve_collisions(random_codes(80, (64, 64, 64), seed=0), (64, 64, 64), "group", popularity=np.ones(81))
    stream = EventStream.of_sequences(data, LeaveTwoOut.build(data))
    config = OneRecV2Config()
    sizes = tuple(data.vocab[name] for name in ("gender", "age", "occupation"))
    counted = {}
    sample = Stream(stream, StreamRule(), ("f",), CPU).read(stream.targets["test"][:1])
    assert (sample.context.item > 0).all()  # T = 54
    for kind in ("lazy", "encoder_decoder", "classic"):
        model = OneRecV2(replace(config, kind=kind), table, torch.as_tensor(data.item_genres), sizes).eval()
        with torch.no_grad():
            counted[kind] = flops_of(lambda model=model: ntp_loss(model, sample))
            if kind == "lazy":
                context = flops_of(lambda model=model: model.read(sample.context))
    expected_context, expected = lazy_flops(config, (64, 64, 64), data.item_genres.shape[1])
    assert context == pytest.approx(expected_context, rel=0.05)
    assert counted["lazy"] == pytest.approx(expected, rel=0.05)
    assert counted["lazy"] < 0.25 * counted["encoder_decoder"]
    assert counted["lazy"] < 0.25 * counted["classic"]


def test_random_codes_keep_groups_and_move_items(table):
    codes = table.codes[1:]
    moved = permuted_codes(codes, seed=0)
    assert sorted(map(tuple, moved)) == sorted(map(tuple, codes))
    assert not np.array_equal(moved, codes)


def test_metrics_by_label():
    ndcg, hit = [1.0, 0.5, 0.0, 0.4], [1.0, 1.0, 0.0, 1.0]
    units = {"ndcg@10": Units("user", [1, 2, 3, 4], ndcg), "hit@10": Units("user", [1, 2, 3, 4], hit)}
    measured = Measurement({"ndcg@10": 0.475, "hit@10": 0.75}, units=units)
    feedback_metrics(measured, np.array([1, -1, -1, 0]))
    assert measured.metrics["recall@10"] == 0.75
    assert measured.metrics["ndcg@10_on_positive_A"] == 1.0
    assert measured.metrics["dislike_hit@10"] == 0.5
    assert measured.units["dislike_hit@10"].ids == [2, 3]
    feedback_metrics(measured, np.zeros(4))
    assert measured.metrics["dislike_hit@10"] == 0


def test_gap_and_time_report(data, stream, table):
    decoder = Decoder(build(data, table), table, CPU, beams=12)
    label, rows = labels(stream), stream.targets["test"]
    gap = pair_gap(decoder, stream, label, RULE)
    with torch.no_grad():
        batch = batch_of(stream, rows)
        logp = decoder.model.logp(batch.context, batch.target).numpy()
    expected = logp[label[rows] == 1].mean() - logp[label[rows] == -1].mean()
    assert gap["gap"] == pytest.approx(expected, abs=1e-4)
    split = EventStream.of_time(data)
    tested = split.targets["test"]
    found = time_report(split, lambda rows: np.repeat(split.item[rows][:, None], 10, axis=1), labels(split))
    assert found["targets"] == len(tested)
    assert found["recall@10"] == 1
    low = time_report(split, lambda rows: np.zeros((len(rows), 10), dtype=np.int64), labels(split))
    assert low["ndcg@10"] == 0
