"""Where documents come from, as they are read: what is kept of it beside a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.fields import MISSING, value_at
from streammega.dataset.document_lookup import ShardDocuments
from streammega.dataset.provenance import (
    BYTE,
    DOCUMENT,
    FILE,
    LINE,
    MAX_ID,
    DocumentOrigin,
    DocumentOrigins,
    collect_origins,
    concat_origins,
)
from streammega.errors.redaction import redact_urls

ID_FIELDS = ("id", "url")
"""Where an id is looked for, unless a field is named: what corpora of the field call it."""


def origin_of(document: RawDocument, options: ConvertOptions) -> DocumentOrigin:
    """Where a document comes from; its id, if its fields are known."""
    path = _without_secrets(document.path)
    kind = FILE
    place = 0
    if document.offset >= 0:
        kind = BYTE
        place = document.offset
    elif document.line:
        kind = LINE
        place = document.line
    return DocumentOrigin(path=path, kind=kind, place=place, id=_id_of(document.fields, options))


@lru_cache(maxsize=64)
def _without_secrets(path: str) -> str:
    """Kept, since the documents of a file have all the same: looking through it costs as much as
    all else that is done for a document here.
    """
    return redact_urls(path)


def id_fields(options: ConvertOptions) -> tuple[str, ...]:
    """Where ids are looked for, the first that is there."""
    return ID_FIELDS if options.id_field is None else (options.id_field,)


def of_file(tokens: Tokens, path: str) -> Tokens:
    """Documents of which nothing is known but their file."""
    origin = DocumentOrigin(path=redact_urls(path), kind=FILE, place=0, id="")
    return replace(tokens, origins=collect_origins([origin] * len(tokens.documents)))


def of_rows(tokens: Tokens, path: str, first: int) -> Tokens:
    """Documents that are rows of a file one after the other, the first of that number, from 1."""
    name = redact_urls(path)
    rows = range(first, first + len(tokens.documents))
    origins = collect_origins(
        DocumentOrigin(path=name, kind=LINE, place=row, id="") for row in rows
    )
    return replace(tokens, origins=origins)


def of_shards(shards: Sequence[ShardDocuments], first: int, stop: int) -> DocumentOrigins:
    """Those of documents [first, stop) of a dataset: what lies beside its shards, or where nothing
    does, the shard and the document's number there.
    """
    parts = [collect_origins([])]
    documents_before = 0
    for shard in shards:
        low = max(0, first - documents_before)
        high = min(shard.num_documents, stop - documents_before)
        documents_before += shard.num_documents
        if low < high:
            parts.append(_of_shard(shard, low, high))
    return concat_origins(parts)


def _of_shard(shard: ShardDocuments, low: int, high: int) -> DocumentOrigins:
    if shard.origins is not None:
        return shard.origins.between(low, high)
    count = high - low
    return DocumentOrigins(
        paths=(redact_urls(shard.name),),
        path=np.zeros(count, np.int32),
        kind=np.full(count, DOCUMENT, np.uint8),
        place=np.arange(low, high),
        ids=[""] * count,
    )


def _id_of(fields: Any, options: ConvertOptions) -> str:
    """The id of a record; "" where it has none, or what is there is no text or number."""
    for name in id_fields(options):
        value = value_at(fields, name)
        if value is MISSING or isinstance(value, bool) or not isinstance(value, str | int):
            continue
        return str(value)[:MAX_ID]
    return ""
