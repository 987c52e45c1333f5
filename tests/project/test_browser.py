"""Pages in a real browser: `make browser` looks at the whole site and view."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.builders import write_layout_run
from tools import browser

WRONG = """<html><head></head><body>
<div style="width: 600px">x</div><img src="none.png"><script>none()</script>
</body></html>"""
RIGHT = "<html><head></head><body><p>fits</p></body></html>"


@pytest.mark.skipif(browser.BROWSER is None, reason="chromium is not installed")
@pytest.mark.guarantee("pages-fit")
def test_what_does_not_fit_a_desktop_and_a_phone_is_found(tmp_path: Path) -> None:
    (tmp_path / "right.html").write_text(RIGHT)
    (tmp_path / "wrong.html").write_text(WRONG)
    pages = ["wrong.html", "right.html"]
    problems = browser.look(tmp_path, pages, tmp_path / "pictures")
    assert len(list((tmp_path / "pictures").iterdir())) == 4
    assert {problem.split(":")[0] for problem in problems} == {
        "wrong.html at 1280",
        "wrong.html at 390",
    }
    wide = [problem for problem in problems if "wider than the window" in problem]
    assert [problem.split(":")[0] for problem in wide] == ["wrong.html at 390"]
    assert sum("none" in problem for problem in problems) == 4, "a script and a picture, twice"


@pytest.mark.skipif(browser.BROWSER is None, reason="chromium is not installed")
@pytest.mark.guarantee("view-by-keyboard")
def test_view_fits_both_widths_and_is_used_by_keyboard(tmp_path: Path) -> None:
    with browser.running_view(write_layout_run(tmp_path)) as address:
        problems = browser.look_at_view(address, browser.VIEW_PAGES, tmp_path / "pictures")
    assert problems == []
    pictures = list((tmp_path / "pictures").iterdir())
    assert len(pictures) == len(browser.VIEW_PAGES) * len(browser.WIDTHS)


@pytest.mark.skipif(browser.BROWSER is None, reason="chromium is not installed")
def test_what_a_keyboard_does_not_reach_is_found() -> None:
    with browser.open_tab() as tab:
        tab.show("data:text/html,<a href='x'>one</a><button>two</button>", 390)
        assert browser.keyboard_problems(tab) == []
        tab.show("data:text/html,<a href='x'>one</a><a href='x' tabindex='-1'>two</a>", 390)
        assert browser.keyboard_problems(tab) == ["Tab does not reach [1]"]
        tab.show("data:text/html,<button style='outline: none'>one</button>", 390)
        assert browser.keyboard_problems(tab) == ["the focus on link or field 0 is not seen"]
