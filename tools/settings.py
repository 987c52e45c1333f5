"""Write docs/settings.md: every setting with its type, its default and what it says, taken from
where it is defined.

python tools/settings.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from streammega.config import (  # noqa: E402  # the package beside this file
    Column,
    DataConfig,
    FieldsConfig,
    PhaseConfig,
    StorageConfig,
)
from streammega.config.fields import FIELDS  # noqa: E402
from streammega.config.validate import field_docs, field_types, settings_of  # noqa: E402
from streammega.convert import ConvertOptions, ExecutionConfig  # noqa: E402
from streammega.train.config import ModelConfig, ParallelConfig, TrainConfig  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

Every setting with its type, its default and its meaning. `python tools/settings.py` writes this page from the code. The pages on
[training](training.md), [storage](storage.md), [orders](orders.md) and [convert](convert.md) explain how settings work
together.
A run file has `[data]`, `[data.storage]`, `[model]`, `[parallel]` and `[train]`; on the command line `train.lr=1e-4` sets one.
"""

SECTIONS: dict[type, str] = {
    FieldsConfig: "`[data]`, the fields of a batch: `FieldsConfig`, and part of `DataConfig`",
    DataConfig: "`[data]`, what is read and in which order: `DataConfig`",
    Column: "`[data.columns.NAME]`, what travels with the tokens: `Column`",
    PhaseConfig: "`[[data.phases]]`, what changes in the middle of a run: `PhaseConfig`",
    StorageConfig: "`[data.storage]`, how bytes are fetched: `StorageConfig`",
    ModelConfig: "`[model]`: `ModelConfig`",
    ParallelConfig: "`[parallel]`: `ParallelConfig`",
    TrainConfig: "`[train]`: `TrainConfig`",
    ConvertOptions: "`streammega convert`, by its flags: `ConvertOptions`",
    ExecutionConfig: "`streammega convert`, how the work is done: `ExecutionConfig`",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where the page is not what would be written",
    )
    page = settings_page()
    if not parser.parse_args().check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        print("docs/settings.md is out of date: run python tools/settings.py", file=sys.stderr)
        return 1
    return 0


def settings_page() -> str:
    """The page as it should be."""
    lines = [HEAD]
    for settings, title in SECTIONS.items():
        about = (settings.__doc__ or "").split("\n\n")[0]
        lines += [f"## {title}", "", " ".join(about.split()), ""]
        lines += ["| setting | type | default | what it is |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows(settings)] + [""]
    lines += ["## Fields of batches", "", "Stages are those of a pipeline.", ""]
    lines += ["| field | dtype | what it is | stages | made by |", "|---|---|---|---|---|"]
    for name, item in FIELDS.items():
        cells = (code(name), item.dtype, item.about, ", ".join(item.stages), item.made_by)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def rows(settings: type) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each field that a class has for itself."""
    docs = field_docs(settings)
    types = field_types(settings)
    for item in settings_of(settings):
        if item.name not in settings.__annotations__:
            continue
        kind = code(re.sub(r"^Annotated\[(.*?), (?:Flag|Ge|Gt|Le|Lt)\(.*$", r"\1", str(item.type)))
        if types[item.name].range:
            kind += f", {types[item.name].range}"
        yield code(item.name), kind, default_of(item), docs[item.name].replace("|", "\\|")


def default_of(item: Field[Any]) -> str:
    """A default as a reader would write it."""
    if item.default_factory is not MISSING:
        made = getattr(item.default_factory, "__name__", "")
        return code({"dict": "{}", "list": "[]"}.get(made, f"{made}()"))
    if item.default is MISSING:
        return "must be given"
    if item.name.endswith("_bytes") and item.default:
        power = max(power for power in (10, 20, 30) if item.default >= 1 << power)
        return code(f"{item.default >> power} {'KMG'[power // 10 - 1]}iB")
    return code(repr(item.default))


def code(text: str) -> str:
    """Text as code; a bar would end the cell."""
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
