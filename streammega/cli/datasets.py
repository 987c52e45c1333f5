"""The commands about datasets and caches: cat, verify, gc, cache."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from streammega.cli.options import (
    AsJson,
    StorageFile,
    StorageOption,
    check_name,
    show_progress,
    storage_config,
)
from streammega.cli.render import print_data, print_text, show_report
from streammega.errors import ConfigError, FormatError
from streammega.errors.logs import get_logger
from streammega.errors.redaction import redact
from streammega.errors.words import in_one_line, pluralize, without_controls

if TYPE_CHECKING:
    from streammega.config import StorageConfig
    from streammega.convert.tokenize.tokenizers import Tokenizer
    from streammega.dataset import IndexedDataset
    from streammega.dataset.column_reader import ColumnReader
    from streammega.dataset.verify import VerifyReport

log = get_logger(__name__)

DOCUMENTS_AT_ONCE = 64
"""Documents that one read of `cat` fetches."""


def verify(
    name: Annotated[
        str,
        typer.Argument(
            help="A prefix, a manifest, a folder or a glob; path or URL. Or a blend that 'manifest' wrote."
        ),
    ],
    eod_id: Annotated[
        int | None,
        typer.Option(
            help="The id with which every document must end; by default the manifest's.", min=0
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="The number that all ids must be below; by default the manifest's.", min=0
        ),
    ] = None,
    columns: Annotated[
        bool, typer.Option("--columns", help="Read the columns of the manifest too.")
    ] = False,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Is a dataset sound? Checks structure, bounds, checksums, ids and the ends of documents.

    The first line says that it is sound; or what is damaged, where, and what to do. Exit status 1
    if something is wrong.
    """
    from streammega.dataset.manifest import read_blend_file
    from streammega.dataset.names import MANIFEST
    from streammega.dataset.verify import VerifyReport, shards_of
    from streammega.dataset.verify import verify as run

    check_name(name)
    settings = storage_config(storage, storage_file)
    # find the dataset at once, or say so: the check itself waits for minutes
    quick_look = storage_config(storage, storage_file, looks_only=True)
    blend = None
    with show_progress("looking for shards"):
        if name.endswith(".json") and not name.endswith(MANIFEST):
            blend = read_blend_file(name, quick_look)
        if blend is None:
            shards_of(name, quick_look, VerifyReport(name=name))
    datasets = {name: None} if blend is None else blend.manifests
    reports = []
    for dataset, known in datasets.items():
        with show_progress("looking for shards") as progress:
            checked = run(
                dataset,
                settings,
                vocab_size=vocab_size,
                eod_id=eod_id,
                columns=columns,
                progress=progress,
                known=known,
            )
        reports.append(checked)
    damaged = [checked for checked in reports if checked.problems]
    if blend is not None and as_json:
        show_report({"datasets": list(map(asdict, reports))}, as_json=True)
    elif as_json:
        show_report(asdict(reports[0]), as_json=True)
    else:
        if blend is not None:
            state = f"{len(damaged)} of {pluralize(len(reports), 'dataset')} damaged"
            print_text(f"{redact(name)}: {state if damaged else 'sound'}")
        for checked in sorted(reports, key=lambda checked: not checked.problems):
            _show_verified(checked)
    if damaged:
        raise typer.Exit(1)


def _show_verified(checked: VerifyReport) -> None:
    """Print a report that begins with its verdict: the first problem, if there is one."""
    state = "sound"
    problems = checked.problems
    if problems:
        more = f" ({pluralize(len(problems) - 1, 'more problem')} below)" if problems[1:] else ""
        state = f"damaged{more}: {problems[0]}"
    figures = asdict(checked)
    del figures["name"], figures["problems"]
    show_report({"problems": problems[1:], **figures}, summary=f"{checked.name}: {state}")


def gc(
    prefix: Annotated[str, typer.Argument(help="A dataset: its prefix or manifest, path or URL.")],
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove them; without it they are only listed.")
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(min=0, help="Hours since they were written, after which they are removed."),
    ] = 24.0,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """List, or remove, files next to a dataset that no manifest lists: what killed conversions left.

    What a conversion has written so far is not listed either. Give --older-than more hours than the
    longest one to this dataset takes.
    """
    from streammega.convert.work_dir import is_locked
    from streammega.convert.write.gc import find_leftovers, of_age, remove_leftovers

    settings = storage_config(storage, storage_file, looks_only=True)
    with show_progress("looking for leftovers") as progress:
        leftovers = find_leftovers(prefix, settings)
        old = of_age(leftovers, older_than)
        if remove and old:
            if is_locked(prefix):
                raise ConfigError(f"{prefix}: a conversion to it is running; wait for it")
            remove_leftovers(prefix, old, settings, progress)
    shown = old if remove else leftovers
    summary = (
        f"{pluralize(len(shown), 'file')}{' removed' if remove else ''}, "
        f"{pluralize(sum(info.size for info in shown), 'byte')}"
    )
    if leftovers and not remove:
        summary += "; --remove removes "
        summary += "them" if old == leftovers else f"{len(old):,}, older than {older_than:g} hours"
    elif old != leftovers:
        young = pluralize(len(leftovers) - len(old), "file")
        summary += f"; {young} not known to be older than {older_than:g} hours stay"
    report = {"files": [{"bytes": info.size, "file": info.key} for info in shown]}
    show_report(report, summary=summary, as_json=as_json)


cache_app = typer.Typer(
    no_args_is_help=True, help="Look at, check or empty a cache folder (StorageConfig.cache_dir)."
)
CacheFolder = Annotated[
    str, typer.Argument(help="The folder that cache_dir names, which cache_max_bytes fills.")
]


def cache_ls(folder: CacheFolder, as_json: AsJson = False) -> None:
    """List cached objects, the most recently used first."""
    from streammega.storage import cache as page_cache

    with show_progress("reading the cache"):
        entries = sorted(page_cache.entries(_cache_folder(folder)), key=lambda entry: -entry.used)
    objects = []
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        row = {
            "cached_bytes": entry.cached_bytes,
            "bytes": entry.size,
            "last_used": "in use" if entry.in_use else used,
            "object": entry.url,
        }
        objects.append(row)
    size = pluralize(sum(entry.cached_bytes for entry in entries), "byte")
    summary = f"{pluralize(len(entries), 'object')}, {size}"
    show_report({"objects": objects}, summary=summary, as_json=as_json)


def cache_verify(folder: CacheFolder, as_json: AsJson = False) -> None:
    """Compare all cached pages with their checksums.

    Exit status 1 if one differs (readers fetch such pages again).
    """
    from streammega.storage import cache as page_cache

    chunks = _cache_folder(folder)
    pages = 0
    damaged = []
    with show_progress("reading the cache") as progress:
        entries = page_cache.entries(chunks)
        progress.begin("verifying", sum(entry.cached_bytes for entry in entries))
        for entry in entries:
            pages += math.ceil(entry.cached_bytes / page_cache.PAGE_BYTES)
            for path, page in page_cache.damaged_pages(entry, progress):
                damaged.append({"page": page, "file": str(path), "object": entry.url})
                if not as_json:
                    print_text(f"{path}: page {page} is damaged ({in_one_line(entry.url)})")
    summary = f"{pluralize(pages, 'page')}, {len(damaged):,} damaged"
    report = {"pages": pages, "damaged": damaged} if as_json else {}
    show_report(report, summary=summary, as_json=as_json)
    if damaged:
        raise typer.Exit(1)


def cache_clear(folder: CacheFolder, as_json: AsJson = False) -> None:
    """Remove all cached objects that were not used within the last ten minutes."""
    from streammega.storage import cache as page_cache

    chunks = _cache_folder(folder)
    with show_progress("removing") as progress:
        removed, kept = page_cache.clear(chunks, progress)
    summary = (
        f"{pluralize(removed, 'object')} removed, {kept:,} in use and kept (used within the last ten "
        "minutes)"
    )
    report = {"removed": removed, "kept": kept} if as_json else {}
    show_report(report, summary=summary, as_json=as_json)


def _cache_folder(folder: str) -> Path:
    from streammega.config import local_folder

    chunks = local_folder(folder) / "chunks"
    if not chunks.is_dir():
        raise ConfigError(
            f"{folder}: holds no cached tokens; name the cache_dir of a run with cache_max_bytes"
        )
    return chunks


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
    columns: Annotated[
        bool, typer.Option("--columns", help="Show the values of all columns too, token by token.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each document, a line each.")
    ] = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Show documents of a dataset as text.

    Fetches only the .idx and these documents. With several documents, a line with its number comes
    before each. A column follows as a line; several values of a token are in brackets.
    """
    from streammega.dataset import IndexedDataset

    ranges = [parse_documents(text) for text in documents]
    settings = storage_config(storage, storage_file, looks_only=True)
    several = len(ranges) > 1 or any(first < last for _, first, last in ranges)
    for name, first, last in ranges:
        check_name(name)
        with show_progress("opening"):
            indexed = IndexedDataset(name, settings)
        shown = redact(name)
        count = len(indexed.document_indices) - 1
        if last >= count:
            numbered = f", numbered from 0 to {count - 1:,}" if count else ""
            raise ConfigError(
                f"{shown}: has {pluralize(count, 'document')}{numbered}; there is no number {last:,}"
            )
        readers = []
        if columns:
            names = [column.name for column in indexed.columns]
            if not names:
                raise ConfigError(f"{shown}: has no columns; leave out --columns")
            indexed = IndexedDataset(name, settings, columns=names)
            readers = [indexed.column(column) for column in names]
        model = None if ids else _tokenizer(shown, indexed, settings, tokenizer)
        for number, sequences in _read_documents(indexed, first, last):
            report = _document_report(shown, number, sequences, model)
            if readers:
                report["columns"] = _column_values(indexed, number, readers)
            if as_json:
                print_data(json.dumps(report))
                continue
            if several:
                print_text(f"--- {shown}#{number}: {pluralize(report['tokens'], 'token')}")
            _show(report)


def parse_documents(text: str) -> tuple[str, int, int]:
    """("web", 3, 9) of "web#3..9", ("web", 3, 3) of "web#3". Raises ConfigError."""
    name, _, numbers = text.rpartition("#")
    parsed = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18}))?", numbers)
    if not name or not parsed:
        raise ConfigError(
            f"{text!r}: names no documents; write DATASET#N or DATASET#N..M, web#0 or "
            f"web#0..9 for instance (in quotes, since # begins a comment of some shells)"
        )
    first = int(parsed[1])
    last = int(parsed[2] or first)
    if last < first:
        raise ConfigError(f"{text!r}: ends before it begins")
    return name, first, last


def _tokenizer(
    name: str, indexed: IndexedDataset, settings: StorageConfig, chosen: str | None
) -> Tokenizer:
    """The tokenizer that was asked for, or the one that the manifest names."""
    from streammega.convert.tokenize.of_dataset import tokenizer_of

    model, problem = tokenizer_of(indexed.manifest, settings, chosen)
    if model is None:
        raise ConfigError(f"{name}: {problem}, or show ids by --ids")
    if problem:
        log.warning("%s: %s", name, problem)
    return model


def _read_documents(
    indexed: IndexedDataset, first: int, last: int
) -> Iterator[tuple[int, list[tuple[Any, int | None]]]]:
    """(number, [(ids, mode) of each sequence]) of documents first to last; mode may be None."""
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


def _document_report(
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
            f"{name}: document {number:,} holds ids from {ids.min():,} to {ids.max():,}, and "
            f"{model.name!r} has {model.vocab_size:,} ids: the tokens are another tokenizer's"
        )
    report["text"] = model.decode(ids.astype(np.int64).tolist())
    return report


def _column_values(
    indexed: IndexedDataset, document: int, readers: Sequence[ColumnReader]
) -> dict[str, list[Any]]:
    """The values of each column at the tokens of a document: a number for each, or a list of them
    where a token has several. JSON has no infinite numbers: these are text.
    """
    from streammega.dataset.column_reader import as_numbers

    first, last = indexed.document_indices[document : document + 2].tolist()
    starts = indexed.sequence_offsets[first:last] // indexed.dtype.itemsize
    stops = starts + indexed.sequence_lengths[first:last]
    spans = list(zip(starts.tolist(), stops.tolist(), strict=True))
    values = {}
    for reader in readers:
        column = reader.column
        stored = np.concatenate([np.empty((0, column.token_bytes), np.uint8), *reader.read(spans)])
        of_tokens = as_numbers(stored, column.dtype).tolist()
        shown = [[x if math.isfinite(x) else str(x) for x in row] for row in of_tokens]
        values[column.name] = [row[0] for row in shown] if column.width == 1 else shown
    return values


def _show(report: dict[str, Any]) -> None:
    text = report["text"] if "text" in report else " ".join(map(str, report["ids"]))
    if sys.stdout.isatty():  # control characters of a document would act on the terminal
        text = without_controls(text)
    print_data(text)
    for name, values in report.get("columns", {}).items():
        lists = [
            f"[{', '.join(map(str, each))}]" if type(each) is list else each for each in values
        ]
        print_data(f"{name}: {' '.join(map(str, lists))}")
