"""A loader that is closed or dropped frees its files and threads at once, without the collector."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammega import DataConfig, PhaseConfig, StreamLoader
from streammega.errors import FormatError
from tests.support.streams import config_of, storage_of
from tools.bench.object_server import Running

SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "megatron": {"order": "megatron"},
    "stream": {"order": "stream"},
    "phases": {"order": "stream", "phases": (PhaseConfig(first_sample=64, sequence_length=32),)},
}


def loaded(config: DataConfig, how: str) -> dict[str, weakref.ref[Any]]:
    """What a loader had that was closed or dropped after some batches."""
    loader = StreamLoader(config, **SIZES)
    if how == "device":
        loader.prefetch_to("meta")
    samples = loader.dataset.samples
    refs: dict[str, weakref.ref[Any]] = {
        "loader": weakref.ref(loader),
        "samples": weakref.ref(samples),
    }
    batches = iter(loader)
    with contextlib.suppress(FormatError):  # where `how` is error
        for _ in range(20):
            next(batches)
        if how in ("ended", "error"):
            for _ in batches:
                pass
    if how == "closed":
        loader.close()
    return refs


def all_combinations() -> list[Any]:
    """(kind, where, how). Each two of their values are together; all three in `make soak`."""
    return [
        pytest.param(kind, where, how, marks=[] if (k + w + h) % 3 == 0 else pytest.mark.soak)
        for k, kind in enumerate(KINDS)
        for w, where in enumerate(("s3", "local", "cache"))
        for h, how in enumerate(("closed", "dropped", "ended", "error", "device"))
    ]


@pytest.mark.guarantee("frees-without-collector")
@pytest.mark.parametrize(("kind", "where", "how"), all_combinations())
def test_nothing_is_left_for_the_collector(
    server: Running, tmp_path: Path, kind: str, where: str, how: str
) -> None:
    storage = storage_of(server, "obstore")
    if where == "cache":
        storage = replace(storage, cache_dir=tmp_path / "cache", cache_max_bytes=1 << 30).tuned(
            cache_chunk_bytes=1 << 20
        )
    place = str(server.root) if where == "local" else "s3:/"
    config = replace(config_of("stream", place, tmp_path, storage, 400), **KINDS[kind])
    if config.order == "megatron":
        config = replace(config, shuffle_lanes=None)
    loaded(config, "closed")  # kernels that are compiled leave much to the collector
    if how == "error":
        config = replace(config, vocab_size=59_900)
    gc.collect()
    threads = threading.active_count()
    gc.disable()
    try:
        refs = loaded(config, how)
        alive = [name for name, ref in refs.items() if ref() is not None]
        mapped = Path("/proc/self/maps").read_text().count(f"{server.root}/data/")
        assert (alive, mapped) == ([], 0)
        assert threading.active_count() <= threads
    finally:
        gc.enable()
