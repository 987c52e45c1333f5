"""What kernels follow by address is proven to be inside of its memory before the call, whatever a plan
says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import StreamLoader
from streammega.errors import FormatError
from streammega.kernels.addresses import address_of, check_rows, copy_arrays, copy_stretches
from streammega.kernels.plan import count_down
from streammega.samples.gather import Gatherer
from streammega.storage.seekable_zstd import Frames
from tests.support.builders import data_config, write_dataset
from tests.support.examples import examples

LARGEST = 2**63 - 1
SIZES = st.one_of(st.integers(-3, 40), st.sampled_from([LARGEST, -LARGEST, 2**62, 2**32]))


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.guarantee("addresses-inside-memory")
@pytest.mark.many_examples
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    rows=st.lists(st.tuples(st.integers(-1, 3), SIZES, SIZES, SIZES), max_size=4),
    room=st.integers(0, 30),
)
@settings(max_examples=examples(80))
def test_stretches_are_copied_if_all_are_inside_and_none_if_one_is_not(
    lengths: list[int], rows: list[tuple[int, int, int, int]], room: int
) -> None:
    sources = [np.arange(length, dtype=np.uint8) + 50 * n for n, length in enumerate(lengths)]
    out = np.zeros(room, np.uint8)
    expected = out.copy()
    is_inside = all(
        0 <= number < len(lengths)
        and start >= 0
        and size >= 0
        and start + size <= lengths[number]
        and 0 <= target <= room - size
        for number, start, size, target in rows
    )
    columns = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    if not is_inside:
        with pytest.raises(ValueError):
            copy_stretches(sources, columns[0], columns[1], columns[2], out, columns[3])
    else:
        copy_stretches(sources, columns[0], columns[1], columns[2], out, columns[3])
        for number, start, size, target in rows:
            expected[target : target + size] = sources[number][start : start + size]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    "out", [np.zeros(3, np.uint8), np.zeros(8, np.uint8)[::2], np.frombuffer(b"four", np.uint8)]
)
def test_arrays_of_another_size_or_layout_are_not_written(out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous and writeable"):
        copy_arrays([np.arange(4, dtype=np.uint8)], [out])


CHUNK = 64
FILES = 2
TOKENS = int64(40, 100)
ITEMSIZES = int64(2, 4)
ZERO = 2
"""The slot of rows in the page cache; slot 3 is a buffer of 50 bytes, and slot 4 is empty."""
ROOM = int64(80, 0, 0, 50, 0)
CHUNKS = int64(10_000, 0, 30_000, 40_000, 0, 60_000, 70_000)
"""Where the chunks of file 1 are mapped; two are not."""


def is_in_memory(slot: int, offset: int, size: int, file: int, start: int) -> bool:
    if not (0 <= slot < len(ROOM) and 0 <= file < FILES and start >= 0 and size >= 0):
        return False
    if start + size > TOKENS[file]:
        return False
    first = start * int(ITEMSIZES[file])
    num_bytes = size * int(ITEMSIZES[file])
    if slot != ZERO:
        return bool(offset >= 0 and offset + num_bytes <= ROOM[slot])
    chunk = first // CHUNK
    is_one_chunk = (first + num_bytes - 1) // CHUNK == chunk
    return bool(
        file == 1 and is_one_chunk and CHUNKS[chunk] and offset == CHUNKS[chunk] + first % CHUNK
    )


ROWS = st.tuples(
    st.one_of(st.integers(-1, 5), st.just(ZERO)),
    st.one_of(SIZES, st.integers(0, 80), st.sampled_from(CHUNKS.tolist())),
    st.one_of(st.integers(1, 25), SIZES),
    st.integers(-1, 2),
    st.one_of(st.integers(0, 99), SIZES),
)


@pytest.mark.guarantee("addresses-inside-memory")
@pytest.mark.many_examples
@given(rows=st.lists(ROWS, min_size=1, max_size=4), cut=st.integers(0, 4))
@settings(max_examples=examples(200))
def test_rows_of_any_plan_are_in_memory_or_the_first_that_is_not_is_named(
    rows: list[tuple[int, int, int, int, int]], cut: int
) -> None:
    # Half of the rows of the page cache are where they should be.
    rows = [
        (slot, int(CHUNKS[start * 4 // CHUNK]) + start * 4 % CHUNK, size, 1, start)
        if slot == ZERO and offset % 2 and 0 <= start < 100
        else (slot, offset, size, file, start)
        for slot, offset, size, file, start in rows
    ]
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    splits = int64(0, min(cut, len(rows)), len(rows))
    bad = [n for n, row in enumerate(rows) if row[2] != 0 and not is_in_memory(*row)]
    slots = (ROOM, ZERO)
    files = (ITEMSIZES, TOKENS, int64(0, address_of(CHUNKS)))
    if bad:
        with pytest.raises(AssertionError, match=f"a plan: row {bad[0]}, .* is not in memory"):
            check_rows(splits, columns, slots, files, CHUNK, "a plan")
    else:
        check_rows(splits, columns, slots, files, CHUNK, "a plan")


@pytest.mark.parametrize("splits", [[], [-1, 1], [0, 3], [1, 0], [0, LARGEST], [0, 2, 1]])
def test_samples_of_rows_that_are_not_there_are_refused(splits: list[int]) -> None:
    columns = [int64(0, 0)] * 5
    files = (ITEMSIZES, TOKENS, int64(0, 0))
    with pytest.raises(AssertionError, match="rows that are not there"):
        check_rows(int64(*splits), columns, (ROOM, ZERO), files, CHUNK, "a plan")


@pytest.mark.guarantee("addresses-inside-memory")
@pytest.mark.parametrize("what", ["slot", "offset", "size", "file", "start"])
@pytest.mark.parametrize("value", [-1, 10**6, LARGEST])
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_loader_whose_plan_is_wrong_raises_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, value: int, order: Any
) -> None:
    prefix = write_dataset(tmp_path / "a", [np.arange(100) for _ in range(10)])
    config = data_config([prefix], tmp_path, order=order)
    gather = Gatherer.gather

    def gather_wrongly(self: Gatherer, ids: Any, stored: Any, first: int, last: int) -> Any:
        column = getattr(ids.rows, what)
        column[ids.rows.row_splits[first]] = value
        return gather(self, ids, stored, first, last)

    monkeypatch.setattr(Gatherer, "gather", gather_wrongly)
    with (
        StreamLoader(config, micro_batch_size=2, global_batch_size=2) as loader,
        pytest.raises(AssertionError, match=r"row \d+, .* is not in memory"),
    ):
        next(iter(loader))


def test_more_free_slots_than_there_is_room_for_are_not_written() -> None:
    uses = int64(1, 1, 1)
    freed = np.full(3, 77, np.int64)
    assert count_down(uses, int64(0, 1, 2), int64(1, 1, 1), freed[:2]) == -1
    assert freed[2] == 77


@pytest.mark.parametrize("edges", [[0, 50, 40], [0, 50], [0, 60, 50, 90]])
def test_frames_that_are_not_one_after_the_other_are_refused(edges: list[int]) -> None:
    with pytest.raises(FormatError, match=r"a\.zst: its frames are not one after the other"):
        Frames("a.zst", int64(*edges), int64(0, 100, 200))
