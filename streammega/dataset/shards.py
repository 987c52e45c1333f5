"""Names of token shards, `.bin`, `.bin.zst` or `.tar` with an `.idx` each, and what is known of one
before it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from streammega.errors import FormatError
from streammega.storage import ObjectInfo

MANIFEST = ".manifest.json"
"""What a dataset's manifest has behind its prefix."""
Kind = Literal["bin", "zst", "tar"]
SUFFIXES: dict[Kind, str] = {"bin": ".bin", "zst": ".bin.zst", "tar": ".tar"}
_KIND_OF_SUFFIX: dict[str, Kind] = {".bin.zst": "zst", ".tar": "tar", ".bin": "bin", ".idx": "bin"}
_ANY_SUFFIX = tuple(_KIND_OF_SUFFIX)
_OF = "-of-"
_NUMBERED = re.compile(rf"^(?P<stem>.*)-(?P<number>\d{{5,}}){_OF}(?P<count>\d{{5,}})$")
"""A shard of several: `shard_name` pads to five digits, and more are needed from 100,000 on."""
_MARK = "-gen"
_MARKED = re.compile(rf"^(?P<stem>.+){_MARK}[0-9a-f]{{12}}(-\d{{5,}}-of-\d{{5,}})?$")
"""A shard that replaces one of a dataset which is there: its mark is of the conversion."""
MOST_MISSING = 3
"""Missing shards of a set that a message names."""


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class ManifestEntry:
    """What a manifest says of a shard. `bytes`, `index_bytes`: of both objects, as stored.

    loss_modes: the modes to be learned. tokenizer: its name and digest. bin_tokens: of bins that
    documents are packed into; None: they lie end to end.
    """

    dtype: np.dtype[Any]
    documents: int
    sequences: int
    tokens: int
    bytes: int
    index_bytes: int
    loss_modes: tuple[int, ...] | None = None
    tokenizer: tuple[str, str] | None = None
    bin_tokens: int | None = None

    @property
    def token_bytes(self) -> int:
        """Of all tokens, decompressed."""
        return self.tokens * self.dtype.itemsize


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class KnownShard:
    """A shard's name, and what was told of it by a listing (`stored`: its tokens, `index`: its
    `.idx`) and by a manifest. `is_alone`: no listing of many told it, but looks at the two.
    """

    name: str
    stored: ObjectInfo | None = None
    index: ObjectInfo | None = None
    entry: ManifestEntry | None = None
    is_alone: bool = False

    @property
    def is_listed(self) -> bool:
        """Whether a listing told of its `.idx`."""
        return self.index is not None and not self.is_alone


def keyed(info: ObjectInfo, key: str) -> ObjectInfo:
    """What was told of an object, under the key that its store has for it."""
    return info if info.key == key else replace(info, key=key)


def check_told(url: str, what: str, found: object, told: object) -> None:
    """Raise FormatError unless something of a shard is what its manifest told."""
    if found != told:
        raise FormatError(
            f"{url}: has {found} {what}, its manifest says {told}; it is cut short, or another "
            "dataset's: copy or convert it again (where the manifest is the stale one, remove that)"
        )


def split_name(name: str) -> tuple[str, Kind]:
    """(prefix, kind) of a shard: a prefix alone is a `.bin`; users paste names with any of the
    suffixes.
    """
    # Asked first, which is quick: names are split several times for each shard.
    if not name.endswith(_ANY_SUFFIX):
        return name, "bin"
    for suffix, kind in _KIND_OF_SUFFIX.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), kind
    return name, "bin"


def named(prefix: str, kind: Kind) -> str:
    """The name of a shard: a `.bin`'s is its prefix."""
    return prefix if kind == "bin" else prefix + SUFFIXES[kind]


def strip_suffix(name: str) -> str:
    """A prefix without `.idx`, `.bin`, `.bin.zst` or `.tar`: users paste any of them."""
    prefix, _ = split_name(name)
    return prefix


def set_name(prefix: str) -> str:
    """The prefix of the dataset that a shard is one of: without its number, where it has one."""
    numbered = _NUMBERED.match(prefix)
    return numbered["stem"] if numbered else prefix


def shard_name(prefix: str, number: int, count: int) -> str:
    """The prefix of one of several shards.

    The count is part of it, so that a missing one is noticed.
    """
    return f"{prefix}-{number:05d}-of-{count:05d}"


def marked(name: str, stem: str, mark: str) -> str:
    """The name of a shard of the dataset `stem` with a mark after that, by which it lies beside the
    shards it is to replace.
    """
    return f"{stem}-{mark}{name.removeprefix(stem)}" if mark else name


def owner_of(name: str) -> str | None:
    """The prefix of the dataset to which a shard with a mark belongs; None for all others."""
    if _MARK not in name:  # as nearly all: thousands of names are asked
        return None
    prefix, _ = split_name(name)
    marked_name = _MARKED.match(prefix)
    return marked_name["stem"] if marked_name else None


def may_belong(name: str, prefix: str) -> bool:
    """Whether a shard's name is one that shards of the dataset `prefix` have: itself, numbered, or
    with a mark.
    """
    own_prefix, _ = split_name(name)
    return prefix in (own_prefix, set_name(own_prefix), owner_of(own_prefix))


def missing_shards(names: Iterable[str]) -> list[str]:
    """Of numbered shards, the prefixes that should be there too and are not, at most a few of each
    set.
    """
    numbers_of_set: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if _OF not in name:  # a search of each of thousands takes longer
            continue
        prefix, _ = split_name(name)
        numbered = _NUMBERED.match(prefix)
        if numbered is None:
            continue
        of_set = (numbered["stem"], int(numbered["count"]))
        numbers_of_set.setdefault(of_set, set()).add(int(numbered["number"]))
    missing = []
    for (stem, count), numbers in numbers_of_set.items():
        # Not all of them: a name may tell of any count, and it is somebody else's.
        absent = (number for number in range(count) if number not in numbers)
        for number in islice(absent, MOST_MISSING):
            missing.append(shard_name(stem, number, count))
    return missing
