"""Files that are one text each: held where they are short, passed on in pieces
where they are long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from streammega.convert.documents import LongRecord, LongText, RawDocument
from streammega.convert.read.json_values import BYTE_ORDER_MARK
from streammega.convert.read.slices import Item
from streammega.convert.read.suffixes import format_of, suffix_of, without_queries
from streammega.dataset.conversations import not_utf8
from streammega.errors import ConvertError, FormatError, StreammegaError
from streammega.errors.redaction import redact
from streammega.errors.words import in_one_line

LONG_BYTES = 4 << 20
"""From which on a file is not held."""
PIECE_BYTES = 1 << 20


def read_text(file: Any, path: str, size: int) -> Iterator[Item]:
    """The document of an opened file. size: its bytes, or 0 if they are not known."""
    head = b""
    while len(head) < LONG_BYTES:
        data = file.read(LONG_BYTES - len(head))  # which may be less than there is
        if not data:
            break
        head += data
    is_whole = len(head) < LONG_BYTES
    head = head.removeprefix(BYTE_ORDER_MARK)
    if is_whole:
        yield RawDocument(data=head, path=path)
    else:
        yield LongText(path=path, pieces=_pieces(head, file), size=size)


def _pieces(head: bytes, file: Any) -> Iterator[bytes]:
    yield head
    while data := file.read(PIECE_BYTES):
        yield data


def guarded(item: LongText | LongRecord, storage_options: dict[str, Any]) -> LongText | LongRecord:
    """The same, which names the file when it cannot be read on, and shows no secret of
    `storage_options`.
    """
    path = item.path if isinstance(item, LongText) else item.document.path

    def pieces() -> Iterator[bytes]:
        """Those of the item, with errors in words."""
        try:
            yield from item.pieces
        except StreammegaError:
            raise
        except Exception as error:  # the libraries under it raise whatever they like
            raise ConvertError(unreadable(path, error, storage_options)) from None

    return replace(item, pieces=pieces())


def no_text(path: str, error: UnicodeDecodeError) -> FormatError:
    """For a file that is taken for a text, as every file is whose suffix tells nothing else, and is
    an image perhaps.
    """
    archive, _, member = path.partition("!")
    if member and format_of(archive) == "tar":
        return not_utf8(path, error, "name another member by --member")
    name = path.rpartition("/")[2]
    ending = suffix_of(name) or name
    return not_utf8(path, error, f"leave it out (of a folder or glob by --exclude '*{ending}')")


def unreadable(
    path: str, error: Exception, storage_options: dict[str, Any], where: str = ""
) -> str:
    """The message for a file that a library could not read. where: in it, behind a blank."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; make it readable, or leave it out by --exclude"
    told = without_queries(f"{type(error).__name__}: {error}")
    reason = redact(told, storage_options)
    return f"{in_one_line(path)}: cannot be read{where} ({reason}); is the file whole, and its suffix true?"
