"""The command that makes token shards of a corpus: thin; what it does is `streammega.convert`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streammega.cli import convert_options as option
from streammega.cli.options import (
    AsJson,
    StorageFile,
    StorageOption,
    parse_size,
    storage_config,
)
from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.errors.redaction import redact, redact_urls

if TYPE_CHECKING:
    from streammega.convert import ConvertOptions, ConvertReport, Runner


def convert(
    context: typer.Context,
    inputs: option.Inputs,
    output: option.Output,
    key: option.Keys = None,
    include: option.Include = None,
    exclude: option.Exclude = None,
    read_as: option.ReadAs = None,
    hf_split: option.HfSplit = None,
    member: option.Member = None,
    chat: option.Chat = False,
    chat_template: option.ChatTemplate = None,
    template_var: option.TemplateVars = None,
    eod_id: option.EodId = None,
    input_dtype: option.InputDtype = None,
    on_error: option.OnError = "stop",
    max_errors: option.MaxErrors = None,
    max_record_bytes: option.MaxRecordBytes = "1G",
    input_storage: option.InputStorage = None,
    input_storage_file: option.InputStorageFile = None,
    tokenizer: option.Tokenizer = None,
    merges: option.Merges = None,
    eod: option.Eod = None,
    append_eod: option.AppendEod = True,
    keep_empty: option.KeepEmpty = False,
    special_tokens: option.SpecialTokens = None,
    bos: option.Bos = None,
    add_special_tokens: option.AddSpecialTokens = False,
    tiktoken_pattern: option.TiktokenPattern = None,
    split_sentences: option.SplitSentences = None,
    min_tokens: option.MinTokens = 0,
    max_tokens: option.MaxTokens = None,
    long: option.Long = "cut",
    pack: option.Pack = None,
    pack_long: option.PackLong = "split",
    max_documents: option.MaxDocuments = None,
    mode: option.Modes = None,
    loss_mode: option.LossModes = None,
    mix_tokenizers: option.MixTokenizers = False,
    dedup: option.Dedup = False,
    shuffle: option.Shuffle = False,
    seed: option.Seed = 0,
    format: option.Form = "bin",
    level: option.Level = 3,
    shard_size: option.ShardSize = None,
    dtype: option.OutputDtype = None,
    origins: option.Origins = False,
    id_field: option.IdField = None,
    overwrite: option.Overwrite = False,
    append_to: option.AppendTo = None,
    report: option.Report = None,
    plot: option.Plot = None,
    workers: option.Workers = 0,
    memory: option.Memory = "4G",
    engine: option.Engine = "local",
    work: option.Work = None,
    task: option.Task = None,
    restart: option.Restart = False,
    dry_run: option.DryRun = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Make token shards of a corpus: of text, or of tokens that are merged, split or filtered.

    Started again after an interruption, it goes on where it stopped.
    """
    from streammega.cli.progress import ProgressDisplay
    from streammega.convert import convert_task
    from streammega.convert.tasks import parse_task

    conversion: dict[str, Any] = {
        "options": _options(context.params),
        "runner": _runner(context.params),
        "overwrite": overwrite,
        **_storages(context.params),
    }
    share = parse_task(task) if task is not None else None
    if share is not None and (report or plot):
        raise ConfigError("--report and --plot tell of a whole dataset; give them to --task merge")
    if append_to is not None:
        _check_append(append_to, output, conversion["options"], conversion["storage"])
    _check_outputs(report, plot)
    if dry_run:
        _print_plan(inputs, output, conversion)
        return
    if share is not None:
        with ProgressDisplay("preparing") as progress:
            done_share = convert_task(inputs, output, share, progress=progress, **conversion)
        typer.echo(done_share.as_text())
        return
    done = _convert_all(inputs, output, conversion, is_merge=task is not None)
    typer.echo(done.as_text())
    if append_to is not None:
        _append(append_to, done.prefix, conversion["storage"])
    storages = (conversion["storage"], conversion["input_storage"])
    _write_outputs(done, report, plot, command_words(context.obj, storages))


def list_inputs(
    inputs: option.Inputs,
    include: option.Include = None,
    exclude: option.Exclude = None,
    read_as: option.ReadAs = None,
    hf_split: option.HfSplit = None,
    on_error: option.OnError = "stop",
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Say what convert would read, as what format, and what it would leave out and why."""
    from streammega.convert import ConvertOptions
    from streammega.convert.read import listing

    options = ConvertOptions(
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        read_as=read_as,  # type: ignore[arg-type]  # checked by the options
        hf_split=hf_split,
        on_error=on_error,  # type: ignore[arg-type]  # checked by the options
    )
    found = listing.list_inputs(
        inputs, options, storage_config(storage, storage_file, looks_only=True)
    )
    typer.echo(found.as_json() if as_json else found.as_text())


def command_words(words: Sequence[str] | None, storages: Sequence[StorageConfig]) -> list[str]:
    """The words of a command, without the secrets of its URLs and storage options."""
    from streammega.convert.read.suffixes import without_queries

    shown = [without_queries(word) for word in words or ()]
    for storage in storages:
        shown = [redact(word, dict(storage.storage_options)) for word in shown]
    return shown


def _options(given: Mapping[str, Any]) -> ConvertOptions:
    """What the output depends on, of the options by their names.

    Most are called as the settings are; the others are told here, one by one.
    """
    from streammega.convert import ConvertOptions

    tokenizer = given["tokenizer"]
    if given["merges"]:
        if tokenizer is None:
            raise ConfigError(
                "--merges goes with the vocab.json of the same tokenizer; give that as --tokenizer"
            )
        tokenizer = f"{tokenizer},{given['merges']}"
    shard_size = given["shard_size"]
    settings = {item.name for item in fields(ConvertOptions)}
    named_alike = {name: value for name, value in given.items() if name in settings}
    spelled_otherwise = {
        "tokenizer": tokenizer,
        "keys": tuple(given["key"] or ["text"]),
        "template_vars": _template_vars(given["template_var"] or ()),
        "include": tuple(given["include"] or ()),
        "exclude": tuple(given["exclude"] or ()),
        "modes": tuple(given["mode"]) if given["mode"] else None,
        "loss_modes": tuple(given["loss_mode"]) if given["loss_mode"] else None,
        "shuffle_seed": given["seed"] if given["shuffle"] else None,
        "kind": given["format"],
        "shard_bytes": parse_size(shard_size, "--shard-size") if shard_size else None,
        "max_record_bytes": parse_size(given["max_record_bytes"], "--max-record-bytes"),
    }
    return ConvertOptions(**(named_alike | spelled_otherwise))


def _template_vars(pairs: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template from `name=value` words; a value is JSON, or else text."""
    variables: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError(
                f"--template-var {pair!r}: write it as NAME=VALUE, e.g. enable_thinking=false"
            )
        if value in ("True", "False", "None"):
            raise ConfigError(
                f"--template-var {pair!r}: a value is JSON: write true, false or null, or "
                f"'{name}=\"{value}\"' for the text"
            )
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


def _runner(given: Mapping[str, Any]) -> Runner:
    """How the work is done, of the options by their names."""
    from streammega.convert import Runner

    return Runner(
        workers=given["workers"],
        engine=given["engine"],
        memory_bytes=parse_size(given["memory"], "--memory"),
        work=given["work"],
        restart=given["restart"],
    )


def _storages(given: Mapping[str, Any]) -> dict[str, StorageConfig]:
    """The storage of the output, and that of the inputs.

    Without one of their own, inputs use the output's, unless all are URLs of another scheme: then
    they use what the environment says.
    """
    from streammega.storage.open import scheme_of

    storage = storage_config(given["storage"], given["storage_file"])
    input_storage = storage
    if given["input_storage"] or given["input_storage_file"]:
        input_storage = storage_config(
            given["input_storage"], given["input_storage_file"], option="--input-storage"
        )
    elif scheme_of(given["output"]):
        output_scheme = scheme_of(given["output"])
        if all(scheme_of(name) not in ("", output_scheme) for name in given["inputs"]):
            input_storage = StorageConfig()
    return {"storage": storage, "input_storage": input_storage}


def _print_plan(inputs: Sequence[str], output: str, conversion: Mapping[str, Any]) -> None:
    from streammega.cli.progress import ProgressDisplay
    from streammega.convert.dry_run import plan_conversion

    with ProgressDisplay("preparing") as progress:
        plan = plan_conversion(inputs, output, progress=progress, **conversion)
    typer.echo(plan.as_text())


def _convert_all(
    inputs: Sequence[str], output: str, conversion: Mapping[str, Any], *, is_merge: bool
) -> ConvertReport:
    """Make the dataset: of the inputs, or of what all tasks have made of them."""
    from streammega.cli.progress import ProgressDisplay
    from streammega.convert import convert as run
    from streammega.convert import merge_tasks

    with ProgressDisplay("preparing") as progress:
        if is_merge:
            return merge_tasks(inputs, output, progress=progress, **conversion)
        return run(inputs, output, progress=progress, **conversion)


def _check_append(grows: str, output: str, options: ConvertOptions, storage: StorageConfig) -> None:
    """Raise ConfigError before anything is converted that could not be appended then."""
    from streammega.convert.tokenize.tokenizers import load_tokenizer
    from streammega.dataset.growing.append import check_can_append
    from streammega.dataset.idx import token_dtype_named
    from streammega.dataset.shards import split_name

    prefix, kind_named = split_name(output)
    named_by_suffix = prefix != output and not output.endswith(".idx")
    told: dict[str, Any] = {
        "kind": kind_named if named_by_suffix else options.kind,
        "bin_tokens": options.pack,
    }
    if options.dtype is not None:
        told["dtype"] = str(token_dtype_named(options.dtype))
    # tokens of several tokenizers are of none that a manifest names
    if options.tokenizer is not None and not options.mix_tokenizers:
        tokenizer = load_tokenizer(options.tokenizer, **options.tokenizer_settings)
        told["tokenizer"] = {"name": tokenizer.name, "digest": tokenizer.digest}
    check_can_append(grows, prefix, told, storage)


def _append(grows: str, added: str, storage: StorageConfig) -> None:
    from streammega.cli.progress import ProgressDisplay
    from streammega.dataset.growing.append import append

    with ProgressDisplay("appending"):
        version = append(grows, [added], storage)
    typer.echo(f"{redact_urls(grows)}@{version.number}: {version}")


def _write_outputs(
    done: ConvertReport, report: str | None, plot: str | None, command: Sequence[str]
) -> None:
    if report:
        Path(report).write_text(done.as_json(command), encoding="utf-8")
    if plot:
        from streammega.cli.plotting import write_lengths

        title = f"{done.prefix}: {done.documents:,} documents, {done.tokens:,} tokens"
        write_lengths(done.histogram, title, plot)


def _check_outputs(report: str | None, plot: str | None) -> None:
    """Raise OSError or ConfigError for a report or plot that could not be written in the end."""
    for path in (report, plot):
        if path is not None:
            was_there = os.path.exists(path)
            # opened, since neither modes nor a folder's existence tell whether one may write there
            with open(path, "ab"):
                pass
            if not was_there:
                os.unlink(path)
    if plot:
        from streammega.cli.plotting import pyplot

        pyplot()
