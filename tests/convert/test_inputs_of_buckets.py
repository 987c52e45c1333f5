"""Corpora in buckets are read as training reads: through storage/, with its retries and ETags."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammega import StorageConfig
from streammega.convert import convert
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.readers import read_slice
from streammega.convert.read.slices import Skipped, Slice
from streammega.errors import AccessDeniedError, ObjectChangedError
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
    with tarfile.open(folder / "d.tar", "w") as archive:
        for number, text in enumerate(TEXTS[:500]):
            member = tarfile.TarInfo(f"{number:06d}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with running(tmp_path) as server:
        yield (
            server,
            StorageConfig(transport=request.param, storage_options=server.storage_options),
        )


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


def test_denied_access_is_told_of_and_passed_over_by_nobody(
    endpoint: tuple[Running, StorageConfig],
) -> None:
    server, storage = endpoint
    options = ConvertOptions(tokenizer="bytes", on_error="skip")
    (found,) = find_inputs(["s3://data/a.jsonl"], storage)
    server.behave(status=403)
    with pytest.raises(AccessDeniedError, match=r"s3://data/a\.jsonl"):
        list(read_slice(Slice(input=found), options, storage, Skipped()))
