"""Datasets that grow: versions are whole and stay as they are, whoever appends and is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from streammega import DataConfig, IndexedDataset, PhaseConfig, StorageConfig, StreamLoader
from streammega.cli.main import app
from streammega.convert import convert
from streammega.dataset.append import append
from streammega.dataset.manifest import read_ancestors, read_manifest, version_url
from streammega.dataset.names import MANIFEST
from streammega.dataset.repair import repair_index
from streammega.dataset.verify import verify
from streammega.dataset.versions import (
    DamagedVersion,
    DatasetVersion,
    newest_version,
    unlisted_datasets,
    versions,
)
from streammega.errors import (
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    StateError,
    StorageError,
)
from streammega.storage import open_store, save_bytes
from streammega.storage.backends.local import LocalStore
from streammega.storage.open import register_scheme
from streammega.storage.store import Store, WrapperStore, create_object
from tests.support.builders import data_config
from tests.support.growing_programs import (
    WITHIN,
    append_and_die,
    append_and_die_at_a_request,
    produce,
)
from tests.support.servers import S3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 20 documents, to be copied under other names."""
    folder = tmp_path_factory.mktemp("made")
    texts = [json.dumps({"text": f"document {number} " * 4}) for number in range(20)]
    (folder / "in.jsonl").write_text("\n".join(texts))
    convert([str(folder / "in.jsonl")], str(folder / "part"), tokenizer="bytes", workers=1)
    return folder


def put(made: Path, url: str, storage: StorageConfig | None = None, **changes: Any) -> str:
    """The dataset under another name, with other words in its manifest."""
    storage = storage or StorageConfig()
    for ending in (".bin", ".idx"):
        save_bytes(url + ending, (made / f"part{ending}").read_bytes(), storage)
    manifest = read_manifest(str(made / f"part{MANIFEST}"), storage)
    (shard,) = manifest.shards
    shards = [replace(shard, name=url.rpartition("/")[2])]
    changed = replace(manifest, **{"shards": shards, **changes})
    save_bytes(url + MANIFEST, changed.to_json(), storage)
    return url


def check_versions(prefix: str, storage: StorageConfig, names: Sequence[str]) -> None:
    """Each version holds the one before and more; the newest holds just these."""
    found = versions(prefix, storage)
    before: list[Any] = []
    for version in found:
        assert isinstance(version, DatasetVersion)
        shards = version.manifest.shards
        assert shards[: len(before)] == before
        assert len(shards) > len(before)
        assert version.manifest.documents == 20 * len(shards)
        before = shards
    assert [version.number for version in found][-1] == newest_version(prefix, storage)
    listed = [shard.name for shard in before]
    assert len(listed) == len(set(listed))
    assert set(listed) == {name.rpartition("/")[2] for name in names}


Hook = Callable[[Store, str, bytes, bool], bool]
"""Puts an object (key, bytes), on the condition that it is new where the last is true."""


class HookedStore(WrapperStore):
    """Local files by hooked:///PATH. What is put there, the newest hook puts."""

    hooks: ClassVar[list[Hook]] = []

    def __init__(self) -> None:
        super().__init__(LocalStore())

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        return self.hooks[-1](self.inner, key, bytes(data), if_absent)


register_scheme("hooked", HookedStore)


@pytest.fixture
def hooks() -> Iterator[list[Hook]]:
    """The hooks of HookedStore, the first of which puts as a local disk does."""
    HookedStore.hooks = [lambda store, key, data, new: store.put(key, data, if_absent=new)]
    yield HookedStore.hooks
    HookedStore.hooks = []


@pytest.mark.guarantee("versions-hold-before")
def test_what_is_appended_is_a_new_version_and_former_ones_stay_as_they_are(
    made: Path, tmp_path: Path
) -> None:
    web, first, second = (put(made, f"{tmp_path}/{name}") for name in ("web", "web-a", "web-b"))
    assert append(web, [first]).added
    one = Path(version_url(web, 1)).read_bytes()
    version = append(web, [first, second])
    assert (version.number, version.added, version.manifest.tokens) == (2, True, 3 * tokens(web))
    again = append(web, [second])
    assert (again.number, again.added) == (2, False)
    assert Path(version_url(web, 1)).read_bytes() == one
    check_versions(web, StorageConfig(), [web, first, second])
    for number, shards in enumerate(([web], [web, first], [web, first, second])):
        assert IndexedDataset(f"{web}@{number}").shards == shards
        assert not verify(f"{web}@{number}").problems
    # what was appended is checked by what the manifests say of it
    for after, shards in ((0, [first, second]), (1, [second])):
        checked = verify(f"{web}@{after}..2")
        assert (checked.problems, checked.checksums) == ([], True)
        assert (checked.shards, checked.tokens) == (len(shards), len(shards) * tokens(web))
    assert IndexedDataset(web).shards == [web], "the plain name is what it was"
    with pytest.raises(ObjectNotFoundError, match=r"no such version, the newest is .*web@2"):
        IndexedDataset(f"{web}@3")


def tokens(name: str) -> int:
    return read_manifest(name + MANIFEST, StorageConfig()).tokens


@pytest.mark.guarantee("version-n-read")
@pytest.mark.parametrize("whole_until", [0, 5])
def test_a_version_is_read_from_few_manifests_whatever_came_before(
    made: Path, tmp_path: Path, whole_until: int
) -> None:
    """Also after versions each of which lists everything."""
    web = put(made, f"{tmp_path}/web")
    names = [web]
    stored = {}
    for number in range(1, 25):
        names.append(put(made, f"{tmp_path}/web-{number:02d}"))
        version = append(web, names[-1:])
        assert version.number == number
        if number <= whole_until:
            Path(version.url).write_bytes(version.manifest.to_json())
        stored[number] = Path(version.url).read_bytes()
    for number, data in stored.items():
        url = version_url(web, number)
        assert Path(url).read_bytes() == data
        whole = read_manifest(url, StorageConfig())
        assert [shard.name for shard in whole.shards] == [
            name.rpartition("/")[2] for name in names[: number + 1]
        ]
        assert (whole.documents, whole.tokens) == (20 * (number + 1), tokens(web) * (number + 1))
        known: dict[str, Any] = {}
        _, parents = read_ancestors(url, StorageConfig(), known)
        if number > 2 * whole_until:
            assert len(known) == len(parents) == number.bit_count()
    own = json.loads(stored[23])
    assert (own["version"], own["parent"]["number"], len(own["shards"])) == (2, 22, 1)
    assert json.loads(stored[16])["version"] == 1, "a power of two lists everything, as ever"
    assert IndexedDataset(f"{web}@21..23").shards == names[22:24]
    assert not verify(f"{web}@23").problems


@pytest.mark.guarantee("version-n-read")
def test_a_manifest_that_another_builds_on_may_not_be_changed(made: Path, tmp_path: Path) -> None:
    web = put(made, f"{tmp_path}/web")
    for letter in "abc":
        append(web, [put(made, f"{tmp_path}/web-{letter}")])
    parent = Path(version_url(web, 2))
    data = parent.read_bytes()
    parent.write_bytes(data + b"\n")
    with pytest.raises(FormatError, match=r"v00000003.*builds on another manifest than the one at"):
        IndexedDataset(f"{web}@3")
    parent.unlink()
    with pytest.raises(FormatError, match=r"v00000002.manifest.json, which is not there; restore"):
        IndexedDataset(f"{web}@3")
    parent.write_bytes(data)
    renamed = Path(f"{tmp_path}/copy{MANIFEST}")
    shutil.copy(version_url(web, 3), renamed)
    with pytest.raises(FormatError, match="is no version by its name; was it renamed"):
        IndexedDataset(str(renamed))
    changed = json.loads(Path(version_url(web, 3)).read_text())
    changed["parent"]["number"] = 3
    Path(version_url(web, 3)).write_text(json.dumps(changed))
    with pytest.raises(FormatError, match="is a damaged manifest: version 3 builds on version 3"):
        IndexedDataset(f"{web}@3")


@pytest.mark.guarantee("version-n-read")
def test_a_damaged_version_is_told_and_the_others_are_listed(made: Path, tmp_path: Path) -> None:
    web = put(made, f"{tmp_path}/web")
    for letter in "abcd":
        append(web, [put(made, f"{tmp_path}/web-{letter}")])
    Path(version_url(web, 1)).write_text("{")
    Path(version_url(web, 2)).unlink()
    kinds = {version.number: type(version) for version in versions(web)}
    sound = DatasetVersion
    assert kinds == {0: sound, 1: DamagedVersion, 2: DamagedVersion, 3: DamagedVersion, 4: sound}
    result = CliRunner().invoke(app, ["versions", web])
    assert result.exit_code == 1
    assert re.search(r"web@1 cannot be read: .*is a damaged manifest", result.output)
    assert re.search(r"web@2 cannot be read: its manifest is not there", result.output)
    assert re.search(r"web@3 cannot be read: .*builds on .*which is not there", result.output)
    assert re.search(r"web@4 +5 +100 ", result.output)


@pytest.mark.guarantee("version-n-read")
def test_a_shard_that_is_missing_is_named(made: Path, tmp_path: Path) -> None:
    web, added = (put(made, f"{tmp_path}/{name}") for name in ("web", "web-a"))
    append(web, [added])
    Path(f"{added}.bin").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"web-a\.bin"):
        IndexedDataset(f"{web}@1")
    assert any("web-a.bin" in problem for problem in verify(f"{web}@1").problems)


@pytest.mark.guarantee("versions-hold-before")
def test_a_version_of_what_has_none_says_so(made: Path, tmp_path: Path) -> None:
    prefix = put(made, str(tmp_path / "web"))
    with pytest.raises(ObjectNotFoundError, match=r"no such version, the newest is .*web@0"):
        IndexedDataset(f"{prefix}@3")
    (tmp_path / "web@3").mkdir()
    in_folder = put(made, str(tmp_path / "web@3/part"))
    assert IndexedDataset(f"{tmp_path}/web@3/").shards == [in_folder]
    with pytest.raises(ObjectNotFoundError, match=r"no dataset .*a folder with a slash: .*none@3/"):
        IndexedDataset(f"{tmp_path}/none@3")


@pytest.mark.guarantee("versions-hold-before")
def test_a_dataset_may_begin_by_being_appended_to(made: Path, tmp_path: Path) -> None:
    first = put(made, f"{tmp_path}/web-a")
    assert append(f"{tmp_path}/web", [first]).number == 1
    assert IndexedDataset(f"{tmp_path}/web@1").shards == [first]
    assert [version.number for version in versions(f"{tmp_path}/web")] == [1]


@pytest.mark.guarantee("versions-hold-before")
@pytest.mark.parametrize("keeps", [(True, True), (True, False), (False, True)])
def test_origins_of_what_is_appended_are_those_of_all_shards(
    tmp_path: Path, keeps: tuple[bool, bool]
) -> None:
    names = [f"{tmp_path}/web", f"{tmp_path}/web-a"]
    for name, keeps_origins in zip(names, keeps, strict=True):
        Path(f"{name}.jsonl").write_text(json.dumps({"text": name}))
        convert([f"{name}.jsonl"], name, tokenizer="bytes", workers=1, provenance=keeps_origins)
    manifest = append(names[0], names[1:]).manifest
    assert (manifest.origins is not None) == all(keeps)
    newest = versions(names[0])[-1]
    assert isinstance(newest, DatasetVersion)
    assert newest.manifest == manifest
    assert not verify(f"{names[0]}@1").problems
    if all(keeps):
        Path(f"{names[1]}.origins").write_bytes(b"another")
        (problem,) = verify(f"{names[0]}@1").problems
        assert "web-a.origins: has another checksum" in problem


@pytest.mark.guarantee("repair-leaves-sound")
@pytest.mark.parametrize("name", ["web@4", "web@3..4", f"web.v00000004{MANIFEST}"])
def test_repair_leaves_the_manifest_of_a_version_as_it_is(
    made: Path, tmp_path: Path, name: str
) -> None:
    web = f"{tmp_path}/web"
    for number in range(1, 6):
        append(web, [put(made, f"{web}-{number}")])
    index = Path(f"{web}-4.idx")
    whole = index.read_bytes()
    index.unlink()
    (done,) = repair_index(f"{tmp_path}/{name}")
    assert done.endswith("it agrees with the manifest")
    assert index.read_bytes() == whole
    # with one document less, the manifest would have to say another number
    tokens = np.fromfile(f"{web}-4.bin", np.uint16)
    ends = np.flatnonzero(tokens == tokens[-1])
    tokens[ends[3]] = 65
    tokens.tofile(f"{web}-4.bin")
    index.unlink()
    before = versions(web)
    there = sorted(os.listdir(tmp_path))
    with pytest.raises(
        ConfigError, match="is the name of a version, and its manifest never changes"
    ):
        repair_index(f"{tmp_path}/{name}", force=True)
    assert versions(web) == before
    assert sorted(os.listdir(tmp_path)) == there


@pytest.mark.guarantee("producer-killed-point")
def test_orphans_are_listed_and_can_be_appended(made: Path, tmp_path: Path) -> None:
    web, first, second = (put(made, f"{tmp_path}/{name}") for name in ("web", "web-a", "web-b"))
    put(made, f"{tmp_path}/website")
    damaged = Path(f"{tmp_path}/web-c{MANIFEST}")
    damaged.write_text("{")
    assert unlisted_datasets(web) == [first, second, f"{tmp_path}/web-c"]
    damaged.unlink()
    assert unlisted_datasets(web) == [first, second]
    append(web, [second])
    assert unlisted_datasets(web) == [first]
    append(web, [first])
    assert unlisted_datasets(web) == []


def change(url: str, **changes: Any) -> None:
    """Have a manifest say other things, also of its shard."""
    path = Path(url + MANIFEST)
    stored = json.loads(path.read_text())
    stored["shards"][0] |= changes.pop("shard", {})
    path.write_text(json.dumps(stored | changes))


@pytest.mark.guarantee("part-dataset-refused")
@pytest.mark.parametrize(
    ("grows", "names", "changes", "error", "message"),
    [
        ("web", "web-b", {"dtype": "int32"}, FormatError, "damaged manifest"),
        ("web", "web-b", {"shard": {"index_bytes": 1}}, FormatError, "its manifest says"),
        ("web", "web-b", {"kind": "zst"}, ConfigError, "has kind 'zst'"),
        ("web", "web-b", {"loss_modes": [1]}, ConfigError, r"has loss_modes \[1\]"),
        ("web", "web-b", {"tokenizer": {"name": "o", "digest": "00"}}, ConfigError, "tokenizer o"),
        ("web", "web-a", {"shard": {"checksums": ["0"]}}, ConfigError, "with other contents"),
        ("web", "web-cut", {}, ObjectNotFoundError, r"web-cut\.bin"),
        ("web", "web-missing", {}, ObjectNotFoundError, "has no manifest"),
        ("web", "other/web-b", {}, ConfigError, "is in the folder"),
        ("web", "web", {}, ConfigError, "the dataset itself"),
        ("web", "web-b web-b", {}, ConfigError, "is named twice"),
        ("web", "", {}, ConfigError, "name the datasets"),
        ("pair", "web-b", {}, ConfigError, "a pair without a manifest"),
        *(
            (
                f"web@{which}",
                "web-b",
                {},
                ConfigError,
                "name of a version, and versions never change",
            )
            for which in ("0", "1", "7", "0..1")
        ),
    ],
)
def test_what_is_no_part_of_the_dataset_is_not_appended(
    made: Path,
    tmp_path: Path,
    grows: str,
    names: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    append(put(made, f"{tmp_path}/web"), [put(made, f"{tmp_path}/web-a")])
    for name in ("web-b", "web-cut", "pair", "other/web-b"):
        put(made, f"{tmp_path}/{name}")
    os.unlink(f"{tmp_path}/web-cut.bin")
    os.unlink(f"{tmp_path}/pair{MANIFEST}")
    shutil.copy(f"{tmp_path}/web-b.bin", f"{tmp_path}/web-b.bin.zst")
    if changes:
        change(f"{tmp_path}/{names}", **changes)
    there = sorted(os.listdir(tmp_path))
    with pytest.raises(error, match=message):
        append(f"{tmp_path}/{grows}", [f"{tmp_path}/{name}" for name in names.split()])
    assert sorted(os.listdir(tmp_path)) == there


@pytest.mark.parametrize(
    ("web", "other"),
    [
        ("web", "./web-a"),
        ("./web", "web-a"),
        ("{here}/web", "web-a"),
        ("web", "{here}/web-a"),
        ("web", "link/web-a"),
        ("file://{here}/web", "web-a"),
    ],
)
def test_a_folder_may_be_spelled_in_many_ways(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web: str, other: str
) -> None:
    put(made, f"{tmp_path}/web-a")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    spelled = web.format(here=tmp_path)
    assert append(spelled, [other.format(here=tmp_path)]).number == 1
    for name in (f"{tmp_path}/web@1", f"{spelled}@1"):
        assert len(IndexedDataset(name)) == len(IndexedDataset(f"{tmp_path}/web-a"))
    (tmp_path / "other").mkdir()
    put(made, f"{tmp_path}/other/web-b")
    message = (
        rf"is in the folder {re.escape(str(tmp_path))}/other, and .* in {re.escape(str(tmp_path))};"
    )
    with pytest.raises(ConfigError, match=message):
        append(spelled, ["./other/web-b"])
    with pytest.raises(ConfigError, match="the dataset itself"):
        append(spelled, ["./web"])


NOT_CONVERTED = {
    **dict.fromkeys(
        [
            "web.v00000002",
            "other.v00000001",
            "web@1",
            "web@2",
            "other@0",
            "web@0..1",
            "a@1.bin.zst",
        ],
        r"is the name of a version.*with another end",
    ),
    "alone": r"alone: has versions up to 1.*convert to another name",
    "web overwritten": "has versions up to 1, which list its shards",
    "web-a overwritten": "web-a: is listed by versions of web, up to 1",
    "./web-a overwritten": "web-a: is listed by versions of web, up to 1",
}
"""Outputs, and why nothing is converted to them."""


@pytest.mark.guarantee("part-dataset-refused")
@pytest.mark.parametrize("output", NOT_CONVERTED)
def test_what_runs_would_miss_or_read_in_part_is_not_converted(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    append(put(made, f"{tmp_path}/web"), [put(made, f"{tmp_path}/web-a")])
    append(f"{tmp_path}/alone", [put(made, f"{tmp_path}/alone-a")])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)  # names without a folder, too
    name, _, overwritten = output.partition(" ")
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "overwrite": bool(overwritten)}
    with pytest.raises(ConfigError, match=NOT_CONVERTED[output]):
        convert([str(made / "in.jsonl")], name, **options)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_dataset_that_no_version_lists_may_be_converted_again(made: Path, tmp_path: Path) -> None:
    web, added, other = (put(made, f"{tmp_path}/{name}") for name in ("web", "web-a", "website"))
    append(web, [added])
    convert([str(made / "in.jsonl")], other, tokenizer="bytes", overwrite=True, workers=1)


@pytest.mark.guarantee("datasets-grow-under", "versions-hold-before")
def test_a_run_goes_on_with_its_version_whatever_is_appended(made: Path, tmp_path: Path) -> None:
    web = put(made, f"{tmp_path}/web")
    append(web, [put(made, f"{tmp_path}/web-a")])
    config = data_config([f"{web}@1"], tmp_path, order="stream", split="1,0,0")

    def opened(config: DataConfig) -> StreamLoader:
        return StreamLoader(config, micro_batch_size=2, global_batch_size=4)

    with opened(config) as loader:
        expected = [loader.take()["tokens"] for _ in range(6)]
    with opened(config) as loader:
        for number in range(3):
            assert loader.take()["tokens"].equal(expected[number])
        append(web, [put(made, f"{tmp_path}/web-b")])
        state = loader.state_dict()
        assert loader.take()["tokens"].equal(expected[3])
    with opened(config) as loader:
        loader.load_state_dict(state)
        for tokens_expected in expected[3:]:
            assert loader.take()["tokens"].equal(tokens_expected)
    with (
        opened(replace(config, blend=[f"{web}@2"])) as loader,
        pytest.raises(StateError, match="datasets"),
    ):
        loader.load_state_dict(state)


@pytest.mark.guarantee("phase-takes-appended")
def test_a_phase_takes_in_what_was_appended_and_repeats_nothing(made: Path, tmp_path: Path) -> None:
    web = put(made, f"{tmp_path}/web")
    append(web, [put(made, f"{tmp_path}/web-a")])
    config = DataConfig(
        blend=[f"{web}@1"],
        sequence_length=8,
        order="stream",
        split="1,0,0",
        shuffle_lanes=4,
        shuffle_block_bytes=64,
        index_cache_dir=tmp_path / "cache",
    )

    def places(config: DataConfig, state: Any, steps: int) -> tuple[list[tuple[str, int]], Any]:
        """(file, first token) of the samples of so many steps, and the state after them."""
        with StreamLoader(config, micro_batch_size=4, global_batch_size=4) as loader:
            if state is not None:
                loader.load_state_dict(state)
            samples = loader.dataset.samples
            first = loader.consumed_samples
            extents = samples.locate(np.arange(first, first + 4 * steps))
            found = []
            for dataset, file, start in zip(
                extents.dataset, extents.file, extents.start, strict=True
            ):
                found.append((samples.files[dataset][file].key, int(start)))
            for _ in range(steps):
                loader.take()
            return found, loader.state_dict()

    before, state = places(config, None, 5)
    append(web, [put(made, f"{tmp_path}/web-b"), put(made, f"{tmp_path}/web-c")])
    blend: Any = [(f"{web}@1", 0.5), (f"{web}@1..2", 0.5)]
    grown = replace(config, phases=[PhaseConfig(first_sample=20, blend=blend)])
    after, _ = places(grown, state, 10)
    assert len(set(before + after)) == len(before + after), "nothing twice in an epoch"
    assert {key.rpartition("/")[2] for key, _ in before} == {"web.bin", "web-a.bin"}
    later = {key.rpartition("/")[2] for key, _ in after}
    assert later == {"web.bin", "web-a.bin", "web-b.bin", "web-c.bin"}
    replaced = replace(config, phases=[PhaseConfig(first_sample=20, blend=[f"{web}@2"])])
    with pytest.raises(
        ConfigError, match=r"web@1 and .*web@2 share the file .*web.bin.*web@1\.\.2"
    ):
        StreamLoader(replaced, micro_batch_size=4, global_batch_size=4)
    assert IndexedDataset(f"{web}@1..2").shards == [f"{tmp_path}/web-b", f"{tmp_path}/web-c"]
    assert IndexedDataset(f"{web}@0..1").shards == [f"{tmp_path}/web-a"]
    with pytest.raises(ConfigError, match="nothing was appended from 2 to 2"):
        IndexedDataset(f"{web}@2..2")
    with pytest.raises(ObjectNotFoundError, match="no such version"):
        IndexedDataset(f"{web}@2..9")


def produce_at_once(prefix: str, shares: list[list[str]], storage: StorageConfig) -> None:
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(len(shares))
    errors = context.Queue()
    producers = [
        context.Process(target=produce, args=(barrier, prefix, names, storage, errors))
        for names in shares
    ]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join(WITHIN)
    assert [producer.exitcode for producer in producers] == [0] * len(shares), errors.get(timeout=1)


@pytest.mark.guarantee("datasets-grow-under", "producers-same-moment")
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_of_producers_at_the_same_moment_all_shards_are_in(
    made: Path, tmp_path: Path, moto: S3, place: str
) -> None:
    root = str(tmp_path)
    storage = StorageConfig()
    if place == "bucket":
        root = f"s3://{moto.new_bucket()}"
        storage = StorageConfig(storage_options=moto.options, request_timeout=60)
    web = put(made, f"{root}/web", storage)
    shares = [
        [put(made, f"{root}/web-{producer}-{number}", storage) for number in range(3)]
        for producer in range(2)
    ]
    produce_at_once(web, shares, storage)
    everything = [name for names in shares for name in names]
    assert newest_version(web, storage) == len(everything)
    check_versions(web, storage, [web, *everything])


@pytest.mark.guarantee("datasets-grow-under", "producers-same-moment")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_interleaving_of_two_producers_loses_nothing(
    data: st.DataObject,
    made: Path,
    tmp_path_factory: pytest.TempPathFactory,
    hooks: list[Hook],
) -> None:
    """Each step of a producer (look, read, write) is let go by a drawn turn."""
    root = f"hooked://{tmp_path_factory.mktemp('turns')}"
    del hooks[1:]
    web = put(made, f"{root}/web")
    shares = [[put(made, f"{root}/web-{who}{n}") for n in range(2)] for who in "ab"]
    turns = data.draw(st.lists(st.integers(0, 1), max_size=12))
    lock = threading.Condition()
    waiting: set[int] = set()
    done: set[int] = set()
    order = list(turns)

    def stepwise(store: Store, key: str, data: bytes, new: bool) -> bool:
        """The write of a version waits for its turn; other producers go on meanwhile."""
        if ".v0000" not in key:
            return store.put(key, data, if_absent=new)
        who = int(threading.current_thread().name)
        with lock:
            waiting.add(who)
            lock.notify_all()
            lock.wait_for(lambda: len(waiting | done) == 2, WITHIN)
            if order and order[0] != who and len(waiting) == 2:
                lock.wait_for(lambda: not order or order[0] == who or len(done) > 0, WITHIN)
            if order:
                order.pop(0)
            written = store.put(key, data, if_absent=new)
            waiting.discard(who)
            lock.notify_all()
            return written

    def work(who: int) -> None:
        try:
            for name in shares[who]:
                append(web, [name])
        finally:
            with lock:
                done.add(who)
                lock.notify_all()

    hooks.append(stepwise)
    threads = [threading.Thread(target=work, args=(who,), name=str(who)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
        assert not thread.is_alive()
    check_versions(web, StorageConfig(), [web, *shares[0], *shares[1]])


@pytest.mark.guarantee("producer-killed-point")
def test_a_producer_that_is_killed_at_any_point_leaves_every_version_whole(
    made: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    storage = StorageConfig()
    for event in range(100):
        folder = tmp_path / str(event)
        web, first, second = (put(made, f"{folder}/{name}") for name in ("web", "web-a", "web-b"))
        producer = context.Process(target=append_and_die, args=(str(folder), event))
        producer.start()
        producer.join(WITHIN)
        assert producer.exitcode in (0, -signal.SIGKILL)
        number = newest_version(web, storage)
        check_versions(web, storage, [web, first, second] if number else [web])
        assert unlisted_datasets(web) == ([] if number else [first, second])
        append(web, [first, second])
        check_versions(web, storage, [web, first, second])
        assert newest_version(web, storage) == 1
        if producer.exitcode == 0:
            break
        shutil.rmtree(folder)
    assert producer.exitcode == 0, "it was killed at every point, and then at none"
    assert event > 5


def check_after_a_death(web: str, storage: StorageConfig, names: list[str]) -> None:
    """Every version is whole, and what none lists was left. A request that was sent may be answered
    after its sender died: where that made a version meanwhile, both are looked at again.
    """
    before = newest_version(web, storage)
    left = unlisted_datasets(web, storage)
    try:
        check_versions(web, storage, [web, *(name for name in names if name not in left)])
        assert len(left) < 2 or before == 0 or left == names[-len(left) :]
    except AssertionError:
        if newest_version(web, storage) == before:
            raise
        check_after_a_death(web, storage, names)


def producers_that_die(
    made: Path, moto: S3, deaths: Sequence[tuple[int, bool]], *, after: Sequence[float] = ()
) -> int:
    """Producers of one bucket, a process each, with SIGKILL at a request (its number, whether it is
    answered before), or after so many seconds; what is there is whole after each. How many died.
    """
    storage = StorageConfig(storage_options=moto.options, request_timeout=60)
    context = multiprocessing.get_context("forkserver")
    root = f"s3://{moto.new_bucket()}"
    web = put(made, f"{root}/web", storage)
    names: list[str] = []
    died = 0
    for number in range(max(len(deaths), len(after))):
        names.append(put(made, f"{root}/web-{number:03d}", storage))
        request, answered = deaths[number] if deaths else (0, False)
        arguments = (web, names, storage, request, answered)
        producer = context.Process(target=append_and_die_at_a_request, args=arguments)
        producer.start()
        if after:
            producer.join(after[number])
            producer.kill()
        producer.join(WITHIN)
        assert producer.exitcode in (0, -signal.SIGKILL)
        died += producer.exitcode != 0
        check_after_a_death(web, storage, names)
    append(web, names, storage)
    check_versions(web, storage, [web, *names])
    assert unlisted_datasets(web, storage) == []
    return died


@pytest.mark.guarantee("producer-killed-point")
def test_a_producer_of_a_bucket_that_is_killed_at_a_request_loses_nothing(
    made: Path, moto: S3
) -> None:
    deaths = [(5, False), (-1, False), (9, True), (-1, True)]
    assert producers_that_die(made, moto, deaths) == len(deaths)


@pytest.mark.guarantee("producer-killed-point")
@pytest.mark.soak
def test_producers_of_a_bucket_that_are_killed_at_every_request_lose_nothing(
    made: Path, moto: S3
) -> None:
    rng = random.Random(3)
    deaths = [(rng.randrange(1, 40), rng.random() < 0.5) for _ in range(60)]
    print(producers_that_die(made, moto, deaths), "of 60 died at a request")
    moments = [rng.uniform(0.0, 0.5) for _ in range(60)]
    print(producers_that_die(made, moto, [], after=moments), "of 60 died at any moment")


@pytest.mark.guarantee("versions-hold-before")
@pytest.mark.parametrize("transport", ["obstore", "fsspec", "memory"])
def test_versions_in_a_bucket(made: Path, moto: S3, tmp_path: Path, transport: Any) -> None:
    """By a driver without conditional writes too, which begins listed names with a slash."""
    storage = StorageConfig()
    root = f"memory://{tmp_path.name}"
    has_conditional_writes = transport != "memory"
    if has_conditional_writes:
        storage = StorageConfig(
            transport=transport, storage_options=moto.options, request_timeout=60
        )
        root = f"s3://{moto.new_bucket()}"
    web, first, second = (put(made, f"{root}/{n}", storage) for n in ("web", "web-a", "web-b"))
    assert unlisted_datasets(web, storage) == [first, second]
    for names, number in (([first], 1), ([first], 1), ([first, second], 2)):
        assert (
            append(web, names, storage, conditional_writes=has_conditional_writes).number == number
        )
    check_versions(web, storage, [web, first, second])
    assert unlisted_datasets(web, storage) == []
    assert IndexedDataset(f"{web}@1", storage).shards == [web, first]
    with pytest.raises(ObjectNotFoundError, match=r"the newest is .*web@2"):
        IndexedDataset(f"{web}@3", storage)


@pytest.mark.guarantee("part-dataset-refused")
def test_a_server_that_does_not_keep_conditions_is_told(
    made: Path, tmp_path: Path, hooks: list[Hook]
) -> None:
    web, first = (put(made, f"hooked://{tmp_path}/{name}") for name in ("web", "web-a"))
    hooks.append(lambda store, key, data, new: store.put(key, data))
    with pytest.raises(StorageError, match=r"writes over what is there.*--no-conditional-writes"):
        append(web, [first])
    assert newest_version(web, StorageConfig()) == 0
    assert append(web, [first], conditional_writes=False).number == 1


@pytest.mark.guarantee("producers-same-moment")
def test_a_lost_answer_appends_once(made: Path, tmp_path: Path, hooks: list[Hook]) -> None:
    def lost(store: Store, key: str, data: bytes, new: bool) -> bool:
        store.put(key, data, if_absent=new)
        return False  # as of a request that was sent again, and met its own object

    web, first = (put(made, f"hooked://{tmp_path}/{name}") for name in ("web", "web-a"))
    hooks.append(lost)
    assert append(web, [first]).number == 1
    check_versions(web, StorageConfig(), [web, first])


@pytest.mark.guarantee("producers-same-moment")
def test_of_many_that_create_a_local_file_one_does(tmp_path: Path) -> None:
    store, key = open_store(f"{tmp_path}/made", StorageConfig())
    made: list[int] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait(WITHIN)
        if create_object(store, key, f"{number}".encode() * 1000):
            made.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    (winner,) = made
    assert Path(key).read_bytes() == f"{winner}".encode() * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.guarantee("versions-hold-before")
def test_producers_append_by_the_command_line(made: Path, tmp_path: Path) -> None:
    web = put(made, f"{tmp_path}/web")
    put(made, f"{tmp_path}/web-b")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    source = str(made / "in.jsonl")
    said = run("convert", source, f"{tmp_path}/web-a", "--tokenizer", "bytes", "--append-to", web)
    assert f"{web}@1: 2 shards, 40 documents" in said
    said = run("versions", web)
    assert re.search(rf"{web}@0 +1 +20 ", said)
    assert f"in_no_version: {tmp_path}/web-b" in said
    report = json.loads(run("versions", web, "--json"))
    assert report["in_no_version"] == [f"{tmp_path}/web-b"]
    assert [version["shards"] for version in report["versions"]] == [1, 2]
    assert "@2: 3 shards" in run("append", web, f"{tmp_path}/web-b")
    assert "had all of it already" in run("append", web, f"{tmp_path}/web-b")
    assert "in_no_version" not in run("versions", web)
    elsewhere = f"{tmp_path}/other/web-c"
    result = CliRunner().invoke(
        app, ["convert", source, elsewhere, "--tokenizer", "bytes", "--append-to", web]
    )
    assert isinstance(result.exception, ConfigError)
    assert not Path(elsewhere + ".idx").exists(), "before anything is converted"


@pytest.mark.parametrize(
    ("grows", "options", "why"),
    [
        ("web", ["--format", "zst"], "has kind 'zst'"),
        ("web", ["--pack-length", "64"], "has bin_tokens 64"),
        ("web", ["--dtype", "int32"], "has dtype 'int32'"),
        ("web@1", [], "is the name of a version"),
        ("pair", [], "is a pair without a manifest"),
        ("words", [], "was made with the tokenizer"),
    ],
)
def test_what_could_not_be_appended_is_refused_before_it_is_converted(
    grows: str, options: list[str], why: str, made: Path, tmp_path: Path
) -> None:
    append(put(made, f"{tmp_path}/web"), [put(made, f"{tmp_path}/web-b")])
    Path(put(made, f"{tmp_path}/pair") + MANIFEST).unlink()
    change(put(made, f"{tmp_path}/words"), tokenizer={"name": "another", "digest": "0" * 32})
    new = f"{tmp_path}/web-c"
    command = ["convert", str(made / "in.jsonl"), new, "--tokenizer", "bytes", *options]
    result = CliRunner().invoke(app, [*command, "--append-to", f"{tmp_path}/{grows}"])
    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)
    assert not Path(new + ".idx").exists(), "before anything is converted"
