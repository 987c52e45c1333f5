"""The commands that check datasets, let them grow, tidy up beside them, and look after caches."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from streammega.cli.options import StorageFile, StorageOption, storage_config
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import in_one_line, pluralize

MOST_SHOWN = 20
"""Versions that are listed: a dataset may have thousands."""


def verify(
    name: Annotated[
        str, typer.Argument(help="A prefix, a manifest, a folder or a glob; path or URL.")
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
    repair: Annotated[
        bool,
        typer.Option(help="First rebuild each lost or broken .idx from the ends of documents."),
    ] = False,
    force: Annotated[
        bool, typer.Option(help="Repair also where sequences and modes are lost by it.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="The dtype of the tokens, for --repair where nothing else says it."),
    ] = None,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Check a dataset: structure, bounds, checksums, ids, the ends of documents.

    Exit status 1 if something is wrong.
    """
    from streammega.cli.progress import ProgressDisplay
    from streammega.dataset.repair import repair_index
    from streammega.dataset.verify import verify as run

    settings = storage_config(storage, storage_file)
    if repair:
        with ProgressDisplay("repairing"):
            lines = repair_index(name, settings, eod_id=eod_id, dtype=dtype, force=force)
        typer.echo("\n".join(lines))
    with ProgressDisplay("looking for shards") as progress:
        checked = run(name, settings, vocab_size=vocab_size, eod_id=eod_id, progress=progress)
    typer.echo(checked.as_text())
    if checked.problems:
        raise typer.Exit(1)


def gc(
    prefix: Annotated[str, typer.Argument(help="A dataset: its prefix or manifest, path or URL.")],
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove them; without it they are only listed.")
    ] = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """List, or remove, what killed conversions left beside a dataset, or what it replaced.

    Not while a conversion to this dataset is running, here or elsewhere: what it has written so far
    is no part of a dataset yet.
    """
    from streammega.convert.work_dir import is_locked
    from streammega.convert.write.gc import find_leftovers, remove_leftovers

    settings = storage_config(storage, storage_file, looks_only=True)
    leftovers = find_leftovers(prefix, settings)
    for info in leftovers:
        typer.echo(f"{info.size:>18,} bytes  {in_one_line(info.key)}")
    size = sum(info.size for info in leftovers)
    if not remove or not leftovers:
        how_to_remove = "; --remove removes them" if leftovers else ""
        typer.echo(f"{pluralize(len(leftovers), 'file')}, {pluralize(size, 'byte')}{how_to_remove}")
        return
    if is_locked(prefix):
        raise ConfigError(f"{redact_urls(prefix)}: a conversion to it is running; wait for it")
    remove_leftovers(prefix, leftovers, settings)
    typer.echo(f"{pluralize(len(leftovers), 'file')} removed, {pluralize(size, 'byte')}")


def append(
    prefix: Annotated[str, typer.Argument(help="The dataset that grows: its prefix, path or URL.")],
    names: Annotated[
        list[str],
        typer.Argument(help="Datasets beside it that streammega convert wrote, by their prefixes."),
    ],
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="No other producer appends now: for storage without conditional writes.",
        ),
    ] = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Make the next version of a dataset, with the shards of others after its own.

    Any number of producers may do so at once. What is in already stays once, so a command that was
    killed may be repeated. Runs go on with the version that they name (PREFIX@NUMBER).
    """
    from streammega.cli.progress import ProgressDisplay
    from streammega.dataset.append import append as run

    with ProgressDisplay("appending"):
        version = run(prefix, names, storage_config(storage, storage_file), alone=alone)
    how = "" if version.added else ", which had all of it already"
    typer.echo(f"{redact_urls(prefix)}@{version.number}: {version}{how}")


def versions(
    prefix: Annotated[str, typer.Argument(help="A dataset: its prefix, path or URL.")],
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """List the versions of a dataset that grows, and what lies beside it and is in none of them.

    Exits with 1 where the manifest of one cannot be read.
    """
    from streammega.dataset.versions import DamagedVersion, unreferenced_shards
    from streammega.dataset.versions import versions as run

    settings = storage_config(storage, storage_file, looks_only=True)
    found = run(prefix, settings, most=MOST_SHOWN)
    name = redact_urls(prefix)
    for version in found:
        typer.echo(f"{name}@{version.number}  {version}")
    if any(isinstance(version, DamagedVersion) for version in found):
        raise typer.Exit(1)
    for orphan in unreferenced_shards(prefix, settings):
        typer.echo(
            f"in no version: {in_one_line(redact_urls(orphan))}; streammega append {name} takes it in"
        )


cache_app = typer.Typer(
    no_args_is_help=True, help="Look at, check or empty a cache folder (StorageConfig.cache_dir)."
)
CacheFolder = Annotated[str, typer.Argument(help="The folder that cache_dir names.")]


@cache_app.command(name="ls", no_args_is_help=True)
def cache_ls(folder: CacheFolder) -> None:
    """List cached objects, the most recently used first."""
    from streammega.storage import cache as page_cache

    entries = sorted(page_cache.entries(_cache_folder(folder)), key=lambda entry: -entry.used)
    for entry in entries:
        state = "in use"
        if not entry.in_use:
            used = time.localtime(entry.used)
            state = f"last used {time.strftime('%Y-%m-%d %H:%M', used)}"
        typer.echo(
            f"{entry.cached_bytes:>18,} of {entry.size:,} bytes  {state}  {in_one_line(entry.url)}"
        )
    cached_bytes = sum(entry.cached_bytes for entry in entries)
    typer.echo(f"{pluralize(len(entries), 'object')}, {pluralize(cached_bytes, 'byte')}")


@cache_app.command(name="verify", no_args_is_help=True)
def cache_verify(folder: CacheFolder) -> None:
    """Compare all cached pages with their checksums.

    Exit status 1 if one differs (readers fetch such pages again).
    """
    from streammega.storage import cache as page_cache

    chunks = _cache_folder(folder)
    pages = 0
    damaged = 0
    for entry in page_cache.entries(chunks):
        pages += math.ceil(entry.cached_bytes / page_cache.PAGE_BYTES)
        for path, page in page_cache.damaged_pages(entry):
            damaged += 1
            typer.echo(f"{path}: page {page} is damaged ({in_one_line(entry.url)})")
    # somebody else's cache: what is to be noted in it is up to them
    with contextlib.suppress(OSError):
        page_cache.recount(chunks)
    typer.echo(f"{pluralize(pages, 'page')}, {damaged:,} damaged")
    if damaged:
        raise typer.Exit(1)


@cache_app.command(name="clear", no_args_is_help=True)
def cache_clear(folder: CacheFolder) -> None:
    """Remove all cached objects that were not used within the last ten minutes."""
    from streammega.storage import cache as page_cache

    removed, kept = page_cache.clear(_cache_folder(folder))
    typer.echo(
        f"{pluralize(removed, 'object')} removed, {kept:,} in use and kept (used within the last ten "
        "minutes)"
    )


def _cache_folder(folder: str) -> Path:
    from streammega.config import local_folder

    chunks = local_folder(folder) / "chunks"
    if not chunks.is_dir():
        raise ConfigError(
            f"{folder}: holds no cache; name the folder that cache_dir named in the run"
        )
    return chunks
