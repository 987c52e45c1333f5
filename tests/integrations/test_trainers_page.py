"""The programs of docs/trainers.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import launch

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SECTIONS = re.findall(r"^## (\w+)\n.*?^```python\n(.*?)^```$", PAGE, re.M | re.S)
NEEDED = {"transformers": "transformers"}
"""What only `make integrations` installs."""


def test_every_section_has_a_program() -> None:
    assert [name for name, _ in SECTIONS] == re.findall(r"^## (\w+)$", PAGE, re.M)


@pytest.mark.guarantee("programs-page-run")
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("section", "program"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_the_program_of_a_section_runs(
    section: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if section in NEEDED:
        pytest.importorskip(NEEDED[section], reason="make integrations installs it")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "program.py"  # no name of a package
    path.write_text(program)
    environment = {"PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true"}
    family = launch(tmp_path, 1, [str(path)], environment)
    codes = family.ended(0, within=400)
    printed = family.log(0)
    family.close()
    assert codes == [0], printed[-3000:]
