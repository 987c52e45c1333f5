"""Whether a tar archive has ended where tarfile thinks so.

tarfile takes a damaged header for the end of the archive, and the end of the file, too: what comes
behind is lost without a word. So the headers are followed here as well, by their sizes alone, while
the archive is read. When tarfile has ended, those in the last stretch that it read are looked at:
they must be sound, and then comes an empty one.
"""

from __future__ import annotations

import tarfile

EMPTY = bytes(tarfile.BLOCKSIZE)
CUT = "the archive has no end; it is cut short: copy it again"
GOES_ON = "goes on after its end; did a copy of it leave zeros, or is it several archives?"
_EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_WITHOUT_PAYLOAD = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)


class TarEnd:
    """Follows an archive that is read from its start, stretch by stretch."""

    def __init__(self) -> None:
        self._stretch = b""
        self._begin = 0
        """Of the stretch. Places are bytes of the archive."""
        self._first = self._next = 0
        """The first header that is not before the stretch, and the first one behind it."""
        self._extended = (0, 0)
        """Where the payload of the last extended header lies, which may hold the size of the member
        after it.
        """
        self._lost = False
        """Whether sizes are elsewhere than in the headers: then only the last bytes
        are looked at.
        """

    def follow(self, stretch: bytes) -> None:
        """Take in what was just read."""
        self._begin += len(self._stretch)
        self._stretch = stretch
        self._first = self._next
        at = self._next
        try:
            while (header := self._block(at)) and header != EMPTY:
                kind = header[156:157]
                size = _payload_bytes(header)
                if kind in _EXTENDED:
                    self._extended = (at, at + size)
                self._lost |= kind == tarfile.GNUTYPE_SPARSE  # further headers follow such a one
                at += tarfile.BLOCKSIZE + size
        except tarfile.HeaderError:
            pass  # tarfile stops there too
        low, high = (max(0, place - self._begin) for place in self._extended)
        self._lost |= b"size=" in stretch[low:high]
        self._next = at

    def problem(self) -> str | None:
        """What is wrong with the end, as far as it was read; None if it is one."""
        if self._lost:
            return CUT if self._stretch[-tarfile.BLOCKSIZE :].strip(b"\0") else None
        at = self._first
        while header := self._block(at):
            if header == EMPTY:
                return GOES_ON if self._stretch[at - self._begin :].strip(b"\0") else None
            try:
                # compares the checksum
                tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
                at += tarfile.BLOCKSIZE + _payload_bytes(header)
            except tarfile.HeaderError as error:
                return f"the header at byte {at:,} is damaged ({error}), and nothing behind it can be read: copy it again"
        return CUT

    def _block(self, at: int) -> bytes:
        """The block at a place; empty if it is behind the stretch."""
        return self._stretch[at - self._begin : at - self._begin + tarfile.BLOCKSIZE]


def _payload_bytes(header: bytes) -> int:
    """Of what follows a header, in whole blocks.

    Raises tarfile.HeaderError for a size that is no number.
    """
    if header[156:157] in _WITHOUT_PAYLOAD:
        return 0
    size = int(tarfile.nti(header[124:136]))  # type: ignore[attr-defined]
    return -(-max(0, size) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
