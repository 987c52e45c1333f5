"""A disk and a bucket that fail, cut, reorder or lie at any operation: what bears its final name is
whole, nothing is believed that is not, and the next run goes on to the same bytes.

Here some of the operations; `make crash` takes every one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from streammega import StorageConfig
from streammega.convert.work_dir import REMOVED, WorkDir
from streammega.dataset import local_cache
from streammega.storage.backends.local import LocalStore
from tests.support.crash_disk import Recorder, state_after
from tests.support.crash_kills import (
    KILLED,
    Child,
    Readers,
    kill_at_moments,
)
from tests.support.crash_runs import SCHEME, Bucket, Case, Crashes, Scene, quiet, thinned
from tests.support.crash_scenes import (
    SCENES,
    BucketWork,
    Conversion,
    NodeCaches,
    Overwrite,
)
from tests.support.servers import S3

KILLED_IN_SHORT = (Conversion, Readers)
"""In `make test`, a few times each; the others in `make soak`, and all of them by `make crash`."""


@pytest.mark.guarantee("crash-any-operation")
@pytest.mark.parametrize("scene", SCENES)
def test_after_a_crash_or_a_fault_at_an_operation_nothing_is_lost_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: type[Scene]
) -> None:
    crashes = Crashes(scene(tmp_path, monkeypatch))
    for case in thinned(crashes.cases, each=1):
        crashes.try_case(case)


@pytest.mark.guarantee("crash-any-operation")
@pytest.mark.parametrize("scene", [Conversion, Overwrite, BucketWork])
def test_records_and_manifests_never_outlive_what_they_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: type[Scene]
) -> None:
    crashes = Crashes(scene(tmp_path, monkeypatch))
    for number, change in enumerate(crashes.recorder.changes):
        if change.name in ("rename", "delete") and change.paths[-1].endswith((".json", REMOVED)):
            for policy in ("died", "reordered"):
                crashes.try_case(Case(number + 1, policy))


@pytest.mark.guarantee("kills-any-moment")
@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(scene, marks=[] if scene in KILLED_IN_SHORT else [pytest.mark.soak])
        for scene in KILLED
    ],
)
def test_processes_that_are_killed_at_any_moment_leave_nothing_half_and_the_next_run_goes_on(
    tmp_path: Path, moto: S3, scene: type[Scene]
) -> None:
    server = S3(moto.endpoint)
    arguments = (scene, tmp_path, server, moto.new_bucket(), 4)
    counts = Child(kill_at_moments, *arguments, method="forkserver").join()
    assert counts["kills"] >= 4


@pytest.mark.guarantee("crash-any-operation")
@pytest.mark.parametrize("if_absent", [False, True])
def test_what_was_put_has_its_name_after_a_power_failure(tmp_path: Path, if_absent: bool) -> None:
    recorder = Recorder(tmp_path)
    with recorder.recording():
        LocalStore().put(str(tmp_path / "a.json"), b"all of it", if_absent=if_absent)
    assert state_after(recorder, len(recorder.changes), "lost")["a.json"][0] == b"all of it"


@pytest.mark.guarantee("file-shortened-map")
def test_caches_never_shorten_a_file_that_may_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = NodeCaches(tmp_path, monkeypatch)
    scene.prepare()
    recorder = Recorder(scene.disk)
    with quiet(), recorder.recording():
        scene.run()
        for number, path in enumerate(sorted((scene.disk / "cache").rglob("*.*"))):
            if path.suffix in (".npy", ".idx", ".data"):
                data = path.read_bytes()
                # Of other files than what may be mapped, which keeps its bytes.
                path.unlink()
                damaged = (
                    data[: len(data) // 2]
                    + bytes([data[len(data) // 2] ^ 1])
                    + data[len(data) // 2 + 1 :]
                )
                path.write_bytes(damaged if number % 2 else data[:-100])
        scene.run()
    assert [str(change) for change in recorder.changes if change.name == "truncate"] == []


def test_a_work_folder_of_a_bucket_loses_its_records_before_what_they_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = BucketWork(tmp_path, monkeypatch)
    names = ["publishing.json", "shard-0.json", "unit-0-0.bin", "unit-0.json", "unit-1-0.bin"]
    scene.bucket.objects = {f"work/{name}": b"x" for name in names}
    removed: list[str] = []
    monkeypatch.setattr(Bucket, "delete", lambda self, key: removed.append(key[5:]))
    WorkDir(f"{SCHEME}://work", StorageConfig()).remove()
    assert removed == ["shard-0.json", "unit-0.json", "unit-0-0.bin", "unit-1-0.bin", names[0]]


def test_a_note_of_the_newest_copy_that_a_power_failure_filled_with_zeros_is_nobodys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = BucketWork(tmp_path, monkeypatch)
    for data in (b"first", b"second"):
        scene.bucket.objects["a.idx"] = data
        info = scene.bucket.info("a.idx")
        copied = local_cache.map_local_copy(scene.bucket, info, tmp_path / "cache", 1 << 20)
        assert bytes(copied) == data
        (latest,) = (tmp_path / "cache" / "idx").glob("*.latest")
        latest.write_bytes(bytes(latest.stat().st_size))
