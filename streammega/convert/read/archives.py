"""WebDataset tars: .txt, .json, .jsonl and .npy members, themselves compressed or not.

Nothing is extracted to disk.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.arrays import load_npy
from streammega.convert.read.decompressed import DECOMPRESSORS, decompressed
from streammega.convert.read.json_values import BYTE_ORDER_MARK
from streammega.convert.read.members import MemberChoice, document_suffix
from streammega.convert.read.slices import Item, Skipped, Slice, fault, open_stream
from streammega.convert.read.suffixes import JSON_SUFFIXES, suffix_of
from streammega.convert.read.tar_end import GOES_ON, TarEnd
from streammega.errors import ConvertError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import in_one_line

READ_BYTES = 1 << 20
_COMPRESSED = re.compile(rb"\x1f\x8b\x08|BZh.1AY&SY|\xfd7zXZ|\x5d\0\0\x80", re.S)
"""How gzip, bzip2, xz and lzma begin: what tarfile would decompress unasked."""


class _Archive:
    """The file of an archive, as tarfile reads it."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = redact_urls(path)
        self._end = TarEnd()
        self._begun = False

    def read(self, size: int) -> bytes:
        """Read on.

        Raises ConvertError where an archive begins that is compressed, whose end could not be told
        from a cut.
        """
        data = bytes(self._file.read(size))
        if not self._begun and _COMPRESSED.match(data):
            raise ConvertError(
                f"{self._path}: is compressed, and its name does not say so; rename it to .tar.gz, .tar.bz2 or .tar.xz"
            )
        self._begun = True
        self._end.follow(data)
        return data

    def check_end(self) -> None:
        """Raise ConvertError unless the archive has ended, and nothing comes after it."""
        problem = self._end.problem()
        if problem:
            raise ConvertError(f"{self._path}: {problem}")
        # what pads an archive is zeros, of any length
        for data in iter(lambda: self._file.read(READ_BYTES), b""):
            if data.strip(b"\0"):
                raise ConvertError(f"{self._path}: {GOES_ON}")


def is_hostile(name: str) -> bool:
    """Whether a name leads out of the folder in which an archive would be unpacked."""
    return name.startswith("/") or ".." in name.split("/")


def read_tar(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Documents of all members, in their order; members that are none are counted.

    Raises ConvertError for an archive without an end.
    """
    path = piece.input.path
    choice = MemberChoice(options.member, path)
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as opened:
        file = _Archive(opened, path)
        with tarfile.open(fileobj=file, mode="r|*") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.members = []  # there may be millions
                name = member.name
                where = f"{path}!{name}"
                if not member.isreg():
                    if not member.isdir():
                        is_link = member.issym() or member.islnk()
                        skipped.add_member("links" if is_link else "devices and pipes")
                elif is_hostile(name):
                    message = (
                        f"{in_one_line(where)}: a member outside of its archive; who made this tar?"
                    )
                    fault(options, skipped, "hostile path", message)
                elif choice.takes(name):
                    choice.check_sample()
                    data = _data_of(archive, member, where)
                    yield from _member(document_suffix(name), _decompressed(name, data), where)
                else:
                    skipped.add_member(document_suffix(name) or "without a suffix")
        file.check_end()
        choice.check_end(skipped)


def _data_of(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> bytes:
    """The bytes of a regular member."""
    try:
        return archive.extractfile(member).read()  # type: ignore[union-attr]
    except tarfile.TarError as error:
        path = where.partition("!")[0]
        raise ConvertError(
            f"{path}: cannot be read within {in_one_line(where)} ({error}); is the archive whole?"
        ) from None


def _member(suffix: str, data: bytes, where: str) -> Iterator[Item]:
    if suffix == ".json":  # one record, over several lines perhaps
        yield RawDocument(data=data, path=where, record=True)
    elif suffix in JSON_SUFFIXES:
        for line, record in enumerate(io.BytesIO(data), 1):
            if record.strip():
                yield RawDocument(data=record, path=where, line=line, record=True)
    elif suffix == ".npy":
        array = load_npy(io.BytesIO(data), where)
        yield one_each(array, np.array([array.size]), len(data), where)
    else:  # .txt, or what was asked for by its name
        yield RawDocument(data=data.removeprefix(BYTE_ORDER_MARK), path=where)


def _decompressed(name: str, data: bytes) -> bytes:
    suffix = suffix_of(name)
    if suffix not in DECOMPRESSORS:
        return data
    return b"".join(decompressed(io.BytesIO(data), suffix))
