"""Files of byte pairs in tiktoken's form: how text is cut before pairs are merged is not in them,
and has to be known.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass

from streammega.errors import ConvertError

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASELESS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASELESS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_END = ("<|endoftext|>",)
LONGEST_LINE = 4096
"""Bytes of a file that are looked at for its first line: other files may have none."""


def _llama3_tokens() -> tuple[str, ...]:
    """The 256 special tokens behind Llama-3's 128,000."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
    tokens: list[str] = []
    reserved = 0
    for number in range(256):
        if number in named:
            tokens.append(named[number])
        else:
            # numbered by themselves: those with names leave no gap
            tokens.append(f"<|reserved_special_token_{reserved}|>")
            reserved += 1
    return tuple(tokens)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How a vocabulary cuts text, and its special tokens."""

    name: str
    expression: str
    size: int = 0
    """Its own tokens."""
    first: int | None = None
    """The id of its first special token, if that is not the first free one."""
    special_tokens: tuple[str, ...] = _END


PATTERNS = (
    Pattern(name="gpt2", expression=_GPT2, size=50256),
    Pattern(name="p50k_base", expression=_GPT2, size=50280),
    Pattern(name="cl100k_base", expression=_CL100K, size=100256, first=100257),
    Pattern(name="o200k_base", expression=_O200K, size=199998, first=199999),
    Pattern(name="llama3", expression=_LLAMA3, size=128000, special_tokens=_llama3_tokens()),
    Pattern(
        name="qwen",
        expression=_QWEN,
        size=151643,
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
)


def pattern_of(path: str, size: int, asked: str | None) -> Pattern:
    """The pattern of a file of `size` byte pairs: the one asked for, by name or written out, else
    by the size.

    Raises ConvertError where nothing tells it.
    """
    names = ", ".join(pattern.name for pattern in PATTERNS)
    for pattern in PATTERNS:
        if asked is None and pattern.size == size:
            return pattern
        if pattern.name == asked:
            if pattern.size == size:
                return pattern
            # of another vocabulary: it has the expression, and special tokens of its own
            return Pattern(name=pattern.name, expression=pattern.expression, size=size)
    if asked is not None and "\\" in asked:
        return Pattern(name="own", expression=asked, size=size)
    reason = (
        f"no pattern is called {asked!r}"
        if asked
        else f"its {size} tokens are those of no known vocabulary"
    )
    raise ConvertError(
        f"{os.path.basename(path)}: how it cuts text is not in the file, and {reason}; "
        f"give --tiktoken-pattern, one of {names}, or a regular expression"
    )


def is_tiktoken_file(path: str) -> bool:
    """Whether a file is a list of byte pairs, a line each: base64 and a number."""
    try:
        with open(path, "rb") as file:
            words = file.readline(LONGEST_LINE).split()
        if len(words) != 2 or not words[1].isdigit():
            return False
        token = base64.b64decode(words[0], validate=True)
    except (OSError, binascii.Error):
        return False
    return bool(token)
