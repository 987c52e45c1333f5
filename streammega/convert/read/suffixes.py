"""What the name of a file tells: its format, and how it is compressed. In capitals or not."""

from __future__ import annotations

import os
import re
from typing import Literal

Format = Literal[
    "text", "jsonl", "parquet", "arrow", "tar", "megatron", "raw", "npy", "mds", "litdata"
]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
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
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
"""A `.bin` is raw tokens where no `.idx` lies beside it (`inputs.py` looks), and a `.json` may turn out
to be no lines (`may_hold_values`).
"""

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
    """The format that a path's suffix tells; text where it tells none."""
    suffix = suffix_of(bare_name(path))
    return BY_SUFFIX.get(suffix, "text")


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

    What is called .jsonl or .ndjson is lines: parts of it are read by several workers, without a
    look at its start.
    """
    suffix = suffix_of(bare_name(path))
    return suffix == ".json"
