"""The same documents, in whatever form people have them: the same bytes, and those of
megatron-core's builder.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.convert.test_json_values import FORMS
from tests.support.builders import convert_bytes, convert_files

EOD = 256
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress,
}  # fmt: skip
NESTED = {"text_key": "doc.body.text"}


def records(texts: list[str], *, nested: bool = False) -> list[dict[str, Any]]:
    if nested:
        return [
            {"doc": {"body": {"text": text, "id": n}, "text": "no"}, "text": "no"}
            for n, text in enumerate(texts)
        ]
    return [{"id": n, "text": text} for n, text in enumerate(texts)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def json_of(form: str, texts: list[str]) -> bytes:
    return FORMS[form](records(texts)).encode()


def member_tar(texts: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, text in enumerate(texts):
            for suffix, data in (
                ("json", json.dumps({"text": "metadata", "n": number}).encode()),
                ("txt", text.encode()),
            ):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


PACKABLE: dict[str, tuple[str, Callable[[list[str]], bytes], dict[str, Any]]] = {
    "jsonl": ("a.jsonl", lambda texts: lines(records(texts)), {}),
    **{
        form: ("a.JSON" if "over" in form else "a.json", partial(json_of, form), {})
        for form in FORMS
    },
    "nested lines": ("a.ndjson", lambda texts: lines(records(texts, nested=True)), NESTED),
    "nested array": (
        "a.json",
        lambda texts: json.dumps(records(texts, nested=True), indent="\t").encode(),
        NESTED,
    ),
    "tar_member": ("a.tar", member_tar, {"tar_member": "txt"}),
}
TABLES: dict[str, tuple[Callable[[list[str]], pa.Table], dict[str, Any]]] = {
    "string": (lambda texts: pa.table({"text": pa.array(texts, pa.string())}), {}),
    "binary": (
        lambda texts: pa.table({"text": pa.array([text.encode() for text in texts], pa.binary())}),
        {},
    ),
    "large binary": (
        lambda texts: pa.table(
            {"text": pa.array([text.encode() for text in texts], pa.large_binary())}
        ),
        {},
    ),
    "struct": (lambda texts: pa.Table.from_pylist(records(texts, nested=True)), NESTED),
    "dictionary": (
        lambda texts: pa.table({"text": pa.array(texts, pa.string()).dictionary_encode()}),
        {},
    ),
}


def by_megatron(prefix: Path, texts: list[str]) -> list[bytes]:
    from tests.support.oracle import write_pair

    write_pair(
        str(prefix),
        [np.array([*text.encode(), EOD], np.uint16) for text in texts if text],
        np.uint16,
    )
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def converted(item: str, out: Path, **options: Any) -> list[bytes]:
    (shard,) = convert_bytes(out, item, overwrite=True, **options).shard_prefixes
    return [Path(f"{shard}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def piped(data: bytes) -> str:
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return f"/dev/fd/{read}"


documents = st.lists(
    st.text(max_size=30).filter(lambda text: text[:1] != "\ufeff"), min_size=1, max_size=6
).filter(any)


@pytest.mark.guarantee("same-documents-form")
@given(
    texts=documents,
    packed=st.sampled_from(sorted(PACKED)),
    table_form=st.sampled_from(sorted(TABLES)),
    unit=st.sampled_from([7, 60, 1 << 20]),
)
@settings(max_examples=3)
def test_every_form_gives_megatrons_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    packed: str,
    table_form: str,
    unit: int,
) -> None:
    folder = tmp_path_factory.mktemp("forms")
    wanted = by_megatron(folder / "theirs", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.convert.job.MAX_UNIT_BYTES", unit)
        patch.setattr("streammega.convert.read.text.READ_BYTES", unit)
        for form, (name, make, options) in PACKABLE.items():
            data = PACKED[packed](make(texts))
            (folder / f"{name}{packed}").write_bytes(data)
            assert converted(f"{folder}/{name}{packed}", folder / "ours", **options) == wanted, (
                form,
                packed,
            )
            assert converted(piped(data), folder / "piped", **options) == wanted, (form, packed)
        make_table, options = TABLES[table_form]
        table = make_table(texts)
        pq.write_table(table, folder / "a.parquet", row_group_size=2)
        pyarrow.feather.write_feather(table, folder / "a.arrow", chunksize=2)
        for name in ("a.parquet", "a.arrow"):
            assert converted(f"{folder}/{name}", folder / "ours", **options) == wanted, name


def test_ids_of_32_bits_are_trained_on_as_they_are(tmp_path: Path) -> None:
    from streammega import DataConfig, StreamLoader

    ids = np.random.default_rng(0).integers(100_000, 128_256, 40 * 33).astype("<u4")
    ids[32::33] = 128_001
    np.save(tmp_path / "llama.npy", ids)
    convert_files(tmp_path / "out", tmp_path / "llama.npy", eod_id=128_001)
    config = DataConfig(
        blend=[str(tmp_path / "out")],
        sequence_length=32,
        split="1,0,0",
        num_samples=(8, 0, 0),
        order="sequential",
        vocab_size=128_256,
    )
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=4, dp_rank=0, dp_size=1)
    tokens = np.concatenate([np.asarray(batch["tokens"]).reshape(-1) for batch in loader])
    assert tokens.tolist() == ids[: len(tokens)].tolist()
