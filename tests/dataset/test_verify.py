"""Verify says exactly what is wrong and where; describe shows every format."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.cli.main import main
from streammega.convert import convert
from streammega.dataset.idx import encode_index
from streammega.dataset.names import SUFFIXES
from streammega.dataset.verify import VerifyReport, check_bytes, verify
from streammega.errors import ObjectNotFoundError, StorageError
from streammega.storage import open_store
from streammega.storage.progress import ProgressObserver
from streammega.storage.store import ObjectInfo, WrapperStore
from tests.convert.test_inputs import PEERS, jsonl, parquet, tar
from tests.support.builders import KINDS, write_random_pair
from tests.support.servers import S3

EOD = 256


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """The folder of a text corpus in shards of every kind, its manifest beside each."""
    for number in range(40):
        (tmp_path / "texts" / f"{number:02d}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(
            f"text number {number} " * (number % 7 + 1)
        )
    for kind in KINDS:
        convert(
            [str(tmp_path / "texts")],
            str(tmp_path / kind),
            tokenizer="bytes",
            format=kind,
            shard_bytes=2000,
            workers=1,
        )
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_dataset_is_sound(dataset: Path, kind: str) -> None:
    report = verify(str(dataset / kind))
    assert report.problems == []
    assert report.notes == []
    assert report.checksums
    assert (report.documents, report.lowest_id, report.highest_id) == (40, 32, EOD)
    assert report.checked_bytes == sum(
        path.stat().st_size for path in dataset.glob(f"{kind}-*") if path.suffix != ".idx"
    )


@pytest.mark.guarantee("verify-finds-flipped")
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_is_found_wherever_it_is(dataset: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    shards = sorted(path for path in dataset.glob(f"{kind}-*") if not path.name.endswith(".json"))
    for path in shards:
        good = path.read_bytes()
        for at in rng.integers(0, len(good), 4):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(bad)
            report = verify(str(dataset / f"{kind}.manifest.json"))
            assert any(
                path.name in problem or path.stem in problem for problem in report.problems
            ), (path, at)
        path.write_bytes(good)
    assert verify(str(dataset / kind)).problems == []


@pytest.mark.parametrize("kind", KINDS)
def test_lost_bytes_and_shards_are_named(dataset: Path, kind: str) -> None:
    path = sorted(path for path in dataset.glob(f"{kind}-*") if path.suffix != ".idx")[0]
    good = path.read_bytes()
    path.write_bytes(good[:-600])
    assert any(
        "the manifest says" in problem and path.name in problem
        for problem in verify(str(dataset / kind)).problems
    )
    path.unlink()
    assert any(
        path.name in problem and "no such file" in problem
        for problem in verify(str(dataset / kind)).problems
    )
    (dataset / f"{kind}.manifest.json").unlink()
    path.write_bytes(good)
    sorted(dataset.glob(f"{kind}-*.idx"))[1].unlink()
    assert any("are missing" in problem for problem in verify(f"{dataset}/{kind}-*").problems)


@pytest.mark.guarantee("verify-finds-flipped")
def test_ids_and_ends_are_checked(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "p"), count=50)
    tokens = np.fromfile(tmp_path / "p.bin", np.uint16)
    highest = int(tokens.max())
    assert verify(str(tmp_path / "p"), vocab_size=highest + 1).problems == []
    first = int(np.flatnonzero(tokens == highest)[0])
    (problem,) = verify(str(tmp_path / "p"), vocab_size=highest).problems
    assert f"token {first} is {highest}, outside of the {highest} ids" in problem
    lengths = IndexedDataset(str(tmp_path / "p")).sequence_lengths
    report = verify(str(tmp_path / "p"), eod_id=highest + 5)
    assert (
        f"document {int(np.flatnonzero(lengths)[0])} does not end with {highest + 5} ({int((lengths > 0).sum())} such"
        in report.problems[0]
    )
    assert "not checked: pass the id" in verify(str(tmp_path / "p")).notes[0]
    with open(tmp_path / "p.bin", "ab") as file:
        file.write(b"1234")
    assert "4 bytes belong to no sequence" in verify(str(tmp_path / "p")).notes[-1]


def test_a_vocabulary_of_no_ids_has_none_of_those_stored(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "p"), count=5)
    (problem,) = verify(str(tmp_path / "p"), vocab_size=0).problems
    assert "outside of the 0 ids" in problem


def test_a_disk_that_cannot_be_read_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_pair(str(tmp_path / "p"), count=5)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match=r"p\.bin: Input/output error"):
        verify(str(tmp_path / "p"))


class Seen(ProgressObserver):
    def __init__(self) -> None:
        self.totals: list[int | None] = []
        self.bytes = 0

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        self.totals.append(total)

    def advance(self, size: int, tokens: int = 0) -> None:
        self.bytes += size


@pytest.mark.parametrize("kind", KINDS)
def test_progress_tells_every_byte_once_as_stored_and_then_as_tokens(
    tmp_path: Path, kind: Any
) -> None:
    for dtype in (np.uint16, np.float32):  # what is stored may be no ids
        prefix = str(tmp_path / f"{kind}-{np.dtype(dtype)}")
        with IndexedDatasetWriter(prefix, dtype, kind=kind) as writer:
            writer.add_document(np.arange(100, dtype=dtype), [60, 40])
        seen = Seen()
        report = verify(prefix if kind == "bin" else f"{prefix}{SUFFIXES[kind]}", progress=seen)
        assert report.problems == []
        unpacked = 0 if kind == "bin" else 100 * np.dtype(dtype).itemsize
        assert seen.totals == [seen.bytes] == [writer.stored.size + unpacked]
        assert report.checked_bytes == writer.stored.size


def test_structure_is_checked_without_a_manifest(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "p.bin")
    bad = encode_index(np.dtype(np.uint16), np.array([10, 11], np.int32), np.array([0, 2]), None)
    (tmp_path / "p.idx").write_bytes(b"".join(bad))
    assert (
        "sequence 1 is at bytes [20, +22), but the .bin has 40 bytes"
        in verify(str(tmp_path / "p")).problems[0]
    )
    with pytest.raises(ObjectNotFoundError):
        verify(str(tmp_path / "nothing"))


def test_verify_reads_object_storage(
    dataset: Path, s3: S3, s3_storage: StorageConfig, bucket: str
) -> None:
    url = f"s3://{bucket}/web"
    convert(
        [str(dataset / "zst.manifest.json")],
        url,
        format="zst",
        shard_bytes=2000,
        eod_id=EOD,
        storage=s3_storage,
        workers=1,
    )
    report = verify(url, s3_storage, vocab_size=257)
    assert (report.problems, report.documents) == ([], 40)


@pytest.mark.guarantee("verify-finds-flipped")
@pytest.mark.parametrize("kind", ["bin", "zst"])
@pytest.mark.parametrize("loss", ["gone", "garbage", "cut short"])
def test_a_lost_or_broken_index_is_named(dataset: Path, kind: str, loss: str) -> None:
    path = sorted(dataset.glob(f"{kind}-*.idx"))[1]
    good = path.read_bytes()
    damage = {"gone": None, "garbage": b"x" * len(good), "cut short": good[:40]}[loss]
    path.unlink() if damage is None else path.write_bytes(damage)
    problems = verify(str(dataset / kind)).problems
    assert problems
    assert all(path.name in problem for problem in problems)


def chat(path: Path) -> str:
    """A dataset of documents of several sequences with modes."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (path / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 5)
    convert([str(path / "chat.jsonl")], str(path / "chat"), tokenizer="bytes", chat=True, workers=1)
    return str(path / "chat")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multimodal": False}, "modes"),
        ({"dtype": "int16"}, "int16"),
        ({"sequences": 3}, "3 sequences"),
    ],
)
def test_verify_compares_with_all_that_the_manifest_says(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    name = chat(tmp_path)
    assert verify(name).problems == []
    path = tmp_path / "chat.manifest.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | change))
    assert any(message in problem for problem in verify(name).problems)
    path.write_text(
        json.dumps(
            found | {"shards": [found["shards"][0] | change]}
            if "sequences" in change
            else found | change
        )
    )
    assert any(message in problem for problem in verify(name).problems)


@pytest.mark.parametrize("option", ["--vocab-size", "--eod-id"])
def test_ids_below_zero_are_refused(
    option: str, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(dataset / "bin"), option, "-1"]) == 2
    said = capsys.readouterr()
    assert "problems" not in said.out
    assert option in said.err


def test_of_several_shards_a_damaged_manifest_is_what_is_told(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dataset / "bin.manifest.json"
    path.write_text(path.read_text()[:100])
    assert main(["verify", str(dataset / "bin")]) == 1
    assert f"{path}: is a damaged manifest" in capsys.readouterr().out


@pytest.mark.guarantee("verify-finds-flipped")
def test_the_command_says_what_is_wrong_and_exits_with_1(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(dataset / "bin")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{dataset / 'bin'}: sound\n")
    assert re.search(r"^documents: 40$", out, re.MULTILINE)
    blend = str(dataset / "blend.json")
    assert main(["manifest", str(dataset / "zst"), str(dataset / "bin"), blend]) == 0
    capsys.readouterr()
    path = sorted(dataset.glob("bin-*.bin"))[0]
    data = bytearray(path.read_bytes())
    data[4:6] = b"\xff\xff"
    path.write_bytes(data)
    assert main(["verify", str(dataset / "bin")]) == 1
    out = capsys.readouterr().out
    first, *details = out.splitlines()
    assert first.startswith(f"{dataset / 'bin'}: damaged (1 more problem below): {path}: ")
    assert re.search("copy them again|copy it again", first), "what to do"
    assert details[0].startswith(f"problems: {path}: ")
    assert f"{path}: bytes [0, {len(data)}) are damaged" in out
    assert "token 2 is 65535, outside of the 257 ids of tokenizer bytes (" in out
    assert main(["verify", str(dataset / "bin"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == verify(str(dataset / "bin")).problems
    assert main(["verify", str(dataset / "nothing")]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["verify", blend]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{blend}: 1 of 2 datasets damaged"
    assert second.startswith(f"{dataset / 'bin'}: damaged"), "the sound one comes last"


DESCRIBED: dict[str, tuple[Any, str]] = {
    "zst": (lambda d: str(d / "zst"), "format: zstd shards (.bin.zst)\n"),
    "tar": (lambda d: str(d / "tar.manifest.json"), "format: WebDataset tars\n"),
    "pair": (lambda d: str(d / "bin-00000-of-00004"), "Megatron .bin/.idx"),
    "folder of text": (lambda d: str(d / "texts"), "text      40 "),
    "jsonl": (lambda d: jsonl(d / "x.jsonl"), "document 0"),
    "parquet": (lambda d: parquet(d / "x.parquet"), "document 0"),
    "webdataset": (lambda d: tar(d / "x.tar", "txt"), "document 0"),
    "mds": (lambda d: str(PEERS / "mds_tokens"), "uint16 tokens ["),
    "litdata": (lambda d: str(PEERS / "litdata_text"), "document 0"),
}


@pytest.mark.guarantee("describe-shows-format")
@pytest.mark.parametrize("name", DESCRIBED)
def test_describe_shows_every_format(
    dataset: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = DESCRIBED[name]
    if name == "pair":
        make = lambda d: str(sorted(d.glob("bin-*.bin"))[0])[:-4]  # noqa: E731
    assert main(["describe", make(dataset)]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.guarantee("left-out-counted")
def test_the_report_tells_everything(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dataset / "bad.jsonl").write_text('{"text": "one"}\n{\n{"text": ""}\n{"text": "one"}\n')
    convert_bad = f"convert {dataset}/bad.jsonl {dataset}/out --tokenizer bytes --on-error skip"
    assert main(f"{convert_bad} --dedup --format zst --shard-size 1M".split()) == 0
    text = capsys.readouterr().out
    assert "documents: 1\ntokens: 4\ndtype: uint16\n" in text
    assert "duplicates: 1\n  broken record: 1\n  empty: 1\n" in text
    assert "bad.jsonl:2: broken JSON" in text
    convert_again = f"{convert_bad} --dedup --format zst --shard-size 1M --overwrite --json"
    assert main(convert_again.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dropped"] == {"broken record": 1, "empty": 1, "duplicates": 1}
    counts = [entry["documents"] for entry in found["document_lengths"]]
    assert sum(counts) == 2, "of what was encoded"
    assert main(f"{convert_bad} --shard-size x".split()) == 1
    assert "write a size as 512M" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "float32"], "holds no token ids"),
    ],
)
def test_odd_settings_are_one_message(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    convert_text = f"convert {tmp_path}/a.txt {tmp_path}/o --tokenizer bytes"
    assert main([*convert_text.split(), *words]) == 1
    assert message in capsys.readouterr().err


def test_ctrl_c_does_not_wait_for_a_server_that_hangs() -> None:
    is_over = threading.Event()

    class HangingStore(WrapperStore):
        def read(self, *_: Any, **__: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            is_over.wait(60)
            return [bytes(8)]

    store = HangingStore(open_store("web", StorageConfig())[0])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            check_bytes(
                store, ObjectInfo(key="web.bin", size=8, etag="x"), VerifyReport(name="web")
            )
    finally:
        signal.signal(signal.SIGINT, before)
        is_over.set()
    assert time.monotonic() - began < 50
