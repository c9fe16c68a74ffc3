"""Sources are tried in order, checked against pins, and fail with one line that says what to do."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import archives
import pytest

from auto_research.data.sources import DatasetEntry, Source, fetch_source, load_registry
from auto_research.runtime.errors import ChecksumMismatch, DataMissing, UnknownName

ROOT = Path(__file__).resolve().parents[3]
WHEEL = "toyset-1.0-py3-none-any.whl"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path) -> Path:
    """A wheel pip accepts, in a find-links folder."""
    members = archives.recbole_members()
    members |= {
        "toyset-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toyset\nVersion: 1.0\n",
        "toyset-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "toyset-1.0.dist-info/RECORD": b"",
    }
    (tmp_path / "links").mkdir()
    return archives.write_zip(tmp_path / "links" / WHEEL, members)


@pytest.fixture
def only_links(wheel, monkeypatch) -> Path:
    """pip sees nothing but the find-links folder."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return wheel


def entry(*sources: Source) -> DatasetEntry:
    return DatasetEntry("toy", "Toy", "free", (1920, 1990), sources)


def wheel_source(path: Path, **changes) -> Source:
    values = {"name": "wheel", "kind": "wheel", "file": WHEEL, "sha256": sha256(path), "package": "toyset"}
    return Source(**(values | {"version": "1.0", "layout": "recbole-ml-100k"} | changes))


def url_source(path: Path, **changes) -> Source:
    values = {"name": "archive", "kind": "url", "file": "archive.zip", "sha256": sha256(path), "url": path.as_uri()}
    return Source(**(values | changes))


def test_wheel_comes_through_pip_and_is_not_installed(only_links, tmp_path):
    path, name = fetch_source("toy", tmp_path / "data", entry=entry(wheel_source(only_links)))
    assert (path, name) == (tmp_path / "data/downloads" / WHEEL, "wheel")
    assert path.read_bytes() == only_links.read_bytes()
    assert [f.name for f in path.parent.iterdir() if not f.name.endswith(".lock")] == [WHEEL]


def test_second_source_serves_when_the_first_does_not_answer(only_links, tmp_path):
    missing = wheel_source(only_links, package="not-there-at-all", file="not_there_at_all-1.0-py3-none-any.whl")
    path, name = fetch_source("toy", tmp_path / "data", entry=entry(missing, url_source(only_links)))
    assert (path.name, name) == ("archive.zip", "archive")


def test_file_in_downloads_comes_before_any_fetch(wheel, tmp_path):
    downloads = tmp_path / "data/downloads"
    downloads.mkdir(parents=True)
    (downloads / "archive.zip").write_bytes(wheel.read_bytes())
    unreachable = url_source(wheel, name="first", file="first.zip", url=(tmp_path / "absent").as_uri())
    path, name = fetch_source("toy", tmp_path / "data", entry=entry(unreachable, url_source(wheel)))
    assert (path, name) == (downloads / "archive.zip", "archive")


def test_corrupt_file_is_moved_aside_and_a_rerun_fetches_anew(only_links, tmp_path):
    downloads = tmp_path / "data/downloads"
    downloads.mkdir(parents=True)
    (downloads / WHEEL).write_bytes(b"half a wheel")
    known = entry(wheel_source(only_links))
    with pytest.raises(ChecksumMismatch, match="moved to"):
        fetch_source("toy", tmp_path / "data", entry=known)
    (aside,) = downloads.glob("*.corrupt-*")
    assert aside.read_bytes() == b"half a wheel"
    path, _ = fetch_source("toy", tmp_path / "data", entry=known)
    assert path.read_bytes() == only_links.read_bytes()
    assert aside.exists()


def test_downloaded_file_that_is_not_the_pinned_one_never_takes_its_name(wheel, tmp_path):
    with pytest.raises(ChecksumMismatch):
        fetch_source("toy", tmp_path / "data", entry=entry(url_source(wheel, sha256="0" * 64)))
    assert not (tmp_path / "data/downloads/archive.zip").exists()


def test_md5_is_checked_when_it_is_the_only_pin(wheel, tmp_path):
    right = hashlib.md5(wheel.read_bytes(), usedforsecurity=False).hexdigest()
    fetch_source("toy", tmp_path / "a", entry=entry(url_source(wheel, sha256=None, md5=right)))
    with pytest.raises(ChecksumMismatch):
        fetch_source("toy", tmp_path / "b", entry=entry(url_source(wheel, sha256=None, md5="0" * 32)))


def test_offline_without_a_file_names_folder_and_command(only_links, tmp_path, monkeypatch):
    with pytest.raises(DataMissing) as error:
        fetch_source("toy", tmp_path / "data", offline=True, entry=entry(wheel_source(only_links)))
    text = str(error.value)
    assert str(tmp_path / "data/downloads") in text
    assert WHEEL in text
    assert "scripts/prepare_data.py --dataset toy" in text
    monkeypatch.setenv("AUTO_RESEARCH_OFFLINE", "1")
    with pytest.raises(DataMissing):
        fetch_source("toy", tmp_path / "data", entry=entry(wheel_source(only_links)))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["kuairand-pure", "minionerec", "amazon-beauty-5core"])
def test_sets_without_a_pinned_download_ask_for_the_file(name, tmp_path):
    registered = load_registry()[name]
    with pytest.raises(DataMissing, match=registered.sources[0].file):
        fetch_source(name, tmp_path)


def test_unknown_dataset_lists_the_known_ones(tmp_path):
    with pytest.raises(UnknownName, match="movielens-100k"):
        fetch_source("movielens-2m", tmp_path)


def test_every_fetched_source_is_pinned_by_sha256():
    sources = [s for known in load_registry().values() for s in known.sources]
    assert len(sources) >= 6
    assert all(s.sha256 for s in sources if s.kind != "file")


def run_script(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_no_network_and_no_data_is_one_line_and_exit_code_2(tmp_path):
    closed = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = run_script(
        "--dataset-dir", "d", cwd=tmp_path, http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9", **closed
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "d/downloads" in errors[0]
    assert "Traceback" not in done.stderr


def test_corrupt_wheel_is_one_line_and_exit_code_2(tmp_path):
    wheel = tmp_path / "d/downloads/recbole-1.2.1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"not a wheel")
    done = run_script("--dataset-dir", "d", "--offline", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert [f.read_bytes() for f in wheel.parent.glob("*.corrupt-*")] == [b"not a wheel"]
