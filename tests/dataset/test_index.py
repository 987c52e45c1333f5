"""`.bin/.idx` pairs: round trips, parity with Megatron's reader and writer, forged files, the local
cache.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.dataset.idx import (
    DTYPE_OF_CODE,
    HEADER,
    MAGIC,
    IndexArrays,
    check_bins,
    encode_index,
    smallest_dtype,
)
from streammega.dataset.names import Kind
from streammega.errors import (
    CacheError,
    FormatError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.storage.backends.local import map_file
from tests.support import oracle
from tests.support.builders import write_random_pair
from tests.support.processes import launch
from tests.support.servers import S3, http_server

DTYPES = sorted(DTYPE_OF_CODE.values(), key=str)


def plain(tokens: Any) -> np.ndarray:
    assert isinstance(tokens, np.ndarray)
    return tokens


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Documents of sequences of token ids, and a mode for each sequence."""
    sequence = st.lists(st.integers(0, 100), max_size=8)
    documents = draw(st.lists(st.lists(sequence, max_size=4), max_size=8))
    modes = [
        draw(st.lists(st.integers(-2, 5), min_size=len(d), max_size=len(d))) for d in documents
    ]
    return documents, modes


@given(corpus=corpora(), dtype=st.sampled_from(DTYPES), multimodal=st.booleans())
def test_what_is_written_is_read_back(
    tmp_path_factory: Any, corpus: Any, dtype: np.dtype, multimodal: bool
) -> None:
    prefix = str(tmp_path_factory.mktemp("pair") / "p")
    documents, modes = corpus
    with IndexedDatasetWriter(prefix, dtype, multimodal) as writer:
        for document, document_modes in zip(documents, modes, strict=True):
            flat = [token for sequence in document for token in sequence]
            writer.add_document(flat, [len(sequence) for sequence in document], document_modes)
    read = IndexedDataset(prefix)
    sequences = [np.array(s, dtype) for d in documents for s in d]
    flat_modes = [mode for document_modes in modes for mode in document_modes]
    assert read.dtype == dtype
    assert len(read) == len(sequences)
    assert read.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    got: list[Any] = [read[i] for i in range(len(read))]
    if multimodal and len(read):
        assert [mode for _, mode in got] == flat_modes
        got = [tokens for tokens, _ in got]
    for ours, expected in zip(got, sequences, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, expected)


def test_merging_keeps_empty_sequences_of_any_place(tmp_path: Path) -> None:
    """Sequences that are not end to end are copied one by one, empty ones too."""
    np.arange(20, dtype=np.int32).tofile(tmp_path / "parts.bin")
    lengths = np.array([3, 0, 0, 8], np.int32)
    offsets = np.array([8, 0, 40, 48])
    chunks = encode_index(np.dtype(np.int32), lengths, np.arange(5), None, offsets)
    (tmp_path / "parts.idx").write_bytes(b"".join(chunks))
    parts = IndexedDataset(str(tmp_path / "parts"))
    with IndexedDatasetWriter(str(tmp_path / "merged"), np.int32) as writer:
        writer.add_index(str(tmp_path / "parts"))
    merged = IndexedDataset(str(tmp_path / "merged"))
    assert [plain(part).tolist() for part in merged] == [plain(part).tolist() for part in parts]


def arrays_of(lengths: list[int], starts: list[int], bounds: list[int]) -> IndexArrays:
    """The arrays of an `.idx` of sequences that begin at these tokens."""
    return IndexArrays(
        dtype=np.dtype(np.int32),
        sequence_lengths=np.array(lengths, np.int32),
        sequence_offsets=np.array(starts, np.int64) * 4,
        document_indices=np.array(bounds, np.int64),
        sequence_modes=None,
    )


@pytest.mark.parametrize(
    ("lengths", "starts", "bounds"),
    [
        ([], [], [0]),
        ([2, 1, 2, 1], [0, 2, 3, 8], [0, 3, 4]),
        ([3, 5, 2], [0, 3, 8], [0, 1, 2, 3]),
        ([0, 3, 0, 1], [0, 0, 3, 16], [0, 3, 4]),
    ],
    ids=["no documents", "padding", "full bins", "empty sequences"],
)
def test_documents_end_to_end_are_bins(
    lengths: list[int], starts: list[int], bounds: list[int]
) -> None:
    check_bins(arrays_of(lengths, starts, bounds), 8, "web.idx")


FOLLOW = "its sequences do not follow each other and the document before it"


@pytest.mark.parametrize(
    ("lengths", "starts", "bounds", "message"),
    [
        ([4], [0], [0, 1, 1], "document 1 has no tokens"),
        ([4, 0, 0], [0, 4, 4], [0, 1, 3], "document 1 has no tokens"),
        ([2, 1, 2, 1], [0, 100, 3, 8], [0, 3, 4], f"document 0 .* {FOLLOW}"),
        ([2, 1, 2, 1], [0, 0, 3, 8], [0, 3, 4], f"document 0 .* {FOLLOW}"),
        ([1, 1], [1, 3], [0, 1, 2], f"document 0 .* {FOLLOW}"),
        ([1, 1], [0, 3], [0, 1, 2], f"document 1 .* {FOLLOW}"),
        ([1, 1, 1], [0, 2, 8], [0, 2, 3], f"document 0 .* {FOLLOW}"),
        ([4, 2], [8, 0], [0, 1, 2], f"document 1 .* {FOLLOW}"),
        ([6, 4], [0, 6], [0, 1, 2], "document 1 .* not within one bin of 8"),
    ],
)
def test_documents_apart_are_no_bins(
    lengths: list[int], starts: list[int], bounds: list[int], message: str
) -> None:
    """Readers count all tokens of a bin before its padding: those of a gap would be read too."""
    with pytest.raises(FormatError, match=message):
        check_bins(arrays_of(lengths, starts, bounds), 8, "web.idx")


@pytest.mark.guarantee("megatron-files-order")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_megatron_reads_what_we_write(tmp_path: Path, dtype: np.dtype) -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 100, rng.integers(0, 20)).astype(dtype) for _ in range(40)]
    prefix = str(tmp_path / "ours")
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for number, sequence in enumerate(sequences):
            writer.add_item(sequence)
            if number % 3 == 2:
                writer.end_document()
        writer.end_document()
    theirs = oracle.IndexedDataset(prefix)
    ours = IndexedDataset(prefix)
    assert len(theirs) == len(ours) == 40
    np.testing.assert_array_equal(theirs.document_indices, ours.document_indices)
    for number, sequence in enumerate(sequences):
        assert theirs[number].dtype == dtype
        np.testing.assert_array_equal(theirs[number], sequence)


@pytest.mark.guarantee("megatron-files-order")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_we_write_the_very_bytes_that_megatron_writes(tmp_path: Path, dtype: np.dtype) -> None:
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, 100, rng.integers(0, 20)) for _ in range(30)]
    bounds = [1, 2, 9, 30]
    oracle.write_pair(str(tmp_path / "theirs"), sequences, dtype, bounds)
    with IndexedDatasetWriter(str(tmp_path / "ours"), dtype) as writer:
        for number, sequence in enumerate(sequences):
            writer.add_item(sequence)
            if number + 1 in bounds:
                writer.end_document()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()
    read = IndexedDataset(str(tmp_path / "theirs"))
    for number, sequence in enumerate(sequences):
        np.testing.assert_array_equal(plain(read[number]), sequence)


@pytest.mark.guarantee("megatron-files-order")
def test_multimodal_files_are_megatrons(tmp_path: Path) -> None:
    prefix = str(tmp_path / "m")
    with IndexedDatasetWriter(prefix, np.int32, multimodal=True) as writer:
        writer.add_item([1, 2, 3], mode=1)
        writer.add_item([4], mode=0)
        writer.end_document()
    theirs = oracle.IndexedDataset(prefix, multimodal=True)
    ours = IndexedDataset(prefix)
    assert ours.sequence_modes is not None
    assert ours.sequence_modes.tolist() == theirs.index.sequence_modes.tolist() == [1, 0]
    assert theirs[0][1] == ours[0][1] == 1


@pytest.mark.guarantee("megatron-files-order")
def test_merging_is_megatrons_bit_for_bit(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_random_pair(str(tmp_path / name), 30, 20, seed)
    with IndexedDatasetWriter(str(tmp_path / "ours"), np.uint16) as writer:
        writer.add_index(str(tmp_path / "a"))
        writer.add_index(str(tmp_path / "b"))
    oracle.merge_pairs(
        [str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "theirs"), np.uint16
    )
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()


def test_what_is_merged_is_not_mapped_and_may_be_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_pair(str(tmp_path / "a"), 30, 20, 1)
    tokens = (tmp_path / "a.bin").read_bytes()
    mapped = []

    def mapping(fd: int, size: int, path: str) -> object:
        mapped.append(path)
        return map_file(fd, size, path)

    monkeypatch.setattr("streammega.storage.backends.local.map_file", mapping)
    with IndexedDatasetWriter(str(tmp_path / "twice"), np.uint16) as writer:
        for _ in range(2):
            writer.add_index(str(tmp_path / "a"))
        for suffix in (".bin", ".idx"):
            (tmp_path / f"a{suffix}").unlink()
    assert (tmp_path / "twice.bin").read_bytes() == 2 * tokens
    assert str(tmp_path / "a.idx") in mapped
    assert str(tmp_path / "a.bin") not in mapped


CLOSED = "this writer is closed.*use a new writer"


@pytest.mark.parametrize("kind", ["bin", "zst"])
def test_a_writer_that_failed_says_so_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """A copy that ends in the middle (`bin`: of files; `zst`: of what was read) leaves tokens that no
    sequence has.
    """
    write_random_pair(str(tmp_path / "a"), 30, 20, 1)
    failure = ObjectChangedError("a.bin was replaced")

    def failing(*_: Any) -> Any:
        raise failure

    monkeypatch.setattr("streammega.dataset.checksums.read_files", failing)
    monkeypatch.setattr("streammega.storage.backends.local.LocalStore.fetch", failing)
    with IndexedDatasetWriter(str(tmp_path / "ours"), np.uint16, kind=kind) as writer:
        with pytest.raises(ObjectNotFoundError):
            writer.add_index(str(tmp_path / "nothing"))
        writer.add_item([1, 2])  # what was never begun harms nobody
        with pytest.raises(ObjectChangedError):
            writer.add_index(str(tmp_path / "a"))
        for call in (
            lambda: writer.add_item([1]),
            lambda: writer.add_index(str(tmp_path / "a")),
            lambda: writer.add_documents(iter([]), np.empty(0, np.int32), np.empty(0, np.int64)),
            writer.end_document,
            writer.finalize,
        ):
            with pytest.raises(FormatError, match=CLOSED):
                call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_stream_that_ends_early_is_not_published(tmp_path: Path) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"\1\0")
        raise OSError("the pipe broke")

    lengths = np.array([2], np.int32)
    with IndexedDatasetWriter(str(tmp_path / "ours"), np.uint16) as writer:
        with pytest.raises(OSError, match="the pipe broke"):
            writer.add_documents(pieces(), lengths, np.array([1]))
        with pytest.raises(FormatError, match=CLOSED):
            writer.add_item([1])
    assert not list(tmp_path.iterdir())


def test_slices_and_parts_read_just_those_tokens(pair: str) -> None:
    read = IndexedDataset(pair)
    every = [plain(read[i]) for i in range(len(read))]
    for low, high in ((0, 5), (190, 250), (7, 7), (-3, 200)):
        got = read[low:high]
        assert len(got) == len(every[low:high])
        for ours, expected in zip(got, every[low:high], strict=True):
            np.testing.assert_array_equal(plain(ours), expected)
    longest = int(np.argmax(read.sequence_lengths))
    np.testing.assert_array_equal(read.get(longest, 3, 10), every[longest][3:13])
    np.testing.assert_array_equal(read.get(longest, 5), every[longest][5:])
    np.testing.assert_array_equal(plain(read[-1]), every[-1])
    for bad in (200, -201):
        with pytest.raises(IndexError, match="of 200"):
            read[bad]
    with pytest.raises(IndexError, match="tokens"):
        read.get(longest, 0, 10_000)
    with pytest.raises(ValueError, match="contiguous"):
        read[::2]


def test_survives_pickling_and_names_either_suffix(pair: str) -> None:
    read = IndexedDataset(f"{pair}.idx")
    copy = pickle.loads(pickle.dumps(read))  # noqa: S301
    np.testing.assert_array_equal(plain(copy[7]), plain(read[7]))


def test_pairs_in_s3_by_both_transports(
    tmp_path: Path, s3_storage: StorageConfig, bucket: str
) -> None:
    url = f"s3://{bucket}/deep/pair"
    write_random_pair(str(tmp_path / "local"))
    with IndexedDatasetWriter(url, np.uint16, storage=s3_storage) as writer:
        writer.add_index(str(tmp_path / "local"))
    read = IndexedDataset(url, s3_storage.changed(cache_dir=tmp_path / "cache"))
    local = IndexedDataset(str(tmp_path / "local"))
    np.testing.assert_array_equal(read.sequence_lengths, local.sequence_lengths)
    for ours, expected in zip(read[0:200], local[0:200], strict=True):
        np.testing.assert_array_equal(plain(ours), plain(expected))
    np.testing.assert_array_equal(plain(read[3]), plain(local[3]))


# --- what is forged, truncated or foreign ---------------------------------------------------------------------------------


def forge(pair: str, at: int, data: bytes) -> None:
    path = Path(f"{pair}.idx")
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


HUGE = struct.pack("<Q", 2**60)
FORGERIES = {
    "magic": (0, b"NOTMEGA", "starts with"),
    "version": (9, struct.pack("<Q", 7), "version 7"),
    "dtype code": (17, b"\x63", "dtype code 99"),
    "sequence count": (18, HUGE, "header has 1152921504606846976 sequences"),
    "document count": (26, HUGE, "1152921504606846976 document bounds"),
    "no document bounds": (18, struct.pack("<QQ", 334, 0), "header has no document bounds"),
    "negative length": (34 + 4 * 5, struct.pack("<i", -3), "sequence 5 has the negative length -3"),
    "length past the end": (
        34 + 4 * 199,
        struct.pack("<i", 2**31 - 1),
        "sequence 199 is at bytes",
    ),
    "offset past the end": (34 + 800 + 8 * 7, struct.pack("<q", 2**62), "sequence 7 is at bytes"),
    "negative offset": (34 + 800 + 8 * 7, struct.pack("<q", -2), "sequence 7 is at bytes"),
    "offset inside a token": (34 + 800 + 8 * 7, struct.pack("<q", 3), "inside a 2-byte token"),
    "document bounds": (34 + 800 + 1600 + 8 * 200, struct.pack("<q", 12), "document bounds run"),
    "document order": (
        34 + 800 + 1600 + 8 * 3,
        struct.pack("<q", 100),
        "document bound 4 is before bound 3",
    ),
}


@pytest.mark.guarantee("6-sizes-header")
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_index_is_refused_by_name_and_without_allocating(pair: str, name: str) -> None:
    at, data, message = FORGERIES[name]
    forge(pair, at, data)
    with pytest.raises(FormatError, match=message) as caught:
        IndexedDataset(pair)
    assert f"{pair}.idx" in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "keep", "message"),
    [
        *((".idx", keep, r"pair\.idx") for keep in (0, 10, 33, 34, 1000)),
        (".bin", -2, "truncated or belongs to another"),
    ],
)
def test_a_truncated_file_is_refused(pair: str, suffix: str, keep: int, message: str) -> None:
    path = Path(pair + suffix)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FormatError, match=message):
        IndexedDataset(pair)


def test_missing_files_are_named(pair: str, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"nothing\.bin"):
        IndexedDataset(str(tmp_path / "nothing"))
    with pytest.raises(ObjectNotFoundError, match=rf"without the slash, {pair} names a dataset"):
        IndexedDataset(f"{pair}/")
    os.rename(f"{pair}.bin", f"{pair}.other")
    with pytest.raises(ObjectNotFoundError, match=r"pair\.bin: .* but its \.idx is there"):
        IndexedDataset(pair)
    os.rename(f"{pair}.other", f"{pair}.bin")
    os.unlink(f"{pair}.idx")
    with pytest.raises(ObjectNotFoundError, match=r"pair\.idx"):
        IndexedDataset(pair)


def test_a_foreign_object_is_refused_before_it_is_downloaded(pair: str, tmp_path: Path) -> None:
    foreign = b"x" * 50_000_000
    with http_server({"/a.bin": b"12", "/a.idx": foreign}) as server:
        with pytest.raises(FormatError, match="starts with"):
            IndexedDataset(f"{server.url}/a", storage=StorageConfig(cache_dir=tmp_path / "cache"))
        assert {span for _, path, span in server.requests if path == "/a.idx" and span} == {
            "bytes=0-8191"
        }


@pytest.mark.guarantee("6-sizes-header")
@given(data=st.binary(max_size=400))
def test_no_bytes_crash_the_parser(tmp_path_factory: Any, data: bytes) -> None:
    prefix = tmp_path_factory.mktemp("noise") / "p"
    Path(f"{prefix}.bin").write_bytes(b"\0" * 64)
    header = HEADER.pack(MAGIC, 1, 4, len(data) // 12, 0)
    for content in (data, header + data):
        Path(f"{prefix}.idx").write_bytes(content)
        with pytest.raises(FormatError):
            IndexedDataset(str(prefix))


# --- the writer -----------------------------------------------------------------------------------------------------------


TOO_LONG = r"2,147,483,648 tokens.*2,147,483,647"
NOT_WRITTEN: dict[str, tuple[Callable[[IndexedDatasetWriter], None], str]] = {
    "above the dtype": (lambda writer: writer.add_item([256]), "sequence 1 holds"),
    "below zero": (lambda writer: writer.add_item([-1]), "sequence 1 holds"),
    "a fraction": (lambda writer: writer.add_item([0.5]), "sequence 1 holds"),
    "too long": (lambda writer: writer.add_item(np.zeros(2**31, np.uint8)), TOO_LONG),
    "a document too long": (
        lambda writer: writer.add_document(np.zeros(2**31, np.uint8), [2**31]),
        TOO_LONG,
    ),
    "lengths of more tokens": (lambda writer: writer.add_document([1, 2], [1, 2]), "add up to 3"),
    "a length below zero": (lambda writer: writer.add_document([1], [2, -1]), "add up to 1"),
}


@pytest.mark.parametrize("case", NOT_WRITTEN)
def test_what_no_index_can_tell_is_refused_and_the_writer_goes_on(
    tmp_path: Path, case: str
) -> None:
    add, message = NOT_WRITTEN[case]
    with IndexedDatasetWriter(str(tmp_path / "p"), np.uint8) as writer:
        writer.add_item([1, 2])
        with pytest.raises(FormatError, match=message):
            add(writer)
        writer.end_document()
    assert len(IndexedDataset(str(tmp_path / "p"))) == 1


def test_a_document_that_was_not_ended_is_refused_before_anything_is_published(
    tmp_path: Path,
) -> None:
    writer = IndexedDatasetWriter(str(tmp_path / "d"), np.uint16)
    for number in range(2):
        writer.add_item([1, 2])
        with pytest.raises(FormatError, match=rf"from {number} on belong .*end_document\(\)"):
            writer.finalize()
        assert not list(tmp_path.glob("d.*"))
        writer.end_document()
    writer.finalize()
    assert IndexedDataset(str(tmp_path / "d")).document_indices.tolist() == [0, 1, 2]
    with (
        pytest.raises(FormatError, match="end_document"),
        IndexedDatasetWriter(str(tmp_path / "e"), np.uint16) as writer,
    ):
        writer.add_item([1, 2])
    with pytest.raises(FormatError, match="closed"):
        writer.end_document()
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("d.")]


@pytest.mark.guarantee("nothing-half-written")
def test_an_exception_leaves_no_half_written_pair(tmp_path: Path) -> None:
    def interrupted() -> None:
        with IndexedDatasetWriter(str(tmp_path / "p"), np.uint16) as writer:
            writer.add_item([1])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert list(tmp_path.iterdir()) == [] or {p.name for p in tmp_path.iterdir()} == {"xdg-cache"}


def test_a_finalize_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "p.idx").mkdir(parents=True)  # a former .idx that cannot be removed
    writer = IndexedDatasetWriter(str(folder / "p"), np.uint16)
    writer.add_item([1])
    writer.end_document()
    with pytest.raises(StorageError, match=r"p\.idx"):
        writer.finalize()
    assert [path.name for path in folder.iterdir()] == ["p.idx"]


@pytest.mark.guarantee("nothing-half-written")
def test_a_sigkill_leaves_nothing_under_the_final_name(tmp_path: Path, s3: S3, bucket: str) -> None:
    for name, prefix in (("disk", str(tmp_path / "p")), ("bucket", f"s3://{bucket}/p")):
        code = f"""
import numpy as np, streammega as sm, os
w = sm.IndexedDatasetWriter({prefix!r}, np.uint16)
for _ in range(40): w.add_item(np.zeros(1 << 20, np.uint16))
print("written", flush=True); import time; time.sleep(60)
"""
        (tmp_path / name).mkdir()
        process = launch(tmp_path / name, 1, ["-c", code], s3.environment)
        process.wait_for("written\n", 0)
        process.close()
        with pytest.raises(ObjectNotFoundError):
            IndexedDataset(prefix, s3.storage)


@pytest.mark.guarantee("5-shows-under")
def test_no_index_describes_another_bin_while_a_pair_is_replaced(
    pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streammega.storage.backends.local import LocalWriter

    writer = IndexedDatasetWriter(pair, np.uint16)
    writer.add_item([1, 2, 3])
    writer.end_document()
    commit = LocalWriter.commit

    def killed_after_bin(self: LocalWriter) -> None:
        commit(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalWriter, "commit", killed_after_bin)
    with pytest.raises(KeyboardInterrupt):
        writer.finalize()
    with pytest.raises(ObjectNotFoundError):
        IndexedDataset(pair)


@pytest.mark.guarantee("dtype-follows-vocabulary")
def test_dtype_by_vocabulary() -> None:
    assert smallest_dtype(65499) == np.uint16
    assert smallest_dtype(65500) == np.int32


# --- the local cache ------------------------------------------------------------------------------------------------------


def objects_of(pair: str) -> dict[str, bytes]:
    return {f"/p{suffix}": Path(f"{pair}{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def open_and_sum(url: str, cache: str, results: Any) -> None:
    """Put the tokens of a pair into a queue."""
    results.put(
        int(IndexedDataset(url, storage=StorageConfig(cache_dir=cache)).sequence_lengths.sum())
    )


@pytest.mark.guarantee("cache-local-disk")
def test_one_download_per_node_whatever_the_rank_count(pair: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with http_server(objects_of(pair)) as server:
        results = context.Queue()
        arguments = (f"{server.url}/p", str(tmp_path / "cache"), results)
        ranks = [context.Process(target=open_and_sum, args=arguments) for _ in range(3)]
        for rank in ranks:
            rank.start()
        sums = {results.get(timeout=60) for _ in ranks}
        for rank in ranks:
            rank.join()
        size = len(server.objects["/p.idx"])
        whole = [
            span
            for method, path, span in server.requests
            if path == "/p.idx" and span == f"bytes=0-{size - 1}"
        ]
    assert sums == {int(IndexedDataset(pair).sequence_lengths.sum())}
    assert len(whole) == 1, "the .idx was downloaded by more than one process"


def test_a_cached_index_is_used_again_and_refreshed_when_the_object_changed(
    pair: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with http_server(objects_of(pair)) as server:
        IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=cache))
        before = len([1 for m, p, span in server.requests if p == "/p.idx" and m == "GET"])
        IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=cache))
        again = [span for m, p, span in server.requests if p == "/p.idx" and m == "GET"][before:]
        assert again == ["bytes=0-8191"], "nothing but its beginning is read again"
        write_random_pair(pair, seed=9)
        server.objects = objects_of(pair)
        server.etags = {"/p.idx": "2", "/p.bin": "2"}
        fresh = IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=cache))
        np.testing.assert_array_equal(fresh.sequence_lengths, IndexedDataset(pair).sequence_lengths)
    assert len(list((cache / "idx").glob("*.idx"))) == 1, "the stale copy is removed"


@pytest.mark.guarantee("nothing-half-written")
def test_a_killed_download_is_not_believed(pair: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with http_server(objects_of(pair)) as server:
        code = f"""
import streammega.dataset.local_cache as c, time
real = c.write_atomically
def slow(path, chunks, size):
    def stuck():
        for chunk in chunks:
            yield chunk[: len(chunk) // 2]
            print("half", flush=True); time.sleep(60)
    real(path, stuck(), size)
c.write_atomically = slow
import streammega as sm
sm.IndexedDataset({server.url + "/p"!r}, storage=sm.StorageConfig(cache_dir={str(cache)!r}))
"""
        process = launch(tmp_path, 1, ["-c", code])
        process.wait_for("half\n", 0)
        process.close()
        began = time.monotonic()
        read = IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=cache))
        assert time.monotonic() - began < 30, "the dead process's lock was not freed"
        np.testing.assert_array_equal(read.sequence_lengths, IndexedDataset(pair).sequence_lengths)


def test_a_full_disk_under_the_cache_is_an_error_that_says_where(
    pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = tmp_path / "cache"
    with http_server(objects_of(pair)) as server:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(CacheError, match=r"No space left.*bytes wanted.*set cache_dir"):
                IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=cache))
        assert not [path for path in (cache / "idx").iterdir() if path.suffix != ".lock"], (
            "nothing half-written is left"
        )
        assert (
            len(IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=cache))) == 200
        ), "and it works once there is room"


def test_a_cache_that_cannot_be_made_is_an_error_that_says_where(pair: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with (
        http_server(objects_of(pair)) as server,
        pytest.raises(CacheError, match="set cache_dir"),
    ):
        IndexedDataset(f"{server.url}/p", storage=StorageConfig(cache_dir=blocked))
