"""Columns of datasets that are converted: every value stays with its token, and what cannot be carried
is refused.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import Column, IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.cli.main import main
from streammega.convert import convert, job
from streammega.convert.conversion import Conversion
from streammega.convert.read.inputs import SkippedFiles, find_inputs
from streammega.convert.write import columns as write_columns
from streammega.convert.write import publish
from streammega.convert.write.gc import find_leftovers
from streammega.dataset.manifest import read_manifest
from streammega.dataset.verify import verify
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from streammega.storage import object_ops, open_store
from streammega.storage.backends.local import LocalWriter
from tests.support.builders import write_dataset
from tests.support.columns import SALT, add_column, change_entry, hashed
from tests.support.examples import examples

COLUMNS = {"weight": Column("float16", fill=-math.inf), "teacher": Column("uint16", 3)}
ROOM = 1 << 16
"""Ids of a dataset: token t of dataset d has the id d * ROOM + t + 1."""


def put(prefix: Path, number: int, sizes: list[int], columns: Any = COLUMNS) -> str:
    """A pair of documents of so many tokens, each with an id of its own, and its columns."""
    first = number * ROOM + 1
    ends = np.cumsum(sizes)
    ids = [
        np.arange(first + end - size, first + end) for size, end in zip(sizes, ends, strict=True)
    ]
    write_dataset(prefix, ids, np.int32)
    for name, column in columns.items():
        add_column(prefix, name, column, shards=[number])
    return str(prefix)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return put(tmp_path / "in" / "web", 0, [5, 7, 3])


@pytest.mark.parametrize("name", ["in/", "in/web*", "in/web", "in/web.idx", "in/web.manifest.json"])
def test_columns_belong_to_their_shards(pair: str, tmp_path: Path, name: str) -> None:
    add_column(pair, "old", COLUMNS["weight"], digest="0ab1")
    job = tmp_path / "in" / "web.col-job-1"
    job.mkdir()
    (job / "0-8-0of1").write_bytes(b"x")
    skipped = SkippedFiles()
    (item,) = find_inputs(f"{tmp_path}/{name}", skipped=skipped)
    assert item.format == "megatron"
    assert not skipped.counts.keys() & {"of unknown suffix", "columns without their shards"}
    if name.endswith(("/", "*")):
        assert {Path(part).name for part in item.parts} > {"web.col-weight", "web.col-old.0ab1"}


def test_columns_without_their_shards_are_counted(pair: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "lost.col-weight").write_bytes(b"x")
    skipped = SkippedFiles()
    find_inputs(f"{tmp_path}/in/", skipped=skipped)
    assert skipped.names == {"of unknown suffix": [f"{tmp_path}/in/lost.col-weight"]}


@pytest.mark.parametrize("words", [[], ["--shuffle"], ["--format", "zst"]])
def test_columns_are_left_out_if_that_is_asked_for(
    pair: str, tmp_path: Path, words: list[str]
) -> None:
    output = str(tmp_path / "out")
    assert main(["convert", pair, output, "--drop-columns", *words]) == 0
    assert not IndexedDataset(output + ("" if "zst" not in words else ".bin.zst")).columns


@pytest.mark.guarantee("columns-carried-along")
def test_a_merge_of_datasets_of_which_one_lacks_a_column_names_it(
    pair: str, tmp_path: Path
) -> None:
    other = put(tmp_path / "in" / "code", 1, [4], {"teacher": COLUMNS["teacher"]})
    with pytest.raises(ConvertError, match=r"code: has no column 'weight', and .*web has it"):
        convert([pair, other], tmp_path / "out")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ConvertError, match=r"text\.txt: has no column 'weight'"):
        convert([pair, str(tmp_path / "text.txt")], tmp_path / "out", tokenizer="bytes")
    convert([pair, other], tmp_path / "out", drop_columns=True)
    assert not list(tmp_path.glob("out*.col-*"))


@pytest.mark.parametrize(
    "other", [Column("float32"), Column("float16", 2), Column("float16", align="tokens")]
)
def test_a_merge_of_columns_that_differ_names_both(
    pair: str, tmp_path: Path, other: Column
) -> None:
    columns = {"weight": other, "teacher": COLUMNS["teacher"]}
    code = put(tmp_path / "in" / "code", 1, [4], columns)
    with pytest.raises(
        ConvertError, match=r"code: its column 'weight' is \d x float.*that of .*web is"
    ):
        convert([pair, code], tmp_path / "out")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_column_of_another_length_than_the_tokens_is_refused(
    pair: str, tmp_path: Path, change: int
) -> None:
    path = Path(f"{pair}.col-weight")
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    with pytest.raises(FormatError, match=r"col-weight: has \d+ bytes, and 15 tokens"):
        convert([pair], tmp_path / "out")
    path.unlink()
    with pytest.raises(ObjectNotFoundError, match=r"col-weight: no such object"):
        convert([pair], tmp_path / "out")


def test_a_damaged_entry_is_no_reason_to_drop_columns(pair: str, tmp_path: Path) -> None:
    change_entry(pair, "weight", {"width": 0})
    with pytest.raises(FormatError, match="damaged manifest"):
        convert([pair], tmp_path / "out")


def check(output: str, columns: Any = COLUMNS) -> int:
    """Whether every value of the output is that of the first token with its id, and padding has the
    fill. Returns the tokens that are no padding.
    """
    indexed = IndexedDataset(output, columns=list(columns))
    (bin_file,) = [indexed.store.read(indexed.bin_key, [(0, indexed.bin_info.size)])[0]]
    ids = np.frombuffer(bin_file, indexed.dtype.newbyteorder("<")).astype(np.int64)
    dataset, token = np.divmod(ids - 1, ROOM)
    is_padding = ids == 0
    for name, column in columns.items():
        (stored,) = indexed.column(name).read([(0, len(ids))])
        expected = hashed(dataset * SALT + token, column)
        fill = np.full(column.width or 1, column.fill or 0, column.dtype).view(np.uint8)
        expected[is_padding] = fill
        assert np.array_equal(stored, expected), name
    return int((~is_padding).sum())


WAYS: dict[str, dict[str, Any]] = {
    "merge": {},
    "shards": {"shard_bytes": 400},
    "zst": {"format": "zst"},
    "tar": {"format": "tar", "shard_bytes": 400},
    "wider": {"dtype": "int64"},
    "shuffle": {"shuffle_seed": 3},
    "shuffled shards": {"shuffle_seed": 3, "shard_bytes": 400},
    "pack": {"pack_length": 32},
    "pack shuffled": {"pack_length": 16, "shuffle_seed": 5, "shard_bytes": 900},
    "pack drop": {"pack_length": 8, "pack_overflow": "drop", "format": "zst"},
    "cut": {"max_tokens": 6},
    "short ones": {"min_tokens": 4, "shuffle_seed": 2},
    "modes": {"keep_modes": (1,), "loss_modes": (1,)},
}
LOSSLESS = ("merge", "shards", "zst", "tar", "wider", "shuffle", "shuffled shards", "pack")


def put_sequences(
    prefix: Path, number: int, sizes: list[list[int]], copied: list[list[int]] | None = None
) -> str:
    """A pair of documents of sequences of so many tokens, with modes; then one of each of `copied`, which
    are the ids of other documents.
    """
    first = number * ROOM + 1
    with IndexedDatasetWriter(str(prefix), np.int32, multimodal=True) as writer:
        for lengths in sizes:
            ids = np.arange(first, first + sum(lengths))
            writer.add_document(ids, lengths, [place % 2 for place in range(len(lengths))])
            first += sum(lengths)
        for document in copied or ():
            writer.add_document(document, [len(document)], [0])
    # Their order differs from one dataset to the next.
    for name in list(COLUMNS)[:: -1 if number % 2 else 1]:
        add_column(prefix, name, COLUMNS[name], shards=[number])
    return str(prefix)


SIZES = st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=8)


@pytest.mark.many_examples
@pytest.mark.guarantee("columns-carried-along")
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(2), deadline=None)
@given(data=st.data())
def test_every_value_stays_with_its_token_through_two_conversions(
    way: str, data: st.DataObject
) -> None:
    with TemporaryDirectory() as root, ExitStack() as stack:
        # Several chunks, segments and units of a few documents.
        chunk = data.draw(st.sampled_from([7, 64, 1 << 20]))
        stack.enter_context(patch.object(write_columns, "CHUNK_BYTES", chunk))
        stack.enter_context(patch.object(job, "SEGMENT_BYTES", data.draw(st.integers(200, 4000))))
        stack.enter_context(patch.object(job, "MAX_UNIT_BYTES", data.draw(st.integers(400, 4000))))
        folder = Path(root) / "in"
        # Without sequences an .idx does not tell whether it has modes.
        sizes = [[[5, 2], *data.draw(SIZES)] for _ in range(data.draw(st.integers(1, 3)))]
        inputs = [put_sequences(folder / f"d{n}", n, each) for n, each in enumerate(sizes)]
        tokens = sum(sum(map(sum, each)) for each in sizes)
        name = inputs
        for step, chosen in enumerate((way, data.draw(st.sampled_from(list(WAYS))))):
            output = str(Path(root) / f"out{step}")
            try:
                convert(name, output, **WAYS[chosen], workers=1)
            except ConvertError as error:
                if "hold no text and no tokens" not in str(error):
                    raise
                return
            name = [f"{output}.manifest.json"]
            rest = check(name[0])
            if not rest:
                return  # all were longer than a bin
            assert verify(name[0], columns=True).problems == []
            assert rest == tokens or chosen not in LOSSLESS
            tokens = rest
            if "pack_length" not in WAYS[chosen] and data.draw(st.booleans()):
                name = [f"{output}*"]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle_seed": 1, "shard_bytes": 300}, {"pack_length": 16}]
)
def test_of_equal_documents_the_values_of_the_first_stay(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    sizes = [[3, 4], [9], [1], [5, 0, 2]]
    first = put_sequences(tmp_path / "a", 0, sizes)
    indexed = IndexedDataset(first)
    copied = [indexed[2][0].tolist(), indexed[3][0].tolist()]
    second = put_sequences(tmp_path / "b", 1, [[2], [8]], copied)
    convert([first, second], tmp_path / "out", dedup=True, workers=1, **options)
    assert check(f"{tmp_path}/out.manifest.json") == 24 + 10


@pytest.mark.guarantee("columns-carried-along")
def test_workers_change_no_byte_of_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = [
        put(tmp_path / "in" / f"d{number}", number, rng.integers(0, 20, 60).tolist())
        for number in range(3)
    ]
    for number, count in enumerate((1, 3)):
        convert(inputs, tmp_path / f"{number}" / "out", workers=count, **WAYS["pack shuffled"])
    files = [sorted((tmp_path / f"{number}").iterdir()) for number in range(2)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    assert any(".col-teacher" in path.name for path in files[0])
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_columns_are_resumed_replaced_and_removed_with_their_shards(
    pair: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    convert([pair], output, workers=1)
    assert {path.name for path in tmp_path.glob("out*")} == {
        "out.bin", "out.idx", "out.manifest.json", "out.col-weight", "out.col-teacher",
    }  # fmt: skip
    other = put(tmp_path / "in" / "code", 1, [4, 4])
    convert([pair, other], output, workers=1, overwrite=True)
    assert check(f"{output}.manifest.json") == 23
    names = {path.name for path in tmp_path.glob("out*")}
    assert len(names) == 5
    assert not names & {"out.bin", "out.col-weight", "out.col-teacher"}
    assert main(["gc", str(output), "--json"]) == 0
    convert([pair], output, workers=1, overwrite=True, drop_columns=True)
    assert not list(tmp_path.glob("out*.col-*"))


def test_a_column_that_changes_makes_another_conversion(pair: str, tmp_path: Path) -> None:
    options: Any = {"workers": 1, "shuffle_seed": 1, "work_dir": str(tmp_path / "work")}
    with patch.object(Conversion, "publish", side_effect=OSError("killed")), pytest.raises(OSError):
        convert([pair], tmp_path / "out", **options)
    path = Path(f"{pair}.col-weight")
    changed = bytes(len(path.read_bytes()))
    path.write_bytes(changed)
    convert([pair], tmp_path / "out", **options)
    assert (tmp_path / "out.col-weight").read_bytes() == changed


def test_columns_go_to_a_bucket_and_back(
    pair: str, tmp_path: Path, s3_storage: StorageConfig, bucket: str
) -> None:
    other = put(tmp_path / "in" / "code", 1, [4, 4])
    url = f"s3://{bucket}/web"
    options: Any = {"workers": 1, "storage": s3_storage}
    convert([pair, other], url, shard_bytes=20, input_storage=StorageConfig(), **options)
    manifest = read_manifest(f"{url}.manifest.json", s3_storage)
    files = [file for column in manifest.columns for file in column.files]
    assert all(file and file.etag and file.checksums for file in files)
    assert verify(url, s3_storage, columns=True).problems == []
    assert find_leftovers(url, s3_storage) == []
    convert([url], tmp_path / "out", shuffle_seed=3, workers=1, input_storage=s3_storage)
    assert check(f"{tmp_path}/out.manifest.json") == 23
    before = {str(file and file.name) for file in files}
    convert([pair], url, overwrite=True, input_storage=StorageConfig(), **options)
    store, key = open_store(f"{url}/", s3_storage)
    now = {info.key.rpartition("/")[2] for info in store.list(key.removesuffix("web/"))}
    assert not now & before
    assert verify(url, s3_storage, columns=True).problems == []


class KilledError(BaseException):
    """The end of a process."""


@pytest.mark.guarantee("columns-carried-along")
def test_a_conversion_that_is_killed_at_any_write_goes_on_to_the_same_bytes(
    pair: str, tmp_path: Path
) -> None:
    other = put(tmp_path / "in" / "code", 1, [4, 4])
    options: Any = {"workers": 1, "shuffle_seed": 3, "shard_bytes": 40}

    def run(folder: Path, kill_at: int) -> int:
        """Convert, and end at the write of a number. Returns how many of these there were."""
        writes = 0

        def counted(function: Any) -> Any:
            def call(*arguments: Any) -> Any:
                nonlocal writes
                writes += 1
                if writes == kill_at:
                    raise KilledError
                return function(*arguments)

            return call

        commit = counted(LocalWriter.commit)
        move = counted(object_ops.move_or_copy)
        with (
            patch.object(LocalWriter, "commit", commit),
            patch.object(publish, "move_or_copy", move),
        ):
            convert([pair, other], folder / "out", **options)
        return writes

    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    writes = run(tmp_path / "whole", 0)
    whole = files(tmp_path / "whole")
    assert writes > 40
    for kill_at in range(1, writes + 1, 4):
        folder = tmp_path / f"killed{kill_at}"
        with pytest.raises(KilledError):
            run(folder, kill_at)
        run(folder, 0)
        assert files(folder) == whole, kill_at
