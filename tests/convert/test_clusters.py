"""Machines of a Ray cluster that see other disks: found at their first task."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streammega import StorageConfig
from streammega.convert import ConvertOptions, convert
from streammega.convert.job import Job
from streammega.convert.tokenize.encode import encoder_of
from streammega.convert.work_dir import WorkDir
from streammega.convert.workers import SharedFiles
from streammega.dataset.verify import verify
from streammega.errors import ConvertError
from tests.convert.test_reshape import check_that_a_killed_worker_is_replaced, digest, make_corpus

WARNINGS = (
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::FutureWarning",
)
ROOT = str(Path(__file__).parents[2])
NODE_WITHIN = 180.0
"""Seconds after which a node is taken not to start: its five processes take a minute on a machine
with much to do.
"""


def test_a_machine_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "marker").touch()
    (tmp_path / "in.txt").write_text("text")
    marker = str(tmp_path / "marker")
    path = str(tmp_path / "in.txt")
    SharedFiles(marker=marker, inputs=((path, 4),)).check()
    for files, words in (
        (SharedFiles(marker=f"{marker}.gone"), "--work-dir"),
        (SharedFiles(marker=marker, inputs=((path, 5),)), "has 4 bytes there, not 5"),
        (SharedFiles(marker=marker, inputs=((f"{path}.gone", 5),)), "cannot be read there"),
    ):
        with pytest.raises(ConvertError, match=f"cannot take part.*{words}"):
            files.check()


@pytest.mark.guarantee("ray-machine-see")
def test_a_worker_with_another_tokenizer_makes_no_tokens() -> None:
    options = ConvertOptions(tokenizer="bytes")
    job = Job(
        options=options,
        storage=StorageConfig(),
        work_dir=WorkDir("", StorageConfig()),
        units=[],
        tokenizer_digest="of the driver",
        segment_bytes=1,
    )
    with pytest.raises(ConvertError, match="bytes: is another tokenizer on"):
        encoder_of(job)


@pytest.fixture(scope="module")
def folder_apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the second node of `cluster` a disk of its own."""
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def may_mount(folder_apart: Path) -> bool:
    """Whether this user may give a process disks of its own."""
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(folder_apart)]
    try:
        return subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster(folder_apart: Path, may_mount: bool) -> Iterator[None]:
    """A Ray of two nodes with a worker each, for all tests of it: it takes seconds to start."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("PYTHONPATH", ROOT)
        head = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        start = f"exec {Path(sys.executable).parent}/ray start --address={head.address} --num-cpus=1 --block"
        command = ["sh", "-c", start]
        if may_mount:
            mount = f"mount -t tmpfs none '{folder_apart}'"
            command = ["unshare", "-m", "sh", "-c", f"{mount} && {start}"]
        second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ray.init(
                address=head.address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
            )
            until = time.monotonic() + NODE_WITHIN
            while sum(bool(node["Alive"]) for node in ray.nodes()) < 2:
                assert time.monotonic() < until, "the second node does not come up"
                time.sleep(0.1)  # there is no event of a node that joins
            yield
        finally:
            ray.shutdown()
            second.terminate()
            second.wait()
            head.shutdown()


@pytest.mark.guarantee("ray-same-bytes")
@pytest.mark.filterwarnings(*WARNINGS)
def test_a_worker_of_a_cluster_that_is_killed_is_replaced(cluster: None, tmp_path: Path) -> None:
    check_that_a_killed_worker_is_replaced(tmp_path, "ray")


@pytest.mark.guarantee("units-shards-functions", "ray-same-bytes")
@pytest.mark.filterwarnings(*WARNINGS)
def test_a_cluster_makes_the_same_bytes(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "in.jsonl", 800)
    options: dict[str, Any] = {
        "tokenizer": "bytes",
        "shard_bytes": 40_000,
        "shuffle_seed": 1,
        "format": "zst",
    }
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 20_000)
    inputs = [str(tmp_path / "in.jsonl")]
    convert(inputs, str(tmp_path / "local" / "web"), workers=1, **options)
    report = convert(inputs, str(tmp_path / "ray" / "web"), backend="ray", **options)
    assert report.documents == 800
    assert digest(tmp_path / "ray") == digest(tmp_path / "local")


@pytest.mark.guarantee("ray-machine-see")
@pytest.mark.filterwarnings(*WARNINGS)
def test_a_machine_that_does_not_see_the_work_folder_or_an_input_fails_its_first_task(
    cluster: None,
    folder_apart: Path,
    may_mount: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not may_mount:
        pytest.skip("needs the right to mount")
    monkeypatch.setattr(
        "streammega.convert.job.MAX_UNIT_BYTES", 100
    )  # so that both machines get units
    shared = tmp_path / "shared"
    apart = folder_apart
    shared.mkdir()
    for folder in (shared, apart):
        (folder / "in.jsonl").write_text('{"text": "text"}\n' * 40)
    options: dict[str, Any] = {"tokenizer": "bytes", "backend": "ray"}
    for source, output, work, words in (
        (shared, shared, str(apart / "work"), "the work folder .*apart.*--work-dir"),
        (shared, apart, None, "the work folder .*apart"),
        (apart, shared, None, "the input .*in.jsonl cannot be read there"),
    ):
        with pytest.raises(
            ConvertError, match=f"this machine of the cluster cannot take part: .*{words}"
        ):
            convert([str(source / "in.jsonl")], str(output / "web"), work_dir=work, **options)
    convert([str(shared / "in.jsonl")], str(shared / "web"), **options)
    assert verify(str(shared / "web")).problems == []
    assert sorted(path.name for path in shared.iterdir()) == [
        "in.jsonl",
        "web.bin",
        "web.idx",
        "web.manifest.json",
    ]
