"""The commands `convert` and `ls`. The work itself is done by `streammega.convert`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from streammega.cli.options import (
    AsJson,
    StorageFile,
    StorageOption,
    settings_from,
    show_progress,
    storage_config,
    with_flags,
)
from streammega.cli.render import print_text, show_report
from streammega.config import StorageConfig
from streammega.config.validate import Flag, Ge, check_fields
from streammega.convert.options import (
    DOCUMENTS,
    OUTPUT,
    RARE,
    WORK,
    ConvertOptions,
    ExecutionConfig,
)
from streammega.errors import ConfigError
from streammega.errors.redaction import without_queries
from streammega.errors.words import pluralize

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Text, .jsonl, .json, .csv, .parquet, .arrow, .tar, .npy, llm.c's .bin; also .gz, .bz2, "
        ".zst; folders, also of MDS or litdata; .bin/.idx prefixes, manifests; globs, URLs, @lists, -."
    ),
]


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What the command line has besides the settings of a conversion."""

    input_storage: Annotated[tuple[str, ...], Flag(RARE, metavar="KEY=VALUE")] = ()
    """As --storage, of the inputs alone; repeat for more."""
    input_storage_file: Annotated[str | None, Flag(RARE, metavar="FILE")] = None
    """As --storage-file, of the inputs alone."""
    merges: Annotated[str | None, Flag(RARE, metavar="FILE")] = None
    """The merges.txt of a --tokenizer that is GPT-2's vocab.json."""
    shuffle: Annotated[bool, Flag(DOCUMENTS)] = False
    """Shuffle all documents."""
    seed: Annotated[int | None, Flag(DOCUMENTS), Ge(0)] = None
    """The seed of --shuffle; 0 by default."""
    overwrite: Annotated[bool, Flag(OUTPUT)] = False
    """Replace an existing dataset."""
    task: Annotated[str | None, Flag(WORK, metavar="i/N|merge")] = None
    """Run only task i of N, from 0, in a shared --work-dir; then merge."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed is not None and not self.shuffle:
            raise ConfigError("seed (--seed) is for --shuffle; give that too")


@with_flags(CommandOptions, ConvertOptions, ExecutionConfig)
def convert(
    context: typer.Context,
    inputs: Inputs,
    output: Annotated[str, typer.Argument(help="Prefix to write: a path or s3:// URL.")],
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
    **settings: Any,
) -> None:
    """Make token shards from text, or merge, split and filter shards of tokens.

    After an interruption the same command goes on where it stopped.
    """
    from streammega.convert import convert as convert_all
    from streammega.convert import convert_task, merge_tasks
    from streammega.convert.read.inputs import expand_lists
    from streammega.convert.run import MERGE, parse_task

    command = CommandOptions(**settings_from(CommandOptions, settings))
    output_storage = storage_config(storage, storage_file)
    inputs = list(expand_lists(inputs))  # once: a list may be a pipe
    input_storage = _input_storage(command, inputs, output, output_storage)
    conversion: dict[str, Any] = {
        "options": _options(settings, command),
        "execution": ExecutionConfig(**settings_from(ExecutionConfig, settings)),
        "overwrite": command.overwrite,
        "storage": output_storage,
        "input_storage": input_storage,
    }
    share = parse_task(command.task) if command.task is not None else None
    run: Callable[..., Any] = convert_all
    if share is not None:
        run = partial(convert_task, task=share)
    elif command.task is not None:
        run = merge_tasks
    with show_progress("preparing") as progress:
        done = run(inputs, output, progress=progress, **conversion)
    if share is not None:
        follows = f"when all tasks have ended: the same command with --task {MERGE}"
        show_report(asdict(done) | {"task": command.task}, summary=follows, as_json=as_json)
        return
    words = [without_queries(word) for word in context.obj or ()]
    show_report(done.as_dict(words) if as_json else done.summary(), as_json=as_json)


@with_flags(ConvertOptions, only=("include", "exclude", "hf_split", "on_error"))
def list_inputs(
    inputs: Inputs,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
    **settings: Any,
) -> None:
    """List the files that convert would read, with their formats, and those it would leave out."""
    from streammega.convert.read.inputs import SkippedFiles, describe_inputs, find_inputs
    from streammega.convert.read.stdin import is_pipe

    for name in inputs:
        if is_pipe(name):
            raise ConfigError(f"{name}: can be read only once, by the conversion; list files")
    options = ConvertOptions(**settings_from(ConvertOptions, settings))
    skipped = SkippedFiles()
    config = storage_config(storage, storage_file, looks_only=True)
    with show_progress("looking for files"):
        rows = describe_inputs(find_inputs(inputs, config, options, skipped))
    if as_json:
        values = {
            "inputs": rows,
            "files_passed_over": skipped.counts,
            "names_passed_over": skipped.names,
        }
        print_text(json.dumps(values, indent=1))
        return
    sizes: dict[str, list[int]] = {}
    for item in rows:
        sizes.setdefault(item["format"], []).append(item["bytes"])
    for name, of_format in sorted(sizes.items()):
        print_text(f"{name}: {pluralize(len(of_format), 'input')}, {sum(of_format):,} bytes")
    for reason in skipped.as_lines():
        print_text(f"left out, {reason}")


def _options(settings: Mapping[str, Any], command: CommandOptions) -> ConvertOptions:
    """The options that decide the output. Raises ConfigError."""
    options = settings_from(ConvertOptions, settings)
    if command.merges:
        if "tokenizer" not in options:
            raise ConfigError(
                "--merges needs the vocab.json of the same tokenizer; give that as --tokenizer"
            )
        options["tokenizer"] += f",{command.merges}"
    if command.shuffle:
        options["shuffle_seed"] = command.seed or 0
    return ConvertOptions(**options)


def _input_storage(
    command: CommandOptions, inputs: Sequence[str], output: str, output_storage: StorageConfig
) -> StorageConfig:
    """The storage of the inputs.

    Without one of their own, they use the output's, unless all are URLs of another scheme: then
    they use what the environment says.
    """
    from streammega.storage.open import scheme_of

    if command.input_storage or command.input_storage_file:
        return storage_config(
            command.input_storage, command.input_storage_file, option="--input-storage"
        )
    output_scheme = scheme_of(output)
    if output_scheme and all(scheme_of(name) not in ("", output_scheme) for name in inputs):
        return StorageConfig()
    return output_storage
