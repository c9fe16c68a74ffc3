"""The trie against counting by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import random_codes, resolve_collisions

# items 1..6; leaves 00 (items 1 and 6), 02 (3), 10 (4), 21 (2), 22 (5)
CODES = np.array([[0, 0], [2, 1], [0, 2], [1, 0], [2, 2], [0, 0]])
POPULARITY = np.array([0, 1, 1, 1, 1, 1, 9])


@pytest.fixture
def shared():
    """The six items with one shared leaf."""
    return PrefixTrie.of(resolve_collisions(CODES, (3, 3), "group", popularity=POPULARITY))


def catalogue(seed: int, mode: str, items: int = 40, sizes=(3, 4, 6)):
    """Table of skewed random codes."""
    rng = np.random.default_rng(seed)
    codes = np.stack([np.minimum(rng.geometric(0.4, items) - 1, size - 1) for size in sizes], axis=1)
    return resolve_collisions(codes, sizes, mode, popularity=rng.random(items + 1))


def test_nodes_by_hand(shared):
    assert shared.starts == (0, 1, 4, 9)
    assert shared.code.tolist() == [-1, 0, 1, 2, 0, 2, 0, 1, 2]
    assert shared.first.tolist() == [1, 4, 6, 7, 9]
    assert shared.leaves.tolist() == [5, 2, 1, 2, 1, 1, 1, 1, 1]
    assert shared.child_table().tolist() == [[1, 2, 3], [4, -1, 5], [6, -1, -1], [-1, 7, 8]]
    assert shared.path.tolist() == [[1, 4], [1, 5], [2, 6], [3, 7], [3, 8]]
    assert shared.leaf_codes(torch.tensor([1, 3])).tolist() == [[0, 2], [2, 1]]


def test_alive_counts_by_hand(shared):
    seen = torch.tensor([[0, 0, 0], [1, 3, 3], [6, 1, 3], [4, 4, 4]])
    alive = shared.alive(seen)
    assert alive[0].tolist() == shared.leaves.tolist()
    assert alive[1].tolist() == [4, 1, 1, 2, 1, 0, 1, 1, 1]  # item 6 keeps the shared leaf alive
    assert alive[2].tolist() == [3, 0, 1, 2, 0, 0, 1, 1, 1]  # code 0 has nothing left
    assert alive[3].tolist() == [4, 2, 0, 2, 1, 1, 0, 1, 1]  # three times the same item is one item
    root = torch.zeros(4, 1, dtype=torch.long)
    assert shared.allowed(root, 0, alive)[:, 0].tolist() == [
        [True, True, True],
        [True, True, True],
        [False, True, True],
        [True, False, True],
    ]


def test_steps_leave_the_trie_and_stay_outside(shared):
    node = shared.step(torch.tensor([[0, 0, 0, -1]]), torch.tensor([[2, 7, -1, 0]]), 0)
    assert node.tolist() == [[3, -1, -1, -1]]
    assert shared.step(node, torch.tensor([[2, 0, 0, 0]]), 1).tolist() == [[8, -1, -1, -1]]
    assert not shared.allowed(torch.tensor([[-1]]), 1).any()


def test_items_of_ranked_leaves(shared):
    leaves = torch.tensor([[3, 0, -1, 1], [0, 1, -1, -1]])
    assert shared.expand(leaves, 5).tolist() == [[2, 6, 1, 3, 0], [6, 1, 3, 0, 0]]
    assert shared.expand(leaves, 2, seen=torch.tensor([[2, 6], [0, 0]])).tolist() == [[1, 3], [6, 1]]
    inventory = torch.ones(2, 7, dtype=torch.bool)
    inventory[1, 6] = False
    assert shared.expand(leaves, 3, inventory=inventory).tolist() == [[2, 6, 1], [1, 3, 0]]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(["group", "suffix"]), st.integers(0, 60))
def test_alive_equals_brute_force(seed, mode, length):
    table = catalogue(seed, mode)
    trie = PrefixTrie.of(table)
    rng = np.random.default_rng(seed + 1)
    seen = rng.integers(0, table.n_items + 1, size=(3, length))  # with repeats and padding
    inventory = rng.random((3, table.n_items + 1)) < 0.7
    alive = trie.alive(torch.from_numpy(seen))
    within = trie.alive(torch.from_numpy(seen), inventory=torch.from_numpy(inventory))
    everything = trie.alive(inventory=torch.ones(3, table.n_items + 1, dtype=torch.bool))
    assert torch.equal(everything, trie.leaves.int().expand(3, -1))
    prefixes = [()] + [
        tuple(trie.code[trie.path[leaf, :n]].tolist())
        for n in range(1, table.levels + 1)
        for leaf in range(trie.n_leaves)
    ]
    node_of = {(): 0}
    for n in range(1, table.levels + 1):
        for leaf in range(trie.n_leaves):
            node_of[tuple(table.leaves[leaf, :n])] = int(trie.path[leaf, n - 1])
    assert sorted(node_of.values()) == list(range(trie.n_nodes))
    assert set(map(tuple, prefixes)) == set(node_of)
    for row in range(3):
        left = np.setdiff1d(np.arange(1, table.n_items + 1), seen[row])
        for items, counts in ((left, alive[row]), (left[inventory[row, left]], within[row])):
            tuples = {tuple(code) for code in table.codes[items]}
            want = {prefix: len({t for t in tuples if t[: len(prefix)] == prefix}) for prefix in node_of}
            assert {prefix: int(counts[node]) for prefix, node in node_of.items()} == want


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(["group", "suffix"]))
def test_walking_the_allowed_codes_reaches_every_live_leaf(seed, mode):
    table = catalogue(seed, mode)
    trie = PrefixTrie.of(table)
    seen = torch.from_numpy(np.random.default_rng(seed).integers(0, table.n_items + 1, size=(2, 30)))
    alive = trie.alive(seen)
    for row in range(2):
        nodes = [0]
        for level in range(trie.levels):
            grid = torch.tensor([nodes])
            allowed = trie.allowed(grid, level, alive[row : row + 1])[0]
            branch, code = allowed.nonzero(as_tuple=True)
            nodes = trie.step(grid[0, branch], code, level).tolist()
        live = (alive[row, trie.starts[-2] :] > 0).nonzero().flatten().tolist()
        assert trie.leaf(torch.tensor(nodes)).tolist() == live


def test_masks_along_a_path():
    table = catalogue(3, "suffix")
    trie = PrefixTrie.of(table)
    codes = torch.from_numpy(table.codes[[5, 9]]).unsqueeze(0)
    table_masks = trie.child_table() >= 0
    masks = trie.path_masks(codes)
    for which, item in enumerate((5, 9)):
        nodes = [0, *trie.path[table.leaf_of[item]].tolist()[:-1]]
        for level, node in enumerate(nodes):
            assert torch.equal(masks[level][0, which], table_masks[node, : trie.sizes[level]])


def test_a_hundred_thousand_items_fit_in_a_few_megabytes():
    table = resolve_collisions(random_codes(100_000, (256, 256, 256), seed=0), (256, 256, 256), "suffix")
    trie = PrefixTrie.of(table)
    dense = trie.starts[-2] * 256 * 4
    assert trie.n_leaves == 100_000
    assert trie.bytes() < 16e6 < 150e6 < dense
    alive = trie.alive(torch.randint(0, 100_001, (2, 700)))
    assert alive.dtype == torch.int32
    assert alive.shape == (2, trie.n_nodes)
    assert torch.equal(alive[:, 0], alive[:, trie.starts[-2] :].sum(1, dtype=torch.int32))
