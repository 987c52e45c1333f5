"""Reading a `.bin/.idx` pair from a local path or an object store."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from streammega.config import MiB, StorageConfig
from streammega.dataset.column_reader import ColumnReader
from streammega.dataset.columns import StoredColumn
from streammega.dataset.concat_index import KEEP_BYTES, join_indices, map_joined_index
from streammega.dataset.document_lookup import ShardDocuments
from streammega.dataset.idx import IndexArrays
from streammega.dataset.labels import TokenizerLabel
from streammega.dataset.local_cache import cache_folder
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import SUFFIXES, split_name, strip_suffix, with_suffix
from streammega.dataset.opening import content_of, open_with
from streammega.dataset.provenance import DocumentOrigin
from streammega.dataset.shard import checked_arrays, open_tokens, shown_urls
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError
from streammega.errors.cached_property import cached_property
from streammega.storage import Buffer, ObjectInfo, Store, open_store
from streammega.storage.derived_stores import ConcatStore
from streammega.storage.etags import bare_version
from streammega.storage.thread_pool import parallel_map

MAX_OPENED = 32
"""Shards that are opened at once. Each waits for a few small requests."""
Tokens: TypeAlias = NDArray[Any]
Item: TypeAlias = "Tokens | tuple[Tokens, int]"


class IndexView:
    """The arrays of an `.idx` under Megatron's names; `view[i]` is (byte of the `.bin`, length,
    mode or None) of sequence i.
    """

    def __init__(self, arrays: IndexArrays, modes: NDArray[np.int8] | None) -> None:
        self.sequence_lengths = arrays.sequence_lengths
        self.sequence_pointers = arrays.sequence_offsets
        self.document_indices = arrays.document_indices
        self.sequence_modes = modes
        self.dtype = arrays.dtype.type
        self.dtype_size = arrays.dtype.itemsize
        self.sequence_count = len(arrays.sequence_lengths)
        self.document_count = len(arrays.document_indices)

    def __len__(self) -> int:
        return self.sequence_count

    def __getitem__(self, index: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        mode = self.sequence_modes[index] if self.sequence_modes is not None else None
        return self.sequence_pointers[index], self.sequence_lengths[index], mode


def pair_exists(path_prefix: str, storage: StorageConfig | None = None) -> bool:
    """Whether a shard's tokens and its `.idx` exist. Raises AccessDeniedError, EndpointError."""
    prefix, kind = split_name(str(path_prefix))
    try:
        for url in (prefix + SUFFIXES[kind], f"{prefix}.idx"):
            store, key = open_store(url, storage or StorageConfig())
            store.info(key)
    except ObjectNotFoundError:
        return False
    return True


def _read_object_storage_config(config: Any) -> tuple[str | Path, int]:
    """(folder for copies of `.idx` files, bytes of a chunk of the cache) of Megatron's config."""
    folder = getattr(config, "path_to_idx_cache", None)
    chunk_bytes = getattr(config, "bin_chunk_nbytes", MiB)
    if not folder or not chunk_bytes > 0:
        raise ConfigError(
            "object_storage_config needs path_to_idx_cache, a folder, and a bin_chunk_nbytes above "
            "zero"
        )
    # Megatron reads tokens in blocks of that size. Here only a cache has blocks.
    return folder, max(MiB, int(chunk_bytes))


class IndexedDataset(Sequence["Item"]):
    """The sequences of a dataset, by number: of one `.bin/.idx` pair, or of all shards that a name
    means (see `open_manifests`), end to end.

    `dataset[i]` is sequence i as an array of the stored dtype, shape [sequence_lengths[i]]; in
    multimodal files it is the pair (tokens, mode). `dataset[a:b]` is a list of them, read by one
    range. Local pairs are memory-mapped; of remote ones the `.idx` is copied to the local cache
    once per node.

    Takes what Megatron's IndexedDataset takes, in its order: with `multimodal=True` slices and
    `get` are also as Megatron's, (list of tokens, modes) and (tokens, mode).

    Args:
        path_prefix: the path or URL without `.bin` / `.idx`; `prefix` is the same.
        multimodal: whether sequences come with their modes; None: where the file has them. Or, for
            short, `storage`.
        mmap: map local tokens, or read them; None: read them where another machine serves the
            file system.
        object_storage_config: Megatron's; its `path_to_idx_cache` is the `cache_dir` of a `storage`
            that names none.
        storage: credentials, transport, limits, and the `cache_dir` of `.idx` copies.
        manifest: what the name is, where that is known: then nothing is asked about it.
        columns: those that `column` will read. They are looked up.
        fast_cache_load, sequences_per_dataset, dtype_code: Megatron's, at their defaults only: an
            `.idx` is always read.

    Raises ObjectNotFoundError, FormatError (a forged, truncated or foreign file, or no modes where
    they are asked for), ConfigError, AccessDeniedError, EndpointError.
    """

    def __init__(
        self,
        path_prefix: str = "",
        multimodal: bool | StorageConfig | None = None,
        mmap: bool | None = None,
        object_storage_config: Any = None,
        *,
        prefix: str = "",
        storage: StorageConfig | None = None,
        manifest: Manifest | None = None,
        columns: Collection[str] = (),
        fast_cache_load: bool = False,
        sequences_per_dataset: Any = None,
        dtype_code: int | None = None,
    ) -> None:
        if fast_cache_load or sequences_per_dataset is not None or dtype_code is not None:
            raise ConfigError(
                "fast_cache_load, sequences_per_dataset and dtype_code are not supported: an .idx is "
                "always read"
            )
        name = str(path_prefix or prefix)
        if not name:
            raise ConfigError(
                "IndexedDataset needs the name of a dataset, such as 's3://bucket/web'"
            )
        self.object_storage_config = object_storage_config
        if isinstance(multimodal, StorageConfig):  # IndexedDataset(prefix, storage)
            storage = multimodal
            multimodal = None
        storage = storage or StorageConfig()
        if mmap is not None:
            storage = storage.tuned(local_io="mmap" if mmap else "pread")
        if object_storage_config is not None:
            folder, chunk_bytes = _read_object_storage_config(object_storage_config)
            storage = storage.tuned(cache_chunk_bytes=chunk_bytes)
            if storage.cache_dir is None:
                storage = storage.changed(cache_dir=folder)
        self.name = name
        self.prefix = strip_suffix(name)
        self.storage = storage
        self._with_modes = multimodal
        known = {} if manifest is None else {name: manifest}
        self.shards: list[str] = open_with([name], self.storage, self._open, known, columns)
        """The names of its shards."""
        if self._with_modes and self._arrays.sequence_modes is None:
            raise FormatError(
                f"{self.prefix}: has no modes; leave multimodal out, or write it with "
                "multimodal=True"
            )

    def _open(self, manifests: list[Manifest]) -> list[str]:
        """Open all shards; returns their names."""
        self.manifest: Manifest
        """What the name is."""
        (self.manifest,) = manifests
        self._shards = self.manifest.shards
        opened = [open_tokens(shard, self.storage) for shard in self._shards]
        self._sizes = [shard.token_bytes for shard in self._shards]
        self.store: Store
        self.bin_key: str
        self.bin_info: ObjectInfo
        if len(opened) == 1:
            self.store, self.bin_info = opened[0]
            self.bin_key = self.bin_info.key
        else:
            self.store = ConcatStore(opened, self.prefix)
            self.bin_key = self.prefix
            self.bin_info = self.store.info(self.bin_key)
        # Now, because errors belong here. Not through the property: before Python 3.12 it would open
        # one dataset of a blend at a time.
        self.__dict__["_arrays"] = self._open_arrays()
        self.content = content_of(self.manifest)
        """A digest of what it holds, the same wherever it is stored."""
        etags = [self.bin_info.etag, *(shard.index_etag for shard in self._shards)]
        joined = "\n".join(map(bare_version, etags)).encode()
        self.version = hashlib.blake2b(joined, digest_size=16).hexdigest() if all(etags) else ""
        """A digest that changes when one of its files does; empty where a server sends no ETags."""
        return [with_suffix(shard.name, shard.kind) for shard in self._shards]

    def __repr__(self) -> str:
        name = self.store.url(self.bin_key)
        return f"IndexedDataset({name.removesuffix('.bin')!r}, {len(self)} sequences, {self.dtype})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    @cached_property
    def _arrays(self) -> IndexArrays:
        return self._open_arrays()

    def _open_arrays(self) -> IndexArrays:
        """Map and check the `.idx`. A process that unpickles the dataset maps the same one again."""
        if len(self._shards) == 1:
            return self._open_part(0)
        all_bytes = sum(shard.index_bytes for shard in self._shards)
        # Without ETags a joined index on disk could be one of earlier shards.
        kept = all_bytes >= KEEP_BYTES and all(shard.index_etag for shard in self._shards)
        try:
            if not kept:
                return join_indices(self._open_indices(), self._sizes)
            urls = [shown_urls(shard, self.storage)[0] for shard in self._shards]
            versions = [
                (shard.index_etag, shard.index_bytes, shard.token_bytes) for shard in self._shards
            ]
            return map_joined_index(
                cache_folder(self.storage) / "idx", urls, versions, self._open_indices
            )
        except FormatError as error:
            raise FormatError(f"{self.prefix}: {error}") from None

    def _open_indices(self) -> list[IndexArrays]:
        at_once = min(MAX_OPENED, self.storage.max_concurrent_requests)
        numbers = range(len(self._shards))
        return parallel_map(self._open_part, numbers, at_once, is_local=self.store.is_local)

    def _open_part(self, number: int) -> IndexArrays:
        """The `.idx` of one of its shards."""
        is_packed = self.bin_tokens is not None
        return checked_arrays(self._shards[number], self.storage, is_packed=is_packed)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored token dtype."""
        return self._arrays.dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, shape [sequences]."""
        return self._arrays.sequence_lengths

    @property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """Byte position of each sequence in the `.bin`, shape [sequences]."""
        return self._arrays.sequence_offsets

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """Document d holds sequences [document_indices[d], document_indices[d + 1]); shape
        [documents + 1].
        """
        return self._arrays.document_indices

    @property
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """The mode of each sequence in multimodal files, else None (also with
        `multimodal=False`).
        """
        return None if self._with_modes is False else self._arrays.sequence_modes

    @cached_property
    def loss_modes(self) -> tuple[int, ...] | None:
        """The modes of sequences that are learned, by the manifest; None where it has none, or there
        is no manifest.
        """
        return None if self.sequence_modes is None else self.manifest.learned_modes(self.name)

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of a bin, by the manifest; None where documents are end to end, or there is no
        manifest.
        """
        return self.manifest.bin_tokens

    @property
    def num_bins(self) -> int:
        """Bins of all shards. Raises ConfigError for a dataset that is not packed."""
        bin_bytes = self._bin_bytes()
        return sum(size // bin_bytes for size in self._sizes)

    def bin_offsets(self) -> NDArray[np.int64]:
        """Where each bin begins in the `.bin`, in bytes, int64 [bins]. Raises ConfigError for a
        dataset that is not packed.
        """
        bin_bytes = self._bin_bytes()
        before = 0
        offsets = [np.empty(0, np.int64)]
        for size in self._sizes:
            offsets.append(before + np.arange(size // bin_bytes) * bin_bytes)
            before += size
        return np.concatenate(offsets)

    def _bin_bytes(self) -> int:
        if self.bin_tokens is None:
            raise ConfigError(
                f"{self.prefix}: has no bins; convert it with --pack-length, or name it by the prefix "
                f"that has its manifest"
            )
        return self.bin_tokens * self.dtype.itemsize

    @property
    def tokenizers(self) -> set[TokenizerLabel]:
        """The tokenizers of its shards, as far as manifests name them."""
        return self.manifest.tokenizers

    @cached_property
    def _documents(self) -> tuple[list[ShardDocuments], NDArray[np.int64]]:
        """The documents of each shard, and the number of the first one of each, in all shards."""
        shards = [ShardDocuments(shard, self.storage) for shard in self._shards]
        return shards, np.cumsum([0, *(shard.num_documents for shard in shards)])

    @property
    def columns(self) -> Sequence[StoredColumn]:
        """The columns that its manifest lists."""
        return self.manifest.columns

    def column(self, name: str) -> ColumnReader:
        """The values of a column, by the tokens of all shards: those of sequence i begin at token
        `sequence_offsets[i] // dtype.itemsize`.

        Raises ConfigError where it has no such column, FormatError where only some of its shards do.
        """
        column = next((column for column in self.columns if column.name == name), None)
        if column is None:
            raise ConfigError(f"{self.prefix}: has no column {name!r}; write it by a ColumnWriter")
        return self.read_column(column)

    def read_column(self, column: StoredColumn) -> ColumnReader:
        """The same of a column that is known, with the objects of its shards."""
        tokens = [shard.tokens for shard in self._shards]
        return ColumnReader(column, tokens, self.storage, self.prefix)

    def origin(self, document: int) -> DocumentOrigin | None:
        """Where a document came from; None if its shard does not keep that (convert --provenance).

        Raises IndexError for a number that no document has.
        """
        shards, firsts = self._documents
        if not 0 <= document < firsts[-1]:
            raise IndexError(f"document {document} of {firsts[-1]} in {self}")
        shard = int(np.searchsorted(firsts, document, side="right")) - 1
        stored = shards[shard].origins
        return None if stored is None else stored[document - int(firsts[shard])]

    @property
    def path_prefix(self) -> str:
        """As `prefix`."""
        return self.prefix

    @property
    def multimodal(self) -> bool:
        """Whether sequences come with their modes."""
        return self.sequence_modes is not None

    @property
    def mmap(self) -> bool:
        """Whether tokens are mapped: those of local files."""
        return self.store.is_local

    @property
    def index(self) -> IndexView:  # type: ignore[override]  # of Sequence it is a search
        """The arrays of the `.idx` under Megatron's names."""
        return IndexView(self._arrays, self.sequence_modes)

    def get_document_indices(self) -> NDArray[np.int64]:
        """As `document_indices`."""
        return self.document_indices

    exists = staticmethod(pair_exists)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return self._slice(index)
        number = self._number(index)
        tokens = self._part(number, 0, None)
        modes = self.sequence_modes
        return tokens if modes is None else (tokens, int(modes[number]))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` tokens (default: the rest) of a sequence from token `offset` on; a range read of
        just these.

        Opened with `multimodal=True`, the pair (tokens, mode). Raises IndexError for tokens outside
        of the sequence.
        """
        number = self._number(index)
        tokens = self._part(number, offset, length)
        modes = self.sequence_modes if self._with_modes else None
        return tokens if modes is None else (tokens, int(modes[number]))

    def _part(self, number: int, offset: int, length: int | None) -> Tokens:
        """`length` tokens (None: the rest) of a sequence, from token `offset` on."""
        size = int(self.sequence_lengths[number])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(
                f"tokens [{offset}, {stop}) of sequence {number}, which has {size} tokens"
            )
        first_byte = int(self.sequence_offsets[number])
        itemsize = self.dtype.itemsize
        data = self._read(first_byte + offset * itemsize, first_byte + stop * itemsize)
        return self._tokens(data)

    def _slice(self, index: slice) -> list[Item]:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of an IndexedDataset are contiguous; step {step} is not")
        tokens = self._run(start, stop) if stop > start else []
        if self.sequence_modes is None:
            return list(tokens)
        modes = self.sequence_modes[start:stop]
        if self._with_modes:
            # As Megatron returns them, to those who call it as they call Megatron's.
            return tokens, modes  # type: ignore[return-value]
        return list(zip(tokens, modes.tolist(), strict=True))

    def _run(self, start: int, stop: int) -> list[Tokens]:
        """The tokens of sequences [start, stop), by one range read where they are end to end."""
        sizes = self.sequence_lengths[start:stop].astype(np.int64) * self.dtype.itemsize
        offsets = self.sequence_offsets[start:stop]
        ends = offsets + sizes
        has_gaps = (offsets[1:] != ends[:-1]).any()
        if has_gaps:
            return [self._part(number, 0, None) for number in range(start, stop)]
        first_byte = int(offsets[0])
        data = self._read(first_byte, int(ends[-1]))
        lows = (offsets - first_byte).tolist()
        highs = (ends - first_byte).tolist()
        run = []
        for low, high in zip(lows, highs, strict=True):
            run.append(self._tokens(data[low:high]))
        return run

    def _read(self, start: int, stop: int) -> Buffer:
        return self.store.read(self.bin_key, [(start, stop)], self.bin_info.etag)[0]

    def _tokens(self, data: Buffer) -> Tokens:
        return np.frombuffer(data, self.dtype.newbyteorder("<"))

    def _number(self, index: int) -> int:
        """A sequence's number from the front. Raises IndexError."""
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)} in {self}")
        return number % len(self)


def document_tokens(
    indexed: IndexedDataset, start: int = 0, stop: int | None = None
) -> NDArray[np.int64]:
    """Tokens of each of the documents [start, stop), int64."""
    bounds = indexed.document_indices[start : None if stop is None else stop + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    ends = np.cumsum(indexed.sequence_lengths[first:last], dtype=np.int64)
    tokens: NDArray[np.int64] = np.diff(np.append(0, ends)[bounds - first])
    return tokens
