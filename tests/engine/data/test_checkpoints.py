"""Checkpoints: pinned files from a wheel or from the hub's local cache, refused when they are not the pinned ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import archives
import pytest

from auto_research.data.checkpoints import (
    CheckpointEntry,
    CheckpointSource,
    checkpoint_entry,
    checkpoint_manifest,
    fetch_checkpoint,
    load_checkpoints,
)
from auto_research.runtime.errors import ChecksumMismatch, ConfigError, CorruptFile, DataMissing, UnknownName

CONTENT = {"config.json": b'{"a": 1}', "weights.bin": b"\x00\x01\x02"}
WHEEL = "toymodel-1.0-py3-none-any.whl"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel(tmp_path) -> Path:
    """The wheel in the downloads folder, with a member no one asked for."""
    downloads = tmp_path / "data" / "downloads"
    downloads.mkdir(parents=True)
    members = {f"toymodel/model/{name}": content for name, content in CONTENT.items()}
    return archives.write_zip(downloads / WHEEL, members | {"toymodel/__init__.py": b"raise SystemExit"})


def toy(wheel: Path | None = None, hub: bool = False, **files: str) -> CheckpointEntry:
    sources = [CheckpointSource("hub", "hub", repository="toy/model", revision=REVISION)] if hub else []
    if wheel is not None:
        source = CheckpointSource(
            "wheel", "wheel", package="toymodel", version="1.0", file=WHEEL, folder="toymodel/model"
        )
        sources.append(replace(source, sha256=sha256(wheel.read_bytes())))
    pins = {name: sha256(content) for name, content in CONTENT.items()}
    return CheckpointEntry("toy", "Toy", "free", pins | files, tuple(sources))


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """A local hub cache that holds the pinned revision; the hub itself is out of reach."""
    constants = pytest.importorskip("huggingface_hub.constants")
    snapshot = tmp_path / "hub" / "models--toy--model" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name, content in CONTENT.items():
        (snapshot / name).write_bytes(content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return snapshot


def test_a_wheel_in_downloads_serves_offline(tmp_path, wheel):
    manifest = fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", offline=True, entry=toy(wheel, hub=True))
    assert manifest["source"]["name"] == "wheel"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "manifest.json", "weights.bin"]
    assert (tmp_path / "out" / "weights.bin").read_bytes() == CONTENT["weights.bin"]
    assert checkpoint_manifest(tmp_path / "out", "toy") == manifest


def test_the_hub_cache_serves_offline(tmp_path, hub_cache):
    manifest = fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", entry=toy(hub=True))
    assert manifest["source"] == {"name": "hub", "kind": "hub", "repository": "toy/model", "revision": REVISION}
    assert (tmp_path / "out" / "config.json").read_bytes() == CONTENT["config.json"]


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path, wheel, hub_cache):
    for source in (toy(wheel, **{"weights.bin": "0" * 64}), toy(hub=True, **{"weights.bin": "0" * 64})):
        with pytest.raises(ChecksumMismatch, match=r"weights\.bin"):
            fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", entry=source)
        assert not (tmp_path / "out" / "weights.bin").exists()
        assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_changed_wheel_is_moved_aside(tmp_path, wheel):
    entry = toy(wheel)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ChecksumMismatch, match="moved to"):
        fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", entry=entry)


def test_a_wheel_without_the_member_is_one_line(tmp_path, wheel):
    with pytest.raises(CorruptFile, match="not the expected archive"):
        fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", entry=toy(wheel, **{"vocab.txt": "0" * 64}))


def test_nothing_available_says_what_to_do(tmp_path, wheel, hub_cache):
    entry = toy(wheel, hub=True)
    wheel.unlink()
    (hub_cache / "config.json").unlink()
    with pytest.raises(DataMissing) as caught:
        fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", offline=True, entry=entry)
    text = str(caught.value)
    assert "\n" not in text
    for part in ("hub: not in the local cache", "wheel: offline", WHEEL, "--table checkpoint"):
        assert part in text


def test_a_damaged_folder_is_noticed(tmp_path, wheel):
    fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", entry=toy(wheel))
    (tmp_path / "out" / "config.json").write_bytes(b'{"a": 2}')
    with pytest.raises(CorruptFile, match=r"config\.json"):
        checkpoint_manifest(tmp_path / "out", "toy")
    with pytest.raises(DataMissing, match="--table checkpoint"):
        checkpoint_manifest(tmp_path / "nowhere", "toy")


def test_the_registry_pins_revisions_and_every_file(tmp_path):
    entry = load_checkpoints()["minilm-l6-v2"]
    assert [source.kind for source in entry.sources] == ["hub", "wheel"]
    assert "model.safetensors" in entry.files
    assert not any(name.endswith((".bin", ".pkl", ".pt", ".py")) for name in entry.files)
    with pytest.raises(UnknownName, match="minilm-l6-v2"):
        checkpoint_entry("minilm")
    loose = tmp_path / "checkpoints.yaml"
    loose.write_text(
        "toy: {title: Toy, licence: free, files: {a: " + "e" * 64 + "}, "
        "sources: [{name: hub, kind: hub, repository: toy/model, revision: main}]}\n"
    )
    with pytest.raises(ConfigError, match="revision"):
        load_checkpoints(loose)


def test_a_quantised_wheel_needs_the_pinned_archive_and_its_member(tmp_path):
    downloads = tmp_path / "data" / "downloads"
    downloads.mkdir(parents=True)
    path = archives.write_zip(downloads / WHEEL, {"toymodel/other.gguf": b"GGUF"})
    source = CheckpointSource("wheel", "gguf", package="toymodel", version="1.0", file=WHEEL, folder="toymodel")
    source = replace(source, sha256=sha256(path.read_bytes()), member="model.gguf", quantisation="Q4_1")
    entry = CheckpointEntry("toy", "Toy", "free", {}, (source,))
    with pytest.raises(CorruptFile, match="not the expected archive"):
        fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", offline=True, entry=entry)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ChecksumMismatch):
        fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", offline=True, entry=entry)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_what_an_earlier_source_left_behind_is_removed(tmp_path, wheel):
    (tmp_path / "out" / "tmpabc").mkdir(parents=True)
    (tmp_path / "out" / "stale.bin").write_bytes(b"x")
    fetch_checkpoint("toy", tmp_path / "out", tmp_path / "data", entry=toy(wheel))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "manifest.json", "weights.bin"]
