"""With `--on-error skip` every document before the damage is kept, and counted; too many faults are an
error all the same.
"""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import json
import lzma
import mmap
import tarfile
import tracemalloc
import weakref
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streammega.cli.main import main
from streammega.config import StorageConfig
from streammega.convert import ConvertReport, Task, convert, convert_task, merge_tasks
from streammega.convert.options import ConvertOptions
from streammega.convert.read import mds_litdata
from streammega.convert.read.compression import PieceReader, decompress, open_stream
from streammega.convert.read.formats import read_slice
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.errors import ConfigError, ConvertError
from tests.support.builders import convert_bytes, stored_texts

LINES = [b'{"text": "%d %x"}\n' % (n, n * 7919 % 65521) for n in range(3000)]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 6),
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


NOT_UTF8 = pa.array([b"bad \xff"]).cast(pa.string(), safe=False)


def convert_to(tmp_path: Path, *inputs: Path, **options: Any) -> ConvertReport:
    settings: dict[str, Any] = {
        "tokenizer": "bytes",
        "workers": 1,
        "overwrite": True,
        "on_error": "skip",
    }
    output = str(tmp_path / "made" / "out")
    return convert([str(path) for path in inputs], output, **(settings | options))


def made(tmp_path: Path) -> list[str]:
    return stored_texts(tmp_path / "made" / "out")


def of_lines(count: int) -> list[str]:
    return [json.loads(line)["text"] for line in LINES[:count]]


@pytest.mark.parametrize("suffix", PACKERS)
def test_whole_lines_before_a_cut_are_kept(suffix: str, tmp_path: Path) -> None:
    packed = PACKERS[suffix](b"".join(LINES))
    cut = packed[: len(packed) // 2]
    lines = UNPACKERS[suffix]().decompress(cut).count(b"\n")
    other = tmp_path / "b.jsonl"
    other.write_bytes(b'{"text": "other"}\n')
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(cut)
    report = convert_to(tmp_path, path, other)
    assert made(tmp_path) == [*of_lines(lines), "other"]
    assert report.dropped == {"unreadable file": 1}
    (message,) = report.messages
    behind = f" behind line {lines:,}" if lines else ""
    assert f"{path}: cannot be read{behind} (EOFError: it is cut short)" in message
    assert f"; {lines:,} documents of it, read before that, kept" in message
    assert report.summary()["left_out"] == [message]
    with pytest.raises(ConvertError, match=f"cannot be read{behind} "):
        convert_to(tmp_path, path, on_error="stop")


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("lost", [1, 4])
def test_a_file_that_lacks_its_last_bytes_keeps_all_its_lines(
    suffix: str, lost: int, tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](b"".join(LINES))[:-lost])
    report = convert_to(tmp_path, path)
    assert made(tmp_path) == of_lines(len(LINES))
    assert report.dropped == {"unreadable file": 1}


@pytest.mark.parametrize("suffix", PACKERS)
def test_members_before_junk_are_kept_and_the_junk_is_an_error(suffix: str, tmp_path: Path) -> None:
    pack = PACKERS[suffix]
    members = pack(b"".join(LINES[:1000])) + pack(b"".join(LINES[1000:]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(members + bytes(700))
    convert_to(tmp_path, path, on_error="stop")
    assert made(tmp_path) == of_lines(3000), "zeros pad a file"
    path.write_bytes(members + b"junk, or a member whose first bytes are damaged")
    report = convert_to(tmp_path, path)
    assert made(tmp_path) == of_lines(3000)
    assert report.dropped == {"unreadable file": 1}
    assert "cannot be read behind line 3,000 (OSError" in report.messages[0]
    with pytest.raises(ConvertError, match="cannot be read behind line 3,000"):
        convert_to(tmp_path, path, on_error="stop")


@given(
    data=st.binary(max_size=3000),
    members=st.lists(st.integers(0, 3000), max_size=3),
    cut=st.integers(0, 4000),
    reads=st.integers(1, 2000),
    suffix=st.sampled_from(sorted(PACKERS)),
)
def test_reading_gives_what_decodes_and_then_the_error(
    data: bytes, members: list[int], cut: int, reads: int, suffix: str
) -> None:
    bounds = [0, *sorted(min(place, len(data)) for place in members), len(data)]
    packed = b"".join(
        PACKERS[suffix](data[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)
    )
    whole = PieceReader(decompress(io.BytesIO(packed), suffix, "a"))
    assert b"".join(iter(lambda: whole.read(reads), b"")) == data
    file = PieceReader(decompress(io.BytesIO(packed[:cut]), suffix, "a"))
    found = b""
    try:
        while piece := file.read(reads):
            found += piece
    except EOFError:
        assert cut < len(packed)
        with pytest.raises(EOFError):
            file.read(1)
    assert data.startswith(found)
    if cut >= len(packed):
        assert found == data


def test_a_table_and_texts_that_are_cut_keep_their_rows(tmp_path: Path) -> None:
    rows = "id,text\n" + "".join(f'{n},"row\n{n}"\n' for n in range(2000))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows.encode())[:-4])
    report = convert_to(tmp_path, tmp_path / "a.csv.gz")
    assert made(tmp_path) == [f"row\n{n}" for n in range(2000)]
    assert "behind line 4,000 (" in report.messages[0]
    ids = np.arange(12_000, dtype=np.int32).reshape(400, 30)
    with io.BytesIO() as file:
        np.save(file, ids)
        (tmp_path / "a.npy.gz").write_bytes(gzip.compress(file.getvalue()[:-61]))
    report = convert_to(tmp_path, tmp_path / "a.npy.gz", tokenizer=None)
    assert report.documents == 399
    assert "; 399 documents of it, read before that, kept" in report.messages[0]


def parquet(path: Path, **options: Any) -> list[tuple[int, int]]:
    """Ten row groups of 100 rows; where the pages of each group's column lie."""
    rows = {"id": range(1000), "text": [f"text {n} {n * 7919 % 65521:x}" for n in range(1000)]}
    pq.write_table(pa.table(rows), path, row_group_size=100, use_dictionary=False, **options)
    metadata = pq.ParquetFile(path).metadata
    columns = [metadata.row_group(group).column(1) for group in range(10)]
    return [(item.data_page_offset, item.total_compressed_size) for item in columns]


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("unit", [64 << 20, 1000])
def test_a_damaged_page_costs_its_row_group_alone(
    codec: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", unit)
    path = tmp_path / "a.parquet"
    pages = parquet(path, compression=codec, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    for group in (3, 7):
        start, size = pages[group]
        data[start + size // 2] ^= 0x55
    path.write_bytes(data)
    report = convert_to(tmp_path, path)
    numbers = [int(text.split()[1]) for text in made(tmp_path)]
    assert numbers == [n for n in range(1000) if n // 100 not in (3, 7)]
    assert report.dropped == {"unreadable row": 200}
    assert [
        f"cannot be read from row {first} to {first + 99}, in row group {group} (" in message
        for message, first, group in zip(report.messages, (301, 701), (3, 7), strict=True)
    ] == [True, True]
    with pytest.raises(ConvertError, match="from row 301 to 400, in row group 3"):
        convert_to(tmp_path, path, on_error="stop")


@pytest.mark.parametrize("column", ["text", "other"])
def test_a_damaged_description_of_a_column_costs_its_row_group(column: str, tmp_path: Path) -> None:
    """pyarrow ends the process where such a description is looked at: that of the worker."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"], "other": ["a", "b", None]}), path)
    data = path.read_bytes()
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - footer_bytes], data[-8 - footer_bytes : -8]
    # a list of two numbers: how many values are null, and how many are not; one more is wrong
    counts = b"\x19\x26\x00\x06" if column == "text" else b"\x19\x26\x02\x04"
    if footer.count(counts) != 1:
        pytest.skip("this version of pyarrow does not write such counts")
    footer = footer.replace(counts, b"\x19\x36" + counts[2:] + b"\x00")
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    sound = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": ["d"], "other": ["e"]}), sound)
    report = convert_to(tmp_path, path, sound, id_field="other", provenance=True)
    assert report.dropped == {"unreadable row": 3}
    assert (
        "a.parquet, row group 0: reading it ends the process (SIGABRT), twice" in report.messages[0]
    )
    assert made(tmp_path) == ["d"]
    with pytest.raises(ConvertError, match=r"a\.parquet, row group 0: reading it ends the process"):
        convert_to(tmp_path, path, sound, id_field="other", provenance=True, on_error="stop")
    if column == "other":  # which is not wanted here
        assert convert_to(tmp_path, path).documents == 3


def test_a_large_file_that_is_no_parquet_is_named_by_whoever_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 10)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more of it PAR1")
    (tmp_path / "b.jsonl").write_bytes(LINES[0])
    report = convert_to(tmp_path, tmp_path / "a.parquet", tmp_path / "b.jsonl")
    assert (report.documents, report.dropped) == (1, {"unreadable file": 1})
    with pytest.raises(ConvertError, match=r"a\.parquet: cannot be read"):
        convert_to(tmp_path, tmp_path / "a.parquet", on_error="stop")


# --- too many faults ------------------------------------------------------------------------------


def broken_lines(folder: Path) -> list[Path]:
    """Four files of 100 lines, with 0, 1, 2 and 3 broken ones."""
    folder.mkdir(exist_ok=True)
    for number in range(4):
        lines = [line if n >= number else b"{broken\n" for n, line in enumerate(LINES[:100])]
        (folder / f"{number}.jsonl").write_bytes(b"".join(lines))
    return sorted(folder.iterdir())


@pytest.mark.parametrize("limit", [6, "6", "1.5%", "100%", "7"])
def test_faults_within_the_limit_are_skipped(limit: Any, tmp_path: Path) -> None:
    report = convert_to(tmp_path, *broken_lines(tmp_path / "in"), max_errors=limit)
    assert (report.documents, report.dropped) == (394, {"broken record": 6})


@pytest.mark.parametrize("limit", [5, 0, "1.49%", "0%"])
@pytest.mark.parametrize("workers", [1, 3])
def test_faults_beyond_the_limit_end_the_conversion(
    limit: Any, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 1000)
    inputs = broken_lines(tmp_path / "in")
    with pytest.raises(
        ConvertError, match=r"more than max_errors.*\n.*jsonl.* broken JSON"
    ) as told:
        convert_to(tmp_path, *inputs, max_errors=limit, workers=workers)
    assert str(told.value).count("broken JSON") <= 5
    assert not list((tmp_path / "made").glob("out*"))
    report = convert_to(tmp_path, *inputs, max_errors=6, workers=workers)
    assert report.documents == 394, "a higher limit goes on"


def test_faults_of_all_tasks_are_counted_together(tmp_path: Path) -> None:
    inputs = [str(path) for path in broken_lines(tmp_path / "in")]
    output = str(tmp_path / "made" / "out")
    settings: dict[str, Any] = {
        "tokenizer": "bytes", "on_error": "skip", "workers": 1, "work_dir": str(tmp_path / "work"),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 1000)
        with pytest.raises(ConvertError, match="more than max_errors"):
            convert_task(inputs, output, Task(number=0, of=1), max_errors=5, **settings)
        for number in range(2):
            task = Task(number=number, of=2)
            convert_task(inputs, output, task, max_errors="1%", **settings)
        with pytest.raises(ConvertError, match="6 records of 400 that were read were skipped"):
            merge_tasks(inputs, output, max_errors="1%", **settings)
        assert merge_tasks(inputs, output, max_errors="2%", **settings).documents == 394


def test_records_that_no_reader_could_give_count_as_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "good\n" * 50 + "too,many\n" * 50)
    (tmp_path / "b.jsonl").write_text(('{"text": "%s"}\n' % ("x" * 50) + '{"text": "x"}\n') * 50)
    inputs = [tmp_path / "a.csv", tmp_path / "b.jsonl"]
    assert convert_to(tmp_path, *inputs, max_errors="50%", max_record_bytes=40).documents == 100
    with pytest.raises(ConvertError, match="100 records of 200 that were read were skipped"):
        convert_to(tmp_path, *inputs, max_errors="49%", max_record_bytes=40)


@pytest.mark.parametrize("limit", ["-1", "many", "101%", "", "1 %"])
def test_a_limit_that_is_none_is_refused(limit: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_errors"):
        convert_to(tmp_path, tmp_path / "in.jsonl", max_errors=limit)


def test_a_limit_needs_faults_to_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--on-error"):
        convert_to(tmp_path, tmp_path / "in.jsonl", max_errors=3, on_error="stop")
    inputs = map(str, broken_lines(tmp_path / "in"))
    command = ["convert", *inputs, str(tmp_path / "o"), "--tokenizer", "bytes"]
    assert main([*command, "--on-error", "skip", "--max-errors", "5"]) == 1
    assert "more than max_errors (--max-errors) 5" in capsys.readouterr().err


@pytest.mark.guarantee("sizes-before-memory")
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_few_bytes_that_become_many_come_in_pieces(suffix: str) -> None:
    bomb = PACKERS[suffix](bytes(80 << 20))
    assert len(bomb) < 1 << 18
    sizes = [len(piece) for piece in decompress(io.BytesIO(bomb), suffix, "a")]
    assert sum(sizes) == 80 << 20
    assert max(sizes) <= 64 << 20


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_file_leaves_no_decompressor_in_memory(tmp_path: Path, suffix: str) -> None:
    """That of an .xz may take half a gigabyte."""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKERS[suffix](b"".join(LINES))[:-20])

    def read() -> weakref.ref[Any]:
        with open_stream(str(path), StorageConfig()) as stream:
            with pytest.raises(EOFError):
                while stream.read(1 << 16):
                    pass
            with pytest.raises(EOFError):  # however often one asks
                stream.read()
            return weakref.ref(stream)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("form", ["mds", "litdata"])
def test_a_shard_that_becomes_too_large_is_refused(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "shard").write_bytes(zstandard.compress(bytes(30 << 20)))
    shard = {
        "format": "mds",
        "compression": "zstd",
        "column_names": ["text"],
        "column_encodings": ["str"],
        "column_sizes": [None],
        "raw_data": {"basename": "shard"},
    }
    config = {"data_format": ["str"], "compression": "zstd"}
    index = {
        "mds": {"shards": [shard]},
        "litdata": {"config": config, "chunks": [{"filename": "shard"}]},
    }
    (folder / "index.json").write_text(json.dumps(index[form]))
    monkeypatch.setattr(mds_litdata, "MAX_SHARD_BYTES", 1 << 20)
    piece = Slice(input=Input(path=str(folder), format=form, size=1, etag=""))
    options = ConvertOptions(max_record_bytes=2 << 20)
    with pytest.raises(ConvertError, match=r"become more than 2,097,152; raise max_record_bytes"):
        list(read_slice(piece, options, StorageConfig(), Skipped()))


def test_rows_that_pyarrow_leaves_out_are_a_fault(tmp_path: Path) -> None:
    """A column that says another number of values: pyarrow gives no row of its group, and no error."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", "b", "c", "d"], "id": ["1", "2", "3", "4"]})
    pq.write_table(table, path, row_group_size=2, compression="none")
    values_of_id = b"\x02id\x15\x00\x16"  # the name, the codec, and the number as a varint
    stored = path.read_bytes()
    assert stored.count(values_of_id + b"\x04") == 2
    path.write_bytes(stored.replace(values_of_id + b"\x04", values_of_id + b"\x27", 1))
    message = "from row 1 to 2, in row group 0 .*0 of 2 rows are there"
    with pytest.raises(ConvertError, match=message):
        convert_to(tmp_path, path, on_error="stop", provenance=True)
    report = convert_to(tmp_path, path, provenance=True)
    assert made(tmp_path) == ["c", "d"]
    assert report.dropped == {"unreadable row": 2}


@pytest.mark.guarantee("sizes-before-memory")
@pytest.mark.parametrize(
    "header",
    [
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{",
        b"\x93NUMPY\x01\x00v\x00{'descr':'<u2','fortran_order':False,'shape':(1,9999999999999999)}".ljust(
            128
        ),
    ],
)
def test_an_array_that_claims_to_be_huge_takes_no_memory(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(header)
    tracemalloc.start()
    with pytest.raises(ConvertError, match=r"a\.npy"):
        convert_to(tmp_path, path, on_error="stop", tokenizer=None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_offsets_of_arrow_that_lead_out_of_its_buffers_are_not_followed(
    tmp_path: Path, form: str
) -> None:
    """Arrow itself ends the process, or shows other memory."""
    offsets = pa.py_buffer(np.array([0, 1, 1 << 28, 3], np.int32))
    if form == "text":
        column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    else:
        kind = pa.list_(pa.int64())
        column = pa.Array.from_buffers(kind, 3, [None, offsets], children=[pa.array([1, 2, 3])])
    batch = pa.RecordBatch.from_arrays([column], ["text"])
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(
        ConvertError, match=r"a\.arrow:\d: cannot be read \(ArrowInvalid: .* offset"
    ):
        convert_to(tmp_path, path, on_error="stop")


def test_an_arrow_batch_without_a_sound_row_does_not_end_the_process(tmp_path: Path) -> None:
    """Of lists with a null; Arrow's own call for these follows an offset even of no rows."""
    batch = pa.RecordBatch.from_pydict({"text": [[1], None, [2, 3]]})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    stored = np.array([0, 1, 1, 3], np.int32).tobytes()
    damaged = np.array([4, 1, 1, 3], np.int32).tobytes()
    path.write_bytes(path.read_bytes().replace(stored, damaged))
    with pytest.raises(
        ConvertError, match=r"a\.arrow:\d: cannot be read \(ArrowInvalid: .* offset"
    ):
        convert_to(tmp_path, path, on_error="stop", tokenizer=None)


@pytest.mark.parametrize("bad", [0, 1, 17, 98])
def test_rows_whose_offsets_are_damaged_cost_themselves_alone(tmp_path: Path, bad: int) -> None:
    """The end of one is the beginning of the next one."""
    texts = [f"text {number}" for number in range(100)]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    offsets[bad + 1] = 1 << 28
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer("".join(texts).encode())]
    column = pa.Array.from_buffers(pa.string(), 100, buffers)
    batches = [
        pa.RecordBatch.from_arrays([values], ["text"])
        for values in (column, pa.array(["next", "\ufffd"]).cast(pa.string()), NOT_UTF8)
    ]
    with pa.ipc.new_stream(tmp_path / "a.arrow", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    report = convert_to(tmp_path, tmp_path / "a.arrow")
    assert made(tmp_path) == [*texts[:bad], *texts[bad + 2 :], "next", "\ufffd"]
    assert report.dropped == {"broken record": 3}
    assert f"a.arrow:{bad + 1}: cannot be read (ArrowInvalid" in report.messages[0]
    assert "a.arrow:103: is not UTF-8" in report.messages[2]


BAD_VALUES: dict[str, tuple[pa.Array, str]] = {
    "text": (NOT_UTF8, r":18: is not UTF-8 text \(byte 4\)"),
    "shared text": (
        pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), NOT_UTF8),
        r":18: is not UTF-8 text \(byte 4\)",
    ),
    "id": (pa.array([10**17], pa.timestamp("ms")), ":18: has a value that Python cannot hold"),
    "messages": (
        pa.ListArray.from_arrays(
            [0, 1],
            pa.StructArray.from_arrays([pa.array(["assistant"]), NOT_UTF8], ["role", "content"]),
        ),
        r":18: is not UTF-8 text \(byte 4\)",
    ),
    "ids": (pa.array([[5, None]]), ":18: a list of ids holds a null"),
    "padded ids": (pa.array([[5, -1]]), ":18: holds the id -1"),
}
GOOD_VALUES: dict[str, Callable[[int], Any]] = {
    "text": lambda n: f"text {n}",
    "id": lambda n: n * 1000,
    "messages": lambda n: [{"role": "assistant", "content": f"text {n}"}],
    "ids": lambda n: list(f"text {n}".encode()),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_bad_value_costs_its_row_alone(form: str, kind: str, tmp_path: Path) -> None:
    bad, message = BAD_VALUES[kind]
    name = kind.rpartition(" ")[2]
    good = pa.array([GOOD_VALUES[name](n) for n in range(40)], bad.type)
    columns = {name: pa.concat_arrays([good[:17], bad, good[18:]])}
    columns.setdefault("text", pa.array([f"text {n}" for n in range(40)]))
    table = pa.table(columns)
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    options_of: dict[str, dict[str, Any]] = {
        "text": {},
        "id": {"provenance": True},
        "messages": {"chat": True},
        "ids": {"text_key": "ids", "tokenizer": None, "eod_id": 256},
    }
    options = options_of[name]
    report = convert_to(tmp_path, path, **options)
    assert (report.documents, report.dropped) == (39, {"broken record": 1})
    if name != "messages":
        assert made(tmp_path) == [f"text {n}" for n in range(40) if n != 17]
    with pytest.raises(ConvertError, match=message):
        convert_to(tmp_path, path, on_error="stop", **options)


@pytest.mark.guarantee("sizes-before-memory")
def test_a_dictionary_of_xz_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    packed = lzma.compress(b"\n".join(LINES), lzma.FORMAT_ALONE)
    path = tmp_path / "a.jsonl.lzma"
    path.write_bytes(packed[:1] + b"\xff\xff\xff\xff" + packed[5:])
    with pytest.raises(ConvertError, match="its dictionary needs more than 512 MiB; decompress it"):
        convert_to(tmp_path, path, on_error="stop")
    path.write_bytes(lzma.compress(b"\n".join(LINES), preset=9 | lzma.PRESET_EXTREME))
    convert_to(tmp_path, path, on_error="stop")


def long_window(data: bytes, log: int) -> bytes:
    """A member of zstd as `--long=LOG` makes it: a block that is stored as it is."""
    size_and_last = (len(data) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\0" + bytes([log - 10 << 3]) + size_and_last + data


def write_index(folder: Path, form: str, compression: str | None, **items: int) -> None:
    """The index of shards of texts, of so many items each."""
    described = {
        "format": "mds",
        "compression": compression,
        "column_names": ["text"],
        "column_encodings": ["str"],
        "column_sizes": [None],
    }
    config = {"data_format": ["str"], "compression": compression}
    shards = [
        described | {"raw_data": {"basename": name}, "samples": count}
        for name, count in items.items()
    ]
    chunks = [{"filename": name, "chunk_size": count} for name, count in items.items()]
    index = {"mds": {"shards": shards}, "litdata": {"config": config, "chunks": chunks}}
    (folder / "index.json").write_text(json.dumps(index[form]))


def write_windowed(folder: Path, form: str, log: int) -> Path:
    """An input with the text "one", in a member of zstd with such a window."""
    line = b'{"text": "one"}\n'
    if form in ("mds", "litdata"):
        item = mds_item(b"one")
        shard = np.array([1, 12, 12 + len(item)], "<u4").tobytes() + item
        (folder / "shard").write_bytes(long_window(shard, log))
        write_index(folder, form, "zstd", shard=1)
        return folder
    if form == "member":
        path = folder / "a.tar"
        packed = long_window(line, log)
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo("a.jsonl.zst")
            member.size = len(packed)
            archive.addfile(member, io.BytesIO(packed))
        return path
    path = folder / "a.jsonl.zst"
    path.write_bytes(long_window(line, log))
    return path


WINDOWED = ("jsonl", "member", "mds", "litdata")


@pytest.mark.parametrize("form", WINDOWED)
@pytest.mark.parametrize("log", [28, 31])
def test_windows_as_long_as_zstd_makes_them_are_read(form: str, log: int, tmp_path: Path) -> None:
    path = write_windowed(tmp_path, form, log)
    convert_to(tmp_path, path, on_error="stop")
    assert made(tmp_path) == ["one"]


@pytest.mark.parametrize("form", WINDOWED)
def test_a_longer_window_is_no_damage(form: str, tmp_path: Path) -> None:
    path = write_windowed(tmp_path, form, 32)
    with pytest.raises(ConvertError, match="window needs more than 2048 MiB") as caught:
        convert_to(tmp_path, path, on_error="stop")
    assert "--long=31" in str(caught.value)
    assert "whole" not in str(caught.value)


@pytest.mark.guarantee("sizes-before-memory")
def test_a_window_takes_the_memory_of_what_is_in_it() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    pieces = decompress(io.BytesIO(long_window(bytes(1 << 10), 31) * 2), ".zst", "a")
    assert len(next(pieces)) == 1 << 10
    assert resident_bytes() - before < 64 << 20


def write_arrow(path: Path, column: pa.Array, name: str = "text") -> None:
    batch = pa.RecordBatch.from_arrays([column], [name])
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)


SHARED = {
    "dictionary": lambda texts: pa.array(texts).dictionary_encode(),
    "dictionary of views": lambda texts: pa.DictionaryArray.from_arrays(
        pa.array(texts).dictionary_encode().indices,
        pa.array(texts).dictionary_encode().dictionary.cast(pa.string_view()),
    ),
    "views": lambda texts: pa.array(texts).cast(pa.string_view()),
}


@pytest.mark.parametrize("kind", SHARED)
def test_rows_that_share_bytes_are_as_large_as_their_own_values(tmp_path: Path, kind: str) -> None:
    """And not as the bytes of all, which are more than a record may have. One is too large."""
    texts = ["short", *(str(number) * 1000 for number in range(1, 10)), None, "x" * 3000] * 3
    write_arrow(tmp_path / "a.arrow", SHARED[kind](texts))
    report = convert_to(tmp_path, tmp_path / "a.arrow", max_record_bytes=2000)
    assert made(tmp_path) == [text for text in texts if text is not None and len(text) < 2000]
    assert report.dropped["too large"] == 3


def test_a_column_of_views_as_polars_writes_it_is_read(tmp_path: Path) -> None:
    texts = ["one", None, "a text of more than twelve bytes", "é"]
    write_arrow(tmp_path / "a.arrow", pa.array(texts).cast(pa.string_view())[1:])
    convert_to(tmp_path, tmp_path / "a.arrow", on_error="stop")
    assert made(tmp_path) == texts[2:]


@pytest.mark.parametrize("form", ["mds", "litdata"])
def test_a_shard_that_is_lost_counts_as_all_its_items(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [f"text {number}" for number in range(10)]
    items = [mds_item(text.encode()) for text in texts]
    bounds = 4 * (2 + len(items)) + np.cumsum([0, *map(len, items)])
    whole = np.array([len(items), *bounds], "<u4").tobytes() + b"".join(items)
    (folder / "a").write_bytes(whole)
    (folder / "b").write_bytes(whole[:20])
    write_index(folder, form, None, a=10, b=10)
    report = convert_to(tmp_path, folder)
    assert made(tmp_path) == texts
    assert report.dropped == {"unreadable record": 10}
    with pytest.raises(ConvertError, match="more than max_errors"):
        convert_to(tmp_path, folder, max_errors="40%")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, -1), "<i8"), ((-3,), "<i8"), ((4,), "<m8[s]"), ((4,), "|b1")]
)
def test_a_header_of_npy_that_is_of_no_tokens_is_named(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    (tmp_path / "a.npy").write_bytes(file.getvalue() + bytes(64))
    with pytest.raises(ConvertError, match=r"a\.npy: holds .* token arrays are integers"):
        convert_to(tmp_path, tmp_path / "a.npy", on_error="stop", tokenizer=None)


def test_the_header_of_a_very_wide_csv_is_checked_at_once(tmp_path: Path) -> None:
    names = ",".join(map(str, range(200_000)))
    (tmp_path / "a.csv").write_text(f"text,{names}\none{',' * 200_000}\n")
    convert_to(tmp_path, tmp_path / "a.csv", on_error="stop")
    assert made(tmp_path) == ["one"]
    (tmp_path / "b.csv").write_text(f"text,{names},{'n' * 10_000},{'n' * 10_000}\n")
    with pytest.raises(ConvertError, match="has two columns 'nnn") as caught:
        convert_to(tmp_path, tmp_path / "b.csv", on_error="stop")
    assert len(str(caught.value)) < 1000


def test_a_parquet_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], ["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConvertError, match="has two columns 'text'"):
        convert_to(tmp_path, tmp_path / "a.parquet", on_error="stop")


@pytest.mark.guarantee("sizes-before-memory")
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_whose_pieces_may_become_gigabytes_is_refused(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.txt.zip", "w", method) as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(ConvertError, match=r"a\.txt\.zip: its file is compressed otherwise"):
        convert_to(tmp_path, tmp_path / "a.txt.zip", on_error="stop")


@pytest.mark.guarantee("sizes-before-memory")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_tar_that_claims_to_be_huge_is_refused(
    tmp_path: Path, kind: bytes, is_first: bool
) -> None:
    huge = tarfile.TarInfo("h")
    huge.type = kind
    huge.size = 1 << 32
    sound = tarfile.TarInfo("a.txt")
    before = b"" if is_first else sound.tobuf()
    (tmp_path / "a.tar").write_bytes(before + huge.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(ConvertError, match=r"a\.tar: .*name or attributes of 4,294,967,296 bytes"):
        convert_to(tmp_path, tmp_path / "a.tar", on_error="stop")


def mds_item(*values: bytes) -> bytes:
    return np.array([len(value) for value in values], "<u4").tobytes() + b"".join(values)


SHAPED = bytes([1 << 2 | 2])
"""How an array of MDS begins: one dimension, of 4 bytes."""


@pytest.mark.parametrize("form", ["mds", "litdata"])
def test_a_bad_item_costs_itself_alone(form: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    items = [mds_item(text) for text in (b"one", b"\xff", b"three")]
    items.append(np.array([900], "<u4").tobytes() + b"short")
    shard = {
        "format": "mds",
        "compression": None,
        "column_names": ["text"],
        "column_encodings": ["str"],
        "column_sizes": [None],
        "raw_data": {"basename": "shard"},
    }
    config = {"data_format": ["str"], "compression": None}
    index = {
        "mds": {"shards": [shard]},
        "litdata": {"config": config, "chunks": [{"filename": "shard"}]},
    }
    (tmp_path / "in" / "index.json").write_text(json.dumps(index[form]))
    bounds = 4 * (2 + len(items)) + np.cumsum([0, *map(len, items)])
    head = np.array([len(items), *bounds], "<u4").tobytes()
    (tmp_path / "in" / "shard").write_bytes(head + b"".join(items))
    report = convert_to(tmp_path, tmp_path / "in")
    assert made(tmp_path) == ["one", "three"]
    assert report.dropped == {"broken record": 2}
    assert "shard#1: is not UTF-8 text (byte 0)" in report.messages[0]
    with pytest.raises(ConvertError, match="shard#1: is not UTF-8"):
        convert_to(tmp_path, tmp_path / "in", on_error="stop")


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("form", ["mds", "litdata"])
def test_a_cut_shard_costs_what_was_cut_off(
    form: str, compression: str | None, tmp_path: Path
) -> None:
    texts = [f"text {number}" for number in range(10)]
    items = [mds_item(text.encode()) for text in texts]
    bounds = 4 * (2 + len(items)) + np.cumsum([0, *map(len, items)])
    whole = np.array([len(items), *bounds], "<u4").tobytes() + b"".join(items)
    cut = whole[: bounds[4] + 3]
    if compression:
        whole = zstandard.compress(whole)
        packer = zstandard.ZstdCompressor().compressobj()
        cut = packer.compress(cut) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    folder = tmp_path / "in"
    folder.mkdir()
    shards = {"a": whole, "b": cut, "c": b"\1", "d": whole}
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    shard = {
        "format": "mds",
        "compression": compression,
        "column_names": ["text"],
        "column_encodings": ["str"],
        "column_sizes": [None],
    }
    index = {
        "mds": {"shards": [shard | {"raw_data": {"basename": name}} for name in shards]},
        "litdata": {
            "config": {"data_format": ["str"], "compression": compression},
            "chunks": [{"filename": name} for name in shards],
        },
    }
    (folder / "index.json").write_text(json.dumps(index[form]))
    report = convert_to(tmp_path, folder)
    assert made(tmp_path) == [*texts, *texts[:4], *texts]
    assert report.dropped["broken record"] == 6
    assert any("b#4: is cut short or damaged" in message for message in report.messages)
    with pytest.raises(ConvertError, match=r"/b(#4: is|: cannot be read .*it is) cut short"):
        convert_to(tmp_path, folder, on_error="stop")


@pytest.mark.parametrize(
    ("encodings", "item", "samples", "message"),
    [
        (["str"], np.array([1000], "<u4").tobytes() + b"short", 1, "bytes, and 1004 by the sizes"),
        (["str"], np.array([2], "<u4").tobytes() + b"longer", 1, "bytes, and 6 by the sizes"),
        (["str"], mds_item(b"text"), 7, "has 1 items, and 7 by its index"),
        (["str", "str"], mds_item(b"a", b"b"), 1, "two columns of one name"),
        (["ndarray:uint16:100"], mds_item(bytes(4)), 1, r"of shape \[100\] has 2 values"),
        (
            ["ndarray:uint16"],
            mds_item(SHAPED + np.array([1000], "<u4").tobytes() + bytes(8)),
            1,
            r"of shape \[1000\] has 4 values",
        ),
    ],
)
def test_items_of_mds_that_are_not_what_they_say_are_refused(
    tmp_path: Path, encodings: list[str], item: bytes, samples: int, message: str
) -> None:
    (tmp_path / "in").mkdir()
    shard = {
        "format": "mds",
        "compression": None,
        "column_names": ["text"] * len(encodings),
        "column_encodings": encodings,
        "column_sizes": [None] * len(encodings),
        "raw_data": {"basename": "shard"},
        "samples": samples,
    }
    (tmp_path / "in" / "index.json").write_text(json.dumps({"shards": [shard]}))
    head = np.array([1, 12, 12 + len(item)], "<u4").tobytes()
    (tmp_path / "in" / "shard").write_bytes(head + item)
    with pytest.raises(ConvertError, match=rf"/in.*{message}"):
        convert_to(tmp_path, tmp_path / "in", on_error="stop")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(
    "text", ['{"text": "a"}', '{"text": "a"}\n{"text": "b"}\n', '[{"text": "a"}]']
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_in_another_encoding_is_refused(
    encoding: str, text: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(text.encode(encoding))
    expected = "byte order mark" if encoding in ("utf-16", "utf-32") else "a.json"
    with pytest.raises(ConvertError, match=expected):
        convert_bytes(tmp_path / "out", path)


def test_csv_whose_lines_end_in_cr_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\ra\rb\r")
    with pytest.raises(ConvertError, match="CR alone"):
        convert_bytes(tmp_path / "out", path)
