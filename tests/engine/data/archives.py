"""Small hand-made source files in the original formats, and a small table for hand-worked expectations."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np

from auto_research.data.interactions import Interactions

RATINGS = [
    ("2", "10", 5, 100),
    ("1", "10", 4, 300),
    ("1", "2", 3, 100),
    ("2", "2", 1, 50),
    ("1", "1412", 5, 100),
    ("2", "267", 2, 50),
    ("1", "543", 1, 900),
]
USERS = [("1", 24, "M", "technician", "85711"), ("2", 56, "F", "other", "T8H1N")]
# id, title in u.item, (title, year) in the wheel, genres
ITEMS = [
    ("2", "GoldenEye (1995)", ("GoldenEye", "1995"), ["Action", "Adventure", "Thriller"]),
    ("10", "Richard III (1922)", ("Richard III", "1922"), ["Drama", "War"]),
    ("267", "unknown", ("unkonwn", "unkonwn"), ["unknown"]),
    ("543", "Misérables, Les (1995) ", ("Misérables, Les", "1995"), ["Drama", "Musical"]),
    (
        *("1412", "Land Before Time III (1995) (V)", ("Land Before Time III (1995)", "V")),
        ["Animation", "Children's"],
    ),
]
FLAGS = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def recbole_members() -> dict[str, bytes]:
    inter = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    inter += ["\t".join(map(str, row)) for row in RATINGS]
    users = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    users += ["\t".join(map(str, row)) for row in USERS]
    items = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    items += ["\t".join((item, *wheel, " ".join(genres))) for item, _, wheel, genres in ITEMS]
    folder = "recbole/dataset_example/ml-100k/ml-100k"
    parts = {"inter": inter, "user": users, "item": items}
    return {f"{folder}.{part}": ("\n".join(lines) + "\n").encode() for part, lines in parts.items()}


def grouplens_members() -> dict[str, bytes]:
    data = ["\t".join(map(str, row)) for row in reversed(RATINGS)]
    users = ["|".join(map(str, row)) for row in USERS]
    items = []
    for item, title, _, genres in ITEMS:
        flags = "|".join("1" if name in genres else "0" for name in FLAGS)
        items.append(f"{item}|{title}|01-Jan-1990||http://example.invalid/{item}|{flags}")
    parts = {"data": data, "user": users, "item": items}
    return {f"ml-100k/u.{part}": ("\n".join(lines) + "\n").encode("latin-1") for part, lines in parts.items()}


def ml_1m_members() -> dict[str, bytes]:
    ratings = "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n"
    users = "1::F::1::10::48067\n2::M::56::16::70072\n"
    movies = (
        "1193::One Flew Over the Cuckoo's Nest (1975)::Drama\n"
        "661::James and the Giant Peach (1996)::Animation|Children's|Musical\n"
        "3::Never Rated (1919)::Comedy\n"
    )
    texts = {"ratings": ratings, "users": users, "movies": movies}
    return {f"ml-1m/{name}.dat": text.encode("latin-1") for name, text in texts.items()}


def write_amazon(path: Path) -> Path:
    rows = [("A2", "B001", 5.0, 1400000000), ("A1", "B002", 2.0, 1300000000), ("A1", "B001", 4.0, 1300000000)]
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for user, item, overall, time in rows:
            record = {"reviewerID": user, "asin": item, "overall": overall, "unixReviewTime": time, "reviewText": "x"}
            lines.write(json.dumps(record) + "\n")
    return path


def table_of(rows: list[tuple[int, int, float, int]], genres: list[list[float]], dataset: str = "toy") -> Interactions:
    """Interactions of (user, item, rating, time) rows, sorted by user and time; genres of items 1.. in order."""
    rows = sorted(rows, key=lambda row: (row[0], row[3]))
    user, item, rating, time = (np.array(column) for column in zip(*rows, strict=True))
    n_items = len(genres)
    return Interactions(
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        rating=rating.astype(np.float32),
        timestamp=time.astype(np.int64),
        n_users=int(user.max()),
        n_items=n_items,
        user_fields={},
        item_genres=np.array([[0.0] * len(genres[0]), *genres], dtype=np.float32),
        item_decade=np.arange(n_items + 1, dtype=np.int64) % 3,
        item_title=[""] * (n_items + 1),
        genre_names=[f"g{i}" for i in range(len(genres[0]))],
        vocab={"decade": 3},
        dataset=dataset,
    )
