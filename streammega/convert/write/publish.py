"""From the work folder to a dataset under its final names: a kill at any moment leaves the former
one or the new one whole.

A dataset is what its manifest says. Where none is, tokens come first, then every `.idx`, the
manifest last. Where one is replaced, the new shards are written beside it under names with a mark
(`web-gen3f2a1b9c04d1`), the manifest switches from one to the other at once, and only then the
former shards are removed. On a local disk the new ones get their plain names back, by links and a
second switch.

What is noted of this in the work folder outlives a kill; what others do to the output meanwhile is
looked for, and never replaced unasked. Names in a bucket are claimed before they are written to.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from streammega.config import StorageConfig
from streammega.convert.read.inputs import Input
from streammega.convert.write.assemble import Layout
from streammega.convert.write.claims import Claim
from streammega.convert.write.units import load_json, save_json
from streammega.dataset.manifest import MANIFEST, Manifest, Shard, read_manifest
from streammega.dataset.shards import SUFFIXES, Kind, marked, split_name
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.moves import delete, exists, link, move, read_whole, version
from streammega.storage.open import is_remote
from streammega.storage.store import create_object

FEW = 8
"""Shards are asked for one by one up to so many; of more, a listing of their folder
tells at once.
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Under which names a conversion publishes; noted in the work folder before the first of them
    is written.

    layout, job: digests of what is written, and of what was asked for. mark: of the shards' names,
    "" where nothing is replaced. former: the files that are removed after the switch, every `.idx`
    first. version: of the dataset that they are. manifests: digests of the manifests that are
    written, in their order, once it is being published; empty before.
    """

    layout: str
    job: str
    mark: str
    former: list[str]
    version: str = ""
    manifests: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Former:
    """What is there under the output's name: its files, every `.idx` first, and its version;
    nothing: [] and "".
    """

    files: list[str] = field(default_factory=list)
    version: str = ""


class Publisher:
    """Publishes one conversion's shards. Every step may be interrupted and repeated."""

    def __init__(
        self, prefix: str, kind: Kind, work: str, storage: StorageConfig, job: str
    ) -> None:
        self._prefix = prefix
        self._kind = kind
        self._work = work
        self._storage = storage
        self._job = job
        self._folder = prefix.rpartition("/")[0] if "/" in prefix else "."
        self._stem = prefix.rpartition("/")[2]
        self._target: Target | None = None
        self._seen = ""
        self._claim = Claim(prefix, work, storage, job)
        self._claimed = False
        self._beside = False

    @property
    def _manifest_url(self) -> str:
        return f"{self._prefix}{MANIFEST}"

    def check(self, inputs: Sequence[Input], *, overwrite: bool) -> None:
        """Raise ConvertError for a dataset that is there already, unless it is this one, half
        published, and for own inputs.
        """
        self._seen = version(self._manifest_url, self._storage)
        if not overwrite and not self._is_ours():
            for name in (
                f"{self._prefix}.idx",
                self._manifest_url,
                f"{self._prefix}{SUFFIXES[self._kind]}",
            ):
                if exists(name, self._storage):
                    raise ConvertError(
                        f"{redact_urls(name)}: exists already; choose another output, or pass --overwrite to replace it"
                    )
            if self._claims and (refusal := self._claim.refusal()):
                raise ConvertError(refusal)
        self._check_inputs(inputs, self._former().files)

    @property
    def _claims(self) -> bool:
        """Whether names are claimed: not on a disk, where a lock does it, nor beside a dataset,
        where every name has a mark.
        """
        return is_remote(self._prefix) and not self._seen

    def claim(self, *, overwrite: bool) -> None:
        """Claim the names before the first document is read; after `check`.

        Raises ConvertError where another conversion has; with `overwrite`, what is written goes
        beside its tokens.
        """
        if not self._claims:
            return
        self._claimed = self._claim.take()
        self._beside = not self._claimed
        if self._beside and not overwrite:
            raise ConvertError(self._claim.refusal() or self._lost_claim())

    def release(self) -> None:
        """Let others claim the names: nothing of this conversion is left to go on with."""
        if is_remote(self._prefix):
            self._claim.release()

    def _keep_claim(self) -> None:
        """Raise ConvertError if the names are another conversion's by now."""
        if self._claimed and not self._claim.take():
            raise ConvertError(self._lost_claim())

    def _lost_claim(self) -> str:
        return (
            f"{redact_urls(self._prefix)}: another conversion claimed it meanwhile; run the same command again when that "
            f"is done, or choose another output"
        )

    def _check_inputs(self, inputs: Sequence[Input], former: Sequence[str]) -> None:
        own = {_place(split_name(name)[0]) for name in (self._prefix, *former)}
        files = {
            _place(name)
            for name in (self._prefix + SUFFIXES[self._kind], f"{self._prefix}.idx", *former)
        }
        for item in inputs:
            name = split_name(item.path.removesuffix(MANIFEST))[0]
            if _place(item.path) in files or (item.format == "megatron" and _place(name) in own):
                raise ConvertError(
                    f"{redact_urls(self._prefix)}: the output would replace its own input {redact_urls(item.path)}; choose "
                    f"another name"
                )

    def _is_ours(self) -> bool:
        """Whether what is there under the output's name was written by this very conversion, which
        is to go on.
        """
        target = self._noted()
        if target is None:
            publishing = load_json(join_url(self._work, "publishing.json"), self._storage)
            return publishing is not None  # of a version that noted no more
        manifest = self._stored_manifest()
        # another one that was never done: where there is a manifest, it was
        if target.job != self._job:
            return not target.former and manifest is None and self._wrote_index(target)
        if manifest is not None:
            return _digest(manifest) in target.manifests
        return bool(target.manifests) or (not target.former and self._wrote_index(target))

    def _wrote_index(self, target: Target) -> bool:
        """Whether an `.idx` of the output's very name, if one is there, was put there by the
        conversion that noted `target`.
        """
        return bool(target.manifests) or not exists(f"{self._prefix}.idx", self._storage)

    def aim(self, layout: Layout) -> Layout:
        """The layout with the names its tokens are written to: where nothing can be renamed, those
        that are published.
        """
        if not is_remote(self._prefix):
            if self._noted() is None:
                self._check_names(layout, self._former().files)
            return layout
        self._keep_claim()
        mark = self._decide(layout).mark
        targets = [join_url(self._folder, name) for name in self._names(layout, mark)]
        return replace(layout, targets=targets, digest=layout.digest + mark)

    def lost(self, layout: Layout, shards: dict[int, Shard]) -> list[int]:
        """Of shards that were written, those whose tokens are not where they were written, or not
        of that size.

        Somebody may remove, between two runs or beside one, what belongs to no dataset yet.
        """
        suffix = SUFFIXES[self._kind]
        if not is_remote(self._prefix):  # they are in the work folder, or were published
            return []
        sizes = self._sizes([layout.targets[number] + suffix for number in shards])
        return [
            number
            for number, shard in shards.items()
            if sizes.get(layout.targets[number] + suffix) != shard.bytes
        ]

    def _sizes(self, urls: Sequence[str]) -> dict[str, int]:
        """Bytes of those objects that are there."""
        if len(urls) > FEW:
            store, key = open_store(f"{self._folder}/", self._storage)
            try:
                listed = store.list(key, recursive=False)
            except StorageError as error:
                if error.transient:
                    raise
            else:
                return {
                    join_url(self._folder, info.key.rpartition("/")[2]): info.size
                    for info in listed
                }
        found = {}
        for url in urls:
            store, key = open_store(url, self._storage)
            try:
                found[url] = store.info(key).size
            except ObjectNotFoundError:
                continue
        return found

    def _decide(self, layout: Layout) -> Target:
        """What was noted for this layout, or a new note.

        Raises ConvertError for shards of another dataset in the way.
        """
        noted = self._noted()
        plain_of_others = self._beside and noted is not None and not noted.mark
        is_other = (
            noted is None
            or (noted.layout, noted.job) != (layout.digest, self._job)
            or plain_of_others
        )
        if noted is None or is_other or self._is_of_others(noted):
            noted = self._note_anew(layout, noted)
        self._target = noted
        return noted

    def _note_anew(self, layout: Layout, noted: Target | None) -> Target:
        there = self._former()
        if noted is None:
            self._check_names(layout, there.files)
        what = f"{layout.digest} {there.version}".encode()
        mark = (
            f"gen{hashlib.blake2b(what, digest_size=6).hexdigest()}"
            if there.files or self._beside
            else ""
        )
        former = list(there.files)
        if noted is not None:  # an interrupted one has left some of what it was to remove
            former += [name for name in noted.former if name not in former]
        target = Target(
            layout=layout.digest, job=self._job, mark=mark, former=former, version=there.version
        )
        self._note(target)
        return target

    def _is_of_others(self, noted: Target) -> bool:
        """Whether the dataset that is there was published by others after `noted` was."""
        manifest = self._stored_manifest()
        if manifest is not None:
            return (
                _digest(manifest) not in noted.manifests
                and version(self._manifest_url, self._storage) != noted.version
            )
        index = version(f"{self._prefix}.idx", self._storage)
        return bool(index) and not noted.manifests and index != noted.version

    def _note(self, target: Target) -> None:
        save_json(join_url(self._work, "target.json"), asdict(target), self._storage)

    def _noted(self) -> Target | None:
        found = load_json(join_url(self._work, "target.json"), self._storage)
        try:
            return Target(**found) if found is not None else None
        except TypeError:
            return None

    def _check_names(self, layout: Layout, former: Sequence[str]) -> None:
        """Shards of a set without a manifest are a dataset too."""
        for name in {layout.names[0], layout.names[-1]}:
            url = join_url(self._folder, f"{name}.idx")
            if name != self._stem and url not in former and exists(url, self._storage):
                raise ConvertError(
                    f"{redact_urls(url)}: exists already, of a dataset without {self._stem}{MANIFEST}; choose another output, or "
                    f"remove that dataset first"
                )

    def _former(self) -> Former:
        """The dataset that is there under the output's name.

        Raises ConvertError if its manifest does not say what it is.
        """
        pair = self._pair()
        try:
            former = read_manifest(self._manifest_url, self._storage)
        except ObjectNotFoundError:
            return Former(files=pair, version=version(pair[0], self._storage)) if pair else Former()
        except FormatError as error:
            raise ConvertError(
                f"{redact_urls(self._prefix)}: cannot be replaced, since which shards belong to it is not known: {error}; "
                f"remove that dataset by hand, or choose another output"
            ) from None
        suffix = SUFFIXES[former.kind]  # type: ignore[index]
        names = [join_url(self._folder, shard.name) for shard in former.shards]
        files = [*(f"{name}.idx" for name in names), *(name + suffix for name in names)]
        files += [name for name in pair if name not in files]
        return Former(files=files, version=version(self._manifest_url, self._storage))

    def _pair(self) -> list[str]:
        """The `.idx` of the output's very name and the tokens beside it, if they are there."""
        if not exists(f"{self._prefix}.idx", self._storage):
            return []
        tokens = [
            self._prefix + suffix
            for suffix in SUFFIXES.values()
            if exists(self._prefix + suffix, self._storage)
        ]
        return [f"{self._prefix}.idx", *tokens[:1]]

    def _names(self, layout: Layout, mark: str) -> list[str]:
        return [marked(name, self._stem, mark) for name in layout.names]

    def publish(self, layout: Layout, manifest: Manifest) -> Manifest:
        """Put everything under its final name. Returns the manifest that is there in the end."""
        self._keep_claim()
        target = self._target or self._decide(layout)
        names = self._names(layout, target.mark)
        shards = [
            replace(shard, name=name) for shard, name in zip(manifest.shards, names, strict=True)
        ]
        beside = replace(manifest, shards=shards)
        there = self._stored_manifest()
        written = (
            [_digest(beside.to_json())]
            if is_remote(self._prefix)
            else [_digest(m.to_json()) for m in (beside, manifest)]
        )
        if (
            there is not None
            and _digest(there) not in written
            and version(self._manifest_url, self._storage) != self._seen
        ):
            raise ConvertError(self._published_by_others())
        local = not is_remote(self._prefix)
        if local and target.mark and there == manifest.to_json():  # the second switch was done
            self._remove_links(names)
            return manifest
        self._check_tokens(layout, manifest)
        self._note(replace(target, manifests=written))
        self._bring(layout, names)
        self._switch(beside.to_json(), there)
        self._remove_former(target, names)
        if not local or not target.mark or not self._link(names, layout.names):
            return beside
        save_bytes(self._manifest_url, manifest.to_json(), self._storage)
        self._remove_links(names)
        return manifest

    def _switch(self, manifest: bytes, there: bytes | None) -> None:
        """Put the manifest in place of the one that is there; where none is, on the condition that
        this is still so.
        """
        if there is not None or not is_remote(self._prefix):
            save_bytes(self._manifest_url, manifest, self._storage)
            return
        store, key = open_store(self._manifest_url, self._storage)
        if not create_object(store, key, manifest) and self._stored_manifest() != manifest:
            raise ConvertError(self._published_by_others())

    def _published_by_others(self) -> str:
        return (
            f"{redact_urls(self._manifest_url)}: was written meanwhile, by another conversion; run the same command again with "
            f"--overwrite to replace that dataset, or choose another output"
        )

    def _check_tokens(self, layout: Layout, manifest: Manifest) -> None:
        """Raise ConvertError if tokens that were written are not there any more: a manifest would
        speak of nothing.
        """
        lost = self.lost(layout, dict(enumerate(manifest.shards)))
        if lost:
            first = redact_urls(layout.targets[lost[0]] + SUFFIXES[self._kind])
            raise ConvertError(
                f"{first}: is gone, or not as it was written ({len(lost)} of {len(manifest.shards)} such); did another "
                f"conversion or a gc work here? run the same command again, which writes them anew"
            )

    def _remove_former(self, target: Target, names: Sequence[str]) -> None:
        """Remove the shards that were replaced: not those that are the dataset now, whatever was
        noted when.
        """
        own = {
            join_url(self._folder, name + ending)
            for name in names
            for ending in (SUFFIXES[self._kind], ".idx")
        }
        for name in target.former:
            if name != self._manifest_url and name not in own:
                delete(name, self._storage)

    def _bring(self, layout: Layout, names: Sequence[str]) -> None:
        """Put tokens under the names chosen, then every `.idx`."""
        suffix = SUFFIXES[self._kind]
        if not is_remote(self._prefix):  # else they were written there
            for old, new in zip(layout.names, names, strict=True):
                move(
                    join_url(self._work, f"out/{old}{suffix}"),
                    join_url(self._folder, new + suffix),
                    self._storage,
                )
        for old, new in zip(layout.names, names, strict=True):
            move(
                join_url(self._work, f"out/{old}.idx"),
                join_url(self._folder, f"{new}.idx"),
                self._storage,
            )

    def _stored_manifest(self) -> bytes | None:
        """The manifest that is there, as it is stored."""
        return read_whole(self._manifest_url, self._storage)

    def _link(self, marked_names: Sequence[str], names: Sequence[str]) -> bool:
        """Give local shards their plain names too; False on a file system without hard links, where
        they keep the marked ones.
        """
        return all(
            link(self._path(old + suffix), self._path(new + suffix))
            for suffix in (SUFFIXES[self._kind], ".idx")
            for old, new in zip(marked_names, names, strict=True)
        )

    def _remove_links(self, marked_names: Sequence[str]) -> None:
        for suffix in (".idx", SUFFIXES[self._kind]):
            for name in marked_names:
                delete(join_url(self._folder, name + suffix), self._storage)

    def _path(self, name: str) -> str:
        return open_store(join_url(self._folder, name), self._storage)[1]


def _digest(manifest: bytes) -> str:
    return hashlib.blake2b(manifest, digest_size=12).hexdigest()


def _place(name: str) -> str:
    """What two names of one file have in common."""
    return name if is_remote(name) else os.path.realpath(name)
