"""`streammega doctor` against good and bad servers: what it finds, what it advises, and that it ends."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import StorageConfig, StreamLoader
from streammega.apps import checks
from streammega.apps.doctor import examination_text
from streammega.cli.main import main
from streammega.storage import open_store
from streammega.train.config import load_run
from tests.project.test_security import Tls
from tests.support.builders import write_dataset, write_random_pair, write_run_file
from tests.support.oss_server import Oss
from tests.support.servers import KEY, S3, SECRET, HttpObjects, http_server, rclone_server
from tools.bench.object_server import Running, running

SECONDS = 60.0
"""None of these servers is waited for so long; a busy machine may make them late."""


@pytest.fixture(autouse=True)
def _measure_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And wait for the answers, however slow this machine is just now."""
    monkeypatch.setattr(checks, "MAX_ROW_SECONDS", 0.3)
    monkeypatch.setattr(checks, "MAX_LATE_SECONDS", SECONDS)
    monkeypatch.setattr(checks, "SLOW_BYTES_PER_SECOND", 0.0)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run the command on a URL: (exit code, the finding of each check by its name, the report)."""

    def run(
        url: str, *words: str, transport: str = "auto", **options: Any
    ) -> tuple[int, dict[str, Any], dict[str, Any]]:
        storage = tmp_path / "storage.toml"
        write_storage(storage, options, transport=transport)
        command = ["doctor", url, "--json", "--seconds", str(SECONDS), *words]
        code = main([*command, "--storage-file", str(storage)])
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err
        assert "Traceback" not in printed.err
        report = json.loads(printed.out)
        return code, {item["check"]: item for item in report["checks"]}, report

    return run


def write_storage(path: Path, options: dict[str, Any], **settings: Any) -> None:
    """A file for --storage-file."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    lines.append("[storage_options]")
    for name, value in options.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = f"{{{', '.join(f'{key} = {json.dumps(v)}' for key, v in value.items())}}}"
        lines.append(f"{name} = {text}")
    path.write_text("\n".join(lines))


def status_of(findings: dict[str, Any]) -> dict[str, str]:
    return {name: item["status"] for name, item in findings.items() if item["status"] != "ok"}


def put_pair(s3: S3, folder: Path, tokens: int = 1_000_000) -> str:
    """A dataset in a new bucket; returns the bucket."""
    bucket = s3.new_bucket()
    write_dataset(folder / "web", [np.arange(tokens) % 1000])
    for name in ("web.bin", "web.idx"):
        s3.objects(bucket)[name] = (folder / name).read_bytes()
    return bucket


@pytest.mark.guarantee("doctor-names-faults", "doctor-writes-nothing")
def test_a_good_server_has_no_fault_and_conditional_writes_leave_nothing(
    moto: S3, tmp_path: Path, examine: Any
) -> None:
    bucket = put_pair(moto, tmp_path)
    code, findings, report = examine(f"s3://{bucket}/web", "--write", **moto.options)
    assert code == 0
    assert report["faults"] == 0
    assert not report["not_checked"]
    for name in ("credentials", "endpoint", "clock", "listing", "ranges", "ETags", "throttling",
                 "latency", "conditional writes", "cache_dir", "ulimit -n", "/dev/shm",
                 "versions", "GPU"):  # fmt: skip
        assert name in findings
    assert findings["conditional writes"]["status"] == "ok"
    assert sorted(moto.objects(bucket)) == ["web.bin", "web.idx"]
    assert report["hidden_options"] == ["key", "secret"]
    assert any(rate["requests"] for rate in report["requests"])


@pytest.mark.guarantee("doctor-writes-nothing")
def test_without_write_nothing_is_written(moto: S3, tmp_path: Path, examine: Any) -> None:
    bucket = put_pair(moto, tmp_path, tokens=1000)
    with_versions = {"Bucket": bucket, "VersioningConfiguration": {"Status": "Enabled"}}
    moto.client().put_bucket_versioning(**with_versions)
    code, findings, report = examine(f"s3://{bucket}/web", **moto.options)
    assert code == 0
    assert "conditional writes" not in findings
    assert "--write" in report["not_checked"][0]
    versions = moto.client().list_object_versions(Bucket=bucket)
    assert "DeleteMarkers" not in versions
    assert {item["Key"] for item in versions["Versions"]} == {"web.bin", "web.idx"}


@pytest.mark.guarantee("doctor-names-faults")
def test_ranges_answered_with_200_and_no_conditional_writes(tmp_path: Path, examine: Any) -> None:
    """rclone has both."""
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    write_dataset(tmp_path / "root" / "bucket" / "web", [np.arange(100_000) % 1000])
    with rclone_server(tmp_path / "root") as s3:
        code, findings, _ = examine("s3://bucket/web", **s3.options)
        assert code == 1
        assert "set transport='fsspec'" in findings["reading"]["result"]
        code, findings, _ = examine("s3://bucket/web", "--write", transport="fsspec", **s3.options)
        left = list(s3.objects("bucket"))
    assert code == 0, findings
    assert "conditional writes" in status_of(findings)
    assert "no two conversions" in findings["conditional writes"]["remedy"]
    assert left == ["web.bin", "web.idx"]


@pytest.mark.guarantee("doctor-names-faults")
@pytest.mark.parametrize(
    ("transport", "words"), [("auto", "transport='fsspec'"), ("fsspec", "does not serve ranges")]
)
def test_a_server_without_ranges_is_a_fault(transport: str, words: str, examine: Any) -> None:
    with http_server({"/bucket/web.bin": bytes(10_000)}) as server:
        server.answer_range = lambda data, first, last: (200, "", data)
        code, findings, _ = examine(f"{server.url}/bucket/web", transport=transport)
    assert code == 1
    assert findings["reading"]["status"] == "fault"
    assert words in findings["reading"]["result"]


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ({("HEAD", "ETag"), ("HEAD", "Last-Modified")}, "neither ETag nor Last-Modified"),
        ({("HEAD", "ETag")}, "Last-Modified alone"),
        ({("GET", "ETag")}, "answers to range requests have no ETag"),
    ],
)
def test_answers_without_versions_are_warned_of(
    left_out: set[tuple[str, str]], words: str, examine: Any
) -> None:
    with http_server({"/web.bin": bytes(10_000)}) as server:
        server.left_out = left_out
        code, findings, _ = examine(f"{server.url}/web.bin")
    assert code == 0
    assert words in findings["ETags"]["result"]


@pytest.mark.guarantee("doctor-names-faults")
def test_wrong_credentials_are_named_by_the_servers_code(tmp_path: Path, examine: Any) -> None:
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with rclone_server(tmp_path / "root") as s3:
        options = s3.options | {"key": "AKIAWRONGKEY0000"}
        code, findings, report = examine("s3://bucket/web", **options)
    assert code == 1
    assert status_of(findings) == {"access": "fault"}
    assert "InvalidAccessKeyId" in findings["access"]["result"]
    assert findings["endpoint"]["status"] == "ok"
    assert "reading: first mend: access" in report["not_checked"]


@pytest.mark.guarantee("doctor-names-faults")
def test_no_credentials_are_a_fault_beside_what_is_known_of_the_server(
    server: Running, examine: Any
) -> None:
    code, findings, _ = examine("s3://data/web", endpoint_url=server.endpoint)
    assert code == 1
    assert status_of(findings) == {"credentials": "fault"}
    assert findings["endpoint"]["status"] == "ok"


def test_a_profile_that_does_not_exist_is_named(
    server: Running, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    code, findings, _ = examine("s3://data/web", endpoint_url=server.endpoint)
    assert code == 1
    assert status_of(findings) == {"credentials": "fault"}
    assert "absent" in findings["credentials"]["result"]


def test_temporary_credentials_that_nothing_renews_are_warned_of(
    server: Running, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", SECRET)
    _, findings, _ = examine("s3://data/web", endpoint_url=server.endpoint)
    assert status_of(findings)["credentials"] == "warning"
    assert "environment variables" in findings["credentials"]["result"]


def test_credentials_of_a_container_tell_their_end(
    server: Running, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{server.endpoint}/-/credentials"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
    _, findings, _ = examine("s3://data/web", endpoint_url=server.endpoint)
    assert findings["credentials"]["status"] == "ok"
    assert "the role of this container, valid until" in findings["credentials"]["result"]


@pytest.mark.guarantee("doctor-names-faults")
@pytest.mark.parametrize(
    ("endpoint", "check", "words"),
    [
        ("http://127.0.0.1:1", "endpoint", "refused"),
        ("http://no-such-host.invalid:9000", "DNS", "no-such-host.invalid"),
    ],
)
def test_no_server_is_one_fault(endpoint: str, check: str, words: str, examine: Any) -> None:
    options = {"endpoint_url": endpoint, "key": KEY, "secret": SECRET}
    code, findings, report = examine("s3://bucket/web", **options)
    assert code == 1
    assert status_of(findings) == {check: "fault"}
    assert words in findings[check]["result"]
    assert f"data: first mend: {check}" in report["not_checked"]
    assert "run's file" not in examination_text(report), "nothing was measured"


def test_a_server_that_accepts_and_never_answers_ends_in_time(examine: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint_url": endpoint, "anon": True}
        began = time.monotonic()
        code, findings, _ = examine("s3://bucket/web", "--seconds", "5", **options)
    assert time.monotonic() - began < 60, "a server is tried for ten minutes elsewhere"
    assert code == 1
    assert "timed out" in findings["endpoint"]["result"]


@pytest.mark.guarantee("doctor-names-faults")
def test_a_check_that_does_not_end_is_left(
    tmp_path: Path, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(os, "scandir", lambda _: end.wait() and iter(()))
    try:
        code, findings, report = examine(str(tmp_path), "--seconds", "3")
    finally:
        end.set()
    assert code == 1
    assert "no end within" in findings["data"]["result"]
    assert any(reason.startswith("reading: ") for reason in report["not_checked"])
    assert "ulimit -n" in findings


@pytest.fixture
def http_objects() -> Iterator[HttpObjects]:
    with http_server({"/web.bin": bytes(10_000)}) as server:
        yield server


@pytest.mark.guarantee("doctor-names-faults")
@pytest.mark.parametrize(("behind", "status"), [(1000, "fault"), (-300, "warning"), (5, "ok")])
def test_a_clock_that_differs_from_the_servers_is_named(
    behind: int,
    status: str,
    http_objects: HttpObjects,
    examine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = BaseHTTPRequestHandler.date_time_string

    def wrong(handler: Any, timestamp: Any = None) -> str:
        return right(handler, time.time() + behind)

    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", wrong)
    code, findings, _ = examine(f"{http_objects.url}/web.bin")
    assert findings["clock"]["status"] == status
    assert code == (status == "fault")
    if status != "ok":
        assert ("behind" if behind > 0 else "ahead of") in findings["clock"]["result"]


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Tls]:
    server = Tls(tmp_path)
    yield server
    server.close()


def test_a_certificate_that_is_not_known_says_what_to_set(tls: Tls, examine: Any) -> None:
    options: dict[str, Any] = {"key": KEY, "secret": SECRET, "endpoint_url": tls.url}
    code, findings, _ = examine("s3://bucket/web.bin", **options)
    assert code == 1
    assert findings["TLS"]["status"] == "fault"
    assert "verify" in findings["TLS"]["remedy"]
    options["client_kwargs"] = {"verify": tls.certificate}
    _, findings, report = examine("s3://bucket/web.bin", **options)
    assert findings["TLS"]["status"] == "warning", "it ends tomorrow"
    assert report["storage"]["storage_options"]["client_kwargs"] == options["client_kwargs"]


@pytest.mark.guarantee("doctor-settings-used")
def test_the_settings_that_are_printed_are_a_part_of_a_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Far storage, and fewer requests at once than it needs."""
    (tmp_path / "root" / "data").mkdir(parents=True)
    write_dataset(tmp_path / "root" / "data" / "web", [np.arange(300_000) % 1000])
    storage = tmp_path / "storage.toml"
    with running(tmp_path / "root", latency=0.05) as far:
        write_storage(storage, far.storage_options, max_concurrent_requests=2)
        command = ["doctor", "s3://data/web", "--seconds", str(SECONDS)]
        assert main([*command, "--storage-file", str(storage)]) == 0
        printed = capsys.readouterr().out
        assert "warning  requests in flight" in printed
        section = printed[printed.index("[data.storage]") :]
        run_file = write_run_file(
            tmp_path,
            data={"blend": ["s3://data/web"], "order": "stream", "split": "1,0,0"},
            train={"train_iters": 1},
            **{"data.storage": {"cache_dir": None}},
        )
        with open(run_file, "a") as file:
            file.write(section)
        config = load_run(run_file)
        assert config.data.storage.max_concurrent_requests >= 32
        assert dict(config.data.storage.storage_options) == far.storage_options
        with StreamLoader(config.data, micro_batch_size=2, global_batch_size=8) as loader:
            assert next(loader)["tokens"].shape == (2, 16)


def test_a_server_that_is_late_though_near_is_told_from_a_far_one(
    server: Running, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "REQUESTS", checks.REQUESTS[:1])
    server.behave(latency=2.0)
    _, findings, _ = examine("s3://data/web", **server.storage_options)
    assert findings["latency"]["status"] == "warning"
    assert "it is near but answers late" in findings["latency"]["remedy"]


def test_passwords_of_urls_are_not_shown(
    http_objects: HttpObjects, examine: Any, moto: S3, tmp_path: Path
) -> None:
    """`examine` looks for it in all that is printed."""
    with_password = http_objects.url.replace("//", f"//user:{SECRET}@")
    code, findings, _ = examine(f"{with_password}/web.bin")
    assert code == 0
    assert findings["credentials"]["result"] == "the URL"
    bucket = put_pair(moto, tmp_path, tokens=1000)
    endpoint = moto.endpoint.replace("//", f"//user:{SECRET}@")
    options = moto.options | {"endpoint_url": endpoint}
    _, findings, report = examine(f"s3://{bucket}/web", **options)
    assert findings["endpoint"]["status"] == "ok"
    assert "endpoint_url" in report["hidden_options"]


@pytest.mark.guarantee("doctor-names-faults")
def test_refusals_are_counted_and_limit_requests(server: Running, examine: Any) -> None:
    server.behave(rate=5, burst=2)
    code, findings, _ = examine("s3://data/web", **server.storage_options)
    assert code == 0
    assert status_of(findings)["throttling"] == "warning"
    assert "a second were answered" in findings["throttling"]["result"]


@pytest.mark.guarantee("doctor-names-faults")
def test_a_server_that_refuses_every_request_is_named(server: Running, examine: Any) -> None:
    server.behave(error_share=1.0)
    code, findings, report = examine("s3://data/web", "--seconds", "8", **server.storage_options)
    assert code == 1
    assert status_of(findings) == {"throttling": "fault"}
    assert "too many requests" in findings["throttling"]["result"]
    assert "stop other jobs on this bucket" in findings["throttling"]["remedy"]
    assert "bandwidth: first mend: throttling" in report["not_checked"]


def test_a_bucket_of_another_region_is_named(moto: S3, examine: Any) -> None:
    there = {"LocationConstraint": "eu-west-3"}
    moto.client().create_bucket(Bucket="in-paris", CreateBucketConfiguration=there)
    code, findings, report = examine("s3://in-paris/web", **moto.options)
    assert code == 1
    assert findings["region"]["status"] == "warning", "a server of another make may not mind"
    assert "eu-west-3" in findings["region"]["result"]
    options = report["storage"]["storage_options"]
    assert options["client_kwargs"] == {"region_name": "eu-west-3"}


def test_oss_is_examined_in_its_own_dialect(oss: Oss, examine: Any, tmp_path: Path) -> None:
    bucket = oss.new_bucket()
    store, key = open_store(f"oss://{bucket}/web.bin", StorageConfig(storage_options=oss.options))
    store.put(key, bytes(100_000))
    code, findings, _ = examine(f"oss://{bucket}/web", **oss.options)
    assert code == 0
    assert "through the proxy 127.0.0.1" in findings["endpoint"]["result"]
    assert findings["region"]["result"] == "cn-nowhere"
    assert findings["ETags"]["status"] == "ok"
    code, findings, _ = examine(f"oss://{bucket}/web", **oss.options | {"secret": "another"})
    assert code == 1
    assert "SignatureDoesNotMatch" in findings["access"]["result"]


@pytest.mark.guarantee("doctor-names-faults")
def test_a_local_folder_is_examined_and_a_full_cache_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "data" / "web", [np.arange(300_000) % 1000])
    (tmp_path / "storage.toml").write_text(f'cache_dir = "{tmp_path}/cache"')
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 29))
    command = ["doctor", str(tmp_path / "data"), "--write", "--json", "--seconds", str(SECONDS)]
    assert main([*command, "--storage-file", str(tmp_path / "storage.toml")]) == 0
    report = json.loads(capsys.readouterr().out)
    findings = {item["check"]: item for item in report["checks"]}
    assert status_of(findings) == dict.fromkeys(["cache_dir", "/dev/shm"], "warning")
    assert findings["conditional writes"]["status"] == "ok"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["web.bin", "web.idx"]
    assert report["storage"] == {"cache_dir": str(tmp_path / "cache")}


@pytest.mark.guarantee("doctor-names-faults")
def test_a_cache_folder_that_is_a_fault_is_not_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "web", [np.arange(1000)])
    write_storage(tmp_path / "storage.toml", {}, cache_dir="/proc/nothing", request_timeout=7.0)
    command = ["doctor", str(tmp_path / "web"), "--json", "--seconds", str(SECONDS)]
    assert main([*command, "--storage-file", str(tmp_path / "storage.toml")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert any(item["check"] == "cache_dir" for item in report["checks"][: report["faults"]])
    assert report["storage"] == {"request_timeout": 7.0}


def test_a_gpu_without_its_torch_and_a_low_limit_of_files_are_named(
    tmp_path: Path, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    versions = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name, "1.0"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    write_dataset(tmp_path / "web", [np.arange(1000)])
    code, findings, _ = examine(str(tmp_path / "web"))
    assert code == 1
    assert status_of(findings) == {"GPU": "fault", "ulimit -n": "warning"}
    assert "2 x NVIDIA H100" in findings["GPU"]["result"]
    versions["torch"] = "2.13.0"
    code, findings, _ = examine(str(tmp_path / "web"))
    assert code == 0
    assert findings["GPU"]["result"] == "2 x NVIDIA H100"


def test_a_disk_that_fails_is_a_fault(
    tmp_path: Path, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", str(tmp_path))

    monkeypatch.setattr(os, "scandir", fail)
    code, findings, _ = examine(str(tmp_path))
    assert code == 1
    assert "Input/output error" in findings["data"]["result"]


def test_a_folder_without_data_is_a_fault(tmp_path: Path, examine: Any) -> None:
    (tmp_path / "nothing").mkdir()
    code, findings, _ = examine(str(tmp_path / "nothing"))
    assert code == 1
    assert "no object to read" in findings["data"]["result"]


def test_an_empty_bucket_is_no_fault_and_may_be_written(moto: S3, examine: Any) -> None:
    code, findings, report = examine(f"s3://{moto.new_bucket()}", "--write", **moto.options)
    assert (code, report["faults"]) == (0, 0)
    assert findings["data"]["result"] == "the bucket is empty"
    assert findings["conditional writes"]["status"] == "ok"
    assert report["not_checked"] == [
        "reading: there is no object to read",
        "bandwidth: there is no object to read",
    ]


@pytest.mark.guarantee("doctor-orders-findings")
def test_worst_first_and_measured_gains_before_others(server: Running, examine: Any) -> None:
    server.behave(rate=5, burst=2)
    temporary = {"endpoint_url": server.endpoint, "key": KEY, "secret": SECRET, "token": "t" * 20}
    _, _, report = examine("s3://data/web", **temporary)
    names = [item["check"] for item in report["checks"] if item["status"] == "warning"]
    assert names.index("throttling") < names.index("credentials")
    statuses = [item["status"] for item in report["checks"]]
    assert statuses == sorted(statuses, key=["fault", "warning", "ok"].index)


@pytest.mark.guarantee("doctor-takes-run")
def test_a_run_is_examined_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_pair(str(tmp_path / "web"), count=50)
    blend = [f"{tmp_path}/web", f"{tmp_path}/web", "s3://other/a", "s3://other/b"]
    run = write_run_file(tmp_path, data={"blend": blend}, train={"train_iters": 2})
    command = ["doctor", run, "--json", "--seconds", str(SECONDS)]
    assert main([*command, f"data.storage.cache_dir={tmp_path}/index"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["url"] == f"{tmp_path}/web"
    results = {item["check"]: item["result"] for item in report["checks"]}
    assert results["cache_dir"].startswith(f"{tmp_path}/index: ")
    assert "data elsewhere: `streammega doctor s3://other/a`" in report["not_checked"]
    assert not any("s3://other/b" in reason for reason in report["not_checked"])
    assert main([*command, "data.storage.cache_dir=/proc/nothing"]) == 1, "the storage of the run"
    capsys.readouterr()
    assert main([*command, "--storage", "key=value"]) == 1
    assert "run.toml has this setting" in capsys.readouterr().err
    assert main(["doctor", blend[0], "data.seed=1"]) == 1
    assert "settings are for a run's file" in capsys.readouterr().err
