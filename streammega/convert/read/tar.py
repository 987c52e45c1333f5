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
    decompress,
)
from streammega.convert.read.fields import join_names
from streammega.convert.read.source import (
    GLOB_CHARS,
    READ_BYTES,
    LongLine,
    Source,
    read_lines,
    too_large,
)
from streammega.convert.read.text import BYTE_ORDER_MARK, JSON_LINES_SUFFIXES, JSON_SUFFIXES
from streammega.errors import ConfigError, ConvertError
from streammega.errors.words import in_one_line
from streammega.storage.open import escapes_folder, is_hidden_member
from streammega.storage.tar_members import open_tar, read_members

SUFFIXES = (".txt", ".npy", *JSON_SUFFIXES)
"""Suffixes of members that are documents, unless a member is named."""
MAX_NAMES = 20
"""Names of members in a message."""


def read_tar(source: Source) -> Iterator[RawDocument | Tokens]:
    """Documents of all members, in their order; other members are counted.

    Raises ConvertError for an archive without an end.
    """
    path = source.path
    wanted = source.options.tar_member
    if wanted is not None:
        wanted = wanted.lower().removeprefix(".")
    # a pattern says that every member is a document by itself
    takes_several = not set(GLOB_CHARS).isdisjoint(wanted or "")
    known: dict[str, None] = {}
    """Members of samples, in order of appearance, as far as a message tells of them."""
    documents = 0
    samples_without = 0
    with source.open() as file, _open_archive(file, path) as archive:
        members = _regular_members(archive, source)
        # a member without a sample is a sample of its own
        for sample, group in itertools.groupby(
            members, lambda one: _split(one.name)[0] or object()
        ):
            names: list[str] = []
            taken: list[str] = []
            for entry in group:
                name = entry.name
                member = _plain(_split(name)[1] or document_suffix(name))
                names.append(name)
                if member and len(known) < MAX_NAMES:
                    known.setdefault(member)
                # `*` takes several of a sample, and of what can be documents at all: no images
                is_document = document_suffix(name) in SUFFIXES
                if wanted not in (None, "*"):
                    is_document = fnmatchcase(member, wanted)
                if not is_document:
                    source.skipped.add_member(document_suffix(name) or "without a suffix")
                    continue
                taken.append(name)
                if len(taken) > 1 and not takes_several:
                    raise _ambiguous(path, str(sample), names, taken)
                yield from _documents_of(archive, entry, f"{path}!{name}", source)
            documents += len(taken)
            samples_without += not taken
    if wanted is not None and known and not documents:
        raise ConvertError(
            f"{path}: no sample has a member {wanted!r} (they have: {join_names(known)})"
        )
    # without a message: there may be as many as samples
    reason = "samples without text" if wanted is None else "samples without the member"
    source.skipped.leave_out(reason, samples_without)


def _regular_members(archive: Any, source: Source) -> Iterator[tarfile.TarInfo]:
    """The files of an archive; what else is in it is counted."""
    for member in _members(archive, source.path):
        if member.issym() or member.islnk():
            source.skipped.add_member("links")
        elif not member.isreg():
            if not member.isdir():
                source.skipped.add_member("devices and pipes")
        elif escapes_folder(member.name):
            where = in_one_line(f"{source.path}!{member.name}")
            message = f"{where}: a member outside of its archive; who made this tar?"
            source.fault("hostile path", message)
        elif is_hidden_member(member.name):
            source.skipped.add_member("hidden")
        else:
            yield member


def _open_archive(file: Any, path: str) -> tarfile.TarFile:
    """Raises ConvertError for an archive whose name does not say that it is compressed."""
    head = file.read(tarfile.BLOCKSIZE)
    compression = compression_of_bytes(head)
    if compression:
        raise ConvertError(
            f"{path}: is compressed, and its name does not say so; rename it to .tar{compression}"
        )
    rest = iter(lambda: file.read(READ_BYTES), b"")
    stream: Any = PieceReader(itertools.chain([head], rest))
    return open_tar(stream, "r|")


def _members(archive: Any, path: str) -> Iterator[tarfile.TarInfo]:
    """`read_members`. Raises ConvertError."""
    try:
        yield from read_members(archive)
    except tarfile.ReadError as error:
        raise ConvertError(f"{path}: {error}") from None


def _documents_of(
    archive: tarfile.TarFile, member: tarfile.TarInfo, where: str, source: Source
) -> Iterator[RawDocument | Tokens]:
    """The documents of a regular member: of JSON lines each line, else one."""
    max_bytes = source.options.max_record_bytes
    suffix = document_suffix(member.name)
    if member.issparse():  # a header may claim a petabyte of holes
        message = f"{in_one_line(where)}: is stored with holes; make the tar again without --sparse"
        source.fault("unreadable member", message)
        return
    file: Any = archive.extractfile(member)
    compression = compression_of(member.name)
    if compression:
        if COMPRESSIONS[compression].start is None:
            source.fault(
                "unreadable member",
                f"{where}: {compression} is not read within an archive; decompress it, or pack it "
                f"as .gz or .zst",
            )
            return
        file = PieceReader(decompress(file, compression, in_one_line(where)))
    try:
        if suffix in JSON_LINES_SUFFIXES:
            mark = BYTE_ORDER_MARK
            for number, line in enumerate(read_lines(b"", file, max_bytes), 1):
                if isinstance(line, LongLine):
                    yield RawDocument(data=b"", path=where, line=number, size=line.size)
                elif line.removeprefix(mark).strip():
                    yield RawDocument(data=line, path=where, line=number, is_record=True)
                mark = b""
            return
        # a few bytes more tell that a member is too large, or that a line ends behind its record
        data = file.read(max_bytes + 3)
    except tarfile.TarError as error:
        path = where.partition("!")[0]
        raise ConvertError(
            f"{path}: cannot be read within {in_one_line(where)} ({error}); is the archive whole?"
        ) from None
    if suffix == ".json":  # one record, over several lines perhaps
        yield RawDocument(data=data, path=where, is_record=True)
    elif len(data) > max_bytes:
        source.fault("too large", too_large(where, source.options))
    elif suffix == ".npy":
        array = load_npy(io.BytesIO(data), where)
        yield one_per_document(array, np.array([array.size]), len(data), where)
    else:  # .txt, or a member that --tar-member names
        yield RawDocument(data=data.removeprefix(BYTE_ORDER_MARK), path=where)


def document_suffix(name: str) -> str:
    """The suffix of a member, in small letters, without that of its compression; "" where there is
    none.
    """
    _, dot, suffix = bare_name(name).rpartition(".")
    return f".{suffix.lower()}" if dot else ""


def _ambiguous(path: str, sample: str, names: list[str], taken: list[str]) -> ConfigError:
    """names: the members of a sample so far. taken: those of them that may be its document."""
    members = list(dict.fromkeys(_plain(_split(name)[1] or "") for name in taken))
    if len(members) == 1:
        return ConfigError(
            f"{path}: sample {sample!r} has the member {members[0]!r} more than once "
            f"({join_names(names)}); take each as a document by --tar-member '*{members[0]}', or "
            f"make the archive again with one of each name"
        )
    return ConfigError(
        f"{path}: of sample {sample!r} more than one member may be the document "
        f"({join_names(names)}); name one by --tar-member, {' or '.join(map(repr, members))} for "
        f"instance, or take each as a document by --tar-member '*'"
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
