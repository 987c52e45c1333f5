"""The loader: micro-batches a few ahead of the training step, and a cursor that counts only what
was taken.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.loading.device_prefetch import Copier, DeviceBatches
from streammega.loading.engine import Engine
from streammega.loading.iterate import Iteration, iterate_batches
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import kept_columns_of
from streammega.loading.stats import MetricsServer, Stats
from streammega.loading.torch_dataset import StreamingDataset
from streammega.samples.fields import Batch
from streammega.samples.source import all_files
from streammega.samples.token_file import has_modes
from streammega.storage.fork_lock import process_lock

log = logging.getLogger(__name__)

_beginning = process_lock()
"""Of two threads that take the first batch at once one begins the iteration. Not of the loader,
which can be pickled.
"""

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class StreamLoader:
    """Iterates micro-batches of this rank; no worker processes.

    **Where an iteration begins**: `iter` goes on from the cursor. When the data has ended, it
    begins the next pass from the first sample: the same samples in the same order. A loader for
    evaluation begins every iteration at the first sample, unless `seek` or `load_state_dict` was
    called and no batch was taken since. `next(loader)`, which `take` is another name for, goes on
    from the cursor, whatever the loader is for; at the end of the data it raises StopIteration,
    until `iter`, `seek` or `load_state_dict` goes elsewhere.

    One iteration runs at a time, and `next(loader)` takes its batches. One that is held while
    another begins, or while the loader is moved or closed, raises StateError, as does one that
    ended by an error; `next(loader)` and a new `iter` go on from the cursor, with the batch that
    failed. StopIteration is the end of the data, and nothing else.

    `state_dict` may be called at any time and counts the batches that were handed out, never those
    read ahead; it is the same on every rank that took as many batches.

    Args:
        config, split, micro_batch_size, global_batch_size, rampup_batch_size: as in StreamingDataset.
        dp_rank, dp_size: this data-parallel rank; or mesh: a DeviceMesh, of which the dimension
            "dp" (or the only one) says both.
        prefetch: micro-batches made ahead of the step; how far ahead bytes are fetched,
            `storage.memory_bytes` says.
        evaluation: begin every iteration at the first sample; None: for every split but "train".
        ids_only: batches are {"ids": [micro_batch_size, S + 1] in the stored dtype, "valid": int64
            [micro_batch_size], the ids of each sample that are not padding}, from which everything
            else can be derived on the device. Where modes make the loss mask, or documents are
            excluded, also "learned", bool
            as "ids" are: no loss where a label is an id that is not learned.
        cp_rank, cp_size: with ids_only, read only what this context-parallel rank keeps of each
            sample: two of 2 * cp_size parts of P tokens, each with the token after it. "ids" is [2
            * micro_batch_size, P + 1], a sample's two parts one after the other.
        pin_memory: whether batches lie in CUDA's pinned memory; None: where CUDA can be used, on
            the device that is current when the first batch is asked for. False opens no context on
            any device.
        log_every: log one line of `stats()` each so many global batches; 0: never.
        metrics_port: serve `stats()` to Prometheus on this port (0: a free one, in
            `metrics_address`); needs `pip install 'streammega[metrics]'`.

    Every field of a batch is contiguous, in memory that no other batch shares; where CUDA can be
    used, it is pinned by torch, so a batch may be dropped right after `.to("cuda",
    non_blocking=True)`. "labels" are shifted already: models of Hugging Face, which shift what they
    get as `labels`, take them as `shift_labels`.
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
        prefetch: int = 4,
        evaluation: bool | None = None,
        ids_only: bool = False,
        cp_rank: int = 0,
        cp_size: int = 1,
        pin_memory: bool | None = None,
        log_every: int = 0,
        metrics_port: int | None = None,
    ) -> None:
        rank, size = _data_parallel(dp_rank, dp_size, mesh)
        self.dataset = StreamingDataset(
            config,
            split=split,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=rank,
            dp_size=size,
            rampup_batch_size=rampup_batch_size,
        )
        if cp_size > 1 and not ids_only:
            raise ConfigError(
                "parts of samples are read as ids: give ids_only=True with cp_rank and cp_size, "
                "or use get_batch"
            )
        if ids_only and config.inter_document_masking:
            raise ConfigError(
                "ids_only batches tell nothing of sequences, whose bounds inter_document_masking "
                "asks for; leave one of them out, or set reset_attention_mask, which goes by eod_id"
            )
        if ids_only and config.return_dataset_ids:
            raise ConfigError(
                "ids_only batches tell nothing of datasets: leave return_dataset_ids out, and ask "
                "loader.dataset.dataset_ids(consumed), which knows them on every rank"
            )
        self.ids_only = ids_only
        self.evaluation = split != "train" if evaluation is None else evaluation
        self._cp = (cp_rank, cp_size)
        for segment in config.segments(split):  # that there are such parts
            _ = kept_columns_of(segment.sequence_length, cp_rank, cp_size)
        self._prefetch = prefetch
        self._pinned = pin_memory
        self._log_every = log_every
        self._stats = Stats()
        self._metrics: MetricsServer | None = None
        if metrics_port is not None:
            self._metrics = MetricsServer(self._stats, metrics_port, rank)
        self._device: torch.device | None = None
        self._running: Iteration | None = None
        self._following: Iterator[int] | None = None
        """The positions from the cursor on, while it is `pass_over` that moves it."""

    def __len__(self) -> int:
        """Micro-batches from the first sample to the last.

        TypeError for a stream without an end.
        """
        return len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        self._stop("another iteration of its loader began, and one loader has one cursor")
        self._go_to_a_pass()
        return self._begin()

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
        """The next micro-batch from the cursor on. Raises StopIteration after the last."""
        return self.take()

    def take(self) -> Batch:
        """The next micro-batch from the cursor on. Raises StopIteration after the last.

        Several threads may call it: each batch goes to one of them.
        """
        with _beginning:
            running = self._running
            # one that ended by an error is over: the batch that failed is asked for again
            if running is None or not running.goes_on:
                running = self._begin()
        return next(running)

    def prefetch_to(self, device: torch.device | str | None) -> StreamLoader:
        """Give batches on a device from here on, and return the loader: `for batch in
        loader.prefetch_to("cuda"):`.

        On CUDA the next batch is copied there on a stream of its own while the device computes with
        the one before; a batch may be used on the stream that is current when it is given, and
        dropped at any time. On the CPU, and with None, batches are as they are without. The cursor
        counts what was handed out, never what is under way: save the loader's own state, in any
        loop. An iteration that is held over a change of the device raises StateError.
        """
        wanted = None if device is None else torch.device(device)
        if wanted != self._device:
            self._device = wanted
            self._stop("prefetch_to changed the device of its loader")
        return self

    @property
    def device(self) -> torch.device | None:
        """Where `prefetch_to` puts batches; None: they are on the host."""
        return self._device

    def pass_over(self) -> None:
        """Count the next micro-batch as handed out without reading it: another rank did.

        Raises StopIteration after the last.
        """
        # kept from call to call: each new one would look through the excluded ranges again
        if self._following is None:
            self._following = self.dataset.positions()
        position = next(self._following)
        self.dataset.steps.advance_to(position)
        self.dataset.advance(position)

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait for what was read ahead: the next batch, the end, or an
        error is there.
        """
        is_at_hand = self._stats.at_hand
        return self._running is not None and is_at_hand is not None and is_at_hand()

    @property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """The tokens [start, stop) of each sample that are read, with the token after them; empty:
        all of it. Of the phase that the cursor is in.
        """
        return self.bounds_of(self.dataset.sequence_length_at(self.consumed_samples))

    def bounds_of(self, sequence_length: int) -> Sequence[tuple[int, int]]:
        """The same of samples of so many tokens."""
        return kept_columns_of(sequence_length, *self._cp).bounds

    @cached_property
    def ids_dtype(self) -> np.dtype[Any]:
        """The dtype of "ids": the widest of all files."""
        files = all_files(self.dataset.samples.files)
        return np.result_type(*(file.dtype for file in files))

    @cached_property
    def has_modes(self) -> bool:
        """Whether modes of a dataset make the loss mask, or documents are excluded: then "learned" is
        beside "ids".
        """
        samples = self.dataset.samples
        return samples.excluded is not None or has_modes(all_files(samples.files))

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks: the next global sample."""
        return self.dataset.consumed_samples

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample. Raises StateError outside of the data."""
        self.dataset.seek(consumed_samples)
        self._moved("seek")

    def state_dict(self) -> dict[str, Any]:
        """The resumable state, under 1 KB and JSON-able: see StreamingDataset.state_dict."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last sample that was handed out when the state was taken, on any
        number of ranks.

        Raises StateError for a damaged state, or one of another order; everything is then as it
        was.
        """
        self.dataset.load_state_dict(state)
        self._moved("load_state_dict")

    @property
    def metrics_address(self) -> str | None:
        """Where Prometheus finds the figures of this loader, if it was asked to serve them."""
        return None if self._metrics is None else self._metrics.address

    def stats(self) -> dict[str, Any]:
        """What was read and how long was waited: bytes and requests, seconds.

        `amplification`: bytes asked of storage or cache for each byte that planned samples use;
        `stall_share`: of the time since the first batch, what the caller spent waiting for one;
        `wait_p50` and so on: of the last few thousand batches.
        """
        return self._stats.summary()

    def close(self) -> None:
        """End the running iteration and its threads. `take` and `iter` begin another.

        Raises StateError where another thread waits for a batch.
        """
        self._stop("its loader was closed")

    def _begin(self) -> Iteration:
        """Iterate from the cursor on."""
        self._following = None
        options = {
            "ahead": self._prefetch,
            "stats": self._stats,
            "ids_only": self.ids_only,
            "pinned": self._pinned,
        }
        generation = self.dataset.generation
        batches = _batches_of(
            self.dataset, generation, self._cp, options, self._log_every, self._device
        )
        self._running = Iteration(batches)
        return self._running

    def _stop(self, reason: str) -> None:
        running = self._running
        if running is not None:
            running.stop(reason)
        with _beginning:  # another thread may have begun the next iteration since
            if self._running is running:
                self._running = None
        self._following = None

    def _moved(self, by: str) -> None:
        self._stop(f"{by} moved its loader elsewhere")

    def _go_to_a_pass(self) -> None:
        """Go where an iteration begins."""
        dataset = self.dataset
        untouched = dataset.is_where_it_was_put
        # a position before the end may be followed by excluded samples alone
        some_left = next(dataset.positions(), None) is not None
        if some_left and (untouched or not self.evaluation):
            return
        if untouched and dataset.consumed_samples:
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
    context_rank: tuple[int, int],
    options: Mapping[str, Any],
    log_every: int,
    device: torch.device | None,
) -> Generator[Batch, None, None]:
    """The batches from the cursor of a dataset on, which moves when one is handed out. The engine is
    made when the first of them is asked for, in the thread that asks.

    Does not refer to the loader, so that an unused loader is collected, and its threads with it.

    Args:
        generation: of the dataset; in another one it was moved elsewhere.
        context_rank: (rank, size) of the context-parallel rank that reads.
        options: of Engine.
        log_every: global batches from one line of the log to the next.
        device: where batches are put; None: they stay on the host.
    """

    def make_engine(steps: MicroSteps, positions: Iterator[int], start: int) -> Engine:
        """What reads one phase."""
        kept = kept_columns_of(steps.config.sequence_length, *context_rank)
        return Engine(steps, positions, start=start, kept=kept, **options)

    def check() -> None:
        """Raise StateError if the dataset was moved: its cursor is no longer this iteration's."""
        if dataset.generation != generation:
            raise StateError(
                "the dataset was put elsewhere under its loader; "
                "use seek and load_state_dict of the loader"
            )

    def on_device(engine: Engine) -> Iterator[tuple[int, Batch]]:
        """What an engine reads, on the device."""
        if device is None or device.type == "cpu":
            return iter(engine)
        return DeviceBatches(iter(engine), engine.is_ready, Copier(device))

    num_global_batches = 0
    batches = iterate_batches(
        dataset.steps, dataset.consumed_samples, make_engine, check, read=on_device
    )
    with closing(batches):
        for consumed, batch, engine in batches:
            dataset.advance(consumed)
            yield batch
            del batch  # its memory is free as soon as the caller lets go
            if log_every and not dataset.steps.schedule.offset_at(dataset.consumed_samples):
                num_global_batches += 1
                if num_global_batches % log_every == 0:
                    line = engine.stats.line()
                    log.info("%s: sample %d; %s", dataset.split, dataset.consumed_samples, line)


def _data_parallel(
    dp_rank: int | None, dp_size: int | None, mesh: DeviceMesh | None
) -> tuple[int, int]:
    """(rank, size), of both numbers or of a mesh; one rank where neither is given.

    Raises ConfigError for half of them, for both at once, and for a mesh that does not say which
    of its dimensions is the data-parallel one.
    """
    if mesh is None:
        if (dp_rank is None) != (dp_size is None):
            raise ConfigError(
                "dp_rank and dp_size go together: give both, or a mesh, "
                "or neither for a single rank"
            )
        return (0, 1) if dp_rank is None or dp_size is None else (dp_rank, dp_size)
    if dp_rank is not None or dp_size is not None:
        raise ConfigError("give either a mesh or dp_rank and dp_size, not both")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "dp" not in names:
        raise ConfigError(
            f"the mesh has dimensions {names or mesh.ndim}; name the data-parallel one 'dp'"
        )
    dim = names.index("dp") if "dp" in names else 0
    return mesh.get_local_rank(dim), mesh.size(dim)
