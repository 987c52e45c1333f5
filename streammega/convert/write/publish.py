"""From the work folder to a dataset under its final names. After a kill at any moment, the previous
dataset or the new one is whole.

A dataset is what its manifest lists. So putting the manifest is the only commit, and the manifest the
only state that conversions share: in a bucket it is put on the condition that it is still the one
that was there at the start, and on a disk under the lock of the output.

Shards never replace others. In a bucket, and wherever a dataset is, they have names that carry the
job's digest (`web-gen3f2a1b9c04d1`), which no other job writes. On a disk where nothing is they have
plain names (`web`). After the commit the files that the former manifest listed are deleted; what
else a killed conversion leaves is listed by no manifest, and removed by `gc`.

The work folder is the conversion's own, and so is the record in it of what it publishes. Together
with the manifest they leave four states, and a kill anywhere leaves one of them:

| record of this job | manifest | state | the same command |
|---|---|---|---|
| any | none, or as at the start | written: no dataset has changed | writes what is missing |
| of plain names | none | moving: plain names are this job's | moves what is left |
| any | the one that the record names | committed | deletes what was replaced |
| any | another one | lost | ends with an error, and removes nothing |

There were nine before, when an object reserved plain names in buckets, and hard links and a second
commit gave plain names back on disks:

| reservation | record | manifest | state |
|---|---|---|---|
| none | none | none | free |
| another's | none | none | refused, or written under other names |
| its own | none | none | written, if it was its own all the time |
| its own, with `.idx` files | none | none | moving |
| none | of marked names | as at the start, by its version | written |
| any | of plain names | its own | committed |
| none | of marked names | its first | committed: plain names are given back |
| none | of marked names | its second | given back: marked names are deleted |
| any | any | another one | lost |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from streammega.convert.options import digest_of_bytes
from streammega.convert.read.source import Input
from streammega.convert.work_dir import PUBLISHING, WorkDir
from streammega.convert.write.destination import Destination
from streammega.convert.write.shards import ShardLayout, ShardRecord
from streammega.dataset.columns import StoredColumn, column_name
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import MANIFEST, split_name
from streammega.dataset.opening import place_of
from streammega.dataset.provenance import ENDING
from streammega.errors import ConvertError
from streammega.storage import open_store, save_bytes
from streammega.storage.object_ops import delete, exists, find_etag, move_or_copy, sync_names
from streammega.storage.open import resolved
from streammega.storage.progress import ProgressObserver
from streammega.storage.store import create_object, replace_object
from streammega.storage.thread_pool import parallel_map

MAX_LOOKUPS = 64
"""Objects whose ETags are asked for at once."""


@dataclass(frozen=True, kw_only=True)
class PublishRecord:
    """What a conversion publishes, saved before anything appears under a plain name.

    job: its digest. mark: of the names of its shards, "" for plain ones. replaced: the files of the
    dataset that it replaces. manifest: the digest of the manifest that it puts, once all else is put.
    """

    job: str
    mark: str = ""
    replaced: list[str] = field(default_factory=list)
    manifest: str = ""


class Publisher:
    """Publishes one conversion. Every step may be interrupted and repeated.

    job: a digest of the inputs and the options. has_origins: whether shards have an `.origins`.
    columns: the names of those that shards have.
    """

    def __init__(
        self,
        destination: Destination,
        work_dir: WorkDir,
        job: str,
        *,
        has_origins: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        self._destination = destination
        self._storage = destination.storage
        self._work_dir = work_dir
        # Origins come before the .idx, which makes a shard readable.
        self._last_endings = (ENDING, ".idx") if has_origins else (".idx",)
        self._has_origins = has_origins
        self._column_endings = [column_name("", name) for name in columns]
        self._record = PublishRecord(job=job)
        self._version = ""
        """ETag of the manifest that was there at the start. The commit depends on it."""
        self._is_resumed = False
        """Whether an earlier run of this conversion was moving, or had committed."""

    def check(self, inputs: Sequence[Input], *, overwrite: bool) -> None:
        """Look at what is there. Raises ConvertError if it would have to be replaced and may not."""
        stored_record = self._work_dir.read_record(PUBLISHING)
        # Before the manifest is read: after a change in between, the version does not match.
        version = self._destination.manifest_version()
        if stored_record is not None and stored_record.get("job") == self._record.job:
            record = PublishRecord(**stored_record)
            if version:
                digest = digest_of_bytes(self._destination.manifest() or b"")
                self._is_resumed = digest == record.manifest
            else:
                self._is_resumed = not record.mark
            if self._is_resumed:
                self._record = record
                self._version = version
        if not self._is_resumed:
            self._note_existing(overwrite=overwrite)
        self._check_inputs(inputs)

    def choose_names(self, layout: ShardLayout) -> ShardLayout:
        """The layout with the URLs that its tokens are written to: in a bucket the final ones, else
        in the work folder.

        Raises ConvertError if shards of another dataset are in the way.
        """
        self._check_unchanged()
        if not self._is_resumed:
            self._check_set_without_manifest(layout)
        if not self._destination.is_remote:
            return replace(layout, targets=list(map(self._work_dir.file, layout.work_names())))
        mark = self._record.mark
        names = self._destination.shard_names(layout.names, mark)
        targets = [self._destination.url(name) for name in names]
        # The mark is part of the digest: shards under other names would have to be written again.
        return replace(layout, targets=targets, digest=layout.digest + mark)

    def missing_shards(
        self, layout: ShardLayout, shards: Mapping[int, ShardRecord], *, are_put: bool = False
    ) -> list[int]:
        """Written shards with a file that is gone or has another size: neither in the work folder,
        nor where an earlier run has put it.

        are_put: all must be under their final names.
        """
        if not shards:
            return []
        suffix = self._destination.suffix
        names = self._destination.shard_names(layout.names, self._record.mark)
        files = [
            (number, ending, size, self._destination.url(names[number] + ending))
            for number, shard in shards.items()
            for ending, size in shard.sizes(suffix).items()
        ]
        in_work_dir: dict[str, int] = {}
        if not are_put:
            in_work_dir = self._work_dir.sizes(f"out-{layout.digest}/")
        put: dict[str, int] = {}
        # Others may have files of plain names where nothing says that this job put them.
        if are_put or self._record.mark or self._is_resumed:
            put = self._destination.sizes([url for *_, url in files])
        work_names = layout.work_names()
        missing = {
            number
            for number, ending, size, url in files
            if put.get(url) != size and in_work_dir.get(work_names[number] + ending) != size
        }
        return sorted(missing)

    def publish(
        self,
        layout: ShardLayout,
        shards: Sequence[ShardRecord],
        manifest: Manifest,
        progress: ProgressObserver,
        tokenizer: bytes = b"",
    ) -> Manifest:
        """Put everything under its final name. Returns the manifest with these names.

        tokenizer: the copy of it that the dataset gets; empty: none.

        Nothing is put or removed while a file of a shard is missing. progress: receives the files
        that are put.
        """
        records = dict(enumerate(shards))
        names = self._destination.shard_names(layout.names, self._record.mark)
        named = zip(manifest.shards, names, strict=True)
        shards_named = [shard._replace(name=name) for shard, name in named]
        columns = tuple(_with_names(column, names) for column in manifest.columns)
        manifest = replace(manifest, shards=shards_named, columns=columns)
        self._check_unchanged()
        self._check_files(layout, records)
        self._work_dir.write_record(PUBLISHING, asdict(self._record))
        self._put_files(layout, names, progress)
        self._check_files(layout, records, are_put=True)
        tokenizer_url = self._destination.tokenizer_url(manifest.tokenizer_label[1])
        if tokenizer:
            save_bytes(tokenizer_url, tokenizer, self._storage)
        manifest = self._with_versions(manifest)
        self._record = replace(self._record, manifest=digest_of_bytes(manifest.to_json()))
        self._work_dir.write_record(PUBLISHING, asdict(self._record))
        self._commit(manifest.to_json())
        progress.advance(1)
        replaced = [url for url in self._record.replaced if url != tokenizer_url]
        if replaced:
            progress.begin("removing what was replaced", len(replaced), " files")
        for url in replaced:
            delete(url, self._storage)
            progress.advance(1)
        if replaced:
            # Before the work folder goes: after a power failure nothing would say whose they are.
            sync_names(self._destination.manifest_url)
        return manifest

    # --- checks ---

    def _note_existing(self, *, overwrite: bool) -> None:
        """Note what is there, and choose the names of shards.

        Raises ConvertError if something is there, unless `overwrite`.
        """
        if not overwrite:
            self._check_nothing_exists()
        files, self._version = self._destination.find_existing()
        if (files or self._version) and not overwrite:
            self._check_nothing_exists()  # it appeared in between
        mark = ""
        if self._destination.is_remote or files or self._version:
            # The same after a kill, another one when another job or another dataset is concerned.
            mark = f"gen{digest_of_bytes(f'{self._record.job} {self._version}'.encode(), 6)}"
        self._record = replace(self._record, mark=mark, replaced=files)

    def _check_nothing_exists(self) -> None:
        destination = self._destination
        for url in (destination.index_url, destination.manifest_url, destination.tokens_url):
            if exists(url, self._storage):
                raise ConvertError(
                    f"{url}: exists already; choose another output, or pass "
                    f"--overwrite to replace it"
                )

    def _check_inputs(self, inputs: Sequence[Input]) -> None:
        """Raise ConvertError for an input that the output would replace."""
        destination = self._destination
        replaced = self._record.replaced
        prefixes = {resolved(split_name(url)[0]) for url in (destination.prefix, *replaced)}
        files = {
            resolved(url) for url in (destination.tokens_url, destination.index_url, *replaced)
        }
        for item in inputs:
            is_replaced = resolved(item.path) in files
            if item.format == "megatron":
                prefix = split_name(item.path.removesuffix(MANIFEST))[0]
                is_replaced = is_replaced or resolved(prefix) in prefixes
            if is_replaced:
                raise ConvertError(
                    f"{destination.prefix}: the output would replace its own input "
                    f"{item.path}; choose another name"
                )

    def _check_set_without_manifest(self, layout: ShardLayout) -> None:
        """Raise ConvertError for a set of shards without a manifest, which is a dataset too.

        Its first and its last name are looked for: a set is complete, or no dataset.
        """
        destination = self._destination
        for name in {layout.names[0], layout.names[-1]}:
            url = destination.url(f"{name}.idx")
            is_other = name != destination.stem and url not in self._record.replaced
            if is_other and exists(url, self._storage):
                raise ConvertError(
                    f"{url}: exists already, of a dataset without "
                    f"{destination.stem}{MANIFEST}; choose another output, or remove that dataset "
                    f"first"
                )

    def _check_unchanged(self) -> None:
        """Raise ConvertError if another conversion has published since this one looked."""
        if self._destination.manifest_version() != self._version:
            raise ConvertError(self._published_by_others())

    def _check_files(
        self, layout: ShardLayout, shards: Mapping[int, ShardRecord], *, are_put: bool = False
    ) -> None:
        """Raise ConvertError for `missing_shards`: the manifest would list nothing."""
        missing = self.missing_shards(layout, shards, are_put=are_put)
        if missing:
            raise ConvertError(
                f"{self._destination.url(layout.names[missing[0]])}: a file of this shard is missing "
                f"or has the wrong size ({len(missing)} of {len(shards)} shards). 'gc' may have "
                f"removed it; run the same command again, which writes it again"
            )

    def _published_by_others(self) -> str:
        return (
            f"{self._destination.manifest_url}: another conversion wrote it "
            f"meanwhile; run the same command again with --overwrite to replace that dataset, or "
            f"choose another output"
        )

    # --- steps ---

    def _put_files(
        self, layout: ShardLayout, names: Sequence[str], progress: ProgressObserver
    ) -> None:
        """Give the files of shards their final names, those that an earlier run has not moved."""
        # Tokens without an .idx are no dataset, so each .idx comes last.
        moved = self._last_endings
        if not self._destination.is_remote:  # else they were written there
            moved = (self._destination.suffix, *self._column_endings, *moved)
        progress.begin("publishing", len(names) * len(moved) + 1, " files")  # and the manifest
        if not self._has_origins and not self._record.mark:
            # Those of a dataset that was removed by hand would describe these documents.
            for name in names:
                delete(self._destination.url(name + ENDING), self._storage)
        for ending in moved:
            for old, new in zip(layout.work_names(), names, strict=True):
                source = self._work_dir.file(old + ending)
                move_or_copy(source, self._destination.url(new + ending), self._storage)
                progress.advance(1)

    def _with_versions(self, manifest: Manifest) -> Manifest:
        """The manifest with the ETags of its shards in a bucket, so that readers need not ask for them."""
        destination = self._destination
        if not destination.is_remote:
            return manifest
        endings = (destination.suffix, ".idx", *self._column_endings)
        urls = [destination.url(shard.name + end) for shard in manifest.shards for end in endings]
        etags = parallel_map(lambda url: find_etag(url, self._storage), urls, MAX_LOOKUPS)
        etag_of = dict(zip(urls, etags, strict=True))

        def etag(name: str) -> str:
            """That of a file in the output's folder."""
            return etag_of[destination.url(name)]

        shards = [
            shard._replace(
                etag=etag(shard.name + destination.suffix), index_etag=etag(f"{shard.name}.idx")
            )
            for shard in manifest.shards
        ]
        columns = tuple(
            column._replace(
                files=[file and file._replace(etag=etag(file.name)) for file in column.files]
            )
            for column in manifest.columns
        )
        seen_at = place_of(urls[0], self._storage)
        seen_at = seen_at if all(etags) else ""
        return replace(manifest, shards=shards, columns=columns, seen_at=seen_at)

    def _commit(self, manifest: bytes) -> None:
        """Put the manifest, in a bucket on the condition that it has not changed since the start."""
        url = self._destination.manifest_url
        if not self._destination.is_remote:
            sync_names(url)
            save_bytes(url, manifest, self._storage)
            return
        store, key = open_store(url, self._storage)
        version = self._version
        is_put = (
            replace_object(store, key, manifest, version)
            if version
            else create_object(store, key, manifest)
        )
        # It may be this one that is there: the answer to a first try was lost.
        if not is_put and self._destination.manifest() != manifest:
            raise ConvertError(self._published_by_others())


def _with_names(column: StoredColumn, shards: Sequence[str]) -> StoredColumn:
    """A column with the names that its objects get. shards: those of its shards."""
    files = [
        file and file._replace(name=column_name(shard, column.name))
        for file, shard in zip(column.files, shards, strict=True)
    ]
    return column._replace(files=files)
