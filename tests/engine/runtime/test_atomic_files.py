"""A file is complete or absent."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.runtime import files
from auto_research.runtime.errors import CorruptFile


def test_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    target = tmp_path / "a.json"
    files.write_json(target, {"old": 1})

    def stop_half_way():
        with files.atomic_path(target) as temporary:
            temporary.write_text("{")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        stop_half_way()
    assert files.read_json(target) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_target_is_absent_until_the_write_is_over(tmp_path):
    target = tmp_path / "deep" / "table.parquet"
    with files.atomic_path(target) as temporary:
        assert temporary.suffix == ".parquet"
        assert temporary.parent == target.parent
        temporary.write_bytes(b"x")
        assert not target.exists()
    assert target.read_bytes() == b"x"


def test_a_reader_of_the_old_file_never_sees_a_mixture(tmp_path):
    target = tmp_path / "a.txt"
    files.write_text(target, "old and long")
    with target.open() as reader:
        files.write_text(target, "new")
        assert reader.read() == "old and long"
    assert target.read_text() == "new"


def test_json_text_is_sorted_and_ends_with_a_newline(tmp_path):
    files.write_json(tmp_path / "a.json", {"b": "名", "a": [1]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n "a": [\n  1\n ],\n "b": "名"\n}\n'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_json_cannot_hold_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "a.json", {"a": value})
    assert list(tmp_path.iterdir()) == []


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": 1')
    with pytest.raises(CorruptFile, match=r"a\.json is not valid JSON"):
        files.read_json(tmp_path / "a.json")


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=5))
def test_canonical_json_does_not_depend_on_order(value):
    backwards = dict(reversed(value.items()))
    assert files.canonical_json(value) == files.canonical_json(backwards)
    assert json.loads(files.canonical_json(value)) == value


def test_hashes_agree(tmp_path):
    (tmp_path / "a").write_bytes("é".encode())
    expected = hashlib.sha256("é".encode()).hexdigest()
    assert files.sha256_file(tmp_path / "a") == files.sha256_text("é") == files.sha256_bytes("é".encode()) == expected
