"""Write docs/settings.md: every setting with its type, its default and what it says, taken from
where it is defined.

python tools/settings.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

Every setting, its type, its default and what it means, as the code says it: `python tools/settings.py` writes this page. How they
work together is told in [training.md](training.md), [storage.md](storage.md), [orders.md](orders.md), [convert.md](convert.md).
A run file has `[data]`, `[data.storage]`, `[model]`, `[parallel]` and `[train]`; on the command line `train.lr=1e-4` sets one.
"""


@dataclass(frozen=True)
class Section:
    """A class of settings: where it is defined, and the heading it gets."""

    file: str
    name: str
    title: str


SECTIONS = [
    Section(
        "streammega/config/fields.py",
        "FieldsConfig",
        "`[data]`, the fields of a batch: `FieldsConfig`, and part of `DataConfig`",
    ),
    Section(
        "streammega/config/data.py",
        "DataConfig",
        "`[data]`, what is read and in which order: `DataConfig`",
    ),
    Section(
        "streammega/config/phases.py",
        "PhaseConfig",
        "`[[data.phases]]`, what changes in the middle of a run: `PhaseConfig`",
    ),
    Section(
        "streammega/config/follow.py",
        "FollowConfig",
        "`[data.follow]`, taking in what is appended: `FollowConfig`",
    ),
    Section(
        "streammega/config/storage.py",
        "StorageConfig",
        "`[data.storage]`, how bytes are fetched: `StorageConfig`",
    ),
    Section("streammega/train/config/sizes.py", "ModelConfig", "`[model]`: `ModelConfig`"),
    Section("streammega/train/config/sizes.py", "ParallelConfig", "`[parallel]`: `ParallelConfig`"),
    Section("streammega/train/config/optimization.py", "TrainConfig", "`[train]`: `TrainConfig`"),
    Section(
        "streammega/convert/options.py",
        "ConvertOptions",
        "`streammega convert`, by its flags: `ConvertOptions`",
    ),
    Section(
        "streammega/convert/options.py",
        "Runner",
        "`streammega convert`, how the work is done: `Runner`",
    ),
]


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
        return 0
    if PAGE.read_text() == page:
        return 0
    print(
        f"{PAGE.relative_to(ROOT)} is not what the code says: run python tools/settings.py",
        file=sys.stderr,
    )
    return 1


def settings_page() -> str:
    """The page as it should be."""
    return "\n".join([HEAD, *(section_text(section) for section in SECTIONS)])


def section_text(section: Section) -> str:
    """One class as a table."""
    tree = ast.parse((ROOT / section.file).read_text())
    (settings,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.name
    )
    about = ast.get_docstring(settings) or ""
    module = importlib.import_module(section.file.removesuffix(".py").replace("/", "."))
    rows = [
        f"| `{name}` | {kind} | {default} | {text} |"
        for name, kind, default, text in fields_of(settings, module)
    ]
    first_paragraph = " ".join(about.split("\n\n")[0].split())
    return "\n".join(
        [
            f"## {section.title}",
            "",
            first_paragraph,
            "",
            "| setting | type | default | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def fields_of(settings: ast.ClassDef, module: Any) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each public field, as cells of a table; constants of the
    module by their values.
    """
    for item, after in zip(settings.body, [*settings.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or ast.unparse(item.target).startswith("_"):
            continue
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        meaning = str(after.value.value) if described else ""  # type: ignore[union-attr]
        yield (
            ast.unparse(item.target),
            code(ast.unparse(item.annotation)),
            default_of(item.value, module),
            cell(meaning),
        )


def default_of(value: ast.expr | None, module: Any) -> str:
    """A default as a reader would write it."""
    if value is None:
        return "must be given"
    if isinstance(value, ast.Name):
        return code(repr(getattr(module, value.id)))
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in given:
            return default_of(given["default"], module)
        made = ast.unparse(given["default_factory"])
        return code({"dict": "{}", "list": "[]"}.get(made, f"{made}()"))
    return code(ast.unparse(value).replace(" * MiB", " MiB"))


def code(text: str) -> str:
    """Text as code; a bar would end the cell."""
    return f"`{text}`".replace("|", "\\|")


def cell(text: str) -> str:
    """A docstring as one cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
