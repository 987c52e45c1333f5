#!/usr/bin/env python3
"""What columns cost: the stream order from a local object server, ids alone and with columns.

    .venv/bin/python tools/bench/columns.py             # --figures peers: the other sides too

A rate is that of all bytes that batches have. Sides take turns, each in a process of its own; the server
(tools/bench/object_server.py) and all sides run on the same cores. The other sides read the same ids and
teacher columns: Hugging Face `datasets`, in streaming, a Parquet with a row of lists a sample, from the
server; `grain` array records of a sample each, from local files, since it reads no S3. Neither holds what
it fetches ahead within a budget. They are measured if they are installed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness, runner
from tools.bench.object_server import Running, running
from tools.bench.sides import BATCH, Result, S, consume

FOLDER = runner.FOLDER / "columns"
DATA = FOLDER / "objects" / "data"
TOKENS = 128 << 20
PEER_SAMPLES = 4096
"""Samples that the other sides read again and again: fewer, and so more in the page cache, than ours."""
COLUMNS = {"weight": ("float16", 1), "teacher_ids": ("uint16", 16), "teacher_logprobs": ("float16", 16)}  # fmt: skip
TEACHER = ["teacher_ids", "teacher_logprobs"]
SECONDS = 4.0
WARM_UP = 512 << 20
"""Bytes that are taken before the clock runs: more than are ready when a reader has begun."""


def prepare() -> None:
    """The pair, with a column in the manifest for each of COLUMNS; the first samples for the others."""
    from streammega import StorageConfig
    from streammega.dataset.columns import ColumnFile, StoredColumn, column_name
    from streammega.dataset.opening import open_manifests

    manifest = DATA / "web.manifest.json"
    if manifest.exists():
        return
    DATA.mkdir(parents=True, exist_ok=True)
    runner.write_pair(DATA / "web", TOKENS)
    rng = np.random.default_rng(2)
    stored = []
    for name, (dtype, width) in COLUMNS.items():
        file = column_name("web", name)
        with open(DATA / file, "wb") as out:
            for _ in range(TOKENS >> 20):
                # as float16: from 0 to 2
                rng.integers(0, 1 << 14, width << 20, np.uint16).tofile(out)
        stored.append(StoredColumn(name, dtype, width, "labels", 0, [ColumnFile(file)]))
    (opened,) = open_manifests([str(DATA / "web")], StorageConfig())
    shards = [shard._replace(name="web", etag="", index_etag="") for shard in opened.shards]
    whole = replace(opened, shards=shards, seen_at="", columns=tuple(stored))
    manifest.write_bytes(whole.to_json())


def rows() -> list[Any]:
    """What the other sides read, of each column: [samples, values of a sample]."""
    files = {"web.bin": ("uint16", 1)} | {f"web.col-{name}": COLUMNS[name] for name in TEACHER}
    return [
        np.memmap(DATA / name, dtype, "r")[: PEER_SAMPLES * S * width].reshape(PEER_SAMPLES, -1)
        for name, (dtype, width) in files.items()
    ]


def rate_of(batches: Iterable[Any], names: list[str], length: int) -> Result:
    """Bytes a second in the steady state, as stored, and CPU seconds for 10^9 of them."""
    sizes = [np.dtype(dtype).itemsize * width for dtype, width in map(COLUMNS.__getitem__, names)]
    sample = length * (2 + sum(sizes))
    result = consume(batches, SECONDS, WARM_UP // (BATCH * sample))
    return {"rate": result["rate"] * sample, "cpu": result["cpu"] * S / sample}


def ours(prefix: str, options: Any, names: list[str], length: int) -> Result:
    import streammega as sm

    config = sm.DataConfig(
        blend=[prefix],
        sequence_length=length,
        order="stream",
        num_samples=(10**7, 0, 0),
        columns=names,
        storage=sm.StorageConfig(storage_options=options),
    )
    sizes: Any = {"micro_batch_size": BATCH, "global_batch_size": 256}
    with sm.StreamLoader(config, ids_only=True, **sizes) as loader:
        return rate_of(loader, names, length)


def huggingface(options: Any) -> Result:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    if not (DATA / "lists.parquet").exists():
        lists = [
            pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), part.shape[1]).cast(
                pa.list_(pa.from_numpy_dtype(part.dtype))
            )
            for part in rows()
        ]
        table = pa.table(lists, names=["ids", *TEACHER])
        pq.write_table(
            table,
            DATA / "lists.parquet",
            row_group_size=64,
            compression="none",
            use_dictionary=False,
        )
    read = datasets.load_dataset(
        "parquet", data_files="s3://data/lists.parquet", split="train", streaming=True, storage_options=options,
    )  # fmt: skip
    shuffled = read.repeat(None).shuffle(seed=1, buffer_size=1024).with_format("numpy")
    loader: Any = torch.utils.data.DataLoader(shuffled.batch(BATCH), batch_size=None)
    return rate_of(loader, TEACHER, S)


def grain_records() -> Result:
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    path = FOLDER / "samples.array_record"
    if not path.exists():
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for sample in zip(*rows(), strict=True):
            writer.write(b"".join(part.tobytes() for part in sample))
        writer.close()

    def parse(record: bytes) -> dict[str, Any]:
        values = np.frombuffer(record, np.uint16)
        ids, teacher, logprobs = np.split(values, [S, 17 * S])
        return {"ids": ids, TEACHER[0]: teacher, TEACHER[1]: logprobs.view(np.float16)}

    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([str(path)]))
    batches = records.seed(1).shuffle().repeat().map(parse).batch(BATCH).to_iter_dataset()
    return rate_of(batches, TEACHER, S)


FIGURES = harness.Figures()


def measure(chosen: Any, sides: dict[str, Any]) -> None:
    """A line for each side, compared with the first."""
    results = harness.in_turns(chosen.runs, sides)
    rates = {}
    for name, of_side in results.items():
        rate, cpu, peak = (
            statistics.median(one[key] for one in of_side) for key in ("rate", "cpu", "peak")
        )
        rates[name] = rate
        share = rate / next(iter(rates.values()))
        harness.row(name, f"{rate / 1e6:,.0f}", f"{share:.2f}", f"{cpu:.1f}", f"{peak / 1e6:,.0f}")


def side(of: Callable[..., Result], **arguments: Any) -> Callable[[], Result]:
    return partial(harness.in_process, of, **arguments)


@FIGURES.figure()
def columns(chosen: Any) -> None:
    """Ids alone, with one value (goal 0.9) and with two times 16 values of a token (0.8 at 4,096)."""
    cases: dict[str, list[str]] = {
        "ids": [],
        "ids, float16": ["weight"],
        "ids, 16 uint16, 16 float16": TEACHER,
    }
    with running(FOLDER / "objects") as server:
        where = {"prefix": "s3://data/web", "options": options_of(server)}
        for length in (S, 1024):
            sides = {
                f"{what}, samples of {length:,}": side(ours, **where, names=names, length=length)
                for what, names in cases.items()
            }
            measure(chosen, sides)


@FIGURES.figure(by_default=False)
def peers(chosen: Any) -> None:
    """The last of these in samples of 4,096, also by other libraries and from local files."""
    with running(FOLDER / "objects") as server:
        options = options_of(server)
        wide: Any = {"names": TEACHER, "length": S}
        sides = {
            "streammega": side(ours, prefix="s3://data/web", options=options, **wide),
            "datasets, Parquet of lists": side(huggingface, options=options),
            "streammega, local files": side(ours, prefix=str(DATA / "web"), options={}, **wide),
            "grain, array records, local files": side(grain_records),
        }
        measure(chosen, sides)


def options_of(server: Running) -> dict[str, Any]:
    return {"anon": True, "endpoint_url": server.endpoint}


def main() -> int:
    chosen = harness.parser(__doc__, FIGURES).parse_args()
    prepare()
    harness.print_head(("numpy", "torch", "obstore", "datasets", "grain"), chosen.runs)
    harness.table("what batches have", "MB/s", "of the first", "CPU s per GB", "peak memory, MB")
    return harness.print_figures(FIGURES, chosen)


if __name__ == "__main__":
    sys.exit(main())
