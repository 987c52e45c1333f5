"""The command that makes token shards of a corpus: thin; what it does is `streammega.convert`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.cli.options import StorageOption, parse_size, progress_bar, storage_config
from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls

if TYPE_CHECKING:
    from streammega.convert import ConvertOptions

READ_AS_THEY_ARE = ("text", "jsonl", "megatron", "raw", "npy")
"""Formats of which as many bytes are read as there are."""


def convert(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Text, .jsonl, .json, .parquet, .arrow, .tar, .npy and nanoGPT/llm.c .bin files "
            "([.gz|.bz2|.zst]); folders, also of MDS or litdata shards; .bin/.idx prefixes and "
            "manifests; globs, URLs, @lists of files; - for stdin."
        ),
    ],
    output: Annotated[str, typer.Argument(help="Prefix to write: a path or s3:// URL.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="What makes tokens of text: a tokenizer.json, a SentencePiece .model, a .tiktoken "
            "file, tiktoken:NAME, a name on the Hugging Face hub, or bytes."
        ),
    ] = None,
    merges: Annotated[
        str | None, typer.Option(help="The merges.txt of a --tokenizer that is GPT-2's vocab.json.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key or column of the text, also nested (meta.text); repeat for more; KEY:MODE "
            "gives its tokens a mode."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Read only such files of folders and globs; repeat for more.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave such files of folders and globs out; repeat for more.",
        ),
    ] = None,
    member: Annotated[
        str | None,
        typer.Option(
            help="Which member is the document, where samples in a .tar have several, e.g. txt."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Records hold messages; answers get mode 1, all else mode 0.")
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="How messages are written: tokenizer (its template), chatml, llama3, or a file."
        ),
    ] = None,
    eod: Annotated[
        str | None,
        typer.Option(help="The end-of-document token; by default it is found by its usual names."),
    ] = None,
    append_eod: Annotated[
        bool, typer.Option(help="End every document with the end-of-document token.")
    ] = True,
    eod_id: Annotated[
        int | None, typer.Option(help="The id that ends documents, where the inputs are tokens.")
    ] = None,
    input_dtype: Annotated[
        str | None,
        typer.Option(help="The dtype of raw token arrays without a header; uint16 by default."),
    ] = None,
    keep_empty: Annotated[
        bool,
        typer.Option(help="Keep texts without a single token, as an end-of-document token alone."),
    ] = False,
    special_tokens: Annotated[
        str | None,
        typer.Option(
            help="What a special token that is spelt in a text becomes: its id (parse), or text "
            "like any other (text); by default what the tokenizer's library makes of it."
        ),
    ] = None,
    bos: Annotated[str | None, typer.Option(help="A token that begins every document.")] = None,
    add_special_tokens: Annotated[
        bool, typer.Option(help="Let a tokenizer.json's post-processor add its tokens.")
    ] = False,
    tiktoken_pattern: Annotated[
        str | None,
        typer.Option(
            help="How a .tiktoken file cuts text: gpt2, cl100k_base, o200k_base, llama3, ..."
        ),
    ] = None,
    split_sentences: Annotated[
        str | None, typer.Option(metavar="LANG", help="Make each sentence a sequence, e.g. en.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="The dtype of the output; it follows from the vocabulary or the inputs by default."
        ),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Drop documents with fewer tokens.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Cut or drop documents with more tokens; see --long.")
    ] = None,
    long: Annotated[
        str, typer.Option(help="What to do with documents above --max-tokens: cut or drop.")
    ] = "cut",
    pack: Annotated[
        int | None,
        typer.Option(
            help="Put documents into bins of so many tokens, without cutting any; train with that "
            "sequence length."
        ),
    ] = None,
    pack_long: Annotated[
        str, typer.Option(help="What to do with documents longer than --pack: split or drop.")
    ] = "split",
    max_documents: Annotated[
        int | None, typer.Option(help="Documents of a bin of --pack, at most.")
    ] = None,
    mode: Annotated[
        list[int] | None, typer.Option(help="Keep only sequences of this mode; repeat for more.")
    ] = None,
    loss_mode: Annotated[
        list[int] | None,
        typer.Option(
            help="A mode whose tokens are learned in training (--chat: 1); repeat for more."
        ),
    ] = None,
    mix_tokenizers: Annotated[
        bool, typer.Option(help="Let tokens of different tokenizers into one dataset.")
    ] = False,
    dedup: Annotated[
        bool, typer.Option(help="Keep the first of documents with the same tokens.")
    ] = False,
    shuffle: Annotated[bool, typer.Option(help="Shuffle all documents.")] = False,
    seed: Annotated[int, typer.Option(help="The seed of --shuffle.")] = 0,
    memory: Annotated[
        str, typer.Option(help="Memory for shuffling and deduplication, e.g. 16G.")
    ] = "4G",
    origins: Annotated[
        bool,
        typer.Option(
            "--origins", help="Keep beside each shard where its documents came from; see trace."
        ),
    ] = False,
    id_field: Annotated[
        str | None,
        typer.Option(help="Key or column of the id that --origins keeps; else id, or url."),
    ] = None,
    format: Annotated[
        str, typer.Option(help="What is written: bin, zst (seekable zstd) or tar (WebDataset).")
    ] = "bin",
    level: Annotated[
        int, typer.Option(help="How hard zstd compresses, from 1 (fast) to 22 (small).")
    ] = 3,
    shard_size: Annotated[
        str | None,
        typer.Option(help="Bytes of tokens in a shard, e.g. 1G; by default there is one shard."),
    ] = None,
    on_error: Annotated[
        str,
        typer.Option(
            help="What a broken record does: stop the conversion, or skip it: it is reported."
        ),
    ] = "stop",
    workers: Annotated[
        int, typer.Option(help="Units and shards that are worked on at once; 0: one per core.")
    ] = 0,
    engine: Annotated[
        str, typer.Option(help="Where the work is done: local, or ray (see RAY_ADDRESS).")
    ] = "local",
    work: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL for what is unfinished; by default it lies beside the output."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="i/N",
            help="Do the share of task i (from 0 on) of N in the shared folder --work; merge: make "
            "the dataset when all have ended.",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option(help="Forget what an interrupted run has done.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing dataset.")] = False,
    append_to: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Then make the next version of this dataset beside it, with these shards too.",
        ),
    ] = None,
    report: Annotated[
        str | None, typer.Option(help="Write the report to this file, as JSON.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Write the histogram of document lengths to this PNG.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Write nothing: print the plan, the first documents as tokens, and an estimate.",
        ),
    ] = False,
    storage: StorageOption = None,
) -> None:
    """Make token shards of a corpus: tokenize text, or merge, split, shuffle, filter and re-encode
    tokens.

    Started again after an interruption, it goes on where it stopped.
    """
    from streammega.convert import ConvertOptions, Runner, convert_task, merge_tasks
    from streammega.convert import convert as run
    from streammega.convert.tasks import parse_task
    from streammega.dataset.growing.additions import check_beside
    from streammega.dataset.growing.append import append

    if merges and tokenizer is None:
        raise ConfigError(
            "--merges goes with the vocab.json of the same tokenizer; give that as --tokenizer"
        )
    options = ConvertOptions(
        tokenizer=f"{tokenizer},{merges}" if merges else tokenizer,
        keys=tuple(key or ["text"]),
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        member=member,
        chat=chat,
        chat_template=chat_template,
        append_eod=append_eod,
        eod=eod,
        eod_id=eod_id,
        split_sentences=split_sentences,
        input_dtype=input_dtype,
        keep_empty=keep_empty,
        special_tokens=special_tokens,  # type: ignore[arg-type]  # checked by the options
        bos=bos,
        add_special_tokens=add_special_tokens,
        tiktoken_pattern=tiktoken_pattern,
        dtype=dtype,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        long=long,  # type: ignore[arg-type]  # checked by the options
        pack=pack,
        pack_long=pack_long,  # type: ignore[arg-type]
        max_documents=max_documents,
        modes=tuple(mode) if mode else None,
        loss_modes=tuple(loss_mode) if loss_mode else None,
        mix_tokenizers=mix_tokenizers,
        dedup=dedup,
        shuffle_seed=seed if shuffle else None,
        origins=origins,
        id_field=id_field,
        kind=format,  # type: ignore[arg-type]
        level=level,
        shard_bytes=parse_size(shard_size, "--shard-size") if shard_size else None,
        on_error=on_error,  # type: ignore[arg-type]
    )
    runner = Runner(
        workers=workers,
        engine=engine,  # type: ignore[arg-type]
        memory_bytes=parse_size(memory, "--memory"),
        work=work,
        restart=restart,
    )
    settings = storage_config(storage)
    share = parse_task(task) if task is not None else None
    if share is not None and (report or plot):
        raise ConfigError("--report and --plot tell of a whole dataset; give them to --task merge")
    if append_to is not None:
        check_beside(append_to, output)
    _check_outputs(report, plot)
    if dry_run:
        from streammega.convert.dry_run import plan_conversion

        planned = plan_conversion(
            inputs, output, options=options, runner=runner, overwrite=overwrite, storage=settings
        )
        typer.echo(planned.as_text())
        return
    # nobody knows how much of it a task's share is
    total = None if share is not None else _total_bytes(inputs, settings, options)
    with progress_bar("converting", total) as advance:
        named: dict[str, Any] = {
            "options": options,
            "runner": runner,
            "overwrite": overwrite,
            "storage": settings,
            "progress": advance,
        }
        if share is not None:
            typer.echo(convert_task(inputs, output, share, **named).as_text())
            return
        done = (run if task is None else merge_tasks)(inputs, output, **named)
    typer.echo(done.as_text())
    if append_to is not None:
        version = append(append_to, [done.prefix], settings)
        typer.echo(f"{redact_urls(append_to)}@{version.number}: {version}")
    if report:
        Path(report).write_text(done.as_json(), encoding="utf-8")
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


def _total_bytes(
    inputs: Sequence[str], storage: StorageConfig, options: ConvertOptions
) -> int | None:
    """Bytes of the inputs, where they are read as they are; what decompression makes of others is
    not known, nor of a pipe.
    """
    from streammega.convert.read.folders import FilePatterns
    from streammega.convert.read.inputs import find_inputs
    from streammega.convert.read.pipes import is_pipe
    from streammega.convert.read.suffixes import is_compressed

    # without a bar nobody asks, and buckets need not be listed for it
    if not sys.stderr.isatty() or any(map(is_pipe, inputs)):
        return None
    patterns = FilePatterns(include=options.include, exclude=options.exclude)
    total = 0
    for item in find_inputs(inputs, storage, patterns):
        if item.format not in READ_AS_THEY_ARE or is_compressed(item.path):
            return None
        total += item.size
    return total
