"""Messages on the page of troubleshooting are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from streammega import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^- `(.+)`<br>$", PAGE, re.M)
VARIABLE = "\N{HORIZONTAL ELLIPSIS}"


@cache
def texts() -> str:
    """Every text of the package; what an f-string fills in is VARIABLE."""
    found = []
    for path in (ROOT / "streammega").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else VARIABLE
                    for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n\n".join(found)


@pytest.mark.guarantee("messages-explained")
@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_code(message: str) -> None:
    words = re.escape(message.strip(VARIABLE)).replace(VARIABLE, r"[^\n]*?")
    assert re.search(words, texts()), "the code says this no more: correct the page"


@pytest.mark.guarantee("messages-explained")
def test_every_class_of_errors_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE, re.M)
    assert sorted(sections) == sorted(set(errors.__all__) - {"StreammegaError"})
    for name in sections:
        text = PAGE.split(f"## {name}\n")[1].split("\n## ")[0]
        assert "- `" in text, f"{name}: its messages"


@pytest.mark.guarantee("messages-explained")
def test_the_page_has_sixty_messages_and_an_answer_to_each() -> None:
    assert len(set(MESSAGES)) >= 60
    answers = re.findall(r"^- `.+`<br>\n  \S", PAGE, re.M)
    assert len(answers) == len(MESSAGES)
