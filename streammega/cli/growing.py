"""The commands of datasets that grow while runs train on them: each is a library call."""

from __future__ import annotations

from typing import Annotated

import typer

from streammega.cli.options import StorageFile, StorageOption, storage_config
from streammega.errors.redaction import redact_urls
from streammega.errors.words import in_one_line

MOST_SHOWN = 20
"""Versions that are listed: a dataset may have thousands."""


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
    from streammega.dataset.growing.append import append as run

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
    from streammega.dataset.growing.versions import DamagedVersion, orphans
    from streammega.dataset.growing.versions import versions as run

    settings = storage_config(storage, storage_file, looks_only=True)
    found = run(prefix, settings, most=MOST_SHOWN)
    name = redact_urls(prefix)
    for version in found:
        typer.echo(f"{name}@{version.number}  {version}")
    if any(isinstance(version, DamagedVersion) for version in found):
        raise typer.Exit(1)
    for orphan in orphans(prefix, settings):
        typer.echo(
            f"in no version: {in_one_line(redact_urls(orphan))}; streammega append {name} takes it in"
        )
