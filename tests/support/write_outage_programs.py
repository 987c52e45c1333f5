"""A program that writes through an outage, and prints what became of it, what was said, and how long it took."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streammega import IndexedDataset, StorageConfig
from streammega.convert import convert
from streammega.errors import StreammegaError
from streammega.storage import retry
from streammega.storage.backends import obstore
from streammega.train.checkpoints.checkpointer import Checkpointer
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.parallel_model import ParallelModel, named_parameters
from tests.support.builders import write_run_file
from tests.support.model_programs import model_of
from tests.support.outages import NEED_NAMESPACE, WriteOutages, enter_namespace, fill

MIB = 1 << 20


def write_through(
    job: str, kind: str, transport: str, folder: Path, target: str, seconds: float, timeout: float
) -> dict[str, Any]:
    """job: "convert" or "checkpoint". target: an S3 server and a bucket. seconds: of the outage."""
    if kind in NEED_NAMESPACE:
        enter_namespace(folder / "hosts", folder / "disk")
    retry.MAX_PAUSE = obstore.MAX_PAUSE = 0.2  # type: ignore[attr-defined]
    retry.WARN_AFTER_S = 0.5
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("streammega").addHandler(handler)
    server, _, bucket = target.rpartition("/")
    outages = WriteOutages(kind, server, seconds, folder / "hosts")
    storage = StorageConfig(
        transport=transport,  # type: ignore[arg-type]
        storage_options=outages.storage_options(),
        request_timeout=2.0,
        retry_timeout=timeout,
    ).tuned(read_timeout=1.0, multipart_part_bytes=5 * MIB)
    out = f"s3://{bucket}/out"
    if kind == "disk full":
        out = str(folder / "disk" / "out")
        other = folder / "disk" / "other-data"
        other.parent.mkdir(exist_ok=True)
        fill(other)
        with other.open("r+b") as file:
            file.truncate(other.stat().st_size - 4 * MIB)
        outages.began = time.monotonic()
        outages.end = other.unlink  # type: ignore[method-assign]
        outages.timer.start()
    answer: dict[str, Any] = {"error": ""}
    write = _convert if job == "convert" else _save
    try:
        write(folder, out, storage)
    except StreammegaError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["waited"] = time.monotonic() - outages.began
    answer["said"] = list(said)
    if answer["error"] and seconds > timeout:
        outages.timer.cancel()
        outages.end()
        write(folder, out, storage)
    answer["whole"] = (_is_converted if job == "convert" else _is_saved)(folder, out, storage)
    return answer


def _convert(folder: Path, out: str, storage: StorageConfig) -> None:
    convert([str(folder / "data" / "web")], out, storage=storage, workers=1)


def _is_converted(folder: Path, out: str, storage: StorageConfig) -> bool:
    expected = IndexedDataset(str(folder / "data" / "web"))[:]
    found = IndexedDataset(out, storage)[:]
    pairs = zip(found, expected, strict=True)
    return all(np.asarray(one).tolist() == np.asarray(other).tolist() for one, other in pairs)


def _save(folder: Path, out: str, storage: StorageConfig) -> None:
    model, checkpointer = _checkpointed(folder, out, storage)
    for parameter in named_parameters(model).values():
        parameter.data.fill_(3.0)
    try:
        optimizer = torch.optim.SGD(named_parameters(model).values())
        checkpointer.save(7, model, optimizer, {"step": 7, "data": {}}, background=True)
        checkpointer.wait()
    finally:
        checkpointer.close()


def _is_saved(folder: Path, out: str, storage: StorageConfig) -> bool:
    model, checkpointer = _checkpointed(folder, out, storage)
    try:
        optimizer = torch.optim.SGD(named_parameters(model).values())
        position = checkpointer.resume(model, optimizer, lambda _: None)
    finally:
        checkpointer.close()
    return position is not None and all((p == 3.0).all() for p in named_parameters(model).values())


def _checkpointed(
    folder: Path, out: str, storage: StorageConfig
) -> tuple[ParallelModel, Checkpointer]:
    """A model of 12 MB, and where it is saved."""
    run_file = write_run_file(
        folder, data={"blend": [str(folder / "data" / "web")]}, train={"train_iters": 1}
    )
    model, _ = model_of(run_file, ["model.vocab_size=8000", "model.dim=192"])
    store = CheckpointStore.open(out, storage)
    return model, Checkpointer(store, torch.device("cpu"), keep=2)


if __name__ == "__main__":
    job, kind, transport, folder, target, seconds, timeout = json.loads(sys.argv[1])
    print(json.dumps(write_through(job, kind, transport, Path(folder), target, seconds, timeout)))
