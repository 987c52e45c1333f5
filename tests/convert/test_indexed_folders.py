"""Folders whose writer lists their files (MDS, litdata, save_to_disk of Hugging Face) are the files
on the list; folders of tables, whose log says which rows are left, are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from streammega import StorageConfig
from streammega.convert import ConvertOptions
from streammega.convert.read.inputs import SkippedFiles, find_inputs
from streammega.errors import ConvertError, ObjectNotFoundError
from tests.support.builders import convert_bytes, stored_texts, write_jsonl, write_parquet
from tests.support.data.make_peers import HERE as PEERS
from tests.support.data.make_peers import TEXTS
from tests.support.examples import examples
from tests.support.servers import S3

NOT_IN_INDEX = "next to shards whose index does not name them"
REPEATED = "other names of files that are read"


def counts_of(*items: str, storage: StorageConfig | None = None, **options: Any) -> dict[str, int]:
    """What is left out, by reason."""
    skipped = SkippedFiles()
    find_inputs(items, storage, ConvertOptions(**options), skipped)
    return skipped.counts


def texts_of(tmp_path: Path, *items: str, **options: Any) -> list[str]:
    """The documents of inputs."""
    convert_bytes(tmp_path / "out", *items, overwrite=True, **options)
    return stored_texts(tmp_path / "out")


def put_tree(root: Path, url: str) -> None:
    """Copy a folder into fsspec's memory."""
    fsspec.filesystem("memory").put(str(root), url.removeprefix("memory://"), recursive=True)


# --- MDS and litdata ------------------------------------------------------------------------------


def write_mds_shard(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    items = [np.array([len(text)], "<u4").tobytes() + text.encode() for text in texts]
    bounds = 4 * (2 + len(items)) + np.cumsum([0, *map(len, items)])
    path.write_bytes(np.array([len(items), *bounds], "<u4").tobytes() + b"".join(items))


def write_mds_index(folder: Path, *shards: str) -> None:
    columns = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
    listed = [
        {"format": "mds", "raw_data": {"basename": name}, "zip_data": None, **columns}
        for name in shards
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))


def write_merged_mds(root: Path, *, keep_parts: bool = True) -> str:
    """What `merge_index` of mosaicml-streaming leaves of two folders, whose parts it keeps or not."""
    for name in ("00", "01"):
        write_mds_shard(root / name / "shard.00000.mds", f"{name} first", f"{name} second")
        if keep_parts:
            write_mds_index(root / name, "shard.00000.mds")
    write_mds_index(root, "00/shard.00000.mds", "01/shard.00000.mds")
    return str(root)


MERGED = ["00 first", "00 second", "01 first", "01 second"]


@pytest.mark.parametrize("pattern", ["", "/", "/**", "/*", "/**/index.json", "/index.json"])
@pytest.mark.guarantee("everything-found-below")
def test_an_index_of_subfolders_counts_and_not_those_in_them(pattern: str, tmp_path: Path) -> None:
    root = write_merged_mds(tmp_path / "in")
    assert texts_of(tmp_path, root + pattern) == MERGED
    put_tree(tmp_path / "in", f"memory:/{tmp_path}/in")
    assert texts_of(tmp_path, f"memory:/{root}{pattern}") == MERGED


def test_partial_indices_are_counted_and_shards_of_subfolders_belong_to_the_whole(
    tmp_path: Path,
) -> None:
    root = write_merged_mds(tmp_path / "in")
    assert counts_of(root) == {NOT_IN_INDEX: 2}
    bare = write_merged_mds(tmp_path / "bare", keep_parts=False)
    assert counts_of(bare) == {}
    assert texts_of(tmp_path, bare) == MERGED
    # an index of indices, which were merged before
    (tmp_path / "above").mkdir()
    shutil.move(root, tmp_path / "above" / "in")
    write_mds_index(tmp_path / "above", "in/00/shard.00000.mds", "in/01/shard.00000.mds")
    assert texts_of(tmp_path, str(tmp_path / "above")) == MERGED


def test_a_shell_that_names_the_whole_and_its_parts_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_merged_mds(tmp_path / "in")
    for names in (("00", "01", "index.json"), ("index.json", "01"), ("", "00")):
        items = [os.path.join(root, name) for name in names]
        assert texts_of(tmp_path, *items) == MERGED
        assert REPEATED in counts_of(*items)
    assert texts_of(tmp_path, f"{root}/01", f"{root}/00") == MERGED[2:] + MERGED[:2]
    monkeypatch.chdir(root)
    for items in (["00", "01", "index.json"], ["*"], ["."], ["index.json", "00/"]):
        assert texts_of(tmp_path, *items) == MERGED


def test_shards_that_no_index_names_are_counted_and_other_datasets_below_are_read(
    tmp_path: Path,
) -> None:
    root = write_merged_mds(tmp_path / "in")
    write_mds_shard(tmp_path / "in/00/shard.00001.mds", "written later")
    write_mds_shard(tmp_path / "in/other/shard.00000.mds", "another dataset")
    write_mds_index(tmp_path / "in/other", "shard.00000.mds")
    assert counts_of(root) == {NOT_IN_INDEX: 3}
    assert texts_of(tmp_path, root) == [*MERGED, "another dataset"]


def write_parquet_index(folder: Path, *names: str) -> None:
    """What `index_parquet_dataset` of litdata writes next to Parquet files."""
    config = {"data_format": ["String"], "data_spec": None, "item_loader": "ParquetLoader"}
    chunks = [{"filename": name, "chunk_size": 1, "chunk_bytes": 1, "dim": None} for name in names]
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


@pytest.mark.parametrize("item", ["", "/*", "/index.json"])
@pytest.mark.guarantee("everything-found-below")
def test_parquet_files_that_litdata_lists_are_read_as_such(item: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b", "later"):
        write_parquet(folder / f"{name}.parquet", [f"text of {name}"])
    write_parquet_index(folder, "a.parquet", "b.parquet")
    assert texts_of(tmp_path, f"{folder}{item}") == ["text of a", "text of b"]
    if not item:
        assert counts_of(str(folder)) == {NOT_IN_INDEX: 1}
    write_parquet_index(folder, "a.parquet", "gone.parquet")
    with pytest.raises(ObjectNotFoundError, match=r"gone\.parquet: is not there, .*lists it"):
        find_inputs([f"{folder}{item}"])
    write_parquet_index(folder, "../in/a.parquet")
    with pytest.raises(ConvertError, match="which is outside of the folder"):
        find_inputs([f"{folder}{item}"])


def test_a_damaged_table_in_a_chunk_of_litdata_is_a_fault_of_the_chunk(tmp_path: Path) -> None:
    shutil.copytree(PEERS / "litdata_rows", tmp_path / "in")
    chunk = tmp_path / "in/chunk-0-0.bin"
    data = chunk.read_bytes()
    (tmp_path / "z.txt").write_text("last")
    inputs = [str(tmp_path / "in"), str(tmp_path / "z.txt")]
    for damaged in (data[:-12] + bytes(4) + data[-8:], data[:200] + bytes(400) + data[600:]):
        chunk.write_bytes(damaged)
        report = convert_bytes(tmp_path / "out", *inputs, on_error="skip", overwrite=True)
        assert report.dropped == {"unreadable record": len(TEXTS)}
        assert stored_texts(tmp_path / "out") == ["last"]
        with pytest.raises(ConvertError, match=r"chunk-0-0\.bin: cannot be read"):
            convert_bytes(tmp_path / "out", *inputs, overwrite=True)


@pytest.mark.parametrize("item", ["", "/*.bin", "/chunk-0-0.bin"])
def test_chunks_of_litdata_without_their_index_are_no_raw_ids(item: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.arange(40, dtype="<u2").tofile(tmp_path / "in/chunk-0-0.bin")
    (tmp_path / "in/0.index.json").write_text('{"chunks": [], "config": {}}')
    with pytest.raises(ConvertError, match=r"chunk-0-0\.bin'?: .*litdata.*index\.json"):
        find_inputs([f"{tmp_path}/in{item}"])


# --- save_to_disk of the datasets library ---------------------------------------------------------


def write_arrow(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def write_saved(folder: Path, *texts: str) -> str:
    """A folder of `save_to_disk`, a file for each text, and caches that `map` left in it later."""
    names = [f"data-{number:05d}-of-{len(texts):05d}.arrow" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        write_arrow(folder / name, text)
    write_arrow(folder / "cache-3a5455ed79103799.arrow", "mapped")
    write_arrow(folder / "cache-bb5e2986ff816975_00000_of_00002.arrow", "mapped by two processes")
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return str(folder)


@pytest.mark.parametrize("pattern", ["", "/*.arrow", "/*", "/**/*.arrow"])
@pytest.mark.guarantee("everything-found-below")
def test_what_was_saved_to_disk_are_the_files_of_its_list(pattern: str, tmp_path: Path) -> None:
    root = write_saved(tmp_path / "in", "one", "two", "three")
    write_arrow(tmp_path / "in/data-00003-of-00004.arrow", "of an earlier save")
    assert texts_of(tmp_path, root + pattern) == ["one", "two", "three"]
    assert counts_of(root + pattern)[NOT_IN_INDEX] >= 3
    put_tree(tmp_path / "in", f"memory:/{tmp_path}/in")
    assert texts_of(tmp_path, f"memory:/{root}{pattern}") == ["one", "two", "three"]


def test_caches_that_a_shell_names_with_saved_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_saved(tmp_path / "in", "one", "two")
    other = write_saved(tmp_path / "other", "three")
    paths = sorted(Path(root).glob("*.arrow"))
    put_tree(tmp_path / "in", f"memory:/{tmp_path}/in")
    monkeypatch.chdir(root)
    for items in (map(str, paths), [path.name for path in paths], [f"memory:/{p}" for p in paths]):
        with pytest.raises(
            ConvertError, match=rf"cache-\w+\.arrow': is {NOT_IN_INDEX}; name its folder"
        ):
            texts_of(tmp_path, *items)
    listed = [f"{root}/data-00001-of-00002.arrow", f"{other}/data-00000-of-00001.arrow"]
    assert texts_of(tmp_path, *listed) == ["two", "three"]


def test_a_listed_file_that_is_lost_is_an_error_and_one_that_is_excluded_is_none(
    tmp_path: Path,
) -> None:
    root = write_saved(tmp_path / "in", "one", "two")
    lost = "data-00001-of-00002.arrow"
    assert texts_of(tmp_path, root, exclude=("data-00001*",)) == ["one"]
    assert texts_of(tmp_path, f"{root}/data-00001*") == ["two"]
    (tmp_path / "in" / lost).unlink()
    with pytest.raises(ObjectNotFoundError, match=rf"{lost}: is not there, .*state\.json"):
        find_inputs([root])


def test_rows_that_a_list_of_indices_chooses_are_refused(tmp_path: Path) -> None:
    root = write_saved(tmp_path / "in", "one")
    state = json.loads((tmp_path / "in/state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "in/state.json").write_text(json.dumps(state))
    with pytest.raises(
        ConvertError, match=r"/in: a list of indices chooses its rows.*save it again"
    ):
        find_inputs([root])


def test_splits_of_a_dataset_dict_are_those_that_it_lists(tmp_path: Path) -> None:
    for name in ("train", "train_sft", "poems", "stale"):
        write_saved(tmp_path / "in" / name, f"text of {name}")
    root = str(tmp_path / "in")
    (tmp_path / "in/dataset_dict.json").write_text('{"splits": ["train", "train_sft", "poems"]}')
    with pytest.raises(ConvertError, match=r"several splits .*poems: .*train: .*train_sft: "):
        find_inputs([root])
    for split in ("train", "train_sft", "poems"):
        for item in (root, f"{root}/*/*.arrow"):
            assert texts_of(tmp_path, item, hf_split=split) == [f"text of {split}"]
    with pytest.raises(ConvertError, match="no input is of split 'stale'"):
        find_inputs([root], options=ConvertOptions(hf_split="stale"))
    assert len(texts_of(tmp_path, root, hf_split="all")) == 3
    assert texts_of(tmp_path, f"{root}/stale") == ["text of stale"]
    (tmp_path / "in/dataset_dict.json").write_text('{"splits": ["poems"]}')
    assert texts_of(tmp_path, root) == ["text of poems"]


def test_caches_in_the_cache_of_the_datasets_library_are_no_documents(tmp_path: Path) -> None:
    write_saved(tmp_path / "in")
    (tmp_path / "in/state.json").unlink()
    write_arrow(tmp_path / "in/text-train.arrow", "one")
    assert texts_of(tmp_path, str(tmp_path / "in")) == ["one"]


def test_lists_of_other_programs_leave_nothing_out(tmp_path: Path) -> None:
    states = ["[1]", "broken", '{"_data_files": 1}', '{"_data_files": ["a"]}', "{}"]
    for number, state in enumerate(states):
        write_arrow(tmp_path / f"{number}/a.arrow", f"text {number}")
        (tmp_path / f"{number}/state.json").write_text(state)
    folders = [f"{tmp_path}/{number}" for number in range(5)]
    assert len(texts_of(tmp_path, *folders, exclude=("state.json",))) == 5


# --- tables ---------------------------------------------------------------------------------------


def write_table(folder: Path, log: str, data: str = "") -> str:
    """A folder of a table, with a file of its log and rows that the log may have deleted."""
    (folder / log).parent.mkdir(parents=True)
    (folder / log).write_text("{}")
    (folder / data).mkdir(parents=True, exist_ok=True)
    write_parquet(folder / data / "part-0.parquet", ["deleted long ago"])
    return str(folder)


TABLES = {
    "Delta Lake": ("_delta_log/00000000000000000000.json", ""),
    "Delta Lake, partitions": ("_delta_log/00000000000000000000.json", "year=2026/lang=en"),
    "Hudi": (".hoodie/hoodie.properties", "2026/11"),
    "Iceberg": ("metadata/00000-68c76a87.metadata.json", "data"),
    "Iceberg, hashed": ("metadata/v3.metadata.json", "data/4f/lang=en"),
    "Iceberg, packed": ("metadata/00000-68c76a87.gz.metadata.json", "data"),
    "Spark Structured Streaming": ("_spark_metadata/0", ""),
    "Paimon": ("snapshot/snapshot-1", "bucket-0"),
    "Paimon, partitions": ("snapshot/LATEST", "dt=2026/bucket-11"),
}


def spellings(root: str, data: str) -> list[str]:
    """Names that lead to the data of a table in root/t."""
    inside = os.path.join(root, "t", data).rstrip("/")
    deep = ["", "/t", "/**", "/**/*.parquet", "/*/**/part-*"]
    return [f"{root}{name}" for name in deep] + [inside, f"{inside}/*", f"{inside}/part-0.parquet"]


def check_refused(item: str, name: str, log: str, storage: StorageConfig | None = None) -> None:
    message = (
        rf"/t: is a table of {name.partition(',')[0]} by its {log.partition('/')[0]}, .*export"
    )
    for exclude in ((), ("*.json", os.path.dirname(log))):
        with pytest.raises(ConvertError, match=message):
            find_inputs([item], storage, ConvertOptions(exclude=exclude))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.guarantee("everything-found-below")
def test_tables_are_refused_by_their_format_wherever_one_looks(name: str, tmp_path: Path) -> None:
    log, data = TABLES[name]
    write_table(tmp_path / "in/t", log, data)
    for item in spellings(f"{tmp_path}/in", data):
        check_refused(item, name, log)


@pytest.mark.parametrize(
    "folder", ["base_0000001", "delta_0000002_0000002", "delete_delta_0000003_0000003_0000"]
)
@pytest.mark.guarantee("everything-found-below")
def test_tables_of_hive_are_refused_by_the_folders_of_their_transactions(
    folder: str, tmp_path: Path
) -> None:
    (tmp_path / "in/t/base_1").mkdir(parents=True)  # no name of Hive
    write_parquet(tmp_path / "in/t/base_1/part-0.parquet", ["a"])
    assert texts_of(tmp_path, f"{tmp_path}/in") == ["a"]
    (tmp_path / "in/t" / folder).mkdir()
    write_parquet(tmp_path / "in/t" / folder / "part-0.parquet", ["deleted long ago"])
    for item in ("in", "in/t", f"in/t/{folder}", f"in/t/{folder}/part-0.parquet", "in/**/part-*"):
        with pytest.raises(
            ConvertError, match=rf"/t: is a table of Hive by its {folder}, .*export"
        ):
            find_inputs([f"{tmp_path}/{item}"])


@pytest.mark.many_examples
def test_tables_in_buckets_are_refused(
    tmp_path: Path, bucket: str, s3: S3, s3_storage: StorageConfig
) -> None:
    """By their folder, and each by another one of the spellings that disks are tested with."""
    for number, name in enumerate(TABLES):
        log, data = TABLES[name]
        folder = tmp_path / str(number)
        write_table(folder / "t", log, data)
        for path in filter(Path.is_file, folder.rglob("*")):
            key = str(path.relative_to(tmp_path))
            s3.client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
        named = spellings(f"s3://{bucket}/{number}", data)
        for item in {named[0], *(named * 2)[number % len(named) :][: examples(1)]}:
            check_refused(item, name, log, s3_storage)


def test_a_table_is_found_by_any_spelling_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "t", "metadata/v1.metadata.json", "data")
    (tmp_path / "link").symlink_to("t/data")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/deep").symlink_to("../t/data")
    monkeypatch.chdir(tmp_path / "t/data")
    for item in (".", "*.parquet", "part-0.parquet", f"{tmp_path}/link", f"{tmp_path}/other"):
        with pytest.raises(ConvertError, match="is a table of Iceberg"):
            find_inputs([item])


def test_what_lies_beside_tables_is_read(tmp_path: Path) -> None:
    write_table(tmp_path / "in/t", "_delta_log/0.json")
    write_jsonl(tmp_path / "in/a.jsonl", [{"text": "a"}])
    write_parquet(tmp_path / "in/b.parquet", ["b"])
    (tmp_path / "in/metadata").mkdir()
    write_parquet(tmp_path / "in/metadata/c.parquet", ["c"])
    # names that only look like those of a table
    write_jsonl(tmp_path / "in/metadata/schema.json", [{"text": "d"}])
    root = str(tmp_path / "in")
    assert texts_of(tmp_path, root, exclude=("t",)) == ["a", "b", "c", "d"]
    assert texts_of(tmp_path, root, include=("?.jsonl", "[bc].parquet")) == ["a", "b", "c"]


def test_what_a_job_of_spark_did_not_commit_is_no_document(tmp_path: Path) -> None:
    names = [
        "part-0.parquet",
        "_temporary/0/task_1/part-0.parquet",
        "year/_temporary/0/part-1.parquet",
    ]
    for number, name in enumerate(names):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        write_parquet(tmp_path / "in" / name, [f"text {number}"])
    root = str(tmp_path / "in")
    assert texts_of(tmp_path, root) == ["text 0"]
    assert counts_of(root) == {"hidden": 2}
