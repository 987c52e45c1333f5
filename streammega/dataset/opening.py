"""From the names of datasets to what they are: `open_manifests`. After it, nothing is asked about them.

A name is a written manifest, a pair (or a shard of another kind), a folder, or a glob. Each is opened by
rounds of requests, and the requests of all names go out together, round by round:

    a manifest      the manifest; nothing more where the ETags in it were seen in its folder
    a pair          both beginnings, and a look for a manifest; then both ends
    a folder, glob  a listing; the manifests in it; then its pairs

In a copy of a dataset, whose manifest has ETags of another place or none, shards are looked up as pairs
are, and compared with the manifest.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from streammega.config import StorageConfig
from streammega.dataset.columns import (
    ColumnFile,
    StoredColumn,
    check_column_size,
    missing_column,
)
from streammega.dataset.idx import (
    HEADER_BYTES,
    LENGTH,
    OFFSET,
    IndexHeader,
    parse_header,
)
from streammega.dataset.labels import Label
from streammega.dataset.manifest import (
    Manifest,
    Shard,
    check_counts,
    columns_at,
    read_manifest,
    shards_at,
)
from streammega.dataset.names import (
    MANIFEST,
    SUFFIXES,
    Kind,
    dataset_of,
    dataset_of_marked,
    datasets_of,
    missing_shards,
    split_name,
    strip_suffix,
    with_suffix,
    without_number,
)
from streammega.dataset.shard import check_expected, check_shard, read_arrays, token_view
from streammega.dataset.token_ends import END_BYTES, digest_of_ends
from streammega.errors import (
    FormatError,
    MissingShardsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.errors.logs import get_logger
from streammega.errors.words import pluralize
from streammega.storage import Buffer, ObjectInfo, Store, join_url, open_store
from streammega.storage.backends.local import PreadStore, local_error
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import Span
from streammega.storage.thread_pool import parallel_map

MAX_REQUESTS = 256
"""Requests at once. Each has a small answer, and waits for a round trip or two."""
NEAR_SECONDS = 0.004
"""Seconds. Where an answer takes less than this, many threads only take turns."""
MAX_NEAR_REQUESTS = 32
"""Requests at once there."""
SHARDS_AT_ONCE = 1 << 13
"""Shards of a dataset whose ends are in memory at once: at most 32 MiB."""
INDEX_START = 8 << 10
"""Bytes of an `.idx` that are read first. A small one is whole then."""
TOKENS_START = 16 << 10
"""The same of tokens. It is no less than END_BYTES, and changes no identity."""
MAX_TRIES = 5
"""How often datasets are opened, if one is replaced meanwhile."""
MANY_REQUESTS = 64
"""From more than so many on the log says how to send fewer."""
OPENED = "%s looked up by %d requests%s"
HOW_TO_SEND_FEWER = (
    ", as they are at every start of every rank: one request is enough with the file that 'streammega "
    "manifest' writes, and open_together asks once for all ranks"
)
GLOB_CHARS = "*?["
"""A name with one of these is a pattern, unless a dataset has that very name."""

log = get_logger(__name__)

Opened = TypeVar("Opened")
Request = Callable[[], Any]
Rounds = Generator[list[Request], list[Any], Opened]
"""What sends requests round by round: it yields them, and takes their answers, or their errors."""
Name = tuple[str, Kind]
"""The prefix of a shard, and its kind."""


def open_manifests(
    names: Sequence[str],
    storage: StorageConfig,
    known: Mapping[str, Manifest] | None = None,
    *,
    columns: Collection[str] = (),
    looks_again: bool = False,
) -> list[Manifest]:
    """What each name is: all of its shards in order, by their full names, with sizes, counts, ETags
    and digests of their ends.

    A manifest (`.json`) means the shards that it lists. A folder (a name ending in /) or a glob means
    all shards in it, in name order; a dataset of the very name comes before a glob. A prefix means
    its pair, or else the manifest of that name.

    known: manifests of names that need not be asked for. columns: those that will be read, whose ETags
    are looked up too. looks_again: also at shards whose ETags were seen, and at all columns.

    Raises ObjectNotFoundError for what is not there, MissingShardsError with some of a set missing,
    FormatError for shards that are not what their `.idx` or manifest says, ObjectChangedError,
    StorageError.
    """
    known = known or {}
    each = list(dict.fromkeys(names))
    _stores = _kept_stores(each, storage)
    jobs = [
        _open(name, storage, known.get(name), columns, looks_again=looks_again) for name in each
    ]
    manifests = dict(zip(each, _send(_together(jobs), each, storage), strict=True))
    return [manifests[name] for name in names]


def open_with(
    names: Sequence[str],
    storage: StorageConfig,
    make: Callable[[list[Manifest]], Opened],
    known: Mapping[str, Manifest] | None = None,
    columns: Collection[str] = (),
) -> Opened:
    """What `make` makes of datasets. columns: those of them that will be read.

    If one is replaced meanwhile, all are opened again: each is then the earlier one or the new one,
    and never a mixture. Raises as `open_manifests` and `make` do.
    """
    _stores = _kept_stores(names, storage)
    for number in range(MAX_TRIES):
        is_last = number == MAX_TRIES - 1
        manifests = None
        try:
            manifests = open_manifests(names, storage, known, columns=columns)
            return make(manifests)
        except ObjectChangedError:
            if is_last:
                raise
        except (ObjectNotFoundError, FormatError):
            now = None
            with suppress(ObjectNotFoundError, ObjectChangedError, FormatError):
                now = open_manifests(names, storage, known, columns=columns)
            if is_last or now == manifests:
                raise
    raise AssertionError("unreachable")


def _kept_stores(names: Sequence[str], storage: StorageConfig) -> list[tuple[Store, str]]:
    """The stores of datasets. A store ends with its last user, and its client and connections with it:
    while datasets are opened, these are kept.
    """
    of_root = {
        name.partition("://")[2].partition("/")[0]: name for name in names if is_remote(name)
    }
    return [open_store(name, storage) for name in of_root.values()]


def find_shards(name: str, storage: StorageConfig) -> list[str]:
    """The names of the shards of a dataset, in order; none is read. Raises as `open_manifests`."""
    (meaning,) = _send(_together([_find(name, storage)]), [name], storage)
    return [with_suffix(prefix, kind) for prefix, kind in meaning.shards]


def content_of(manifest: Manifest) -> str:
    """A digest of the content of a dataset, 16 hex digits: dtypes and tokens of its shards, the first
    and last tokens of the shards at its ends, and how many sequences and documents it has.
    """
    shards = manifest.shards
    with_tokens = [shard for shard in shards if shard.tokens]
    at_ends = with_tokens[:1] + with_tokens[1:][-1:]
    # As an int64: another form changes the identity of every dataset.
    ends = [int.from_bytes(bytes.fromhex(one.ends), "little", signed=True) for one in at_ends]
    kinds = list(dict.fromkeys(shard.token_dtype.str for shard in shards))
    numbers = {kind: number for number, kind in enumerate(kinds)}
    kind_of_shard = [numbers[shard.token_dtype.str] for shard in shards] if len(kinds) > 1 else []
    described = json.dumps(
        [
            kinds,
            kind_of_shard,
            [shard.tokens for shard in shards],
            ends,
            sum(shard.sequences for shard in shards),
            sum(shard.documents for shard in shards),
        ]
    )
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


# --- rounds of requests ---------------------------------------------------------------------------


def _send(rounds: Rounds[Opened], names: Sequence[str], storage: StorageConfig) -> Opened:
    """Send all requests of datasets, and return what they were for. Raises what the rounds raise."""
    are_local = not any(map(is_remote, names))
    answers = None
    sent = 0
    while True:
        try:
            requests = rounds.send(answers)  # type: ignore[arg-type]
        except StopIteration as end:
            opened: Opened = end.value
            if sent and not are_local:
                few = sent <= MANY_REQUESTS
                log.info(
                    OPENED, pluralize(len(names), "dataset"), sent, "" if few else HOW_TO_SEND_FEWER
                )
            return opened
        sent += len(requests)
        at_once = min(MAX_REQUESTS, storage.max_concurrent_requests)
        answers = []
        if len(requests) > at_once and not are_local:
            began = time.monotonic()
            answers = [_answer(requests[0])]
            if time.monotonic() - began < NEAR_SECONDS:
                at_once = min(MAX_NEAR_REQUESTS, at_once)
        answers += parallel_map(_answer, requests[len(answers) :], at_once, is_local=are_local)


def _answer(request: Request) -> Any:
    """The answer, or the error in its place: the rounds know what it means."""
    try:
        return request()
    except StreammegaError as error:
        return error


def _value(answer: Any) -> Any:
    """The answer itself. Raises the error that is in its place."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _together(jobs: Sequence[Rounds[Opened]]) -> Rounds[list[Opened]]:
    """Several at once: the requests of a round of all of them go out together."""
    opened: dict[int, Opened] = {}
    waiting: list[tuple[int, Rounds[Opened], Any]] = [
        (number, job, None) for number, job in enumerate(jobs)
    ]
    while waiting:
        requests: list[Request] = []
        sent = []
        for number, job, answers in waiting:
            try:
                of_job = job.send(answers)
            except StopIteration as end:
                opened[number] = end.value
                continue
            sent.append((number, job, len(of_job)))
            requests += of_job
        if not sent:
            break
        answered = iter((yield requests))
        waiting = [
            (number, job, [next(answered) for _ in range(count)]) for number, job, count in sent
        ]
    return [opened[number] for number in range(len(jobs))]


# --- names ----------------------------------------------------------------------------------------


class _Meaning(NamedTuple):
    """What a name means.

    manifest: that which lists the shards, at `url`. in_folder: the manifests of a
    folder, by the prefixes of their datasets. starts: the beginnings of a pair, if they were read.
    """

    shards: Sequence[Name]
    manifest: Manifest | None = None
    url: str = ""
    in_folder: Mapping[str, Manifest] | None = None
    starts: Sequence[Any] = ()


def _find(name: str, storage: StorageConfig, columns: Collection[str] = ()) -> Rounds[_Meaning]:
    if name.endswith(".json"):
        (manifest,) = yield [partial(read_manifest, name, storage)]
        return _listed(_value(manifest), name)
    there = yield from (_there_remote if is_remote(name) else _there_local)(name, storage)
    if there is None and not name.endswith("/"):
        return (yield from _find_prefix(name, storage, columns))
    prefixes, objects = there or ([], ())
    in_folder = yield from _manifests_in_folder(prefixes, objects, storage)
    shards = [
        (prefix, _kind_of(prefix, objects)) for prefix in _without_unlisted(prefixes, in_folder)
    ]
    if not shards:
        remedy = "check the path"
        if name.endswith("/"):
            remedy += f"; without the slash, {name.rstrip('/')} names a dataset"
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; {remedy}")
    missing = missing_shards(prefix for prefix, _ in shards)
    if missing:
        raise MissingShardsError(
            f"{name}: shards of a set are missing, such as {', '.join(missing)}; copy them again, or "
            "convert again"
        )
    return _Meaning(shards, in_folder=in_folder)


def _listed(manifest: Manifest, url: str) -> _Meaning:
    """The shards that the manifest at `url` lists. Raises FormatError for one without any."""
    shards = shards_at(check_counts(manifest, url), url)
    if not shards:
        raise FormatError(f"{url}: lists no shards; convert again, or name another dataset")
    return _Meaning([(shard.name, shard.kind) for shard in shards], manifest, url)


def _find_prefix(name: str, storage: StorageConfig, columns: Collection[str]) -> Rounds[_Meaning]:
    """The pair that a prefix names, or the shards of the manifest of that name."""
    prefix, kind = split_name(name)
    url = prefix + MANIFEST
    manifest, *starts = yield [
        partial(_manifest_or_none, url, storage),
        *_starts(prefix, kind, _Stores(storage)),
    ]
    is_pair = not any(isinstance(start, BaseException) for start in starts)
    if isinstance(manifest, FormatError) and is_pair and not columns:
        manifest = None  # what is wrong with it matters only without a pair, or for columns
    manifest = _value(manifest)
    pair = _Meaning([(prefix, kind)], starts=starts)
    if manifest is None or not manifest.shards:
        return pair
    listed = _listed(manifest, url)
    if list(listed.shards) == [(prefix, kind)]:
        return listed._replace(starts=starts)
    # Shards with a mark have replaced a pair of that name, which is being removed.
    first, _ = listed.shards[0]
    is_replaced = dataset_of_marked(first) == prefix
    if is_replaced or (with_suffix(prefix, kind) == prefix and not is_pair):
        return listed
    return pair


def _manifest_or_none(url: str, storage: StorageConfig) -> Manifest | None:
    """The manifest at `url`, if there is one. Raises FormatError, StorageError."""
    try:
        return check_counts(read_manifest(url, storage), url)
    except FormatError:
        raise
    except StorageError as error:
        if error.transient:
            raise
        return None  # without the right to list, S3 answers 403 for what is not there


def _manifests_in_folder(
    prefixes: Sequence[str], objects: Collection[str], storage: StorageConfig
) -> Rounds[dict[str, Manifest]]:
    """The manifests in a folder that may list some of its shards, by the prefixes of datasets."""
    datasets: dict[str, None] = {}
    for prefix in prefixes:
        for dataset in datasets_of(prefix):
            if dataset + MANIFEST in objects:
                datasets[dataset] = None
    manifests = yield [partial(_manifest_or_none, name + MANIFEST, storage) for name in datasets]
    read = {name: _value(manifest) for name, manifest in zip(datasets, manifests, strict=True)}
    return {name: manifest for name, manifest in read.items() if manifest is not None}


def _without_unlisted(prefixes: list[str], in_folder: Mapping[str, Manifest]) -> list[str]:
    """The prefixes without shards that are not part of a dataset yet, or any more: a shard with a mark
    is one only if the manifest of its dataset lists it, and what such shards replaced is left out.
    """
    marked_of: dict[str, set[str]] = {}
    for prefix in prefixes:
        owner = dataset_of_marked(prefix)
        if owner is not None:
            marked_of.setdefault(owner, set()).add(prefix)
    left_out: set[str] = set()
    for owner, marked in marked_of.items():
        manifest = in_folder.get(owner)
        if manifest is None:
            left_out |= marked  # the conversion that wrote them was never finished
            continue
        listed = {shard.name for shard in shards_at(manifest, owner + MANIFEST)}
        if listed:
            plain = {prefix for prefix in prefixes if owner in (prefix, without_number(prefix))}
            left_out |= (marked | plain) - listed
    return [prefix for prefix in prefixes if prefix not in left_out]


There = tuple[list[str], Collection[str]] | None
"""The prefixes of the shards that a folder or glob names, and the names of all that is in its folders;
None: the name is a prefix.
"""


def _there_local(name: str, _: StorageConfig) -> Rounds[There]:
    yield from ()  # looking takes no request
    name = _plain_name(name)
    if is_local_folder(name):
        paths = _paths_in(name)
        indices = [path for path in paths if path.endswith(".idx")]
    elif is_glob(name) and not _exists(name):
        indices = _matching_indices(name)
        paths = set()
        for folder in {os.path.dirname(path) for path in indices}:
            paths |= _paths_in(folder)
    else:
        return None
    return sorted({strip_suffix(path) for path in indices}), paths


def _there_remote(name: str, storage: StorageConfig) -> Rounds[There]:
    folder, _, pattern = name.rpartition("/")
    if pattern and not is_glob(pattern):
        return None
    (listed,) = yield [partial(_list_folder, folder, storage)]
    if isinstance(listed, StorageError):
        if not pattern or "*" in pattern or listed.transient:
            raise listed
        return None  # this store cannot be listed, and many names have ? and [ as letters
    objects = _value(listed)
    before = join_url(folder, "")
    exact = before + strip_suffix(pattern)
    if pattern and (f"{exact}.idx" in objects or f"{exact}{MANIFEST}" in objects):
        return None
    prefixes = sorted(url.removesuffix(".idx") for url in objects if url.endswith(".idx"))
    if pattern:
        prefixes = [prefix for prefix in prefixes if _matches(prefix[len(before) :], pattern)]
    return prefixes, objects


def _list_folder(folder: str, storage: StorageConfig) -> set[str]:
    """The URLs of the objects of a folder, without those of folders in it."""
    store, key = open_store(f"{folder}/", storage)
    before = join_url(folder, "")
    return {before + info.key[len(key) :] for info in store.list(key, recursive=False)}


def _matches(stem: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(stem, pattern) or fnmatch.fnmatchcase(f"{stem}.idx", pattern)


def _paths_in(folder: str) -> set[str]:
    """The paths of all that is in a folder; "" is the current one. Raises StorageError."""
    try:
        return {os.path.join(folder, entry) for entry in os.listdir(folder or ".")}
    except OSError as error:
        raise local_error(folder, error) from None


def _matching_indices(name: str) -> list[str]:
    """The `.idx` files that a pattern names, with their suffix or without."""
    folder, pattern = os.path.split(name)
    if os.path.isdir(folder):
        # In the name of a folder that exists these signs are letters.
        name = os.path.join(glob.escape(folder), pattern)
    indices = [path for path in glob.glob(name) if path.endswith(".idx")]
    return indices or glob.glob(f"{name}.idx")


def is_glob(name: str) -> bool:
    """Whether a name may be a pattern."""
    return any(sign in name for sign in GLOB_CHARS)


def is_local_folder(name: str) -> bool:
    """Whether a name is a local folder. A dataset of that very name comes first: caches are often put
    in a folder of its name.
    """
    name = _plain_name(name)
    return os.path.isdir(name) and (name.endswith("/") or not _exists(name))


def _plain_name(name: str) -> str:
    """A local name without `file://` and `~`."""
    if not name.startswith(("file://", "local://", "~")):
        return name
    return local_path(name) + ("/" if name.endswith("/") else "")


def _exists(name: str) -> bool:
    """Whether a dataset of that very name is there."""
    prefix = strip_suffix(name)
    return os.path.exists(f"{prefix}.idx") or os.path.exists(prefix + MANIFEST)


def _kind_of(prefix: str, there: Collection[str]) -> Kind:
    """The kind of a shard, by the files in the folder of its `.idx`."""
    kinds = (kind for kind, suffix in SUFFIXES.items() if prefix + suffix in there)
    return next(kinds, "bin")


# --- shards ---------------------------------------------------------------------------------------


def _open(
    name: str,
    storage: StorageConfig,
    known: Manifest | None,
    wanted: Collection[str],
    *,
    looks_again: bool,
) -> Rounds[Manifest]:
    """The manifest of what a name means. known: as it was written, with full names of shards. wanted:
    the columns that are looked up.
    """
    if known is None:
        meaning = yield from _find(name, storage, wanted)
    else:
        meaning = _Meaning([(shard.name, shard.kind) for shard in known.shards], known)
    manifest = meaning.manifest
    expected: Sequence[Shard | None] = [None] * len(meaning.shards)
    is_packed = False
    if manifest is not None:
        expected = shards = manifest.shards if known else shards_at(manifest, meaning.url)
        is_packed = manifest.pack is not None
        columns = manifest.columns if known else columns_at(manifest, meaning.url)
        manifest = replace(manifest, shards=shards, columns=columns)
        is_here = manifest.seen_at and manifest.seen_at == place_of(shards[0].name, storage)
        if is_here and not looks_again and all(shard.is_known for shard in shards):
            return (yield from _with_columns(manifest, wanted, storage))
        manifest = replace(manifest, columns=_without_etags(columns))
    opened: list[Shard] = []
    stores = _Stores(storage)
    for first in range(0, len(meaning.shards), SHARDS_AT_ONCE):
        last = first + SHARDS_AT_ONCE
        jobs = [
            _open_pair(prefix, kind, stores, shard, meaning.starts, is_packed=is_packed)
            for (prefix, kind), shard in zip(
                meaning.shards[first:last], expected[first:last], strict=True
            )
        ]
        opened += yield from _together(jobs)
    seen_at = place_of(opened[0].name, storage)
    if manifest is not None:
        manifest = replace(manifest, shards=opened, seen_at=seen_at)
    else:
        manifest = _manifest_of(opened, meaning.in_folder or {}, seen_at)
    if looks_again:
        wanted = [column.name for column in manifest.columns]
    return (yield from _with_columns(manifest, wanted, storage))


def _manifest_of(shards: list[Shard], in_folder: Mapping[str, Manifest], seen_at: str) -> Manifest:
    """The manifest of shards that none lists by itself: of a pair, or of a folder with others in it."""
    empty = Manifest(
        kind=shards[0].kind,
        dtype=shards[0].dtype,
        multimodal=all(shard.multimodal for shard in shards),
        documents=0,
        sequences=0,
        tokens=0,
        shards=[],
        folder_labels=_labels(shards, in_folder),
        columns=_columns_in_folder(shards, in_folder),
        seen_at=seen_at,
    )
    return empty.with_shards(shards)


# --- columns --------------------------------------------------------------------------------------


def _without_etags(columns: Sequence[StoredColumn]) -> tuple[StoredColumn, ...]:
    """Columns whose ETags were seen in another place, where they do not count."""
    return tuple(
        column._replace(files=[file and file._replace(etag="") for file in column.files])
        for column in columns
    )


def _columns_in_folder(
    shards: Sequence[Shard], in_folder: Mapping[str, Manifest]
) -> tuple[StoredColumn, ...]:
    """The columns that manifests in a folder list of its shards; a shard has none where another dataset
    has one of that name and another dtype, width, alignment or fill.
    """
    kinds: dict[str, StoredColumn] = {}
    files: dict[str, dict[str, ColumnFile | None]] = {}
    for dataset, manifest in in_folder.items():
        for column in _without_etags(columns_at(manifest, dataset + MANIFEST)):
            kind = kinds.setdefault(column.name, column._replace(files=[]))
            names = [shard.name for shard in shards_at(manifest, dataset + MANIFEST)]
            if kind.kind == column.kind:
                files.setdefault(column.name, {}).update(zip(names, column.files, strict=True))
    return tuple(
        kind._replace(files=[files[name].get(shard.name) for shard in shards])
        for name, kind in kinds.items()
    )


def _with_columns(
    manifest: Manifest, wanted: Collection[str], storage: StorageConfig
) -> Rounds[Manifest]:
    """A manifest that knows the ETags of the columns that are wanted. Each object is looked up that was
    not seen here, and compared with the tokens of its shard.
    """
    stores = _Stores(storage)
    requests: list[Request] = []
    places: list[tuple[int, int, str]] = []
    for number, column in enumerate(manifest.columns):
        for shard, file in enumerate(column.files):
            if column.name in wanted and file is not None and not file.etag:
                store, key = stores.of(file.name)
                requests.append(partial(store.info, key))
                places.append((number, shard, store.url(key)))
    if not requests:
        return manifest
    answers = yield requests
    files = [list(column.files) for column in manifest.columns]
    for (number, shard, url), answer in zip(places, answers, strict=True):
        column = manifest.columns[number]
        if isinstance(answer, ObjectNotFoundError):
            raise ObjectNotFoundError(missing_column(url, column.name))
        info: ObjectInfo = _value(answer)
        check_column_size(url, info.size, manifest.shards[shard].tokens, column)
        file = files[number][shard]
        assert file is not None
        files[number][shard] = file._replace(etag=info.etag)
    columns = zip(manifest.columns, files, strict=True)
    return replace(manifest, columns=tuple(column._replace(files=new) for column, new in columns))


def _labels(shards: Sequence[Shard], in_folder: Mapping[str, Manifest]) -> tuple[Label, ...]:
    """What manifests in a folder say of its shards: of each dataset of them once."""
    labels: dict[tuple[str, bool], Label] = {}
    for shard in shards:
        dataset = dataset_of(shard.name)
        key = (dataset, shard.multimodal)
        if key in labels:
            continue
        manifest = in_folder.get(dataset)
        tokenizer = modes = eod_id = None
        if manifest is not None:
            (label,) = manifest.labels
            tokenizer, modes, eod_id = label.tokenizer, label.loss_modes, label.eod_id
        labels[key] = Label(shard.name, tokenizer, modes, shard.multimodal, eod_id)
    if not any(label.tokenizer or label.eod_id is not None for label in labels.values()):
        return tuple(label for label in labels.values() if label.has_modes)
    return tuple(labels.values())  # also without any word on their ids: they may differ


def place_of(url: str, storage: StorageConfig) -> str:
    """The folder of an object with its endpoint, where ETags are those of the same objects; empty on a
    local disk.
    """
    if not is_remote(url):
        return ""
    store, key = open_store(url, storage)
    return store.place(key.rpartition("/")[0])


class _UnmappedStore(PreadStore):
    """The local disk, without maps: a map would show a later change as other bytes, and a read tells of
    it. What fails is not tried again, as for mapped files.
    """

    read = PreadStore.fetch


class _Stores:
    """The stores of objects that are opened. Those of a folder have one: looking it up for each of
    thousands would take as long as all the rest.
    """

    def __init__(self, storage: StorageConfig) -> None:
        self.storage = storage
        self._of_folder: dict[str, tuple[Store, str]] = {}

    def of(self, url: str) -> tuple[Store, str]:
        """The store of an object, and its key."""
        folder, _, name = url.rpartition("/")
        if folder in self._of_folder and name.isprintable():
            store, before = self._of_folder[folder]
            return store, before + name
        store, key = open_store(url, self.storage)
        if store.is_local:
            store = _UnmappedStore(self.storage)
        # A URL of http may be spelled in other ways than its key.
        if folder and key.endswith(name) and not folder.startswith("http"):
            self._of_folder[folder] = store, key.removesuffix(name)
        return store, key


def _starts(
    prefix: str, kind: Kind, stores: _Stores, expected: Shard | None = None
) -> list[Request]:
    """Requests for the beginnings of both objects of a shard. expected: what its manifest says."""
    index_store, index_key = stores.of(f"{prefix}.idx")
    store, key = stores.of(prefix + SUFFIXES[kind])
    # Of other kinds the beginning is of no use.
    size = TOKENS_START if kind == "bin" else 1
    if kind == "bin" and expected is not None and expected.bytes > TOKENS_START:
        size = END_BYTES  # no more than these is of use
    return [
        partial(_read_index_start, index_store, index_key),
        partial(_read_tokens_start, store, key, size),
    ]


# Of thousands of shards these are in memory at once, so they hold no more than is needed.
def _read_index_start(store: Store, key: str) -> tuple[ObjectInfo, bytes, list[bytes | None]]:
    """(the `.idx`, its header, and what it has in `_last_spans`: None where that is not in its
    beginning).
    """
    info, body = store.read_start(key, INDEX_START)
    head = bytes(body[:HEADER_BYTES])
    spans: list[Span] = []
    with suppress(FormatError):  # which is raised when the header is used
        spans = _last_spans(parse_header(head, info.size, store.url(key)))
    last = [bytes(body[start:stop]) if stop <= len(body) else None for start, stop in spans]
    return info, head, last


def _read_tokens_start(store: Store, key: str, size: int) -> tuple[ObjectInfo, bytes, bytes | None]:
    """(the tokens as stored, their first bytes, and the last ones: None where these are further on)."""
    info, body = store.read_start(key, size)
    last = bytes(body[-END_BYTES:]) if info.size <= len(body) else None
    return info, bytes(body[:END_BYTES]), last


def _open_pair(
    prefix: str,
    kind: Kind,
    stores: _Stores,
    expected: Shard | None,
    starts: Sequence[Any],
    *,
    is_packed: bool,
) -> Rounds[Shard]:
    """One shard by its objects.

    expected: what its manifest says, to be compared. starts: the answers to `_starts`, if they are
    there. Raises ObjectNotFoundError, FormatError, ObjectChangedError, StorageError.
    """
    if not starts:
        starts = yield _starts(prefix, kind, stores, expected)
    index_store, index_key = stores.of(f"{prefix}.idx")
    store, key = stores.of(prefix + SUFFIXES[kind])
    index_url = index_store.url(index_key)
    url = store.url(key)
    _check_there(starts, index_url, url)
    (index_info, head, at_end), (info, first, last) = starts
    if expected is not None:
        check_expected(url, "bytes", info.size, expected.bytes)
        check_expected(index_url, "bytes", index_info.size, expected.index_bytes)
    header = parse_header(head, index_info.size, index_url)
    if expected is not None:
        check_shard(expected, header.dtype, header.sequence_count, header.document_count - 1)
    spans = [] if is_packed else _last_spans(header)
    unread = [span for span, value in zip(spans, at_end, strict=False) if value is None]
    # The tokens of other kinds take several requests: where a manifest has their ends, those of its size
    # are taken for its own.
    shown = (expected.token_bytes, expected.ends) if expected and expected.ends else None
    reads: list[Request] = [
        partial(index_store.read, index_key, [span], index_info.etag) for span in unread
    ]
    if kind == "bin" and last is None:
        end = (info.size - END_BYTES, info.size)
        reads.append(partial(store.read, key, [end], info.etag))
    elif kind != "bin" and shown is None:
        reads.append(partial(_read_shown, prefix, kind, info, index_info, stores))
    answers = [_value(answer) for answer in (yield reads)] if reads else []
    read = iter(answers)
    token_bytes = info.size
    last_end = -1
    if kind != "bin":
        token_bytes, ends = shown or answers[-1]
    else:
        ends = digest_of_ends(first, answers[-1][0] if last is None else last)
    if not is_packed:
        values = [next(read)[0] if value is None else value for value in at_end]
        last_end = _last_end(header, values, index_url)
    if token_bytes % header.dtype.itemsize:
        raise FormatError(
            f"{index_url}: names tokens of {header.dtype}, but the {token_bytes} bytes of {url} are not "
            "whole ones; it is truncated, or belongs to another .idx: copy both again"
        )
    shard = Shard(
        name=prefix,
        documents=header.document_count - 1,
        sequences=header.sequence_count,
        tokens=token_bytes // header.dtype.itemsize,
        bytes=info.size,
        index_bytes=index_info.size,
        ends=ends,
        etag=info.etag,
        index_etag=index_info.etag,
        kind=kind,
        dtype=str(header.dtype),
        last_end=-1 if last_end == token_bytes else last_end,
    )
    if expected is None:
        return shard
    if expected.ends and kind == "bin" and ends != expected.ends:
        raise FormatError(
            f"{url}: has other tokens than its manifest says; another dataset's shard is in its place: "
            "copy or convert it again (where the manifest is the stale one, remove that)"
        )
    return expected._replace(
        ends=ends, etag=info.etag, index_etag=index_info.etag, last_end=shard.last_end
    )


def _check_there(starts: Sequence[Any], index_url: str, url: str) -> None:
    """Raise ObjectNotFoundError for a shard that lacks one of its objects, StorageError."""
    index, tokens = starts
    if isinstance(tokens, ObjectNotFoundError) and not isinstance(index, BaseException):
        raise ObjectNotFoundError(
            f"{url}: no such object, but its .idx is there; copy both, or convert again"
        )
    _value(tokens)
    if isinstance(index, ObjectNotFoundError):
        raise ObjectNotFoundError(
            f"{index_url}: no such .idx, which {url} needs; was its conversion "
            "interrupted? convert again"
        )
    _value(index)


def _last_spans(header: IndexHeader) -> list[Span]:
    """Where an `.idx` has the length and the offset of its last sequence."""
    last = header.sequence_count - 1
    if last < 0:
        return []
    length_at = header.lengths_at + LENGTH.itemsize * last
    offset_at = header.offsets_at + OFFSET.itemsize * last
    return [(length_at, length_at + LENGTH.itemsize), (offset_at, offset_at + OFFSET.itemsize)]


def _last_end(header: IndexHeader, stored: Sequence[Buffer], index_url: str) -> int:
    """The byte of the tokens at which the last sequence ends.

    stored: its length and offset, of `_last_spans`. Raises FormatError.
    """
    if not stored:
        return 0
    length, offset = [int.from_bytes(value, "little", signed=True) for value in stored]
    if length < 0 or offset < 0:
        raise FormatError(
            f"{index_url}: its last sequence is at byte {offset} and has {length} tokens; "
            "copy it again, or convert again"
        )
    return offset + length * header.dtype.itemsize


def _read_shown(
    prefix: str, kind: Kind, info: ObjectInfo, index_info: ObjectInfo, stores: _Stores
) -> tuple[int, str]:
    """The bytes of the tokens of a `.bin.zst` or `.tar`, and the digest of their ends."""
    storage = stores.storage
    store, key = stores.of(prefix + SUFFIXES[kind])
    index_store, _ = open_store(f"{prefix}.idx", storage)
    view = token_view(kind, store, info, lambda: read_arrays(index_store, index_info, storage))
    shown = DerivedStore(store, info, view)
    size = view.size
    if size <= END_BYTES:
        (first,) = shown.read(key, [(0, size)], info.etag) if size else (b"",)
        return size, digest_of_ends(first, first)
    first, last = shown.read(key, [(0, END_BYTES), (size - END_BYTES, size)], info.etag)
    return size, digest_of_ends(first, last)
