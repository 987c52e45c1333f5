"""From the work folder to a dataset under its final names: a kill at any moment leaves the former one or the new one whole.

A dataset is what its manifest says. Where none is, tokens come first, then every `.idx`, the manifest last. Where one is
replaced, the new shards are written beside it under names with a mark (`web-gen3f2a1b9c04d1`), the manifest switches from one to
the other at once, and only then the former shards are removed. On a local disk the new ones get their plain names back, by links
and a second switch.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from streammega.config import StorageConfig
from streammega.convert.assemble import Layout
from streammega.convert.inputs import Input
from streammega.convert.units import load_json, save_bytes, save_json
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from streammega.index.manifest import MANIFEST, Manifest, read_manifest
from streammega.index.shards import SUFFIXES, Kind, marked, split_name
from streammega.storage import join_url, open_store
from streammega.storage.base import written_whole
from streammega.storage.local import local_error
from streammega.storage.parts import sized_for
from streammega.storage.urls import is_remote

COPY_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """Under which names a conversion publishes; noted in the work folder before the first of them is written.

    layout, job: digests of what is written, and of what was asked for. mark: of the shards' names, "" where nothing is replaced.
    former: the files that are removed after the switch, every `.idx` first.
    """

    layout: str
    job: str
    mark: str
    former: list[str]


class Publisher:
    """Publishes one conversion's shards. Every step may be interrupted and repeated."""

    def __init__(self, prefix: str, kind: Kind, work: str, storage: StorageConfig, job: str) -> None:
        self._prefix, self._kind, self._work, self._storage, self._job = prefix, kind, work, storage, job
        self._folder = prefix.rpartition("/")[0] if "/" in prefix else "."
        self._stem = prefix.rpartition("/")[2]
        self._target: Target | None = None

    @property
    def _manifest_url(self) -> str:
        return f"{self._prefix}{MANIFEST}"

    def check(self, inputs: Sequence[Input], *, overwrite: bool) -> None:
        """Raise ConvertError for a dataset that is there already, unless it is this one, half published, and for own inputs."""
        former, _ = self._former()
        own = {self._prefix, *(split_name(name)[0] for name in former)}
        for item in inputs:
            if item.format == "megatron" and split_name(item.path.removesuffix(MANIFEST))[0] in own:
                raise ConvertError(f"{self._prefix}: the output would replace its own input {item.path}; choose another name")
        if overwrite or self._is_ours():
            return
        for name in (f"{self._prefix}.idx", self._manifest_url, f"{self._prefix}{SUFFIXES[self._kind]}"):
            if exists(name, self._storage):
                raise ConvertError(f"{name}: exists already; choose another output, or pass --overwrite to replace it")

    def _is_ours(self) -> bool:
        """Whether what is there under the output's name was written by this very conversion, which is to go on."""
        publishing = load_json(join_url(self._work, "publishing.json"), self._storage) is not None
        target = self._noted()
        if target is None:
            return publishing  # of a version that noted no more
        if target.job == self._job:
            return publishing or not target.former
        # Of another conversion that was never done. Where there is a manifest, it was.
        return not target.former and not exists(self._manifest_url, self._storage)

    def aim(self, layout: Layout) -> Layout:
        """The layout with the names its tokens are written to: where nothing can be renamed, those that are published."""
        if not is_remote(self._prefix):
            if self._noted() is None and not self._former()[0]:
                self._check_names(layout)
            return layout
        mark = self._decide(layout).mark
        targets = [join_url(self._folder, name) for name in self._names(layout, mark)]
        return replace(layout, targets=targets, digest=layout.digest + mark)

    def _decide(self, layout: Layout) -> Target:
        """What was noted for this layout, or a new note. Raises ConvertError for shards of another dataset in the way."""
        noted = self._noted()
        if noted is None or (noted.layout, noted.job) != (layout.digest, self._job):
            former, version = self._former()
            if noted is None and not former:
                self._check_names(layout)
            what = f"{layout.digest} {version}".encode()
            mark = f"gen{hashlib.blake2b(what, digest_size=6).hexdigest()}" if former else ""
            if noted is not None:  # an interrupted one has left some of what it was to remove
                former += [name for name in noted.former if name not in former]
            noted = Target(layout=layout.digest, job=self._job, mark=mark, former=former)
            save_json(join_url(self._work, "target.json"), asdict(noted), self._storage)
        self._target = noted
        return noted

    def _noted(self) -> Target | None:
        found = load_json(join_url(self._work, "target.json"), self._storage)
        try:
            return Target(**found) if found is not None else None
        except TypeError:
            return None

    def _check_names(self, layout: Layout) -> None:
        """Shards of a set without a manifest are a dataset too."""
        for name in {layout.names[0], layout.names[-1]}:
            if name != self._stem and exists(url := join_url(self._folder, f"{name}.idx"), self._storage):
                raise ConvertError(
                    f"{url}: exists already, of a dataset without {self._stem}{MANIFEST}; choose another output, or remove that "
                    f"dataset first"
                )

    def _former(self) -> tuple[list[str], str]:
        """The files of the dataset that is there under the output's name, every `.idx` first, and its version; [] for none."""
        pair = self._pair()
        try:
            former = read_manifest(self._manifest_url, self._storage)
        except ObjectNotFoundError:
            return pair, _version(pair[0], self._storage) if pair else ""
        except FormatError:
            return pair or [self._manifest_url], _version(self._manifest_url, self._storage)
        suffix = SUFFIXES[former.kind]  # type: ignore[index]
        names = [join_url(self._folder, shard.name) for shard in former.shards]
        files = [*(f"{name}.idx" for name in names), *(name + suffix for name in names)]
        files += [name for name in pair if name not in files]
        return files, _version(self._manifest_url, self._storage)

    def _pair(self) -> list[str]:
        """The `.idx` of the output's very name and the tokens beside it, if they are there."""
        if not exists(f"{self._prefix}.idx", self._storage):
            return []
        tokens = [self._prefix + suffix for suffix in SUFFIXES.values() if exists(self._prefix + suffix, self._storage)]
        return [f"{self._prefix}.idx", *tokens[:1]]

    def _names(self, layout: Layout, mark: str) -> list[str]:
        return [marked(name, self._stem, mark) for name in layout.names]

    def publish(self, layout: Layout, manifest: Manifest) -> Manifest:
        """Put everything under its final name. Returns the manifest that is there in the end."""
        target = self._target or self._decide(layout)
        save_json(join_url(self._work, "publishing.json"), {"digest": layout.digest}, self._storage)
        names = self._names(layout, target.mark)
        local = not is_remote(self._prefix)
        if local and target.mark and self._says(manifest):  # the second switch was done
            self._remove_links(names)
            return manifest
        shards = [replace(shard, name=name) for shard, name in zip(manifest.shards, names, strict=True)]
        beside = replace(manifest, shards=shards)
        self._bring(layout, names)
        save_bytes(self._manifest_url, beside.to_json(), self._storage)
        for name in target.former:
            if name != self._manifest_url:
                delete(name, self._storage)
        if not local or not target.mark or not self._link(names, layout.names):
            return beside
        save_bytes(self._manifest_url, manifest.to_json(), self._storage)
        self._remove_links(names)
        return manifest

    def _bring(self, layout: Layout, names: Sequence[str]) -> None:
        """Put tokens under the names chosen, then every `.idx`."""
        suffix = SUFFIXES[self._kind]
        if not is_remote(self._prefix):  # else they were written there
            for old, new in zip(layout.names, names, strict=True):
                move(join_url(self._work, f"out/{old}{suffix}"), join_url(self._folder, new + suffix), self._storage)
        for old, new in zip(layout.names, names, strict=True):
            move(join_url(self._work, f"out/{old}.idx"), join_url(self._folder, f"{new}.idx"), self._storage)

    def _says(self, manifest: Manifest) -> bool:
        try:
            return read_manifest(self._manifest_url, self._storage) == manifest
        except (ObjectNotFoundError, FormatError):
            return False

    def _link(self, marked_names: Sequence[str], names: Sequence[str]) -> bool:
        """Give local shards their plain names too; False on a file system without hard links, where they keep the marked ones."""
        return all(
            _link(self._path(old + suffix), self._path(new + suffix))
            for suffix in (SUFFIXES[self._kind], ".idx")
            for old, new in zip(marked_names, names, strict=True)
        )

    def _remove_links(self, marked_names: Sequence[str]) -> None:
        for suffix in (".idx", SUFFIXES[self._kind]):
            for name in marked_names:
                delete(join_url(self._folder, name + suffix), self._storage)

    def _path(self, name: str) -> str:
        return open_store(join_url(self._folder, name), self._storage)[1]


def _link(source: str, target: str) -> bool:
    """Give a file a second name, in place of whatever had it; False where the file system has no hard links."""
    try:
        if os.path.exists(target):
            if os.path.samefile(source, target):
                return True
            os.unlink(target)
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            return False
        raise local_error(target, error) from None
    return True


def _version(url: str, storage: StorageConfig) -> str:
    store, key = open_store(url, storage)
    try:
        return store.info(key).etag
    except ObjectNotFoundError:
        return ""


def exists(url: str, storage: StorageConfig) -> bool:
    """Whether there is such an object. Raises StorageError."""
    store, key = open_store(url, storage)
    try:
        store.info(key)
    except ObjectNotFoundError:
        return False
    return True


def delete(url: str, storage: StorageConfig) -> None:
    """Remove an object; one that is not there is no error."""
    store, key = open_store(url, storage)
    store.delete(key)


def move(source: str, target: str, storage: StorageConfig) -> None:
    """Rename within a local file system, else copy; nothing to do if it was done before an interruption.

    Raises StorageError.
    """
    if not is_remote(source) and not is_remote(target):
        _move_file(open_store(source, storage)[1], open_store(target, storage)[1], storage)
        return
    store, key = open_store(source, storage)
    try:
        info = store.info(key)
    except ObjectNotFoundError:
        return
    chunks = (
        store.read_ranges(key, [at], [min(at + COPY_BYTES, info.size)], info.etag)[0] for at in range(0, info.size, COPY_BYTES)
    )
    _write(target, chunks, sized_for(storage, info.size))


def _move_file(source: str, target: str, storage: StorageConfig) -> None:
    if not os.path.exists(source):
        return
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(source, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise local_error(target, error) from None
    with open(source, "rb", buffering=0) as file:  # another file system: a copy, which appears whole
        _write(target, iter(partial(file.read, COPY_BYTES), b""), storage)
    os.unlink(source)


def _write(target: str, chunks: Iterable[bytes | memoryview], storage: StorageConfig) -> None:
    store, key = open_store(target, storage)
    with written_whole(store, key) as writer:
        for chunk in chunks:
            writer.write(chunk)
