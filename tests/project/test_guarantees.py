"""Every promise has a test: docs/guarantees.md lists those that are marked with its key."""

from __future__ import annotations

import re
from pathlib import Path

from tools.guarantees import PAGE, guarantees_page


def test_the_page_names_the_tests_of_every_promise() -> None:
    page, problems = guarantees_page()
    assert not problems
    assert PAGE.read_text() == page, "run python tools/guarantees.py"
    keys = re.findall(r" \| `([a-z0-9-]+)` \| `test_", page)
    assert len(keys) == len(set(keys)) > 300


def test_every_guarantee_of_the_readme_is_on_the_page() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.split("## What it guarantees")[1].split("\n## ")[0]
    promised = re.findall(r"^- \*\*(.+?)\*\*", section, re.M | re.S)
    assert len(promised) >= 10
    page = PAGE.read_text()
    missing = [words for words in promised if f"**{' '.join(words.split())}**" not in page]
    assert not missing
