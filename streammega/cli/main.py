"""The `streammega` command line: its commands, and how errors become messages and exit codes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import streammega
from streammega.cli.convert import convert, list_inputs
from streammega.cli.datasets import append, cache_app, cat, gc, verify, versions
from streammega.cli.describe import describe
from streammega.cli.diff_orders import diff_orders
from streammega.cli.order_report import order_report
from streammega.cli.plotting import plot
from streammega.cli.runs import prepare, train, warmup
from streammega.cli.trace import trace
from streammega.errors import ConfigError, StreammegaError
from streammega.errors.bus_error import name_files_on_bus_error

EXIT_OF_INTERRUPT = 130
"""128 plus the number of SIGINT, as shells have it."""
EXIT_OF_BROKEN_PIPE = 141
"""128 plus the number of SIGPIPE."""

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


COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert,
    "ls": list_inputs,
    "verify": verify,
    "gc": gc,
    "append": append,
    "versions": versions,
    "describe": describe,
    "cat": cat,
    "warmup": warmup,
    "order-report": order_report,
    "plot": plot,
    "trace": trace,
    "diff-orders": diff_orders,
    "prepare": prepare,
    "train": train,
}
"""Every command by its name, in the order of the help."""
for name, command in COMMANDS.items():
    app.command(
        name=name,
        no_args_is_help=command is not warmup,
        context_settings={"ignore_unknown_options": command is train},
    )(command)
app.add_typer(cache_app, name="cache")


def _is_by_ctrl_c(stop: SystemExit) -> bool:
    """Whether Ctrl-C ended a command that did not handle it."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _set_log_level(name: str) -> None:
    """Set the level of this library's logs. At DEBUG, botocore's have session tokens."""
    try:
        logging.getLogger("streammega").setLevel(name.upper())
    except ValueError:
        raise ConfigError(
            f"STREAMMEGA_LOG is {name!r}; it is DEBUG, INFO, WARNING or ERROR"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Known errors are one message, not a traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    name_files_on_bus_error()
    try:
        _set_log_level(os.environ.get("STREAMMEGA_LOG", "WARNING"))
        words = list(sys.argv[1:] if arguments is None else arguments)
        app(args=words, standalone_mode=True, obj=["streammega", *words])
    except SystemExit as stop:
        if _is_by_ctrl_c(stop):  # typer prints nothing
            print("interrupted", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else 1
    except StreammegaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the interpreter flushes stdout when it ends, which would fail again with a traceback
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
