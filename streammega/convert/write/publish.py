"""From the work folder to a dataset under its final names. After a kill at any moment, the previous
dataset or the new one is whole.

A dataset is what its manifest lists, so putting the manifest is the only commit. In a bucket it is
put on the condition that the manifest is still the one that was there at the start.

Shards have plain names (`web.bin`) where no dataset exists: on a disk a lock protects them, in a
bucket a reservation. What replaces a dataset is written under names that carry the job's digest
(`web-gen3f2a1b9c04d1`), which no other job writes; the commit switches to them, and then the
replaced files are deleted. On a local disk hard links and a second switch restore the plain names.

A record in the work folder says what is being published. By it a restart knows its own manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from streammega.convert.options import digest_of_bytes
from streammega.convert.read.source import Input
from streammega.convert.work_dir import PUBLISHING, WorkDir
from streammega.convert.write.destination import Destination, Reservation
from streammega.convert.write.shards import ShardLayout, ShardRecord
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import MANIFEST, split_name
from streammega.dataset.provenance import ENDING
from streammega.errors import AccessDeniedError, ConvertError
from streammega.storage import open_store, save_bytes
from streammega.storage.object_ops import delete, exists, link, move_or_copy, sync_names
from streammega.storage.open import local_path, resolved
from streammega.storage.progress import ProgressObserver
from streammega.storage.store import create_object, replace_object


@dataclass(frozen=True, kw_only=True)
class PublishRecord:
    """What a conversion publishes, saved before anything appears under a final name.

    job: its digest. mark: of the names of its shards, "" for plain ones. replaced: the files of the
    dataset that it replaces. replaced_version: of that dataset's manifest, which may have the same
    bytes as a new one. manifests: digests of the manifests that it puts, in their order.
    """

    job: str
    mark: str = ""
    replaced: list[str] = field(default_factory=list)
    replaced_version: str = ""
    manifests: list[str] = field(default_factory=list)


class Publisher:
    """Publishes one conversion. Every step may be interrupted and repeated.

    job: a digest of the inputs and the options. has_origins: whether shards have an `.origins`.
    """

    def __init__(
        self, destination: Destination, work_dir: WorkDir, job: str, *, has_origins: bool = False
    ) -> None:
        self._destination = destination
        self._storage = destination.storage
        self._is_remote = destination.is_remote
        self._work_dir = work_dir
        # Origins come before the .idx, which makes a shard readable.
        self._last_endings = (ENDING, ".idx") if has_origins else (".idx",)
        self._has_origins = has_origins
        self._reservation = Reservation(destination, job)
        self._record = PublishRecord(job=job)
        self._version = ""
        """ETag of the manifest that was there at the start. The commit depends on it."""
        self._is_resumed = False
        """Whether an earlier run of this conversion was interrupted while it published."""
        self._is_restored = False
        """Whether it had given the shards of a local dataset their plain names again."""
        self._has_tokens = False
        """Whether tokens under plain names can only be this job's: its reservation never ended."""

    def check(self, inputs: Sequence[Input], *, overwrite: bool) -> None:
        """Look at what is there. Raises ConvertError if it would have to be replaced and may not."""
        stored_record = self._work_dir.read_record(PUBLISHING)
        record = None
        if stored_record is not None and stored_record.get("job") == self._record.job:
            record = PublishRecord(**stored_record)
        # Before the manifest is read: after a change in between, the version does not match.
        version = self._destination.manifest_version()
        if not version:
            if record is not None and record.mark:
                record = None  # what it replaces has no manifest, or is gone
            # Plain names were free when it began, here or on another machine.
            was_publishing = self._is_remote and self._reservation.is_publishing()
            self._is_resumed = was_publishing or record is not None
        elif record is not None and version != record.replaced_version:
            digest = digest_of_bytes(self._destination.manifest() or b"")
            self._is_resumed = digest in record.manifests
            self._is_restored = record.manifests[1:] == [digest]
        if not self._is_resumed:
            self._note_existing(overwrite=overwrite)
        elif record is not None:
            self._record = record
            self._version = version
        is_committed = self._is_resumed and bool(version)
        self._has_tokens = is_committed or (self._is_remote and self._reservation.is_ours())
        self._check_inputs(inputs)

    def reserve(self, *, overwrite: bool) -> None:
        """Reserve plain names in a bucket, after `check` and before the first document is read.

        Raises ConvertError if another job has them; with `overwrite`, other names are used.
        """
        if not self._needs_reservation:
            return
        if self._reservation.take():
            if not self._is_resumed:  # another conversion may have ended since `check`
                self._note_existing(overwrite=overwrite)
        elif overwrite:
            self._record = replace(self._record, mark=self._make_mark(self._version))
        else:
            raise ConvertError(self._reservation.conflict() or self._lost_reservation())

    def release(self, *, unless_written: bool = False) -> None:
        """Free the reserved names. unless_written: not if tokens are there, by which this job can
        be resumed.
        """
        if self._is_remote and not (unless_written and self._has_tokens):
            self._reservation.release()

    def choose_names(self, layout: ShardLayout) -> ShardLayout:
        """The layout with the URLs that its tokens are written to: in a bucket the final ones, else
        in the work folder.

        Raises ConvertError if shards of another dataset are in the way.
        """
        self._check_unchanged()
        if self._needs_reservation and not self._reservation.take():
            raise ConvertError(self._lost_reservation())
        if not self._is_resumed:
            self._check_set_without_manifest(layout)
        if not self._is_remote:
            return replace(layout, targets=list(map(self._work_dir.file, layout.work_names())))
        mark = self._record.mark
        names = self._destination.shard_names(layout.names, mark)
        targets = [self._destination.url(name) for name in names]
        # The mark is part of the digest: shards under other names would have to be written again.
        return replace(layout, targets=targets, digest=layout.digest + mark)

    def missing_shards(self, layout: ShardLayout, shards: Mapping[int, ShardRecord]) -> list[int]:
        """Written shards with a file that is gone, has another size or may be another job's: a `gc`
        may have removed it or the reservation. Other shards are written from now on.
        """
        may_be_others = self._needs_reservation and not self._has_tokens
        self._has_tokens = True
        return list(shards) if may_be_others else self._missing(layout, shards)

    def publish(
        self,
        layout: ShardLayout,
        shards: Sequence[ShardRecord],
        manifest: Manifest,
        progress: ProgressObserver,
    ) -> Manifest:
        """Put everything under its final name. Returns the manifest that is there in the end.

        Nothing is put or removed while a file of a shard is missing. progress: receives the files
        that are put.
        """
        records = dict(enumerate(shards))
        mark = self._record.mark
        names = self._destination.shard_names(layout.names, mark)
        named = zip(manifest.shards, names, strict=True)
        committed = replace(manifest, shards=[replace(shard, name=name) for shard, name in named])
        restores_names = bool(mark) and not self._is_remote
        manifests = [committed.to_json(), manifest.to_json()][: 2 if restores_names else 1]
        self._check_unchanged()
        self._check_files(layout, records)
        if self._is_restored:
            # An earlier run ended the second switch. Only what was lost since then is put.
            self._put_files(layout, layout.names, progress)
            return self._restore_names(layout, records, manifest)
        if self._needs_reservation and not self._reservation.begin_publishing():
            # Tokens under plain names may be another job's by now.
            raise ConvertError(self._lost_reservation())
        digests = [digest_of_bytes(data) for data in manifests]
        self._record = replace(self._record, manifests=digests)
        self._work_dir.write_record(PUBLISHING, asdict(self._record))
        self._put_files(layout, names, progress)
        self._check_files(layout, records, names)
        self._commit(manifests[0])
        progress.advance(1)
        endings = (self._destination.suffix, *self._last_endings)
        kept = {self._destination.url(name + ending) for name in names for ending in endings}
        replaced = [url for url in self._record.replaced if url not in kept]
        if replaced:
            progress.begin("removing what was replaced", len(replaced), " files")
        for url in replaced:
            delete(url, self._storage)
            progress.advance(1)
        if not restores_names or not self._link(names, layout.names):
            return committed
        return self._restore_names(layout, records, manifest)

    # --- checks ---

    @property
    def _needs_reservation(self) -> bool:
        """Whether tokens are written under plain names that others could write too."""
        return self._is_remote and not self._record.mark

    def _note_existing(self, *, overwrite: bool) -> None:
        """Note what is there: if anything is, shards get a mark.

        Raises ConvertError if something is there, unless `overwrite`.
        """
        if not overwrite:
            self._check_nothing_exists()
        files, self._version, version = self._destination.find_existing()
        if version and not overwrite:
            self._check_nothing_exists()  # it appeared in between
        self._record = replace(
            self._record,
            mark=self._make_mark(version) if version else "",
            replaced=files,
            replaced_version=self._version,
        )

    def _make_mark(self, version: str) -> str:
        """The same after a kill, another one when another job or another dataset is concerned."""
        return f"gen{digest_of_bytes(f'{self._record.job} {version}'.encode(), 6)}"

    def _check_nothing_exists(self) -> None:
        destination = self._destination
        urls = [destination.index_url, destination.manifest_url]
        if not self._is_remote or not self._reservation.is_ours():
            urls.append(destination.tokens_url)
        for url in urls:
            if exists(url, self._storage):
                raise ConvertError(
                    f"{url}: exists already; choose another output, or pass "
                    f"--overwrite to replace it"
                )
        conflict = self._reservation.conflict() if self._is_remote else None
        if conflict:
            raise ConvertError(conflict)

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
        self, layout: ShardLayout, shards: Mapping[int, ShardRecord], names: Sequence[str] = ()
    ) -> None:
        """Raise ConvertError if files of shards are gone: the manifest would list nothing. names:
        under which all of them must have been put.
        """
        missing = self._missing(layout, shards, names)
        if missing:
            first = (names or layout.names)[missing[0]]
            raise ConvertError(
                f"{self._destination.url(first)}: a file of this shard is missing or has the wrong "
                f"size ({len(missing)} of {len(shards)} shards). Another conversion or 'gc' may have "
                f"removed it; run the same command again, which writes it again"
            )

    def _missing(
        self, layout: ShardLayout, shards: Mapping[int, ShardRecord], names: Sequence[str] = ()
    ) -> list[int]:
        """Shards with a file that is not there in its size: neither in the work folder nor where an
        earlier run has put it. names: under which all of them must have been put.
        """
        if not shards:
            return []
        suffix = self._destination.suffix
        # Others may have put files of plain names, where no mark and no record says that we did.
        may_be_put = bool(names or self._record.mark or self._is_resumed)
        in_work_dir: dict[str, int] = {}
        if not names:
            in_work_dir = self._work_dir.sizes(f"out-{layout.digest}/")
            mark = "" if self._is_restored else self._record.mark
            names = self._destination.shard_names(layout.names, mark)
        files = [
            (number, ending, size, self._destination.url(names[number] + ending))
            for number, shard in shards.items()
            for ending, size in shard.sizes(suffix).items()
        ]
        put = self._destination.sizes([url for *_, url in files])
        work_names = layout.work_names()
        missing = set()
        for number, ending, size, url in files:
            is_put = put.get(url) == size and (
                may_be_put or (self._is_remote and ending == suffix)  # tokens are written there
            )
            if not is_put and in_work_dir.get(work_names[number] + ending) != size:
                missing.add(number)
        return sorted(missing)

    def _lost_reservation(self) -> str:
        return (
            f"{self._destination.prefix}: another conversion reserved it meanwhile; "
            f"run the same command again when that has ended, or choose another output"
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
        if not self._is_remote:  # else they were written there
            moved = (self._destination.suffix, *moved)
        progress.begin("publishing", len(names) * len(moved) + 1, " files")  # and the manifest
        if not self._has_origins:
            self._remove_stale_origins(names)
        for ending in moved:
            for old, new in zip(layout.work_names(), names, strict=True):
                source = self._work_dir.file(old + ending)
                move_or_copy(source, self._destination.url(new + ending), self._storage)
                progress.advance(1)

    def _remove_stale_origins(self, names: Sequence[str]) -> None:
        """Delete origins whose dataset was removed by hand: they would describe these documents."""
        urls = {self._destination.url(name + ENDING) for name in names}
        try:
            existing = self._destination.sizes(list(urls))
        except AccessDeniedError:
            return  # without the right to list, a missing object is refused too
        for url in urls.intersection(existing):
            delete(url, self._storage)

    def _commit(self, manifest: bytes) -> None:
        """Put the manifest, in a bucket on the condition that it has not changed since the start."""
        url = self._destination.manifest_url
        if not self._is_remote:
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

    def _link(self, marked_names: Sequence[str], names: Sequence[str]) -> bool:
        """Give local shards their plain names too. False on a file system without hard links, where
        they keep the marked ones.
        """
        url = self._destination.url
        return all(
            link(local_path(url(marked_name + ending)), local_path(url(name + ending)))
            for ending in (self._destination.suffix, *self._last_endings)
            for marked_name, name in zip(marked_names, names, strict=True)
        )

    def _restore_names(
        self, layout: ShardLayout, shards: Mapping[int, ShardRecord], manifest: Manifest
    ) -> Manifest:
        """Switch to the plain names, which all files have, and delete the marked ones."""
        self._check_files(layout, shards, layout.names)
        self._commit(manifest.to_json())
        # Each `.idx` first: tokens without one are no dataset.
        for ending in (".idx", self._destination.suffix, ENDING):
            for name in self._destination.shard_names(layout.names, self._record.mark):
                delete(self._destination.url(name + ending), self._storage)
        return manifest
