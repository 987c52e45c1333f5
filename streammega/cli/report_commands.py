"""The commands that say what a dataset, a run or an order is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from streammega.cli.options import AsJson, StorageFile, StorageOption, storage_config
from streammega.cli.render import show_report
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError

if TYPE_CHECKING:
    from streammega.cli.order_report import OrderReport
    from streammega.config import StorageConfig

RUN = ".toml"
"""The ending of a run's file."""
OF_A_BLEND = (
    "sequence_length",
    "global_batch_size",
    "order",
    "split",
    "seed",
    "lanes",
    "block_kib",
)
"""Options of order-report that a run's file has settings for."""


def describe(
    prefix: Annotated[
        str,
        typer.Argument(
            help="A dataset: a prefix, a manifest, a folder; an input of any format; or a run's "
            "TOML file."
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer, to decode the first tokens.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Write the document-length histogram to this PNG.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=0, help="How many of the first tokens are shown.")
    ] = 32,
    last_step: Annotated[
        int | None, typer.Option(help="Of a run: up to this step; by default its last.")
    ] = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Say what a dataset is, or what each phase of a run takes from which dataset.

    Of a dataset: counts, dtype, sizes, first tokens, document lengths.
    """
    if prefix.endswith(RUN):
        for name, value in (
            ("--tokenizer", tokenizer),
            ("--plot", plot),
            ("--storage", storage),
            ("--storage-file", storage_file),
        ):
            if value is not None:
                raise ConfigError(f"{name}: is of a dataset, and {prefix} is a run's file")
        _describe_run(prefix, last_step, as_json=as_json)
        return
    if last_step is not None:
        raise ConfigError(f"--last-step needs a run file ({RUN}); {prefix!r} is not one")
    _describe_dataset(
        prefix,
        tokenizer,
        plot,
        tokens,
        storage_config(storage, storage_file, looks_only=True),
        as_json=as_json,
    )


def _describe_run(path: str, last_step: int | None, *, as_json: bool) -> None:
    from streammega.cli.trace import check_step
    from streammega.cli.trace_report import open_run, phases_report
    from streammega.train.config import load_run

    run = open_run(load_run(path), "train", None)
    check_step(run, "--last-step", last_step)
    report = {"run": path, **phases_report(run, last_step or run.last_step)}
    show_report(report, as_json=as_json)


def _describe_dataset(
    prefix: str,
    tokenizer: str | None,
    plot: str | None,
    tokens: int,
    settings: StorageConfig,
    *,
    as_json: bool,
) -> None:
    from streammega.cli.dataset_report import dataset_report, input_report, write_plot
    from streammega.dataset import IndexedDataset
    from streammega.dataset.manifest import MANIFEST

    # a signed URL is one of a file, and there is nothing beside it
    if prefix.startswith("http") and "?" in prefix:
        show_report(input_report(prefix, settings), as_json=as_json)
        return
    try:
        indexed = IndexedDataset(prefix, settings)
    except (ObjectNotFoundError, FormatError) as no_dataset:
        may_be_input = prefix.endswith(".json") and not prefix.endswith(MANIFEST)
        if isinstance(no_dataset, FormatError) and not may_be_input:
            raise  # a dataset that is damaged; a .json of other records is an input
        try:
            report = input_report(prefix, settings)
        except ObjectNotFoundError:
            raise no_dataset from None
        show_report(report, as_json=as_json)
        return
    show_report(dataset_report(indexed, tokens, tokenizer), as_json=as_json)
    if plot:
        write_plot(indexed, plot)
        typer.echo(f"histogram written to {plot}", err=as_json)


def order_report(
    context: typer.Context,
    blend: Annotated[
        list[str],
        typer.Argument(
            help="Prefixes, or weights and prefixes in turn: 0.3 a 0.7 b. Or a run's TOML file, and "
            "settings over it: section.name=value."
        ),
    ],
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 4096,
    global_batch_size: Annotated[int, typer.Option(help="Samples of a step.")] = 1024,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 8,
    steps: Annotated[
        int, typer.Option(help="Global batches to look at, from the first of each phase on.")
    ] = 256,
    order: Annotated[
        str, typer.Option(help="The order: stream, megatron or sequential.")
    ] = "stream",
    split: Annotated[str, typer.Option(help="The shares of train, valid and test.")] = "1,0,0",
    seed: Annotated[int, typer.Option(help="The seed of the shuffle.")] = 1234,
    lanes: Annotated[int | None, typer.Option(help="Lanes of the stream order.")] = None,
    block_kib: Annotated[int, typer.Option(help="KiB of a block of the stream order.")] = 256,
    plot: Annotated[str | None, typer.Option(help="Write the figures to this PNG.")] = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Measure an order before it is used: shuffle quality, blend drift, requests, bytes.

    Of a run's file in each of its phases. Reads no tokens.
    """
    from streammega.cli import order_report as reporting
    from streammega.config import DataConfig

    is_run = blend[0].endswith(RUN)
    if is_run:
        _check_of_a_blend(context, blend[0])
        reports = _reports_of_run(blend[0], blend[1:], ranks, steps)
        if plot and len(reports) > 1:
            raise ConfigError(
                f"--plot: draws one order, and {blend[0]} has {len(reports)} phases; leave it out"
            )
    else:
        config = DataConfig(
            blend=_blend_of(blend),
            sequence_length=sequence_length,
            split=split,
            seed=seed,
            order=order,  # type: ignore[arg-type]  # checked by the config
            lanes=lanes,
            block_bytes=block_kib * 1024,
            num_samples=(steps * global_batch_size, 0, 0),
            storage=storage_config(storage, storage_file, looks_only=True),
        )
        reports = [reporting.order_report(config, "train", global_batch_size, ranks, steps)]
    values = [reporting.report_values(report, ranks) for report in reports]
    if as_json:
        typer.echo(json.dumps(values, indent=1))
    else:
        for number, report in enumerate(values):
            show_report(report, summary=reporting.title_of(reports[number]))
        if is_run and not _is_given(context, "ranks"):
            typer.echo(
                f"note: a run's file does not name the number of data-parallel ranks; {ranks} are "
                "assumed: give --ranks"
            )
    if plot:
        reporting.write_plot(reports[0], plot)
        typer.echo(f"plot written to {plot}", err=as_json)


def _blend_of(words: list[str]) -> list[str] | str:
    """The words as one text, in which a weight without a prefix is a mistake; as a list, where a
    prefix has blanks.
    """
    has_blanks = any(len(word.split()) != 1 for word in words)
    return words if has_blanks and len(words) > 1 else " ".join(words)


def _reports_of_run(path: str, overrides: list[str], ranks: int, steps: int) -> list[OrderReport]:
    from streammega.cli import order_report as reporting
    from streammega.cli.trace_report import open_run
    from streammega.train.config import load_run

    run = open_run(load_run(path, overrides), "train", None)
    return reporting.phase_reports(run.provenance.source, run.steps.schedule, ranks, steps, run.end)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option."""
    given_by = context.get_parameter_source(name)
    return given_by is not None and given_by.name == "COMMANDLINE"


def _check_of_a_blend(context: typer.Context, path: str) -> None:
    """Raise ConfigError for options that a run's file says otherwise."""
    for name in (*OF_A_BLEND, "storage", "storage_file"):
        if _is_given(context, name):
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option}: {path} says it; to measure another, put section.name=value behind it"
            )
