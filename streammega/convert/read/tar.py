"""WebDataset tars: .txt, .json, .jsonl and .npy members, themselves compressed or not. Nothing is
extracted to disk.

Samples are webdataset's: members that follow each other and share their name up to its first dot;
what comes after that dot is the member (`txt` of 000042.txt, `ocr.txt` of 000042.ocr.txt). Of a
sample one member is the document: the only one that may be, or the one that is named.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from streammega.convert.documents import RawDocument, Tokens, one_per_document
from streammega.convert.read.arrays import load_npy
from streammega.convert.read.compression import (
    COMPRESSIONS,
    PieceReader,
    bare_name,
    compression_of,
    compression_of_bytes,
    decompressed,
)
from streammega.convert.read.fields import listed
from streammega.convert.read.source import (
    GLOB_CHARS,
    LongLine,
    Source,
    escapes_folder,
    read_lines,
    too_large,
)
from streammega.convert.read.text import BYTE_ORDER_MARK, JSON_LINES_SUFFIXES, JSON_SUFFIXES
from streammega.errors import ConfigError, ConvertError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import in_one_line

READ_BYTES = 1 << 20
SUFFIXES = (".txt", ".npy", *JSON_SUFFIXES)
"""Of members that are documents, where none was named."""
MAX_NAMES = 20
"""Of members, in a message."""


def read_tar(source: Source) -> Iterator[RawDocument | Tokens]:
    """Documents of all members, in their order; members that are none are counted.

    Raises ConvertError for an archive without an end.
    """
    skipped = source.skipped
    choice = MemberChoice(source.options.member, source.path)
    with source.open() as file:
        for archive, member in _members(file, redact_urls(source.path)):
            name = member.name
            where = f"{source.path}!{name}"
            if member.issym() or member.islnk():
                skipped.add_member("links")
            elif not member.isreg():
                if not member.isdir():
                    skipped.add_member("devices and pipes")
            elif escapes_folder(name):
                message = (
                    f"{in_one_line(where)}: a member outside of its archive; who made this tar?"
                )
                source.fault("hostile path", message)
            elif not choice.takes(name):
                skipped.add_member(document_suffix(name) or "without a suffix")
            else:
                choice.check_sample()
                yield from _documents_of(archive, member, where, source)
    choice.check_end()
    if choice.samples_without:
        # without a message: there may be as many as samples
        reason = "samples without text"
        if source.options.member is not None:
            reason = "samples without the member"
        skipped.leave_out(reason, choice.samples_without)


def _members(file: Any, path: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of an archive, up to its end. `tarfile` itself takes a damaged header, and the end
    of the file, for the end of the archive.

    Raises ConvertError for an archive that is damaged, cut short, or followed by something else.
    """
    head = file.read(tarfile.BLOCKSIZE)
    compression = compression_of_bytes(head)
    if compression:
        raise ConvertError(
            f"{path}: is compressed, and its name does not say so; rename it to .tar{compression}"
        )
    rest = iter(lambda: file.read(READ_BYTES), b"")
    stream = PieceReader(itertools.chain([head], rest))
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        member = archive.firstmember
        while member is not None:
            yield archive, member
            archive.fileobj.seek(archive.offset)
            place = archive.offset
            try:
                member = tarfile.TarInfo.fromtarfile(archive)
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # an empty header
                member = None
            except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):  # type: ignore[attr-defined]
                raise ConvertError(
                    f"{path}: the archive has no end; it is cut short: copy it again"
                ) from None
            except tarfile.HeaderError as error:
                raise ConvertError(
                    f"{path}: the header at byte {place:,} is damaged ({error}), and nothing after "
                    f"it can be read: copy it again"
                ) from None
        # what pads an archive is zeros, of any length
        while data := archive.fileobj.read(READ_BYTES):
            if data.strip(b"\0"):
                raise ConvertError(
                    f"{path}: goes on after its end; did a copy of it leave zeros, or is it several "
                    f"archives?"
                )


def _documents_of(
    archive: tarfile.TarFile, member: tarfile.TarInfo, where: str, source: Source
) -> Iterator[RawDocument | Tokens]:
    """The documents of a regular member: of JSON lines each line, else one."""
    max_bytes = source.options.max_record_bytes
    suffix = document_suffix(member.name)
    file: Any = archive.extractfile(member)
    compression = compression_of(member.name)
    if compression and COMPRESSIONS[compression].start is not None:
        file = PieceReader(decompressed(file, compression))
    try:
        if suffix in JSON_LINES_SUFFIXES:
            for number, line in enumerate(read_lines(b"", file, max_bytes), 1):
                if isinstance(line, LongLine):
                    yield RawDocument(data=b"", path=where, line=number, size=line.size)
                elif line.strip():
                    yield RawDocument(data=line, path=where, line=number, record=True)
            return
        # a few bytes more tell that a member is too large, or that a line ends behind its record
        data = file.read(max_bytes + 3)
    except tarfile.TarError as error:
        path = where.partition("!")[0]
        raise ConvertError(
            f"{path}: cannot be read within {in_one_line(where)} ({error}); is the archive whole?"
        ) from None
    if suffix == ".json":  # one record, over several lines perhaps
        yield RawDocument(data=data, path=where, record=True)
    elif len(data) > max_bytes:
        source.fault("too large", too_large(where, source.options))
    elif suffix == ".npy":
        array = load_npy(io.BytesIO(data), where)
        yield one_per_document(array, np.array([array.size]), len(data), where)
    else:  # .txt, or what was asked for by its name
        yield RawDocument(data=data.removeprefix(BYTE_ORDER_MARK), path=where)


def document_suffix(name: str) -> str:
    """The suffix of a member, in small letters, without that of its compression; "" where there is
    none.
    """
    _, dot, suffix = bare_name(name).rpartition(".")
    return f".{suffix.lower()}" if dot else ""


class MemberChoice:
    """Follows the names in an archive, and chooses the members that are documents.

    wanted: a member, a pattern of several, or None.
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
        self.samples_without = 0
        """Samples without a document."""
        self._found_any = False
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
        if member and len(self._known) < MAX_NAMES:
            self._known.setdefault(member)
        if not self._is_wanted(name, member):
            return False
        self._taken.append(name)
        return True

    def check_sample(self) -> None:
        """Raise ConfigError if the sample has a second member that may be its document."""
        # a pattern says that every member is a document by itself
        takes_several = not set(GLOB_CHARS).isdisjoint(self._wanted or "")
        if len(self._taken) > 1 and not takes_several:
            raise self._ambiguous()

    def check_end(self) -> None:
        """End the last sample. Raises ConvertError if no sample has the member."""
        self._end_sample()
        if self._wanted is not None and not self._found_any and self._known:
            known = listed(self._known)
            raise ConvertError(
                f"{self._path}: no sample has a member {self._wanted!r} (they have: {known})"
            )

    def _end_sample(self) -> None:
        if self._taken:
            self._found_any = True
        elif self._names:
            self.samples_without += 1
        self._names = []
        self._taken = []

    def _is_wanted(self, name: str, member: str) -> bool:
        # `*` takes several of a sample, and of what can be documents at all: no images
        if self._wanted is None or self._wanted == "*":
            return document_suffix(name) in SUFFIXES
        return fnmatchcase(member, self._wanted)

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
