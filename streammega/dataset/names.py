"""Names of shards and of datasets: a prefix, and the suffixes, numbers and marks of its shards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Literal

MANIFEST = ".manifest.json"
"""The end of a manifest's name, after the prefix of the dataset."""
Kind = Literal["bin", "zst", "tar"]
SUFFIXES: dict[Kind, str] = {"bin": ".bin", "zst": ".bin.zst", "tar": ".tar"}
TOKENIZER = ".tokenizer"
"""Ends the name of the copy of its tokenizer that a dataset has."""
_KIND_OF_SUFFIX: dict[str, Kind] = {".bin.zst": "zst", ".tar": "tar", ".bin": "bin", ".idx": "bin"}
_ANY_SUFFIX = tuple(_KIND_OF_SUFFIX)
_OF = "-of-"
_NUMBERED = re.compile(rf"^(?P<stem>.*)-(?P<number>\d{{5,}}){_OF}(?P<count>\d{{5,}})$")
"""One of several shards. `shard_name` pads numbers to five digits; from 100,000 on they have more."""
_MARK = "-gen"
_MARKED = re.compile(rf"^(?P<stem>.+){_MARK}[0-9a-f]{{12}}(-\d{{5,}}-of-\d{{5,}})?$")
"""A shard that replaces an existing one. The mark is the conversion's."""
_COPY = re.compile(rf"^(?P<stem>.+)\.[0-9a-f]{{12}}{re.escape(TOKENIZER)}$")
MAX_MISSING = 3
"""Missing shards of a set that a message names."""


def split_name(name: str) -> tuple[str, Kind]:
    """(prefix, kind) of a shard, whose name may have any of the suffixes. A prefix alone is a `.bin`."""
    # This quick check comes first: names are split several times for each shard.
    if not name.endswith(_ANY_SUFFIX):
        return name, "bin"
    for suffix, kind in _KIND_OF_SUFFIX.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), kind
    return name, "bin"


def with_suffix(prefix: str, kind: Kind) -> str:
    """The name of a shard: a `.bin`'s is its prefix."""
    return prefix if kind == "bin" else prefix + SUFFIXES[kind]


def strip_suffix(name: str) -> str:
    """A prefix without `.idx`, `.bin`, `.bin.zst` or `.tar`: users paste any of them."""
    prefix, _ = split_name(name)
    return prefix


def without_number(prefix: str) -> str:
    """The prefix of the dataset of a shard: its prefix without a number."""
    numbered = _NUMBERED.match(prefix)
    return numbered["stem"] if numbered else prefix


def shard_name(prefix: str, number: int, count: int) -> str:
    """The prefix of one of several shards. It has the count, so that a missing shard is noticed."""
    return f"{prefix}-{number:05d}-of-{count:05d}"


def with_mark(name: str, stem: str, mark: str) -> str:
    """The name of a shard of the dataset `stem` with a mark after `stem`. It can be written while the
    shards that it replaces are still there.
    """
    return f"{stem}-{mark}{name.removeprefix(stem)}" if mark else name


def dataset_of_marked(name: str) -> str | None:
    """The prefix of the dataset to which a shard with a mark belongs; None for all others."""
    if _MARK not in name:  # a quick check, for thousands of names
        return None
    prefix, _ = split_name(name)
    marked_name = _MARKED.match(prefix)
    return marked_name["stem"] if marked_name else None


def dataset_of(name: str) -> str:
    """The prefix of the dataset to which a shard belongs, as its name tells."""
    return dataset_of_marked(name) or without_number(strip_suffix(name))


def datasets_of(prefix: str) -> list[str]:
    """Prefixes that the dataset of a shard may have, for a dataset's own name may look like a shard's;
    last the one that the shard's name tells.
    """
    names = (prefix, without_number(prefix), dataset_of_marked(prefix))
    return list(dict.fromkeys(name for name in names if name is not None))


def tokenizer_name(prefix: str, digest: str) -> str:
    """The name of a dataset's copy of its tokenizer. digest: that of the tokenizer, so that one which
    replaces the dataset has a copy of another name.
    """
    return f"{prefix}.{digest[:12]}{TOKENIZER}"


def dataset_of_tokenizer(name: str) -> str | None:
    """The prefix of the dataset whose copy of a tokenizer a file is; None: it is no such copy."""
    copy = _COPY.match(name)
    return copy["stem"] if copy else None


def could_belong_to(name: str, prefix: str) -> bool:
    """Whether a shard's name is one of the dataset `prefix`: the prefix itself, numbered, or with a
    mark.
    """
    own_prefix, _ = split_name(name)
    return prefix in (own_prefix, without_number(own_prefix), dataset_of_marked(own_prefix))


def missing_shards(names: Iterable[str]) -> list[str]:
    """Prefixes of numbered shards that are missing, at most MAX_MISSING for each set."""
    numbers_of_set: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if _OF not in name:  # a quick check, for thousands of names
            continue
        prefix, _ = split_name(name)
        numbered = _NUMBERED.match(prefix)
        if numbered is None:
            continue
        of_set = (numbered["stem"], int(numbered["count"]))
        numbers_of_set.setdefault(of_set, set()).add(int(numbered["number"]))
    missing = []
    for (stem, count), numbers in numbers_of_set.items():
        # Not all of them: a foreign name may have any count.
        absent = (number for number in range(count) if number not in numbers)
        for number in islice(absent, MAX_MISSING):
            missing.append(shard_name(stem, number, count))
    return missing
