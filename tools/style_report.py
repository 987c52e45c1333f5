"""How dense the code of a folder is: figures of each Python file, and of all of them together. A
report, no gate.

python tools/style_report.py [folder]        (default: streammega)

    functions   how many, methods and inner functions too
    median p90  lines of a function, from its `def` to its end, docstring and all
    expr/line   expressions in a line of a function's body: calls, attributes, subscripts, operators, comparisons, conditions,
                comprehensions, lambdas, awaits and yields. Names, literals and f-strings compute
                nothing and do not count; neither do docstrings, blank lines, and lines of comments
                alone
    tuples      assignments of a tuple to a tuple (`a, b = 1, 2`) per 1000 lines of code: all but docstrings, blank lines and
                comments. Taking apart what a call returns is none
    long        lines of more than 100 columns, per 1000 lines
    why         lines of comments, and of docstrings of attributes (a string after an assignment of a module or class), per
                1000 lines. Headings of sections (`# ----`, `# --- reading ---`) and what is said to
                tools (`# type: ignore`, `# noqa`, `# fmt: skip`, `# pragma: no cover`) do not count
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
COMPUTING = (
    ast.Call, ast.Attribute, ast.Subscript, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.NamedExpr,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom,
)  # fmt: skip
"""Nodes that count as expressions: of each, a reader has to know what comes out."""
FOR_TOOLS = re.compile(r"#\s*(!|-\*-|type:|noqa|fmt:|pragma|ruff:|mypy:)")
"""Begins of comments that say nothing to a reader."""
HEADING = re.compile(r"#\s*$|#.*[-=#*─]{3}")
"""A heading of a section has a rule drawn with it; an empty comment is part of its frame."""
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
"""Tokens that make no line a line of code."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was counted in a file, or in several."""

    lines: int
    code_lines: int
    body_lines: int
    function_lines: tuple[int, ...]
    expressions: int
    tuple_assignments: int
    long_lines: int
    why_lines: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=ROOT / "streammega", help="a folder, or one file"
    )
    folder: Path = parser.parse_args().folder
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    try:
        figures = {
            str(path.relative_to(folder) if folder.is_dir() else path): count(path.read_text())
            for path in paths
        }
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        print(f"cannot be read as Python: {error}", file=sys.stderr)
        return 1
    if not figures:
        print(f"{folder}: no Python files; name a folder that has some", file=sys.stderr)
        return 1
    print("\n".join(table(figures)))
    return 0


def count(source: str) -> Figures:
    """The figures of one file. Raises SyntaxError."""
    tree = ast.parse(source)
    lines = source.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    comments, code = _comments_and_code(source)
    code -= _lines_of_strings(tree)
    bodies = _outermost(functions)
    body_lines = {line for function in bodies for line in _span(function.body)} & code
    return Figures(
        lines=len(lines),
        code_lines=len(code),
        body_lines=len(body_lines),
        function_lines=tuple(len(_span([function])) for function in functions),
        expressions=sum(
            isinstance(node, COMPUTING) for function in bodies for node in _walk_body(function)
        ),
        tuple_assignments=sum(_assigns_tuple(node) for node in ast.walk(tree)),
        long_lines=sum(len(line) > WIDTH for line in lines),
        why_lines=sum(_says_why(comment) for comment in comments)
        + _attribute_docstring_lines(tree),
    )


def total(parts: list[Figures]) -> Figures:
    """The figures of several files together."""
    return Figures(
        lines=sum(part.lines for part in parts),
        code_lines=sum(part.code_lines for part in parts),
        body_lines=sum(part.body_lines for part in parts),
        function_lines=tuple(size for part in parts for size in part.function_lines),
        expressions=sum(part.expressions for part in parts),
        tuple_assignments=sum(part.tuple_assignments for part in parts),
        long_lines=sum(part.long_lines for part in parts),
        why_lines=sum(part.why_lines for part in parts),
    )


def table(figures: dict[str, Figures]) -> Iterator[str]:
    """A heading, a line for each file, and one for all of them."""
    rows = {**figures, "total": total(list(figures.values()))}
    width = max(len(name) for name in rows)
    yield f"{'file':{width}}  lines functions median   p90 expr/line tuples  long   why"
    for name, row in rows.items():
        yield (
            f"{name:{width}} {row.lines:6} {len(row.function_lines):9} {median(row):6g} {p90(row):5} "
            f"{per(1, row.expressions, row.body_lines):9.2f} {per(1000, row.tuple_assignments, row.code_lines):6.1f} "
            f"{per(1000, row.long_lines, row.lines):5.1f} {per(1000, row.why_lines, row.lines):5.1f}"
        )


def median(row: Figures) -> float:
    """Lines of the function in the middle; 0 where there is none."""
    return statistics.median(row.function_lines) if row.function_lines else 0


def p90(row: Figures) -> int:
    """Lines of the shortest function that is longer than nine in ten, or as long; 0 where there is
    none.
    """
    if not row.function_lines:
        return 0
    ranked = sorted(row.function_lines)
    return ranked[int(0.9 * len(ranked))]


def per(many: int, found: int, among: int) -> float:
    """How many of `many` are found, where `found` are among `among`; 0 of nothing."""
    return many * found / among if among else 0.0


def _comments_and_code(source: str) -> tuple[list[str], set[int]]:
    """The comments, and the numbers of lines that hold more than them."""
    comments: list[str] = []
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string)
        elif token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return comments, code


def _says_why(comment: str) -> bool:
    return not FOR_TOOLS.match(comment) and not HEADING.match(comment)


def _span(body: list[ast.stmt] | list[Function]) -> range:
    """The numbers of the lines of some statements, one after the other."""
    last = body[-1].end_lineno
    assert last is not None
    return range(body[0].lineno, last + 1)


def _is_string(node: ast.AST) -> bool:
    """Whether a statement is a string alone: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _lines_of_strings(tree: ast.Module) -> set[int]:
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _is_string(node)]
    return {line for string in strings for line in _span([string])}


def _outermost(functions: list[Function]) -> list[Function]:
    """Functions that lie in no other: what is inside of one is part of its body,
    and counts once.
    """
    inside = {
        id(node) for function in functions for node in ast.walk(function) if node is not function
    }
    return [function for function in functions if id(function) not in inside]


def _walk_body(function: Function) -> Iterator[ast.AST]:
    for statement in function.body:
        yield from ast.walk(statement)


def _assigns_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[-1], ast.Tuple)


def _attribute_docstring_lines(tree: ast.Module) -> int:
    found = 0
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.Module | ast.ClassDef):
            continue
        for before, node in zip(owner.body, owner.body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and _is_string(node):
                found += len(_span([node]))
    return found


if __name__ == "__main__":
    sys.exit(main())
