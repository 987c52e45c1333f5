"""What tests read, written in one call each: datasets, corpora, tokenizers, configs, run files.

Objects of a bucket: `S3.objects` in servers.py. Pairs that Megatron writes: `write_pair` in oracle.py.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.convert import ConvertReport, convert
from streammega.dataset.checksums import checksums_of
from streammega.dataset.manifest import Manifest, Shard, parse_manifest
from streammega.dataset.names import MANIFEST, SUFFIXES, Kind

KINDS = list(SUFFIXES)
"""All kinds of shards."""
MARK = re.compile("-gen[0-9a-f]{12}")
"""In the names of shards in buckets, and of those that replaced others."""
TOKENS = 50
"""Tokens in a document of `put_dataset`."""


def write_dataset(
    prefix: str | Path, documents: Iterable[Any], dtype: DTypeLike = np.uint16, **options: Any
) -> str:
    """A pair of documents of one sequence each; returns its prefix.

    options: of IndexedDatasetWriter.
    """
    with IndexedDatasetWriter(str(prefix), dtype, **options) as writer:
        for tokens in documents:
            writer.add_document(tokens, [len(tokens)])
    return str(prefix)


def write_lengths(prefix: str, lengths: Sequence[int], dtype: DTypeLike = np.uint16) -> None:
    """A shard of documents of so many tokens each."""
    write_dataset(prefix, [np.arange(length) % 1000 for length in lengths], dtype)


def write_random_pair(
    prefix: str, count: int = 200, longest: int = 100, seed: int = 0, vocab: int = 1000
) -> list[np.ndarray]:
    """A pair of random documents of 0..longest tokens; returns their tokens."""
    rng = np.random.default_rng(seed)
    documents = [
        rng.integers(0, vocab, rng.integers(0, longest + 1)).astype(np.uint16) for _ in range(count)
    ]
    write_dataset(prefix, documents)
    return documents


def write_manifest(prefix: str | Path, shards: Sequence[str], kind: Kind = "bin") -> str:
    """The manifest of shards in its folder, as convert writes it; returns the prefix."""
    folder = Path(prefix).parent
    entries = []
    for name in shards:
        indexed = IndexedDataset(str(folder / name) + ("" if kind == "bin" else SUFFIXES[kind]))
        stored = (folder / f"{name}{SUFFIXES[kind]}").read_bytes()
        index = (folder / f"{name}.idx").read_bytes()
        entry = Shard(
            name=name,
            documents=len(indexed.document_indices) - 1,
            sequences=len(indexed),
            tokens=int(indexed.sequence_lengths.sum()),
            bytes=len(stored),
            checksums=checksums_of(stored),
            index_bytes=len(index),
            index_checksums=checksums_of(index),
            kind=kind,
        )
        entries.append(entry)
    manifest = Manifest(
        kind=kind,
        dtype=str(indexed.dtype),
        multimodal=indexed.multimodal,
        documents=0,
        sequences=0,
        tokens=0,
        shards=[],
    )
    Path(f"{prefix}{MANIFEST}").write_bytes(manifest.with_shards(entries).to_json())
    return str(prefix)


def put_dataset(prefix: str, *, seed: int, documents: int = 40) -> str:
    """Random documents on a local disk with a manifest, as convert leaves them; returns the prefix."""
    tokens = np.random.default_rng(seed).integers(0, 60_000, (documents, TOKENS))
    write_dataset(prefix, tokens.astype(np.uint16))
    return write_manifest(prefix, [Path(prefix).name])


def without_marks(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files of a dataset as if its shards had plain names, which its manifest has too, without ETags."""
    plain = {
        MARK.sub("", name): MARK.sub("", without_versions(data).decode()).encode()
        if name.endswith(MANIFEST)
        else data
        for name, data in files.items()
    }
    assert len(plain) == len(files), f"nothing else is left: {sorted(files)}"
    return plain


def without_versions(manifest: bytes) -> bytes:
    """A manifest without the ETags of its shards, and without the place where they were seen."""
    parsed = parse_manifest(manifest, "web")
    shards = [shard._replace(etag="", index_etag="") for shard in parsed.shards]
    return replace(parsed, shards=shards, seen_at="").to_json()


def jsonl(records: Iterable[Any]) -> bytes:
    """A line of JSON for each record; a string is the record of this text."""
    rows = [{"text": record} if isinstance(record, str) else record for record in records]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_jsonl(path: Path, records: Iterable[Any]) -> str:
    """See `jsonl`; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl(records))
    return str(path)


def write_parquet(path: Path, texts: Sequence[str], **columns: Sequence[Any]) -> str:
    """Texts, with other columns beside them, in groups of five rows; returns the path."""
    pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=5)
    return str(path)


def tar_bytes(*members: tuple[str, bytes]) -> bytes:
    """A tar of some members, in their order."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def tar_with_holes(name: str) -> bytes:
    """A tar with a member of three bytes and a petabyte of holes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo(name)
        member.size = 3
        member.pax_headers = {"GNU.sparse.map": "0,3", "GNU.sparse.size": str(1 << 50)}
        archive.addfile(member, io.BytesIO(b"abc"))
    return file.getvalue()


def write_tar(path: Path, *members: tuple[str, bytes]) -> str:
    """A tar of some members, in their order."""
    path.write_bytes(tar_bytes(*members))
    return str(path)


def convert_bytes(output: Path | str, *inputs: Path | str, **options: Any) -> ConvertReport:
    """Convert inputs by one worker; each byte of a text is a token."""
    return convert_files(output, *inputs, tokenizer="bytes", **options)


def convert_files(output: Path | str, *inputs: Path | str, **options: Any) -> ConvertReport:
    """Convert inputs by one worker."""
    return convert(list(map(str, inputs)), str(output), workers=1, **options)


def stored_ids(prefix: Path | str, storage: StorageConfig | None = None) -> list[list[int]]:
    """The ids of each sequence of a dataset."""
    items = IndexedDataset(str(prefix), storage)[:]
    return [np.asarray(item[0] if isinstance(item, tuple) else item).tolist() for item in items]


def stored_texts(prefix: Path | str) -> list[str]:
    """The text of each sequence of a dataset that `convert_bytes` made."""
    return [bytes(id for id in ids if id < 256).decode() for ids in stored_ids(prefix)]


def write_tokenizer(path: Path, words: Sequence[str], special: Sequence[str] = ()) -> str:
    """A tokenizer.json of words, whose ids are their places after [UNK]; returns the path."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return str(path)


def data_config(blend: Any, folder: Path, **settings: Any) -> DataConfig:
    """Samples of 16 tokens, 400 of them where the order has an end; its cache is in the folder."""
    defaults: dict[str, Any] = {
        "sequence_length": 16,
        "storage": StorageConfig(cache_dir=folder / "cache"),
    }
    if settings.get("order") != "stream":
        defaults["num_samples"] = (400, 0, 0)
    return DataConfig(blend=blend, **(defaults | settings))


def write_run_file(folder: Path, **sections: dict[str, Any]) -> str:
    """FOLDER/run.toml of a small model on the CPU, in FOLDER/run; returns its path.

    Settings of a section replace or add to these; None leaves one out, and a section without any is
    left out too.
    """
    defaults: dict[str, dict[str, Any]] = {
        "data": {"sequence_length": 16, "split": "90,10,0", "order": "megatron"},
        "data.storage": {"cache_dir": f"{folder}/cache"},
        "model": {"vocab_size": 1000, "dim": 16, "layers": 1, "heads": 2},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "log_batch_hash": True,
            "device": "cpu",
            "out_dir": f"{folder}/run",
        },
    }
    lines = []
    for section in dict.fromkeys([*defaults, *sections]):
        settings = defaults.get(section, {}) | sections.get(section, {})
        # JSON of scalars and lists is TOML
        given = [f"{name} = {json.dumps(v)}" for name, v in settings.items() if v is not None]
        lines += [f"[{section}]", *given] if given else []
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_small_run(folder: Path, prefix: str, **train: Any) -> str:
    """A run file of 16 steps over one dataset in the Megatron order, evaluated and saved."""
    often = {"train_iters": 16, "save_interval": 2, "eval_interval": 8, "eval_iters": 2}
    return write_run_file(
        folder, data={"blend": [prefix]}, train=often | {"log_interval": 4} | train
    )


def write_layout_run(folder: Path, layers: int = 4, **train: Any) -> str:
    """A run file of 20 steps of some layers over two datasets in the stream order; and these."""
    for name, count, seed in (("web", 400, 0), ("code", 200, 5)):
        write_random_pair(str(folder / name), count=count, vocab=100, seed=seed)
    blend = [[f"{folder}/web", 0.7], [f"{folder}/code", 0.3]]
    settings: dict[str, Any] = {
        "train_iters": 20,
        "global_batch_size": 16,
        "lr": 0.003,
        "collective_timeout": 60.0,
    }
    return write_run_file(
        folder,
        data={"blend": blend, "order": "stream", "eod_id": 3},
        model={"vocab_size": 100, "layers": layers},
        train=settings | train,
        parallel={"bucket_size": 2000},
    )
