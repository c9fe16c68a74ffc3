"""The site's leaderboards in a real headless Chromium: filters, floors and losers, and a narrow screen."""

import copy
import re
from pathlib import Path

import pytest
from chromium import dom, measured, screenshot
from sample_result import sample_result

from auto_research.experiment.card import discover
from auto_research.report.site import write_site
from auto_research.runtime.paths import checkout_root

pytestmark = pytest.mark.browser

SHOWN = """
const rows = [...document.querySelectorAll('tr[data-year]')].filter(row => !row.hidden && row.offsetParent);
return rows.map(row => row.querySelector('code').textContent).join(' ');"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    one, other = sample_result(), copy.deepcopy(sample_result())
    other["adapter"] = "rankmixer"
    other["card"] |= {"organization": "ByteDance (Douyin)", "published": "2025-07-21"}
    return write_site(discover(checkout_root()), [one, other], folder, root=folder)


def at(site: Path, folder: Path, query: str) -> Path:
    """A copy of the page that opens as if its address ended with `query`."""
    page = folder / "index.html"
    text = site.read_text(encoding="utf-8")
    page.write_text(text.replace("<script>", f"<script>history.replaceState(null, '', '{query}');</script><script>", 1))
    return page


def test_every_arm_is_a_row_floors_and_losers_too(site):
    text = dom(site, 1200)
    assert len(re.findall("<code>lost</code>", text)) == 2
    assert len(re.findall(r'<tr class="floor"', text)) == 2


def test_filters_leave_the_chosen_organisation_topic_and_year(site, tmp_path):
    everything = measured(site, tmp_path, 1200, SHOWN).split()
    chosen = measured(at(site, tmp_path, "#organization=ByteDance (Douyin)&year=2025"), tmp_path, 1200, SHOWN).split()
    cards = discover(checkout_root()).values()
    own = {
        c.key for c in cards if c.paper["organization"] == "ByteDance (Douyin)" and c.paper["published"][:4] == "2025"
    }
    assert "din" in everything
    assert set(chosen) == own
    assert chosen.count("rankmixer") == 1 + len(sample_result()["arms"])
    topic = measured(at(site, tmp_path, "#topic=sparse-moe"), tmp_path, 1200, SHOWN).split()
    assert set(topic) == {c.key for c in cards if "sparse-moe" in c.paper["topics"]}


def test_choosing_in_the_page_filters_and_can_be_sent_as_an_address(site, tmp_path):
    script = """
    const select = document.querySelector('select[data-filter=organization]');
    select.value = 'Alibaba'; select.dispatchEvent(new Event('change'));""" + SHOWN.replace(
        "join(' ')", "join(' ') + ' ' + location.hash"
    )
    *keys, address = measured(site, tmp_path, 1200, script).split()
    assert set(keys) == {c.key for c in discover(checkout_root()).values() if c.paper["organization"] == "Alibaba"}
    assert address == "#organization=Alibaba"


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_the_page_never_scrolls_sideways_and_tables_do(site, tmp_path, width):
    script = """
    const tables = [...document.querySelectorAll('.scroll')];
    return [document.documentElement.scrollWidth, innerWidth, tables.some(t => t.scrollWidth > t.clientWidth),
      tables.every(t => t.tabIndex === 0 && t.getAttribute('aria-label'))].join(' ');"""
    scroll, inner, wide, reachable = measured(site, tmp_path, width, script).split()
    assert int(scroll) <= int(inner) == width
    assert reachable == "true"
    assert width > 400 or wide == "true"


def test_it_can_be_drawn(site, tmp_path):
    assert screenshot(site, tmp_path / "page.png", 1200, 900) == (1200, 900)
