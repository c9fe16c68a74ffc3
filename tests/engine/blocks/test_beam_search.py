"""Beam search and sampling against exhaustive scoring, brute force and hand-made logits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.blocks.beam_search import (
    Expansion,
    constrained_beam,
    exhaustive_sid_scores,
    first_largest,
    sample_paths,
)
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDVocab, random_codes, resolve_collisions
from auto_research.blocks.sid_models import SIDConfig, SIDDecoder, SIDSeq2Seq, SIDStep, path_logprob, sequence_logprob
from auto_research.runtime.errors import NonFinite


class TableStep:
    """Logits from a table per prefix: hand-made, or drawn from the prefix itself. One context is [B] seeds."""

    def __init__(self, sizes, spread: float = 2.0, rounding: float = 0.0):
        self.sizes, self.spread, self.rounding = sizes, spread, rounding
        self.offsets = [0] * len(sizes)
        self.calls: list[int] = []
        self.known: dict[tuple, torch.Tensor] = {}

    def row(self, seed: int, prefix: tuple) -> torch.Tensor:
        if (seed, prefix) not in self.known:
            self.known[seed, prefix] = self.draw(seed, prefix)
        return self.known[seed, prefix]

    def draw(self, seed: int, prefix: tuple) -> torch.Tensor:
        size = self.sizes[len(prefix) % len(self.sizes)]
        rng = np.random.default_rng([seed, len(prefix), *(code + 9 for code in prefix)])
        logits = torch.from_numpy(rng.normal(size=size) * self.spread).float()
        return (logits / self.rounding).round() * self.rounding if self.rounding else logits

    def __call__(self, codes, parent, seeds):
        self.calls.append(1 if codes is None else codes.shape[1])
        prefixes = [[()] for _ in seeds] if codes is None else [[tuple(p) for p in row] for row in codes.tolist()]
        rows = [[self.row(seed, prefix) for prefix in row] for seed, row in zip(seeds, prefixes, strict=True)]
        return torch.stack([torch.stack(row) for row in rows]), seeds

    def logp(self, seed: int, codes) -> float:
        """Log-probability of a whole path over the full level vocabularies."""
        return sum(float(self.row(seed, tuple(codes[:n])).log_softmax(0)[codes[n]]) for n in range(len(codes)))


def catalogue(seed: int, mode: str = "suffix", items: int = 30, sizes=(3, 4, 5)):
    rng = np.random.default_rng(seed)
    codes = np.stack([np.minimum(rng.geometric(0.35, items) - 1, size - 1) for size in sizes], axis=1)
    table = resolve_collisions(codes, sizes, mode, popularity=rng.random(items + 1))
    return table, PrefixTrie.of(table)


def exclusions(table, seed: int, batch: int = 2, share: float = 0.6):
    rng = np.random.default_rng(seed + 77)
    return torch.from_numpy(rng.integers(0, table.n_items + 1, (batch, int(share * table.n_items))))


def build(table, kind: str, seed: int):
    torch.manual_seed(seed)
    config = SIDConfig(
        width=8, heads=2, encoder_layers=1, layers=1, hidden=16, dropout=0.0, head="level" if seed % 2 else "tied"
    )
    model = (SIDSeq2Seq if kind == "seq2seq" else SIDDecoder)(SIDVocab.of(table, users=3), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    tokens = torch.randint(0, model.vocab.n_codes, (2, 2 * table.levels))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, : table.levels] = False
    return model, model.encode(tokens, mask) if kind == "seq2seq" else model(tokens, mask=mask)[1]


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(["seq2seq", "decoder"]), st.sampled_from(["suffix", "group"]))
def test_a_wide_beam_equals_exhaustive_search(seed, kind, mode):
    table, trie = catalogue(seed, mode, items=20)
    model, ctx = build(table, kind, seed)
    seen = exclusions(table, seed)
    alive = trie.alive(seen)
    beams = constrained_beam(SIDStep(model), ctx, trie, trie.n_leaves + 3, alive=alive)
    scores = exhaustive_sid_scores(model, ctx, table, chunk=7)
    assert (scores[:, 0] == -torch.inf).all()
    torch.testing.assert_close(scores.exp().nan_to_num(), scores.exp())
    for row in range(2):
        left = np.setdiff1d(np.arange(1, table.n_items + 1), seen[row])
        leaves = np.unique(table.leaf_of[left])
        got = {int(leaf): float(logp) for leaf, logp in zip(beams.leaf[row, :, 0], beams.logp[row], strict=True)}
        got.pop(-1, None)
        want = {int(leaf): float(scores[row, table.leaf_items[table.leaf_starts[leaf]]]) for leaf in leaves}
        assert set(got) == set(want)
        assert all(abs(got[leaf] - want[leaf]) < 1e-4 for leaf in want)
        assert beams.found()[row].sum() == len(want)
    assert torch.equal(beams.logp, beams.logp.sort(1, descending=True).values)
    found = beams.found()
    assert torch.equal(trie.leaf_codes(beams.leaf[found][:, 0]), beams.codes[found])
    assert beams.invalid().tolist() == [0, 0]


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_scores_do_not_depend_on_the_cache_and_no_path_comes_twice(seed, width):
    table, trie = catalogue(seed, items=20)
    model, ctx = build(table, "decoder" if seed % 3 else "seq2seq", seed)
    alive = trie.alive(exclusions(table, seed))
    fast, slow = (constrained_beam(SIDStep(model, cache=c), ctx, trie, width, alive=alive) for c in (True, False))
    torch.testing.assert_close(fast.logp, slow.logp, atol=1e-4, rtol=1e-4)
    for row in range(2):
        leaves = fast.leaf[row][fast.found()[row], 0].tolist()
        assert len(leaves) == len(set(leaves)) == min(width, int(alive[row, 0]))
    valid = fast.found()
    want = sequence_logprob(model, ctx, fast.codes)
    torch.testing.assert_close(fast.logp[valid], want[valid], atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(["suffix", "group"]))
def test_renormalised_leaf_probabilities_sum_to_one(seed, mode):
    table, trie = catalogue(seed, mode)
    step = TableStep(table.sizes)
    alive = trie.alive(exclusions(table, seed))
    for given_alive in (None, alive):
        beams = constrained_beam(step, [seed, seed + 1], trie, trie.n_leaves, True, alive=given_alive)
        torch.testing.assert_close(beams.logp.exp().sum(1), torch.ones(2), atol=1e-5, rtol=0)
    plain = constrained_beam(step, [seed, seed + 1], trie, trie.n_leaves, alive=alive)
    assert (plain.logp.exp().sum(1) < 1).all()
    best = int(torch.where(plain.found(), plain.leaf[..., 0], 0)[0, 0])
    assert abs(step.logp(seed, trie.leaf_codes(torch.tensor(best)).tolist()) - float(plain.logp[0, 0])) < 1e-4


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_the_renormalised_score_is_that_of_the_masked_policy(seed):
    table, trie = catalogue(seed, items=15)
    model, ctx = build(table, "seq2seq", seed)
    alive = trie.alive(exclusions(table, seed))
    beams = constrained_beam(SIDStep(model), ctx, trie, 5, renormalise=True, alive=alive)
    found = beams.found()
    masks = trie.path_masks(beams.codes, alive)
    want = sequence_logprob(model, ctx, beams.codes, masks)
    torch.testing.assert_close(beams.logp[found], want[found], atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_equal_scores_are_ordered_by_their_codes(seed, width):
    """Logits on a coarse grid make many exact ties; the answer is the head of the fully sorted list."""
    table, trie = catalogue(seed)
    step = TableStep(table.sizes, spread=0.6, rounding=1.0)
    step.row = lambda seed, prefix: torch.zeros(step.sizes[len(prefix)])
    beams = constrained_beam(step, [seed], trie, width)
    count = min(width, trie.n_leaves)
    assert beams.leaf[0, :count, 0].tolist() == list(range(count))
    step = TableStep(table.sizes, rounding=2.0)
    beams = constrained_beam(step, [seed], trie, trie.n_leaves)
    keys = [(-float(p), codes) for p, codes in zip(beams.logp[0], beams.codes[0].tolist(), strict=True)]
    assert keys == sorted(keys)


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=1, max_size=12), st.integers(1, 12))
def test_first_largest_takes_the_first_of_equal_scores(values, count):
    got = first_largest(torch.tensor([values, values[::-1]]), count).tolist()
    for row, line in zip(got, (values, values[::-1]), strict=True):
        best = sorted(range(len(line)), key=lambda i: (-line[i], i))[:count]
        finite = [i for i in best if line[i] > -np.inf]
        assert row == sorted(row)
        assert len(set(row)) == min(count, len(line))
        assert set(finite) <= set(row)


def test_a_user_with_seven_hundred_seen_items_gets_a_full_list():
    rng = np.random.default_rng(0)
    codes = np.stack([rng.zipf(1.6, 1682) % 24 for _ in range(3)], axis=1)
    table = resolve_collisions(codes, (24, 24, 24), "suffix")
    trie = PrefixTrie.of(table)
    torch.manual_seed(0)
    model = SIDSeq2Seq(SIDVocab.of(table), SIDConfig(width=16, heads=2, encoder_layers=1, layers=1)).eval()
    memory = model.encode(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    order = exhaustive_sid_scores(model, memory, table)[0].argsort(descending=True)
    seen = order[:700].unsqueeze(0)  # the items the model likes most, popular prefixes and all
    beams = constrained_beam(SIDStep(model), memory, trie, 50, alive=trie.alive(seen))
    items = trie.expand(beams.leaf[..., 0], 50, seen=seen)
    assert (items > 0).all()
    assert len(set(items[0].tolist())) == 50
    assert not set(items[0].tolist()) & set(seen[0].tolist())


def test_requests_may_have_their_own_inventory():
    table, trie = catalogue(5)
    inventory = torch.zeros(2, table.n_items + 1, dtype=torch.bool)
    inventory[0, [3, 8, 9]] = True
    beams = constrained_beam(TableStep(table.sizes), [1, 2], trie, 6, alive=trie.alive(inventory=inventory))
    assert set(trie.expand(beams.leaf[..., 0], 6)[0].tolist()) == {0, 3, 8, 9}
    assert beams.found().sum(1).tolist() == [3, 0]  # an empty inventory gives an empty list
    assert (beams.codes[1] == -1).all()
    assert (beams.leaf[1] == -1).all()


def test_unconstrained_search_counts_invalid_paths():
    table, trie = catalogue(7)
    step = TableStep(table.sizes)
    width = 25
    beams = constrained_beam(step, [4, 5], trie, width, constrained=False)
    every = list(itertools.product(*map(range, table.sizes)))
    whole = constrained_beam(step, [4, 5], trie, len(every), constrained=False)
    for row, seed in enumerate((4, 5)):
        scores = sorted(-step.logp(seed, codes) for codes in every)
        torch.testing.assert_close(-whole.logp[row], torch.tensor(scores), atol=1e-4, rtol=1e-4)
        valid = [table.leaf_of_code(codes) for codes in beams.codes[row].tolist()]
        assert beams.leaf[row, :, 0].tolist() == valid
        assert int(beams.invalid()[row]) == valid.count(-1) > 0
    assert whole.invalid().tolist() == [len(every) - trie.n_leaves] * 2


def test_tokens_of_other_levels_are_invalid_in_the_unconstrained_mode():
    """A tied head may choose any token: with offsets (0, 2), column 3 at level 0 is code 3 of a level of two."""
    table = resolve_collisions(np.array([[0, 0], [1, 1]]), (2, 2), "group", popularity=np.ones(3))

    def step(codes, parent, state):
        width = 1 if codes is None else codes.shape[1]
        return torch.tensor([0.0, 1.0, 0.0, 5.0, 2.0]).expand(1, width, -1), state

    trie = PrefixTrie.of(table)
    beams = constrained_beam(step, None, trie, 4, constrained=False, offsets=[0, 2])
    assert beams.codes[0, 0].tolist() == [3, 1]
    assert beams.leaf[0, :, 0].tolist() == [-1, -1, -1, 1]
    obeyed = constrained_beam(step, None, trie, 4, offsets=[0, 2])
    total = torch.tensor([0.0, 1, 0, 5, 2]).logsumexp(0)
    torch.testing.assert_close(obeyed.logp[0, :2], torch.stack([6 - 2 * total, 0 - 2 * total]))
    assert obeyed.found().tolist() == [[True, True, False, False]]


def test_widths_per_level_and_a_limit_of_children():
    table, trie = catalogue(8)
    step = TableStep(table.sizes)
    constrained_beam(step, [1], trie, (2, 3, 5, 5))
    assert step.calls == [1, 2, 3, 5]
    limited = constrained_beam(step, [1], trie, trie.n_leaves, branch=1)
    assert limited.found().sum() == 1  # greedy: one child everywhere
    code = []
    for level in range(trie.levels):
        allowed = {tuple(t[: level + 1]) for t in table.leaves.tolist()}
        logits = step.row(1, tuple(code))
        code.append(max((c for c in range(len(logits)) if (*code, c) in allowed), key=lambda c: float(logits[c])))
    assert limited.codes[0, 0].tolist() == code
    with pytest.raises(ValueError, match="one width"):
        constrained_beam(step, [1], trie, (2, 3))


def test_a_planted_path_is_saved_by_rescoring_with_preselection():
    """BARGE's case: the right first code is fourth by probability and first by context; only logp is carried on."""
    table = resolve_collisions(np.array([[c, 0] for c in range(6)]), (6, 1), "group", popularity=np.ones(7))
    trie = PrefixTrie.of(table)
    first = torch.tensor([3.0, 2.5, 2.2, 2.0, -1.0, -2.0])

    def step(codes, parent, state):
        return (first if codes is None else torch.zeros(1)).expand(1, 1 if codes is None else codes.shape[1], -1), None

    def hook(expansion: Expansion):
        cosine = (expansion.codes[..., 0] == 3).float()
        return expansion.logp + (5.0 * cosine if expansion.position == 0 else 0.0)

    plain = constrained_beam(step, None, trie, 3)
    assert plain.codes[0, :, 0].tolist() == [0, 1, 2]
    near = constrained_beam(step, None, trie, 3, on_level=hook)
    assert near.codes[0, :, 0].tolist() == [0, 1, 2]  # without preselection the hook never sees it
    saved = constrained_beam(step, None, trie, 3, on_level=hook, preselect=3)
    assert saved.codes[0, :, 0].tolist() == [0, 1, 3]
    torch.testing.assert_close(saved.logp[0], first.log_softmax(0)[[0, 1, 3]])
    kept = constrained_beam(step, None, trie, 3, on_level=lambda e: e.logp + 5.0 * (e.codes[..., 0] == 3), preselect=3)
    assert kept.codes[0, :, 0].tolist() == [3, 0, 1]  # the last keys decide the order


def test_lists_of_items_equal_brute_force_over_ordered_pairs():
    """OneRec's toy: four items, two per list, every ordered pair without repeats."""
    table = resolve_collisions(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), (2, 2), "group", popularity=np.ones(5))
    trie = PrefixTrie.of(table)
    step = TableStep(table.sizes)
    beams = constrained_beam(step, [3], trie, 20, items=2)
    pairs = list(itertools.permutations(range(4), 2))
    want = sorted(((step.logp(3, [*table.leaves[a], *table.leaves[b]]), (a, b)) for a, b in pairs), reverse=True)
    assert [tuple(pair) for pair in beams.leaf[0, :12].tolist()] == [pair for _, pair in want]
    torch.testing.assert_close(beams.logp[0, :12], torch.tensor([score for score, _ in want]), atol=1e-5, rtol=1e-5)
    assert beams.found().sum() == 12
    renormalised = constrained_beam(step, [3], trie, 20, True, items=2)
    torch.testing.assert_close(renormalised.logp.exp().sum(), torch.tensor(1.0))
    seen = constrained_beam(step, [3], trie, 20, items=2, alive=trie.alive(torch.tensor([[2]])))
    assert seen.found().sum() == 6
    model, ctx = build(table, "seq2seq", 1)
    model = SIDSeq2Seq(model.vocab, SIDConfig(width=8, heads=2, encoder_layers=1, layers=1, items=2)).eval()
    ctx = model.encode(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    lists = constrained_beam(SIDStep(model), ctx, trie, 12, items=2)
    want = path_logprob(
        model, ctx, torch.tensor([[[*table.leaves[a], *table.leaves[b]] for a, b in lists.leaf[0].tolist()]])
    )
    torch.testing.assert_close(lists.logp, want, atol=1e-5, rtol=1e-5)


def test_sampling_follows_the_policy_of_the_trie():
    table, trie = catalogue(11, items=8)
    step, draws = TableStep(table.sizes, spread=1.0), 3000
    alive = trie.alive(exclusions(table, 3, batch=1, share=0.4))
    generator = torch.Generator().manual_seed(0)
    beams = sample_paths(step, [9], trie, draws, alive=alive, renormalise=True, generator=generator)
    exact = constrained_beam(step, [9], trie, trie.n_leaves, True, alive=alive)
    share = torch.bincount(beams.leaf[0, :, 0], minlength=trie.n_leaves) / draws
    want = torch.zeros(trie.n_leaves).index_add(0, exact.leaf[0, :, 0].clamp(min=0), exact.logp[0].exp())
    torch.testing.assert_close(share, want, atol=0.03, rtol=0)
    torch.testing.assert_close(beams.proposal, beams.logp)  # temperature 1: both are the masked policy
    plain = sample_paths(step, [9], trie, 50, alive=alive, generator=generator)
    best = [step.logp(9, codes) for codes in plain.codes[0].tolist()]
    torch.testing.assert_close(plain.logp[0], torch.tensor(best), atol=1e-4, rtol=1e-4)


def test_temperature_top_k_and_the_missing_trie():
    table, trie = catalogue(12, items=12)
    step = TableStep(table.sizes)
    generator = torch.Generator().manual_seed(1)
    greedy = sample_paths(step, [2], trie, 20, top_k=1, generator=generator)
    cold = sample_paths(step, [2], trie, 20, temperature=1e-4, generator=generator)
    want = constrained_beam(step, [2], trie, 1, branch=1).codes
    assert torch.equal(greedy.codes, want.expand(-1, 20, -1))
    assert torch.equal(cold.codes, want.expand(-1, 20, -1))
    torch.testing.assert_close(greedy.proposal, torch.zeros(1, 20))
    free = sample_paths(step, [2], trie, 300, temperature=3.0, constrained=False, generator=generator)
    assert 0 < int(free.invalid()) < 300
    inside = sample_paths(step, [2], trie, 300, temperature=3.0, generator=generator)
    assert inside.invalid().tolist() == [0]
    with pytest.raises(ValueError, match="temperature"):
        sample_paths(step, [2], trie, 3, temperature=0.0)


def test_draws_without_replacement_are_distinct_and_follow_the_policy():
    table, trie = catalogue(13, items=6)
    step = TableStep(table.sizes, spread=1.0)
    exact = constrained_beam(step, [1], trie, 6, True)
    prob = torch.zeros(6).index_add(0, exact.leaf[0, :, 0], exact.logp[0].exp())
    generator = torch.Generator().manual_seed(0)
    rounds = 1000
    beams = sample_paths(step, [1] * rounds, trie, 3, distinct=True, renormalise=True, generator=generator)
    leaf = beams.leaf[..., 0]
    assert all(len(set(row)) == 3 for row in leaf.tolist())
    first = torch.bincount(leaf[:, 0], minlength=6) / rounds
    torch.testing.assert_close(first, prob, atol=0.05, rtol=0)
    second = torch.bincount(leaf[:, 1], minlength=6) / rounds
    want = torch.stack([sum(prob[a] * prob[b] / (1 - prob[a]) for a in range(6) if a != b) for b in range(6)])
    torch.testing.assert_close(second, want, atol=0.05, rtol=0)
    every = sample_paths(step, [1], trie, 9, distinct=True, generator=generator)
    assert sorted(every.leaf[0, :6, 0].tolist()) == list(range(6))
    assert every.found().sum() == 6


def test_logits_that_are_not_numbers_are_refused():
    _table, trie = catalogue(2)

    def step(codes, parent, state):
        return torch.full((1, 1 if codes is None else codes.shape[1], 5), torch.nan), state

    with pytest.raises(NonFinite):
        constrained_beam(step, None, trie, 3)


def test_no_graph_is_built_and_grown_widths_reach_the_catalogue():
    codes = random_codes(400, (8, 8, 8), seed=1)
    table = resolve_collisions(codes, (8, 8, 8), "suffix")
    trie = PrefixTrie.of(table)
    model, ctx = build(table, "decoder", 0)
    last = 0.0
    for width in (1, 4, 16, 64):
        beams = constrained_beam(SIDStep(model), ctx, trie, width)
        assert not beams.logp.requires_grad
        mass = float(beams.logp.exp().sum())
        assert mass >= last - 1e-6
        last = mass
