"""The commands of runs: prepare, manifest, train, export, warmup."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from streammega.cli.options import (
    OF_DATASETS,
    RUN_SUFFIX,
    AsJson,
    DataWords,
    Overrides,
    RunFile,
    Seed,
    SequenceLength,
    Shares,
    StorageFile,
    StorageOption,
    load_data,
    show_progress,
    storage_config,
)
from streammega.cli.render import print_text, show_report
from streammega.config import ORDERS
from streammega.errors import ConfigError
from streammega.errors.logs import set_log_level
from streammega.errors.words import pluralize

DOCUMENTS = 300
TOKENS = 64
"""Tokens of a sample."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"shard_bytes": 20_000},
    "wide": {"dtype": "int32", "shuffle_seed": 1, "dedup": True},
    "zst": {"format": "zst"},
    "tar": {"format": "tar", "max_tokens": 100},
    "chat": {"chat": True},
    "packed": {"pack_length": TOKENS},
    "packed-wide": {"pack_length": TOKENS, "dtype": "int32", "shuffle_seed": 1},
}
"""Settings of datasets that are loaded by different kernels, by their names."""


def prepare(
    words: DataWords,
    num_samples: Annotated[
        str | None,
        typer.Option(
            metavar="TRAIN,VALID,TEST",
            help="Samples of each split, on which the Megatron order depends; of the last epoch "
            "that they need all are made.",
            rich_help_panel=OF_DATASETS,
        ),
    ] = None,
    sequence_length: SequenceLength = None,
    split: Shares = None,
    seed: Seed = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Build all indices of the Megatron order before a run starts, without GPUs.

    With data.index_publish_url the indices are published for the nodes. Datasets need
    --num-samples, and are prepared for the Megatron order.
    """
    from dataclasses import replace

    from streammega.samples.open import build_indices, datasets_with_indices

    options = {
        "num_samples": None if num_samples is None else _num_samples(num_samples),
        "sequence_length": sequence_length,
        "split": split,
        "seed": seed,
    }
    data, run = load_data(
        words, storage, storage_file, options=options, settings={"order": "megatron"}
    )
    if run is None and data.num_samples is None:
        raise ConfigError(
            "prepare needs --num-samples TRAIN,VALID,TEST for datasets: the Megatron order depends "
            "on it; or name a run's file"
        )
    if run is not None and not data.num_samples:
        data = replace(data, num_samples=run.num_samples())
    rows = []
    with show_progress("preparing") as progress:
        datasets = datasets_with_indices(data)
        progress.begin("building indices", len(datasets), unit=" datasets")
        for done in build_indices(datasets):
            rows.append(asdict(done))
            if not as_json:
                print_text(
                    f"{done.split:<6}{done.samples:>14,} samples {done.seconds:>8.2f} s  {done.prefix}"
                )
            progress.advance(1)
    summary = f"{pluralize(len(rows), 'dataset')} prepared"
    if not ORDERS[data.order].has_indices:
        summary = f"the {data.order} order needs no indices"
    elif data.index_publish_url:
        summary += f", published in {data.index_publish_url}"
    report = {"published": data.index_publish_url, "datasets": rows} if as_json else {}
    show_report(report, summary=summary, as_json=as_json)


def _num_samples(text: str) -> tuple[int, ...]:
    """(1000, 0, 0) of "1000" or "1000,0,0". Raises ConfigError."""
    if not re.fullmatch(r"\d{1,18}(,\d{1,18},\d{1,18})?", text):
        raise ConfigError(
            f"--num-samples {text!r}: write it as TRAIN,VALID,TEST, such as 1000,10,0"
        )
    train, *others = map(int, text.split(","))
    return (train, *(others or (0, 0)))


def manifest(
    words: DataWords,
    split: Shares = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Write into OUT.json what a blend means now: shards, counts, versions and weights.

    OUT.json, a path or URL, comes after the run's file, or after the last dataset.
    A run that names the file (blend = "OUT.json") opens it by one request a rank, and refuses a shard that
    has changed since. It may go on with the file where it began without, and back.
    """
    from streammega.samples.pinned import write_manifest

    if len(words) < 2:
        raise ConfigError("manifest needs a run's file or datasets, and then the file to write")
    place = 1 if words[0].endswith(RUN_SUFFIX) else len(words) - 1
    out = words[place]
    if not out.endswith(".json"):
        raise ConfigError(f"{out}: the file to write has no name that ends in .json")
    config, _ = load_data(
        words[:place] + words[place + 1 :], storage, storage_file, options={"split": split}
    )
    with show_progress("opening"):
        written = write_manifest(config, out)
    rows = [
        {"dataset": name, "shards": len(one.shards), "tokens": one.tokens}
        for name, one in written.items()
    ]
    summary = f"{pluralize(len(rows), 'dataset')} written to {out}"
    show_report({"datasets": rows}, summary=summary, as_json=as_json)


def train(
    config: RunFile,
    overrides: Overrides = None,
) -> None:
    """Train the example GPT (one rank; use torchrun -m streammega.train for more)."""
    from streammega.train.program import main as train_main

    raise typer.Exit(train_main([config, *(overrides or [])], name="error"))


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint of the trainer, a path or URL that ends in its name, step-1000 for "
            "instance.",
        ),
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="The file to write, a path or URL: .safetensors, or .pt for torch.load.",
        ),
    ],
    optimizer: Annotated[
        bool,
        typer.Option(
            "--optimizer",
            help="Write the optimizer's state too, as optimizer.PARAMETER.STATE.",
        ),
    ] = False,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Write a checkpoint of the trainer as one .safetensors or torch file.

    Its tensors have the names of the whole model, whatever the layout of the run. Checksums are compared,
    and nothing is unpickled. It takes twice the file's size of memory, and no torchrun.
    """
    from streammega.train.checkpoints.export import export_checkpoint

    config = storage_config(storage, storage_file)
    with show_progress("reading"):
        exported = export_checkpoint(checkpoint, out, config, optimizer=optimizer)
    summary = (
        f"step {exported.step}: {pluralize(exported.tensors, 'tensor')}, {exported.bytes:,} bytes, "
        f"written to {out}"
    )
    show_report(exported._asdict() if as_json else {}, summary=summary, as_json=as_json)


def warmup(as_json: AsJson = False) -> None:
    """Compile all kernels into numba's cache, so that no run on this machine or image does.

    The cache is the folder that NUMBA_CACHE_DIR names, else the package's, or the user's cache
    folder if the package's cannot be written.
    """
    from streammega.kernels.jit import KERNELS

    # Warnings are of folders that are removed, and say to call this command.
    set_log_level("ERROR")
    began = time.monotonic()
    with (
        TemporaryDirectory(prefix="streammega-warmup-") as folder,
        show_progress("compiling kernels", len(KINDS) + 1, " corpora") as progress,
    ):
        for dataset in _convert(Path(folder)):
            _load(dataset)
            progress.advance(1)
        _load_in_phases(Path(folder))
        progress.advance(1)
    seconds = time.monotonic() - began
    stats = [kernel.stats for kernel in KERNELS]
    compiled = sum(sum(of_kernel.cache_misses.values()) for of_kernel in stats)
    loaded = sum(sum(of_kernel.cache_hits.values()) for of_kernel in stats)
    # each file of kernels has a folder in them
    paths = (Path(of_kernel.cache_path) for of_kernel in stats if of_kernel.cache_path)
    folders = sorted({str(path.parents[1]) for path in paths})
    if not folders:
        raise ConfigError(
            "numba finds no folder to keep kernels in; set NUMBA_CACHE_DIR to one that can be "
            "written"
        )
    summary = (
        f"{compiled} kernels compiled, {loaded} were there already, in "
        f"{', '.join(folders)} ({seconds:.0f} s)\n"
        "processes that may not write to this folder compile again: see NUMBA_CACHE_DIR"
    )
    report = {"compiled": compiled, "loaded": loaded, "folders": folders, "seconds": seconds}
    show_report(report if as_json else {}, summary=summary, as_json=as_json)


def _convert(folder: Path) -> Iterator[str]:
    """Datasets of all kinds that are converted or loaded by other kernels or signatures."""
    from streammega.convert import convert
    from streammega.dataset.verify import verify

    texts = folder / "texts.jsonl"
    with texts.open("w") as file:
        for number in range(DOCUMENTS):
            file.write(json.dumps({"text": f"{number} " * (1 + number % 50)}) + "\n")
    chats = folder / "chats.jsonl"
    with chats.open("w") as file:
        for _ in range(DOCUMENTS):
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "!" * 20},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    for name, settings in KINDS.items():
        output = str(folder / name)
        inputs = [str(chats if "chat" in settings else texts)]
        convert(inputs, output, tokenizer="bytes", workers=1, **settings)
        verify(output, vocab_size=1000)
        yield output
    convert([str(folder / "plain"), str(folder / "zst")], str(folder / "merged"), workers=1)


def _load(dataset: str) -> None:
    """Take a few batches in every order, with all fields that kernels make."""
    from streammega.config import DataConfig, StorageConfig

    usual: dict[str, Any] = {
        "blend": [dataset],
        "sequence_length": TOKENS,
        "split": "90,5,5",
        "num_samples": (48, 8, 8),
        "eod_id": 256,
    }
    fields = {
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "eod_mask_loss": True,
        "fields": [..., "attention_mask"],
    }
    blend = {"blend": ["0.3", dataset, "0.7", dataset]}
    # Read as objects are, and through a cache.
    remote = StorageConfig(cache_dir=f"{dataset}-cache", cache_max_bytes=1 << 30).tuned(
        local_io="pread"
    )
    reads = {"storage": remote, "vocab_size": 1000, "exclude_documents": [f"{dataset}#0"]}
    for order, features in ORDERS.items():
        for more in ({}, fields, blend, reads):
            config = DataConfig(**usual | more, order=order)
            for split in ("train", "valid"):
                for ids_only in (False, True):
                    _take(config, split, ids_only)
        if features.has_indices:
            _take(DataConfig(**usual, order=order, inter_document_masking=True), "train", False)


def _load_in_phases(folder: Path) -> None:
    """Take batches before and after a change of the mix and of the sample's length."""
    from streammega.config import DataConfig, PhaseConfig

    first, second = str(folder / "plain"), str(folder / "zst")
    for length in (TOKENS, TOKENS // 2):
        later = PhaseConfig(
            first_sample=4, blend=["0.5", first, "0.5", second], sequence_length=length
        )
        config = DataConfig(
            blend=[first],
            sequence_length=TOKENS,
            order="stream",
            num_samples=(48, 0, 0),
            phases=[later],
        )
        _take(config, "train", ids_only=False)


def _take(config: Any, split: str, ids_only: bool) -> None:
    """Take batches, and go on from a state."""
    from streammega.loading.loader import StreamLoader

    loader = StreamLoader(
        config,
        split=split,
        micro_batch_size=2,
        global_batch_size=4,
        dp_rank=0,
        dp_size=1,
        ids_only=ids_only,
    )
    batches = iter(loader)
    next(batches)
    next(batches, None)
    loader.load_state_dict(loader.state_dict())
    next(iter(loader), None)
    loader.close()
