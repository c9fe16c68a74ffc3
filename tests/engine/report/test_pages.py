"""Generated pages are those of the cards and results; smoke results are never published; the leaderboard keeps losers."""

import copy
from pathlib import Path

import pytest
from sample_result import sample_result

from auto_research.experiment.card import discover
from auto_research.report.pages import boards, leaderboard, of_board, paper_page, results_page, write_docs
from auto_research.report.published import load_published, publish
from auto_research.report.site import write_site
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import write_json

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def result():
    return sample_result()


def test_committed_pages_are_generated_from_cards_and_results(tmp_path):
    docs = CHECKOUT / "docs"
    written = write_docs(discover(CHECKOUT), load_published(docs), tmp_path)
    for page in written:
        committed = docs / page.relative_to(tmp_path)
        assert committed.is_file(), f"run: python scripts/build_site.py --docs ({committed.name} is missing)"
        assert committed.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), "run build_site.py --docs"
    stale = {p.name for p in (docs / "papers").glob("*.md")} - {p.name for p in written}
    assert not stale


def test_publishing_refuses_smoke_and_drops_bulk(tmp_path, result):
    source = tmp_path / "result.json"
    write_json(source, result | {"tier": "smoke"})
    with pytest.raises(ConfigError, match="never published"):
        publish(source, tmp_path / "docs")
    bulky = copy.deepcopy(result)
    bulky["arms"]["din_full"]["extra"] = {"cases": ["x" * 5000], "ratio": 0.5}
    write_json(source, bulky)
    publish(source, tmp_path / "docs")
    (published,) = load_published(tmp_path / "docs")
    assert published["arms"]["din_full"]["extra"] == {"ratio": 0.5}
    assert published["arms"]["lost"]["metrics"] == result["arms"]["lost"]["metrics"]


def test_leaderboard_ranks_floors_and_losers_too(result):
    rows = leaderboard([result])
    assert [row["arm"] for row in rows] == ["din_full", "bias", "lost"]
    text = results_page([result | {"file": "din.json"}])
    assert "no difference" in text
    assert "`lost`" in text
    assert "| `din` | movielens-100k | standard | 3 | - | - |" in text
    minutes = {"cpu_minutes": {"tuning_seed": 12.34, "all_seeds": 20.0}}
    assert "| 12.3 | 20.0 |" in results_page([result | minutes | {"file": "din.json"}])


def test_the_same_floor_of_several_adapters_is_one_row(result):
    other = copy.deepcopy(result) | {"adapter": "din2"}
    text = results_page([result | {"file": "a.json"}, other | {"file": "b.json"}])
    assert "| `din`, `din2` | `bias` | floor |" in text
    assert "| `din2` | `din_full` |" in text
    other["arms"]["bias"]["metrics"]["auc"]["mean"] -= 0.01
    text = results_page([result | {"file": "a.json"}, other | {"file": "b.json"}])
    assert "| `din2` | `bias` | floor |" in text


def test_only_equal_protocols_share_a_leaderboard(result):
    other = copy.deepcopy(result)
    for name, how in {"bias": "request table", "lost": "split over users", "din_full": "request table"}.items():
        other["arms"][name]["protocol"] = how
    found = boards([other])
    assert [board.protocol for board in found] == ["request table", "split over users"]
    ranked = [[row["arm"] for row in leaderboard(of_board([other], b), protocol=b.protocol)] for b in found]
    assert ranked == [["din_full", "bias"], ["lost"]]
    text = results_page([other | {"file": "din.json"}])
    assert "## Leaderboard: ctr (split over users) on movielens-100k, standard tier" in text
    assert boards([other | {"tier": "full"}])[0].tier == "full"


def test_paper_page_shows_results_with_interval_and_pending_gpu(result):
    card = discover(CHECKOUT)["din"]
    assert "Not run at standard tier yet" in paper_page(card, [])
    page = paper_page(card, [result | {"file": "din.json"}])
    assert "-0.1000 to +0.3000" in page
    assert "not yet run on an accepted GPU" in page


def test_site_is_self_contained_and_lists_every_card(tmp_path, result):
    cards = discover(CHECKOUT)
    page = write_site(cards, [result], tmp_path / "site", root=tmp_path).read_text(encoding="utf-8")
    assert all(f"<code>{key}</code>" in page for key in cards)
    assert 'src="http' not in page
    assert "<link" not in page
    assert page.index("din_full") < page.index("<code>lost</code>")
