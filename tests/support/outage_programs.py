"""A program that reads through an outage, and prints what it got, what was said, and how long it took."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from streammega import StreamLoader
from streammega.errors import StorageError
from streammega.storage import retry
from streammega.storage.backends import obstore
from streammega.storage.cache import cache_folder
from streammega.storage.fetch import flow_control
from tests.support.outages import NEED_NAMESPACE, Outages, enter_namespace
from tests.support.streams import blend_of, config_of, impatient, stream
from tools.bench.object_server import running

BEGINS_AT = 20
"""Batches before the outage."""


def read_through(
    kind: str, transport: str, folder: Path, seconds: float, timeout: float
) -> dict[str, Any]:
    """seconds: of the outage. timeout: `retry_timeout`."""
    has_namespace = kind in NEED_NAMESPACE
    if has_namespace:
        enter_namespace(folder / "hosts", folder / "disk")
    retry.MAX_PAUSE = 0.2
    retry.WARN_AFTER_S = 0.5
    flow_control.MAX_INTERVAL = 0.05  # or requests would go one by one for seconds afterwards
    obstore.LAST_RANGE_TIMEOUT = 0.4  # which is no longer than WARN_AFTER_S
    cache_folder.FULL_SECONDS = 0.2
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("streammega").addHandler(handler)
    cache = folder / "disk"
    with running(folder) as server:
        outages = Outages(server, folder / "hosts" if has_namespace else None, cache)
        storage = replace(
            impatient(outages.storage_options(), transport, read_timeout=1.0),
            retry_timeout=timeout,
            # less than a drip lasts, more than a busy machine takes to open the data
            request_timeout=2.0 if kind == "drip" else 8.0,
            memory_bytes=80_000,  # a fraction of the data, so that much is read during the outage
            cache_dir=cache if kind == "disk full" else None,
            cache_max_bytes=1 << 30 if kind == "disk full" else 0,
        ).tuned(max_retries=None, cache_chunk_bytes=1 << 20)
        config = config_of("stream", "s3:/", folder / "index", storage, samples=500)
        expected = stream(replace(config, blend=blend_of(folder)))
        got = []
        answer: dict[str, Any] = {"error": ""}
        if kind == "disk full":  # before all data is in the cache
            outages.begin(kind, seconds)
        with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
            try:
                for number, batch in enumerate(loader):
                    if number == BEGINS_AT:
                        if kind != "disk full":
                            outages.begin(kind, seconds)
                        began = time.monotonic()
                        timer = threading.Timer(seconds, outages.end, [kind])
                        timer.start()
                    if kind == "disk full":
                        time.sleep(0.025)  # longer than the outage
                    got.append(torch.cat([batch["tokens"], batch["labels"]], 1).clone())
            except StorageError as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            answer["waited"] = time.monotonic() - began
            timer.cancel()
        rows = torch.cat(got)
        answer["equal"] = torch.equal(rows, expected[: len(rows)])
        answer["whole"] = len(rows) == len(expected)
        answer["said"] = said
        outages.server.process.kill()
        return answer


if __name__ == "__main__":
    kind, transport, folder, seconds, timeout = json.loads(sys.argv[1])
    print(json.dumps(read_through(kind, transport, Path(folder), seconds, timeout)))
