"""What the name of a file tells: its format, and how it is compressed. In capitals or not."""

from __future__ import annotations

import os
import re
from typing import Literal

Format = Literal[
    "text",
    "lines",
    "jsonl",
    "csv",
    "parquet",
    "arrow",
    "tar",
    "megatron",
    "raw",
    "npy",
    "mds",
    "litdata",
    "unknown",
]
TEXT_FORMATS = ("text", "lines", "jsonl", "csv")
"""Formats that hold text and nothing else."""
JSON_LINES_SUFFIXES = (".jsonl", ".jsonlines", ".jl", ".ndjson")
JSON_SUFFIXES = (*JSON_LINES_SUFFIXES, ".json")
PROSE_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".asciidoc", ".org", ".srt")
MARKUP_SUFFIXES = (
    *(".html", ".htm", ".xhtml", ".xml", ".svg", ".tex", ".bib", ".sty", ".typ"),
    *(".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".css", ".scss", ".less", ".ipynb"),
)
CODE_SUFFIXES = (
    *(".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh"),
    *(".cs", ".java", ".kt", ".kts", ".scala", ".groovy", ".clj", ".go", ".rs", ".zig", ".swift"),
    *(".m", ".mm", ".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", ".vue", ".php", ".rb", ".pl"),
    *(".pm", ".lua", ".r", ".hs", ".ml", ".mli", ".fs", ".ex", ".exs", ".erl", ".lisp"),
    *(".el", ".scm", ".rkt", ".f", ".f90", ".f95", ".for", ".pas", ".adb", ".ads", ".d", ".nim"),
    *(".v", ".sv", ".vhd", ".vhdl", ".asm", ".s", ".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat"),
    *(".sql", ".proto", ".thrift", ".graphql", ".cmake", ".mk", ".gradle", ".tf", ".nix", ".lean"),
    *(".agda", ".coq", ".dart", ".sol", ".cob", ".cbl", ".tcl", ".vim", ".diff", ".patch"),
)
TEXT_SUFFIXES = frozenset((*PROSE_SUFFIXES, *MARKUP_SUFFIXES, *CODE_SUFFIXES))
"""Files that are one text each."""
TEXT_NAMES = (
    "readme",
    "license",
    "licence",
    "notice",
    "copying",
    "authors",
    "changelog",
    "makefile",
    "dockerfile",
)
"""Files without a suffix that are one text each."""
COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz", ".lzma", ".zip", ".lz4", ".snappy")
"""Of one file. The last two need packages of their own."""
BY_SUFFIX: dict[str, Format] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
    ".bin": "raw",
    ".npy": "npy",
    ".csv": "csv",
    ".tsv": "csv",
    **dict.fromkeys(JSON_SUFFIXES, "jsonl"),
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
}
"""A `.bin` is raw tokens where no `.idx` lies beside it (`inputs.py` looks), and a `.json` may turn out
to be no lines (`may_hold_values`).
"""
FORMAT_READ_AS: dict[str, Format] = {"text": "text", "lines": "lines", "json": "jsonl"}
"""The formats that `--as` names: a file is one text, a text a line, or a JSON record a line."""

_QUERY = re.compile(r"""(https?://[^\s?'"<>]+)\?[^\s'"<>)\]]*""")


def suffix_of(path: str) -> str:
    """The last suffix of a path, in small letters; "" without one."""
    _, suffix = os.path.splitext(path)
    return suffix.lower()


def bare_name(path: str) -> str:
    """A path without the suffix of its compression."""
    bare, suffix = os.path.splitext(path)
    return bare if suffix.lower() in COMPRESSIONS else path


def format_of(path: str) -> Format:
    """The format that a path's suffix tells."""
    bare = bare_name(path)
    if os.path.basename(bare).lower() in TEXT_NAMES:
        return "text"
    return BY_SUFFIX.get(suffix_of(bare), "unknown")


def split_query(url: str) -> tuple[str, str]:
    """A URL without its query, and the query with its question mark: of http(s) only, since in
    other names it is a sign like any.

    The query may hold a signature (of a presigned URL), which is a secret as a whole: it is for
    reading, and shown nowhere.
    """
    if not url.startswith(("http://", "https://")):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def without_queries(text: str) -> str:
    """A library's words without the queries of the web's URLs in them, however they are spelt."""
    return _QUERY.sub(r"\1", text)


def is_compressed(path: str) -> bool:
    """Whether a file has to be decompressed from its start."""
    suffix = suffix_of(path)
    return suffix in COMPRESSIONS or suffix == ".tgz"


def may_hold_values(path: str) -> bool:
    """Whether a file may hold arrays or records over several lines, and what it holds is told by
    its content.

    What is called .jsonl, .jsonlines, .jl or .ndjson is lines: several workers read parts of it,
    without a look at its start.
    """
    return suffix_of(bare_name(path)) not in JSON_LINES_SUFFIXES
