"""Whether a tar archive has ended where tarfile thinks so.

tarfile takes a damaged header for the end of the archive, and the end of the file, too: what comes
behind is lost without a word. So the headers are followed here as well, by their sizes alone, while
the archive is read. When tarfile has ended, those in the last stretch that it read are looked at:
they must be sound, and then comes an empty one.
"""

from __future__ import annotations

import tarfile

EMPTY = bytes(tarfile.BLOCKSIZE)
_SIZE = slice(124, 136)
_TYPE = slice(156, 157)
"""Fields of a header, as POSIX has them: bytes of the payload, and what kind of member it is."""
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
        self._first = 0
        """The first header that is not before the stretch."""
        self._next = 0
        """The first header behind it."""
        self._extended = (0, 0)
        """Where the payload of the last extended header lies, which may hold the size of the member
        after it.
        """
        self._lost = False
        """Whether sizes are elsewhere than in the headers: then only the last bytes are looked at."""

    def follow(self, stretch: bytes) -> None:
        """Take in what was just read."""
        self._begin += len(self._stretch)
        self._stretch = stretch
        self._first = self._next
        place = self._next
        try:
            header = self._block(place)
            while header and header != EMPTY:
                size = _payload_bytes(header)
                member_type = header[_TYPE]
                if member_type in _EXTENDED:
                    self._extended = (place, place + size)
                if member_type == tarfile.GNUTYPE_SPARSE:  # further headers follow such a one
                    self._lost = True
                place += tarfile.BLOCKSIZE + size
                header = self._block(place)
        except tarfile.HeaderError:
            pass  # tarfile stops there too
        self._next = place
        # an extended header whose payload is longer than the stretch goes on in the next one
        begin = max(0, self._extended[0] - self._begin)
        end = max(0, self._extended[1] - self._begin)
        if b"size=" in stretch[begin:end]:
            self._lost = True

    def problem(self) -> str | None:
        """What is wrong with the end, as far as it was read; None if it is one."""
        if self._lost:
            return CUT if self._stretch[-tarfile.BLOCKSIZE :].strip(b"\0") else None
        place = self._first
        header = self._block(place)
        while header:
            if header == EMPTY:
                behind = self._stretch[place - self._begin :]
                return GOES_ON if behind.strip(b"\0") else None
            try:
                # compares the checksum
                tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
                place += tarfile.BLOCKSIZE + _payload_bytes(header)
            except tarfile.HeaderError as error:
                return (
                    f"the header at byte {place:,} is damaged ({error}), and nothing behind it can "
                    f"be read: copy it again"
                )
            header = self._block(place)
        return CUT

    def _block(self, place: int) -> bytes:
        """The block at a place; empty if it is behind the stretch."""
        start = place - self._begin
        return self._stretch[start : start + tarfile.BLOCKSIZE]


def _payload_bytes(header: bytes) -> int:
    """Of what follows a header, in whole blocks.

    Raises tarfile.HeaderError for a size that is no number.
    """
    if header[_TYPE] in _WITHOUT_PAYLOAD:
        return 0
    # tarfile reads octal digits and GNU's binary numbers, which may be negative
    size = max(0, int(tarfile.nti(header[_SIZE])))  # type: ignore[attr-defined]
    blocks = -(-size // tarfile.BLOCKSIZE)
    return blocks * tarfile.BLOCKSIZE
