"""What a blend means now, written down: its datasets as complete manifests, with their weights and the
pointers at the cuts of its splits. A rank that has it asks no server when it opens the data.

`write_manifest` puts it into a file that `blend` may name, `open_together` into the config of every
rank. Both keep the names of the datasets, so a run goes on from one to the other and back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from streammega.config import DataConfig, StorageConfig, parse_blend
from streammega.dataset.manifest import (
    Manifest,
    PinnedBlend,
    parse_blend_file,
    read_blend_file,
)
from streammega.dataset.names import MANIFEST
from streammega.dataset.opening import MAX_REQUESTS, open_manifests
from streammega.dataset.shard import token_at
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order.split import SPLITS, split_bounds
from streammega.samples.segments import SplitData, has_data, split_data
from streammega.storage import save_bytes
from streammega.storage.open import is_remote
from streammega.storage.thread_pool import parallel_map


def write_manifest(config: DataConfig, url: str) -> dict[str, Manifest]:
    """Write what the blend of a config means now to a file, which `DataConfig(blend=url)` reads.

    Every shard of the datasets of all splits and phases is looked at, and so are their columns. A run
    with the file opens by one request a rank. It refuses a shard or column that changes later, by its
    name. Returns the manifests by the names of the datasets.

    Raises ConfigError for a name that holds credentials, ObjectNotFoundError, FormatError,
    StorageError.
    """
    config = read_blend(config)
    manifests = _pinned(config, SPLITS, looks_again=True)
    save_bytes(url, _to_json(config, manifests), config.storage)
    return manifests


def pin(config: DataConfig, split: str) -> bytes:
    """The same as bytes, of the remote datasets of a split alone, and without a look at what is known
    already. Raises as `write_manifest`.
    """
    return _to_json(config, _pinned(config, (split,), remote_only=True))


def read_blend(config: DataConfig) -> DataConfig:
    """The config itself, or with the datasets of the file that its blend names.

    Raises ObjectNotFoundError, FormatError for a damaged file, StorageError.
    """
    if config.manifests or config.blend is None:
        return config
    (name, *others), weights = parse_blend(config.blend)
    if others or weights or not name.endswith(".json") or name.endswith(MANIFEST):
        return config
    blend = read_blend_file(name, config.storage)
    return config if blend is None else _with_blend(config, blend)


def with_pinned(config: DataConfig, raw: bytes) -> DataConfig:
    """The config with the datasets of `pin`."""
    blend = parse_blend_file(raw, "the pinned blend")
    assert blend is not None
    return _with_blend(config, blend)


def _with_blend(config: DataConfig, blend: PinnedBlend) -> DataConfig:
    return replace(
        config,
        blend=blend.blend,
        blend_per_split=blend.blend_per_split,
        _manifests={**config.manifests, **blend.manifests},
    )


def _to_json(config: DataConfig, manifests: dict[str, Manifest]) -> bytes:
    """The stored form of a blend."""
    per_split = config.blend_per_split
    if per_split is not None:
        per_split = [_rows(blend) for blend in per_split]
    return PinnedBlend(_rows(config.blend), per_split, manifests).to_json()


def _rows(blend: Any) -> Any:
    """A blend as [name, weight or null] of each dataset."""
    if blend is None:
        return None
    names, weights = parse_blend(blend)
    return [list(row) for row in zip(names, weights or [None] * len(names), strict=True)]


def _pinned(
    config: DataConfig,
    splits: Sequence[str],
    *,
    looks_again: bool = False,
    remote_only: bool = False,
) -> dict[str, Manifest]:
    """The complete manifests of the datasets of some splits of a config, by their names."""
    parts = [split_data(config, split) for split in SPLITS if has_data(config, split)]
    names = dict.fromkeys(name for data in parts if data.split in splits for name in data.prefixes)
    if remote_only:
        # Names with credentials are for each rank to ask about: they are written nowhere.
        names = {name: None for name in names if is_remote(name) and redact_urls(name) == name}
    for name in names:
        if redact_urls(name) != name:
            raise ConfigError(
                f"{name}: the name holds credentials, which would be written; give them in "
                "storage_options"
            )
    known = {} if looks_again else config.manifests
    opened = open_manifests(
        list(names), config.storage, known, columns=list(config.columns), looks_again=looks_again
    )
    complete = [_complete(manifest) for manifest in opened]
    at_once = min(MAX_REQUESTS, config.storage.max_concurrent_requests)
    pointers = parallel_map(
        lambda manifest: _pointers(manifest, parts, config.storage), complete, at_once
    )
    return {
        name: replace(manifest, pointers=at_cuts)
        for name, manifest, at_cuts in zip(names, complete, pointers, strict=True)
    }


def _complete(manifest: Manifest) -> Manifest:
    """A manifest with full names of its objects; of local ones without versions, which a copy would lose."""
    shards = manifest.shards
    if is_remote(shards[0].name):
        return manifest
    local = [
        shard._replace(name=os.path.abspath(shard.name), etag="", index_etag="") for shard in shards
    ]
    columns = tuple(
        column._replace(
            files=[
                file and file._replace(name=os.path.abspath(file.name), etag="")
                for file in column.files
            ]
        )
        for column in manifest.columns
    )
    return replace(manifest, shards=local, columns=columns)


def _pointers(
    manifest: Manifest, parts: Sequence[SplitData], storage: StorageConfig
) -> tuple[tuple[int, int, int], ...]:
    """(shard, sequence of it, its first token) at each cut of a split within a shard."""
    if manifest.bin_tokens is not None:
        return ()
    counts = [shard.sequences for shard in manifest.shards]
    before = [0, *accumulate(counts)]
    cuts: set[int] = set()
    for data in parts:
        cuts.update(split_bounds(data.shares, sum(counts))[data.split] or ())
    pointers = []
    for number, shard in enumerate(manifest.shards):
        for cut in sorted(cuts):
            sequence = cut - before[number]
            if 0 < sequence < shard.sequences:
                token = token_at(shard, sequence, storage)
                pointers.append((number, sequence, token))
    return tuple(pointers)
