"""The static site under results/site: catalogue, leaderboards with filters, boards and audits found here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from auto_research.experiment.card import Card
from auto_research.report.pages import boards, leaderboard, of_board, paper_url
from auto_research.runtime.files import write_text


def write_site(cards: dict[str, Card], results: list[dict[str, Any]], out: Path, root: Path = Path()) -> Path:
    """Write `out/index.html`, a self-contained page, and return its path.

    results: from `load_local` and `load_published`; a local result replaces the published one of the same adapter,
    data set and tier.  root: working directory that holds `results/`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("auto_research.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    rows = [_card_row(card, results) for card in cards.values()]
    ranked = [
        {
            "name": board.title,
            "rows": _with_topics(leaderboard(of_board(results, board), protocol=board.protocol), cards),
        }
        for board in boards(results)
    ]
    page = environment.get_template("site.html.j2").render(
        cards=rows,
        boards=ranked,
        searches=_links(root, out, "results/evolve/*/*/final/*/index.html"),
        audits=_links(root, out, "results/audit/*/summary.html"),
        reports=_links(root, out, "results/reproduce/*/*/*/report.md"),
        organizations=sorted({row["organization"] for row in rows}),
        topics=sorted({topic for row in rows for topic in row["topics"]}),
        years=sorted({row["published"][:4] for row in rows}, reverse=True),
    )
    target = Path(out) / "index.html"
    write_text(target, page)
    return target


def _card_row(card: Card, results: list[dict[str, Any]]) -> dict[str, Any]:
    own = [r for r in results if r["adapter"] == card.key and r["tier"] in ("standard", "full")]
    return {
        "key": card.key,
        "title": card.title,
        "url": paper_url(card.paper["id"]),
        "organization": card.paper["organization"],
        "published": card.paper["published"],
        "topics": card.paper["topics"],
        "family": card.family,
        "arms": len(card.arms),
        "claim": own[0]["claim"] if own else None,
        "gpu": (card.gpu.get("validation") or "pending") if card.gpu["path"] else "no GPU path",
    }


def _with_topics(rows: list[dict[str, Any]], cards: dict[str, Card]) -> list[dict[str, Any]]:
    low, high = (min(r["mean"] for r in rows), max(r["mean"] for r in rows)) if rows else (0.0, 1.0)
    for row in rows:
        card = cards.get(row["adapter"])
        row["topics"] = card.paper["topics"] if card else []
        row["share"] = 100.0 if high == low else 8 + 92 * (row["mean"] - low) / (high - low)
    return rows


def _links(root: Path, out: Path, pattern: str) -> list[dict[str, str]]:
    found = []
    for path in sorted(Path(root).glob(pattern)):
        name = "/".join(path.parts[-6:-1]) if len(path.parts) >= 6 else str(path.parent)
        found.append({"name": name, "href": os.path.relpath(path, out)})
    return found
