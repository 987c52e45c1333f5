"""All objects of a folder of a remote store. Where its pages lay the last time is kept on local disk,
so that they come side by side instead of one after the other.

What is kept are keys between which listings are asked for, and nothing of what they told: whatever
the keys are, all that lies before, between and behind them is listed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from streammega.dataset.node_cache import (
    digest_of,
    note_use,
    remove_unused,
    write_atomically,
)
from streammega.errors import CacheError
from streammega.storage import ObjectInfo, Store
from streammega.storage.fetch.threads import each
from streammega.storage.store import ListsBetween, NotListedBetween

PART = 960
"""Objects between two bounds: with some that are added later they are one answer, of 1,000."""
AT_ONCE = 32
"""Parts that are listed at once."""
MOST_IN_PART = 10_000
"""Objects between two bounds. A part with more holds others than those of the folder itself, or so
many new ones that the bounds are of no use.
"""
MOST_BOUNDS = 10_000
"""That are believed: more are no bounds of pages."""
WHOLE_DAYS = 7
"""For which a folder is listed whole that parts did not serve: it, or its server, may change."""
UNUSED_DAYS = 60
"""After so many without use, bounds are removed."""
_PREFIX = "listing-"
"""What names of kept files begin with."""
_BEHIND_IT = "\0"
"""A key and this lie behind the key, and before all other keys behind it."""
_BEHIND_ALL = "\U0010ffff" * 300
"""Behind all names in a folder, as far as a key may be long."""


def list_folder(store: Store, folder: str, cache_dir: Path | None = None) -> list[ObjectInfo]:
    """The objects of a folder, by its key with the slash, sorted; what lies deeper is not listed.

    cache_dir: where bounds of its pages are kept; None: nowhere. Raises StorageError.
    """
    if cache_dir is None or not isinstance(store, ListsBetween):
        return store.list(folder, recursive=False)
    path = cache_dir / "idx" / f"{_PREFIX}{digest_of(store.url(folder))}.json"
    kept = _kept_bounds(path, folder)
    listed = None
    in_vain = False
    if kept:
        try:
            listed = _listed_in_parts(store, folder, kept)
        except NotListedBetween:
            in_vain = True
    if listed is None:
        listed = store.list(folder, recursive=False)
    _keep_bounds(path, kept, bounds_of(listed), in_vain)
    return listed


def bounds_of(listed: Sequence[ObjectInfo]) -> list[str]:
    """Keys of a listing, with a part of it between each two; none where it is one page."""
    return [info.key for info in listed[PART::PART]]


def _listed_in_parts(
    store: ListsBetween, folder: str, bounds: Sequence[str]
) -> list[ObjectInfo] | None:
    """All objects of a folder, by a listing for each part of it; None where the store tells none so.

    Raises NotListedBetween where there are folders within, or a part has too many.
    """
    starts = [folder, *bounds]
    stops = [*(bound + _BEHIND_IT for bound in bounds), folder + _BEHIND_ALL]

    def list_part(number: int) -> list[ObjectInfo] | None:
        return store.list_between(starts[number], stops[number], MOST_IN_PART)

    listed: list[ObjectInfo] = []
    for part in each(list_part, range(len(starts)), AT_ONCE):
        if part is None:
            return None
        if any("/" in info.key[len(folder) :] for info in part):
            raise NotListedBetween(f"{folder}: has folders within")
        listed += part
    return listed


def _kept_bounds(path: Path, folder: str) -> list[str] | None:
    """Keys within a folder, sorted; [] where it is not to be listed by parts for a while, None where
    nothing is kept that could be used.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - path.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(kept, list) or len(kept) > MOST_BOUNDS:
        return None
    if not kept and age > WHOLE_DAYS * 86_400:
        return None
    names = [key for key in kept if isinstance(key, str) and key.startswith(folder)]
    bounds = sorted({key for key in names if "/" not in key[len(folder) :] and key != folder})
    return bounds if len(bounds) == len(kept) else None


def _keep_bounds(path: Path, kept: list[str] | None, bounds: list[str], in_vain: bool) -> None:
    """What the next time goes by. in_vain: parts between those that were kept did not serve."""
    if not bounds:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    elif kept == []:
        pass  # not even marked as used: by its age parts are tried again
    elif bounds != kept:
        _keep(path, bounds)
    elif in_vain:
        _keep(path, [])
    else:
        note_use(path)


def _keep(path: Path, bounds: Sequence[str]) -> None:
    """Keep bounds for the next time, if that can be."""
    data = json.dumps(bounds).encode()
    with suppress(CacheError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [data], len(data))
        remove_unused(path.parent, _PREFIX, UNUSED_DAYS)
