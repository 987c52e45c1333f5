"""A stored file of tokens as samples read it: which of its tokens have a loss, and whether datasets
have the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset.columns import StoredColumn
from streammega.dataset.labels import TokenizerLabel, list_names, mixed_tokenizers
from streammega.dataset.manifest import Manifest
from streammega.dataset.opening import open_manifests
from streammega.errors import ConfigError, StreammegaError
from streammega.kernels.fields import clear_by_mode
from streammega.samples.file_index import FileIndex, FileIndexArrays
from streammega.storage import Store
from streammega.storage.http_errors import truncated
from streammega.storage.thread_pool import parallel_map

Integers = NDArray[np.int64]
MAX_OPENERS = 32
"""Indices that are opened at once: of a remote dataset each is a download."""


# Not frozen: there are thousands, and a frozen one takes two to three times as long to make.
@dataclass(kw_only=True, slots=True)
class TokenFile:
    """One stored file of tokens: `num_tokens` of `dtype`, little-endian, from its first byte on.

    `etag`: that of the object when it was opened; empty: unknown. `index`: its `.idx`, if it is
    needed. `bin_tokens`: tokens of the bins into which documents are packed; None: they are end to
    end. `learned`: bool [256], which modes have a loss, mode m at m - MIN_MODE; None: all tokens
    have. `content`: the digest of its dataset, the same for all files of that. `columns`: those that
    the run reads, by name.
    """

    store: Store
    key: str
    dtype: np.dtype[Any]
    num_tokens: int
    etag: str = ""
    index: FileIndex | None = None
    bin_tokens: int | None = None
    learned: NDArray[np.bool_] | None = None
    content: str = ""
    columns: Mapping[str, StoredFile] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """For messages."""
        return self.store.url(self.key)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens."""
        return self.num_tokens * self.dtype.itemsize

    def check_bytes(self, size: int) -> None:
        """Raise ShortReadError if `size` bytes do not hold all tokens: kernels follow addresses in
        them without a check.
        """
        if size < self.num_bytes:
            raise truncated(self.url, f"{size} bytes, opened with {self.num_tokens} tokens")


class StoredFile(NamedTuple):
    """A column of a file of tokens, and the file that stores it, as one of as many tokens."""

    column: StoredColumn
    tokens: TokenFile


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where the tokens of samples are: `size` tokens from token `start` of a file are those from token
    `sample_start` of a sample on; int64 [runs] each.
    """

    file: Integers
    start: Integers
    size: Integers
    sample: Integers
    sample_start: Integers


def has_modes(files: Sequence[TokenFile]) -> bool:
    """Whether modes of any file make a loss mask."""
    return any(file.learned is not None for file in files)


def open_indices(
    files: Sequence[TokenFile], used: Integers
) -> list[tuple[int, TokenFile, FileIndexArrays]]:
    """(number, file, arrays of its index) of the files used that have an index.

    Raises FormatError, StorageError.
    """
    numbered = [(number, files[number]) for number in np.unique(used).tolist()]
    waiting = [file.index for _, file in numbered if file.index and not file.index.is_open]
    parallel_map(lambda index: index.arrays, waiting, MAX_OPENERS)
    return [(number, file, file.index.arrays) for number, file in numbered if file.index]


def clear_by_modes(files: Sequence[TokenFile], runs: Runs, out: NDArray[Any]) -> None:
    """Write 0 to out [samples, width] for every token without loss by its mode."""
    for number, file, arrays in open_indices(files, runs.file):
        if file.learned is None:
            continue
        # one file at a time: each has arrays of its own
        of_file = np.flatnonzero(runs.file == number)
        clear_by_mode(
            arrays.offsets, arrays.modes, file.learned, file.dtype.itemsize,
            runs.start[of_file], runs.size[of_file], runs.sample[of_file], runs.sample_start[of_file],
            out,
        )  # fmt: skip


def tokenizer_origin(name: str, config: DataConfig) -> str:
    """A dataset and what made its ids, for an error: manifests are read for that, a few seconds at
    most.
    """
    labels: set[TokenizerLabel] = set()
    with suppress(StreammegaError):
        storage = replace(config.storage, retry_timeout=5)
        (manifest,) = open_manifests([name], storage)
        labels = manifest.tokenizers
    if not labels:
        return f"{name}, whose tokenizer no manifest names"
    return f"{name}, made with tokenizer {' and '.join(sorted(map(str, labels)))}"


def with_vocabulary(
    config: DataConfig, split: str, datasets: Sequence[tuple[str, Manifest]]
) -> DataConfig:
    """The config with the vocab_size and eod_id of its manifests, where it names none.

    datasets: all of a split, by their names. Raises ConfigError if the config leaves out ids that a
    dataset has, and if a setting needs eod_id and the datasets have not one for all.
    """
    vocab_size = config.vocab_size
    if vocab_size is None:
        sizes = {size for _, manifest in datasets for size in manifest.vocab_sizes}
        known = [size for size in sizes if size is not None]
        vocab_size = max(known) if known and len(known) == len(sizes) else None
    else:
        for name, manifest in datasets:
            _check_vocabulary(name, manifest, vocab_size)
    eod_id = config.eod_id
    if eod_id is None:
        names_of: dict[int | None, list[str]] = {}
        for name, manifest in datasets:
            for one in sorted(manifest.eod_ids, key=str):
                names_of.setdefault(one, []).append(name)
        if len(names_of) == 1:
            (eod_id,) = names_of
        if eod_id is None:
            config.check_eod_id(split, _why_no_eod_id(names_of))
    if (vocab_size, eod_id) == (config.vocab_size, config.eod_id):
        return config
    return replace(config, vocab_size=vocab_size, eod_id=eod_id)


def _why_no_eod_id(names_of: Mapping[int | None, Sequence[str]]) -> str:
    """Why datasets have no id that ends the documents of all. names_of: the datasets of each."""
    if set(names_of) == {None}:
        return "no manifest of the data names it"
    listed = [
        f"{list_names(names)}: {'no manifest names it' if eod_id is None else eod_id}"
        for eod_id, names in names_of.items()
    ]
    return f"the datasets have not the same one ({'; '.join(listed)})"


def _check_vocabulary(name: str, manifest: Manifest, vocab_size: int) -> None:
    """Raise ConfigError if a vocabulary leaves out ids of a dataset. More of them are a padded one."""
    needed = max(size or 0 for size in manifest.vocab_sizes)
    if needed > vocab_size:
        raise ConfigError(
            f"{name}: its manifest has vocab_size {needed}, and the config {vocab_size}, so "
            f"its ids from {vocab_size} on would be errors in the middle of a run; set vocab_size "
            f"to {needed} or more (model.vocab_size of a run), or leave it out"
        )


def check_tokenizers(datasets: Iterable[tuple[str, set[TokenizerLabel]]]) -> None:
    """Raise ConfigError if two datasets have different tokenizers, with the datasets of each.
    datasets: (name, tokenizers); datasets without any pass.
    """
    mixed = mixed_tokenizers(datasets)
    if mixed:
        raise ConfigError(
            f"{mixed}; convert the text of all with one tokenizer, "
            "or set allow_mixed_tokenizers if you know that they agree"
        )
