"""The command `describe`: reports of a dataset, of an input of another format, or of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from streammega.cli.options import (
    RUN_SUFFIX,
    AsJson,
    DataWords,
    StorageFile,
    StorageOption,
    load_data,
    show_progress,
)
from streammega.cli.plotting import check_plot_name, draw_lengths
from streammega.cli.render import Report, print_text, show_report
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError, StreammegaError
from streammega.errors.redaction import redact_urls, without_queries

if TYPE_CHECKING:
    from streammega.config import DataConfig, StorageConfig
    from streammega.convert.documents import RawDocument, Tokens
    from streammega.convert.tokenize.tokenizers import Tokenizer
    from streammega.dataset import IndexedDataset
    from streammega.dataset.columns import StoredColumn
    from streammega.dataset.manifest import PinnedBlend
    from streammega.train.config import RunConfig

FORMATS = {"bin": "Megatron .bin/.idx", "zst": "zstd shards (.bin.zst)", "tar": "WebDataset tars"}
SHOWN_CHARACTERS = 200
"""Characters of the first document of an input that are shown."""
SHOWN_TOKENS = 32


def describe(
    words: DataWords,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="What decodes the first tokens; by default the copy that the dataset has of its own."
        ),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Write the document-length histogram to this PNG.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help="How many of the first tokens are shown.", show_default=str(SHOWN_TOKENS)
        ),
    ] = None,
    last_step: Annotated[
        int | None, typer.Option(help="The last step of a run to count; by default the run's last.")
    ] = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """What is in a dataset, or what does a run take from its datasets? Counts, sizes, first tokens.

    For a run, each phase: is it mixed well, and what it takes from each dataset. For several
    datasets, a line each. An input of any format that convert reads may be named too.
    """
    data, run = load_data(words, storage, storage_file, options={}, looks_only=True)
    if run is not None or len(words) > 1:
        what = "a run's file" if run else "several words"
        for name, value in (("--tokenizer", tokenizer), ("--plot", plot), ("--tokens", tokens)):
            if value is not None:
                raise ConfigError(
                    f"{name} is for one dataset, and {words[0]} is {what}; leave it out"
                )
    if run is not None:
        _describe_run(words[0], run, last_step, as_json=as_json)
        return
    if last_step is not None:
        raise ConfigError(f"--last-step needs a run file ({RUN_SUFFIX}); {words[0]!r} is not one")
    if len(words) > 1:
        _describe_datasets(" ".join(words), data, as_json=as_json)
        return
    _describe_dataset(
        words[0],
        tokenizer,
        plot,
        SHOWN_TOKENS if tokens is None else tokens,
        data.storage,
        as_json=as_json,
    )


def _blend_or_none(url: str, settings: StorageConfig) -> PinnedBlend | None:
    """The blend at a URL; None where something else is there, or nothing."""
    from streammega.dataset.manifest import read_blend_file

    try:
        return read_blend_file(url, settings)
    except ObjectNotFoundError:
        return None
    except FormatError as error:
        if "is no JSON" in str(error):
            return None  # an input of another form
        raise


def _describe_blend(url: str, blend: PinnedBlend, *, as_json: bool) -> None:
    weights: dict[str, float | None] = {}
    for entries in (blend.blend, *(blend.blend_per_split or ())):
        for entry in entries or ():
            name, weight = (entry, None) if isinstance(entry, str) else entry
            weights.setdefault(name, weight)
    rows = [
        {
            "weight": weights.get(name),
            "shards": len(manifest.shards),
            "documents": sum(shard.documents for shard in manifest.shards),
            "tokens": sum(shard.tokens for shard in manifest.shards),
            "dtype": manifest.dtype,
            "dataset": name,
            **({"columns": names} if (names := [one.name for one in manifest.columns]) else {}),
        }
        for name, manifest in blend.manifests.items()
    ]
    show_report({"blend": url, "datasets": rows}, as_json=as_json)


def _describe_datasets(words: str, data: DataConfig, *, as_json: bool) -> None:
    from streammega.dataset.manifest import PinnedBlend
    from streammega.dataset.opening import open_manifests

    segment = data.segments("train")[0]
    names = segment.datasets
    with show_progress("opening"):
        manifests = dict(zip(names, open_manifests(names, data.storage), strict=True))
    weights = dict(zip(names, segment.weights or (), strict=False))
    blend = PinnedBlend([(name, weights.get(name)) for name in names], None, manifests)
    _describe_blend(words, blend, as_json=as_json)


def _describe_run(path: str, settings: RunConfig, last_step: int | None, *, as_json: bool) -> None:
    from streammega.cli.trace import check_step, open_run, phases_report, show_phases

    with show_progress("opening") as progress:
        run = open_run(settings, "train", None)
        check_step(run, "--last-step", last_step)
        progress.begin("counting")
        report = {"run": path, **phases_report(run, last_step or run.last_step)}
    show_phases(report, as_json=as_json)


def _describe_dataset(
    prefix: str,
    tokenizer: str | None,
    plot: str | None,
    tokens: int,
    settings: StorageConfig,
    *,
    as_json: bool,
) -> None:
    from streammega.dataset import IndexedDataset
    from streammega.dataset.names import MANIFEST

    if prefix.endswith(".json") and not prefix.endswith(MANIFEST):
        with show_progress("opening"):
            blend = _blend_or_none(prefix, settings)
        if blend is not None:
            _describe_blend(prefix, blend, as_json=as_json)
            return
    indexed: IndexedDataset | None = None
    no_dataset: StreammegaError | None = None
    # a signed URL is of one file
    if not (prefix.startswith("http") and "?" in prefix):
        try:
            with show_progress("opening"):
                indexed = IndexedDataset(prefix, settings)
        except (ObjectNotFoundError, FormatError) as error:
            may_be_input = prefix.endswith(".json") and not prefix.endswith(MANIFEST)
            if isinstance(error, FormatError) and not may_be_input:
                raise  # a dataset that is damaged; a .json of other records is an input
            no_dataset = error
    if indexed is None:
        try:
            with show_progress("looking for files"):
                report = input_report(prefix, settings)
        except ObjectNotFoundError as error:
            raise (no_dataset or error) from None
        if tokenizer or plot:
            raise ConfigError(
                f"{prefix}: is no dataset, and --tokenizer and --plot are for datasets; leave them "
                f"out"
            )
        show_report(report, as_json=as_json)
        return
    if plot:
        check_plot_name(plot)
    with show_progress("counting"):
        report = dataset_report(indexed, settings, tokens, tokenizer)
    show_report(report, as_json=as_json)
    if plot:
        write_plot(indexed, plot)
        print_text(f"histogram written to {plot}", to_stderr=as_json)


def dataset_report(
    indexed: IndexedDataset, settings: StorageConfig, num_first_tokens: int, tokenizer: str | None
) -> Report:
    """Counts and lengths of a dataset, and its first tokens, decoded where its tokenizer is known.

    Reads the index, and of the tokens only the first few. Raises FormatError for tokens of another
    tokenizer.
    """
    from streammega.convert.tokenize.of_dataset import tokenizer_of
    from streammega.dataset.indexed import document_tokens
    from streammega.dataset.names import split_name

    lengths = document_tokens(indexed)
    first = first_tokens(indexed, num_first_tokens)
    edges, counts = length_histogram(lengths)
    report: Report = {
        "dataset": indexed.prefix,
        "format": FORMATS[split_name(indexed.shards[0])[1]],
        "shards": len(indexed.shards),
        "dtype": str(indexed.dtype),
        "multimodal": indexed.sequence_modes is not None,
        "documents": len(lengths),
        "sequences": len(indexed),
        "empty_documents": int((lengths == 0).sum()),
        "tokens": int(lengths.sum()),
        "bytes": indexed.bin_info.size,
    }
    if indexed.bin_tokens is not None:
        room = indexed.num_bins * indexed.bin_tokens
        report["bins"] = f"{indexed.num_bins:,} of {indexed.bin_tokens:,} tokens"
        report["padding"] = 1 - report["tokens"] / room if room else 0.0
    if len(lengths):
        report["shortest"] = int(lengths.min())
        report["median"] = float(np.median(lengths))
        report["longest"] = int(lengths.max())
    if indexed.columns:
        report["columns"] = [column_report(column) for column in indexed.columns]
    report["first_ids"] = " ".join(map(str, first))
    model, _ = tokenizer_of(indexed.manifest, settings, tokenizer, by_name=False)
    if model is not None:
        report["decoded"] = _decoded(report["dataset"], first, model)
    report["document_lengths"] = [
        {"tokens": f"{low:,} to {high - 1:,}", "documents": int(count)}
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    return report


def column_report(column: StoredColumn) -> Report:
    """What a column is, without its files."""
    stored = column.stored()
    kind = {name: stored[name] for name in ("name", "dtype", "width", "align", "fill")}
    return {**kind, "bytes_a_token": column.token_bytes}


def length_histogram(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(edges, documents between them); edges are 0, 1, 2, 4, ... to the first power above all."""
    longest = int(lengths.max(initial=0))
    powers = [1 << exponent for exponent in range(max(longest, 1).bit_length() + 1)]
    edges = np.array([0, *powers], np.int64)
    return edges, np.histogram(lengths, edges)[0].astype(np.int64)


def first_tokens(indexed: IndexedDataset, count: int) -> list[int]:
    """The first `count` tokens of the dataset, over sequence bounds."""
    tokens: list[int] = []
    for number in range(len(indexed)):
        if len(tokens) >= count:
            break
        length = min(int(indexed.sequence_lengths[number]), count - len(tokens))
        if length:
            tokens += indexed.get(number, 0, length).tolist()
    return tokens


def write_plot(indexed: IndexedDataset, path: str) -> None:
    """The histogram of lengths as a PNG. Raises ConfigError when matplotlib is not installed."""
    from streammega.dataset.indexed import document_tokens

    lengths = document_tokens(indexed)
    edges, counts = length_histogram(lengths)
    title = f"{redact_urls(indexed.prefix)}: {len(lengths):,} documents, {lengths.sum():,} tokens"
    # a logarithmic axis has no 0
    draw_lengths(counts, np.maximum(edges, 0.5), title, path)


def _decoded(name: str, tokens: list[int], model: Tokenizer) -> str:
    highest = max(tokens, default=-1)
    if highest >= model.vocab_size:
        raise FormatError(
            f"{name}: token id {highest} is past the {model.vocab_size} ids of {model.name}; the "
            f"data was made with another tokenizer"
        )
    return model.decode(tokens)


def input_report(path: str, storage: StorageConfig) -> Report:
    """What an input of another format is (text, JSON lines, Parquet, MDS, ...), with its first
    document.

    Raises ObjectNotFoundError, ConvertError.
    """
    from streammega.convert.options import ConvertOptions
    from streammega.convert.read.formats import read_slice
    from streammega.convert.read.inputs import find_inputs
    from streammega.convert.read.source import Skipped, Slice

    inputs = find_inputs([path], storage)
    formats: dict[str, dict[str, int]] = {}
    for item in inputs:
        counts = formats.setdefault(item.format, {"inputs": 0, "bytes": 0})
        counts["inputs"] += 1
        counts["bytes"] += item.size
    documents = read_slice(Slice(input=inputs[0]), ConvertOptions(), storage, Skipped())
    first = next(iter(documents), None)
    return {
        "input": without_queries(path),
        "first_document": None if first is None else _beginning(first),
        "next": "streammega convert makes shards of it",
        "formats": dict(sorted(formats.items())),
    }


def _beginning(document: RawDocument | Tokens) -> str:
    """How a document begins: a text, the fields of a record, or tokens."""
    from streammega.convert.documents import RawDocument

    if not isinstance(document, RawDocument):
        return f"{document.tokens.dtype} tokens {document.tokens[:SHOWN_TOKENS].tolist()}"
    text = document.data.decode(errors="replace")
    if document.fields is not None:
        text = json.dumps(document.fields, default=str)
    return repr(text[:SHOWN_CHARACTERS])
