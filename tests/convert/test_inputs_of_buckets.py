"""Corpora in buckets are read as training reads: through storage/, with its retries and ETags."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.config import load_storage
from streammega.convert import convert
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import read_slice
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.source import Skipped, Slice
from streammega.errors import AccessDeniedError, ConfigError, ObjectChangedError
from streammega.storage import open_store
from streammega.storage.backends.fsspec import FsspecStore
from streammega.storage.file_system import open_place
from streammega.storage.open import register_scheme
from streammega.storage.store import ObjectInfo, Store, WrapperStore
from tests.support.builders import convert_bytes, tar_bytes, write_tar
from tests.support.servers import S3, http_server, moto_server
from tools.bench.object_server import Running, running

TEXTS = [f"document {number} " + "of some words " * 40 for number in range(4000)]


@pytest.fixture(params=["obstore", "fsspec"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Running, Any]]:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    pq.write_table(pa.table({"text": TEXTS}), folder / "c.parquet", row_group_size=500)
    texts = enumerate(TEXTS[:500])
    write_tar(folder / "d.tar", *((f"{n:06d}.txt", text.encode()) for n, text in texts))
    with running(tmp_path) as server:
        yield (
            server,
            StorageConfig(transport=request.param, storage_options=server.storage_options),
        )


@pytest.mark.guarantee("corpora-buckets-read")
def test_a_conversion_through_faults_is_that_of_local_files(
    endpoint: tuple[Running, StorageConfig], tmp_path: Path
) -> None:
    server, storage = endpoint
    made = {"tokenizer": "bytes", "workers": 1}
    convert([str(tmp_path / "data")], str(tmp_path / "local"), **made)  # type: ignore[arg-type]
    server.behave(error_share=0.1, truncate_share=0.1, reset_share=0.1)
    convert(["s3://data"], str(tmp_path / "remote"), storage=storage, **made)  # type: ignore[arg-type]
    assert server.counts()["faults"] > 0, "the fault did not happen: this shows nothing"
    for suffix in (".bin", ".idx"):
        local = tmp_path / f"local{suffix}"
        assert (tmp_path / f"remote{suffix}").read_bytes() == local.read_bytes()


@pytest.mark.guarantee("corpora-buckets-read")
@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.tar"])
def test_an_input_that_is_replaced_ends_the_conversion(
    endpoint: tuple[Running, StorageConfig],
    tmp_path: Path,
    name: str,
    on_error: Literal["stop", "skip"],
) -> None:
    """Not even where what cannot be read is passed over: half of it would be of another corpus."""
    _, storage = endpoint
    options = ConvertOptions(tokenizer="bytes", on_error=on_error)
    (found,) = find_inputs([f"s3://data/{name}"], storage)
    documents = read_slice(Slice(input=found), options, storage, Skipped())
    assert isinstance(next(documents), RawDocument)
    path = tmp_path / "data" / name
    (tmp_path / "new").write_bytes(path.read_bytes())
    os.replace(tmp_path / "new", path)
    with pytest.raises(ObjectChangedError, match=f"s3://data/{name}"):
        list(documents)
        list(read_slice(Slice(input=found), options, storage, Skipped()))


@pytest.mark.guarantee("corpora-buckets-read")
def test_denied_access_is_told_of_and_passed_over_by_nobody(
    endpoint: tuple[Running, StorageConfig],
) -> None:
    server, storage = endpoint
    options = ConvertOptions(tokenizer="bytes", on_error="skip")
    (found,) = find_inputs(["s3://data/a.jsonl"], storage)
    server.behave(status=403)
    with pytest.raises(AccessDeniedError, match=r"s3://data/a\.jsonl"):
        list(read_slice(Slice(input=found), options, storage, Skipped()))


@pytest.fixture(scope="module")
def other_s3() -> Iterator[S3]:
    """A second server, with buckets of its own."""
    with moto_server() as server:
        yield server


@pytest.fixture
def two_places(moto: S3, other_s3: S3, tmp_path: Path) -> tuple[str, str, list[str]]:
    """The bucket of some inputs, that of the output, and the options for both: the bucket of the
    output is there on one server alone.
    """
    source = moto.new_bucket()
    target = f"target-{source}"
    other_s3.client().create_bucket(Bucket=target)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:50])
    moto.client().put_object(Bucket=source, Key="in/a.jsonl", Body=lines.encode())
    rows = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS[:50]}), rows)
    moto.client().put_object(Bucket=source, Key="in/b.parquet", Body=rows.getvalue())
    storage = StorageConfig(storage_options=moto.options)
    convert([f"s3://{source}/in"], f"s3://{source}/set/web", tokenizer="bytes", storage=storage)
    (tmp_path / "list").write_text(f"s3://{source}/in/a.jsonl\ns3://{source}/in/b.parquet\n")
    options = words_of("--storage", other_s3) + words_of("--input-storage", moto)
    return source, target, options


def words_of(option: str, server: S3) -> list[str]:
    """The options of a command that lead to a server."""
    return [word for name, value in server.options.items() for word in (option, f"{name}={value}")]


@pytest.mark.parametrize(
    "words",
    [
        "s3://{source}/in --tokenizer bytes",
        "@{tmp_path}/list --tokenizer bytes --shuffle --dedup --provenance",
        "s3://{source}/set/web",
        "s3://{source}/set/web --provenance --max-tokens 1000000",
        "s3://{source}/in --tokenizer bytes --work-dir s3://{target}/work",
    ],
)
def test_inputs_and_output_may_be_of_two_servers(
    words: str,
    two_places: tuple[str, str, list[str]],
    other_s3: S3,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target, options = two_places
    named = words.format(source=source, target=target, tmp_path=tmp_path).split()
    output = f"s3://{target}/web"
    status = main(["convert", named[0], output, *named[1:], *options])
    assert status == 0, capsys.readouterr().err
    written = IndexedDataset(output, StorageConfig(storage_options=other_s3.options))
    assert len(written.document_indices) - 1 == (50 if "--dedup" in words else 100)


def test_tasks_and_their_merge_read_and_write_in_two_places(
    two_places: tuple[str, str, list[str]], other_s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, options = two_places
    words = [f"s3://{source}/in", f"s3://{target}/web", "--tokenizer", "bytes"]
    words += ["--work-dir", f"s3://{target}/work", *options]
    for task in ("0/2", "1/2", "merge"):
        assert main(["convert", *words, "--task", task]) == 0, capsys.readouterr().err
    storage = StorageConfig(storage_options=other_s3.options)
    assert len(IndexedDataset(f"s3://{target}/web", storage).document_indices) - 1 == 100


def test_a_public_corpus_goes_into_a_bucket_of_ones_own(
    two_places: tuple[str, str, list[str]],
    other_s3: S3,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The account stands in a file, which `ps` does not show; the public one needs none."""
    _, target, _ = two_places
    folder = tmp_path / "served" / "public"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("a public document")
    account = tmp_path / "account.toml"
    lines = [f'{name} = "{value}"' for name, value in other_s3.options.items()]
    account.write_text("\n".join(["max_concurrent_requests = 16", "[storage_options]", *lines]))
    with running(tmp_path / "served") as server:
        public = tmp_path / "public.toml"
        public.write_text(f'storage_options = {{anon = true, endpoint_url = "{server.endpoint}"}}')
        words = ["--storage-file", str(account), "--input-storage-file", str(public)]
        status = main(
            ["convert", "s3://public/a.txt", f"s3://{target}/p", "--tokenizer", "bytes", *words]
        )
    assert status == 0, capsys.readouterr().err
    assert main(["describe", f"s3://{target}/p", "--storage-file", str(account)]) == 0
    assert "a public document" not in capsys.readouterr().err


def test_the_account_of_a_bucket_is_not_handed_to_a_web_server(
    two_places: tuple[str, str, list[str]], other_s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    _, target, _ = two_places
    with http_server({"/a.txt": b"a document of the web"}) as server:
        url = f"http://127.0.0.1:{server.port}"
        for number, also in enumerate(
            [[], ["--input-storage", "key=K", "--input-storage", "secret=S"]]
        ):
            words = [f"{url}/a.txt", f"s3://{target}/web{number}", "--tokenizer", "bytes", *also]
            status = main(["convert", *words, *words_of("--storage", other_s3)])
            assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.tgz", "a.jsonl.zst"])
def test_an_encoding_of_the_answer_is_undone_once(name: str, tmp_path: Path) -> None:
    """A web server may say that a .gz is encoded by gzip: it is the object itself."""
    lines = b'{"text": "one"}\n' * 1000
    data = gzip.compress(lines)
    encoding = "gzip"
    if name == "a.tgz":
        data = gzip.compress(tar_bytes(("a.jsonl", lines)))
    elif name == "a.jsonl.zst":
        data, encoding = zstandard.compress(lines), "zstd"
    path = f"/{name}?signature=1"
    with http_server({path: data}) as server:
        server.encodings[path] = encoding
        report = convert_bytes(tmp_path / "out", f"{server.url}{path}")
    assert report.documents == 1000


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_an_encoding_of_an_object_is_undone_once(transport: Any, moto: S3, tmp_path: Path) -> None:
    bucket = moto.new_bucket()
    data = gzip.compress(b'{"text": "one"}\n' * 1000)
    moto.client().put_object(Bucket=bucket, Key="a.jsonl.gz", Body=data, ContentEncoding="gzip")
    storage = StorageConfig(transport=transport, storage_options=moto.options)
    report = convert_bytes(tmp_path / "out", f"s3://{bucket}/a.jsonl.gz", input_storage=storage)
    assert report.documents == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_requests = 3", "did you mean max_concurrent_requests"),
        ('key = "hidden-value"', "storage_options"),
        ('storage_options = "hidden-value"', "storage_options must be a mapping$"),
        ('retry_timeout = "hidden-value"', "retry_timeout must be a number$"),
        ("cache_dir = [1]", "cache_dir must be text or a path$"),
        ("max_concurrent_requests = 0", "at least 1"),
        ("max_concurrent_requests = [hidden-value", "no valid TOML"),
        ('timeout = "hidden-value"', "timeout"),
    ],
)
def test_mistakes_in_a_storage_file_are_named_and_its_values_are_not(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "storage.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_storage(str(path))
    assert str(path) in str(refused.value)
    assert "hidden-value" not in str(refused.value)


def test_a_storage_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_storage(str(tmp_path / "none.toml"))


def test_a_secret_in_place_of_an_option_is_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["describe", "s3://bucket/x", "--storage", "MySecretKey"]) == 1
    error = capsys.readouterr().err
    assert "--storage" in error
    assert "KEY=VALUE" in error
    assert "MySecretKey" not in error


class ListedWithoutEtags(FsspecStore):
    """A store that a program has registered."""

    def __init__(self) -> None:
        super().__init__("memory", "", StorageConfig())


@pytest.mark.guarantee("corpora-buckets-read")
@pytest.mark.parametrize(
    "url", ["registered://corpus/a.jsonl", "registered://corpus/", "Registered://corpus/"]
)
def test_a_store_that_was_registered_has_inputs_too(url: str, tmp_path: Path) -> None:
    register_scheme("registered", ListedWithoutEtags)
    store, key = open_store("registered://corpus/a.jsonl", StorageConfig())
    store.put(key, b'{"text": "one"}\n{"text": "another"}\n')
    report = convert([url], str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert report.documents == 2


class Counted(WrapperStore):
    """A store that notes the keys that are looked up."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.looked_up: list[str] = []

    def info(self, key: str) -> ObjectInfo:
        self.looked_up.append(key)
        return super().info(key)


def test_an_input_is_looked_up_once() -> None:
    store = Counted(FsspecStore("memory", "", StorageConfig()))
    store.put("once/a.jsonl", b"{}")
    register_scheme("counted", lambda: store)
    files = open_place("counted://once", StorageConfig())
    entry = files.file("counted://once/a.jsonl")
    assert entry is not None
    assert (entry.size, entry.kind) == (2, "file")
    assert store.looked_up == ["once/a.jsonl"]
    # what a listing of all lacks is not there
    assert [entry.path for entry in files.entries("counted://once", is_deep=True)] == [entry.path]
    assert files.file("counted://once/b.jsonl") is None
    assert store.looked_up == ["once/a.jsonl"]
