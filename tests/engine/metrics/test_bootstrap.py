"""Paired bootstrap: known answers, pairing, and vectorised resamples equal to plain ones."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from auto_research.metrics import bootstrap
from auto_research.metrics.bootstrap import (
    Interval,
    WeightedAuc,
    auc_interval,
    interval_mean,
    paired_auc,
    paired_cluster_mean,
    paired_mean,
)


def test_interval_of_the_mean_has_the_textbook_width():
    values = np.random.default_rng(0).normal(3.0, 2.0, 4000)
    got = interval_mean(values)
    half = 1.96 * values.std() / np.sqrt(4000)
    assert got.delta == pytest.approx(values.mean())
    assert got.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert got.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_pairing_removes_what_both_arms_share():
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 10, 500)
    a, b = shared + 0.2 + rng.normal(0, 0.1, 500), shared + rng.normal(0, 0.1, 500)
    got = paired_mean(a, b)
    assert got.excludes_zero()
    assert got.high - got.low < 0.05
    assert not paired_mean(a, rng.permutation(b)).excludes_zero()


def test_equal_arms_give_a_zero_interval():
    values = np.arange(10.0)
    assert paired_mean(values, values) == Interval(0.0, 0.0, 0.0)
    assert not paired_mean(values, values).excludes_zero()


def test_same_seed_same_interval():
    a, b = np.random.default_rng(2).random((2, 50))
    assert paired_mean(a, b) == paired_mean(a, b)
    assert paired_mean(a, b) != paired_mean(a, b, seed=1)


def test_chunks_do_not_change_the_result(monkeypatch):
    a, b = np.random.default_rng(3).random((2, 50))
    whole = paired_mean(a, b, resamples=100)
    monkeypatch.setattr(bootstrap, "CELLS_PER_CHUNK", 350)
    again = paired_mean(a, b, resamples=100)
    assert (again.low, again.high) == (pytest.approx(whole.low), pytest.approx(whole.high))


def rows(seed: int, users: int = 60, count: int = 400):
    rng = np.random.default_rng(seed)
    user = rng.integers(1000, 1000 + users, count)
    label = rng.random(count) < 0.6
    good = np.round(rng.random(count) + 0.8 * label, 1)  # rounded: many ties
    bad = np.round(rng.random(count) + 0.1 * label, 1)
    return user, label, good, bad


def test_cluster_auc_equals_auc_of_explicitly_repeated_users():
    user, label, good, bad = rows(4)
    got = paired_auc(user, label, good, bad, resamples=50)
    ids, code = np.unique(user, return_inverse=True)
    samples = []
    for counts in bootstrap._draws(len(ids), 50, 0, len(user)):
        for draw in counts.astype(int):
            index = np.repeat(np.arange(len(user)), draw[code])
            samples.append(roc_auc_score(label[index], good[index]) - roc_auc_score(label[index], bad[index]))
    low, high = np.percentile(samples, [2.5, 97.5])
    assert got.delta == pytest.approx(roc_auc_score(label, good) - roc_auc_score(label, bad))
    assert (got.low, got.high) == (pytest.approx(low), pytest.approx(high))
    assert got.excludes_zero()


def test_auc_averaged_over_seeds_equals_weighted_auc_on_the_same_draws(monkeypatch):
    user, label, good, bad = rows(7)
    seeds = np.stack([good, bad, good * 0.5])
    got = paired_auc(user, label, seeds, np.stack([bad, bad]), resamples=60)
    ids, code = np.unique(user, return_inverse=True)
    weights = np.concatenate(list(bootstrap._draws(len(ids), 60, 0, len(ids))))[:, code]
    a = sum(WeightedAuc(label, score)(weights) for score in seeds) / 3
    expected = np.percentile(a - WeightedAuc(label, bad)(weights), [2.5, 97.5])
    assert [got.low, got.high] == pytest.approx(expected.tolist())
    monkeypatch.setattr(bootstrap, "CELLS_PER_CHUNK", 1000)
    chunked = paired_auc(user, label, seeds, np.stack([bad, bad]), resamples=60)
    assert [chunked.delta, chunked.low, chunked.high] == pytest.approx([got.delta, got.low, got.high])


def test_weighted_auc_of_equal_weights_is_scikit_learns():
    _, label, good, _ = rows(8)
    assert WeightedAuc(label, good)(np.ones((1, len(label))))[0] == pytest.approx(roc_auc_score(label, good))
    assert np.isnan(WeightedAuc(np.ones(2, dtype=bool), np.array([0.1, 0.2]))(np.ones((1, 2)))[0])


def test_interval_of_one_auc_is_that_of_explicitly_repeated_users():
    user, label, good, _ = rows(4)
    got = auc_interval(user, label, good, resamples=50)
    assert got.delta == pytest.approx(roc_auc_score(label, good))
    ids, code = np.unique(user, return_inverse=True)
    counts = np.concatenate(list(bootstrap._draws(len(ids), 50, 0, len(ids)))).astype(int)
    plain = [roc_auc_score(np.repeat(label, c[code]), np.repeat(good, c[code])) for c in counts]
    assert (got.low, got.high) == pytest.approx(tuple(np.percentile(plain, [2.5, 97.5])))


def test_auc_of_an_arm_against_itself_is_no_difference():
    user, label, good, _ = rows(5)
    assert paired_auc(user, label, good, good, resamples=20) == Interval(0.0, 0.0, 0.0)


def test_cluster_mean_is_wider_than_row_mean_when_users_agree_inside():
    rng = np.random.default_rng(6)
    user = np.repeat(np.arange(40), 25)
    a = np.repeat(rng.normal(0.3, 1, 40), 25)
    b = np.zeros(1000)
    clustered, plain = paired_cluster_mean(user, a, b), paired_mean(a, b)
    assert clustered.delta == pytest.approx(plain.delta)
    assert clustered.high - clustered.low > 4 * (plain.high - plain.low)


def test_every_unit_is_drawn_equally_often():
    counts = np.concatenate(list(bootstrap._draws(7, 3000, 0, 7)))
    assert counts.shape == (3000, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert np.abs(counts.mean(axis=0) - 1).max() < 0.08


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="shape"):
        paired_mean(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="both labels"):
        paired_auc([1, 2], [1, 1], [0.1, 0.2], [0.1, 0.2])
    with pytest.raises(ValueError, match="non-empty"):
        interval_mean(np.zeros(0))
