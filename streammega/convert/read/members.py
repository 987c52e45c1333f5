"""Which members of a WebDataset archive are documents: of a sample one, the only one that may be,
or the one that is named.

Samples are webdataset's: members that follow each other and share their name up to its first dot;
what comes behind that dot is the member (`txt` of 000042.txt, `ocr.txt` of 000042.ocr.txt).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from streammega.convert.read.keys import listed
from streammega.convert.read.slices import Skipped
from streammega.convert.read.suffixes import COMPRESSIONS, JSON_SUFFIXES, bare_name
from streammega.convert.read.walk import SIGNS
from streammega.errors import ConfigError, ConvertError

SUFFIXES = (".txt", ".npy", *JSON_SUFFIXES)
"""Of members that are documents, where none was named."""
WITHOUT = "samples without the member"
WITHOUT_TEXT = "samples without text"
MOST_NAMES = 20
"""Of members, in a message."""


def document_suffix(name: str) -> str:
    """The suffix of a member, in small letters, without that of its compression; "" where there is
    none.
    """
    _, dot, suffix = bare_name(name).rpartition(".")
    return f".{suffix.lower()}" if dot else ""


class MemberChoice:
    """Follows the names in an archive, and chooses.

    `wanted`: a member, a pattern of several, or None.
    """

    def __init__(self, wanted: str | None, path: str) -> None:
        if wanted is not None:
            wanted = wanted.lower().removeprefix(".")
        self._wanted = wanted
        self._path = path
        self._sample: str | None = None
        self._names: list[str] = []
        """Of all members of the sample so far."""
        self._taken: list[str] = []
        """Those of them that are documents."""
        self._without = 0
        """Samples without the member that is wanted."""
        self._any = False
        self._known: dict[str, None] = {}
        """All members of the archive, in order of appearance, as far as a message tells of them."""

    def takes(self, name: str) -> bool:
        """Whether the next member is a document."""
        sample, member = _split(name)
        if sample is None or sample != self._sample:
            self._end_sample()
            self._sample = sample
        member = _plain(member or document_suffix(name))
        self._names.append(name)
        if member and len(self._known) < MOST_NAMES:
            self._known.setdefault(member)
        if not self._is_wanted(name, member):
            return False
        self._taken.append(name)
        return True

    def check_sample(self) -> None:
        """Raise ConfigError if the sample has a second member that may be its document."""
        if len(self._taken) > 1 and not self._takes_several():
            raise self._ambiguous()

    def check_end(self, skipped: Skipped) -> None:
        """Count samples without the member. Raises ConvertError if no sample has it."""
        self._end_sample()
        if self._wanted is not None and not self._any and self._known:
            known = listed(self._known)
            raise ConvertError(
                f"{self._path}: no sample has a member {self._wanted!r} (they have: {known})"
            )
        if self._without:
            # without a message: there may be as many as samples
            reason = WITHOUT_TEXT if self._wanted is None else WITHOUT
            skipped.counts[reason] = skipped.counts.get(reason, 0) + self._without

    def _end_sample(self) -> None:
        if self._taken:
            self._any = True
        elif self._names:
            self._without += 1
        self._names = []
        self._taken = []

    def _is_wanted(self, name: str, member: str) -> bool:
        # `*` takes several of a sample, and of what can be documents at all: no images
        if self._wanted is None or self._wanted == "*":
            return document_suffix(name) in SUFFIXES
        return fnmatchcase(member, self._wanted)

    def _takes_several(self) -> bool:
        """Whether the pattern says that every member is a document by itself."""
        if self._wanted is None:
            return False
        return not set(SIGNS).isdisjoint(self._wanted)

    def _ambiguous(self) -> ConfigError:
        members: dict[str, None] = {}  # in their order, each once
        for name in self._taken:
            _, member = _split(name)
            members.setdefault(_plain(member or ""))
        if len(members) == 1:
            (member,) = members
            return ConfigError(
                f"{self._path}: sample {self._sample!r} has the member {member!r} more than once "
                f"({listed(self._names)}); take each as a document by --member '*{member}', or "
                f"make the archive again with one of each name"
            )
        return ConfigError(
            f"{self._path}: of sample {self._sample!r} more than one member may be the document "
            f"({listed(self._names)}); name one by --member, {' or '.join(map(repr, members))} for "
            f"instance, or take each as a document by --member '*'"
        )


def _split(name: str) -> tuple[str | None, str | None]:
    """The sample and the member that a name says: what is before and behind its first dot."""
    folder, slash, last = name.rpartition("/")
    sample, dot, member = last.partition(".")
    return (folder + slash + sample, member) if sample and dot else (None, None)


def _plain(member: str) -> str:
    """A member in small letters, without the suffix of its compression."""
    member = member.lower().removeprefix(".")
    bare, _, suffix = member.rpartition(".")
    # all of it may be the suffix: "gz" of 000042.gz
    return bare if f".{suffix}" in COMPRESSIONS else member
