"""Hyperplane codes: sides of planes through the mean."""

from __future__ import annotations

import numpy as np
import pytest

from auto_research.blocks.lsh_codes import lsh_codes
from auto_research.runtime.errors import ConfigError

X = np.random.default_rng(0).standard_normal((400, 8))


def test_opposite_rows_have_complementary_codes():
    x = np.concatenate([X, -X])
    codes = lsh_codes(x, 3, 4, seed=0)
    assert codes.shape == (800, 3)
    assert (codes[:400] + codes[400:] == 15).all()


def test_codes_do_not_depend_on_place_or_scale():
    codes = lsh_codes(X, 2, 5, seed=0)
    assert (lsh_codes(X * 3, 2, 5, seed=0) == codes).all()
    assert (lsh_codes(X + 100, 2, 5, seed=0) == codes).all()
    assert (lsh_codes(X, 2, 5, seed=1) != codes).any()


def test_every_plane_halves_the_rows_and_levels_differ():
    codes = lsh_codes(X, 2, 4, seed=0)
    for level in range(2):
        for bit in range(4):
            assert 0.4 < ((codes[:, level] >> bit) & 1).mean() < 0.6
    assert (codes[:, 0] != codes[:, 1]).mean() > 0.8


def differing(a, b):
    return np.mean([int(x).bit_count() for x in a ^ b])


def test_near_rows_share_more_bits_than_far_ones():
    near = X + 0.1 * np.random.default_rng(1).standard_normal(X.shape)
    bits = lsh_codes(np.concatenate([X, near, np.roll(X, 1, axis=0)]), 1, 16, seed=0)[:, 0]
    first, second, third = bits[:400], bits[400:800], bits[800:]
    assert differing(first, second) < 2
    assert differing(first, third) > 6


@pytest.mark.parametrize(("x", "levels", "bits"), [(X[0], 1, 1), (X, 0, 1), (X, 1, 0), (X, 1, 21), (X[:0], 1, 1)])
def test_wrong_input_is_refused(x, levels, bits):
    with pytest.raises(ConfigError):
        lsh_codes(x, levels, bits, seed=0)
