"""The members of a tar that is read once, from its beginning to its end, and strictly."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

MAX_HEADER_BYTES = 1 << 20
"""Bytes of an extended header: a long name, or attributes. `tarfile` reads it at once."""
EXTENDED_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
READ_BYTES = 1 << 20
"""Bytes that are read at once behind the last member."""


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, *header: Any) -> Any:
        """Raises HeaderError for an extended header that claims too many bytes."""
        member = super().frombuf(*header)
        if member.type in EXTENDED_TYPES and member.size > MAX_HEADER_BYTES:
            raise tarfile.HeaderError(f"a name or attributes of {member.size:,} bytes")
        return member


def open_tar(file: Any, mode: Any = "r|*") -> tarfile.TarFile:
    """A tar for `read_members`, of a file in which nothing is sought. Raises ReadError for no tar."""
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member)


def read_members(archive: Any) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, up to its end. `tarfile` itself takes a damaged header, and the end
    of the file, for the end of the archive, and keeps the headers of all members.

    Raises ReadError for an archive that is damaged, cut short, or followed by something else.
    """
    member = archive.firstmember
    while member is not None:
        yield member
        place = archive.offset
        archive.fileobj.seek(place)
        try:
            member = _Member.fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # an empty header
            break
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):  # type: ignore[attr-defined]
            raise tarfile.ReadError(
                "the archive has no end; it is cut short: copy it again"
            ) from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(
                f"the header at byte {place:,} is damaged ({error}), and nothing after it can be read: "
                "copy it again"
            ) from None
    # what pads an archive is zeros, of any length
    while data := archive.fileobj.read(READ_BYTES):
        if data.strip(b"\0"):
            raise tarfile.ReadError(
                "goes on after its end; did a copy of it leave zeros, or is it several archives?"
            )
