"""Training windows of the sequence models."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from auto_research.data.sequences import LeaveTwoOut
from auto_research.train.next_item import EpochWindows, NextItemBudget, cut_windows, recent_items

CPU = torch.device("cpu")


def sequences(*train):
    lengths = [len(items) for items in train]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    users = np.arange(1, len(train) + 1)
    items = np.concatenate([np.asarray(t, dtype=np.int64) for t in train])
    return LeaveTwoOut(len(train), 50, users, items, starts, np.full(len(train), 49), np.full(len(train), 50), "test")


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), length=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_event_but_the_first_is_a_target_exactly_once(lengths, length, seed):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    first, size = cut_windows(starts, length, np.random.default_rng(seed))
    assert (size >= 1).all()
    assert (size <= length).all()
    targets = np.concatenate([np.arange(a, a + n) + 1 for a, n in zip(first, size, strict=True)] or [[]])
    expected = np.concatenate([np.arange(a + 1, b) for a, b in itertools.pairwise(starts)] or [[]])
    assert sorted(targets.tolist()) == expected.tolist()


def test_batches_pair_each_item_with_its_successor_and_pad_on_the_left():
    data = sequences([1, 2, 3, 4, 5], [11, 12], [21])
    epoch = EpochWindows(data, NextItemBudget(length=3, batch=2), seed=1, epoch=0, device=CPU)
    pairs = []
    for index in range(len(epoch)):
        batch = epoch[index]
        assert batch.items.shape[0] * batch.items.shape[1] <= 6
        for items, target in zip(batch.items.tolist(), batch.target.tolist(), strict=True):
            real = [i for i, item in enumerate(items) if item]
            assert real == list(range(len(items) - len(real), len(items)))
            assert all(t == 0 for i, t in zip(items, target, strict=True) if i == 0)
            pairs += [(i, t) for i, t in zip(items, target, strict=True) if i]
    assert sorted(pairs) == [(1, 2), (2, 3), (3, 4), (4, 5), (11, 12)]


def test_windows_are_a_function_of_seed_and_epoch():
    data = sequences(list(range(1, 40)), list(range(3, 49)))
    budget = NextItemBudget(length=5, batch=2)

    def read(seed, epoch):
        windows = EpochWindows(data, budget, seed, epoch, CPU)
        return [windows[i].items.tolist() for i in range(len(windows))]

    assert read(1, 0) == read(1, 0)
    assert read(1, 0) != read(1, 1)
    assert read(1, 0) != read(2, 0)


def test_recent_items_end_before_the_target():
    data = sequences([1, 2, 3, 4, 5], [11])
    both = np.array([0, 1])
    assert recent_items(data, "valid", both, 3).tolist() == [[3, 4, 5], [0, 0, 11]]
    assert recent_items(data, "test", both, 3).tolist() == [[4, 5, 49], [0, 11, 49]]
