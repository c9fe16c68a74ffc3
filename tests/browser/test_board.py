"""The board in a real headless Chromium: complete, self-contained, and readable on a phone."""

import re

import pytest
from chromium import dom, measured, screenshot

from auto_research.runtime.files import read_json

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def rendered(board):
    return dom(board, 1200)


@pytest.fixture(scope="module")
def report(board):
    return read_json(board.parent / "report.json")


def test_every_slot_of_the_search_is_a_row(rendered, report):
    for row in report["trials"]:
        assert f'<span class="id">{row["trial_id"]}</span>' in rendered
    assert len(re.findall(r'class="status \w+"', rendered)) == len(report["trials"])


def test_a_failed_trial_shows_its_status_and_error(rendered):
    assert '<span class="status failed">failed</span>' in rendered
    assert "ValueError: planted &lt;b&gt;failure" in rendered
    assert '<span class="status nonfinite">nonfinite</span>' in rendered


def test_asked_champion_lineage_floors_and_sealed_test_are_there(rendered, report):
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", rendered))
    for heading in (
        "What was asked",
        "Champion",
        "Lineage",
        "Fitness per generation",
        "Sealed test",
        "Floors",
        "All trials",
    ):
        assert heading in text
    assert "先看 mixing" in text
    assert f"{report['test']['champion']['fitness']:.4f}" in text
    assert "This is the first time this run's test was read" in text.replace("&#39;", "'")
    assert "smoke. Cut data" in re.sub(r" +([.,])", r"\1", text)
    assert text.count("arXiv:0000.0000") >= 1


def test_text_of_a_person_is_shown_and_never_run(rendered):
    assert "<script>" not in rendered
    assert "&lt;script&gt;alert" in rendered


def test_the_page_needs_no_network(board):
    content = board.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", content)


@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_the_page_never_scrolls_sideways(board, tmp_path, width):
    script = "return document.documentElement.scrollWidth + ' ' + innerWidth"
    scroll, inner = map(int, measured(board, tmp_path, width, script).split())
    assert inner == width
    assert scroll <= width


def test_wide_tables_scroll_inside_their_frame_on_a_phone_and_can_be_reached_by_keyboard(board, tmp_path):
    script = (
        "const s = [...document.querySelectorAll('.scroll')]; const t = s[s.length - 1];"
        "return [t.scrollWidth > t.clientWidth, s.every(e => e.tabIndex === 0 && e.getAttribute('aria-label')),"
        "Math.min(...[...document.querySelectorAll('p, td, dd, li')].map(e => parseFloat(getComputedStyle(e).fontSize)))].join(' ')"
    )
    scrolls, reachable, smallest = measured(board, tmp_path, 390, script).split()
    assert (scrolls, reachable) == ("true", "true")
    assert float(smallest) >= 12


def test_dark_and_light_have_readable_contrast(board, tmp_path):
    assert screenshot(board, tmp_path / "light.png", 1200, 900) == (1200, 900)
    screenshot(board, tmp_path / "dark.png", 1200, 900, "--force-dark-mode")
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()
    script = """
    const lum = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
      return .2126 * r + .7152 * g + .0722 * b; };
    const back = e => { while (e) { const c = getComputedStyle(e).backgroundColor; if (!c.includes('rgba(0, 0, 0, 0)')) return c; e = e.parentElement; } return 'rgb(255,255,255)'; };
    let worst = 99;
    for (const e of document.querySelectorAll('h1, h2, p, td, th, dd, dt, .status, .note')) {
      const [a, b] = [lum(getComputedStyle(e).color), lum(back(e))].sort((x, y) => y - x); worst = Math.min(worst, (a + .05) / (b + .05)); }
    return worst;"""
    assert float(measured(board, tmp_path, 1200, script)) >= 4.5
