"""The size and shape of the package, room by room; and the gate that keeps it from splintering.

python tools/style_report.py [--files] [--words] [--gate] [folder]        (default: streammega)

    files       Python files, without __init__.py and __main__.py
    code        lines of code: no docstrings, comments or blank lines
    statements  nodes of `ast.stmt`, which do not depend on how lines are broken
    median p90  lines of a function, from its `def` to its end
    taken       names that some other file imports from a file of the room

--files prints a line for each file too. --words prints each place where a name, a comment, a docstring, a
message or a page of docs has a word of PRIVATE_WORDS or PRIVATE_NAMES: a reader has to learn those first.
--gate fails (exit 1) for

    a module of fewer than 60 code lines that only one other module imports: it belongs into that one
    a Protocol that no two classes implement: one class is enough
    a word that --words prints

unless `tools/style_exceptions.txt` names it, and for an exception there that is no longer needed: the list only gets shorter.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "tools" / "style_exceptions.txt"
SMALL = 60
FACES = ("__init__.py", "__main__.py")
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

PRIVATE_NAMES = frozenset(
    [
        "told",
        "given",
        "asked",
        "seen",
        "former",
        "found",
        "left",
        "own",
        "said",
        "most",
        "least",
        "beside",
        "whole",
    ]
)
"""Pronouns, participles and adjectives that say nothing when they are a whole name."""
PRIVATE_WORDS = re.compile(
    r"\b(anew|beside|lest|whoever|nobody|somebody|told(?! apart)|spelt|seldom|lies?|in vain|"
    r"(?<!there )is none|(?<!there )are none|"
    r"heard of|(?:pass|passes|passed) over|(?:give|gives|given|gave) up|stands? for|(?:becomes?|became) of|"
    r"of which)\b",
    re.IGNORECASE,
)
"""Words and turns that a reader with school English has to read twice."""
GENERATED_PAGES = ("api", "guarantees", "settings")
MOST_WORDS = 18_000
"""Half of what the pages had when they were true and hard to read."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file. name: as it is imported."""

    name: str
    path: str
    source: str
    tree: ast.Module
    code_lines: int

    @property
    def is_face(self) -> bool:
        return self.path.endswith(FACES)

    @property
    def room(self) -> str:
        folder, slash, _ = self.path.partition("/")
        return folder if slash else "."

    @property
    def statements(self) -> int:
        return sum(isinstance(node, ast.stmt) for node in ast.walk(self.tree))

    @property
    def function_lines(self) -> list[int]:
        functions = [node for node in ast.walk(self.tree) if isinstance(node, Function)]
        return [node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "streammega")
    options = parser.parse_args()
    try:
        modules = read_modules(options.folder)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        print(f"cannot be read as Python: {error}", file=sys.stderr)
        return 1
    if not modules:
        print(f"{options.folder}: no Python files; name a folder that has some", file=sys.stderr)
        return 1
    if options.words:
        found = [*private_words(modules), *private_words_of_pages()]
        print("\n".join([*found, f"{len(found)} places"]))
        return 1 if found else 0
    print("\n".join(table(modules, files=options.files)))
    print(
        f"words of README and hand-written pages: {words_of_pages():,}; the goal is {MOST_WORDS:,}"
    )
    if not options.gate:
        return 0
    wrong = list(complaints(modules, EXCEPTIONS.read_text().splitlines()))
    wrong += [*private_words(modules), *private_words_of_pages()]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def read_modules(folder: Path) -> list[Module]:
    """All Python files below a folder. Raises OSError, SyntaxError, UnicodeDecodeError."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    modules = []
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        inside = path.relative_to(folder)
        parts = [folder.name, *inside.with_suffix("").parts]
        modules.append(
            Module(
                name=".".join(part for part in parts if part != "__init__"),
                path=inside.as_posix(),
                source=source,
                tree=ast.parse(source),
                code_lines=count_code_lines(source),
            )
        )
    return modules


def count_code_lines(source: str) -> int:
    """Lines that hold more than docstrings and comments. Raises SyntaxError."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            is_docstring = isinstance(node.value.value, str)
            stop = (node.end_lineno or node.lineno) + 1
            lines -= set(range(node.lineno, stop)) if is_docstring else set()
    return len(lines)


def imports(module: Module, names: Mapping[str, Module]) -> set[tuple[str, str]]:
    """(module, name) of what a file imports from the others; the name is empty for a module."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add((inner, "") if inner in names else (node.module, alias.name))
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return {(name, taken) for name, taken in found if name in names and name != module.name}


def table(modules: Sequence[Module], *, files: bool) -> Iterator[str]:
    """A line for each room, or each file, and one for all."""
    names = {module.name: module for module in modules}
    taken = Counter(names[name].path for name, _ in all_taken(modules))
    groups: dict[str, list[Module]] = {}
    for module in modules:
        groups.setdefault(module.path if files else module.room, []).append(module)
    groups["total"] = list(modules)
    width = max(len(name) for name in groups)
    yield f"{'':{width}}  files   code statements median   p90  taken"
    for name, group in groups.items():
        sizes = sorted(size for module in group for size in module.function_lines)
        median = statistics.median(sizes) if sizes else 0
        p90 = sizes[int(0.9 * len(sizes))] if sizes else 0
        yield (
            f"{name:{width}} {sum(not module.is_face for module in group):6} "
            f"{sum(module.code_lines for module in group):6} "
            f"{sum(module.statements for module in group):10} {median:6g} {p90:5} "
            f"{sum(taken[module.path] for module in group):6}"
        )


def all_taken(modules: Sequence[Module]) -> set[tuple[str, str]]:
    """(module, name) of all names that some file imports from another."""
    names = {module.name: module for module in modules}
    return {item for module in modules for item in imports(module, names) if item[1]}


def complaints(modules: Sequence[Module], exceptions: Sequence[str]) -> Iterator[str]:
    """What the gate refuses, beside the exceptions; and exceptions that are not needed."""
    wrong = {**small_modules(modules), **lone_protocols(modules)}
    allowed = {line.strip() for line in exceptions if line.strip() and not line.startswith("#")}
    for what, why in wrong.items():
        if what not in allowed:
            yield f"{what}: {why}"
    for what in sorted(allowed - set(wrong)):
        yield f"{what}: is in order by now; remove it from {EXCEPTIONS.name}"


def small_modules(modules: Sequence[Module]) -> dict[str, str]:
    """{path: why it is refused} of small modules with one importer."""
    names = {module.name: module for module in modules}
    importers: dict[str, list[str]] = {}
    for module in modules:
        for name in {name for name, _ in imports(module, names)}:
            importers.setdefault(name, []).append(module.path)
    return {
        module.path: f"{module.code_lines} code lines, imported by {importers[module.name][0]} alone"
        for module in modules
        if not module.is_face
        and module.code_lines < SMALL
        and len(importers.get(module.name, [])) == 1
    }


def lone_protocols(modules: Sequence[Module]) -> dict[str, str]:
    """{path:name: why it is refused} of Protocols that fewer than two classes implement."""
    classes = [
        (module, node)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    by_name = {node.name: node for _, node in classes}
    refused = {}
    for module, protocol in classes:
        if not _is_protocol(protocol):
            continue
        wanted = _members(protocol, by_name)
        count = sum(
            wanted <= _members(node, by_name) for _, node in classes if not _is_protocol(node)
        )
        if count < 2:
            refused[f"{module.path}:{protocol.name}"] = f"a Protocol of {count} classes"
    return refused


def private_words(modules: Sequence[Module]) -> Iterator[str]:
    """path:line: word, of each private name, and each private word of a text or comment."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_doc = node.value.startswith("Of ")
                places = [(node.lineno, "Of ...")] if is_doc else []
                for number, line in enumerate(node.value.splitlines()):
                    places += [(node.lineno + number, word) for word in PRIVATE_WORDS.findall(line)]
            elif isinstance(node, ast.stmt | ast.expr | ast.arg):
                name = _name_of(node)
                places = [(node.lineno, name)] if name in PRIVATE_NAMES else []
            else:
                places = []
            yield from (f"{module.path}:{line}: {word}" for line, word in places)
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
            if token.type == tokenize.COMMENT:
                for word in PRIVATE_WORDS.findall(token.string):
                    yield f"{module.path}:{token.start[0]}: {word}"


def private_words_of_pages() -> Iterator[str]:
    """The same of README, CONTRIBUTING and the pages of docs that nothing generates."""
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "settings.md"}),
    ]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in PRIVATE_WORDS.findall(line):
                yield f"{path.relative_to(ROOT)}:{number}: {word}"


def words_of_pages() -> int:
    """Words of README and of the pages of docs that are not made from the code, as `wc -w` counts."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return sum(len(path.read_text().split()) for path in pages if path.stem not in GENERATED_PAGES)


def _name_of(node: ast.AST) -> str:
    """The name that a node gives to something; empty: none."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return node.name if isinstance(node, Function | ast.ClassDef) else ""


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def _is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in _bases(node)


def _members(node: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> set[str]:
    """Names of methods and attributes, inherited ones too."""
    found = set()
    for base in _bases(node):
        if base in by_name and base != node.name:
            found |= _members(by_name[base], by_name)
    for item in ast.walk(node):
        if isinstance(item, Function):
            found.add(item.name)
        elif isinstance(item, ast.AnnAssign | ast.Assign):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
    return found


if __name__ == "__main__":
    sys.exit(main())
