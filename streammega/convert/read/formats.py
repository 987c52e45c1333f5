"""Formats of inputs, and the suffixes that name them and their compressions, in any case."""

from __future__ import annotations

import os
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
"""A `.bin` with an `.idx` of the same name is "megatron": `inputs.py` finds such pairs."""
FORMAT_READ_AS: dict[str, Format] = {"text": "text", "lines": "lines", "json": "jsonl"}
"""The formats that `--as` names: a file is one text, a text a line, or a JSON record a line."""


def suffix_of(path: str) -> str:
    """The last suffix of a path, in small letters; "" without one."""
    _, suffix = os.path.splitext(path)
    return suffix.lower()


def bare_name(path: str) -> str:
    """A path without the suffix of its compression."""
    bare, suffix = os.path.splitext(path)
    return bare if suffix.lower() in COMPRESSIONS else path


def format_suffix(path: str) -> str:
    """The last suffix that names no compression, in small letters."""
    return suffix_of(bare_name(path))


def format_of(path: str) -> Format:
    """The format that a path's suffix tells."""
    if os.path.basename(bare_name(path)).lower() in TEXT_NAMES:
        return "text"
    return BY_SUFFIX.get(format_suffix(path), "unknown")


def is_compressed(path: str) -> bool:
    """Whether a file has to be decompressed from its start."""
    suffix = suffix_of(path)
    return suffix in COMPRESSIONS or suffix == ".tgz"


def has_jsonl_suffix(path: str) -> bool:
    """Whether a file's name says that it has a JSON record a line: .jsonl, .jsonlines, .jl, .ndjson.

    The content of other JSON files says whether they hold lines, arrays, or records over several
    lines.
    """
    return format_suffix(path) in JSON_LINES_SUFFIXES
