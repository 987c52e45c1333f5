"""The `streammega` command line: thin; every command is a library call."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import streammega
from streammega.cli.cat import cat
from streammega.cli.convert import convert, list_inputs
from streammega.cli.data_commands import append, cache_app, gc, verify, versions
from streammega.cli.diff_orders import diff_orders
from streammega.cli.options import Overrides, RunFile
from streammega.cli.plotting import plot
from streammega.cli.report_commands import describe, order_report
from streammega.cli.trace import trace
from streammega.errors import ConfigError, StreammegaError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize

EXIT_OF_INTERRUPT = 130
"""As shells have it: 128 and the number of SIGINT."""
EXIT_OF_BROKEN_PIPE = 141
"""128 and the number of SIGPIPE."""

app = typer.Typer(
    name="streammega",
    help="Train language models straight from s3:// or oss://: convert corpora, look at datasets, "
    "train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"streammega {streammega.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command(no_args_is_help=True)(convert)
app.command(name="ls", no_args_is_help=True)(list_inputs)
app.command(no_args_is_help=True)(verify)
app.command(no_args_is_help=True)(gc)
app.command(no_args_is_help=True)(append)
app.command(no_args_is_help=True)(versions)


app.command(no_args_is_help=True)(describe)
app.command(no_args_is_help=True)(cat)


app.add_typer(cache_app, name="cache")


@app.command()
def warmup() -> None:
    """Compile all kernels into numba's cache, so that no run on this machine or image does.

    The cache is the folder that NUMBA_CACHE_DIR names; else it is beside the package, or, where
    nobody may write there, in the user's cache folder.
    """
    from streammega.cli.progress import ProgressDisplay
    from streammega.cli.warmup import warm_up

    with ProgressDisplay("compiling kernels"):
        done = warm_up()
    if not done.folders:
        raise ConfigError(
            "numba finds no folder to keep kernels in; set NUMBA_CACHE_DIR to one that can be "
            "written"
        )
    typer.echo(
        f"{done.compiled} kernels compiled, {done.loaded} were there already, in "
        f"{', '.join(done.folders)} ({done.seconds:.0f} s)"
    )
    typer.echo("processes that may not write to this folder compile again: see NUMBA_CACHE_DIR")


app.command(name="order-report", no_args_is_help=True)(order_report)
app.command(no_args_is_help=True)(plot)
app.command(no_args_is_help=True)(trace)
app.command(name="diff-orders", no_args_is_help=True)(diff_orders)


@app.command(no_args_is_help=True)
def prepare(
    config: RunFile,
    overrides: Overrides = None,
) -> None:
    """Build all indices of a run ahead of it, without GPUs.

    With data.shared_index_url they are published for the nodes.
    """
    from dataclasses import replace

    from streammega.cli.progress import ProgressDisplay
    from streammega.samples.prepare import prepare as run
    from streammega.train.config import load_run

    settings = load_run(config, overrides or [])
    data = settings.data
    if not data.num_samples:
        data = replace(data, num_samples=settings.num_samples())
    count = 0
    with ProgressDisplay("preparing") as progress:
        for done in run(data):
            typer.echo(
                f"{done.split:<6}{done.samples:>14,} samples {done.seconds:>8.2f} s  {done.prefix}"
            )
            count += 1
            progress.begin(f"preparing, {count} datasets done")
    if data.order == "stream":
        typer.echo("the stream order needs no indices")
        return
    where = ""
    if data.shared_index_url:
        where = f", published in {redact_urls(data.shared_index_url)}"
    typer.echo(f"{pluralize(count, 'dataset')} prepared{where}")


@app.command(no_args_is_help=True, context_settings={"ignore_unknown_options": True})
def train(
    config: RunFile,
    overrides: Overrides = None,
) -> None:
    """Train the example GPT (one rank; use torchrun -m streammega.train for more)."""
    from streammega.train.__main__ import main as train_main

    logging.getLogger().setLevel(logging.INFO)
    raise typer.Exit(train_main([config, *(overrides or [])], name="error"))


def _is_by_ctrl_c(stop: SystemExit) -> bool:
    """Whether Ctrl-C ended a command that did not answer it itself."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Known errors are one message, not a traceback.
    """
    logging.basicConfig(
        level=os.environ.get("STREAMMEGA_LOG", "WARNING").upper(),
        format="%(levelname)s %(name)s: %(message)s",
    )
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        app(args=words, standalone_mode=True, obj=["streammega", *words])
    except SystemExit as stop:
        if _is_by_ctrl_c(stop):  # typer says nothing of it
            print("interrupted", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else 1
    except StreammegaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # What is in the buffer of stdout is flushed when the interpreter ends, and would fail once
        # more, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OF_BROKEN_PIPE
    except OSError as error:  # a report or plot that cannot be written, a link to nowhere
        print(f"error: {error.filename or 'i/o'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (OverflowError, MemoryError) as error:  # of a setting that is far too large
        print(f"error: a number is too large for this: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_OF_INTERRUPT
    return 0
