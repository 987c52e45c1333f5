"""Micro-batches of one rank as a torch IterableDataset, and its position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.order.cursor import make_state, read_state
from streammega.order.rampup import batch_schedule
from streammega.order.sharding import check_resume, rank_samples
from streammega.samples.fields import Batch, batch_fields
from streammega.samples.open import open_source
from streammega.samples.source import read_samples
from streammega.samples.stream import StreamSource
from streammega.stream.engine import Engine

NO_END = 1 << 62
AHEAD = 2
"""Micro-batches made ahead when a dataset is iterated without a loader."""


class StreamingDataset(torch.utils.data.IterableDataset[Batch]):
    """Yields micro-batches: {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32, [micro_batch_size, S];
    with reset_attention_mask also "cu_seqlens", the bounds of documents, int32 [micro_batch_size, most documents + 1].

    Every rank sees its part of the same global batches, whatever dp_size is. Iterating goes on from the cursor to the
    end of the data (whole global batches only). Under a torch DataLoader (`batch_size=None`) with W workers, worker w
    builds micro-batches w, w + W, ..., so the order is the same.

    Args:
        config: what is read.
        split: "train", "valid" or "test".
        micro_batch_size: samples of one batch of this rank.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of micro_batch_size * dp_size.
        dp_rank, dp_size: this data-parallel rank.
        rampup: (start, increment, samples): the global batch grows from start to global_batch_size over so many samples.

    Raises ConfigError before any token is read, StorageError and FormatError for the files.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        split: str = "train",
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        rampup: tuple[int, int, int] | None = None,
    ) -> None:
        self.schedule = batch_schedule(global_batch_size, rampup)
        self.schedule.check(micro_batch_size, dp_rank, dp_size)
        self.config, self.split = config, split
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.samples = open_source(config, split, global_batch_size)
        for start, stop in config.skip_samples:
            if self.schedule.offset_at(start) or self.schedule.offset_at(stop):
                raise ConfigError(
                    f"skip_samples [{start}, {stop}) cuts a global batch of {self.schedule.size_at(start)} samples apart"
                )
        if self.num_samples == 0:
            raise ConfigError(
                f"{split} holds {self.samples.num_samples} samples, less than one global batch of {global_batch_size}; lower "
                f"global_batch_size or ask for more samples"
            )
        self._consumed = 0
        # Seen by worker processes too: the copy of this dataset that counts what is handed out lives here, not there.
        self._worker_used = torch.zeros(1, dtype=torch.int8).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Micro-batches of this rank from the first sample to the last. TypeError for a stream without an end."""
        if self.num_samples is None:
            raise TypeError("the stream has no end; num_samples in the config gives it one")
        return sum(len(part) for part in self.parts(0))

    @property
    def num_samples(self) -> int | None:
        """Samples over all ranks, whole global batches only; None: the stream has no end."""
        total = self.samples.num_samples
        return None if total is None else self.schedule.last_whole(total)

    @property
    def step_samples(self) -> int:
        """Samples that one micro-batch on every rank takes from the global stream."""
        return self.micro_batch_size * self.dp_size

    @property
    def consumed_samples(self) -> int:
        """The next global sample: how many were handed out, over all ranks."""
        return self._consumed

    def sample_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [..., micro_batch_size]."""
        contiguous = self.config.order == "megatron"
        return rank_samples(consumed, self.micro_batch_size, self.dp_rank, self.dp_size, contiguous=contiguous)

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch in the micro-step at `consumed`: a pure function of it."""
        return batch_fields(*read_samples(self.samples, self.sample_ids(consumed)), self.config, bounds=True)

    def positions(self) -> Iterator[int]:
        """The micro-steps that are left, as values of `consumed`, without those that are skipped."""
        return itertools.chain.from_iterable(self.parts(self._consumed))

    def parts(self, start: int) -> Iterator[range]:
        """The ranges of positions from `start` on, between the skipped ones."""
        end = NO_END if self.num_samples is None else self.num_samples
        for low, high in sorted(self.config.skip_samples):
            if start < low:
                yield range(start, min(low, end), self.step_samples)
            start = max(start, high)
        if start < end:
            yield range(start, end, self.step_samples)

    def advance(self, consumed: int) -> None:
        """Note that the micro-step at `consumed` was handed out."""
        self._consumed = consumed + self.step_samples

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        positions, number, workers = self.positions(), 0, 1
        if worker is not None:
            self._worker_used[0] = 1
            number, workers = worker.id, worker.num_workers
            positions = itertools.islice(positions, number, None, workers)
        with closing(Engine(self, positions, AHEAD, worker=number, workers=workers)) as engine:
            for consumed, batch in engine:
                if worker is None:
                    self.advance(consumed)
                yield batch
                del batch

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample, whole micro-steps of these ranks from the start of a global batch."""
        end = self.num_samples
        if consumed_samples < 0 or (end is not None and consumed_samples > end):
            raise StateError(f"sample {consumed_samples} is not within the {end} samples of {self.split}")
        check_resume(self.schedule.offset_at(consumed_samples), self.micro_batch_size, self.dp_size)
        self._consumed = consumed_samples

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Where to go on, the same on every rank: {"version", "consumed_samples", "identity", "fingerprint"}.

        Counts what was handed out. Under a DataLoader with workers only the caller knows that: pass `num_batches`, the
        micro-batches taken from the DataLoader since it was created (StreamLoader needs no workers, and counts by itself).
        """
        if num_batches is None and self._worker_used[0]:
            raise StateError(
                "worker processes read ahead of what the DataLoader handed out, so the position is not known here; pass "
                "state_dict(num_batches=<micro-batches taken>), or use StreamLoader, which needs no workers"
            )
        return self.state_at(self._consumed + (num_batches or 0) * self.step_samples)

    def state_at(self, consumed: int) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        return make_state(self.samples.identity(consumed), consumed, self.schedule.offset_at(consumed))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the sample after the last that was handed out. Raises StateError for another order."""
        if isinstance(self.samples, StreamSource):
            lanes = (state.get("identity") or {}).get("lanes")
            if isinstance(lanes, int) and lanes > 0:
                self.samples.adopt_lanes(lanes)
        saved = state.get("consumed_samples")
        consumed, offset = read_state(state, self.samples.identity(saved if isinstance(saved, int) else None))
        schedule = self.schedule.resumed(consumed, offset)
        if offset >= schedule.size_at(consumed):
            raise StateError(
                f"the state stops {offset} samples into a global batch, which now has {schedule.size_at(consumed)}; "
                f"resume with the former global_batch_size, or from a state saved between global batches"
            )
        self.schedule = schedule
        self.seek(consumed)
