"""The conversion: read, tokenize on all cores, write one pair."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.sources import RawDocument, find_inputs, read_batches
from streammega.convert.tokenize import BatchEncoder, TokenizedBatch, find_eod, load_tokenizer, output_dtype, vocab_size
from streammega.errors import ConfigError, ConvertError, ObjectNotFoundError
from streammega.index import IndexedDatasetWriter
from streammega.index.shards import strip_suffix
from streammega.kernels.parallel import num_threads
from streammega.storage import open_store


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """What a conversion made."""

    prefix: str
    documents: int
    empty_documents: int
    tokens: int
    text_bytes: int
    dtype: str
    vocab_size: int
    eod_id: int | None
    seconds: float


def convert(
    inputs: Sequence[str],
    output: str,
    *,
    tokenizer: str,
    key: str = "text",
    append_eod: bool = True,
    eod: str | None = None,
    workers: int = 0,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert text and JSON-lines files to `output.bin` and `output.idx`, one document each, in input order.

    The bytes do not depend on the number of workers (0: one per core). `progress(text_bytes, tokens)` is called
    with what each batch added. Nothing appears under the final names unless all of it is done.
    Raises ConvertError (naming file and line), ObjectNotFoundError, StorageError.
    """
    storage = storage or StorageConfig()
    if workers < 0:
        raise ConfigError(f"workers is {workers}; give a positive number, or 0 for one per core")
    prefix = strip_suffix(output)
    _check_output(prefix, overwrite, storage)
    model = load_tokenizer(tokenizer)
    eod_id = find_eod(model, eod) if append_eod else None
    paths = find_inputs(inputs)
    began, documents, seen, tokens, text_bytes = time.monotonic(), 0, 0, 0, 0
    encode = _Encoder(tokenizer, key, eod_id)
    with IndexedDatasetWriter(prefix, output_dtype(model), storage=storage) as writer:
        for count, batch in _encoded(encode, read_batches(paths, storage), workers or num_threads()):
            _append(writer, batch)
            documents, seen = documents + len(batch.lengths), seen + count
            tokens, text_bytes = tokens + sum(batch.lengths), text_bytes + batch.text_bytes
            if progress:
                progress(batch.text_bytes, sum(batch.lengths))
        if not tokens:
            raise ConvertError(f"the {len(paths)} input files hold no text; nothing was written")
    return ConvertReport(
        prefix=prefix,
        documents=documents,
        empty_documents=seen - documents,
        tokens=tokens,
        text_bytes=text_bytes,
        dtype=str(writer.dtype),
        vocab_size=vocab_size(model),
        eod_id=eod_id,
        seconds=time.monotonic() - began,
    )


def _append(writer: IndexedDatasetWriter, batch: TokenizedBatch) -> None:
    ids = np.frombuffer(batch.data, writer.dtype)
    at = 0
    for length in batch.lengths:
        writer.add_item(ids[at : at + length])
        writer.end_document()
        at += length


def _check_output(prefix: str, overwrite: bool, storage: StorageConfig) -> None:
    if overwrite:
        return
    store, key = open_store(f"{prefix}.idx", storage)
    try:
        store.info(key)
    except ObjectNotFoundError:
        return
    raise ConvertError(f"{prefix}.idx: exists already; choose another output, or pass --overwrite to replace it")


_worker_encoder: BatchEncoder | None = None


@dataclass(frozen=True)
class _Encoder:
    """The arguments of a BatchEncoder; what travels to the workers."""

    tokenizer: str
    key: str
    eod: int | None

    def start(self) -> None:
        global _worker_encoder
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
        _worker_encoder = BatchEncoder(self.tokenizer, self.key, self.eod)


def _encode(batch: list[RawDocument]) -> TokenizedBatch:
    assert _worker_encoder is not None
    return _worker_encoder(batch)


def _encoded(encoder: _Encoder, batches: Iterator[list[RawDocument]], workers: int) -> Iterator[tuple[int, TokenizedBatch]]:
    """(documents read, their tokens) of each batch, in order; at most a few batches per worker are in memory."""
    context = multiprocessing.get_context("spawn")  # clients and thread pools of this process do not survive a fork
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=encoder.start)
    pending: deque[tuple[int, Future[TokenizedBatch]]] = deque()
    try:
        for batch in batches:
            pending.append((len(batch), pool.submit(_encode, batch)))
            if len(pending) > 3 * workers:
                count, future = pending.popleft()
                yield count, future.result()
        while pending:
            count, future = pending.popleft()
            yield count, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
