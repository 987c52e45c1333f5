"""From the work folder to a dataset under its final names: a kill at any moment leaves the former
one or the new one whole.

A dataset is what its manifest says. Where none is, tokens come first, then every `.idx`, the
manifest last. Where one is replaced, the new shards are written beside it under names with a mark
(`web-gen3f2a1b9c04d1`, see `names`), the manifest switches from one to the other at once, and only
then the former shards are removed. On a local disk the new ones get their plain names back, by
links and a second switch.

What is noted of this in the work folder outlives a kill; what others do to the output meanwhile is
looked for, and never replaced unasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streammega.convert.digests import digest_of_bytes
from streammega.convert.write.layout import ShardLayout
from streammega.convert.write.names import OutputNames, Target
from streammega.convert.write.output import Output
from streammega.dataset.manifest import Manifest, Shard
from streammega.dataset.provenance import ENDING
from streammega.errors import AccessDeniedError, ConvertError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.object_ops import delete, link, move
from streammega.storage.store import create_object


class Publisher:
    """Puts one conversion's shards under their names. Every step may be interrupted and repeated."""

    def __init__(
        self, output: Output, names: OutputNames, work: str, *, origins: bool = False
    ) -> None:
        self._output = output
        self._storage = output.storage
        self._suffix = output.suffix
        self._is_remote = output.is_remote
        self._names = names
        self._work = work
        # Before every .idx, which makes a shard one: whoever sees that sees where its documents
        # came from.
        self._beside = (ENDING,) if origins else ()

    def lost(self, layout: ShardLayout, shards: dict[int, Shard]) -> list[int]:
        """Of shards that were written, those whose tokens are not where they were written, or not
        of that size.

        Somebody may remove, between two runs or beside one, what belongs to no dataset yet.
        """
        if not self._is_remote:  # they are in the work folder, or were published
            return []
        urls = {number: layout.targets[number] + self._suffix for number in shards}
        sizes = self._output.sizes(list(urls.values()))
        lost = []
        for number, shard in shards.items():
            if sizes.get(urls[number]) != shard.bytes:
                lost.append(number)
        return lost

    def publish(self, layout: ShardLayout, manifest: Manifest) -> Manifest:
        """Put everything under its final name. Returns the manifest that is there in the end."""
        self._names.keep_claim()
        target = self._names.target(layout)
        names = self._output.shard_names(layout.names, target.mark)
        first = _renamed(manifest, names).to_json()
        last = manifest.to_json()
        is_local = not self._is_remote
        stored = self._output.manifest()
        digests = (
            [digest_of_bytes(first), digest_of_bytes(last)]
            if is_local
            else [digest_of_bytes(first)]
        )
        self._check_others(stored, digests)
        # Files of a disk can be linked, so there a second switch gives shards their plain names.
        switches_twice = is_local and bool(target.mark)
        if switches_twice and stored == last:
            # An interrupted run did the second switch; only this was left.
            self._remove_links(names)
            return manifest
        self._check_tokens(layout, manifest)
        self._names.note(replace(target, manifests=digests))
        self._bring(layout, names)
        self._switch(first, stored)
        self._remove_former(target, names)
        if not switches_twice or not self._link(names, layout.names):
            return _renamed(manifest, names)
        save_bytes(self._output.manifest_url, last, self._storage)
        self._remove_links(names)
        return manifest

    def _check_others(self, stored: bytes | None, digests: Sequence[str]) -> None:
        """Raise ConvertError if the manifest that is there came from others since this conversion
        began.
        """
        if stored is None or digest_of_bytes(stored) in digests:
            return
        if self._output.manifest_version() != self._names.manifest_seen:
            raise ConvertError(self._published_by_others())

    def _check_tokens(self, layout: ShardLayout, manifest: Manifest) -> None:
        """Raise ConvertError if tokens that were written are not there any more: a manifest would
        speak of nothing.
        """
        lost = self.lost(layout, dict(enumerate(manifest.shards)))
        if lost:
            first = redact_urls(layout.targets[lost[0]] + self._suffix)
            raise ConvertError(
                f"{first}: is gone, or not as it was written ({len(lost)} of "
                f"{len(manifest.shards)} such); did another conversion or a gc work here? run the "
                f"same command again, which writes them anew"
            )

    def _bring(self, layout: ShardLayout, names: Sequence[str]) -> None:
        """Put tokens under the names chosen, then every `.idx`: tokens without one are no
        dataset.
        """
        if not self._is_remote:  # else they were written there
            self._move(layout, names, self._suffix)
        if not self._beside:
            self._forget_origins(names)
        for ending in (*self._beside, ".idx"):
            self._move(layout, names, ending)

    def _forget_origins(self, names: Sequence[str]) -> None:
        """Remove origins of a dataset whose other files were removed by hand: they would tell of
        these documents.
        """
        urls = {self._output.url(name + ENDING) for name in names}
        try:
            found = self._output.sizes(list(urls))
        except AccessDeniedError:
            return  # whoever may not list is refused what is not there
        for url in urls.intersection(found):
            delete(url, self._storage)

    def _move(self, layout: ShardLayout, names: Sequence[str], ending: str) -> None:
        for old, new in zip(layout.names, names, strict=True):
            source = join_url(self._work, f"out/{old}{ending}")
            move(source, self._output.url(new + ending), self._storage)

    def _switch(self, manifest: bytes, stored: bytes | None) -> None:
        """Put the manifest in place of the one that is there; where none is, on the condition that
        this is still so.
        """
        url = self._output.manifest_url
        if stored is not None or not self._is_remote:
            save_bytes(url, manifest, self._storage)
            return
        store, key = open_store(url, self._storage)
        # What is there instead may be this one: the answer to a first try was lost.
        if not create_object(store, key, manifest) and self._output.manifest() != manifest:
            raise ConvertError(self._published_by_others())

    def _remove_former(self, target: Target, names: Sequence[str]) -> None:
        """Remove the shards that were replaced: not those that are the dataset now, whatever was
        noted when.
        """
        kept = {self._output.manifest_url}
        for name in names:
            kept.add(self._output.url(name + self._suffix))
            for ending in (*self._beside, ".idx"):
                kept.add(self._output.url(name + ending))
        for url in target.former:
            if url not in kept:
                delete(url, self._storage)

    def _link(self, marked_names: Sequence[str], names: Sequence[str]) -> bool:
        """Give local shards their plain names too; False on a file system without hard links, where
        they keep the marked ones.
        """
        for ending in (self._suffix, *self._beside, ".idx"):
            for marked_name, name in zip(marked_names, names, strict=True):
                if not link(self._path(marked_name + ending), self._path(name + ending)):
                    return False
        return True

    def _remove_links(self, marked_names: Sequence[str]) -> None:
        """Take the marked names away: every `.idx` first, since without one tokens are no
        dataset.
        """
        for ending in (".idx", self._suffix, *self._beside):
            for name in marked_names:
                delete(self._output.url(name + ending), self._storage)

    def _path(self, name: str) -> str:
        """Of a local file."""
        _, path = open_store(self._output.url(name), self._storage)
        return path

    def _published_by_others(self) -> str:
        return (
            f"{redact_urls(self._output.manifest_url)}: was written meanwhile, by another "
            f"conversion; run the same command again with --overwrite to replace that dataset, or "
            f"choose another output"
        )


def _renamed(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """A manifest whose shards have other names."""
    shards = []
    for shard, name in zip(manifest.shards, names, strict=True):
        shards.append(replace(shard, name=name))
    return replace(manifest, shards=shards)
