"""The first half of a conversion: units of input, each of which becomes segments of tokens in the
work folder.

A unit is a stretch of the inputs that one worker handles. What it makes depends on nothing else, so
it can be done anywhere, and again. A segment is a `.bin/.idx` pair of at most a few tens of MiB;
`.side` beside it holds what shuffling and removal of duplicates need of each document. The unit's
record, written last, says that all of it is there.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import LongRecord, LongText, RawDocument, Tokens, concatenate
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.read.json_values import HEAD_BYTES, holds_lines
from streammega.convert.read.long_records import text_file, with_fields
from streammega.convert.read.pairs import dataset_name, document_runs
from streammega.convert.read.readers import read_slice, with_line
from streammega.convert.read.slices import Skipped, Slice, open_plain, read_head
from streammega.convert.read.suffixes import is_compressed, may_hold_values
from streammega.convert.tokenize.encode import BatchEncoder
from streammega.convert.tokenize.tokenizers import load_tokenizer
from streammega.convert.write.long_documents import TokenStream, check_tokens
from streammega.dataset.idx import CODE_OF_DTYPE, smallest_dtype
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError, FormatError, StorageError
from streammega.kernels.mix import GOLDEN, mix
from streammega.kernels.plan import copy_bytes
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.store import address_of

UNIT_BYTES = 64 << 20
LEAST_UNIT_BYTES = 4 << 20
UNITS = 128
"""Input bytes of a unit: so that there are about so many units, within bounds."""
UNIT_FILES = 4096
SEGMENT_BYTES = 32 << 20
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096
BINS = 48
"""Of the histogram of document lengths: bin b counts documents of [2^b, 2^(b+1)) tokens."""
Progress = Callable[[int, int], None]
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a worker has to know. Plain data, so that it can be sent anywhere."""

    options: ConvertOptions
    storage: StorageConfig
    work: str
    units: list[list[Slice]]
    tokenizer_digest: str = ""
    segment_bytes: int = SEGMENT_BYTES
    """Token bytes after which a segment is written; what comes out in the end does not depend on
    it.
    """

    def unit_digest(self, number: int) -> str:
        """Changes with the inputs of a unit and with every setting."""
        pieces = [asdict(piece) for piece in self.units[number]]
        for piece in pieces:
            # signatures of one object differ, and its ETag says whether it is the same
            piece["input"].pop("query")
        what = json.dumps([self.options.digest(), self.tokenizer_digest, pieces], sort_keys=True)
        return hashlib.blake2b(what.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One written segment. `name`: its prefix in the work folder."""

    name: str
    dtype: str
    multimodal: bool
    documents: int
    tokens: int


@dataclass(kw_only=True)
class UnitRecord:
    """What a unit made.

    `counts`: documents by what happened to them; `histogram`: of those kept.
    """

    digest: str
    segments: list[Segment] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    source_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)


def plan_units(
    inputs: Sequence[Input], options: ConvertOptions, storage: StorageConfig
) -> list[list[Slice]]:
    """Units in the order of the inputs: large files are cut where their format allows, small ones
    put together.
    """
    units: list[list[Slice]] = []
    room = 0
    most = max(
        min(UNIT_BYTES, LEAST_UNIT_BYTES),
        min(UNIT_BYTES, sum(item.size for item in inputs) // UNITS),
    )
    for item in inputs:
        for piece, size in _slices(item, most, storage):
            if units and size <= room and len(units[-1]) < UNIT_FILES:
                units[-1].append(piece)
            else:
                units.append([piece])
                room = most
            room -= size
    return units


def _slices(item: Input, most: int, storage: StorageConfig) -> Iterator[tuple[Slice, int]]:
    """(slice, bytes) of an input."""
    if (
        item.format == "jsonl"
        and not is_compressed(item.path)
        and item.size > most
        and _holds_lines(item, storage)
    ):
        for start in range(0, item.size, most):
            yield Slice(input=item, start=start, stop=min(start + most, item.size)), most
    elif item.format == "megatron":
        indexed = IndexedDataset(dataset_name(item.path), storage)
        for low, high in document_runs(indexed, 0, len(indexed.document_indices) - 1, UNIT_BYTES):
            yield Slice(input=item, start=low, stop=high), most
    elif item.format == "parquet" and item.size > most:
        yield from _row_groups(item, most, storage)
    else:
        yield Slice(input=item), item.size


def _holds_lines(item: Input, storage: StorageConfig) -> bool:
    """Whether a file of JSON may be cut at its lines."""
    return not may_hold_values(item.path) or holds_lines(read_head(item.url, storage, HEAD_BYTES))


def _row_groups(item: Input, most: int, storage: StorageConfig) -> Iterator[tuple[Slice, int]]:
    import pyarrow.parquet as pq

    with open_plain(item.url, storage) as file:
        metadata = pq.ParquetFile(file).metadata
        first = 0
        size = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= most or group == metadata.num_row_groups - 1:
                yield Slice(input=item, start=first, stop=group + 1), most
                first = group + 1
                size = 0


def unit_name(number: int) -> str:
    """Of a unit's files in the work folder."""
    return f"unit-{number:06d}"


def read_record(job: Job, number: int) -> UnitRecord | None:
    """What a unit made, if it is done and was made from the same."""
    found = load_json(join_url(job.work, f"{unit_name(number)}.json"), job.storage)
    if found is None or found.get("digest") != job.unit_digest(number):
        return None
    segments = [Segment(**segment) for segment in found.pop("segments")]
    return UnitRecord(segments=segments, **found)


def load_json(url: str, storage: StorageConfig) -> dict[str, Any] | None:
    """A record of the work folder; None where there is none that can be read."""
    store, key = open_store(url, storage)
    try:
        info = store.info(key)
        found: Any = json.loads(bytes(store.read_ranges(key, [0], [info.size], info.etag)[0]))
    except (StorageError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def save_json(url: str, value: Any, storage: StorageConfig) -> None:
    """Write a record, at once."""
    save_bytes(url, json.dumps(value, indent=1).encode(), storage)


_encoders: dict[tuple[str, str], BatchEncoder] = {}
_encoders_lock = threading.Lock()


def encoder_of(job: Job) -> BatchEncoder:
    """The encoder of this process.

    Raises ConvertError when the inputs have text and no tokenizer was given.
    """
    options = job.options
    if options.tokenizer is None:
        raise ConvertError(
            "the inputs hold text, so a tokenizer is needed: --tokenizer tokenizer.json (or `bytes`)"
        )
    key = (job.tokenizer_digest, options.digest())
    with _encoders_lock:
        if key not in _encoders:
            _encoders.clear()
            tokenizer = load_tokenizer(options.tokenizer, **options.tokenizer_settings)
            # its tokens would be stored under the name of the other
            if tokenizer.digest != job.tokenizer_digest:
                raise ConvertError(
                    f"{options.tokenizer}: is another tokenizer on {socket.gethostname()} than where the conversion was started, "
                    f"or was changed meanwhile; put the same one on all machines, and run the same command again"
                )
            _encoders[key] = BatchEncoder(tokenizer, options, job.storage)
        return _encoders[key]


def run_unit(job: Job, number: int, progress: Progress) -> UnitRecord:
    """Read, encode and write one unit, and its record. Raises ConvertError, StorageError."""
    record = UnitRecord(digest=job.unit_digest(number))
    skipped = Skipped()
    writer = _SegmentWriter(job, number, record)

    def note(size: int) -> None:
        record.source_bytes += size
        progress(size, 0)

    for batch in batches_of(job, number, skipped):
        if isinstance(batch, LongText | LongRecord):
            note(batch.document.size if isinstance(batch, LongRecord) else 0)
            _add_long(job, counted(batch, note), writer, skipped, progress)
            continue
        tokens = batch if isinstance(batch, Tokens) else encoder_of(job)(batch, skipped)
        record.source_bytes += tokens.source_bytes
        writer.add(tokens)
        progress(tokens.source_bytes, len(tokens.tokens))
    writer.flush()
    for kind, count in skipped.counts.items():
        record.counts[kind] = record.counts.get(kind, 0) + count
    record.messages = skipped.messages
    save_json(join_url(job.work, f"{unit_name(number)}.json"), asdict(record), job.storage)
    return record


def _add_long(
    job: Job,
    item: LongText | LongRecord,
    writer: _SegmentWriter,
    skipped: Skipped,
    progress: Progress,
) -> None:
    """Take in a document that is not held.

    One that cannot be read to its end, or is no text, is left out where faults may be.
    """
    kind = "unreadable file"
    try:
        if isinstance(item, LongText):
            writer.add_long(item, progress)
            return
        with text_file(job.work) as texts:
            document = with_fields(item, texts)
            kind = "broken record"
            writer.add_long(document, progress)
    except (ConvertError, FormatError) as error:
        if job.options.on_error == "stop":
            raise ConvertError(_with_line(item, str(error), job)) from None
        skipped.add("broken record" if isinstance(error, FormatError) else kind, str(error))


def _with_line(item: LongText | LongRecord, message: str, job: Job) -> str:
    """A message that begins with the place of a record, with the number of its line in it."""
    if isinstance(item, LongText) or not message.startswith(item.document.where):
        return message
    return with_line(item.document, job.storage).where + message.removeprefix(item.document.where)


def counted(item: LongText | LongRecord, note: Callable[[int], None]) -> LongText | LongRecord:
    """The same, whose bytes are counted as they are read."""

    def pieces() -> Iterator[bytes]:
        for piece in item.pieces:
            note(len(piece))
            yield piece

    return replace(item, pieces=pieces())


def batches_of(
    job: Job, number: int, skipped: Skipped
) -> Iterator[list[RawDocument] | LongText | LongRecord | Tokens]:
    """Documents of a unit in order: raw ones in batches of about a MiB."""
    batch: list[RawDocument] = []
    size = 0
    for piece in job.units[number]:
        for item in read_slice(piece, job.options, job.storage, skipped):
            # which looks at all of it
            if isinstance(item, LongText) and job.options.split_sentences:
                item = RawDocument(data=b"".join(item.pieces), path=item.path)
            if isinstance(item, RawDocument):
                batch.append(item)
                size += len(item.data) or item.size or 4096
            if batch and (
                not isinstance(item, RawDocument)
                or size >= BATCH_BYTES
                or len(batch) >= BATCH_DOCUMENTS
            ):
                yield batch
                batch = []
                size = 0
            if not isinstance(item, RawDocument):
                yield item
    if batch:
        yield batch


def chooser(job: Job, unit: int, record: UnitRecord) -> Callable[[Tokens], Tokens]:
    """What leaves out, and cuts, what was asked for; the record counts that."""
    writer = _SegmentWriter(job, unit, record)
    return lambda batch: writer.choose(batch)[0]


class _SegmentWriter:
    """Applies what was asked for to documents, and writes them as segments."""

    def __init__(self, job: Job, unit: int, record: UnitRecord) -> None:
        self._job = job
        self._unit = unit
        self._record = record
        self._held: list[Tokens] = []
        self._numbers: list[NDArray[np.int64]] = []
        self._size = self._seen = 0

    def add(self, batch: Tokens) -> None:
        """Take documents in."""
        numbers = np.arange(self._seen, self._seen + len(batch.documents))
        self._seen += len(numbers)
        kept, keep = self.choose(batch)
        self._held.append(kept)
        self._numbers.append(numbers[keep])
        self._size += kept.tokens.nbytes
        if self._size >= self._job.segment_bytes:
            self.flush()

    def add_long(self, item: LongText | RawDocument, progress: Progress) -> None:
        """Take a document in that is not held: as a segment of its own. Raises ConvertError,
        FormatError.

        Of a record, its fields are known.
        """
        self.flush()
        number = np.array([self._seen])
        options = self._job.options
        encoder = encoder_of(self._job)
        where = item.path if isinstance(item, LongText) else item.where
        if (
            isinstance(item, LongText)
            and options.tokenizer == "bytes"
            and options.max_tokens is None
        ):
            check_tokens(item.size, where)  # of these the size tells it, before all is read
        parts = encoder.long_parts(item)
        if not parts:
            self._count("empty", 1)
            return
        modes = [part.mode for part in parts]
        stream = TokenStream(
            encoder.long_document(parts, where), modes, options, self._eod(), where
        )
        writer = self._writer(encoder.dtype, multimodal=options.makes_modes)
        try:
            writer.add_document_stream(
                _as_bytes(stream, progress), lambda: (stream.lengths, stream.modes)
            )
            if stream.dropped is None:
                self._save_side(self._keys(number), number, stream.hashes)
                writer.finalize()
        finally:
            writer.abort()
        self._note_long(stream, encoder.dtype)

    def _note_long(self, stream: TokenStream, dtype: np.dtype[Any]) -> None:
        """Count a document that was not held, whose segment is written unless it was left out."""
        self._seen += not stream.is_empty
        if stream.dropped is None:
            self._note(dtype, np.array([stream.kept]), multimodal=self._job.options.makes_modes)
            self._count("cut", stream.kept < stream.total)
            self._count("tokens cut off", stream.total - stream.kept)
        for reason, count in stream.counts.items():
            self._count(reason, count)

    def choose(self, batch: Tokens) -> tuple[Tokens, NDArray[np.bool_]]:
        """(what is kept of documents, which of them are kept)."""
        options = self._job.options
        if options.modes is not None:
            modes = (
                batch.modes if batch.modes is not None else np.zeros(len(batch.lengths), np.int8)
            )
            batch = self._count_sequences(batch, np.isin(modes, options.modes))
        size = batch.document_tokens
        keep = size > 0
        self._count("empty", int((~keep).sum()))
        short = keep & (size < options.min_tokens)
        self._count("too short", int(short.sum()))
        keep &= ~short
        if options.max_tokens is not None:
            long = size > options.max_tokens
            self._count("cut" if options.long == "cut" else "too long", int((long & keep).sum()))
            if options.long == "drop":
                keep &= ~long
        batch = batch.take(keep)
        if (
            options.max_tokens is not None
            and options.long == "cut"
            and (batch.document_tokens > options.max_tokens).any()
        ):
            before = len(batch.tokens)
            batch = batch.cut(options.max_tokens, self._eod())
            self._count("tokens cut off", before - len(batch.tokens))
        return batch, keep

    def _count_sequences(self, batch: Tokens, keep: NDArray[np.bool_]) -> Tokens:
        self._count("sequences of other modes", int((~keep).sum()))
        return batch if keep.all() else batch.take_sequences(keep)

    def _eod(self) -> int | None:
        if self._job.options.tokenizer is not None:
            return encoder_of(self._job).eod
        return self._job.options.eod_id

    def _count(self, kind: str, count: int) -> None:
        if count:
            self._record.counts[kind] = self._record.counts.get(kind, 0) + count

    def flush(self) -> None:
        """Write what is held as a segment."""
        held = self._held
        numbers = np.concatenate(self._numbers or [np.empty(0, np.int64)])
        self._held = []
        self._numbers = []
        self._size = 0
        if not len(numbers):
            return
        if len({part.modes is None for part in held if len(part.documents)}) > 1:
            raise ConvertError("some inputs have modes and others have none; convert them apart")
        held = [part for part in held if len(part.documents)]
        batch = concatenate(
            held, token_dtype([part.tokens for part in held], self._job.options.dtype)
        )
        keys = self._keys(numbers)
        if keys is not None:
            order = np.argsort(keys, kind="stable")
            batch = _permuted(batch, order)
            numbers = numbers[order]
            keys = keys[order]
        self._save_side(keys, numbers, document_hashes(batch) if self._job.options.dedup else ())
        multimodal = batch.modes is not None
        with self._writer(batch.tokens.dtype, multimodal=multimodal) as writer:
            writer.add_documents(
                batch.tokens.view(np.uint8).data, batch.lengths, batch.documents, batch.modes
            )
        self._note(batch.tokens.dtype, batch.document_tokens, multimodal=multimodal)

    def _keys(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        seed = self._job.options.shuffle_seed
        return None if seed is None else shuffle_keys(seed, self._unit, numbers)

    @property
    def _name(self) -> str:
        """Of the next segment."""
        return f"{unit_name(self._unit)}-{len(self._record.segments):04d}"

    def _save_side(
        self,
        keys: NDArray[np.uint64] | None,
        numbers: NDArray[np.int64],
        hashes: Sequence[NDArray[np.uint64]],
    ) -> None:
        """What is needed of each document beside its tokens, if anything."""
        side: list[NDArray[Any]] = [] if keys is None else [keys]
        if self._job.options.dedup:
            side += [numbers.astype(np.uint64), *hashes]
        if side:
            url = join_url(self._job.work, f"{self._name}.side")
            save_bytes(
                url,
                np.stack([array.astype("<u8", copy=False) for array in side]).tobytes(),
                self._job.storage,
            )

    def _writer(self, dtype: np.dtype[Any], *, multimodal: bool) -> IndexedDatasetWriter:
        return IndexedDatasetWriter(
            join_url(self._job.work, self._name), dtype, multimodal, self._job.storage, kind="bin"
        )

    def _note(self, dtype: np.dtype[Any], sizes: NDArray[np.int64], *, multimodal: bool) -> None:
        """A segment that is written. sizes: tokens of its documents."""
        record = self._record
        tokens = int(sizes.sum())
        bins = np.bincount(np.log2(np.maximum(sizes, 1)).astype(np.int64), minlength=BINS)[:BINS]
        record.histogram = [a + int(b) for a, b in zip(record.histogram, bins, strict=True)]
        record.documents += len(sizes)
        record.tokens += tokens
        made = Segment(
            name=self._name,
            dtype=str(dtype),
            multimodal=multimodal,
            documents=len(sizes),
            tokens=tokens,
        )
        record.segments.append(made)


def _as_bytes(stream: TokenStream, progress: Progress) -> Iterator[memoryview]:
    """Tokens as they are stored."""
    for ids in stream:
        progress(0, len(ids))
        yield np.ascontiguousarray(ids).view(np.uint8).data


def token_dtype(arrays: Sequence[NDArray[Any]], asked: str | None) -> np.dtype[Any]:
    """The stored dtype for some tokens: the one asked, else theirs if the format has it, else the
    smallest that holds them.

    Raises ConvertError for ids that it cannot hold.
    """
    found = np.result_type(*(array.dtype for array in arrays))
    low = min((int(array.min()) for array in arrays if len(array)), default=0)
    high = max((int(array.max()) for array in arrays if len(array)), default=0)
    if asked is not None:
        dtype = np.dtype(asked)
    elif found.newbyteorder("=") in CODE_OF_DTYPE and found.itemsize <= 4:
        dtype = found.newbyteorder("=")
    elif found.newbyteorder("=") == np.uint32:
        dtype = np.dtype(np.int32)  # the same width: uint32 is no dtype of the .idx
    else:
        dtype = smallest_dtype(high + 1) if low >= 0 else np.dtype(np.int32)
    if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
        raise ConvertError(
            f"token ids run from {low} to {high}, which {dtype} cannot hold; choose a wider --dtype"
        )
    return dtype


def shuffle_keys(seed: int, unit: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A keyed hash of each document, by which documents are sorted: SplitMix64 rounds over (seed,
    unit, document).
    """
    with np.errstate(over="ignore"):
        state = np.full(len(numbers), seed, np.uint64)
        for word in (np.full(len(numbers), unit, np.uint64), numbers.astype(np.uint64)):
            state = mix(state + GOLDEN + word)
    return state


def document_hashes(batch: Tokens) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """128-bit hashes of the tokens of each document, in two halves."""
    data = batch.tokens.astype("<i8", copy=False).view(np.uint8).data  # ids, whatever their width
    ends = np.cumsum(batch.document_tokens) * 8
    digests = bytearray()
    start = 0
    for end in ends.tolist():
        digests += xxhash.xxh3_128_digest(data[start:end])
        start = end
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
    return halves[:, 0], halves[:, 1]


def _permuted(batch: Tokens, order: NDArray[np.int64]) -> Tokens:
    """The documents in another order."""
    first = np.cumsum(batch.documents) - batch.documents
    sequences = ragged(first[order], batch.documents[order])
    data = np.ascontiguousarray(batch.tokens)
    size = batch.document_tokens * data.itemsize
    start = np.cumsum(size) - size
    # addresses go to a kernel, which looks no further
    if int(size.sum()) != data.nbytes or len(order) != len(size):
        raise ConvertError(
            f"documents of {int(size.sum())} bytes are to be cut out of {data.nbytes}"
        )
    tokens = np.empty_like(data)
    own = size[order]
    copy_bytes(
        _NOTHING,
        address_of(data.view(np.uint8)) + start[order],
        own,
        address_of(tokens.view(np.uint8)) + np.cumsum(own) - own,
    )
    return Tokens(
        tokens=tokens,
        lengths=batch.lengths[sequences],
        documents=batch.documents[order],
        modes=None if batch.modes is None else batch.modes[sequences],
    )


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(
        int(ends[-1]) if len(ends) else 0
    )
