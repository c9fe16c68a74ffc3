"""Each original format is read, and damage is told in one line."""

from __future__ import annotations

import zipfile

import archives
import pytest

from auto_research.data.interactions import load_interactions, write_canonical
from auto_research.data.readers import MOVIE_GENRES, READERS, read_source, split_title
from auto_research.runtime.errors import ConfigError, CorruptFile

MANIFEST = {"decades": [1920, 1990]}


@pytest.fixture
def both(tmp_path):
    wheel = archives.write_zip(tmp_path / "recbole.whl", archives.recbole_members())
    official = archives.write_zip(tmp_path / "ml-100k.zip", archives.grouplens_members())
    return {"recbole-ml-100k": wheel, "grouplens-ml-100k": official}


def test_both_movielens_100k_archives_give_byte_identical_parquet(both, tmp_path):
    written = {}
    for layout, path in both.items():
        out = tmp_path / layout
        write_canonical(READERS[layout](path), "movielens-100k", out, MANIFEST)
        written[layout] = {f.name: f.read_bytes() for f in out.glob("*.parquet")}
    first, second = written.values()
    assert sorted(first) == ["items.parquet", "ratings.parquet", "users.parquet"]
    assert first == second


def test_movielens_100k_fields_are_read(both, tmp_path):
    write_canonical(READERS["grouplens-ml-100k"](both["grouplens-ml-100k"]), "movielens-100k", tmp_path, MANIFEST)
    data = load_interactions(tmp_path)
    assert (len(data), data.n_users, data.n_items) == (7, 2, 5)
    assert data.item_title[1:] == ["GoldenEye", "Richard III", "unknown", "Misérables, Les", "Land Before Time III"]
    assert data.item_decade.tolist() == [0, 8, 1, 9, 8, 8]  # 0 padding, 1 = 1920s, 8 = 1990s, 9 unknown
    assert data.item_genres[2].nonzero()[0].tolist() == [MOVIE_GENRES.index("Drama"), MOVIE_GENRES.index("War")]
    assert data.user_fields["age"].tolist() == [0, 2, 7]
    assert data.user_fields["gender"].tolist() == [0, 2, 1]
    assert data.user_fields["zip"].tolist() == [0, 9, 11]
    assert data.vocab == {"age": 8, "gender": 3, "occupation": 3, "zip": 12, "decade": 10}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GoldenEye (1995)", ("GoldenEye", 1995)),
        ("Shadow and Light (1996) ", ("Shadow and Light", 1996)),
        ("Time III (1995) (V)", ("Time III", 1995)),
        ("Jungle, The (Jungla) (1954)", ("Jungle, The (Jungla)", 1954)),
        ("unknown", ("unknown", 0)),
        ("unkonwn (unkonwn)", ("unknown", 0)),
        ("1984", ("1984", 0)),
    ],
)
def test_year_is_cut_from_title(text, expected):
    assert split_title(text) == expected


def test_movielens_1m_format(tmp_path):
    path = archives.write_zip(tmp_path / "ml-1m.zip", archives.ml_1m_members())
    write_canonical(READERS["grouplens-ml-1m"](path), "movielens-1m", tmp_path, {"decades": [1910, 2000]})
    data = load_interactions(tmp_path)
    assert data.item_title[1:] == ["James and the Giant Peach", "One Flew Over the Cuckoo's Nest"]  # 661 before 1193
    assert data.user.tolist() == [1, 1, 2]
    assert data.item.tolist() == [2, 1, 2]
    assert data.rating.tolist() == [5, 3, 4]
    assert data.user_fields["age"].tolist() == [0, 1, 7]  # the codes 1 and 56 are bucket edges already
    assert data.item_decade.tolist() == [0, 9, 7]
    assert data.vocab["decade"] == 12


def test_amazon_format(tmp_path):
    path = archives.write_amazon(tmp_path / "reviews_Beauty_5.json.gz")
    write_canonical(READERS["amazon-reviews"](path), "amazon-beauty-5core", tmp_path, {"decades": [1990, 1990]})
    data = load_interactions(tmp_path)
    assert data.user.tolist() == [1, 1, 2]
    assert sorted(data.item[:2].tolist()) == [1, 2]
    assert data.user_fields == {}
    assert data.genre_names == ["unknown"]
    assert data.timestamp.tolist() == [1300000000, 1300000000, 1400000000]


@pytest.mark.parametrize("layout", sorted(READERS))
def test_truncated_archive_is_corrupt(layout, tmp_path):
    whole = {
        "recbole-ml-100k": archives.recbole_members,
        "grouplens-ml-100k": archives.grouplens_members,
        "grouplens-ml-1m": archives.ml_1m_members,
    }
    path = tmp_path / "source"
    if layout in whole:
        archives.write_zip(path, whole[layout]())
    else:
        archives.write_amazon(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptFile, match="source"):
        read_source(path, layout, "any")


def test_flipped_byte_inside_a_member_is_corrupt(tmp_path):
    path = archives.write_zip(tmp_path / "a.zip", archives.grouplens_members())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("ml-100k/u.data")
    content = bytearray(path.read_bytes())
    content[info.header_offset + 30 + len(info.filename) + 5] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"u\.data"):
        read_source(path, "grouplens-ml-100k", "movielens-100k")


@pytest.mark.parametrize("line", [b"1\t2\tgood\t5\n", b"1\t2\t3\n"])
def test_bad_rating_line_is_corrupt(line, tmp_path):
    members = archives.grouplens_members()
    members["ml-100k/u.data"] += line
    path = archives.write_zip(tmp_path / "a.zip", members)
    with pytest.raises(CorruptFile, match=r"a\.zip"):
        read_source(path, "grouplens-ml-100k", "movielens-100k")


def test_missing_member_is_named(tmp_path):
    members = archives.grouplens_members()
    del members["ml-100k/u.item"]
    path = archives.write_zip(tmp_path / "a.zip", members)
    with pytest.raises(CorruptFile, match=r"ml-100k/u\.item is missing"):
        read_source(path, "grouplens-ml-100k", "movielens-100k")


def test_rated_item_without_record_is_corrupt(tmp_path):
    members = archives.grouplens_members()
    members["ml-100k/u.data"] += b"1\t9999\t3\t5\n"
    path = archives.write_zip(tmp_path / "a.zip", members)
    with pytest.raises(CorruptFile, match="9999"):
        write_canonical(READERS["grouplens-ml-100k"](path), "movielens-100k", tmp_path, MANIFEST)


def test_present_file_without_reader_says_so(tmp_path):
    with pytest.raises(ConfigError, match="kuairand-pure"):
        read_source(tmp_path / "x", None, "kuairand-pure")
