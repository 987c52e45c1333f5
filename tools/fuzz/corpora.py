"""Fuzz targets for what `convert` reads, each compared with a plain reader of the same format."""

from __future__ import annotations

import base64
import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import read_slice
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.convert.tokenize.encode import BatchEncoder
from streammega.convert.tokenize.tokenizers import load_tokenizer, resolve_eod
from streammega.errors import StreammegaError
from tools.fuzz.common import STORAGE, Target, new_number, stored_in

TEXTS = ("one", "two words", "é中\U0001f600", 'a "quote", a comma', "x" * 300)
RECORDS = [{"text": text, "id": str(number)} for number, text in enumerate(TEXTS)]
MAX_RECORD_BYTES = 1 << 20
"""Bytes of a record, and of what a second reader decompresses."""
BATCH_DOCUMENTS = 64
Documents = list[bytes]
Reader = Callable[[bytes], "Documents | None"]
"""A plain reader: the documents of a file, or None where it has no opinion."""


def corpus_target(
    folder: Path, suffix: str, format: str, seeds: list[bytes], plain: Reader, **settings: Any
) -> Target:
    """A file that `convert` reads. settings: of ConvertOptions."""
    readers = [_Reader(format, on_error, settings) for on_error in ("stop", "skip")]

    def run(data: bytes) -> None:
        with stored_in(folder, suffix, data) as path:
            skipping = readers[1].read(path)
            # The settings differ in what they raise; documents before a fault are the same.
            documents = readers[0].read(path)
        assert documents == skipping, "with on_error=skip, other documents of a sound file"
        expected = plain(data)
        assert expected is None or documents == expected, (
            "other documents than a plain reader gives"
        )

    is_json = suffix in (".jsonl", ".json")
    return Target(run, seeds, is_json, may_lack_memory=format in ("arrow", "parquet"))


class _Reader:
    """Reads files of a format into the bytes of their documents."""

    def __init__(self, format: str, on_error: str, settings: dict[str, Any]) -> None:
        self.format = format
        self.options = ConvertOptions(
            on_error=on_error,  # type: ignore[arg-type]
            max_record_bytes=MAX_RECORD_BYTES,
            tokenizer="bytes",
            provenance=True,
            append_eod=False,
            **settings,
        )
        self.encoder = BatchEncoder(load_tokenizer("bytes"), self.options, STORAGE)

    def read(self, path: str) -> Documents:
        """The documents of a file. Raises ConvertError and others of the library."""
        size = Path(path).stat().st_size if Path(path).is_file() else 0
        piece = Slice(input=Input(path=path, format=self.format, size=size, etag=""))
        skipped = Skipped()
        documents: Documents = []
        raw: list[RawDocument] = []
        for item in read_slice(piece, self.options, STORAGE, skipped):
            if isinstance(item, RawDocument):
                raw.append(item)
            if len(raw) == BATCH_DOCUMENTS or isinstance(item, Tokens):
                documents += self._encode(raw, skipped)
                raw = []
            if isinstance(item, Tokens):
                documents += _bytes_of(item)
        return documents + self._encode(raw, skipped)

    def _encode(self, raw: list[RawDocument], skipped: Skipped) -> Documents:
        if not raw:
            return []
        tokens = self.encoder(raw, skipped)
        assert tokens.origins is not None
        assert len(tokens.origins) == len(tokens.documents)
        return _bytes_of(tokens)


def _bytes_of(tokens: Tokens) -> Documents:
    sizes = tokens.document_tokens
    assert int(sizes.sum()) == len(tokens.tokens)
    stops = np.cumsum(sizes).tolist()
    starts = [0, *stops][:-1]
    return [
        tokens.tokens[start:stop].astype("<i8").tobytes()
        for start, stop in zip(starts, stops, strict=True)
        if start < stop  # empty texts are left out
    ]


def _ids(text: str | bytes) -> bytes:
    """The ids of a text as `_bytes_of` gives them."""
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype("<i8").tobytes()


def tokenizer_target(folder: Path, suffix: str, seeds: Callable[[], list[bytes]]) -> Target:
    """The file of a tokenizer, whose ids are those of its vocabulary."""

    def run(data: bytes) -> None:
        with stored_in(folder, suffix, data) as path:
            pattern = "gpt2" if suffix == ".tiktoken" else None
            tokenizer = load_tokenizer(path, pattern=pattern)
            for ids in tokenizer.encode(list(TEXTS)):
                numbers = [int(number) for number in ids]
                assert all(0 <= number < tokenizer.vocab_size for number in numbers)
                tokenizer.decode(numbers)
            with suppress(StreammegaError):
                resolve_eod(tokenizer, None)

    return Target(run, seeds(), is_json=suffix == ".json")


def tokenizer_json_seeds() -> list[bytes]:
    """One of each model of the tokenizers library."""
    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    pairs = Tokenizer(models.BPE({**letters, "on": 256}, [("o", "n")]))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    pairs.normalizer = normalizers.NFC()
    pairs.add_special_tokens(["<|endoftext|>"])
    ends = [("<|endoftext|>", 257)]
    pairs.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=ends)
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "o": 1, "##ne": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("one", -1.0), ("x", -2.0)], 0))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    return [tokenizer.to_str().encode() for tokenizer in (pairs, words, pieces)]


def tiktoken_seeds() -> list[bytes]:
    """Bytes and one pair of them."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"on"]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    return [b"".join(lines)]


# --- plain readers --------------------------------------------------------------------------------


def _jsonl(data: bytes) -> Documents | None:
    documents = []
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        text = _text_of(json.loads(line.decode()))
        if text is None:
            return None
        documents.append(_ids(text))
    return documents


def _json(data: bytes) -> Documents | None:
    """Of one array alone: what has several values is for the library to divide."""
    read = json.loads(data.decode())
    texts = [_text_of(record) for record in (read if isinstance(read, list) else [read])]
    return None if None in texts else [_ids(text) for text in texts if text is not None]


def _text_of(record: Any) -> str | None:
    text = record.get("text") if isinstance(record, dict) else None
    return text if isinstance(text, str) else None


def _csv(data: bytes) -> Documents | None:
    if b"\r" in data or b"\0" in data or data.startswith(b"\xef\xbb\xbf"):
        return None  # of these the dialects differ
    header, *rows = csv.reader(io.StringIO(data.decode(), newline=""), strict=True)
    place = header.index("text")
    rows = [row for row in rows if row]
    if any(len(row) != len(header) for row in rows):
        return None
    return [_ids(row[place]) for row in rows]


def _text(data: bytes) -> Documents | None:
    return None if data.startswith(b"\xef\xbb\xbf") else [_ids(data.decode())]


def _parquet(data: bytes) -> Documents | None:
    return _texts_of_column(pq.read_table(io.BytesIO(data), columns=["text"])["text"].to_pylist())


def _arrow(data: bytes) -> Documents | None:
    return _texts_of_column(pa.ipc.open_file(io.BytesIO(data)).read_all()["text"].to_pylist())


def _texts_of_column(texts: list[Any]) -> Documents | None:
    if not all(isinstance(text, str | None) for text in texts):
        return None
    return [_ids(text or "") for text in texts]


def _tar(data: bytes) -> Documents | None:
    documents = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive.getmembers():
            if not member.isreg() or not member.name.endswith(".txt") or member.issparse():
                return None
            documents.append(_ids(archive.extractfile(member).read().decode()))  # type: ignore[union-attr]
    return documents


def _npy(data: bytes) -> Documents | None:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        return None
    return [row.astype("<i8").tobytes() for row in array]


def _raw(data: bytes) -> Documents | None:
    if len(data) >= 1024 or not data:
        return None
    return [np.frombuffer(data, "<u2").astype("<i8").tobytes()]


def _none(_data: bytes) -> Documents | None:
    return None


def _decompressed(decompress: Callable[[bytes], bytes]) -> Reader:
    return lambda data: _jsonl(decompress(data))


def _unzip(data: bytes) -> bytes:
    archive = zipfile.ZipFile(io.BytesIO(data))
    (name,) = archive.namelist()
    return archive.read(name)


def _unzstd(data: bytes) -> bytes:
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
    return reader.read(MAX_RECORD_BYTES)


def when_sound(plain: Reader) -> Reader:
    """A plain reader that has no opinion where it raises an error."""

    def read(data: bytes) -> Documents | None:
        with suppress(Exception):
            documents = plain(data)
            return None if documents is None else [found for found in documents if found]
        return None

    return read


# --- targets --------------------------------------------------------------------------------------


def _jsonl_seed() -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


def file_target(folder: Path, name: str) -> Target:
    """A file of one of the formats in `FORMATS`."""
    suffix, format, seeds, plain = FORMATS[name]
    return corpus_target(folder, suffix, format, seeds(), when_sound(plain))


def _csv_seed() -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["id", "text"], *([r["id"], r["text"]] for r in RECORDS)])
    return text.getvalue().encode()


def _table() -> pa.Table:
    return pa.table(
        {"text": [*TEXTS, None], "id": [str(number) for number in range(len(TEXTS) + 1)]}
    )


def _parquet_seeds() -> list[bytes]:
    seeds = []
    for codec in ("none", "zstd", "snappy", "gzip"):
        sink = io.BytesIO()
        pq.write_table(_table(), sink, row_group_size=2, compression=codec)
        seeds.append(sink.getvalue())
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [[1, 2], [3]]}), sink)
    return [*seeds, sink.getvalue()]


def _arrow_seeds() -> list[bytes]:
    seeds = []
    for table in (_table(), pa.table({"text": [[1, 2], None, [3]]})):
        for new_writer in (pa.ipc.new_file, pa.ipc.new_stream):
            sink = io.BytesIO()
            with new_writer(sink, table.schema) as writer:
                writer.write_table(table)
            seeds.append(sink.getvalue())
    return seeds


def _tar_seeds() -> list[bytes]:
    members = [("a.txt", b"one"), ("b.txt", "é".encode()), ("c/d.txt", b"x" * 600)]
    others = [("a.json", b'{"text": "j"}'), ("b.jsonl.gz", gzip.compress(_jsonl_seed(), mtime=0))]
    npy = io.BytesIO()
    np.save(npy, np.arange(5, dtype=np.uint16))
    seeds = []
    for some, form in (
        (members, tarfile.USTAR_FORMAT),
        ([*others, ("c.npy", npy.getvalue())], tarfile.PAX_FORMAT),
    ):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as archive:
            for name, data in some:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            if some is others:
                link = tarfile.TarInfo("link.txt")
                link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(link)
        seeds.append(file.getvalue()[:5120])
    return seeds


def _npy_seeds() -> list[bytes]:
    seeds = []
    for array in (np.arange(6, dtype=np.uint16).reshape(2, 3), np.arange(4, dtype=np.int64)):
        sink = io.BytesIO()
        np.save(sink, array)
        seeds.append(sink.getvalue())
    return seeds


def _raw_seeds() -> list[bytes]:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5
    tokens = np.arange(5, dtype="<u2").tobytes()
    return [tokens, header.tobytes() + tokens]


def _zip_seed() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("a.jsonl"), _jsonl_seed())
    return sink.getvalue()


FORMATS: dict[str, tuple[str, str, Callable[[], list[bytes]], Reader]] = {
    "jsonl": (".jsonl", "jsonl", lambda: [_jsonl_seed()], _jsonl),
    "json": (".json", "jsonl", lambda: [json.dumps(RECORDS, indent=1).encode()], _json),
    "csv": (".csv", "csv", lambda: [_csv_seed()], _csv),
    "text": (".txt", "text", lambda: [text.encode() for text in TEXTS], _text),
    "parquet": (".parquet", "parquet", _parquet_seeds, _parquet),
    "arrow": (".arrow", "arrow", _arrow_seeds, _arrow),
    "tar": (".tar", "tar", _tar_seeds, _tar),
    "npy": (".npy", "npy", _npy_seeds, _npy),
    "raw": (".bin", "raw", _raw_seeds, _raw),
    "gz": (
        ".jsonl.gz",
        "jsonl",
        lambda: [gzip.compress(_jsonl_seed(), mtime=0)],
        _decompressed(gzip.decompress),
    ),
    "bz2": (
        ".jsonl.bz2",
        "jsonl",
        # small blocks: its memory is touched for each input
        lambda: [bz2.compress(_jsonl_seed(), 1)],
        _decompressed(bz2.decompress),
    ),
    "xz": (
        ".jsonl.xz",
        "jsonl",
        lambda: [lzma.compress(_jsonl_seed())],
        # by itself it takes leading zeros for an empty .lzma file
        _decompressed(partial(lzma.decompress, format=lzma.FORMAT_XZ)),
    ),
    "zst": (
        ".jsonl.zst",
        "jsonl",
        lambda: [zstandard.compress(_jsonl_seed())],
        _decompressed(_unzstd),
    ),
    "zip": (".jsonl.zip", "jsonl", lambda: [_zip_seed()], _decompressed(_unzip)),
}
"""By name: the suffix of its files, the format in `convert`, the seeds, and a plain reader."""


def folder_target(folder: Path, format: str) -> Target:
    """A folder of MDS or litdata shards: up to the first zero byte its `index.json`, then a shard."""
    home = Path(__file__).parents[2] / "tests/support/data/peers"
    seeds = []
    for name in sorted(path.name for path in home.iterdir() if path.name.startswith(format)):
        index = json.loads((home / name / "index.json").read_bytes())
        shards = index["shards" if format == "mds" else "chunks"][:1]
        for shard in shards:
            stored = shard if format == "litdata" else shard.get("zip_data") or shard["raw_data"]
            key = "filename" if format == "litdata" else "basename"
            data = (home / name / stored[key]).read_bytes()
            stored[key] = "shard"
        index["shards" if format == "mds" else "chunks"] = shards
        seeds.append(json.dumps(index).encode() + b"\0" + data)
    readers = [_Reader(format, on_error, {}) for on_error in ("stop", "skip")]

    def run(data: bytes) -> None:
        index, _, shard = data.partition(b"\0")
        path = folder / str(new_number())
        path.mkdir()
        try:
            (path / "index.json").write_bytes(index)
            (path / "shard").write_bytes(shard)
            skipping = readers[1].read(str(path))
            assert readers[0].read(str(path)) == skipping
        finally:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()

    return Target(run, seeds)
