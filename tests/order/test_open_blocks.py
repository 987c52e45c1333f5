"""Blocks that a reader has open: their tokens, and when they are freed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.open_blocks import OpenBlocks
from streammega.order.stream_order import StreamOrder
from tests.order.test_stream_order import orders


@given(order=orders(count=2), count=st.integers(1, 300))
def test_a_block_has_the_tokens_of_its_samples_and_is_open_until_the_last(
    order: StreamOrder, count: int
) -> None:
    is_followed = order.lanes_per_run == 1
    itemsizes = np.array([dataset.itemsize for dataset in order.datasets])
    lanes = np.arange(order.lanes)
    blocks = OpenBlocks(order, lanes, is_followed, itemsizes)
    ids = np.arange(count)
    slot, offset, opened = blocks.assign(ids, ids)
    end = max(part.start + part.tokens for dataset in order.datasets for part in dataset.parts)
    assert (opened.start >= 0).all()
    assert (opened.stop <= end).all()
    tokens: list[list[tuple[int, int, int]]] = [[] for _ in opened.slot]
    runs = (opened.block, opened.dataset, opened.file, opened.start, opened.stop)
    for block, dataset, file, start, stop in zip(*(run.tolist() for run in runs), strict=True):
        tokens[block] += [(dataset, file, token) for token in range(start, stop)]
    located = order.locate(ids)
    for sample in range(count):
        dataset = int(located.dataset[sample])
        if not is_followed[dataset]:
            assert slot[sample] == -1
            continue
        start, stop = int(located.start[sample]), int(located.stop[sample])
        expected = [(dataset, int(located.file[sample]), token) for token in range(start, stop)]
        first = int(offset[sample]) // int(itemsizes[dataset])
        assert tokens[slot[sample]][first : first + len(expected)] == expected
    uses = np.bincount(slot[slot >= 0], minlength=count)
    released, uses_left = blocks.release_all(lanes)
    assert len(set(released.tolist())) == len(released)
    uses[released] += uses_left
    assert uses[: len(opened.uses)].tolist() == opened.uses.tolist()
    assert not uses[len(opened.uses) :].any()


def test_samples_of_lanes_that_are_not_followed_are_refused() -> None:
    part = FilePart(file=0, start=0, tokens=3000)
    order = StreamOrder(
        datasets=[StreamDataset(parts=[part], itemsize=2)],
        weights=[1.0],
        sequence_length=10,
        extra_token=False,
        seed=1,
        lanes=8,
        shuffle_block_bytes=100,
    )
    even = np.arange(0, 8, 2)
    blocks = OpenBlocks(order, even, order.lanes_per_run == 1, np.array([2]))
    blocks.assign(even, np.arange(4))
    with pytest.raises(
        AssertionError, match="sample 9 is in lane 1, which this reader does not follow"
    ):
        blocks.assign(np.array([8, 10, 9, 12]), np.arange(4))
