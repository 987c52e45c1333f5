"""The command that shows documents of a dataset as text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from streammega.cli.options import StorageFile, StorageOption, storage_config
from streammega.errors import ConfigError, ConvertError, FormatError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize, without_controls

if TYPE_CHECKING:
    from streammega.convert.tokenize.tokenizers import Tokenizer
    from streammega.dataset import IndexedDataset

DOCUMENTS_AT_ONCE = 64
"""Documents that one read fetches."""


def cat(
    documents: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET#N|DATASET#N..M",
            help="A document of a dataset by its number, from 0 on, or those from N to M; path or "
            "URL.",
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer; by default the one that the manifest names.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids instead of text.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each document, a line each.")
    ] = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Show documents of a dataset as text.

    Fetches the .idx and these documents only. Several documents each have a line with their number
    before them.
    """
    from streammega.dataset import IndexedDataset

    ranges = [parse_documents(text) for text in documents]
    settings = storage_config(storage, storage_file, looks_only=True)
    several = len(ranges) > 1 or any(first < last for _, first, last in ranges)
    for name, first, last in ranges:
        indexed = IndexedDataset(name, settings)
        shown = redact_urls(name)
        _check_number(shown, last, len(indexed.document_indices) - 1)
        model = None if ids else _tokenizer(shown, indexed, tokenizer)
        for number, sequences in _documents(indexed, first, last):
            report = _report(shown, number, sequences, model)
            if as_json:
                typer.echo(json.dumps(report))
                continue
            if several:
                typer.echo(f"--- {shown}#{number}: {pluralize(report['tokens'], 'token')}")
            _show(report)


def parse_documents(text: str) -> tuple[str, int, int]:
    """("web", 3, 9) of "web#3..9", ("web", 3, 3) of "web#3". Raises ConfigError."""
    name, _, numbers = text.rpartition("#")
    parsed = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18}))?", numbers)
    if not name or not parsed:
        raise ConfigError(
            f"{redact_urls(text)!r}: names no documents; write DATASET#N or DATASET#N..M, web#0 or "
            f"web#0..9 for instance (in quotes, since # begins a comment of some shells)"
        )
    first = int(parsed[1])
    last = int(parsed[2] or first)
    if last < first:
        raise ConfigError(f"{redact_urls(text)!r}: ends before it begins")
    return name, first, last


def _check_number(name: str, number: int, documents: int) -> None:
    if number >= documents:
        numbered = f", numbered from 0 to {documents - 1:,}" if documents else ""
        raise ConfigError(
            f"{name}: has {pluralize(documents, 'document')}{numbered}; there is no number {number:,}"
        )


def _tokenizer(name: str, indexed: IndexedDataset, chosen: str | None) -> Tokenizer:
    """The tokenizer that was asked for, or the one that the manifest names."""
    from streammega.convert.tokenize.tokenizers import load_tokenizer

    labels = indexed.tokenizers
    if chosen is None and len(labels) != 1:
        reason = "no manifest names its tokenizer"
        if labels:
            reason = f"was made with several tokenizers ({', '.join(sorted(map(str, labels)))})"
        raise ConfigError(f"{name}: {reason}; name one by --tokenizer, or show ids by --ids")
    label = min(labels, default=None, key=str)
    try:
        model = load_tokenizer(chosen or (label.name if label else ""))
    except (ObjectNotFoundError, ConvertError) as error:
        if chosen is not None or label is None:
            raise
        raise ConfigError(
            f"{name}: its tokenizer {label.name!r} cannot be loaded ({error}); name it by "
            f"--tokenizer, or show ids by --ids"
        ) from None
    if label is not None and len(labels) == 1 and label.digest != model.digest:
        typer.echo(
            f"{name}: was made with {label.name!r}, and {model.name!r} is another one, or one with "
            f"other settings",
            err=True,
        )
    return model


def _documents(
    indexed: IndexedDataset, first: int, last: int
) -> Iterator[tuple[int, list[tuple[Any, int | None]]]]:
    """(number, (ids, mode) of each sequence) of documents [first, last]; None: there are no modes."""
    bounds = indexed.document_indices
    for begin in range(first, last + 1, DOCUMENTS_AT_ONCE):
        stop = min(begin + DOCUMENTS_AT_ONCE, last + 1)
        start = int(bounds[begin])
        items = indexed[start : int(bounds[stop])]
        sequences: list[tuple[Any, int | None]] = [
            item if isinstance(item, tuple) else (item, None) for item in items
        ]
        for number in range(begin, stop):
            yield number, sequences[int(bounds[number]) - start : int(bounds[number + 1]) - start]


def _report(
    name: str, number: int, sequences: list[tuple[Any, int | None]], model: Tokenizer | None
) -> dict[str, Any]:
    ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(item) for item, _ in sequences)])
    report: dict[str, Any] = {"dataset": name, "document": number, "tokens": len(ids)}
    if sequences and sequences[0][1] is not None:
        report["sequences"] = [{"tokens": len(item), "mode": mode} for item, mode in sequences]
    if model is None:
        report["ids"] = ids.astype(np.int64).tolist()
        return report
    if len(ids) and not 0 <= ids.min() <= ids.max() < model.vocab_size:
        raise FormatError(
            f"{name}: document {number:,} holds the id {int(ids.max()):,}, and {model.name!r} has "
            f"{model.vocab_size:,} ids: the tokens are another tokenizer's"
        )
    report["text"] = model.decode(ids.astype(np.int64).tolist())
    return report


def _show(report: dict[str, Any]) -> None:
    text = report["text"] if "text" in report else " ".join(map(str, report["ids"]))
    if sys.stdout.isatty():  # which would obey what a document says
        text = without_controls(text)
    typer.echo(text.encode("utf-8", "backslashreplace").decode())
