"""Prepared folders are complete or refused, and say where they came from."""

from __future__ import annotations

import archives
import pytest

from auto_research.data import prepare as preparation
from auto_research.data.folder import read_manifest, read_tables
from auto_research.data.interactions import load_interactions
from auto_research.data.prepare import prepare, prepare_all, prepare_table
from auto_research.data.requests import RequestTable
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.sources import DatasetEntry, Source
from auto_research.runtime.errors import CorruptFile, DataMissing, UnknownName, describe_error
from auto_research.runtime.files import read_json, sha256_bytes, sha256_file, write_json


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A toy data set prepared from a hand-made archive that lies in the downloads folder."""
    downloads = tmp_path / "data/downloads"
    downloads.mkdir(parents=True)
    path = archives.write_zip(downloads / "toy.zip", archives.grouplens_members())
    source = Source("local", "file", "toy.zip", "grouplens-ml-100k", sha256_file(path))
    entry = DatasetEntry("toy", "Toy set", "Toy licence note.", (1920, 1990), (source,))
    monkeypatch.setattr(preparation, "dataset_entry", lambda name: entry)
    prepare_all("toy", tmp_path / "toy", tmp_path / "data", offline=True)
    return tmp_path / "toy"


def test_manifest_keeps_source_licence_hashes_and_counts(prepared):
    for table in ("canonical", "sequences", "requests"):
        manifest = read_json(prepared / table / "manifest.json")
        assert manifest["licence"] == "Toy licence note."
        assert manifest["source"]["name"] == "local"
        assert (manifest["dataset"], manifest["table"], manifest["format_version"]) == ("toy", table, 1)
        for name, entry in manifest["files"].items():
            assert entry["sha256"] == sha256_file(prepared / table / name)
    assert read_json(prepared / "canonical/manifest.json")["counts"] == {"ratings": 7, "users": 2, "items": 5}
    assert read_json(prepared / "sequences/manifest.json")["counts"]["train_events"] == 3


def test_licence_note_is_printed_once(prepared, tmp_path, capsys):
    capsys.readouterr()
    prepare("toy", tmp_path / "again", tmp_path / "data")
    assert capsys.readouterr().err.count("Toy licence note.") == 1
    prepare_table(tmp_path / "again", "sequences", tmp_path / "again-sequences")
    assert "licence" not in capsys.readouterr().err


def test_preparing_again_gives_the_same_bytes(prepared, tmp_path):
    prepare_all("toy", tmp_path / "second", tmp_path / "data")
    first = {f.relative_to(prepared): f.read_bytes() for f in prepared.rglob("*") if f.is_file()}
    second = {
        f.relative_to(tmp_path / "second"): f.read_bytes() for f in (tmp_path / "second").rglob("*") if f.is_file()
    }
    assert first == second
    assert len(first) == 12


LOADERS = {"canonical": load_interactions, "sequences": LeaveTwoOut.load, "requests": RequestTable.load}


@pytest.mark.parametrize("table", sorted(LOADERS))
def test_truncated_parquet_is_one_line(prepared, table):
    victim = sorted((prepared / table).glob("*.parquet"))[0]
    victim.write_bytes(victim.read_bytes()[:-20])
    with pytest.raises(CorruptFile) as error:
        LOADERS[table](prepared / table)
    line, code = describe_error(error.value)
    assert victim.name in line
    assert code == 2


def test_parquet_that_matches_its_manifest_but_cannot_be_read_is_corrupt(prepared):
    victim = prepared / "canonical/ratings.parquet"
    victim.write_bytes(b"PAR1 is not enough")
    manifest = read_json(prepared / "canonical/manifest.json")
    manifest["files"]["ratings.parquet"] |= {"sha256": sha256_file(victim), "bytes": victim.stat().st_size}
    write_json(prepared / "canonical/manifest.json", manifest)
    with pytest.raises(CorruptFile, match=r"ratings\.parquet"):
        load_interactions(prepared / "canonical")


def test_missing_table_is_corrupt(prepared):
    (prepared / "canonical/items.parquet").unlink()
    with pytest.raises(CorruptFile, match=r"items\.parquet"):
        read_tables(prepared / "canonical", ("items",))


def test_unprepared_folder_names_the_command(tmp_path):
    with pytest.raises(DataMissing, match="prepare_data"):
        read_manifest(tmp_path)
    with pytest.raises(DataMissing):
        prepare_table(tmp_path, "sequences", tmp_path / "out")


def test_unknown_table_lists_the_known_ones(prepared, tmp_path):
    with pytest.raises(UnknownName, match="canonical, sequences, requests"):
        prepare_table(prepared, "graph", tmp_path / "out")


def test_real_data_gives_the_pinned_canonical_order(movielens_100k):
    """Every published number stands on this order, whichever source served it."""
    data = load_interactions(movielens_100k)
    columns = b"".join(c.tobytes() for c in (data.user, data.item, data.rating, data.timestamp))
    assert sha256_bytes(columns) == "a5ce471d951212989bcf5fb7372c891d82edc890700093b16e583d847100a099"
    manifest = read_manifest(movielens_100k / "canonical")
    assert manifest["counts"] == {"ratings": 100_000, "users": 943, "items": 1682}
    assert "GroupLens" in manifest["licence"]
    assert manifest["source"]["name"] in {"recbole-wheel", "official-archive"}
