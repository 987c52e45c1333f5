"""Frames of zstd: reads get the bytes they ask for, and errors name the damaged frame."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streammega.errors import FormatError
from streammega.storage import seekable_zstd
from streammega.storage.seekable_zstd import Frames
from streammega.storage.store import Bytes

SIZES = (40_000, 1, 0, 70_000, 32_768, 32_768, 5)


def content(size: int) -> bytes:
    return (np.arange(size) ** 2 % 251).astype(np.uint8).tobytes()


def framed(sizes: Sequence[int]) -> tuple[Frames, Bytes, bytes]:
    """Frames of so many bytes: as a view, as they are stored, and what they hold."""
    whole = content(sum(sizes))
    shown_bounds = np.cumsum([0, *sizes])
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    frames = []
    for start, stop in zip(shown_bounds, shown_bounds[1:], strict=False):
        frames.append(compressor.compress(whole[start:stop]))
    stored_bounds = np.cumsum([0, *map(len, frames)])
    stored = np.frombuffer(bytearray().join(frames), np.uint8)
    return Frames("file:x.bin.zst", stored_bounds, shown_bounds), stored, whole


def shown(frames: Frames, stored: Bytes, start: int, stop: int) -> bytes:
    """Bytes by the view, with a margin that shows what is written beside them."""
    low, high = frames.stored_range(start, stop)
    room = np.full(stop - start + 32, 0xAB, np.uint8)
    frames.decode([stored[low:high]], [(start, stop)], [room[16:-16]])
    assert (room[:16] == 0xAB).all()
    assert (room[-16:] == 0xAB).all()
    return room[16:-16].tobytes()


@pytest.mark.guarantee("frames-zstd-arrive")
@given(st.lists(st.integers(0, 200), min_size=1, max_size=9), st.data())
def test_any_range_is_what_the_frames_hold(sizes: list[int], data: st.DataObject) -> None:
    frames, stored, whole = framed([*sizes, 1])
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    assert shown(frames, stored, start, stop) == whole[start:stop]


@pytest.mark.guarantee("frames-zstd-arrive")
def test_reads_may_begin_and_end_within_frames() -> None:
    frames, stored, whole = framed(SIZES)
    for start, stop in ((0, len(whole)), (39_999, 40_002), (100, 200), (110_000, 143_000)):
        assert shown(frames, stored, start, stop) == whole[start:stop]


def test_threads_decompress_side_by_side() -> None:
    frames, stored, whole = framed((50_000,) * 40)

    def read(number: int) -> bool:
        start = number * 13_337 % 1_900_000
        return shown(frames, stored, start, start + 90_000) == whole[start : start + 90_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))


def test_frames_larger_than_the_kept_buffer_are_wanted_in_part() -> None:
    frames, stored, whole = framed((seekable_zstd.KEPT_BUFFER_BYTES + 7, 9))
    last = len(whole)
    assert shown(frames, stored, last - 20, last - 3) == whole[-20:-3]


@pytest.mark.guarantee("sizes-before-memory")
def test_a_frame_that_claims_gigabytes_is_refused_before_they_are_allocated() -> None:
    sizes = np.array([[9, 100], [9, 3 << 30]], "<u4")
    body = sizes.tobytes() + seekable_zstd.FOOTER.pack(2, 0, seekable_zstd.SEEKABLE)
    table = seekable_zstd.HEADER.pack(seekable_zstd.SKIPPABLE, len(body)) + body
    with pytest.raises(FormatError, match="a frame has 3,221,225,472 bytes"):
        seekable_zstd.parse_table(table, 18 + len(table), "x.bin.zst")


@pytest.mark.guarantee("frames-zstd-arrive")
def test_a_damaged_frame_is_named_by_its_place() -> None:
    frames, stored, whole = framed(SIZES)
    low, high = frames.stored_range(41_000, 90_000)
    stored[low + (high - low) // 2] ^= 0x55
    with pytest.raises(FormatError, match=rf"x.bin.zst: frame 3, bytes \[{low}, {high}\), is dam"):
        shown(frames, stored, 0, len(whole))
    # Nothing of it was wanted.
    assert shown(frames, stored, 0, 40_001) == whole[:40_001]


@pytest.mark.guarantee("sizes-before-memory")
def test_a_frame_whose_header_claims_gigabytes_is_named_without_them() -> None:
    frame = bytearray(zstandard.compress(content(300)))
    assert frame[4:7] == b"\x60\x2c\x00", "one segment, and its size in two bytes"
    forged = frame[:4] + b"\xe0" + (1 << 36).to_bytes(8, "little") + frame[7:]
    stored = np.frombuffer(bytes(forged), np.uint8)
    frames = Frames("file:x.bin.zst", np.array([0, len(stored)]), np.array([0, 300]))
    with pytest.raises(FormatError, match=r"frame 0, .*68719476736 bytes instead of 300"):
        shown(frames, stored, 0, 300)


@pytest.mark.guarantee("frames-zstd-arrive")
def test_a_checksum_that_is_not_the_contents_is_damage() -> None:
    frames, stored, whole = framed(SIZES)
    stored[-1] ^= 1
    with pytest.raises(FormatError, match=r"frame 6, .* is damaged"):
        shown(frames, stored, 0, len(whole))


@pytest.mark.guarantee("frames-zstd-arrive")
@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_a_table_that_gives_frames_other_sizes_is_damage(wrong_by: int) -> None:
    """Their sum is right, so the table alone does not show it."""
    sizes = (40_000, 30_000, 20_000)
    frames, stored, _ = framed(sizes)
    shown_bounds = frames._decompressed + np.array([0, wrong_by, 0, 0])
    lying = Frames("x", frames._compressed, shown_bounds)
    with pytest.raises(FormatError, match=r"frame 0, .* is damaged \(.*\)"):
        shown(lying, stored, 0, 90_000)


def test_several_reads_are_shown_together_each_in_its_place() -> None:
    frames, stored, whole = framed(SIZES)
    spans = [(5, 39_000), (0, 0), (100_000, len(whole)), (39_990, 40_010)]
    bodies = []
    for start, stop in spans:
        low, high = frames.stored_range(start, stop) if start < stop else (0, 0)
        bodies.append(stored[low:high])
    outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
    frames.decode(bodies[1:2], spans[1:2], outs[1:2])
    frames.decode(bodies, spans, outs)
    assert [out.tobytes() for out in outs] == [whole[start:stop] for start, stop in spans]
    bodies[2] = bodies[2].copy()
    bodies[2][-100] ^= 1
    with pytest.raises(FormatError, match=r"frame 5, .* is damaged"):
        frames.decode(bodies, spans, outs)


def test_memory_that_is_not_that_of_a_read_is_refused_before_an_address_is_followed() -> None:
    frames = Frames("x", np.array([0, 10, 20]), np.array([0, 10, 20]))
    stored = np.zeros(20, np.uint8)
    out = np.empty(20, np.uint8)
    wrong = {
        "not the frames": (stored[:19], (0, 20), out),
        "not the frames that": (np.zeros(20, np.uint8)[::2], (0, 10), out[:10]),
        "10 bytes are not the frames that have 20": (stored[:10], (5, 15), out[:10]),
        "no bytes": (stored, (10, 30), out),
        "no bytes \\[-5": (stored, (-5, 5), out[:10]),
        "are to be written": (stored, (0, 20), out[1:]),
    }
    for message, (body, span, place) in wrong.items():
        with pytest.raises(ValueError, match=message):
            frames.decode([body], [span], [place])
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        frames.decode([stored], [(0, 20)], [out])
