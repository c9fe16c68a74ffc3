"""Readers of the original file formats: an archive or file in, `RawData` out. Nothing is extracted to disk."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from auto_research.runtime.errors import ConfigError, CorruptFile

MAX_MEMBER_BYTES = 512 * 1024 * 1024

UNKNOWN_GENRE = "unknown"
MOVIE_GENRES = (
    UNKNOWN_GENRE,
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


@dataclass(frozen=True)
class UserRecord:
    """Demographics as the source writes them."""

    age: int
    gender: str
    occupation: str
    zip: str


@dataclass(frozen=True)
class ItemRecord:
    """Title without its year, release year (0 = unknown), genre names."""

    title: str
    year: int
    genres: tuple[str, ...]


@dataclass
class RawData:
    """Ratings in file order with the source's own ids as text; users and items may be empty dicts."""

    user_id: list[str] = field(default_factory=list)
    item_id: list[str] = field(default_factory=list)
    rating: list[float] = field(default_factory=list)
    timestamp: list[int] = field(default_factory=list)
    users: dict[str, UserRecord] = field(default_factory=dict)
    items: dict[str, ItemRecord] = field(default_factory=dict)
    genre_names: tuple[str, ...] = (UNKNOWN_GENRE,)

    def add(self, user: str, item: str, rating: float, timestamp: int) -> None:
        """Append one rating."""
        self.user_id.append(user)
        self.item_id.append(item)
        self.rating.append(rating)
        self.timestamp.append(timestamp)


def split_title(text: str) -> tuple[str, int]:
    """'GoldenEye (1995)' -> ('GoldenEye', 1995); a trailing format mark '(V)' is ignored; no year -> year 0."""
    text = " ".join(text.split())
    match = re.fullmatch(r"(.*?)\s*\((\d{4})\)(?: \((?:V|TV)\))?", text)
    if match:
        return match.group(1), int(match.group(2))
    return (UNKNOWN_GENRE if text in ("unknown", "unkonwn (unkonwn)") else text), 0


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, EOFError) as error:
        raise CorruptFile(f"{path}: not a readable zip archive ({error}); delete it and prepare again") from error


def _member_text(archive: zipfile.ZipFile, name: str, encoding: str) -> str:
    """Text of one member; its size is checked before it is read, and nothing is written to disk."""
    try:
        info = archive.getinfo(name)
        if info.is_dir() or info.file_size > MAX_MEMBER_BYTES:
            raise CorruptFile(f"{archive.filename}: member {name} is a folder or over {MAX_MEMBER_BYTES} bytes")
        return archive.read(info).decode(encoding)
    except KeyError as error:
        raise CorruptFile(f"{archive.filename}: member {name} is missing") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError, NotImplementedError) as error:
        raise CorruptFile(f"{archive.filename}: member {name} is damaged ({error})") from error


def _rows(path: Path, name: str, text: str, separator: str, columns: int, header: bool) -> Iterator[list[str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if (header and number == 1) or not line:
            continue
        cells = line.split(separator)
        if len(cells) != columns:
            raise CorruptFile(f"{path}: {name} line {number} has {len(cells)} fields instead of {columns}")
        yield cells


def _parse(path: Path, read: Callable[[], RawData]) -> RawData:
    try:
        data = read()
    except (ValueError, KeyError) as error:
        raise CorruptFile(f"{path}: a field could not be read ({error})") from error
    if not data.user_id:
        raise CorruptFile(f"{path}: holds no ratings")
    return data


def read_recbole_ml_100k(path: Path) -> RawData:
    """ML-100K as the atomic files inside the recbole wheel: tab separated, header line, genres as words, year column."""
    folder = "recbole/dataset_example/ml-100k/ml-100k"

    def read() -> RawData:
        data = RawData(genre_names=MOVIE_GENRES)
        with _open_zip(path) as archive:
            text = {part: _member_text(archive, f"{folder}.{part}", "utf-8") for part in ("inter", "user", "item")}
        for user, item, rating, timestamp in _rows(path, "ml-100k.inter", text["inter"], "\t", 4, header=True):
            data.add(user, item, float(rating), int(timestamp))
        for user, age, gender, job, code in _rows(path, "ml-100k.user", text["user"], "\t", 5, header=True):
            data.users[user] = UserRecord(int(age), gender, job, code)
        for item, title, year, genres in _rows(path, "ml-100k.item", text["item"], "\t", 4, header=True):
            data.items[item] = ItemRecord(*split_title(f"{title} ({year})"), tuple(genres.split()))
        return data

    return _parse(path, read)


def read_grouplens_ml_100k(path: Path) -> RawData:
    """The official archive: u.data (tabs), u.user and u.item (bars, Latin-1, 19 genre flags)."""

    def read() -> RawData:
        data = RawData(genre_names=MOVIE_GENRES)
        with _open_zip(path) as archive:
            text = {part: _member_text(archive, f"ml-100k/u.{part}", "latin-1") for part in ("data", "user", "item")}
        for user, item, rating, timestamp in _rows(path, "u.data", text["data"], "\t", 4, header=False):
            data.add(user, item, float(rating), int(timestamp))
        for user, age, gender, job, code in _rows(path, "u.user", text["user"], "|", 5, header=False):
            data.users[user] = UserRecord(int(age), gender, job, code)
        for cells in _rows(path, "u.item", text["item"], "|", 24, header=False):
            genres = tuple(name for name, flag in zip(MOVIE_GENRES, cells[5:], strict=True) if flag == "1")
            data.items[cells[0]] = ItemRecord(*split_title(cells[1]), genres)
        return data

    return _parse(path, read)


def read_grouplens_ml_1m(path: Path) -> RawData:
    """The official archive: ratings.dat, users.dat, movies.dat, '::' separated, Latin-1, genres joined by bars."""

    def read() -> RawData:
        data = RawData(genre_names=MOVIE_GENRES)
        with _open_zip(path) as archive:
            text = {
                part: _member_text(archive, f"ml-1m/{part}.dat", "latin-1") for part in ("ratings", "users", "movies")
            }
        for user, item, rating, timestamp in _rows(path, "ratings.dat", text["ratings"], "::", 4, header=False):
            data.add(user, item, float(rating), int(timestamp))
        for user, gender, age, job, code in _rows(path, "users.dat", text["users"], "::", 5, header=False):
            data.users[user] = UserRecord(int(age), gender, job, code)
        for item, title, genres in _rows(path, "movies.dat", text["movies"], "::", 3, header=False):
            data.items[item] = ItemRecord(*split_title(title), tuple(genres.split("|")))
        return data

    return _parse(path, read)


def read_amazon_reviews(path: Path) -> RawData:
    """Amazon 2014 5-core reviews: gzip, one JSON object a line (reviewerID, asin, overall, unixReviewTime)."""

    def read() -> RawData:
        data = RawData()
        try:
            with gzip.open(path) as binary, io.TextIOWrapper(binary, "utf-8") as lines:
                for line in lines:
                    row = json.loads(line)
                    data.add(row["reviewerID"], row["asin"], float(row["overall"]), int(row["unixReviewTime"]))
        except (OSError, EOFError, zlib.error) as error:
            raise CorruptFile(f"{path}: not a readable gzip file ({error}); delete it and prepare again") from error
        return data

    return _parse(path, read)


READERS: dict[str, Callable[[Path], RawData]] = {
    "recbole-ml-100k": read_recbole_ml_100k,
    "grouplens-ml-100k": read_grouplens_ml_100k,
    "grouplens-ml-1m": read_grouplens_ml_1m,
    "amazon-reviews": read_amazon_reviews,
}


def read_source(path: Path, layout: str | None, dataset: str) -> RawData:
    """Read a fetched file. Raises ConfigError when the data set has no reader yet, CorruptFile when damaged."""
    if layout is None:
        raise ConfigError(f"{dataset}: the file {path} is present, but this version has no reader for it")
    if layout not in READERS:
        raise ConfigError(f"{dataset}: unknown layout '{layout}' (known: {', '.join(sorted(READERS))})")
    return READERS[layout](path)
