"""One more column and one more field, by an entry each: the place of every token in its file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from streammega import DataConfig, ParallelLayout
from streammega.config.fields import FIELDS, FIRST, Field
from streammega.samples.columns import COLUMNS, GatheredRows, TokenColumn
from tests.support.rank_programs import read_batches


def places(rows: GatheredRows, out: NDArray[Any]) -> None:
    runs = zip(
        *(
            getattr(rows.runs, name).tolist()
            for name in ("sample", "start", "size", "sample_start")
        ),
        strict=True,
    )
    for sample, start, size, at in runs:
        end = min(at + size, out.shape[1])
        out[sample, at:end] = np.arange(start, start + end - at)


def place_of_tokens(made: Any) -> Any:
    return made.samples.columns["place"][:, : made.config.sequence_length].contiguous()


@contextmanager
def added() -> Iterator[None]:
    column = TokenColumn(torch.int64, -1, lambda _: True, places)
    field = Field("where tokens are", place_of_tokens, "int64", [FIRST], columns=["place"])
    with mock.patch.dict(COLUMNS, place=column), mock.patch.dict(FIELDS, place_ids=field):
        yield


def read_with_more(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any], steps: int
) -> dict[str, Any]:
    with added():
        return read_batches(rank, layout, config, sizes, steps, 2, False)
