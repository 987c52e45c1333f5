"""The commands that make and check datasets: thin; each is a library call."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls

if TYPE_CHECKING:
    from streammega.convert import ConvertOptions

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="KEY=VALUE",
        help="A storage option, e.g. endpoint_url=http://host:9000 or anon=true.",
    ),
]


UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def convert(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Text, .jsonl, .json, .parquet, .arrow, .tar, .npy and nanoGPT/llm.c .bin files ([.gz|.bz2|.zst]); folders, "
            "also of MDS or litdata shards; .bin/.idx prefixes and manifests; globs, URLs, @lists of files; - for stdin."
        ),
    ],
    output: Annotated[str, typer.Argument(help="Prefix to write: a path or s3:// URL.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, SentencePiece .model, .tiktoken, tiktoken:NAME, a hub's name, or bytes; for text."
        ),
    ] = None,
    merges: Annotated[
        str | None, typer.Option(help="The merges.txt of a --tokenizer that is GPT-2's vocab.json.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key or column of the text, also nested (meta.text); repeat for more; KEY:MODE gives a mode."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Of folders and globs, read only such files; repeat for more."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Of folders and globs, leave such files out; repeat for more."
        ),
    ] = None,
    member: Annotated[
        str | None,
        typer.Option(
            help="Of samples in .tar with several members, the one that is the document, e.g. txt."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option(help="Records hold messages; answers get mode 1.")] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="How messages are written: tokenizer (its own template), chatml, llama3, or a file."
        ),
    ] = None,
    eod: Annotated[
        str | None,
        typer.Option(help="The end-of-document token; found by its usual names by default."),
    ] = None,
    append_eod: Annotated[
        bool, typer.Option(help="End every document with the end-of-document token.")
    ] = True,
    eod_id: Annotated[
        int | None, typer.Option(help="For inputs of tokens: the id that ends documents.")
    ] = None,
    input_dtype: Annotated[
        str | None, typer.Option(help="Of raw token arrays without a header; uint16 by default.")
    ] = None,
    keep_empty: Annotated[
        bool, typer.Option(help="Keep texts without a single token, as an end alone.")
    ] = False,
    special_tokens: Annotated[
        str | None,
        typer.Option(
            help="Special tokens spelt in a text: parse or text; as the tokenizer's library by default."
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
        str | None, typer.Option(help="Of the output; by the vocabulary by default.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Drop shorter documents.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Cut or drop longer documents.")] = None,
    long: Annotated[str, typer.Option(help="What to do with them: cut or drop.")] = "cut",
    mode: Annotated[
        list[int] | None, typer.Option(help="Keep only sequences of this mode; repeat for more.")
    ] = None,
    loss_mode: Annotated[
        list[int] | None,
        typer.Option(
            help="A mode that is to be learned, in training; of --chat it is 1; repeat for more."
        ),
    ] = None,
    mix_tokenizers: Annotated[
        bool, typer.Option(help="Let tokens of different tokenizers into one dataset.")
    ] = False,
    dedup: Annotated[
        bool, typer.Option(help="Keep the first of documents with the same tokens.")
    ] = False,
    shuffle: Annotated[bool, typer.Option(help="Shuffle all documents.")] = False,
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
    memory: Annotated[
        str, typer.Option(help="Memory for shuffling and deduplication, e.g. 16G.")
    ] = "4G",
    format: Annotated[
        str, typer.Option(help="bin, zst (seekable zstd) or tar (WebDataset).")
    ] = "bin",
    level: Annotated[int, typer.Option(help="Of zstd, 1 to 22.")] = 3,
    shard_size: Annotated[
        str | None, typer.Option(help="Token bytes of a shard, e.g. 1G; one shard by default.")
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="stop, or skip: count and report what cannot be read.")
    ] = "stop",
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.")] = 0,
    engine: Annotated[str, typer.Option(help="local, or ray (see RAY_ADDRESS).")] = "local",
    work: Annotated[
        str | None,
        typer.Option(help="Folder or URL for what is unfinished; beside the output by default."),
    ] = None,
    restart: Annotated[bool, typer.Option(help="Forget what an interrupted run has done.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing dataset.")] = False,
    report: Annotated[str | None, typer.Option(help="Write the report as JSON.")] = None,
    plot: Annotated[
        str | None, typer.Option(help="Write the histogram of document lengths as PNG.")
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
    from streammega.convert import ConvertOptions, Runner
    from streammega.convert import convert as run

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
        modes=tuple(mode) if mode else None,
        loss_modes=tuple(loss_mode) if loss_mode else None,
        mix_tokenizers=mix_tokenizers,
        dedup=dedup,
        shuffle_seed=seed if shuffle else None,
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
    _check_outputs(report, plot)
    if dry_run:
        from streammega.convert.dry_run import plan_conversion

        planned = plan_conversion(
            inputs, output, options=options, runner=runner, overwrite=overwrite, storage=settings
        )
        typer.echo(planned.as_text())
        return
    with _bar("converting", _total(inputs, settings, options)) as advance:
        made = run(
            inputs,
            output,
            options=options,
            runner=runner,
            overwrite=overwrite,
            storage=settings,
            progress=advance,
        )
    typer.echo(made.as_text())
    if report:
        with open(report, "w", encoding="utf-8") as file:
            file.write(made.as_json())
    if plot:
        from streammega.cli.plotting import write_lengths

        write_lengths(
            made.histogram,
            f"{made.prefix}: {made.documents:,} documents, {made.tokens:,} tokens",
            plot,
        )


def _check_outputs(report: str | None, plot: str | None) -> None:
    """Raise OSError or ConfigError for a report or plot that could not be written in the end."""
    for path in (report, plot):
        if path is not None:
            there = os.path.exists(path)
            with open(path, "ab"):
                pass
            if not there:
                os.unlink(path)
    if plot:
        from streammega.cli.plotting import pyplot

        pyplot()


def verify(
    name: Annotated[
        str, typer.Argument(help="A prefix, a manifest, a folder or a glob; path or URL.")
    ],
    eod_id: Annotated[
        int | None, typer.Option(help="Every document must end with it; the manifest's by default.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Ids must be below it; the manifest's by default.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(help="First rebuild each lost or broken .idx from the ends of documents."),
    ] = False,
    force: Annotated[
        bool, typer.Option(help="With --repair: also where sequences and modes are lost by it.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="With --repair: of the tokens, where nothing else says it.")
    ] = None,
    storage: StorageOption = None,
) -> None:
    """Check a dataset: structure, bounds, checksums, ids, the ends of documents.

    Exit status 1 if something is wrong.
    """
    from streammega.dataset.repair import repair_index
    from streammega.dataset.verify import verify as run

    settings = storage_config(storage)
    if repair:
        for line in repair_index(name, settings, eod_id=eod_id, dtype=dtype, force=force):
            typer.echo(line)
    with _bar("verifying", None) as advance:
        found = run(
            name,
            settings,
            vocab_size=vocab_size,
            eod_id=eod_id,
            progress=lambda size: advance(size, 0),
        )
    typer.echo(found.as_text())
    if found.problems:
        raise typer.Exit(1)


def gc(
    prefix: Annotated[str, typer.Argument(help="A dataset: its prefix or manifest, path or URL.")],
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove them; without it they are only listed.")
    ] = False,
    storage: StorageOption = None,
) -> None:
    """List what killed conversions left beside a dataset, or what it replaced; --remove removes it.

    Not while a conversion to this dataset is running, here or elsewhere: what it has written so far
    is no part of a dataset yet.
    """
    from streammega.convert.work_folder import held_by_another
    from streammega.convert.write.leftovers import find_leftovers, remove_leftovers

    settings = storage_config(storage, looks_only=True)
    found = find_leftovers(prefix, settings)
    for info in found:
        typer.echo(f"{info.size:>18,} bytes  {info.key}")
    size = sum(info.size for info in found)
    if not remove or not found:
        typer.echo(
            f"{len(found)} files, {size:,} bytes{'; --remove removes them' if found else ''}"
        )
        return
    if held_by_another(prefix):
        raise ConfigError(f"{redact_urls(prefix)}: a conversion to it is running; wait for it")
    remove_leftovers(prefix, found, settings)
    typer.echo(f"{len(found)} files removed, {size:,} bytes")


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal: bytes, tokens, their speed, and the time left where the total
    is known.
    """
    from tqdm import tqdm

    with tqdm(
        unit="B", unit_scale=True, desc=title, total=total, disable=not sys.stderr.isatty()
    ) as bar:
        tokens = 0

        def advance(size: int, more: int) -> None:
            """Note what was just done."""
            nonlocal tokens
            tokens += more
            if tokens and not bar.disable:
                elapsed = max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(
                    f"{tokens:,} tokens, {tokens / elapsed:,.0f} tokens/s", refresh=False
                )
            bar.update(size)

        yield advance


def _total(inputs: Sequence[str], storage: StorageConfig, options: ConvertOptions) -> int | None:
    """Bytes of the inputs, where they are read as they are; what decompression makes of others is
    not known, nor of a pipe.
    """
    from streammega.convert.read.folders import FilePatterns
    from streammega.convert.read.inputs import find_inputs
    from streammega.convert.read.pipes import is_pipe
    from streammega.convert.read.suffixes import is_compressed

    if not sys.stderr.isatty() or any(map(is_pipe, inputs)):
        return None
    found = find_inputs(
        inputs, storage, FilePatterns(include=options.include, exclude=options.exclude)
    )
    plain = all(
        item.format in ("text", "jsonl", "megatron", "raw", "npy") and not is_compressed(item.path)
        for item in found
    )
    return sum(item.size for item in found) if plain else None


def parse_size(text: str, option: str) -> int:
    """Bytes of "512M", "1.5G", "1000". Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise ConfigError(f"{option} {text!r}: write a size as 512M, 1G or a number of bytes")
    return int(float(found[1]) * UNITS[found[2]])


GIVE_UP_LOOKING = 5.0
"""Seconds.

A dropped connection is back sooner; somebody at a terminal with a mistyped endpoint waits no
longer.
"""


def storage_config(pairs: Sequence[str] | None, *, looks_only: bool = False) -> StorageConfig:
    """A StorageConfig from `key=value` words; values true/false are booleans, the rest text.

    looks_only: for a command whose answer somebody waits for, which does not wait for minutes for
    an endpoint that fails.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            word = re.split(r"[^\w.-]", pair, maxsplit=1)[0]  # what follows may be a secret
            raise ConfigError(
                f"--storage {word!r}: write it as key=value, for instance endpoint_url=http://127.0.0.1:9000"
            )
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    transport = options.pop("transport", "auto")
    if looks_only:
        return StorageConfig(
            storage_options=options, transport=transport, give_up_after=GIVE_UP_LOOKING
        )
    return StorageConfig(storage_options=options, transport=transport)


def _fetched(run: str) -> Path:
    """A folder of this machine with the metrics of a run whose out_dir is a URL."""
    from streammega.storage import open_store
    from streammega.train.out_dir import fetch_record

    folder = Path(tempfile.mkdtemp(prefix="streammega-plot-"))
    store, key = open_store(run.rstrip("/"), StorageConfig(give_up_after=GIVE_UP_LOOKING))
    if not fetch_record(store, f"{key}/metrics.jsonl".lstrip("/"), folder / "metrics.jsonl"):
        raise ConfigError(
            f"{store.url(key)}/metrics.jsonl: no such object; give the out_dir of a run that has logged a step"
        )
    return folder


def plot(
    run: Annotated[
        str, typer.Argument(help="A run's out_dir, with metrics.jsonl in it; a folder or a URL.")
    ],
    out: Annotated[
        str | None, typer.Option(help="Where the PNG goes; default: run.png in the folder.")
    ] = None,
) -> None:
    """Draw what a run logged: losses, gradient norm, learning rate, speed and waiting."""
    from streammega.cli.plotting import latest, restarts, sparkline, write_run
    from streammega.train.metrics import read_metrics

    folder = Path(run) if "://" not in run else _fetched(run)
    path = folder / "metrics.jsonl" if folder.is_dir() else folder
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the out_dir of a run that has logged a step")
    records = [record for record in read_metrics(path) if "step" in record]
    steps = [record for record in latest(records) if record.get("loss") is not None]
    if not steps:
        raise ConfigError(f"{path}: holds no step; let the run finish one")
    losses = [float(record["loss"]) for record in steps]
    back = restarts(records)
    again = f" (begun again with step {', '.join(map(str, back))})" if back else ""
    typer.echo(
        f"{len(steps)} steps{again}, loss {losses[0]:.4g} to {losses[-1]:.4g}  {sparkline(losses)}"
    )
    target = out or ("run.png" if "://" in run else str(path.parent / "run.png"))
    write_run(
        records, run.rstrip("/").rpartition("/")[2] if "://" in run else path.parent.name, target
    )
    typer.echo(f"plot written to {target}")
