"""What every order gives the layers above: samples by global number, their reads, and an identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.order import Extents
from streammega.samples.fetch import Ids, TokenFile, fetch_ids

OPENERS = 16
"""Pairs of a blend that are opened at once."""


class SampleSource(Protocol):
    """Samples in an order. `files[d]` are the files of dataset d that extents refer to."""

    config: DataConfig

    @property
    def files(self) -> Sequence[Sequence[TokenFile]]:
        """The files of each dataset."""

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None: the stream has no end."""

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie."""

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """What defines the order of the first `consumed` samples (None: all): small, JSON-able, without where the data lies."""


def read_samples(source: SampleSource, sample_ids: NDArray[np.int64]) -> tuple[Ids, NDArray[np.int64]]:
    """Token ids of samples, [n, S + a] in the widest stored dtype, and how many of them each has."""
    extents = source.locate(sample_ids)
    firsts = np.cumsum([0, *(len(files) for files in source.files)])
    flat = [file for files in source.files for file in files]
    file_ids = firsts[extents.dataset].astype(np.int64) + extents.file
    width = source.config.sequence_length + int(source.config.add_extra_token)
    return fetch_ids(flat, file_ids, extents, width, source.config.storage)
