"""The `streammega` command line: its commands, and how errors become messages and exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import streammega
from streammega.apps.bench import bench
from streammega.apps.doctor import doctor
from streammega.apps.simulate import simulate
from streammega.apps.top import top
from streammega.apps.view import view
from streammega.cli.convert import convert, list_inputs
from streammega.cli.datasets import (
    cache_app,
    cache_clear,
    cache_ls,
    cache_verify,
    cat,
    gc,
    verify,
)
from streammega.cli.describe import describe
from streammega.cli.options import OF_DATASETS
from streammega.cli.order_report import order_report
from streammega.cli.plotting import plot
from streammega.cli.runs import export, manifest, prepare, train, warmup
from streammega.cli.trace import trace
from streammega.convert.options import DOCUMENTS, INPUTS, OUTPUT, RARE, TEXT, WORK
from streammega.errors import StreammegaError
from streammega.errors.logs import log_to_stderr, set_log_level
from streammega.errors.process import describe_defect, panics_as_errors, replace_unknown_letters
from streammega.errors.redaction import redact

EXIT_OF_INTERRUPT = 130
"""128 plus the number of SIGINT, as shells have it."""
EXIT_OF_BROKEN_PIPE = 141
"""128 plus the number of SIGPIPE."""

EXIT_CODES = (
    "Exit codes: 0 done, and nothing is wrong; 1 failed, or found what it looks for: a damaged "
    "dataset, a fault; 2 the command line is wrong; 130 Ctrl-C; 141 the reader of its "
    "output has gone.\n\n"
    "With --json a command prints one JSON value and nothing else (cat: one a line). Errors, "
    "warnings and progress go to stderr. STREAMMEGA_LOG=DEBUG shows what the library does."
)

SECTIONS = ("Arguments", INPUTS, TEXT, DOCUMENTS, OUTPUT, WORK, "Options", RARE, OF_DATASETS)
"""Sections of the help in the order in which people need them; others come after the arguments."""
MAX_WIDTH = 100
"""Columns of the help."""
MAX_NAME = 36
"""Columns of an option and its value; the description of a longer one begins in the next line."""


def _write_sections(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Write rows, (section, (name, description)) of each, by their sections."""
    rank = {title: number for number, title in enumerate(SECTIONS)}
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, row in sorted(rows, key=lambda item: rank.get(item[0], 1)):
        sections.setdefault(title, []).append(row)
    for title, rows_of_section in sections.items():
        with formatter.section(title):
            formatter.write_dl(rows_of_section, col_max=MAX_NAME)


class CompactCommand(TyperCommand):
    """A command whose help has a line for each option. It names the nearest option for an unknown
    one: typer lists all that are near, by the alphabet.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        rows = []
        for param in self.get_params(ctx):
            panel = getattr(param, "rich_help_panel", None)
            title = panel or f"{param.param_type_name.capitalize()}s"
            if record := param.get_help_record(ctx):
                name, words = record
                # the type of an argument tells nothing, and a range stands behind the description
                if param.param_type_name == "argument":
                    name = name.partition(" <")[0]
                rows.append((title, (name.replace(" range>", ">"), words)))
        _write_sections(formatter, rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # typer offers no name for the class of this error
            if nearest := getattr(error, "possibilities", None):
                error.possibilities = nearest[:1]  # type: ignore[attr-defined]
            raise


class CompactGroup(TyperGroup):
    """Commands, whose help lists them by their tasks."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first paragraph of each command's help."""
        rows = []
        for name, command in self.commands.items():
            paragraph = (command.help or "").partition("\n\n")[0]
            rows.append((getattr(command, "rich_help_panel", "Commands"), (name, paragraph)))
        _write_sections(formatter, rows)


app = typer.Typer(
    name="streammega",
    cls=CompactGroup,
    rich_markup_mode=None,
    help="Train language models straight from s3:// or oss://: convert corpora, look at datasets, "
    "train.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)


def _version(show: bool) -> None:
    if show:
        print(f"streammega {streammega.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class Command(NamedTuple):
    """A command of the help. examples: command lines, one or more."""

    run: Callable[..., None] | typer.Typer
    task: str
    examples: tuple[str, ...]


MAKE = "Make datasets"
LOOK = "Look at data"
RUN = "Prepare and run training"
UNDERSTAND = "Understand a run"
COMMANDS = {
    "convert": Command(
        convert,
        MAKE,
        (
            "streammega convert texts/ s3://bucket/web --tokenizer tokenizer.json",
            "streammega convert 'raw/*.jsonl.zst' web --tokenizer gpt2 --shuffle",
        ),
    ),
    "ls": Command(list_inputs, MAKE, ("streammega ls texts/ 's3://raw/*.parquet'",)),
    "gc": Command(gc, MAKE, ("streammega gc s3://bucket/web --remove",)),
    "describe": Command(
        describe,
        LOOK,
        (
            "streammega describe s3://bucket/web",
            "streammega describe run.toml train.global_batch_size=512",
        ),
    ),
    "cat": Command(cat, LOOK, ("streammega cat 's3://bucket/web#0..9'",)),
    "verify": Command(verify, LOOK, ("streammega verify s3://bucket/web",)),
    "cache": Command(cache_app, LOOK, ()),
    "cache ls": Command(cache_ls, LOOK, ("streammega cache ls /nvme/cache",)),
    "cache verify": Command(cache_verify, LOOK, ("streammega cache verify /nvme/cache",)),
    "cache clear": Command(cache_clear, LOOK, ("streammega cache clear /nvme/cache",)),
    "doctor": Command(
        doctor,
        RUN,
        ("streammega doctor s3://bucket/web", "streammega doctor run.toml --write"),
    ),
    "bench": Command(
        bench,
        RUN,
        (
            "streammega bench s3://bucket/web --sequence-length 4096",
            "streammega bench run.toml --tokens-per-second-per-gpu 12000 --gpus 8",
        ),
    ),
    "prepare": Command(
        prepare,
        RUN,
        (
            "streammega prepare run.toml",
            "streammega prepare s3://bucket/web --num-samples 1000000,1000,0",
        ),
    ),
    "manifest": Command(
        manifest,
        RUN,
        (
            "streammega manifest run.toml s3://bucket/blend.json",
            "streammega manifest 0.7 s3://bucket/web 0.3 s3://bucket/code s3://bucket/blend.json",
        ),
    ),
    "warmup": Command(warmup, RUN, ("streammega warmup",)),
    "train": Command(
        train,
        RUN,
        (
            "streammega train run.toml train.train_iters=1000",
            "torchrun --nproc-per-node 8 -m streammega.train run.toml",
        ),
    ),
    "export": Command(
        export,
        RUN,
        (
            "streammega export runs/one/checkpoints/step-1000 model.safetensors",
            "streammega export s3://bucket/run/checkpoints/step-1000 model.pt --optimizer",
        ),
    ),
    "order-report": Command(
        order_report,
        UNDERSTAND,
        (
            "streammega order-report 0.7 s3://bucket/web 0.3 s3://bucket/code",
            "streammega order-report run.toml --ranks 64",
        ),
    ),
    "simulate": Command(
        simulate,
        UNDERSTAND,
        (
            "streammega simulate web=10T code=3T --nodes 64 --train-tokens 15T",
            "streammega simulate cluster.toml --json",
        ),
    ),
    "trace": Command(
        trace,
        UNDERSTAND,
        (
            "streammega trace run.toml --step 3",
            "streammega trace s3://bucket/web --find 's3://bucket/web#17'",
        ),
    ),
    "view": Command(
        view,
        UNDERSTAND,
        ("streammega view run.toml", "streammega view s3://bucket/web --port 8000"),
    ),
    "top": Command(
        top,
        UNDERSTAND,
        (
            "streammega top 127.0.0.1:9400-9407",
            "streammega top 127.0.0.1:9400 127.0.0.1:9500 --once --json",
        ),
    ),
    "plot": Command(plot, UNDERSTAND, ("streammega plot runs/one",)),
}
"""Every command by its name, in the order of the help."""
for name, command in COMMANDS.items():
    if isinstance(command.run, typer.Typer):
        app.add_typer(command.run, name=name, rich_help_panel=command.task)
        continue
    *group, word = name.split()
    (cache_app if group else app).command(
        name=word,
        cls=CompactCommand,
        no_args_is_help=command.run is not warmup,
        context_settings={"ignore_unknown_options": command.run is train},
        rich_help_panel=None if group else command.task,
        epilog="\n".join(["\b", "Examples:", *(f"  {line}" for line in command.examples)]),
    )(command.run)


def _is_by(stop: SystemExit, kind: type[BaseException]) -> bool:
    """Whether an error of this kind ended a command that did not handle it."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, kind):
        error = error.__context__
    return error is not None


def _print_error(text: object) -> None:
    print(f"error: {redact(str(text))}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Known errors are one message, not a traceback.
    """
    sys.stdout = sys.stdout or io.StringIO()  # None where the shell has closed it
    sys.stderr = sys.stderr or io.StringIO()
    log_to_stderr()
    replace_unknown_letters()
    try:
        set_log_level("WARNING")
        words = list(sys.argv[1:] if arguments is None else arguments)
        with panics_as_errors():
            app(args=words, prog_name="streammega", obj=["streammega", *words])
    except SystemExit as stop:
        if _is_by(stop, KeyboardInterrupt):  # typer prints nothing
            print("interrupted", file=sys.stderr)
        if _is_by(stop, BrokenPipeError):  # typer makes it a 1
            return EXIT_OF_BROKEN_PIPE
        return stop.code if isinstance(stop.code, int) else 1
    except StreammegaError as error:
        _print_error(error)
        return 1
    except BrokenPipeError:
        # the interpreter flushes stdout when it ends, which would fail again with a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OF_BROKEN_PIPE
    except OSError as error:  # a report or plot that cannot be written, a link to nowhere
        _print_error(f"{error.filename or 'i/o'}: {error.strerror or error}")
        return 1
    except (OverflowError, MemoryError) as error:  # of a setting that is far too large
        _print_error(f"a number is too large for this: {error}")
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_OF_INTERRUPT
    except Exception as error:
        _print_error(describe_defect(error))
        return 1
    return 0
