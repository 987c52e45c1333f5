"""Keys within records, text as bytes, nulls and lists of sentences: from JSON, Parquet and Arrow
alike.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import IndexedDataset, StorageConfig
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.fields import MISSING, texts_at, value_at
from streammega.convert.read.formats import read_slice
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.convert.read.tables import token_lists
from streammega.errors import ConvertError
from tests.support.builders import (
    convert_bytes,
    convert_files,
    stored_ids,
    stored_texts,
    write_jsonl,
)


def table(path: Path, rows: list[Any], schema: pa.Schema | None = None) -> str:
    made = pa.Table.from_pylist(rows, schema)
    if path.suffix == ".parquet":
        pq.write_table(made, path, row_group_size=3)
    else:
        pyarrow.feather.write_feather(made, path, chunksize=3)
    return str(path)


def written(path: Path, rows: list[Any]) -> str:
    return write_jsonl(path, rows) if path.suffix == ".jsonl" else table(path, rows)


IDS = [{"input_ids": [n, n + 1], "attention_mask": [1, 1], "n": n} for n in range(4)]


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_columns_of_token_ids_are_named_with_what_reads_them(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, IDS)
    with pytest.raises(ConvertError, match=r"--text-key input_ids reads the token ids there"):
        convert_files(tmp_path / "out", path)
    convert_files(tmp_path / "out", path, text_key="input_ids")
    assert stored_ids(tmp_path / "out") == [row["input_ids"] for row in IDS]
    path = written(tmp_path / f"plain-{name}", [{"body": "text", "n": 1}])
    with pytest.raises(ConvertError, match=r"name it with --text-key$"):
        convert_files(tmp_path / "plain", path)
    path = written(tmp_path / f"deep-{name}", [{"row": {"mask": [1], "tokens": [1]}}])
    with pytest.raises(ConvertError, match=r"--text-key row\.tokens reads the token ids there"):
        convert_files(tmp_path / "deep", path)


def test_arrays_of_a_record_are_named_as_token_ids() -> None:
    record = {"mask": np.ones(2, np.int8), "tokens": np.arange(2)}
    with pytest.raises(ConvertError, match="--text-key tokens reads the token ids there"):
        texts_at(record, "text", "shard#1")


@pytest.mark.parametrize("key", ["text", "input_ids"])
def test_token_ids_in_json_are_not_read_and_the_error_says_what_is(
    key: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "in.jsonl", IDS)
    with pytest.raises(ConvertError, match=r"in\.jsonl:1: .*token ids.* in Parquet"):
        convert_bytes(tmp_path / "out", path, text_key=key)


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl"])
def test_a_chat_without_messages_is_not_told_to_name_a_text(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, [{"body": "text"}])
    with pytest.raises(ConvertError, match="'messages'") as caught:
        convert_bytes(tmp_path / "out", path, chat=True)
    assert "--text-key" not in str(caught.value)


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.arrow"])
def test_keys_lead_into_records(name: str, tmp_path: Path) -> None:
    rows = [
        {"id": n, "meta": {"lang": "en", "deep": {"text": f"text {n}"}, "answer": f"answer {n}"}}
        for n in range(8)
    ]
    path = written(tmp_path / name, rows)
    convert_bytes(tmp_path / "out", path, text_key="meta.deep.text")
    assert stored_texts(tmp_path / "out") == [f"text {n}" for n in range(8)]
    convert_bytes(tmp_path / "two", path, text_keys=("meta.deep.text", "meta.answer:1"))
    assert stored_texts(tmp_path / "two") == [
        f"{part} {n}" for n in range(8) for part in ("text", "answer")
    ]
    assert [mode for _, mode in IndexedDataset(str(tmp_path / "two"))[:]] == [0, 1] * 8
    with pytest.raises(ConvertError, match=r"meta\.txt.*\(it has: 'id', 'meta\.(answer|lang)"):
        convert_bytes(tmp_path / "no", path, text_key="meta.txt")


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.arrow"])
def test_a_key_with_a_dot_of_its_own_comes_first(name: str, tmp_path: Path) -> None:
    path = written(
        tmp_path / name, [{"meta.text": f"flat {n}", "meta": {"text": "nested"}} for n in range(5)]
    )
    convert_bytes(tmp_path / "out", path, text_key="meta.text")
    assert stored_texts(tmp_path / "out") == [f"flat {n}" for n in range(5)]


def test_paths_prefer_the_longest_key_and_end_in_nulls() -> None:
    assert value_at({"a": {"b": {"c": 1}}, "a.b": {"c": 2}}, "a.b.c") == 2
    assert value_at({"a": {"b.c": 3}}, "a.b.c") == 3
    assert value_at({"a": None}, "a.b") is None
    assert value_at({"a": {"b": 1}}, "a.c") is MISSING
    assert value_at({"a": "text"}, "a.b") is MISSING
    assert value_at({"": {"": 1}, ".": 2}, ".") == 2


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())],
)
@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_text_columns_may_be_bytes(name: str, kind: Any, tmp_path: Path) -> None:
    wanted = ["eins", "zwei é", "", "drei"]
    values: list[Any] = [text.encode() for text in wanted] if "binary" in str(kind) else wanted
    made = (
        pa.table({"text": pa.array([*values, None]).cast(kind)})
        if "dict" not in str(kind)
        else None
    )
    made = made or pa.table({"text": pa.array([*values, None]).dictionary_encode()})
    if name.endswith("parquet"):
        pq.write_table(made, tmp_path / name)
    else:
        pyarrow.feather.write_feather(made, tmp_path / name)
    report = convert_bytes(tmp_path / "out", tmp_path / name)
    assert stored_texts(tmp_path / "out") == ["eins", "zwei é", "drei"]
    assert report.dropped == {"empty": 2}


def test_bytes_that_are_no_text_are_named_by_their_row(tmp_path: Path) -> None:
    path = table(
        tmp_path / "in.parquet", [{"text": b"good"}, {"text": b"\xff\xfe"}, {"text": b"too"}]
    )
    with pytest.raises(ConvertError, match=r"in\.parquet:2: is not UTF-8"):
        convert_bytes(tmp_path / "out", path)
    report = convert_bytes(tmp_path / "out", path, on_error="skip")
    assert stored_texts(tmp_path / "out") == ["good", "too"]
    assert report.dropped == {"broken record": 1}


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.arrow"])
def test_nulls_are_empty_texts(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, [{"text": "a"}, {"text": None}, {"text": "b"}])
    report = convert_bytes(tmp_path / "out", path)
    assert stored_texts(tmp_path / "out") == ["a", "b"]
    assert report.dropped == {"empty": 1}


@pytest.mark.guarantee("same-documents-form")
@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.arrow"])
def test_lists_of_sentences_are_sequences_as_megatron_makes_them(name: str, tmp_path: Path) -> None:
    import torch

    from tests.support.oracle import IndexedDatasetBuilder, finalize

    rows = [["One.", "Two.", "Three."], ["Four."], ["", "Five.", ""], [], [""]]
    path = written(tmp_path / name, [{"text": row} for row in rows])
    report = convert_bytes(tmp_path / "out", path)
    builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=np.uint16)
    # as tools/preprocess_data.py: sentences without a token are left out, the last one has the end
    for row in rows:
        ids = [list(sentence.encode()) for sentence in row if sentence]
        if ids:
            ids[-1].append(256)
            for sentence in ids:
                builder.add_item(torch.tensor(sentence))
            builder.end_document()
    finalize(builder, f"{tmp_path}/theirs.idx")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()
    assert report.dropped == {"empty": 2}


def test_lists_of_anything_else_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", [{"text": "a"}, {"text": ["b", 3]}])
    with pytest.raises(ConvertError, match=r"in\.jsonl:2: key 'text' holds a list with int"):
        convert_bytes(tmp_path / "out", path)


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_lists_of_ids_lie_in_structs_and_have_any_layout(name: str, tmp_path: Path) -> None:
    ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9], None]
    kinds = {
        "list": pa.list_(pa.int32()),
        "large": pa.large_list(pa.int32()),
        "fixed": pa.list_(pa.int32(), 3),
    }
    if name == "in.parquet" and int(pa.__version__.partition(".")[0]) < 26:
        del kinds["fixed"]  # older ones cannot read such a column with a null
    for key, kind in kinds.items():
        schema = pa.schema({"doc": pa.struct({"ids": kind, "id": pa.int8()})})
        path = table(tmp_path / name, [{"doc": {"ids": row, "id": 1}} for row in ids], schema)
        report = convert_files(tmp_path / key, path, text_key="doc.ids")
        assert stored_ids(tmp_path / key) == ids[:3]
        assert report.dropped == {"empty": 1}


def test_a_list_that_no_index_can_tell_is_refused() -> None:
    """Its length does not fit int32, and was a negative one."""
    ids = pa.array(np.zeros(2**31 + 5, np.uint8))  # of which no page is touched
    column = pa.LargeListArray.from_arrays(pa.array([0, 2**31 + 5], pa.int64()), ids)
    with pytest.raises(ConvertError, match=r"2,147,483,653 tokens.*2,147,483,647"):
        token_lists(column, 0, "a.parquet", 0)


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.arrow"])
def test_of_several_names_of_a_key_the_first_that_is_there_is_taken(
    name: str, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "one", "content": "no", "meta": {"body": "x"}},
        {"text": None, "content": "two", "meta": {"body": "x"}},
        {"text": None, "content": None, "meta": {"body": "three"}},
        {"text": "", "content": "four is hidden by an empty text", "meta": {"body": "x"}},
    ]
    path = written(tmp_path / name, rows)
    key = "text,content,meta.body"
    report = convert_bytes(tmp_path / "out", path, text_key=key)
    assert stored_texts(tmp_path / "out") == ["one", "two", "three"]
    assert report.dropped == {"empty": 1}
    keys = (f"nothing,{key}:1", "content,text")
    convert_bytes(tmp_path / "two", path, text_keys=keys)
    assert stored_texts(tmp_path / "two")[:4] == ["one", "no", "two", "two"]
    with pytest.raises(ConvertError, match=r"has no (key|column) 'body' or 'txt' \(it has: '"):
        convert_bytes(tmp_path / "no", path, text_key="body,txt")


def test_names_of_a_key_are_looked_for_in_each_record(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"content": "two"}, {"a,b": "three"}, {"a": "four", "b": "no"}]
    path = written(tmp_path / "in.jsonl", rows)
    for key, wanted in (("text,content,a,b", ["one", "two", "four"]), ("a,b", ["three", "four"])):
        out = tmp_path / key.replace(",", "")
        convert_bytes(out, path, text_key=key, on_error="skip")
        assert stored_texts(out) == wanted


TYPES = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "struct": pa.struct([("text", pa.string()), ("other", pa.int64())]),
    "list": pa.list_(pa.string()),
}
letters = st.text(st.sampled_from('a",;\n\r é漢\t'), max_size=12)
cells = letters.map(lambda text: text.replace("\r", ""))  # the module leaves one without quotes
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "struct": st.fixed_dictionaries({"text": st.none() | letters, "other": st.integers(0, 9)}),
    "list": st.lists(st.none() | letters, max_size=3),
}


def fields_of(path: Path, form: str) -> list[Any]:
    piece = Slice(input=Input(path=str(path), format=form, size=1, etag=""))
    read = read_slice(piece, ConvertOptions(), StorageConfig(), Skipped())
    return [document.fields for document in read if isinstance(document, RawDocument)]


@pytest.mark.guarantee("same-documents-form")
@given(data=st.data(), kind=st.sampled_from(sorted(TYPES)), chunk=st.integers(1, 9))
def test_rows_of_tables_are_those_that_pyarrow_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    values = data.draw(st.lists(st.none() | VALUES.get(kind, letters), max_size=20))
    column = pa.array(values, pa.string() if kind in ("dictionary", "string_view") else TYPES[kind])
    made = pa.table({"id": range(len(values)), "text": column.cast(TYPES[kind])})
    options = {"compression": data.draw(st.sampled_from(["none", "zstd", "snappy", "gzip"]))}
    pq.write_table(made, folder / "a.parquet", row_group_size=chunk, **options)
    expected = pq.read_table(folder / "a.parquet", columns=["text"]).to_pylist()
    assert fields_of(folder / "a.parquet", "parquet") == expected
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with new(folder / "a.arrow", made.schema) as writer:
            writer.write_table(made, max_chunksize=chunk)
        assert fields_of(folder / "a.arrow", "arrow") == expected


@pytest.mark.guarantee("same-documents-form")
@given(
    rows=st.lists(st.tuples(cells, cells), max_size=9),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_rows_of_csv_are_those_that_the_csv_module_reads(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    quoting: Any,
    ending: str,
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=quoting, lineterminator=ending).writerows([("id", "text"), *rows])
    with open(path, newline="", encoding="utf-8") as file:
        expected = [
            {name: cell or None for name, cell in row.items()} for row in csv.DictReader(file)
        ]
    assert fields_of(path, "csv") == expected
