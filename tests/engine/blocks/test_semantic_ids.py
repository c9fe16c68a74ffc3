"""Semantic ids: collisions, the item <-> code map, token numbers, hashes and files."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.blocks.semantic_ids import (
    SIDTable,
    SIDVocab,
    permuted_codes,
    random_codes,
    resolve_collisions,
)
from auto_research.runtime.errors import ConfigError, CorruptFile

CODES = np.array([(3, 1), (3, 1), (2, 5), (3, 1)])
POPULARITY = np.array([0, 4, 9, 1, 9])


def code_arrays():
    return st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=40).map(np.array)


def test_suffix_of_the_worked_example():
    table = resolve_collisions(CODES, (4, 6))
    assert table.codes.tolist() == [[-1, -1, -1], [3, 1, 0], [3, 1, 1], [2, 5, 0], [3, 1, 2]]
    assert table.sizes == (4, 6, 3)
    assert table.code_of(4).tolist() == [3, 1, 2]
    assert table.items_of((3, 1, 2)).tolist() == [4]
    assert table.items_of((3, 1, 3)).tolist() == []


def test_groups_are_ordered_by_popularity_and_then_by_item():
    table = resolve_collisions(CODES, (4, 6), "group", popularity=POPULARITY)
    assert table.sizes == (4, 6)
    assert table.items_of((3, 1)).tolist() == [2, 4, 1]
    assert table.items_of((2, 5)).tolist() == [3]
    assert table.leaves.tolist() == [[2, 5], [3, 1]]
    assert table.leaf_of.tolist() == [-1, 1, 1, 0, 1]
    assert table.group_items.tolist() == [[3, 0, 0], [2, 4, 1]]
    assert table.statistics()["shared_items"] == 0.75


@given(code_arrays())
def test_suffix_makes_the_map_a_bijection(codes):
    table = resolve_collisions(codes, (3, 4))
    assert len(table.leaves) == len(codes)
    for item in range(1, len(codes) + 1):
        assert table.items_of(table.code_of(item)).tolist() == [item]
    assert (table.codes[1:, :2] == codes).all()


@given(code_arrays(), st.randoms(use_true_random=False))
def test_groups_partition_the_items(codes, random):
    popularity = np.array([random.randrange(3) for _ in range(len(codes) + 1)])
    table = resolve_collisions(codes, (3, 4), "group", popularity=popularity)
    seen = []
    for leaf, code in enumerate(table.leaves):
        items = table.items_of(code)
        assert (table.codes[items] == code).all()
        assert (table.leaf_of[items] == leaf).all()
        keys = [(-popularity[i], i) for i in items]
        assert keys == sorted(keys)
        seen.extend(items.tolist())
    assert sorted(seen) == list(range(1, len(codes) + 1))


def test_suffix_size_can_be_given_and_is_checked():
    assert resolve_collisions(CODES, (4, 6), suffix_size=5).sizes == (4, 6, 5)
    with pytest.raises(ConfigError, match="3 items share"):
        resolve_collisions(CODES, (4, 6), suffix_size=2)


@pytest.mark.parametrize(
    ("codes", "sizes", "options"),
    [
        (CODES, (3, 6), {}),
        (CODES, (4,), {}),
        (CODES - 3, (4, 6), {}),
        (CODES.astype(float), (4, 6), {}),
        (CODES, (4, 6), {"mode": "group"}),
        (CODES, (4, 6), {"mode": "both"}),
    ],
)
def test_wrong_codes_are_refused(codes, sizes, options):
    with pytest.raises(ConfigError):
        resolve_collisions(codes, sizes, **options)


def test_tokens_are_offset_by_level_and_specials_follow():
    vocab = SIDVocab.of(resolve_collisions(CODES, (4, 6)), users=7)
    assert vocab.offsets.tolist() == [0, 4, 10]
    assert vocab.token(1, 5) == 9
    assert (vocab.bos, vocab.pad, vocab.size) == (13, 14, 22)
    assert vocab.tokens(np.array([[3, 1, 2], [-1, -1, -1]])).tolist() == [[3, 5, 12], [14, 14, 14]]
    assert vocab.codes(np.array([[3, 5, 12], [14, 14, 14]])).tolist() == [[3, 1, 2], [-1, -1, -1]]
    with pytest.raises(ConfigError, match="level"):
        vocab.codes(np.array([[5, 3, 12]]))
    users = vocab.user_token(np.arange(1, 400))
    assert users.min() == 15
    assert users.max() == 21
    assert len(set(users.tolist())) == 7


def test_user_tokens_never_change():
    vocab = SIDVocab.of(resolve_collisions(CODES, (4, 6)), users=128)
    # First outputs of splitmix64 seeded with 0 and with 1: 0xe220a8397b1dcdaf and 0x910a2dec89025cc1.
    assert (vocab.user_token(np.array([0, 1])) - vocab.n_codes - 2).tolist() == [0xAF % 128, 0xC1 % 128]


def test_bos_and_pad_do_not_depend_on_the_user_tokens():
    table = resolve_collisions(CODES, (4, 6))
    with_users, without = SIDVocab.of(table, users=128), SIDVocab.of(table)
    assert (with_users.bos, with_users.pad) == (without.bos, without.pad)
    with pytest.raises(ConfigError):
        without.user_token(3)


def test_hash_sees_codes_order_sizes_and_users():
    base = resolve_collisions(CODES, (4, 6), "group", popularity=POPULARITY)
    others = [
        resolve_collisions(CODES[::-1], (4, 6), "group", popularity=POPULARITY),
        resolve_collisions(CODES, (4, 6), "group", popularity=POPULARITY[::-1]),
        resolve_collisions(CODES, (4, 7), "group", popularity=POPULARITY),
        resolve_collisions(CODES, (4, 6)),
    ]
    assert len({table.content_hash for table in [base, *others]}) == 5
    assert SIDVocab.of(base).content_hash != SIDVocab.of(base, users=1).content_hash
    assert base.content_hash == resolve_collisions(CODES, (4, 6), "group", popularity=POPULARITY * 2).content_hash


def test_the_definition_of_the_hash_does_not_change():
    table = resolve_collisions(CODES, (4, 6), "group", popularity=POPULARITY)
    numbers = struct.pack("<14q", -1, -1, 3, 1, 3, 1, 2, 5, 3, 1, *(3, 2, 4, 1))
    assert table.content_hash == hashlib.sha256(b'{"mode":"group","sizes":[4,6]}\n' + numbers).hexdigest()


def test_saved_tables_and_vocabularies_come_back_equal(tmp_path):
    table = resolve_collisions(CODES, (4, 6), "group", popularity=POPULARITY)
    vocab = SIDVocab.of(table, users=5)
    table.save(tmp_path)
    vocab.save(tmp_path)
    loaded = SIDTable.load(tmp_path, expect=table.content_hash)
    assert loaded.content_hash == table.content_hash
    assert loaded.items_of((3, 1)).tolist() == [2, 4, 1]
    assert SIDVocab.load(tmp_path, loaded) == vocab
    assert {p.name for p in tmp_path.iterdir()} == {
        "semantic_ids.safetensors",
        "semantic_ids.json",
        "sid_vocab.json",
    }


def test_another_table_is_one_clear_error(tmp_path):
    table, other = resolve_collisions(CODES, (4, 6)), resolve_collisions(CODES[::-1], (4, 6))
    vocab = SIDVocab.of(table)
    table.save(tmp_path)
    vocab.save(tmp_path)
    for use in (
        lambda: SIDTable.load(tmp_path, expect=other.content_hash),
        lambda: SIDVocab.load(tmp_path, other),
        lambda: vocab.item_tokens(other),
        lambda: vocab.require(SIDVocab.of(other).content_hash, "model.safetensors"),
    ):
        with pytest.raises(ConfigError, match="was made with semantic ids") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_broken_files_are_refused(tmp_path):
    table = resolve_collisions(CODES, (4, 6))
    with pytest.raises(CorruptFile):
        SIDTable.load(tmp_path)
    table.save(tmp_path)
    resolve_collisions(CODES[::-1], (4, 6)).save(tmp_path / "other")
    arrays = tmp_path / "semantic_ids.safetensors"
    arrays.write_bytes((tmp_path / "other" / "semantic_ids.safetensors").read_bytes())
    with pytest.raises(CorruptFile, match="does not belong"):
        SIDTable.load(tmp_path)


@pytest.mark.parametrize(("items", "sizes"), [(60, (4, 4, 4)), (64, (4, 4, 4)), (50, (64, 64, 64, 2))])
def test_random_codes_are_distinct_uniform_and_seeded(items, sizes):
    codes = random_codes(items, sizes, seed=1)
    assert codes.shape == (items, len(sizes))
    assert len(np.unique(codes, axis=0)) == items
    assert (codes >= 0).all()
    assert (codes < np.array(sizes)).all()
    assert (codes == random_codes(items, sizes, seed=1)).all()
    assert (codes != random_codes(items, sizes, seed=2)).any()


def test_random_codes_use_every_code_alike():
    codes = random_codes(4000, (8, 8, 8, 16), seed=0)
    for level, size in enumerate((8, 8, 8, 16)):
        counts = np.bincount(codes[:, level], minlength=size)
        assert counts.min() > 0.7 * 4000 / size
        assert counts.max() < 1.3 * 4000 / size


def test_too_few_tuples_are_refused():
    with pytest.raises(ConfigError, match="fewer than"):
        random_codes(65, (4, 4, 4), seed=0)


def test_permuted_codes_keep_the_groups():
    codes = random_codes(60, (4, 4, 4), seed=1)
    shuffled = permuted_codes(codes, seed=1)
    assert sorted(map(tuple, shuffled.tolist())) == sorted(map(tuple, codes.tolist()))
    assert (shuffled != codes).any(axis=1).mean() > 0.8
