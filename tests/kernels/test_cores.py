"""How many cores a process may use: its affinity, and the quotas of its control groups."""

import os
from pathlib import Path

import pytest

from streammega import kernels
from streammega.kernels import cpu_quota, num_threads

V2 = {"cpu.max": "{} 100000"}
V1 = {"cpu.cfs_quota_us": "{}", "cpu.cfs_period_us": "100000"}


def write_group(folder: Path, files: dict[str, str], quota: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(value.format(quota) + "\n")


@pytest.mark.guarantee("cpu-quota")
@pytest.mark.parametrize(
    ("of_process", "folder", "files"),
    [
        ("0::/", "", V2),  # a container of version 2, which sees its own group alone
        ("0::/pods/one/web", "pods/one/web", V2),  # a host
        ("0::/pods/one/web", "pods/one", V2),  # a quota of a group above
        ("3:cpuset:/\n4:cpu,cpuacct:/", "cpu", V1),  # version 1
        ("4:cpuacct,cpu:/pods/one\n0::/", "cpu/pods/one", V1),
        ("4:cpu:/docker/0123", "cpu", V1),  # a container that sees its group as the root
    ],
)
@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000", 2), ("150000", 2), ("1000", 1), ("6400000", 64)],
)
def test_a_quota_of_a_control_group_is_found(
    of_process: str, folder: str, files: dict[str, str], quota: str, cores: int, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(of_process + "\n")
    write_group(tmp_path / "fs" / folder, files, quota)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") == cores


def test_the_smallest_quota_counts(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/pods/one/web\n")
    for folder, quota in (("pods", "300000"), ("pods/one", "max"), ("pods/one/web", "800000")):
        write_group(tmp_path / "fs" / folder, V2, quota)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") == 3


@pytest.mark.parametrize(
    ("of_process", "files", "quota"),
    [
        ("0::/", V2, "max"),
        ("4:cpu,cpuacct:/", V1, "-1"),
        ("0::/../../elsewhere", V2, "max"),  # of a process that another container's tools started
        ("0::/", {"cpu.max": ""}, ""),
        ("", {}, ""),
        ("what is this", {}, ""),
    ],
)
def test_no_quota_is_no_limit(
    of_process: str, files: dict[str, str], quota: str, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(of_process + "\n")
    for folder in ("", "cpu"):
        write_group(tmp_path / "fs" / folder, files, quota)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") is None
    assert cpu_quota(tmp_path / "missing", tmp_path / "fs") is None


@pytest.mark.guarantee("cpu-quota")
def test_threads_are_as_many_as_affinity_and_quota_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for quota, threads in ((None, 8), (3, 3), (64, 8)):
        monkeypatch.setattr(kernels, "cpu_quota", lambda quota=quota: quota)
        assert num_threads() == threads
