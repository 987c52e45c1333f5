"""`convert --provenance`: where each document came from, through whatever is done to it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streammega.convert.job as plan
from streammega import DataConfig, Provenance, StorageConfig
from streammega.cli.main import main
from streammega.convert import convert
from streammega.convert import job as job
from streammega.dataset import provenance as stored_provenance
from streammega.dataset.document_lookup import open_documents
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.provenance import (
    BYTE,
    DOCUMENT,
    FILE,
    LINE,
    DocumentOrigin,
    ProvenanceReader,
    ProvenanceWriter,
    collect_origins,
    concat_origins,
    origins_of,
)
from streammega.dataset.verify import verify
from streammega.errors import AccessDeniedError, ConfigError, ConvertError, FormatError
from streammega.storage import open_store
from streammega.storage.object_ops import delete, exists
from tests.convert.test_publishing import Killed, killed_before
from tests.support.builders import convert_bytes, convert_files, write_parquet, write_tar
from tests.support.examples import examples

STORAGE = StorageConfig()

# --- the file -------------------------------------------------------------------------------------

ORIGIN = st.builds(
    DocumentOrigin,
    path=st.sampled_from(["a.jsonl", "b.jsonl", "é", "s3://bucket/c.tar!000.txt"]),
    kind=st.sampled_from([FILE, LINE, BYTE, DOCUMENT]),
    place=st.integers(0, 10**18 - 1),
    id=st.sampled_from(["", "x", "https://example.org/ü"]) | st.text(st.characters(codec="utf-8")),
)


def read_back(path: Path, data: bytes) -> ProvenanceReader:
    path.write_bytes(data)
    return ProvenanceReader(*open_store(str(path), STORAGE))


@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(parts=st.lists(st.lists(ORIGIN, max_size=9), max_size=5))
def test_what_is_written_is_read_whatever_is_added_at_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[DocumentOrigin]]
) -> None:
    all_rows = [row for part in parts for row in part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_provenance, "ROW_GROUP", 7)
        by_parts = ProvenanceWriter()
        for part in parts:
            by_parts.add(collect_origins(part))
        at_once = ProvenanceWriter()
        at_once.add(collect_origins(all_rows))
        data = by_parts.finish()
        assert data == at_once.finish(), "its bytes depend on the documents alone"
        stored = read_back(tmp_path_factory.getbasetemp() / "a.origins", data)
        assert stored.documents == len(all_rows)
        assert [stored[number] for number in range(len(all_rows))] == all_rows
        low = len(all_rows) // 3
        between = stored.between(low, len(all_rows))
        assert [between[row] for row in range(len(between))] == all_rows[low:]
        for row in all_rows[:3]:
            found = {number for _, number in stored.find([row.location])}
            expected = [row.location in (other.location, other.id) for other in all_rows]
            assert sorted(found) == np.flatnonzero(expected).tolist()


@pytest.mark.guarantee("other-programs-read")
def test_other_programs_read_it_as_parquet(tmp_path: Path) -> None:
    writer = ProvenanceWriter()
    writer.add(collect_origins([DocumentOrigin(path="a", kind=LINE, place=7, id="x")] * 5000))
    (tmp_path / "a.origins").write_bytes(writer.finish())
    table = pq.read_table(tmp_path / "a.origins", page_checksum_verification=True)
    assert table.to_pylist() == [{"path": "a", "kind": LINE, "place": 7, "id": "x"}] * 5000


def test_a_program_without_pyarrow_reads_it(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    (tmp_path / "a.parquet").write_bytes(some_origins(5000))
    rows = duckdb.sql(f"select place, id from '{tmp_path}/a.parquet' order by place").fetchall()
    assert rows == [(n, f"id {n}") for n in range(1, 5001)]


@pytest.mark.guarantee("other-programs-read")
def test_names_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    writer = ProvenanceWriter()
    writer.add(collect_origins([DocumentOrigin(path="\udce9.txt", kind=FILE, place=0, id="")]))
    assert read_back(tmp_path / "a.origins", writer.finish())[0].path == "\\udce9.txt"


def some_origins(count: int) -> bytes:
    """A file of documents 1, 2, ... of a file."""
    writer = ProvenanceWriter()
    rows = range(1, count + 1)
    writer.add(
        collect_origins(DocumentOrigin(path="a", kind=LINE, place=n, id=f"id {n}") for n in rows)
    )
    return writer.finish()


def parquet_of(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.mark.guarantee("damaged-origins-another")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its footer cannot be read"),
        (b"PAR1" + bytes(40) + b"SMORIGIN", "its footer cannot be read"),
        (b"PAR1" + bytes(40) + b"\x28\0\0\0PAR1", "its footer cannot be read"),
        (b"PAR1" + bytes(40) + b"\xff\xff\xff\xffPAR1", "its footer cannot be read"),
        (some_origins(9)[:90], "its footer cannot be read"),
        (parquet_of(path=["a"], id=[2]), r"its columns are \['path', 'id'\]"),
        (parquet_of(path=["a"], kind=[1], place=[1], id=[None]), "its columns are"),
    ],
    ids=["empty", "no-parquet", "footer", "length", "cut", "columns", "nulls"],
)
def test_what_is_no_provenance_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=rf"a\.origins: .*{message}"):
        _ = read_back(tmp_path / "a.origins", data)[0]


@pytest.mark.guarantee("damaged-origins-another")
def test_a_row_group_that_asks_for_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ProvenanceWriter()
    writer.add(collect_origins([DocumentOrigin(path="a" * 900, kind=FILE, place=0, id="")]))
    monkeypatch.setattr(stored_provenance, "MAX_ROW_GROUP_BYTES", 800)
    with pytest.raises(FormatError, match="claims to be larger"):
        _ = read_back(tmp_path / "a.origins", writer.finish())[0]


@pytest.mark.guarantee("damaged-origins-another")
@pytest.mark.parametrize("stride", [13, pytest.param(3, marks=pytest.mark.soak)])
def test_any_flipped_byte_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """By `verify`. A reader gets an error, or what was written: pages have checksums."""
    write_texts(tmp_path / "a.jsonl", 49)
    monkeypatch.setattr(stored_provenance, "ROW_GROUP", 16)
    convert_bytes(tmp_path / "a", tmp_path / "a.jsonl", provenance=True)
    file = tmp_path / "a.origins"
    data = file.read_bytes()
    written = [origin for _, origin in documents_of(str(tmp_path / "a"))]
    errors = 0
    for place in range(0, len(data), stride):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        file.write_bytes(damaged)
        (problem,) = verify(str(tmp_path / "a")).problems
        assert problem.startswith(f"{file}: has another checksum")
        try:
            assert [origin for _, origin in documents_of(str(tmp_path / "a"))] == written
        except FormatError:
            errors += 1
    assert errors > len(data) / stride / 2


@pytest.mark.guarantee("origins-order-file")
def test_a_file_of_a_corpus_in_its_order_takes_next_to_nothing(tmp_path: Path) -> None:
    count = 100_000
    kinds = np.full(count, LINE, np.uint8)
    origins = origins_of(["corpus.jsonl"] * count, kinds, np.arange(1, count + 1), [""] * count)
    writer = ProvenanceWriter()
    writer.add(origins)
    assert len(writer.finish()) / count < 0.15
    shuffled = ProvenanceWriter()
    shuffled.add(origins.take(np.random.default_rng(0).permutation(count)))
    assert len(shuffled.finish()) / count < 4


# --- from every format, through everything --------------------------------------------------------


def text_of(name: str) -> str:
    return f"This is {name}. " + "word " * (sum(map(ord, name)) % 30)


def write_inputs(root: Path) -> dict[str, str]:
    """Inputs of several formats, whose texts say where they are; the id of each text."""
    root.mkdir()
    expected = {}
    lines = []
    for number in range(1, 61):
        where = f"{root}/a.jsonl:{number}"
        expected[where] = f"id-{number}"
        lines.append(json.dumps({"id": f"id-{number}", "text": text_of(where)}))
    (root / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    rows = range(1, 31)
    wheres = [f"{root}/b.parquet:{row}" for row in rows]
    urls = [f"https://example.org/{row}" for row in rows]
    expected |= dict(zip(wheres, urls, strict=True))
    table = pa.table({"text": [text_of(where) for where in wheres], "url": urls})
    pq.write_table(table, root / "b.parquet", row_group_size=7)
    values = []
    for number in range(1, 5):
        where = f"{root}/c.json:{number}"
        expected[where] = str(number)
        values.append(json.dumps({"id": number, "text": text_of(where)}))
    (root / "c.json").write_text("[\n" + ",\n".join(values) + "\n]")
    members = [f"{number:03}.txt" for number in range(5)]
    expected |= {f"{root}/d.tar!{name}": "" for name in members}
    texts = [text_of(f"{root}/d.tar!{name}").encode() for name in members]
    write_tar(root / "d.tar", *zip(members, texts, strict=True))
    where = f"{root}/e.txt"
    (root / "e.txt").write_text(text_of(where))
    expected[where] = ""
    return expected


def documents_of(name: str) -> list[tuple[str, DocumentOrigin]]:
    """(text, origin) of every document of a dataset."""
    found = []
    for shard in open_documents(name, STORAGE):
        assert shard.origins is not None
        indexed = IndexedDataset(shard.name)
        for document in range(shard.num_documents):
            sequences = [np.asarray(indexed[n]) for n in shard.sequences_of(document)]
            ids = np.concatenate(sequences).tolist()
            text = bytes(token for token in ids if token < 256).decode()
            found.append((text, shard.origins[document]))
    return found


def check_origins(name: str, expected: dict[str, str], inputs: Path) -> list[str]:
    """Every document comes from where its text says; returns the places."""
    places = []
    for text, origin in documents_of(name):
        said = text.removeprefix("This is ").partition(". ")[0]
        where = origin.location
        if origin.kind == BYTE:  # a later part of a large file: its byte leads to the line
            data = Path(origin.path).read_bytes()
            where = f"{origin.path}:{data[: origin.place].count(10) + 1}"
        assert where == said
        assert origin.id == expected[said]
        places.append(said)
    return places


@pytest.mark.guarantee("origins-document-says")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.soak),
        {"shuffle_seed": 3, "shard_bytes": 3000, "shuffle_memory_bytes": 1 << 20},
        {"dedup": True, "min_tokens": 40, "shard_bytes": 5000, "format": "zst"},
        pytest.param({"max_tokens": 160, "format": "tar", "workers": 2}, marks=pytest.mark.soak),
    ],
    ids=["plain", "shuffled", "filtered", "cut"],
)
def test_every_document_says_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(plan, "MAX_UNIT_BYTES", 4000)
    monkeypatch.setattr(plan, "MIN_UNIT_BYTES", 4000)
    monkeypatch.setattr(job, "SEGMENT_BYTES", 6000)
    inputs = tmp_path / "in"
    expected = write_inputs(inputs)
    named: dict[str, Any] = {"workers": 1, "provenance": True, **options}
    convert([str(inputs)], str(tmp_path / "out" / "web"), tokenizer="bytes", **named)
    places = check_origins(str(tmp_path / "out" / "web"), expected, inputs)
    if "min_tokens" not in options:
        assert sorted(places) == sorted(expected)
    # and on, through another conversion: merged with itself, shuffled and cut into shards
    convert_files(
        tmp_path / "again" / "web",
        tmp_path / "out" / "web",
        provenance=True,
        shuffle_seed=9,
        shard_bytes=4000,
    )
    again = check_origins(str(tmp_path / "again" / "web"), expected, inputs)
    assert sorted(again) == sorted(places)


@pytest.mark.guarantee("origins-document-says")
def test_documents_of_datasets_without_origins_are_named_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(9)))
    convert_bytes(tmp_path / "a", tmp_path / "in.jsonl")
    convert_files(tmp_path / "b", tmp_path / "a", provenance=True)
    for number, (_, origin) in enumerate(documents_of(str(tmp_path / "b"))):
        assert origin.location == f"{tmp_path}/a#{number}"


@pytest.mark.guarantee("origins-document-says")
def test_the_field_of_the_id_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "meta": {"doc": "m"}, "text": "t"}\n')
    table = pa.table({"text": ["t"], "id": [1]})
    pq.write_table(table, tmp_path / "in.parquet")
    named: dict[str, Any] = {"tokenizer": "bytes", "provenance": True, "workers": 1}
    convert([str(tmp_path / "in.jsonl")], str(tmp_path / "a"), id_field="meta.doc", **named)
    assert [origin.id for _, origin in documents_of(str(tmp_path / "a"))] == ["m"]
    with pytest.raises(ConvertError, match=r"in\.parquet: has no column 'meta\.doc'"):
        convert([str(tmp_path / "in.parquet")], str(tmp_path / "b"), id_field="meta.doc", **named)
    with pytest.raises(ConfigError, match="set provenance"):
        convert([str(tmp_path / "in.jsonl")], str(tmp_path / "c"), id_field="id", tokenizer="bytes")


def test_an_id_that_no_record_has_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_texts(tmp_path / "in.jsonl", 5)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"doc": "d", "text": "t"}\n')
    named: dict[str, Any] = {"tokenizer": "bytes", "provenance": True, "workers": 1}
    convert([str(tmp_path / "in.jsonl")], str(tmp_path / "a"), id_field="doc", **named)
    assert "--id-field" not in caplog.text, "one record has it"
    convert([str(tmp_path / "in.jsonl")], str(tmp_path / "b"), id_field="doc_id", **named)
    assert "no record has a text or number in 'doc_id' (--id-field)" in caplog.text
    provenance = Provenance(
        DataConfig(blend=str(tmp_path / "b"), sequence_length=2, split="1,0,0", order="stream")
    )
    assert provenance.names.find("") == [], "no id is no name"


# --- publishing -----------------------------------------------------------------------------------


def names_in(root: str) -> Sequence[str]:
    system, path = fsspec.core.url_to_fs(root)
    names = [found.rpartition("/")[2] for found in system.find(path)]
    return sorted(name for name in names if not name.endswith(".partial"))


def write_texts(path: Path, count: int) -> None:
    path.write_text("".join(f'{{"id": "{path.stem}{n}", "text": "{n}"}}\n' for n in range(count)))


@pytest.mark.guarantee("killed-moment-dataset")
@pytest.mark.parametrize("where", [pytest.param("remote", marks=pytest.mark.soak), "local"])
def test_a_dataset_that_is_replaced_at_any_moment_has_its_own_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Killed before every few changes of what is stored: the former one's, or the new one's."""
    root = f"memory://{tmp_path.name}" if where == "remote" else str(tmp_path / "out")
    name = f"{root}/web"
    write_texts(tmp_path / "a.jsonl", 40)
    write_texts(tmp_path / "b.jsonl", 40)
    named: dict[str, Any] = {
        "tokenizer": "bytes", "provenance": True, "shard_bytes": 60, "workers": 1, "overwrite": True,
    }  # fmt: skip

    def ids() -> set[str]:
        """The first letters of the ids of all documents that are there."""
        return {origin.id[0] for _, origin in documents_of(f"{name}.manifest.json")}

    step = 0
    done = False
    while not done:
        convert([str(tmp_path / "a.jsonl")], name, **named)
        assert ids() == {"a"}
        try:
            with killed_before(step, monkeypatch):
                convert([str(tmp_path / "b.jsonl")], name, **named)
                done = True
        except Killed:
            assert ids() in ({"a"}, {"b"}), step
            convert([str(tmp_path / "b.jsonl")], name, **named)
        assert ids() == {"b"}
        shards = len(IndexedDataset(f"{name}.manifest.json").shards)
        assert len(names_in(root)) == 3 * shards + 1, "nothing else is left"
        step += 19
    assert step > 20
    # one without origins leaves none of the former's behind
    convert([str(tmp_path / "a.jsonl")], name, **{**named, "provenance": False})
    assert not [file for file in names_in(root) if file.endswith(".origins")]


@pytest.mark.guarantee("conversion-leaves-origins")
def test_origins_that_are_left_out_are_told_of_and_a_folder_is_read_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_texts(tmp_path / "a.jsonl", 5)
    named: dict[str, Any] = {"tokenizer": "bytes", "provenance": True, "workers": 1}
    convert([str(tmp_path / "a.jsonl")], str(tmp_path / "d" / "a"), **named)
    convert_files(tmp_path / "b", tmp_path / "d")
    assert "which this conversion leaves out; --provenance carries it over" in caplog.text
    assert not (tmp_path / "b.origins").exists()
    assert main(["gc", str(tmp_path / "d" / "a")]) == 0


@pytest.mark.guarantee("killed-moment-dataset")
@pytest.mark.parametrize("shards", [1, 20])
@pytest.mark.parametrize("where", ["remote", "local"])
def test_origins_that_outlived_their_dataset_tell_nothing_of_the_next_one(
    where: str, shards: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write_texts(tmp_path / "in.jsonl", 20)
    root = str(tmp_path / "d")
    storage = STORAGE
    if where == "remote":
        server = request.getfixturevalue("moto")
        root = f"s3://{server.new_bucket()}"
        storage = StorageConfig(storage_options=server.options, request_timeout=60)
    named = ([str(tmp_path / "in.jsonl")], f"{root}/web")
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "storage": storage}
    if shards > 1:
        options |= {"shard_bytes": 1}  # a document each
    prefixes = convert(*named, provenance=True, **options).shard_prefixes
    assert len(prefixes) == shards
    delete(f"{root}/web.manifest.json", storage)
    for prefix in prefixes:
        assert exists(f"{prefix}.origins", storage)
        for ending in (".bin", ".idx"):
            delete(f"{prefix}{ending}", storage)
    others = convert(*named, shuffle_seed=1, **options).shard_prefixes
    assert (others == prefixes) == (where == "local"), "only plain names are taken again"
    for prefix in others:
        assert exists(f"{prefix}.idx", storage)
        assert not exists(f"{prefix}.origins", storage)


def test_who_may_not_ask_for_origins_reads_as_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As S3 answers for what is not there to those who may not list."""
    write_texts(tmp_path / "a.jsonl", 5)
    convert_bytes(tmp_path / "a", tmp_path / "a.jsonl")

    class Closed:
        def info(self, key: str) -> Any:
            raise AccessDeniedError(f"{key}: 403")

    monkeypatch.setattr(stored_provenance, "open_store", lambda url, storage: (Closed(), url))
    convert_files(tmp_path / "b", tmp_path / "a")
    config = DataConfig(blend=str(tmp_path / "b"), sequence_length=2, split="1,0,0", order="stream")
    (sample,) = Provenance(config).trace([0])
    assert [run.origin for run in sample.runs] == [None] * len(sample.runs)


@pytest.mark.guarantee("damaged-origins-another")
def test_a_file_of_another_dataset_is_refused(tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 6)):
        write_texts(tmp_path / f"{name}.jsonl", count)
        output = str(tmp_path / name)
        convert_bytes(output, tmp_path / f"{name}.jsonl", provenance=True)
    (tmp_path / "a.origins").write_bytes((tmp_path / "b.origins").read_bytes())
    (problem,) = verify(str(tmp_path / "a")).problems
    assert "a.origins: has another checksum than the manifest says" in problem
    assert not verify(str(tmp_path / "b")).problems
    config = DataConfig(blend=str(tmp_path / "a"), sequence_length=2, split="1,0,0", order="stream")
    with pytest.raises(FormatError, match=r"has the origins of 6 documents, and its .idx has 5"):
        Provenance(config).trace([0])


@pytest.mark.guarantee("trace-prints-origins")
def test_the_command_keeps_them_and_trace_prints_and_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "a.jsonl", 9)
    assert (
        main(["convert", "a.jsonl", "a", "--tokenizer", "bytes", "--provenance", "--workers", "1"])
        == 0
    )
    Path("run.toml").write_text(
        '[data]\nblend = "a"\nsplit = "1,0,0"\nsequence_length = 4\n[model]\nvocab_size = 300\n'
        '[train]\ntrain_iters = 2\nmicro_batch_size = 1\nglobal_batch_size = 2\nout_dir = "runs/a"\n'
    )
    capsys.readouterr()
    assert main(["trace", "run.toml", "--step", "1"]) == 0
    assert re.search(r"\[0, 2\) +2  a.jsonl:\d  a\d", capsys.readouterr().out)
    assert main(["trace", "run.toml", "--step", "1", "--tokenizer", "bytes"]) == 0
    named = capsys.readouterr().out
    assert main(["trace", "run.toml", "--step", "1", "--text"]) == 0
    assert capsys.readouterr().out == named, "the manifest names it"
    assert main(["trace", "run.toml", "--find", "a3", "--text"]) == 1
    assert "goes with --step or --sample" in capsys.readouterr().err
    for words in ("a3", "a.jsonl:4"):
        assert main(["trace", "run.toml", "--find", words]) == 0
        title = "document 3, document_tokens 2\n    origin: a.jsonl:4\n    id: a3\n"
        assert title in capsys.readouterr().out


def test_joining_keeps_the_order_and_the_paths() -> None:
    one = collect_origins([DocumentOrigin(path="a", kind=LINE, place=1, id="")])
    other = collect_origins(
        [DocumentOrigin(path=path, kind=FILE, place=0, id=path) for path in ("b", "a")]
    )
    joined = concat_origins([one, other])
    assert [joined[row].path for row in range(3)] == ["a", "b", "a"]


READS = {
    "rows": "convert([prefix + '.parquet'], prefix + '-2', tokenizer='bytes', text_keys=['text', 'name'], workers=1)",
    "origins": "IndexedDataset(prefix).origin(3)",
}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are seen in /proc only")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_parquet_leaves_no_threads_of_pyarrow(read: str, tmp_path: Path) -> None:
    """Such a thread may still hold a Python object when the interpreter ends. That aborted one of
    thirty processes.
    """
    texts = [f"text {number}" for number in range(20)]
    rows = write_parquet(tmp_path / "web.parquet", texts, name=texts)
    convert_bytes(tmp_path / "web", rows, provenance=True)
    code = (
        "import os, sys, time\n"
        "import pyarrow.parquet\n"
        "from streammega import IndexedDataset\n"
        "from streammega.convert import convert\n"
        "threads = lambda: set(os.listdir('/proc/self/task'))\n"
        "prefix = sys.argv[1]\n"
        "before = threads()\n"
        f"{read}\n"
        "end = time.monotonic() + 5\n"  # threads of ours end by themselves
        "while threads() - before and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(bool(threads() - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "web")],
        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},  # jemalloc has a thread too
        check=False,
    )
    assert done.returncode == 0
