"""The commands that check datasets, tidy up beside them, and draw runs: each is a library call."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from streammega.cli.options import StorageFile, StorageOption, storage_config
from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import in_one_line, pluralize

METRICS = "metrics.jsonl"
"""The record of a run, in its out_dir."""


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
    from streammega.convert.work_folder import held_by_another
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
    if held_by_another(prefix):
        raise ConfigError(f"{redact_urls(prefix)}: a conversion to it is running; wait for it")
    remove_leftovers(prefix, leftovers, settings)
    typer.echo(f"{pluralize(len(leftovers), 'file')} removed, {pluralize(size, 'byte')}")


def _fetch_metrics(run: str, storage: StorageConfig) -> Path:
    """The metrics of a run whose out_dir is a URL, as a file of this machine."""
    from streammega.storage import open_store
    from streammega.train.out_dir import fetch_record

    folder = Path(tempfile.mkdtemp(prefix="streammega-plot-"))
    store, key = open_store(run.rstrip("/"), storage)
    # of a bucket itself the key is empty
    key_of_metrics = f"{key}/{METRICS}".lstrip("/")
    if not fetch_record(store, key_of_metrics, folder / METRICS):
        raise ConfigError(
            f"{store.url(key)}/{METRICS}: no such object; give the out_dir of a run that has "
            f"logged a step"
        )
    return folder / METRICS


def plot(
    run: Annotated[
        str, typer.Argument(help="A run's out_dir, with metrics.jsonl in it; a folder or a URL.")
    ],
    out: Annotated[
        str | None,
        typer.Option(help="Where the PNG is written; by default it is run.png in the folder."),
    ] = None,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Draw what a run logged: losses, gradient norm, learning rate, speed and waiting."""
    from streammega.cli.plotting import latest, pyplot, restarts, sparkline, write_run
    from streammega.train.metrics import read_metrics

    pyplot()  # is there
    is_url = "://" in run
    if is_url:
        path = _fetch_metrics(run, storage_config(storage, storage_file, looks_only=True))
        title = run.rstrip("/").rpartition("/")[2]
        target = out or "run.png"
    else:
        path = Path(run)
        if path.is_dir():
            path /= METRICS
        title = path.parent.name
        target = out or str(path.parent / "run.png")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the out_dir of a run that has logged a step")
    records = [record for record in read_metrics(path) if "step" in record]
    steps = [record for record in latest(records) if record.get("loss") is not None]
    if not steps:
        raise ConfigError(f"{path}: holds no step; let the run finish one")
    losses = [float(record["loss"]) for record in steps]
    typer.echo(
        f"{pluralize(len(steps), 'step')}{_begun_again(restarts(records))}, "
        f"loss {losses[0]:.4g} to {losses[-1]:.4g}  {sparkline(losses)}"
    )
    write_run(records, f"{title}: {len(steps)} steps", target)
    typer.echo(f"plot written to {target}")


def _begun_again(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f" (begun again with step {', '.join(map(str, steps))})"
