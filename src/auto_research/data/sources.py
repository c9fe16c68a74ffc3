"""Registry of data sets (config/datasets.yaml): ordered, pinned, checksummed sources of each."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from auto_research.data.download import FetchFailed, fetch_url, fetch_wheel
from auto_research.runtime.errors import ChecksumMismatch, DataMissing, UnknownName
from auto_research.runtime.files import sha256_file
from auto_research.runtime.names import check_name
from auto_research.runtime.paths import config_dir
from auto_research.runtime.schema import load_yaml, validate


@dataclass(frozen=True)
class Source:
    """One way to get a data set's file. kind: wheel | url | file; layout: name of the reader."""

    name: str
    kind: str
    file: str
    layout: str | None = None
    sha256: str | None = None
    md5: str | None = None
    package: str = ""
    version: str = ""
    url: str = ""
    origin: str = ""


@dataclass(frozen=True)
class DatasetEntry:
    """A registered data set; sources are tried in order."""

    name: str
    title: str
    licence: str
    decades: tuple[int, int]
    sources: tuple[Source, ...]

    def source(self, name: str) -> Source:
        """The source of that name."""
        return next(s for s in self.sources if s.name == name)


def load_registry(path: Path | None = None) -> dict[str, DatasetEntry]:
    """All registered data sets by name. Raises ConfigError when the file does not fit its schema."""
    path = path or config_dir() / "datasets.yaml"
    content = validate(load_yaml(path), "datasets", source=path.name)
    registry = {}
    for name, block in content.items():
        sources = tuple(
            Source(**{("origin" if key == "from" else key): value for key, value in entry.items()})
            for entry in block["sources"]
        )
        registry[name] = DatasetEntry(name, block["title"], block["licence"], tuple(block["decades"]), sources)
    return registry


def dataset_entry(dataset: str, registry: dict[str, DatasetEntry] | None = None) -> DatasetEntry:
    """Entry of a data set. Raises UnknownName naming those that exist."""
    registry = load_registry() if registry is None else registry
    check_name(dataset, "dataset")
    if dataset not in registry:
        raise UnknownName(f"unknown dataset '{dataset}'; known: {', '.join(sorted(registry))}")
    return registry[dataset]


def offline_requested(offline: bool = False) -> bool:
    """True when asked for by argument or by AUTO_RESEARCH_OFFLINE."""
    return offline or os.environ.get("AUTO_RESEARCH_OFFLINE", "") not in ("", "0")


def fetch_source(
    dataset: str, dataset_dir: Path | str, offline: bool = False, entry: DatasetEntry | None = None
) -> tuple[Path, str]:
    """Path of a checked source file of the data set, and the source's name.

    Looks into `<dataset_dir>/downloads` first (all sources in order), then downloads in order. Raises DataMissing
    when no source answers, ChecksumMismatch when a file is not the pinned one (it is moved aside, never deleted).
    """
    entry = entry or dataset_entry(dataset)
    downloads = Path(dataset_dir) / "downloads"
    for source in entry.sources:
        path = downloads / source.file
        if path.is_file():
            check_file(path, source)
            return path, source.name
    reasons = []
    for source in entry.sources:
        if source.kind == "file":
            reasons.append(
                f"{source.name}: not fetched automatically" + (f", see {source.origin}" * bool(source.origin))
            )
        elif offline_requested(offline):
            reasons.append(f"{source.name}: offline")
        else:
            try:
                return download(source, downloads), source.name
            except FetchFailed as failure:
                reasons.append(f"{source.name}: {failure}")
    files = " or ".join(source.file for source in entry.sources)
    raise DataMissing(
        f"{dataset} is not available ({'; '.join(reasons)}); put {files} into {downloads} and run: "
        f"python scripts/prepare_data.py --dataset {dataset}"
    )


def download(source: Source, downloads: Path) -> Path:
    """Fetch and check one source's file into `downloads`; a parallel run waits for the first. Raises FetchFailed."""
    downloads.mkdir(parents=True, exist_ok=True)
    path = downloads / source.file
    with FileLock(downloads / f".{source.file}.lock"):
        if not path.is_file():
            arriving = downloads / f".arriving-{source.file}"
            print(f"fetching {source.file} ({source.name})", file=sys.stderr, flush=True)
            if source.kind == "wheel":
                fetch_wheel(source.package, source.version, source.file, arriving)
            else:
                fetch_url(source.url, arriving)
            check_file(arriving, source)
            os.replace(arriving, path)
        else:
            check_file(path, source)
    return path


def check_file(path: Path, source: Source) -> None:
    """Compare a file with the pinned checksums. On a difference it is renamed, and ChecksumMismatch says where to."""
    wanted, found = source.sha256, None
    if wanted:
        found = sha256_file(path)
    elif source.md5:
        wanted, found = source.md5, hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != wanted:
        aside = path.with_name(f"{source.file}.corrupt-{sha256_file(path)[:12]}")
        os.replace(path, aside)
        raise ChecksumMismatch(
            f"{path.parent / source.file}: checksum {found[:12]}... is not the pinned {wanted[:12]}...; "
            f"moved to {aside.name}; run the same command again to fetch it anew"
        )
