"""Datasets with manifests, made at once: for tests of what grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from streammega import IndexedDatasetWriter
from streammega.dataset.manifest import MANIFEST, Manifest, ShardEntry

TOKENS = 50
"""Of a document."""


def put_dataset(prefix: str, *, seed: int, documents: int = 40) -> str:
    """A dataset of random tokens on a local disk, as convert would leave it; returns its prefix."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_item(rng.integers(0, 60_000, TOKENS).astype(np.uint16))
            writer.end_document()
    tokens = Path(f"{prefix}.bin").read_bytes()
    index = Path(f"{prefix}.idx").read_bytes()
    shard = ShardEntry(
        name=prefix.rpartition("/")[2],
        documents=documents,
        sequences=documents,
        tokens=documents * TOKENS,
        bytes=len(tokens),
        checksums=[xxhash.xxh3_128_hexdigest(tokens)],
        index_bytes=len(index),
        index_checksums=[xxhash.xxh3_128_hexdigest(index)],
    )
    manifest = Manifest(
        kind="bin",
        dtype="uint16",
        documents=documents,
        sequences=documents,
        tokens=documents * TOKENS,
        shards=[shard],
    )
    Path(prefix + MANIFEST).write_bytes(manifest.to_json())
    return prefix
