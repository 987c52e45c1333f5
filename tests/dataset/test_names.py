"""Which files are read, by their names: folders, patterns, pipes, URLs with signatures, names with
any sign in them.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import botocore.session
import filelock
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.config import Config

from streammega import IndexedDataset, StorageConfig
from streammega.convert import ConvertOptions, convert
from streammega.convert.job import Job, plan_units
from streammega.convert.read.inputs import SkippedFiles, find_inputs
from streammega.convert.run import plan
from streammega.convert.work_dir import WorkDir
from streammega.dataset.verify import verify
from streammega.errors import ConfigError, ConvertError, EndpointError, ObjectNotFoundError
from tests.support.builders import MARK
from tests.support.processes import python_environment
from tests.support.servers import KEY, S3, SECRET, http_server

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def texts(prefix: str | Path, storage: StorageConfig | None = None) -> list[str]:
    return [
        bytes(np.asarray(ids[:-1]).astype(np.uint8)).decode()
        for ids in IndexedDataset(str(prefix), storage)[:]
    ]


def made(inputs: list[str], out: str | Path, **settings: Any) -> list[str]:
    defaults: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "overwrite": True}
    convert(inputs, str(out), **(defaults | settings))
    return texts(out, settings.get("storage"))


def tree(root: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return str(root)


# --- suffixes ---------------------------------------------------------------------------------------------------------------


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "c.PARQUET")
    tree(
        tmp_path,
        {
            "a.JSONL.GZ": gzip.compress(LINES),
            "b.Json": b'[{"text": "one"},\n{"text": "two"}]',
            "d.TXT.Gz": gzip.compress(b"one"),
        },
    )
    for name, wanted in {"a.JSONL.GZ": 2, "b.Json": 2, "c.PARQUET": 2, "d.TXT.Gz": 1}.items():
        assert made([str(tmp_path / name)], tmp_path / "out") == ["one", "two"][:wanted], name


def test_a_zip_of_one_file_is_read_and_of_more_refused(tmp_path: Path) -> None:
    for count in (1, 2):
        with zipfile.ZipFile(tmp_path / f"{count}.jsonl.zip", "w") as archive:
            for number in range(count):
                archive.writestr(f"{number}.jsonl", LINES)
    assert made([str(tmp_path / "1.jsonl.zip")], tmp_path / "out") == ["one", "two"]
    with pytest.raises(ConvertError, match=r"2\.jsonl\.zip: holds 2 files"):
        made([str(tmp_path / "2.jsonl.zip")], tmp_path / "no")


def test_a_zip_of_a_mac_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("a.jsonl", LINES)
        for name in ("__MACOSX/._a.jsonl", "._a.jsonl", ".DS_Store", "in/.DS_Store", "in/._b"):
            archive.writestr(name, "attributes")
    assert made([str(tmp_path / "a.jsonl.zip")], tmp_path / "out") == ["one", "two"]
    (tmp_path / "b.jsonl.zip").write_bytes(b"PK and no more")
    with pytest.raises(ConvertError, match=r"b\.jsonl\.zip: is no whole \.zip .*; copy it again"):
        made([str(tmp_path / "b.jsonl.zip")], tmp_path / "no")


def test_the_mark_of_utf8_is_no_text(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "a.txt": "\ufeffone".encode(),
            "b.json": '\ufeff[{"text": "two"}]'.encode(),
            "c.jsonl": '\ufeff{"text": "two"}\n'.encode(),
        },
    )
    assert made(
        [str(tmp_path / name) for name in ("a.txt", "b.json", "c.jsonl")], tmp_path / "out"
    ) == ["one", "two", "two"]


@pytest.mark.parametrize("name", ["a.json", "a.JSON", "a.jsonl", "a.json.gz"])
def test_what_json_holds_is_described(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streammega.cli.main import main

    data = LINES if name.endswith("l") else b'[{"text": "one"},\n{"text": "two"}]'
    tree(
        tmp_path,
        {name: gzip.compress(data) if name.endswith("gz") else data, "bad.manifest.json": b"{}"},
    )
    assert main(["describe", str(tmp_path / name)]) == 0
    assert """first_document: '{"text": "one"}""" in capsys.readouterr().out
    assert main(["describe", str(tmp_path / "bad.manifest.json")]) == 1


# --- folders ----------------------------------------------------------------------------------------------------------------

FOLDER = {
    "README.md": b"# About", "LICENSE": b"Free", ".gitattributes": b"x", "_SUCCESS": b"",
    "data/c.jsonl.incomplete": b'{"te', "data/SHA256SUMS": b"0",
    "data/a.jsonl": b'{"text": "a"}\n',
    "data/b.jsonl": b'{"text": "b"}\n', "data/.a.jsonl.crc": b"\0", "data/notes.txt": b"notes",
    "old/a.jsonl": b'{"text": "old a"}\n',
    ".git/config": b"[core]",
}  # fmt: skip


def chosen(root: str, **patterns: Any) -> tuple[list[str], dict[str, int]]:
    passed = SkippedFiles()
    found = find_inputs([root], None, ConvertOptions(**patterns), passed)
    return [os.path.relpath(item.path, root) for item in found], passed.counts


READ = ["data/a.jsonl", "data/b.jsonl", "data/notes.txt", "old/a.jsonl"]
LEFT_OUT = {"hidden": 3, "of unknown suffix": 5}


@pytest.mark.guarantee("files-folders-read")
def test_what_lies_beside_the_data_is_passed_over_and_counted(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", FOLDER)
    assert chosen(root) == (READ, LEFT_OUT)
    report = convert([root], str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert report.files_passed_over == LEFT_OUT
    assert (
        report.as_dict()["files_passed_over"] == report.summary()["files_passed_over"] == LEFT_OUT
    )


@pytest.mark.guarantee("files-folders-read")
def test_patterns_choose_files_by_name_or_by_path(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", FOLDER)
    lines = ["data/a.jsonl", "data/b.jsonl", "old/a.jsonl"]
    names, counts = chosen(root, include=("*.jsonl",), exclude=("old/*", "b.*"))
    assert names == ["data/a.jsonl"]
    assert (counts["excluded"], counts["not included"]) == (2, 6)
    for item in (root, f"{root}/*/*"):
        found = find_inputs([item], None, ConvertOptions(include=("*.jsonl",)))
        assert [os.path.relpath(one.path, root) for one in found] == lines
        for pattern in ("old/*", f"{root}/old/*"):
            found = find_inputs([item], None, ConvertOptions(exclude=(pattern,)))
            assert [os.path.relpath(one.path, root) for one in found] == READ[:3]
    assert chosen(root, include=("README.md", "*.jsonl"))[0] == ["README.md", *lines]
    with pytest.raises(
        ConvertError, match=r"holds no files that can be read; left out: .*not included: 9"
    ):
        chosen(root, include=("*.parquet",))


def test_the_command_takes_patterns_and_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streammega.cli.main import main

    root = tree(tmp_path / "in", {**FOLDER, "data/picture.txt": b"\x89PNG\xff"})
    words = ["convert", root, str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "picture.txt: is not UTF-8" in told
    assert "--exclude 'picture.txt'" in told
    assert main([*words, "--include", "*.jsonl", "--exclude", "old/*"]) == 0
    assert "excluded: 1" in capsys.readouterr().out
    assert texts(tmp_path / "out") == ["a", "b"]


# --- pipes ------------------------------------------------------------------------------------------------------------------


def piped(data: bytes) -> str:
    """A descriptor of a pipe that holds some bytes, as process substitution makes it."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return f"/dev/fd/{read}"


COMMAND = [sys.executable, "-m", "streammega", "convert"]


@pytest.mark.guarantee("stdin-pipes-process")
@pytest.mark.parametrize(
    "data",
    [
        LINES,
        gzip.compress(LINES),
        b'\n[{"text": "one"},\n {"text": "two"}]',
        b'{\n"text": "one"\n}\n{"text": "two"}',
    ],
    ids=["lines", "gzip", "array", "over lines"],
)
def test_stdin_is_read(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streammega.cli.main import main

    with open(piped(data), encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main(["convert", "-", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert texts(tmp_path / "out") == ["one", "two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.bin",
        "out.idx",
        "out.manifest.json",
    ]


@pytest.mark.guarantee("stdin-pipes-process")
def test_what_is_wrong_with_stdin_is_told_of_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streammega.cli.main import main

    def told(data: bytes, *words: str) -> tuple[int, str, str]:
        with open(piped(data), encoding="utf-8") as stream:
            monkeypatch.setattr("sys.stdin", stream)
            status = main(["convert", "-", str(tmp_path / "out"), "--tokenizer", "bytes", *words])
        return status, *capsys.readouterr()

    for data, message in (
        (LINES + b"{broken\n", "stdin:3: broken JSON"),
        (b"plain text", "stdin: begins with b'plain text'"),
    ):
        status, out, err = told(data)
        assert status == 1
        assert message in err
        assert "input-" not in out + err
        shutil.rmtree(tmp_path / ".out.convert", ignore_errors=True)
    status, out, err = told(LINES + b"{broken\n", "--on-error", "skip")
    assert status == 0
    assert "stdin:3: broken JSON" in out + err
    options = ["--on-error", "skip", "--overwrite", "--json"]
    status, out, err = told(LINES + b"{broken\n", *options)
    assert status == 0
    assert json.loads(out)["messages"][0].startswith("stdin:3: broken JSON")


def test_what_is_kept_of_a_pipe_is_its_conversions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another conversion to the output that comes in between would remove it as a former one's."""
    lock = tmp_path / ".out.convert" / "lock"

    def looked_at(*arguments: Any, **named: Any) -> Any:
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(lock).acquire(timeout=0)
        return plan(*arguments, **named)

    monkeypatch.setattr("streammega.convert.run.plan", looked_at)
    with open(piped(LINES), encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        convert(["-"], str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert texts(tmp_path / "out") == ["one", "two"]
    assert not lock.exists()


@pytest.mark.guarantee("stdin-pipes-process")
def test_a_dataset_is_not_written_to_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streammega.cli.main import main

    source = tree(tmp_path, {"a.jsonl": LINES})
    for output in ("-", "/dev/stdout"):
        assert main(["convert", source, output, "--tokenizer", "bytes"]) == 1
        assert f"{output}: a dataset is several files" in capsys.readouterr().err
    assert not list(Path.cwd().glob("-.*"))


@pytest.mark.guarantee("stdin-pipes-process")
@pytest.mark.skipif(shutil.which("bash") is None, reason="process substitution is bash's")
def test_process_substitution_is_read(tmp_path: Path) -> None:
    tree(tmp_path, {"a.jsonl": LINES, "b.txt": b"three"})
    command = " ".join(
        [*COMMAND, "<(cat a.jsonl)", "b.txt", "<(gzip -c a.jsonl)", "out", "--tokenizer", "bytes"]
    )
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        env=python_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "out") == ["one", "two", "three", "one", "two"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"plain text", r"/dev/fd/\d+: begins with b'plain text'"),
        (b"", "begins with b''"),
        (b'[{"text": 1}]', "holds int"),
    ],
)
def test_streams_that_cannot_be_read_are_named_and_leave_nothing(
    data: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=message):
        made([piped(data)], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Its manifest could not name the shards. Inputs may have such names."""
    name = os.fsdecode(b"a\xff.jsonl")
    tree(tmp_path / "in", {name: LINES})
    inputs = [str(tmp_path / "in" / name)]
    assert made(inputs, tmp_path / "out") == ["one", "two"]
    with pytest.raises(ConfigError, match=r"a.udcff': is not UTF-8; give the dataset another name"):
        made(inputs, tmp_path / os.fsdecode(b"a\xff"))


def test_a_pipe_is_read_once_and_by_this_machine(tmp_path: Path) -> None:
    pipe = piped(LINES)
    with pytest.raises(ConfigError, match="named twice"):
        made([pipe, pipe], tmp_path / "out")
    with pytest.raises(ConfigError, match="has to name a local one"):
        made([pipe], tmp_path / "out", work_dir="s3://bucket/work")
    made([pipe], tmp_path / "out")
    with pytest.raises(ConvertError, match="exists already"):
        convert([piped(LINES)], str(tmp_path / "out"), tokenizer="bytes")
    assert made([piped(LINES)], tmp_path / "out", resume=False) == ["one", "two"]
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConvertError, match="is a pipe or a device"):
        find_inputs([str(tmp_path / "fifo")])


@pytest.mark.guarantee("stdin-pipes-process")
def test_a_stream_that_is_given_again_after_a_kill_gives_the_same_bytes(tmp_path: Path) -> None:
    lines = b"".join(
        json.dumps({"text": f"text {n} " + "word " * 100}).encode() + b"\n" for n in range(12_000)
    )
    assert len(made([tree(tmp_path / "in", {"a.jsonl": lines})], tmp_path / "whole")) == 12_000
    code = (
        "import sys, logging; logging.basicConfig(); from streammega.convert import convert;"
        "convert(['-'], sys.argv[1], tokenizer='bytes', workers=1)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(lines)
    process.stdin.close()
    while process.poll() is None and not list((tmp_path / ".out.convert").glob("unit-*.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command, input=lines, capture_output=True, check=True)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()
    assert not (tmp_path / ".out.convert").exists()


# --- URLs with signatures ---------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("presigned-urls-read")
def test_a_presigned_url_is_read_and_its_query_is_nowhere(
    s3: S3, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streammega.cli.main import main

    s3.client().put_object(
        Bucket=bucket, Key="in/a b.jsonl.gz", Body=gzip.compress(LINES + b'{"text": 1}\n')
    )
    signer = botocore.session.Session().create_client(
        "s3",
        "us-east-1",
        endpoint_url=s3.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(signature_version="s3v4"),
    )
    url = signer.generate_presigned_url(
        "get_object", Params={"Bucket": bucket, "Key": "in/a b.jsonl.gz"}
    )
    secrets = [part.partition("=")[2] for part in url.partition("?")[2].split("&")]
    secrets = [secret for secret in secrets if len(secret) > 6]
    assert secrets
    words = [
        "convert",
        url,
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
        "--on-error",
        "skip",
        "--json",
    ]
    assert main(words) == 0
    assert texts(tmp_path / "out") == ["one", "two"]
    assert main([*words[:5], "--overwrite"]) == 1
    assert main(["describe", url]) == 0
    told = "".join(capsys.readouterr()) + "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    )
    assert "b.jsonl.gz:3: key 'text' holds int" in told
    assert not [secret for secret in secrets if secret in told]


def test_a_url_that_is_signed_again_is_the_same_input(tmp_path: Path) -> None:
    found = []
    with http_server({f"/a.jsonl?Signature={n}": LINES for n in range(2)}) as server:
        for number in range(2):
            inputs = find_inputs([f"{server.url}/a.jsonl?Signature={number}"])
            units = plan_units(inputs, ConvertOptions(), StorageConfig())
            found.append(
                Job(
                    options=ConvertOptions(),
                    storage=StorageConfig(),
                    work_dir=WorkDir("", StorageConfig()),
                    units=units,
                ).unit_digest(0)
            )
            assert "Signature" not in repr(inputs)
    assert found[0] == found[1]


def test_a_url_with_any_query_is_read_by_its_path(tmp_path: Path) -> None:
    with http_server(
        {"/a.JSON?key=hidden&x=%2F": b'[{"text": "one"},\n{"text": "two"}]'}
    ) as server:
        assert made([f"{server.url}/a.JSON?key=hidden&x=%2F"], tmp_path / "out") == ["one", "two"]
        with pytest.raises(
            ObjectNotFoundError, match=r"/b\.json: no such object.*signature expired"
        ) as caught:
            made([f"{server.url}/b.json?key=hidden"], tmp_path / "no")
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl?key=hidden", "*.jsonl"])
@pytest.mark.parametrize("what", ["refused", "unknown", "fails"])
def test_an_http_endpoint_that_fails_is_told_so_and_is_no_missing_object(
    tmp_path: Path, what: str, name: str
) -> None:
    storage = StorageConfig(retry_timeout=0.2).tuned(connect_deadline=0.2)
    with http_server({}) as server:
        server.status = 503
        urls = {"unknown": "https://nonexistent.invalid", "fails": server.url}
        with pytest.raises(EndpointError, match="failed after") as caught:
            find_inputs([f"{urls.get(what, 'http://127.0.0.1:1')}/{name}"], storage)
    said = {"refused": "Connect call failed", "unknown": "Cannot connect to host", "fails": "503"}
    assert said[what] in str(caught.value)
    assert "no such object" not in str(caught.value)
    assert "hidden" not in str(caught.value)


# --- names ------------------------------------------------------------------------------------------------------------------

NAMES = ["br[1]", "what?", "a::b", "st*r", "per%20 pl+us h#sh é"]


@pytest.mark.guarantee("presigned-urls-read")
@pytest.mark.parametrize("name", NAMES)
def test_signs_in_local_names_are_letters(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streammega.cli.main import main

    root = tree(
        tmp_path,
        {
            f"{name}/{name}.jsonl": LINES,
            f"{name}/x.jsonl": LINES,
            "br1/br1.jsonl": b"never",
            "whatx/whatx.jsonl": b"never",
        },
    )
    monkeypatch.chdir(tmp_path / name)
    for item in (f"{name}.jsonl", f"{root}/{name}/{name}.jsonl", f"{root}/{name}/x.jso*"):
        for output in ("o", f"out/o{name}", str(tmp_path / name / "far")):
            assert made([item], output) == ["one", "two"]
            assert verify(output).problems == []
    convert([f"{root}/{name}/o"], str(tmp_path / "again"), workers=1)
    assert texts(tmp_path / "again") == ["one", "two"]
    for described in (
        f"{root}/{name}",
        f"{root}/{name}/o",
        f"{root}/{name}/far.manifest.json",
        f"{root}/{name}/{name}.jsonl",
    ):
        assert main(["describe", described]) == 0


@pytest.mark.guarantee("presigned-urls-read")
@pytest.mark.parametrize("name", ["br[1] a::b what?"])
def test_signs_in_keys_are_letters(
    name: str, s3: S3, s3_storage: StorageConfig, bucket: str, tmp_path: Path
) -> None:
    client = s3.client()
    for key in (f"{name}/{name}.jsonl", "br1 a::b whatx/x.jsonl", "br1 a/x.jsonl"):
        client.put_object(Bucket=bucket, Key=key, Body=LINES if key.startswith(name) else b"never")
    assert [item.path for item in find_inputs([f"s3://{bucket}/{name}"], s3_storage)] == [
        f"s3://{bucket}/{name}/{name}.jsonl"
    ]
    url = f"s3://{bucket}/{name}/out"
    assert made([f"s3://{bucket}/{name}/{name}.jsonl"], url, storage=s3_storage) == ["one", "two"]
    assert verify(url, s3_storage).problems == []


@pytest.mark.parametrize("name", ["br[1]", "st*r", "what?"])
def test_signs_in_names_are_letters_where_files_are_renamed(name: str, tmp_path: Path) -> None:
    tree(tmp_path, {"a.jsonl": LINES})
    url = f"memory://names/{tmp_path.name}/{name}/out"
    assert made([str(tmp_path / "a.jsonl")], url) == ["one", "two"]
    folder = f"/names/{tmp_path.name}/{name}"
    found = [path for path in fsspec.filesystem("memory").store if path.startswith(folder)]
    assert sorted(MARK.sub("", path) for path in found) == [
        f"{folder}/out.bin",
        f"{folder}/out.idx",
        f"{folder}/out.manifest.json",
    ]


def test_a_blend_is_of_names_with_signs(tmp_path: Path) -> None:
    from streammega import DataConfig, StreamLoader

    (tmp_path / "br[1]").mkdir()
    tree(
        tmp_path,
        {
            "in.jsonl": b"".join(
                json.dumps({"text": "word " * 40}).encode() + b"\n" for _ in range(20)
            )
        },
    )
    made([str(tmp_path / "in.jsonl")], tmp_path / "br[1]" / "web")
    config = DataConfig(
        blend=[str(tmp_path / "br[1]" / "web")],
        sequence_length=32,
        split="1,0,0",
        num_samples=(8, 0, 0),
    )
    loader = StreamLoader(config, micro_batch_size=2, global_batch_size=4, dp_rank=0, dp_size=1)
    assert next(iter(loader))["tokens"].shape == (2, 32)


def test_the_environment_of_the_caller_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tree(tmp_path, {"a.jsonl": LINES})
    made([str(tmp_path / "a.jsonl")], tmp_path / "out", workers=2)
    assert os.environ["RAYON_NUM_THREADS"] == "3"
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_terminal_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(ConfigError, match="stdin is a terminal"):
        made(["-"], tmp_path / "out")
