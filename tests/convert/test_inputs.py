"""Every input format gives the documents it holds; every tokenizer its own ids; what is broken is
named, or counted.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import zstandard
from tokenizers import Tokenizer, models

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.cli.main import main
from streammega.convert import ConvertOptions, ConvertReport, convert
from streammega.convert.documents import RawDocument
from streammega.convert.job import plan_units
from streammega.convert.read.formats import FORMATS, read_slice
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.convert.tokenize.tokenizer_files import PATTERNS
from streammega.convert.tokenize.tokenizers import load_tokenizer
from streammega.errors import ConfigError, ConvertError, ObjectNotFoundError, StreammegaError
from tests.support.builders import (
    convert_bytes,
    convert_files,
    stored_ids,
    tar_bytes,
    write_jsonl,
    write_random_pair,
    write_tar,
)
from tests.support.data.make_peers import TEXTS, tokens
from tests.support.servers import S3

PEERS = Path(__file__).parents[1] / "support" / "data" / "peers"
EOD = 256


def as_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), EOD] for text in texts]


def jsonl(path: Path, pack: Callable[[bytes], bytes] = bytes) -> str:
    path.write_bytes(pack(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)))
    return str(path)


def parquet(path: Path) -> str:
    pq.write_table(pa.table({"id": list(range(len(TEXTS))), "text": TEXTS}), path, row_group_size=5)
    return str(path)


def arrow(path: Path, *, stream: bool) -> str:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink:
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return str(path)


def tar(path: Path, suffix: str, *, outer: str = "") -> str:
    with webdataset.TarWriter(str(path) + outer) as writer:
        for number, text in enumerate(TEXTS):
            data = text.encode() if "txt" in suffix else json.dumps({"text": text}).encode()
            # the writer packs .gz itself
            pack = {"zst": zstandard.compress}.get(suffix.rpartition(".")[2], bytes)
            writer.write({"__key__": f"{number:04d}", suffix: pack(data)})
    return str(path) + outer


def folder(path: Path) -> str:
    (path / "sub").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (path / "sub" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return str(path)


def listed(path: Path) -> str:
    folder(path)
    (path / "list").write_text(
        "# in order\n" + "\n".join(sorted(map(str, (path / "sub").glob("*.txt"))))
    )
    return f"@{path}/list"


TEXT_INPUTS: dict[str, Callable[[Path], str]] = {
    "jsonl": lambda p: jsonl(p / "a.jsonl"),
    "jsonl.gz": lambda p: jsonl(p / "a.jsonl.gz", gzip.compress),
    "jsonl.bz2": lambda p: jsonl(p / "a.jsonl.bz2", bz2.compress),
    "jsonl.zst": lambda p: jsonl(p / "a.jsonl.zst", zstandard.compress),
    "parquet": lambda p: parquet(p / "a.parquet"),
    "arrow file": lambda p: arrow(p / "a.arrow", stream=False),
    "arrow stream": lambda p: arrow(p / "a.arrow", stream=True),
    "tar of txt": lambda p: tar(p / "a.tar", "txt"),
    "tar of json": lambda p: tar(p / "a.tar", "json"),
    "tar of txt.zst": lambda p: tar(p / "a.tar", "txt.zst"),
    "tar of json.gz": lambda p: tar(p / "a.tar", "json.gz"),
    "tar.gz": lambda p: tar(p / "a.tar", "txt", outer=".gz"),
    "folder": lambda p: folder(p / "folder"),
    "list": lambda p: listed(p / "folder"),
    "mds": lambda p: str(PEERS / "mds_text"),
    "litdata": lambda p: str(PEERS / "litdata_text"),
    "litdata of rows": lambda p: str(PEERS / "litdata_rows"),
}


@pytest.mark.guarantee("corpus-shards-stream", "documents-format-modes")
@pytest.mark.parametrize("name", TEXT_INPUTS)
def test_texts_arrive_from_every_format(name: str, tmp_path: Path) -> None:
    report = convert_bytes(tmp_path / "out", TEXT_INPUTS[name](tmp_path))
    assert stored_ids(tmp_path / "out") == as_bytes(TEXTS)
    assert report.documents == len(TEXTS)
    assert not report.dropped


def token_arrays() -> list[list[int]]:
    return [tokens(number).tolist() for number in range(12)]


def pair(path: Path, **options: Any) -> str:
    with IndexedDatasetWriter(str(path), np.uint16, **options) as writer:
        for number in range(12):
            writer.add_item(tokens(number))
            writer.end_document()
    return str(path)


def token_tar(path: Path) -> str:
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:04d}", "npy": tokens(number)})
    return str(path)


def token_parquet(path: Path) -> str:
    pq.write_table(
        pa.table(
            {"text": [tokens(number).tolist() for number in range(12)]},
            pa.schema({"text": pa.list_(pa.int32())}),
        ),
        path,
    )
    return str(path)


TOKEN_INPUTS: dict[str, Callable[[Path], str]] = {
    "pair": lambda p: pair(p / "in"),
    "zst": lambda p: pair(p / "in.bin.zst"),
    "tar of ours": lambda p: pair(p / "in.tar"),
    "tar of npy": lambda p: token_tar(p / "in.tar"),
    "parquet of lists": lambda p: token_parquet(p / "in.parquet"),
    "mds of arrays": lambda p: str(PEERS / "mds_tokens"),
    "mds of bytes": lambda p: str(PEERS / "mds_bytes"),
    "litdata of tokens": lambda p: str(PEERS / "litdata_tokens"),
}


@pytest.mark.guarantee("corpus-shards-stream", "documents-format-modes")
@pytest.mark.parametrize("name", TOKEN_INPUTS)
def test_tokens_arrive_from_every_format(name: str, tmp_path: Path) -> None:
    report = convert_files(tmp_path / "out", TOKEN_INPUTS[name](tmp_path))
    assert stored_ids(tmp_path / "out") == token_arrays()
    assert report.dtype in ("uint16", "int32")


def test_every_format_is_among_what_is_tested_here(tmp_path: Path) -> None:
    found = {"csv", "raw", "npy"}  # have tests of their own
    for number, make in enumerate([*TEXT_INPUTS.values(), *TOKEN_INPUTS.values()]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found |= {item.format for item in find_inputs([make(folder)])}
    assert found == set(FORMATS), "TEXT_INPUTS or TOKEN_INPUTS"


def raw(path: Path, kind: str, eod: int = 50_000) -> tuple[str, list[list[int]]]:
    """Documents end to end, each closed by eod, the last one open."""
    documents = [[*[t % 50_000 for t in item], eod] for item in token_arrays()]
    documents[-1].pop()
    flat = np.array([token for document in documents for token in document], np.uint16)
    if kind == "nanogpt":
        flat.tofile(path / "train.bin")
        return str(path / "train.bin"), documents
    if kind == "llm.c":
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(flat)
        (path / "train.bin").write_bytes(header.tobytes() + flat.tobytes())
        return str(path / "train.bin"), documents
    np.save(path / "train.npy", flat.astype(np.int64))
    return str(path / "train.npy"), documents


@pytest.mark.guarantee("corpus-shards-stream")
@pytest.mark.parametrize("kind", ["nanogpt", "llm.c", "npy"])
def test_raw_arrays_are_cut_at_the_ends_of_documents(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.read.arrays.SCAN_TOKENS", 7)
    path, documents = raw(tmp_path, kind)
    convert_files(tmp_path / "out", path, eod_id=50_000)
    assert stored_ids(tmp_path / "out") == documents
    convert_files(tmp_path / "one", path)
    assert stored_ids(tmp_path / "one") == [[token for document in documents for token in document]]


def test_rows_of_an_array_are_documents(tmp_path: Path) -> None:
    rows = np.arange(30, dtype=np.int32).reshape(6, 5)
    np.save(tmp_path / "rows.npy", rows)
    convert_files(tmp_path / "out", tmp_path / "rows.npy")
    assert stored_ids(tmp_path / "out") == rows.tolist()


def test_inputs_are_read_from_object_storage(
    s3: S3, s3_storage: StorageConfig, bucket: str, tmp_path: Path
) -> None:
    import s3fs

    system = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    for name, data in (("in/a.jsonl.gz", Path(jsonl(tmp_path / "a.jsonl.gz", gzip.compress)).read_bytes()),
                       ("in/b.parquet", Path(parquet(tmp_path / "b.parquet")).read_bytes())):  # fmt: skip
        system.pipe_file(f"{bucket}/{name}", data)
    for item in (f"s3://{bucket}/in", f"s3://{bucket}/in/*"):
        out = convert_bytes(tmp_path / "out", item, storage=s3_storage, overwrite=True)
        assert stored_ids(tmp_path / "out") == as_bytes(TEXTS) * 2
    convert_files(f"s3://{bucket}/pair", tmp_path / "out", storage=s3_storage)
    convert_files(tmp_path / "back", f"s3://{bucket}/pair", storage=s3_storage)
    (shard,) = out.shard_prefixes
    assert (tmp_path / "back.bin").read_bytes() == Path(f"{shard}.bin").read_bytes()
    with pytest.raises(StreammegaError, match="nothing-here"):
        find_inputs([f"s3://{bucket}/nothing-here"], s3_storage)


@pytest.mark.parametrize("unit", [1, 50, 333, 4096])
def test_large_files_are_cut_into_units_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", unit)
    monkeypatch.setattr("streammega.convert.job.SEGMENT_BYTES", 100)
    inputs = [jsonl(tmp_path / "a.jsonl"), parquet(tmp_path / "b.parquet"), pair(tmp_path / "c")]
    assert len(plan_units(find_inputs(inputs), ConvertOptions(), StorageConfig())) >= (
        10 if unit < 300 else 1
    )
    convert_bytes(tmp_path / "out", *inputs[:2])
    assert stored_ids(tmp_path / "out") == as_bytes(TEXTS) * 2
    convert_files(tmp_path / "out2", *inputs[2:], min_tokens=1)
    assert stored_ids(tmp_path / "out2") == token_arrays()


# --- tokenizers ---------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("corpus-shards-stream")
def test_sentencepiece_models_give_its_own_ids(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text(
        "\n".join(f"{text} the quick brown fox {n}" for n, text in enumerate(TEXTS * 20))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=60,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    report = convert_files(
        tmp_path / "out", jsonl(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "sp.model")
    )
    assert stored_ids(tmp_path / "out") == [[*model.encode(text), model.eos_id()] for text in TEXTS]
    assert (report.vocab_size, report.eod_id) == (model.vocab_size(), model.eos_id())


@pytest.mark.guarantee("corpus-shards-stream")
def test_llama_files_of_one_size_name_special_tokens_by_their_pattern() -> None:
    llama3, later = PATTERNS["llama3"], PATTERNS["llama3.1"]
    assert later.expression == llama3.expression
    assert [*llama3.special_tokens.values()] == [*later.special_tokens.values()] == [*range(256)]
    named = {"<|finetune_right_pad_id|>": 4, "<|eom_id|>": 8, "<|eot_id|>": 9, "<|python_tag|>": 10}
    assert named.items() <= later.special_tokens.items()
    assert llama3.special_tokens["<|reserved_special_token_4|>"] == 8
    assert later.special_tokens["<|reserved_special_token_247|>"] == 255


def test_tiktoken_files_give_its_own_ids(tmp_path: Path) -> None:
    import base64

    import tiktoken

    ranks = {bytes([value]): value for value in range(256)} | {b"do": 256, b"doc": 257}
    lines = [base64.b64encode(token) + f" {rank}".encode() for token, rank in ranks.items()]
    (tmp_path / "small.tiktoken").write_bytes(b"\n".join(lines))
    pattern, special = PATTERNS["cl100k_base"]
    model = tiktoken.Encoding(
        "x",
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={token: 258 + number for token, number in special.items()},
    )
    settings: Any = {
        "tokenizer": str(tmp_path / "small.tiktoken"),
        "tiktoken_pattern": "cl100k_base",
    }
    convert([jsonl(tmp_path / "a.jsonl")], str(tmp_path / "out"), workers=1, **settings)
    assert stored_ids(tmp_path / "out") == [[*model.encode_ordinary(text), 259] for text in TEXTS]
    assert (
        load_tokenizer(str(tmp_path / "small.tiktoken"), pattern="cl100k_base").decode(
            model.encode_ordinary("doc")
        )
        == "doc"
    )
    texts = ["", "half a \ud800 pair", "<|endoftext|> doc"]
    as_text = load_tokenizer(str(tmp_path / "small.tiktoken"), pattern="cl100k_base")
    parsed = load_tokenizer(
        str(tmp_path / "small.tiktoken"), pattern="cl100k_base", special_tokens_in_text="parse"
    )
    assert [list(ids) for ids in as_text.encode(texts)] == list(map(model.encode_ordinary, texts))
    assert [list(ids) for ids in parsed.encode(texts)] == [
        model.encode(text, allowed_special="all") for text in texts
    ]


@pytest.mark.parametrize("name", ["no.json", "no.model", "no.tiktoken", "/no/such", "./here"])
def test_tokenizers_that_are_not_there_are_named(name: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="no such tokenizer file"):
        load_tokenizer(name)


def test_a_mistyped_name_of_bytes_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(ObjectNotFoundError, match="byte: no such tokenizer file; is bytes meant"):
        load_tokenizer("byte")


@pytest.mark.parametrize("name", ["x.json", "x.model", "x.tiktoken"])
def test_files_that_are_no_tokenizers_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("nothing of the kind")
    with pytest.raises(ConvertError, match=name):
        load_tokenizer(str(tmp_path / name))


def test_byte_pairs_of_one_number_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    """A panic within the library."""
    (tmp_path / "x.tiktoken").write_text("YQ== 0\nYg== 0\n")
    with pytest.raises(ConvertError, match=r"x\.tiktoken: cannot be loaded \(RuntimeError: panic"):
        load_tokenizer(str(tmp_path / "x.tiktoken"), pattern="gpt2")


def test_a_panic_of_the_tokenizers_library_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = json.loads(Tokenizer(models.BPE({"o": 0, "n": 1, "on": 2}, [("o", "n")])).to_str())
    described["model"]["continuing_subword_prefix"] = "longer than any token"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    (tmp_path / "a.txt").write_text("on")
    words = [str(tmp_path / "a.txt"), str(tmp_path / "out"), "--tokenizer", str(path)]
    assert main(["convert", *words]) == 1
    printed = capsys.readouterr().err
    assert f"error: {path}: is not a tokenizer.json that the tokenizers library reads" in printed
    assert "Traceback" not in printed


# --- what is made of documents ----------------------------------------------------------------------------------------


@pytest.mark.guarantee("documents-format-modes")
def test_several_keys_are_sequences_with_modes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "one?", "a": "1"}, {"q": "", "a": "2"}])
    convert_bytes(tmp_path / "out", path, text_keys=("q", "a:1"))
    made = IndexedDataset(str(tmp_path / "out"))
    assert [(bytes(t[t < 256].astype(np.uint8)).decode(), mode) for t, mode in made[:]] == [
        ("one?", 0),
        ("1", 1),
        ("2", 1),
    ]
    assert made.document_indices.tolist() == [0, 2, 3]
    assert [int(t[-1]) == EOD for t, _ in made[:]] == [False, True, True]


@pytest.mark.guarantee("documents-format-modes")
def test_turns_of_chats_have_modes_and_can_be_chosen_by_them(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"messages": turns}, {"conversations": [{"from": "gpt", "value": "x"}]}],
    )
    convert_bytes(tmp_path / "out", path, chat=True)
    made = IndexedDataset(str(tmp_path / "out"))
    assert [(bytes(t[t < 256].astype(np.uint8)).decode(), mode) for t, mode in made[:]] == [
        ("<|user|>\n", 0), ("hi", 0), ("<|assistant|>\n", 0), ("yes", 1), ("<|assistant|>\n", 0), ("x", 1),
    ]  # fmt: skip
    convert_files(tmp_path / "answers", tmp_path / "out", keep_modes=(1,))
    assert [t.tolist() for t, _ in IndexedDataset(str(tmp_path / "answers"))[:]] == [
        [*b"yes", EOD], [*b"x", EOD],
    ]  # fmt: skip


@pytest.mark.guarantee("left-out-counted")
def test_long_and_short_documents_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * size} for size in (0, 1, 5, 9, 20)])
    cut = convert_bytes(tmp_path / "cut", path, min_tokens=3, max_tokens=8)
    assert stored_ids(tmp_path / "cut") == [[*b"x" * 5, EOD], [*b"x" * 7, EOD], [*b"x" * 7, EOD]]
    assert cut.dropped == {"empty": 1, "too short": 1, "cut": 2, "tokens cut off": 2 + 13}
    dropped = convert_bytes(tmp_path / "d", path, max_tokens=8, max_tokens_policy="drop")
    assert stored_ids(tmp_path / "d") == [[120, EOD], [*b"x" * 5, EOD]]
    assert dropped.dropped == {"empty": 1, "too long": 2}


def test_a_dtype_that_cannot_hold_the_ids_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 70_000]))
    with pytest.raises(ConvertError, match="70000, which uint16 cannot hold"):
        convert_files(tmp_path / "out", tmp_path / "a.npy", dtype="uint16")
    convert_files(tmp_path / "out", tmp_path / "a.npy")
    assert IndexedDataset(str(tmp_path / "out")).dtype == np.int32
    with pytest.raises(ConvertError, match="which uint16 cannot hold"):
        convert_files(tmp_path / "narrow", tmp_path / "out", dtype="uint16")
    with pytest.raises(ConfigError, match="cannot hold the 257 ids of bytes; use uint16"):
        convert_bytes(tmp_path / "o", jsonl(tmp_path / "t.jsonl"), dtype="uint8")


def test_the_dtype_can_be_changed(tmp_path: Path) -> None:
    sequences = write_random_pair(str(tmp_path / "in"), vocab=60_000)
    convert_files(tmp_path / "wide", tmp_path / "in", dtype="int32")
    assert IndexedDataset(str(tmp_path / "wide")).dtype == np.int32
    assert stored_ids(tmp_path / "wide") == [sequence.tolist() for sequence in sequences]


# --- what is broken -----------------------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'


HOSTILE_NAMES = ("good.txt", "../../etc/evil.txt", "/abs.txt", "also good.txt")
HOSTILE_TAR = tar_bytes(*((name, b"good") for name in HOSTILE_NAMES))
PLAIN_TAR = tar_bytes(*((f"{number}.txt", b"good") for number in range(30)))


def zeroed(data: bytes, at: int) -> bytes:
    """As a copy leaves it that reserved the file and lost a part."""
    return data[:at] + bytes(2048) + data[at + 2048 :]


def npy(*shape: int) -> bytes:
    """An array of ids in a file."""
    with io.BytesIO() as file:
        np.save(file, np.ones(shape, np.uint16))
        return file.getvalue()


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# name: (file, content, the error, documents that are left under --on-error skip, None: some)
BROKEN_RECORDS: dict[str, tuple[str, bytes, str, int | None]] = {
    "broken JSON": ("a.jsonl", GOOD + b'{"text": \n' + GOOD, r"a\.jsonl:2: broken JSON", 2),
    "not UTF-8": ("a.jsonl", b'{"text": "\xff"}\n' + GOOD, r"a\.jsonl:1: is not UTF-8", 1),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}\n' + GOOD, r"a\.jsonl:1: holds half", 1),
    "several keys": (
        "a.jsonl",
        GOOD + b'{"body": "b", "id": 1}\n',
        r"a\.jsonl:2: has no key 'text' \(it has: 'body', 'id'\)",
        1,
    ),
    "not an object": ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: has no key .*\(it has: list\)", 0),
    "not text": ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: key 'text' holds int", 0),
    "deep JSON": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", r"a\.jsonl:2: broken JSON", 1),
}
BROKEN_FILES: dict[str, tuple[str, bytes, str, int | None]] = {
    "gz": ("a.jsonl.gz", gzip.compress(GOOD * 9999, 1)[:-900], "a.jsonl.gz: cannot be read", None),
    "bz2": ("a.jsonl.bz2", bz2.compress(GOOD * 9999)[:-9], "cannot be read", None),
    "zst": ("a.jsonl.zst", zstandard.compress(GOOD * 9999)[:-4], "cannot be read", None),
    "in a member": ("a.tar", PLAIN_TAR[: 512 * 9 + 2], r"cannot be read .*a\.tar!4\.txt", 4),
    "a header": ("a.tar", damaged(PLAIN_TAR, 4096), "header at byte 4,096 is damaged", 4),
    "the last header": ("a.tar", damaged(PLAIN_TAR, 29696), "header at byte 29,696", 29),
    "zeros": ("a.tar", zeroed(PLAIN_TAR, 1024 * 9), "goes on after its end", 9),
    "two tars in one": ("a.tar", PLAIN_TAR + PLAIN_TAR, "goes on after its end", 30),
    "compressed": ("a.tar", gzip.compress(PLAIN_TAR), "is compressed.* to .tar.gz", 0),
    "no tar": ("a.tar", GOOD * 999, r"a\.tar: cannot be read", 0),
    "between members": ("a.tar", PLAIN_TAR[: 512 * 8], "no end; it is cut short", 4),
    "no parquet": ("a.parquet", b"PAR1 nothing", "a.parquet: cannot be read", 0),
    "no arrow": ("a.arrow", b"nothing at all", "a.arrow: cannot be read", 0),
    "no npy": ("a.npy", b"nothing", "a.npy: cannot be read", 0),
    "a cut llm.c file": (
        "a.bin.gz",
        gzip.compress(np.array([20240520, 1, 30, *[0] * 253], "<i4").tobytes() + bytes(52)),
        "its header says 30 tokens, it holds 26",
        0,
    ),
    "odd bytes": ("a.bin", b"\1\0\2", "ends inside a token of 2 bytes", 0),
    "a cut array": ("a.npy", npy(30)[:-8], "its header says 30 tokens, it holds 26", 0),
    "half a token": ("a.npy", npy(30)[:-1], "its header says 30 tokens, it holds 29", 0),
    "two arrays": ("a.npy", npy(30) + npy(4), "its header says 30 tokens, it holds 98", 0),
    "two tables": ("a.npy", npy(3, 5) + npy(3, 5), "goes on after its array", 3),
}
BROKEN = [
    *((*row, {"broken record": 1}) for row in BROKEN_RECORDS.values()),
    *((*row, {"unreadable file": 1}) for row in BROKEN_FILES.values()),
    ("a.tar", HOSTILE_TAR, "outside of its archive", 2, {"hostile path": 2}),
]


@pytest.mark.guarantee("broken-input-stops", "names-in-folder")
@pytest.mark.parametrize(
    ("file", "data", "message", "left", "counts"),
    BROKEN,
    ids=[*BROKEN_RECORDS, *BROKEN_FILES, "hostile names"],
)
def test_broken_inputs_are_named_or_counted(
    file: str, data: bytes, message: str, left: int | None, counts: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ConvertError, match=message):
        convert_bytes(tmp_path / "out" / "p", tmp_path / file)
    assert not list((tmp_path / "out").glob("*"))
    jsonl(tmp_path / "z.jsonl")
    report = convert_bytes(tmp_path / "p", tmp_path / file, tmp_path / "z.jsonl", on_error="skip")
    assert {kind: report.dropped.get(kind) for kind in counts} == counts
    assert len(report.messages) == sum(counts.values())
    assert file in report.messages[0]
    assert report.documents >= len(TEXTS) + (left or 0)
    assert left is None or report.documents == len(TEXTS) + left


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_weigh_what_they_hold(tmp_path: Path, kind: str) -> None:
    texts = ["x" * 300_000] * 30
    table = pa.table({"text": texts})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, use_dictionary=False, compression="none")
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    piece = Slice(input=Input(path=str(path), format=kind, size=1, etag=""))
    read = list(read_slice(piece, ConvertOptions(), StorageConfig(), Skipped()))
    assert len(read) == 30
    for document in read:
        assert isinstance(document, RawDocument)
        assert 300_000 <= document.size <= 330_000


@pytest.mark.guarantee("broken-input-stops")
def test_lines_of_later_units_have_their_true_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(GOOD * 40 + b"{\n" + GOOD * 40)
    with pytest.raises(ConvertError, match=r"a\.jsonl:41: broken JSON"):
        convert_bytes(tmp_path / "out", tmp_path / "a.jsonl")


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet")
    with pytest.raises(ConvertError, match=r"has no column 'text' \(it has: 'body'\)"):
        convert_bytes(tmp_path / "out", tmp_path / "a.parquet")
    assert report_of(tmp_path / "a.parquet", tmp_path, text_keys=("body",)).documents == len(TEXTS)


def report_of(path: Path, tmp_path: Path, **options: Any) -> ConvertReport:
    return convert_bytes(tmp_path / "made", path, **options)


def test_text_needs_a_tokenizer_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="--tokenizer"):
        convert_files(tmp_path / "out", jsonl(tmp_path / "a.jsonl"))


def test_a_document_longer_than_an_index_can_say_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.read.arrays.MAX_TOKENS", 1000)
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConvertError, match="over 1,000 tokens; name the id"):
        convert_files(tmp_path / "out", tmp_path / "a.bin")


@pytest.mark.guarantee("nothing-else-unpickled")
def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [{
        "format": "mds", "version": 2, "column_names": ["text"], "column_encodings": ["pkl"], "column_sizes": [None],
        "compression": None, "hashes": [], "raw_data": {"basename": "s.mds", "bytes": 20, "hashes": {}}, "samples": 1,
        "size_limit": 9, "zip_data": None}]}))  # fmt: skip
    (tmp_path / "s.mds").write_bytes(np.array([1, 12, 20, 4], "<u4").tobytes() + b"boom")
    with pytest.raises(ConvertError, match="has no key 'text'"):
        convert_bytes(tmp_path / "out", tmp_path)
    np.save(tmp_path / "evil.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ConvertError, match="token arrays are integers"):
        convert_files(tmp_path / "out", tmp_path / "evil.npy")


def write_litdata(folder: Path, formats: list[str], *items: list[bytes]) -> None:
    """A chunk of items of these values; of several, the first is called `text`."""
    folder.mkdir()
    stored = [np.array(list(map(len, item)), "<u4").tobytes() + b"".join(item) for item in items]
    ends = np.cumsum([4 * (len(items) + 2), *map(len, stored)])
    chunk = np.array([len(items), *ends], "<u4").tobytes() + b"".join(stored)
    (folder / "chunk.bin").write_bytes(chunk)
    names = ["text", *map(str, range(1, len(formats)))]
    spec = json.dumps([1, {"type": "builtins.dict", "context": json.dumps(names)}])
    config = {"data_format": formats, "data_spec": spec if len(formats) > 1 else None}
    index = {"chunks": [{"filename": "chunk.bin"}], "config": config}
    (folder / "index.json").write_text(json.dumps(index))


def test_a_packed_shard_may_be_larger_than_a_record(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(100)]
    write_litdata(tmp_path / "in", ["str"], *([text.encode()] for text in texts))
    chunk = tmp_path / "in/chunk.bin"
    chunk.write_bytes(zstandard.compress(chunk.read_bytes()))
    index = tmp_path / "in/index.json"
    stored = json.loads(index.read_text())
    stored["config"]["compression"] = "zstd"
    index.write_text(json.dumps(stored))
    convert_bytes(tmp_path / "out", tmp_path / "in", max_record_bytes=20)
    assert stored_ids(tmp_path / "out") == as_bytes(texts)


@pytest.mark.guarantee("names-in-folder")
@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("inside", ["../{}", "sub/../../{}", "{folder}/{}", "..%2F{}"])
def test_an_index_that_names_files_outside_of_its_folder_is_refused(
    inside: str, scheme: str, tmp_path: Path
) -> None:
    write_litdata(tmp_path / "in", ["str"], [b"text"])
    (tmp_path / "in/chunk.bin").rename(tmp_path / "chunk.bin")
    (tmp_path / "in/sub").mkdir()
    index = tmp_path / "in/index.json"
    name = inside.format("chunk.bin", folder=tmp_path)
    index.write_text(index.read_text().replace('"chunk.bin"', json.dumps(name)))
    with pytest.raises(ConvertError, match="which is outside of the folder"):
        convert_bytes(tmp_path / "out", f"{scheme}{tmp_path}/in")


@pytest.mark.parametrize(
    "column", ["numpy", "tensor", "no_header_tensor:10", "no_header_numpy:9", "jpeg", "pickle"]
)
def test_columns_of_litdata_that_are_no_tokens_are_left_out(column: str, tmp_path: Path) -> None:
    code = {"numpy": 9, "tensor": 10}.get(column)
    header = b"" if code is None else np.array([code, 1, 4], "<u4").tobytes()
    write_litdata(tmp_path / "in", ["str", column], [b"text", header + bytes(8)])
    convert_bytes(tmp_path / "out", tmp_path / "in")
    assert stored_ids(tmp_path / "out") == as_bytes(["text"])
    write_litdata(tmp_path / "alone", [column], [header + bytes(8)])
    with pytest.raises(ConvertError, match=r"chunk\.bin#0: holds neither text nor tokens"):
        convert_bytes(tmp_path / "none", tmp_path / "alone")


def test_packed_members_that_nothing_decompresses_are_no_texts(tmp_path: Path) -> None:
    members = [("1.txt.lz4", b"packed"), ("2.txt", b"plain")]
    path = write_tar(tmp_path / "a.tar", *members)
    with pytest.raises(
        ConvertError, match=r"a\.tar!1\.txt\.lz4: \.lz4 is not read .*decompress it"
    ):
        convert_bytes(tmp_path / "out", path)
    report = convert_bytes(tmp_path / "out", path, on_error="skip")
    assert stored_ids(tmp_path / "out") == as_bytes(["plain"])
    assert report.dropped == {"unreadable member": 1}


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({"he": 0}, unk_token="[UNK]"),
        models.WordLevel({"he": 0}, unk_token="[UNK]"),
        models.Unigram([("he", -1.0)]),
        models.BPE({"o": 0, "t": 1}, []),
        models.BPE({"o": 0, "t": 1, "<0x68>": 2}, [], byte_fallback=True),
    ],
)
def test_a_tokenizer_without_a_token_for_the_unknown_is_named(tmp_path: Path, model: Any) -> None:
    (tmp_path / "a.txt").write_text("other")
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConvertError, match=r"tokenizer\.json: cannot encode a text \(.*unk_token"):
        convert(
            [str(tmp_path / "a.txt")],
            str(tmp_path / "out"),
            tokenizer=str(tmp_path / "tokenizer.json"),
            append_eod=False,
        )
