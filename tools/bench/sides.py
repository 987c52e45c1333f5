#!/usr/bin/env python3
"""One side of a storage bench, in a process of its own: runs for some seconds, prints one line of
JSON.

Called by runner.py, with the Python that has what the side needs: `sides.py NAME '{"endpoint":
..., ...}'`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness

S = 4096
BATCH = 16
"""Samples of a micro-batch."""
Result = dict[str, Any]


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def consume(batches: Iterable[Any], seconds: float, warmup: int = 0) -> Result:
    """Take batches for some seconds (0: to the end).

    The clock runs from before the first, or from after `warmup` of them.
    """
    began = time.perf_counter()
    spent = cpu_seconds()
    first = began
    count = 0
    looked_at = began
    peak = 0
    for number, _ in enumerate(batches):
        now = time.perf_counter()
        if number == 0:
            first = now
        if number < warmup:
            began = now
            spent = cpu_seconds()
            continue
        count += BATCH
        if now - looked_at > 0.5:
            looked_at = now
            peak = max(peak, harness.bytes_with_workers())
        if seconds and now - began > seconds:
            break
    taken = time.perf_counter() - began
    return {
        "samples": count,
        "seconds": taken,
        "first": first - began,
        "rate": count / taken,
        "tokens": count * S / taken,
        "cpu": (cpu_seconds() - spent) / max(1, count * S) * 1e9,
        "peak": max(peak, harness.peak_bytes()),
    }


# --- streammega ---------------------------------------------------------------------------------------------------------------


def config_of(a: Result) -> Any:
    import streammega as sm

    options = {"anon": True, "endpoint_url": a["endpoint"]} if "endpoint" in a else {}
    storage = sm.StorageConfig(
        **{"storage_options": options, "cache_dir": a["index_cache"], **a.get("storage", {})}
    )
    storage = storage.tuned(**a.get("tuning", {}))
    return sm.DataConfig(
        blend=[a["prefix"]],
        sequence_length=S,
        order=a.get("order", "stream"),
        num_samples=(a.get("num_samples", 500_000), 0, 0),
        storage=storage,
        **({"fields": a["fields"]} if "fields" in a else {}),
        **a.get("data", {}),
    )


def ours(a: Result) -> Result:
    import streammega as sm

    config = config_of(a)
    kind = sm.StreamLoader  # imports torch and numba, which is not timed
    created = time.perf_counter()
    spent = cpu_seconds()
    with kind(
        config, micro_batch_size=BATCH, global_batch_size=256, ids_only=a.get("ids_only", False)
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        first = time.perf_counter() - created
        result = consume(iterator, a["seconds"], a.get("warmup", 0))
        result["stats"] = loader.stats()
    tokens = (result["samples"] + BATCH) * S
    result["whole_cpu"] = (cpu_seconds() - spent) / tokens * 1e9
    result["whole_rate"] = tokens / (result["seconds"] + first)
    return result | {"first": first, "peak": harness.peak_bytes()}


def ours_workers(a: Result) -> Result:
    import torch

    import streammega as sm

    dataset = sm.StreamingDataset(config_of(a), micro_batch_size=BATCH, global_batch_size=256)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=a["workers"],
        prefetch_factor=4,
        multiprocessing_context=a.get("method"),
    )
    return consume(loader, a["seconds"], a.get("warmup", 0))


def blend(a: Result) -> Result:
    """Seconds to build a blend of 256 datasets with random weights, 2 M samples."""
    from streammega.kernels.blending import blend_weighted

    weights = np.random.default_rng(0).random(256)
    weights /= weights.sum()
    blend_weighted(weights, 1000)  # the kernel is compiled or loaded
    return {"blend": harness.seconds_of(lambda: blend_weighted(weights, 2_000_000))}


def imports_only(a: Result) -> Result:
    import streammega as sm
    import streammega.loading.engine

    _ = sm.StreamLoader
    return {"peak": harness.peak_bytes()}


CATCH_UP = 0.05
"""Seconds that a paced consumer makes up for. Calls take unequal time, and sleeps are too long."""


class Sleeper(threading.Thread):
    """Sleeps again and again. Notes by how much the longest sleep was too long."""

    SECONDS = 0.005

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0

    def run(self) -> None:
        while True:
            due = time.perf_counter() + self.SECONDS
            time.sleep(self.SECONDS)
            self.longest = max(self.longest, time.perf_counter() - due)


def paced(a: Result) -> Result:
    """A consumer that takes so many bytes a second: how long it waits for data after a warm-up.

    With `busy` it computes in Python between batches, in place of sleeping, and gives the interpreter
    to other threads every `switch_interval` seconds. With `workers` a torch DataLoader with so many
    forked workers reads.
    """
    if "switch_interval" in a:
        sys.setswitchinterval(a["switch_interval"])
    import torch

    import streammega as sm

    batch_sizes: dict[str, Any] = {"micro_batch_size": BATCH, "global_batch_size": 256}
    batches: Iterable[Any]
    if a.get("workers"):
        dataset = sm.StreamingDataset(config_of(a), **batch_sizes)
        batches = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            num_workers=a["workers"],
            prefetch_factor=a["prefetch"],
            multiprocessing_context="fork",
        )
    else:
        batches = sm.StreamLoader(config_of(a), **batch_sizes)

    step = BATCH * S * 2 / a["bytes_per_second"]
    due = time.perf_counter()
    waited = 0.0
    calls: list[float] = []
    sleeper = Sleeper()
    began = time.perf_counter()
    iterator: Any = iter(batches)
    while True:
        # A DataLoader counts no waits: its calls wait where its workers have sent nothing yet.
        waits = a.get("workers") and iterator._worker_result_queue.empty()
        called_at = time.perf_counter()
        next(iterator)
        now = time.perf_counter()
        if now - began > a["warmup_seconds"]:
            if not calls:
                sleeper.start()
                if isinstance(batches, sm.StreamLoader):
                    waited = -batches.stats()["wait_total"]
            calls.append(now - called_at)
            if waits:
                waited += calls[-1]
        if now - began > a["warmup_seconds"] + a["seconds"]:
            break
        due = max(due, now - CATCH_UP) + step
        if a.get("busy"):
            while time.perf_counter() < due:
                pass
        else:
            time.sleep(max(0.0, due - time.perf_counter()))
    if isinstance(batches, sm.StreamLoader):
        waited += batches.stats()["wait_total"]
    return {
        "stall_share": waited / a["seconds"],
        "longest": max(calls),
        "overslept": sleeper.longest,
        "rate": len(calls) * BATCH * S * 2 / a["seconds"],
    }


# --- megatron-core ------------------------------------------------------------------------------------------------------------


def gpt_config(length: int, **settings: Any) -> Any:
    """The config of megatron-core's own dataset."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    tokenizer = SimpleNamespace(eod=0, pad=-1, vocab_size=65536, unique_identifiers={})
    return GPTDatasetConfig(
        random_seed=1234, sequence_length=length, tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, split="1,0,0", **settings,
    )  # fmt: skip


def megatron_dataset(a: Result) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import GPTDataset
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
        from megatron.core.datasets.utils import Split

        config = gpt_config(S, path_to_cache=a["index_cache"], blend=(["x"], None))
        if a["prefix"].startswith("/"):
            indexed = IndexedDataset(a["prefix"], multimodal=False, mmap=True)
        else:
            cache = "/tmp/streammega-bench-megidx"
            os.makedirs(cache, exist_ok=True)
            where = ObjectStorageConfig(path_to_idx_cache=cache)
            indexed = IndexedDataset(
                a["prefix"], multimodal=False, mmap=False, object_storage_config=where
            )
        ids = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
        return GPTDataset(indexed, a["prefix"], ids, a["num_samples"], Split.train, config)


def megatron(a: Result) -> Result:
    dataset = megatron_dataset(a)
    dataset[0]
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < a["seconds"] and count + 1 < len(dataset):
        count += 1
        dataset[count]
    taken = time.perf_counter() - began
    return {"samples": count, "seconds": taken, "rate": count / taken, "tokens": count * S / taken}


def megatron_loader(a: Result) -> Result:
    import torch

    workers = a["workers"]
    more: Any = {"prefetch_factor": 4} if workers else {}
    loader: Any = torch.utils.data.DataLoader(
        megatron_dataset(a), batch_size=BATCH, num_workers=workers, **more
    )
    return consume(loader, a["seconds"], 16)


# --- other loaders over the same tokens, in their own formats -------------------------------------------------------------------


def as_asked(ids: Any, a: Result) -> Any:
    """Ids [..., S + 1] in their stored dtype, or the fields of a model: tokens and labels in int64."""
    if a["ids_only"]:
        return ids
    wide = ids.long()
    return {"tokens": wide[..., :-1], "labels": wide[..., 1:]}


def litdata(a: Result) -> Result:
    import litdata as ld
    import litdata.streaming.downloader as downloader

    # Its client refuses endpoints without TLS otherwise.
    downloader._OBSTORE_CLIENT_OPTIONS = {**downloader._OBSTORE_CLIENT_OPTIONS, "allow_http": True}
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    options = {"endpoint_url": a["endpoint"], **keys}
    dataset = ld.StreamingDataset(
        "s3://data/litdata", item_loader=ld.TokensLoader(block_size=S + 1), shuffle=True, storage_options=options,
        cache_dir=tempfile.mkdtemp(), max_cache_size="20GB",
    )  # fmt: skip
    loader: Any = ld.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=a["workers"])
    return consume((as_asked(ids, a) for ids in loader), a["seconds"])


def stub_torchvision() -> None:
    """mosaicml-streaming imports torchvision, which has no build for every torch,
    for images only.
    """
    from importlib.machinery import ModuleSpec
    from unittest.mock import MagicMock

    for name in ("", ".datasets", ".transforms", ".transforms.functional", ".io"):
        module = MagicMock()
        module.__spec__ = ModuleSpec("torchvision" + name, None)
        module.__path__ = []
        module.VisionDataset = object
        sys.modules["torchvision" + name] = module


def mosaic(a: Result) -> Result:
    stub_torchvision()
    import torch
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    # a run that was ended leaves its state to the next one, which then looks for samples elsewhere
    clean_stale_shared_memory()

    class Tokens(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            ids = torch.from_numpy(np.array(super().__getitem__(index)["tokens"]))
            return as_asked(ids, a)

    dataset = Tokens(
        remote="s3://data/mds",
        local=tempfile.mkdtemp(),
        shuffle=True,
        batch_size=BATCH,
        num_canonical_nodes=1,
    )
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=a["workers"])
    return consume(loader, a["seconds"])


def s3torch(a: Result) -> Result:
    import torch
    from s3torchconnector import S3ClientConfig, S3IterableDataset

    def samples(reader: Any) -> Any:
        return reader.read()

    objects = S3IterableDataset.from_prefix(
        "s3://data/raw/", region="us-east-1", endpoint=a["endpoint"], transform=samples, enable_sharding=True,
        s3client_config=S3ClientConfig(force_path_style=True, unsigned=True),
    )  # fmt: skip

    class Shuffled(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            rng = np.random.default_rng(0)
            for body in objects:
                rows = torch.frombuffer(bytearray(body), dtype=torch.uint16).view(-1, S + 1)
                for row in rng.permutation(len(rows)):
                    yield as_asked(rows[row], a)

    loader: Any = torch.utils.data.DataLoader(
        Shuffled(), batch_size=BATCH, num_workers=a["workers"]
    )
    return consume(loader, a["seconds"])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    harness.print_result(globals()[sys.argv[1]](json.loads(sys.argv[2])))
    os._exit(0)  # some loaders leave processes that would be waited for
