"""What killed conversions have left beside a dataset, or what one that was replaced has: told, and
removed when asked.
"""

from __future__ import annotations

from collections.abc import Collection

from streammega.config import StorageConfig
from streammega.convert.read.inputs import CLAIM, PROBE
from streammega.dataset.manifest import MANIFEST, Manifest, read_manifest
from streammega.dataset.shards import SUFFIXES, may_belong, owner_of, set_name, split_name
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from streammega.storage import ObjectInfo, join_url, open_store

ENDINGS = (*SUFFIXES.values(), ".idx")


def find_leftovers(prefix: str, storage: StorageConfig | None = None) -> list[ObjectInfo]:
    """Objects with the names of a dataset's shards that are part of no dataset, in name order; keys
    are the store's.

    Those are shards with a mark (see `publish`) that the manifest does not list, tokens of numbered
    or marked shards without an `.idx`, and what tells of a conversion while it runs. A pair that
    stands for itself is a dataset, and no leftover; neither is a lone file of the very name, which
    may be an input. But where the manifest lists shards with a mark, these have replaced all others
    of the name.

    Raises FormatError for a damaged manifest, which does not say what belongs to it; StorageError.
    """
    storage = storage or StorageConfig()
    folder, stem = _split(prefix)
    there = {info.key.rpartition("/")[2]: info for info in _list(folder, storage)}
    manifest = _manifest(join_url(folder, stem), storage)
    own = _files_of(manifest)
    # else shards with a mark may be all that there is
    known = manifest is not None or f"{stem}.idx" in there
    replaced = manifest is not None and any(
        owner_of(shard.name) == stem for shard in manifest.shards
    )
    found = []
    for name, info in sorted(there.items()):
        shard = split_name(name)[0]
        if name in (f".{stem}{PROBE}", f".{stem}{CLAIM}"):
            found.append(info)
        if (
            not name.endswith(ENDINGS)
            or name in own
            or not may_belong(shard, stem)
            or _has_manifest(shard, stem, there)
        ):
            continue
        alone = f"{shard}.idx" not in there and shard != stem
        if replaced or alone or (known and owner_of(shard) is not None):
            found.append(info)
    return found


def _has_manifest(shard: str, stem: str, there: Collection[str]) -> bool:
    """Whether a shard is that of another dataset, whose name happens to look like that of a shard
    of this one.
    """
    return any(name != stem and f"{name}{MANIFEST}" in there for name in (shard, set_name(shard)))


def remove_leftovers(
    prefix: str, found: list[ObjectInfo], storage: StorageConfig | None = None
) -> None:
    """Remove what `find_leftovers` found: every `.idx` first.

    Raises ConvertError if the dataset has changed meanwhile.
    """
    storage = storage or StorageConfig()
    now = {info.key for info in find_leftovers(prefix, storage)}
    if any(info.key not in now for info in found):
        raise ConvertError(
            f"{prefix}: the dataset has changed meanwhile; is a conversion to it running? look again"
        )
    store, _ = open_store(join_url(*_split(prefix)), storage)
    for info in sorted(found, key=lambda info: not info.key.endswith(".idx")):
        store.delete(info.key)


def _split(prefix: str) -> tuple[str, str]:
    """The folder of a dataset and its name there."""
    folder, slash, stem = split_name(prefix.removesuffix(MANIFEST))[0].rpartition("/")
    return (folder if slash else "."), stem


def _list(folder: str, storage: StorageConfig) -> list[ObjectInfo]:
    store, key = open_store(f"{folder}/", storage)
    return store.list(f"{key.rstrip('/')}/" if key else key, recursive=False)


def _manifest(prefix: str, storage: StorageConfig) -> Manifest | None:
    try:
        return read_manifest(f"{prefix}{MANIFEST}", storage)
    except ObjectNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(
            f"{error} (what belongs to the dataset is not known, so nothing is removed)"
        ) from None


def _files_of(manifest: Manifest | None) -> set[str]:
    """The names of a dataset's files."""
    if manifest is None:
        return set()
    suffix = SUFFIXES[manifest.kind]  # type: ignore[index]
    return {shard.name + ending for shard in manifest.shards for ending in (suffix, ".idx")}
