"""Kernels against plain NumPy."""

from __future__ import annotations

import re
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, kernels
from streammega.kernels.documents import find_overlaps
from streammega.kernels.fields import (
    MIN_MODE,
    clear_by_mode,
    document_bounds,
    sequence_bounds,
)
from streammega.kernels.plan import cached_rows, gather_rows
from streammega.kernels.sample_index import build_sample_index
from streammega.kernels.shuffle import LegacyShuffler, _draw_wide
from streammega.samples.fields import batch_fields
from streammega.samples.rows import coalesce
from tests.support.examples import examples


def test_files_of_kernels_have_the_digests_of_those_that_they_call() -> None:
    """So that numba compiles them again: its cache notices changes in a kernel's own file alone."""
    folder = Path(kernels.__path__[0])
    missing = []
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        if "@kernel" not in text:
            continue
        called = re.findall(r"^from streammega\.kernels\.(\w+) import", text, re.M)
        for name in sorted(set(called) - {"jit"}):
            digest = blake2b((folder / f"{name}.py").read_bytes(), digest_size=4).hexdigest()
            line = f"# compiled with {name}.py {digest}"
            if line not in text.splitlines():
                missing.append(f"{path.name}: {line}")
    assert not missing, "write these lines, the first one first: they change the files after it"


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(0, 3000), max_size=5))
def test_shuffles_are_numpys_legacy_shuffles_one_after_the_other(
    seed: int, sizes: list[int]
) -> None:
    theirs = np.random.RandomState(seed)
    ours = LegacyShuffler(seed)
    for number, size in enumerate(sizes):
        dtype = (np.int32, np.uint32, np.int64)[number % 3]
        expected = np.arange(size, dtype=dtype)
        got = np.arange(size, dtype=dtype)
        theirs.shuffle(expected)
        ours.shuffle(got)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 300_000])
def test_shuffles_agree_around_powers_of_two(size: int) -> None:
    expected = np.arange(size)
    got = np.arange(size)
    np.random.RandomState(7).shuffle(expected)
    LegacyShuffler(7).shuffle(got)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("largest", [2**33 - 1, 2**32, 3 * 2**40])
def test_targets_of_more_than_a_word_are_those_that_numpy_draws(largest: int) -> None:
    """No test has memory for so many elements, so numbers are drawn without them."""
    random = np.random.RandomState(7)
    _, key, position, _, _ = random.get_state(legacy=True)
    state = (np.array(key, np.uint32), np.empty(len(key), np.uint32), np.array([position]))
    target = np.empty(1, np.int64)
    for expected in random.randint(0, largest + 1, 1000, np.int64):
        _draw_wide(largest, *state, target)
        assert target[0] == expected


def sample_index_by_search(
    lengths: np.ndarray, index: np.ndarray, rows: int, size: int, a: int
) -> np.ndarray:
    """The closed form, one row at a time."""
    sizes = lengths[index].astype(np.int64)
    before = np.cumsum(sizes) - sizes
    result: list[tuple[Any, Any]] = [(0, 0)]
    for k in range(1, rows + 1):
        t = k * size
        if t > sizes.sum() - a:
            result.append((len(index) - 1, sizes[-1] - a))
            continue
        d = np.searchsorted(before, t, "right" if a else "left") - 1
        result.append((d, t - before[d]))
    return np.array(result)


@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(lambda x: sum(x) > 1),
    size=st.integers(1, 20),
    a=st.integers(0, 1),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([np.int32, np.int64]),
    chunk=st.integers(1, 8),
)
def test_sample_index_is_its_closed_form_however_it_is_chunked(
    lengths: list[int], size: int, a: int, seed: int, dtype: Any, chunk: int
) -> None:
    array = np.array(lengths, np.int32)
    index = np.random.default_rng(seed).integers(0, len(array), 40).astype(np.int32)
    total = int(array[index].sum())
    rows = max(0, (total - a) // size)
    with pytest.MonkeyPatch.context() as patch:
        import streammega.kernels.sample_index as module

        patch.setattr(module, "CHUNK", chunk)
        got = build_sample_index(array, index, rows, size, a, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, sample_index_by_search(array, index, rows, size, a))


@given(
    runs=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), min_size=1, max_size=40),
    gap=st.integers(0, 50),
    largest=st.integers(1, 200),
)
def test_requests_cover_every_run_and_keep_their_limits(
    runs: list[tuple[int, int]], gap: int, largest: int
) -> None:
    starts = np.array([a for a, _ in runs])
    stops = starts + np.array([n for _, n in runs])
    one_file = np.zeros(len(starts), np.int64)
    by_start = np.argsort(starts, kind="stable")
    requests = coalesce(one_file, starts, stops, by_start, gap=gap, largest=largest)
    low = requests.start
    high = requests.stop
    request = requests.of_row
    assert (low[request] <= starts).all()
    assert (stops <= high[request]).all()
    assert (np.diff(low) >= 0).all()
    sizes = high - low
    for number, size in enumerate(sizes):
        assert size <= largest or size == (stops - starts)[request == number].max()
    covered = np.zeros(600, bool)
    for a, b in zip(starts, stops, strict=True):
        covered[a:b] = True
    for a, b in zip(low, high, strict=True):  # no hole in a request is wider than the gap
        holes = np.flatnonzero(covered[a:b])
        assert (np.diff(holes) <= gap + 1).all()


@pytest.mark.guarantee("fields-megatron-dtypes")
@given(
    rows=st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=9), min_size=1, max_size=4),
    extra=st.integers(0, 1),
    pad=st.sampled_from([-1, 3]),
    mask_eod=st.booleans(),
    reset=st.booleans(),
)
def test_fields_are_what_numpy_says(
    rows: list[list[int]], extra: int, pad: int, mask_eod: bool, reset: bool
) -> None:
    length = 8
    eod = 2
    ids = np.zeros((len(rows), length + extra), np.uint16)
    valid = np.array([min(len(row), length + extra) for row in rows])
    for r, row in enumerate(rows):
        ids[r, : valid[r]] = row[: valid[r]]
    config = DataConfig(
        blend=["unused"], sequence_length=length, add_extra_token=bool(extra), eod_id=eod, pad_id=None if pad < 0 else pad,
        eod_mask_loss=mask_eod, reset_position_ids=reset,
    )  # fmt: skip
    got = {name: field.numpy() for name, field in batch_fields(ids, valid, config).items()}
    for r in range(len(rows)):
        x = np.full(length + extra, pad, np.int64)
        x[: valid[r]] = ids[r, : valid[r]]
        tokens = x[:-1] if extra else x
        labels = x[1:] if extra else np.append(x[1:], pad)
        expected = np.where((labels == pad) | (mask_eod & (tokens == eod)), 0.0, 1.0)
        positions = np.arange(length)
        if reset:
            for at in np.flatnonzero(tokens == eod):
                positions[at + 1 :] = np.arange(length - at - 1)
        np.testing.assert_array_equal(got["tokens"][r], np.where(tokens == pad, 0, tokens))
        np.testing.assert_array_equal(got["labels"][r], np.where(labels == pad, 0, labels))
        np.testing.assert_array_equal(got["loss_mask"][r], expected)
        np.testing.assert_array_equal(got["position_ids"][r], positions)


@pytest.mark.guarantee("fields-megatron-dtypes")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(
    samples=st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5),
    width=st.integers(2, 9),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]),
)
def test_rows_of_ids_are_gathered_and_widened(
    samples: list[list[int]], width: int, dtype: Any
) -> None:
    """Samples of several runs, some of them empty, some samples short."""
    stored = np.arange(1, 100, dtype=dtype)
    size = []
    column = []
    splits = [0]
    for sample in samples:
        at = 0
        for run in sample:
            size.append(min(run, width - at))
            column.append(at)
            at += size[-1]
        splits.append(len(size))
    start = np.random.default_rng(len(size)).integers(0, 60, len(size))
    rows = [
        np.array(values, np.int64)
        for values in (
            np.zeros(len(size)),
            start * stored.itemsize,
            size,
            np.zeros(len(size)),
            column,
        )
    ]
    common = (
        np.empty(0, dtype),
        0,
        np.zeros(1, np.int64),
        np.array([stored.ctypes.data]),
        *rows,
        np.array(splits),
    )
    whole = np.full((len(samples), width), -9, np.int64)
    counts = np.empty(len(samples), np.int64)
    assert gather_rows(*common, whole, counts)
    for row, (first, stop) in enumerate(pairwise(splits)):
        places = range(first, stop)
        runs = [stored[start[place] : start[place] + size[place]] for place in places]
        expected = np.concatenate([np.empty(0, dtype), *runs])
        assert counts[row] == len(expected)
        np.testing.assert_array_equal(whole[row, : len(expected)], expected)
        assert (whole[row, len(expected) :] == -9).all()


def test_rows_are_served_from_one_chunk_whose_pages_are_all_there() -> None:
    page_bytes, chunk_bytes, zero = 4, 8, 9
    is_there = np.array([1, 1, 0, 1], np.uint8)
    mapped = np.array([1000, 2000])
    rows = np.array([(3, 3), (1, 7), (6, 10), (8, 12), (14, 17), (10, 14), (13, 15)])
    start, stop = np.ascontiguousarray(rows.T)
    slot = np.full(len(rows), -1)
    offset = np.zeros(len(rows), np.int64)
    served = cached_rows(
        np.empty(0, np.uint8), np.empty(0, np.int64),
        np.array([is_there.ctypes.data]), np.array([mapped.ctypes.data]), np.zeros(len(rows), np.int64), start, stop,
        np.array([16]), page_bytes, chunk_bytes, zero, slot, offset,
    )  # fmt: skip
    assert served == 6 + 2
    assert slot.tolist() == [-1, zero, -1, -1, -1, -1, zero]
    assert offset.tolist() == [0, 1001, 0, 0, 0, 0, 2005]


@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(
    sequences=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8),
    data=st.data(),
)
def test_tokens_are_cleared_if_their_sequence_is_not_learned(
    sequences: list[tuple[int, bool]], data: st.DataObject
) -> None:
    itemsize, width = 2, 6
    is_learned = [learned for size, learned in sequences for _ in range(size)]
    # In memory another sequence follows, which is not of this file.
    ends = np.cumsum([0, *(size for size, _ in sequences)]) * itemsize
    offsets = np.append(ends[:-1], 0)[:-1]
    modes = np.array([*(learned for _, learned in sequences), True], np.int8)[:-1]
    learned = np.zeros(256, np.bool_)
    learned[[-MIN_MODE, 1 - MIN_MODE]] = False, True
    start = data.draw(st.integers(0, len(is_learned)))
    size = data.draw(st.integers(0, len(is_learned) - start))
    column = data.draw(st.integers(-3, width))
    out = np.ones((2, width), np.int64)
    row = [np.array([value]) for value in (start, size, 1, column)]
    clear_by_mode(offsets, modes, learned, itemsize, *row, out)
    expected = [1] * width
    for token in range(start, start + size):
        if 0 <= (at := column + token - start) < width:
            expected[at] = int(is_learned[token])
    assert out.tolist() == [[1] * width, expected]


@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=5))
def test_document_bounds_are_the_places_after_ends_of_documents(rows: list[list[int]]) -> None:
    bounds = np.empty((len(rows), 8), np.int32)
    most = document_bounds(np.array(rows), 2, bounds)
    expected = [[0, *(c + 1 for c, token in enumerate(row[:-1]) if token == 2)] for row in rows]
    assert most == max(map(len, expected))
    assert bounds.tolist() == [row + [7] * (8 - len(row)) for row in expected]


def bounds_by_hand(sizes: list[int], length: int, extra: int) -> list[int]:
    """Where the sequences of a sample begin, and its end: padding belongs to the last."""
    pieces = list(sizes)
    if extra and pieces[-1] == 1:
        pieces.pop()  # the extra token is no token of the sample
    begins = [sum(pieces[:number]) for number in range(1, len(pieces))]
    return [0, *begins, length]


@pytest.mark.guarantee("inter-document-masking")
@given(data=st.data(), extra=st.integers(0, 1), whole=st.booleans())
def test_bounds_of_sequences_are_those_counted_by_hand(
    data: st.DataObject, extra: int, whole: bool
) -> None:
    length = 9
    sample = st.lists(st.integers(0, 6), min_size=1, max_size=6)
    samples = []
    for sizes in data.draw(st.lists(sample, min_size=1, max_size=4)):
        # cut off at the end, or filled up by a last piece where all of the sample is there
        room = length + extra
        pieces = []
        for size in sizes:
            pieces.append(min(size, room))
            room -= pieces[-1]
            if room == 0:
                break
        samples.append([*pieces, room] if whole and room else pieces)
    splits = np.cumsum([0, *map(len, samples)])
    pieces_of_all = np.array([size for sizes in samples for size in sizes], np.int64)
    bounds = np.empty((len(samples), length + 1), np.int32)
    longest = np.empty(len(samples), np.int32)
    positions = np.empty((len(samples), length), np.int64)
    sequence_bounds(splits, pieces_of_all, extra, bounds, longest, positions)
    for number, sizes in enumerate(samples):
        expected = bounds_by_hand(sizes, length, extra)
        filled = expected + [length] * (length + 1 - len(expected))
        assert bounds[number].tolist() == filled
        assert longest[number] == max(np.diff(filled))
        assert positions[number].tolist() == [
            column - max(begin for begin in filled if begin <= column) for column in range(length)
        ]


@pytest.mark.guarantee("inter-document-masking")
def test_empty_sequences_are_left_out_of_a_sample_that_has_more_than_tokens() -> None:
    size = np.array([0, 1, 0, 0, 1, 0, 1])
    bounds = np.empty((1, 4), np.int32)
    longest = np.empty(1, np.int32)
    positions = np.empty((1, 3), np.int64)
    sequence_bounds(np.array([0, len(size)]), size, 0, bounds, longest, positions)
    assert bounds.tolist() == [[0, 1, 2, 3]]
    assert longest.tolist() == [1]
    assert not positions.any()


@given(data=st.data())
def test_rows_and_the_intervals_that_they_overlap_are_those_of_a_comparison_of_all(
    data: st.DataObject,
) -> None:
    cuts = [
        sorted(data.draw(st.sets(st.integers(0, 60), max_size=12), label="cuts")) for _ in range(3)
    ]
    intervals = [
        (file, low, high)
        for file, of_file in enumerate(cuts)
        for low, high in pairwise(of_file)
        if data.draw(st.booleans())
    ]
    starts = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 30))
    rows = data.draw(st.lists(starts, max_size=20), label="rows")
    expected = [
        (number, place)
        for number, (file, start, size) in enumerate(rows)
        for place, (of_file, low, high) in enumerate(intervals)
        if file == of_file and max(start, low) < min(start + size, high)
    ]
    file, start, size = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    of_file, low, high = np.array(intervals, np.int64).reshape(-1, 3).T.copy()
    first = np.searchsorted(of_file, np.arange(4))
    row, place = np.full((2, len(expected) + 1), -1)
    arguments = (file, start, start + size, first, low, high)
    assert find_overlaps(*arguments, row[:0], place[:0]) == len(expected)
    assert find_overlaps(*arguments, row[:-1], place[:-1]) == len(expected)
    assert list(zip(row.tolist(), place.tolist(), strict=True)) == [*expected, (-1, -1)]
