"""Fields of a record: texts under a key or a path into records within it (`meta.text`), and its id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.dataset.conversations import encodable, not_utf8
from streammega.dataset.provenance import BYTE, FILE, LINE, MAX_ID, DocumentOrigin
from streammega.errors import ConvertError
from streammega.errors.redaction import redact_urls

MISSING: Any = object()
"""The value of a key that is missing."""
MAX_NAMES = 40
"""Names of a record in a message."""
MAX_SHOWN = 200
"""Characters of a name in a message."""
IDS_NAMES = ("input_ids", "token_ids", "tokens", "ids")
"""How columns of token ids are called, among others of integers, as masks."""
IDS_IN_RECORDS = "lists of token ids are read in Parquet and Arrow, not in JSON"
ID_FIELDS = ("id", "url")
"""Fields in which corpora keep ids, the first that is there, unless --id-field names one."""


def value_at(record: Any, key: str) -> Any:
    """The value under a key, or MISSING.

    A key that has dots itself comes before a path; within a null all is null.
    """
    if not isinstance(record, dict):
        return MISSING
    if key in record:
        return record[key]
    for outer, inner in splits(key):
        within = record.get(outer, MISSING)
        value = None if within is None else value_at(within, inner)
        if value is not MISSING:
            return value
    return MISSING


def names_of(key: str) -> list[str]:
    """The keys that a `--text-key` names. The first one that is there and not null holds the text."""
    return key.split(",")


def first_value(record: Any, key: str) -> Any:
    """The value under the first name of a `--text-key` that is there and not null; else null or
    MISSING.

    A name may have a comma itself: all of the key comes first.
    """
    value = value_at(record, key)
    for name in names_of(key):
        if value is not MISSING and value is not None:
            break
        named = value_at(record, name)
        value = value if named is MISSING else named
    return value


def splits(key: str) -> Iterator[tuple[str, str]]:
    """(key, rest of the path) of each dot, the longest key first."""
    dot = key.rfind(".")
    while dot > 0:
        yield key[:dot], key[dot + 1 :]
        dot = key.rfind(".", 0, dot)


def texts_at(record: Any, key: str, where: str) -> list[str]:
    """The texts under a key: one, or those of a list, as Megatron takes sentences that were split
    before; null is an empty one.

    Raises ConvertError, FormatError that name `where`.
    """
    value = first_value(record, key)
    if value is MISSING:
        has = type(record).__name__
        if isinstance(record, dict):
            has = join_names(sorted(_names(record)))
        wanted = " or ".join(map(repr, names_of(key)))
        raise ConvertError(
            f"{where}: has no key {wanted} (it has: {has}); name the text's key with --text-key"
            f"{_hint_of_ids(record)}"
        )
    if not isinstance(value, list):
        return [_text(value, key, where)]
    if not value:  # a document without sentences is an empty one
        return [""]
    return [_text(part, key, where, "a list with ") for part in value]


def join_names(names: Iterable[str]) -> str:
    """Names that come from an input, for a message: as `repr` shows them, and not all of very many."""
    first = [repr(name[:MAX_SHOWN]) for name in islice(names, MAX_NAMES + 1)]
    if len(first) > MAX_NAMES:
        first[MAX_NAMES:] = ["..."]
    return ", ".join(first) or "nothing"


def _text(value: Any, key: str, where: str, within: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(where, error) from None
    if not isinstance(value, str):
        hint = f"; {IDS_IN_RECORDS}" if within and type(value) is int else ""
        raise ConvertError(
            f"{where}: key {key!r} holds {within}{type(value).__name__}, not text; name the text's "
            f"key with --text-key{hint}"
        )
    return encodable(value, where)


def hint_of_ids(names: Sequence[str]) -> str:
    """What a message adds where a text is missing and these columns hold lists of integers."""
    if not names:
        return ""
    known = (name for name in names if name.rpartition(".")[2] in IDS_NAMES)
    return f"; --text-key {next(known, names[0])} reads the token ids there"


def _hint_of_ids(record: Any) -> str:
    """The same for a record. Arrays are read as ids, lists are not."""
    values = record if isinstance(record, dict) else {}
    hint = hint_of_ids([name for name, value in values.items() if isinstance(value, np.ndarray)])
    has_lists = any(
        isinstance(value, list) and [*map(type, value[:1])] == [int] for value in values.values()
    )
    return hint or (f"; {IDS_IN_RECORDS}" if has_lists else "")


def _names(record: dict[Any, Any]) -> Iterator[str]:
    """Keys of a record, and the paths to those one level within."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield str(name)


def origin_of(document: RawDocument, options: ConvertOptions) -> DocumentOrigin:
    """Where a document comes from; its id, if its fields are known."""
    path = _without_secrets(document.path)
    record_id = _id_of(document.fields, options)
    if document.offset >= 0:
        return DocumentOrigin(path=path, kind=BYTE, place=document.offset, id=record_id)
    kind = LINE if document.line else FILE
    return DocumentOrigin(path=path, kind=kind, place=document.line, id=record_id)


_without_secrets = lru_cache(maxsize=64)(redact_urls)
"""Cached for the documents of a file: redacting costs as much as the rest of `origin_of`."""


def id_fields(options: ConvertOptions) -> tuple[str, ...]:
    """Where ids are looked for, the first that is there."""
    return ID_FIELDS if options.id_field is None else (options.id_field,)


def _id_of(fields: Any, options: ConvertOptions) -> str:
    """The id of a record; "" where it has none that is a text or a number."""
    for name in id_fields(options):
        value = value_at(fields, name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)[:MAX_ID]
    return ""
