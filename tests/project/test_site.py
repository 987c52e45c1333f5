"""The site that mkdocs makes of the pages."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import streammega
from streammega import errors

ROOT = Path(__file__).parents[2]
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
needs_mkdocs = pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("mkdocstrings")),
    reason="mkdocs is not installed: pip install 'streammega[docs]'",
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-f",
        str(config),
        "-d",
        str(site),
    ]
    environment = os.environ | NO_NETWORK | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


class Loads(html.parser.HTMLParser):
    """What a browser loads by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "srcset", "data") or (tag == "link" and name == "href"):
                self.urls.append(value or "")


@needs_mkdocs
@pytest.mark.guarantee("site-without-network")
def test_the_site_is_built_without_network_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = build(ROOT / "mkdocs.yml", site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {
        f"{path.stem}.md" for path in site.glob("*.html")
    }
    for path in site.rglob("*.html"):
        page = Loads()
        page.feed(path.read_text())
        assert page.urls
        assert not [url for url in page.urls if re.match(r"(\w+:)?//", url)], path.name
        cells = re.findall(r"<td>.*?</td>", path.read_text(), re.S)
        assert not [cell for cell in cells if "\\|" in cell], "a backslash that GitHub alone needs"
        assert 'class="mermaid"' not in path.read_text(), "its script is loaded from elsewhere"
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()), (
            path.name
        )

    listed = re.findall(r"^- \[.+\]\((\S+)\): \S", (site / "llms.txt").read_text(), re.M)
    assert set(listed) >= {path.name for path in (ROOT / "docs").glob("*.md")}
    assert not [name for name in listed if not (site / name).read_text().startswith("# ")]


@needs_mkdocs
@pytest.mark.guarantee("site-without-network")
@pytest.mark.parametrize("link", ["none.md", "index.md#none"])
def test_a_link_that_leads_nowhere_fails_the_build(link: str, tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(
        re.sub(r"^(hooks|nav):.*?(?=^\w|\Z)", "", settings, flags=re.M | re.S)
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[a link]({link})\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode
    assert "none" in done.stderr


def test_the_page_of_the_api_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.M)
    public = {*streammega.__all__, *errors.__all__} - {"__version__"}
    assert sorted(name.rsplit(".", 1)[1] for name in named) == sorted(public)
