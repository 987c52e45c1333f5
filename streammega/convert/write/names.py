"""Under which names a conversion may write: chosen before the first byte goes there, noted in the
work folder, and looked at again whenever others may have been there.

Where nothing is under the output's name, its shards get their plain names at once. Where a dataset
is to be replaced, or another conversion writes, they get names with a mark
(`web-gen3f2a1b9c04d1`), which nobody else has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from streammega.convert.digests import digest_of_bytes
from streammega.convert.read.inputs import Input
from streammega.convert.write.claims import Claim
from streammega.convert.write.layout import ShardLayout
from streammega.convert.write.output import Output
from streammega.convert.write.records import load_json, save_json
from streammega.dataset.manifest import MANIFEST
from streammega.dataset.shards import split_name
from streammega.errors import ConvertError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url
from streammega.storage.object_ops import exists
from streammega.storage.open import resolved


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


class OutputNames:
    """The names of one conversion. Every step may be interrupted and repeated.

    job: a digest of what was asked for.
    """

    def __init__(self, output: Output, work: str, job: str) -> None:
        self._output = output
        self._storage = output.storage
        self._is_remote = output.is_remote
        self._work = work
        self._job = job
        self._claim = Claim(output.prefix, work, output.storage, job)
        self._holds_claim = False
        self._is_beside_another = False
        """Whether another conversion has claimed the plain names."""
        self._target: Target | None = None
        self.manifest_seen = ""
        """The version of the manifest that was there when the conversion began."""

    def check(self, inputs: Sequence[Input], *, overwrite: bool) -> None:
        """Raise ConvertError for a dataset that is there already, unless it is this one, half
        published, and for own inputs.
        """
        self.manifest_seen = self._output.manifest_version()
        if not overwrite and not self._is_ours():
            self._check_nothing_is_there()
        former = self._output.former()
        self._check_inputs(inputs, former.files)

    def claim(self, *, overwrite: bool) -> None:
        """Claim the names before the first document is read; after `check`.

        Raises ConvertError where another conversion has; with `overwrite`, what is written goes
        beside its tokens.
        """
        if not self._needs_claim:
            return
        self._holds_claim = self._claim.take()
        self._is_beside_another = not self._holds_claim
        if self._is_beside_another and not overwrite:
            raise ConvertError(self._claim.refusal() or self._lost_claim())

    def keep_claim(self) -> None:
        """Raise ConvertError if the names are another conversion's by now."""
        if self._holds_claim and not self._claim.take():
            raise ConvertError(self._lost_claim())

    def release(self) -> None:
        """Let others claim the names: nothing of this conversion is left to go on with."""
        if self._is_remote:
            self._claim.release()

    def aim(self, layout: ShardLayout) -> ShardLayout:
        """The layout with the names its tokens are written to: where nothing can be renamed, those
        that are published.
        """
        if not self._is_remote:
            if self._noted() is None:
                former = self._output.former()
                self._check_set_without_manifest(layout, former.files)
            return layout
        self.keep_claim()
        target = self._choose(layout)
        names = self._output.shard_names(layout.names, target.mark)
        targets = [self._output.url(name) for name in names]
        # The mark belongs to the digest: shards written under other names are not these.
        digest = layout.digest + target.mark
        return replace(layout, targets=targets, digest=digest)

    def target(self, layout: ShardLayout) -> Target:
        """Under which names this layout is published. Raises as `aim`."""
        return self._target or self._choose(layout)

    def note(self, target: Target) -> None:
        """Keep it in the work folder."""
        save_json(self._note_url, asdict(target), self._storage)

    @property
    def _needs_claim(self) -> bool:
        """Whether names are claimed: not on a disk, where a lock does it, nor beside a dataset,
        where every name has a mark.
        """
        return self._is_remote and not self.manifest_seen

    @property
    def _note_url(self) -> str:
        return join_url(self._work, "target.json")

    def _noted(self) -> Target | None:
        stored = load_json(self._note_url, self._storage)
        if stored is None:
            return None
        try:
            return Target(**stored)
        except TypeError:  # of another version, with other fields
            return None

    def _choose(self, layout: ShardLayout) -> Target:
        """What was noted for this layout, or a new note.

        Raises ConvertError for shards of another dataset in the way.
        """
        noted = self._noted()
        if noted is None or not self._still_holds(noted, layout):
            target = self._choose_anew(layout, noted)
            self.note(target)
        else:
            target = noted
        self._target = target
        return target

    def _still_holds(self, noted: Target, layout: ShardLayout) -> bool:
        """Whether what was noted is of this layout, and nobody has been there since."""
        if noted.layout != layout.digest or noted.job != self._job:
            return False
        # Another conversion took the plain names meanwhile.
        if self._is_beside_another and not noted.mark:
            return False
        return not self._was_published_by_others_since(noted)

    def _choose_anew(self, layout: ShardLayout, noted: Target | None) -> Target:
        there = self._output.former()
        if noted is None:
            self._check_set_without_manifest(layout, there.files)
        mark = ""
        if there.files or self._is_beside_another:
            # Of what is written and of what it replaces: the same after a kill, another one where
            # anything changed, so that no names are written to twice.
            seed = f"{layout.digest} {there.version}"
            mark = f"gen{hashlib.blake2b(seed.encode(), digest_size=6).hexdigest()}"
        former = list(there.files)
        if noted is not None:
            # An interrupted one has left some of what it was to remove.
            former += [url for url in noted.former if url not in former]
        return Target(
            layout=layout.digest, job=self._job, mark=mark, former=former, version=there.version
        )

    def _is_ours(self) -> bool:
        """Whether what is there under the output's name was written by this very conversion, which
        is to go on.
        """
        target = self._noted()
        if target is None:
            # A version that noted no more than this left it while it published.
            url = join_url(self._work, "publishing.json")
            return load_json(url, self._storage) is not None
        manifest = self._output.manifest()
        if target.job != self._job:
            # Another one that was never done: where there is a manifest, it was.
            return not target.former and manifest is None and self._wrote_index(target)
        if manifest is not None:
            return digest_of_bytes(manifest) in target.manifests
        if target.manifests:
            return True
        return not target.former and self._wrote_index(target)

    def _wrote_index(self, target: Target) -> bool:
        """Whether an `.idx` of the output's very name, if one is there, was put there by the
        conversion that noted `target`.
        """
        return bool(target.manifests) or not exists(self._output.index_url, self._storage)

    def _was_published_by_others_since(self, noted: Target) -> bool:
        """Whether the dataset that is there was published by others after `noted` was."""
        manifest = self._output.manifest()
        if manifest is None:
            # A pair alone is a dataset too, and one that this conversion did not publish.
            index_version = self._output.index_version()
            return index_version not in ("", noted.version) and not noted.manifests
        if digest_of_bytes(manifest) in noted.manifests:
            return False
        return self._output.manifest_version() != noted.version

    def _check_nothing_is_there(self) -> None:
        output = self._output
        for url in (output.index_url, output.manifest_url, output.tokens_url):
            if exists(url, self._storage):
                raise ConvertError(
                    f"{redact_urls(url)}: exists already; choose another output, or pass "
                    f"--overwrite to replace it"
                )
        refusal = self._claim.refusal() if self._needs_claim else None
        if refusal:
            raise ConvertError(refusal)

    def _check_inputs(self, inputs: Sequence[Input], former: Sequence[str]) -> None:
        """Raise ConvertError for an input that the output would replace."""
        output = self._output
        replaced_prefixes = {resolved(split_name(url)[0]) for url in (output.prefix, *former)}
        replaced_files = {resolved(url) for url in (output.tokens_url, output.index_url, *former)}
        for item in inputs:
            is_replaced = resolved(item.path) in replaced_files
            if item.format == "megatron":
                prefix = split_name(item.path.removesuffix(MANIFEST))[0]
                is_replaced = is_replaced or resolved(prefix) in replaced_prefixes
            if is_replaced:
                raise ConvertError(
                    f"{redact_urls(output.prefix)}: the output would replace its own input "
                    f"{redact_urls(item.path)}; choose another name"
                )

    def _check_set_without_manifest(self, layout: ShardLayout, former: Sequence[str]) -> None:
        """Raise ConvertError where shards of a set without a manifest are: they are a dataset too.

        The first and the last name tell: a set is whole, or no dataset.
        """
        for name in {layout.names[0], layout.names[-1]}:
            url = self._output.url(f"{name}.idx")
            is_in_the_way = name != self._output.stem and url not in former
            if is_in_the_way and exists(url, self._storage):
                raise ConvertError(
                    f"{redact_urls(url)}: exists already, of a dataset without "
                    f"{self._output.stem}{MANIFEST}; choose another output, or remove that dataset "
                    f"first"
                )

    def _lost_claim(self) -> str:
        return (
            f"{redact_urls(self._output.prefix)}: another conversion claimed it meanwhile; run the "
            f"same command again when that is done, or choose another output"
        )
