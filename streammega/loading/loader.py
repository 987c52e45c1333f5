"""The loader makes micro-batches ahead of the training step. Its cursor counts only batches that the
step has taken.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from streammega.config import DataConfig
from streammega.config.validate import whole_number
from streammega.errors import ConfigError, StateError
from streammega.errors.cached_property import cached_property
from streammega.errors.logs import get_logger
from streammega.loading.device_prefetch import Copier, DeviceBatches
from streammega.loading.engine import Engine
from streammega.loading.iterate import Iteration, iterate_batches
from streammega.loading.stats import MetricsServer, Stats
from streammega.loading.torch_dataset import Last, StreamingDataset
from streammega.samples.columns import TokenColumn
from streammega.samples.field_inputs import Batch
from streammega.samples.rows import kept_parts_of
from streammega.samples.segments import short_names
from streammega.storage.fork_lock import process_lock

log = get_logger(__name__)
NO_DATALOADER = (
    "A StreamLoader gives batches already: iterate it, and make no DataLoader of it. For the workers of a "
    "DataLoader take a StreamingDataset"
)

_begin_lock = process_lock()
"""If two threads take the first batch at once, only one begins the iteration.

The lock is not a part of the loader, because a loader can be pickled while it has no iteration.
"""

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class StreamLoader:
    """Iterates micro-batches of this rank, without worker processes.

    **Where an iteration begins**: `iter` goes on from the cursor. When the data has ended, it
    begins the next pass at the first sample, with the same samples in the same order. A loader for
    evaluation begins every iteration at the first sample. The only exception is the first `iter`
    after `seek` or `load_state_dict`, if no batch was taken in between. `next(loader)`, also named
    `take`, always goes on from the cursor. At the end of the data it raises StopIteration until
    `iter`, `seek` or `load_state_dict` moves the cursor.

    One iteration runs at a time, and `next(loader)` takes its batches. An iterator raises StateError
    after another iteration began, after the loader was moved or closed, and after it ended by an
    error. `next(loader)` and a new `iter` then go on from the cursor, with the batch that failed.
    StopIteration means the end of the data, and nothing else.

    A copy has a cursor of its own, and is made of a loader without an iteration: `close()` ends it.
    A forked child goes on at the cursor, with threads and a cursor of its own. Iterators of its parent
    raise StateError there.

    With `last="pad"` an iteration from a state at the end of the data yields nothing, for every sample was
    handed out.

    `state_dict` may be called at any time. It counts the batches that were handed out, never those
    read ahead. It is the same on every rank that took as many batches.

    Args:
        config, split, micro_batch_size, global_batch_size, rampup_batch_size, last: as in
            StreamingDataset.
        dp_rank, dp_size, mesh: this data-parallel rank, as in StreamingDataset.
        prefetch: micro-batches made ahead of the step. `storage.memory_bytes` limits how far ahead
            bytes are fetched.
        evaluation: begin every iteration at the first sample; None: for every split but "train".
        ids_only: batches are {"ids": [micro_batch_size, S + 1] in the stored dtype, "valid": int64
            [micro_batch_size], the number of ids of each sample that are not padding, "dataset_id":
            int64 [micro_batch_size]}. All other fields can be derived from them on the device. If modes
            make the loss mask, or documents are excluded, there is also the column "has_loss", a bool
            for each id: a label whose id has none has no loss. Stored `columns` are [micro_batch_size,
            S + 1, width], the values of each id.
        cp_rank, cp_size: with ids_only, read only the parts of each sample that this context-parallel
            rank keeps: two of 2 * cp_size parts of P tokens, each with the token after it. "ids" and
            columns are [2 * micro_batch_size, P + 1], with the two parts of a sample one after the
            other. If fields depend on other tokens of the sample (reset_position_ids,
            reset_attention_mask, an attention mask), "ids" are those of whole samples.
        pin_memory: whether batches are in CUDA's pinned memory. None: if CUDA can be used, for the
            device that is current when the first batch is taken. False opens no context on any
            device.
        log_every: log one line of `stats()` after this many global batches; 0: never.
        metrics_port: serve `stats()` to Prometheus on this port (0: a free one, see
            `metrics_address`). It needs `pip install 'streammega[metrics]'`.

    Every field of a batch is contiguous, in memory that no other batch shares. If CUDA can be used,
    torch pins this memory, so a batch may be dropped right after `.to("cuda", non_blocking=True)`.
    "labels" are shifted already. Hugging Face models shift their `labels` themselves: give them ours
    as `shift_labels`.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        split: str = "train",
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        rampup_batch_size: tuple[int, int, int] | None = None,
        last: Last = "drop",
        prefetch: int = 4,
        evaluation: bool | None = None,
        ids_only: bool = False,
        cp_rank: int = 0,
        cp_size: int = 1,
        pin_memory: bool | None = None,
        log_every: int = 0,
        metrics_port: int | None = None,
    ) -> None:
        self.dataset = StreamingDataset(
            config,
            split=split,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            mesh=mesh,
            rampup_batch_size=rampup_batch_size,
            last=last,
        )
        if cp_size > 1 and not ids_only:
            raise ConfigError(
                "a loader reads parts of samples only as ids: give ids_only=True with cp_rank and "
                "cp_size, or use get_batch"
            )
        if ids_only and config.inter_document_masking:
            raise ConfigError(
                "ids_only batches do not contain the bounds of sequences, which "
                "inter_document_masking needs. Leave one of the two out, or set "
                "reset_attention_mask, which uses eod_id"
            )
        self.ids_only = ids_only
        self.evaluation = split != "train" if evaluation is None else evaluation
        if self.evaluation and self.dataset.num_samples is None:
            raise ConfigError(
                f"an evaluation ends, and the {config.order} order of {split} has no end: set "
                "num_samples=(train, valid, test), or evaluate the valid split, which is read once"
            )
        cp_rank = whole_number("cp_rank", cp_rank)
        cp_size = whole_number("cp_size", cp_size)
        self._cp = (cp_rank, cp_size)
        # raises ConfigError if a length cannot be cut
        for segment in self.dataset.steps.schedule.segments:
            _ = kept_parts_of(segment.sequence_length, cp_rank, cp_size)
        self._prefetch = whole_number("prefetch", prefetch, 0)
        self._pinned = pin_memory
        self._log_every = whole_number("log_every", log_every, 0)
        self._stats = self._new_stats()
        self._metrics: MetricsServer | None = None
        if metrics_port is not None:
            self._metrics = MetricsServer(self._stats, metrics_port, self.dataset.dp_rank)
        self._device: torch.device | None = None
        self._running: Iteration | None = None
        self._following: Iterator[int] | None = None
        """The positions from the cursor on, while `pass_over` moves it."""

    def __len__(self) -> int:
        """Micro-batches from the first sample to the last.

        TypeError for a stream without an end.
        """
        try:
            return len(self.dataset)
        except TypeError as error:
            raise TypeError(f"{error}. {NO_DATALOADER}") from None

    def __getitem__(self, index: object) -> NoReturn:
        """TypeError: batches have no numbers here. A DataLoader would ask for them."""
        raise TypeError(NO_DATALOADER)

    def __iter__(self) -> Iterator[Batch]:
        self._stop("another iteration of its loader began, and one loader has one cursor")
        self._seek_start_of_pass()
        return self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the loader has. Its counts begin at 0, and it serves no metrics.

        Raises StateError while the loader has an iteration.
        """
        if self._running is not None or self._following is not None:
            raise StateError(
                "a loader cannot be pickled or copied while it has an iteration, which reads ahead; "
                "call close() first: loader and copy then go on at the cursor. Or pickle state_dict()"
            )
        # Counts refer to the fetcher and the caches of the last iteration.
        return {**self.__dict__, "_stats": None, "_metrics": None}

    def __copy__(self) -> StreamLoader:
        """As deepcopy: with a dataset of its own, and so a cursor of its own."""
        return copy.deepcopy(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stats = self._new_stats()

    def _new_stats(self) -> Stats:
        return Stats(partial(short_names, self.dataset.samples.prefixes))

    def __enter__(self) -> StreamLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __next__(self) -> Batch:
        """Take the micro-batch at the cursor. Raises StopIteration after the last."""
        return self.take()

    def take(self) -> Batch:
        """Take the micro-batch at the cursor. Raises StopIteration after the last.

        Several threads may call it: each batch goes to one of them.
        """
        with _begin_lock:
            running = self._running
            # an iteration that ended by an error is over: another one reads the failed batch again
            if running is None or not running.goes_on:
                running = self._begin()
        return next(running)

    def prefetch_to(self, device: torch.device | str | None) -> StreamLoader:
        """Hand out batches on a device from now on. Returns the loader: `for batch in
        loader.prefetch_to("cuda"):`.

        On CUDA the next batch is copied on a separate stream while the device computes with the
        current one. A batch may be used on the stream that is current when it is handed out, and
        dropped at any time. With the CPU or None, batches stay on the host. The cursor counts batches
        that were handed out, never those being copied, so the loader's state is right in any loop.
        An iterator from before a change of the device raises StateError.
        """
        wanted = None if device is None else torch.device(device)
        if wanted != self._device:
            with self._stopping("prefetch_to changed the device of its loader"):
                self._device = wanted
        return self

    @property
    def device(self) -> torch.device | None:
        """The device to which `prefetch_to` copies batches; None: they stay on the host."""
        return self._device

    def pass_over(self) -> None:
        """Count the next micro-batch as handed out without reading it, because another rank reads it.

        Raises StopIteration after the last.
        """
        # kept between calls: a new iterator would go through the excluded ranges again
        if self._following is None:
            self._stop("pass_over moved its loader elsewhere")
            self._following = self.dataset.positions()
        # A position is the number of samples before a micro-step. The first one is that at the cursor.
        self.dataset.advance(next(self._following))

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait: the next batch, its error, or the end is there."""
        is_batch_ready = self._stats.is_batch_ready
        return self._running is not None and is_batch_ready is not None and is_batch_ready()

    @property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """Tokens [start, stop) of each part of a sample that the loader keeps, in the current phase.

        Each part includes the token after it. Empty: the loader keeps whole samples.
        """
        return self.bounds_of(self.dataset.sequence_length_at(self.consumed_samples))

    def bounds_of(self, sequence_length: int) -> Sequence[tuple[int, int]]:
        """`bounds` for samples of `sequence_length` tokens."""
        return kept_parts_of(sequence_length, *self._cp).bounds

    @cached_property
    def ids_dtype(self) -> np.dtype[Any]:
        """The dtype of "ids": the widest of all files."""
        return self.dataset.samples.segments[0].file_table.dtype

    @cached_property
    def columns(self) -> Mapping[str, TokenColumn]:
        """The columns of ids_only batches, by name."""
        return self.dataset.samples.segments[0].columns

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks: the next global sample."""
        return self.dataset.consumed_samples

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this rank in the global batch of the one that was handed out last; before any,
        in that of the next. Phases, a ramp-up and a resume may change it.
        """
        dataset = self.dataset
        last = self.consumed_samples - (not dataset.is_where_it_was_put)
        return dataset.steps.num_micro_batches(last)

    @property
    def is_step_end(self) -> bool:
        """Whether the micro-batch that was handed out last ends its global batch: the optimizer steps."""
        return self.dataset.steps.is_step_end(self.consumed_samples)

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample.

        Raises StateError for a sample outside of the data, or if another thread waits for a batch,
        and then changes nothing.
        """
        with self._stopping("seek moved its loader elsewhere"):
            self.dataset.seek(consumed_samples)

    def state_dict(self) -> dict[str, Any]:
        """The resumable state, less than 1 KB of JSON: see StreamingDataset.state_dict."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last sample that was handed out before the state was saved.

        The number of ranks may differ. Raises StateError for a damaged state, for a state of another
        order, or if another thread waits for a batch, and then changes nothing.
        """
        with self._stopping("load_state_dict moved its loader elsewhere"):
            self.dataset.load_state_dict(state)

    @property
    def metrics_address(self) -> str | None:
        """The address at which the loader serves `stats()` to Prometheus; None: it serves none."""
        return None if self._metrics is None else self._metrics.address

    def stats(self) -> dict[str, Any]:
        """Counters of bytes, requests and waits; times are in seconds.

        `tokens`: of the batches that were handed out; `source_tokens`: the same by dataset.
        `amplification`: bytes requested from storage or cache for each byte that planned samples use.
        `stall_share`: the share of the time since the first batch that the caller waited for data. It
        makes the fields of its batches in the rest.
        `wait_p50` and the other percentiles: over the last few thousand batches.
        `grad_syncs` and `grad_wait_total`: what `count_grad_sync` has counted.
        """
        return self._stats.summary()

    def count_grad_sync(self, seconds: float) -> None:
        """Count a step's reduction of gradients, and how long this rank waited in it for the others.

        `streammega top` finds by these waits which rank computes slowly: it is the one that waits
        least. seconds: from the end of this rank's backward to the end of the reduction; on CUDA
        between two events, for the host runs ahead. `streammega train` calls it by itself.
        """
        self._stats.count_grad_sync(seconds)

    def close(self) -> None:
        """End the running iteration and its threads. `take` and `iter` begin another.

        Raises StateError if another thread waits for a batch.
        """
        self._stop("its loader was closed")

    def _begin(self) -> Iteration:
        """Begin an iteration at the cursor."""
        self.dataset.check_ranks()
        self._following = None
        options = {
            "ahead": self._prefetch,
            "stats": self._stats,
            "form": "ids" if self.ids_only else "fields",
            "pinned": self._pinned,
            "context_rank": self._cp,
        }
        generation = self.dataset.generation
        batches = _batches_of(self.dataset, generation, options, self._log_every, self._device)
        self._running = Iteration(batches)
        return self._running

    def _stop(self, reason: str) -> None:
        """End the running iteration. Its `next` raises `reason` then. Raises as `close` does."""
        with self._stopping(reason):
            pass

    @contextmanager
    def _stopping(self, reason: str) -> Iterator[None]:
        """Run the body, then `_stop`. An error of the body stops nothing.

        Raises StateError before the body if another thread waits for a batch.
        """
        running = self._running
        with nullcontext() if running is None else running.stopping(reason):
            yield
        with _begin_lock:  # another thread may have begun the next iteration since
            if self._running is running:
                self._running = None
        self._following = None

    def _seek_start_of_pass(self) -> None:
        """Move the cursor to the sample at which `iter` begins."""
        dataset = self.dataset
        is_unread = dataset.is_where_it_was_put
        # the cursor may be before the end although all samples after it are excluded
        has_more = next(dataset.positions(), None) is not None
        if has_more and (is_unread or not self.evaluation):
            return
        if is_unread and dataset.consumed_samples and dataset.steps.pads_last:
            return  # a job that was killed after the last sample reads none again
        if is_unread and dataset.consumed_samples:
            log.warning(
                "%s: the position that was set, sample %d, is the end of the data; "
                "iterating begins another pass",
                dataset.split,
                dataset.consumed_samples,
            )
        elif not self.evaluation:
            log.info(
                "%s: the data ended at sample %d; the next pass begins",
                dataset.split,
                dataset.consumed_samples,
            )
        dataset.seek(0)


def _batches_of(
    dataset: StreamingDataset,
    generation: int,
    options: Mapping[str, Any],
    log_every: int,
    device: torch.device | None,
) -> Generator[Batch, None, None]:
    """Iterate the batches from the cursor of a dataset on, and move the cursor with each.

    This generator does not refer to the loader, so that an unused loader is collected together with its
    threads.

    Args:
        generation: the dataset's generation; another one means that the dataset was moved.
        options: keyword arguments of `iterate_batches`.
        log_every: global batches from one line of the log to the next.
        device: the device to which batches are copied; None: they stay on the host.
    """

    def check() -> None:
        """Raise StateError if the dataset was moved, because the cursor then serves another iteration."""
        if dataset.generation != generation:
            raise StateError(
                "the dataset was put elsewhere under its loader; "
                "use seek and load_state_dict of the loader"
            )

    def on_device(engine: Engine) -> Iterator[tuple[int, Batch]]:
        """Iterate the batches of an engine, on the device."""
        if device is None or device.type == "cpu":
            return iter(engine)
        return DeviceBatches(iter(engine), engine.is_ready, Copier(device))

    num_global_batches = 0
    batches = iterate_batches(
        dataset.steps, dataset.consumed_samples, check, read=on_device, **options
    )
    with closing(batches):
        for consumed, batch, engine in batches:
            dataset.advance(consumed)
            yield batch
            del batch  # the caller alone decides when its memory is free
            if log_every and not dataset.steps.schedule.offset_at(dataset.consumed_samples):
                num_global_batches += 1
                if num_global_batches % log_every == 0:
                    line = engine.stats.line()
                    log.info("%s: sample %d; %s", dataset.split, dataset.consumed_samples, line)
