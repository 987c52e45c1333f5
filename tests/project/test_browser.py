"""Pages in a real browser: `make browser` looks at the whole site, this test at reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import browser

WRONG = """<html><head></head><body>
<div style="width: 600px">x</div><img src="none.png"><script>none()</script>
</body></html>"""


@pytest.mark.skipif(browser.BROWSER is None, reason="chromium is not installed")
@pytest.mark.guarantee("pages-fit")
def test_reports_fit_a_desktop_and_a_phone_and_what_does_not_is_found(tmp_path: Path) -> None:
    browser.write_reports(tmp_path / "reports")
    (tmp_path / "wrong.html").write_text(WRONG)
    pages = ["wrong.html", *(f"reports/{path.name}" for path in (tmp_path / "reports").iterdir())]
    problems = browser.look(tmp_path, pages, tmp_path / "pictures")
    assert len(pages) == 4
    assert len(list((tmp_path / "pictures").iterdir())) == 4
    assert {problem.split(":")[0] for problem in problems} == {
        "wrong.html at 1280",
        "wrong.html at 390",
    }
    wide = [problem for problem in problems if "wider than the window" in problem]
    assert [problem.split(":")[0] for problem in wide] == ["wrong.html at 390"]
    assert sum("none" in problem for problem in problems) == 4, "a script and a picture, twice"
