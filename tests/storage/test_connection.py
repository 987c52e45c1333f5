"""Where requests of a URL go and what signs them, as it is told without a request or a secret."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from streammega import StorageConfig
from streammega.errors import AccessDeniedError, ConfigError, StorageError
from streammega.storage import connection_of, credentials_of

SECRET = "never-shown-secret"


def storage(**options: Any) -> StorageConfig:
    return StorageConfig(storage_options=options)


@pytest.mark.parametrize(
    ("url", "options", "environment", "bucket_url", "source", "region"),
    [
        ("s3://b/k", {}, {}, "https://b.s3.us-east-1.amazonaws.com", "the cloud's default",
         "us-east-1"),
        ("s3://b/k", {"client_kwargs": {"region_name": "eu-west-3"}}, {},
         "https://b.s3.eu-west-3.amazonaws.com", "the cloud's default", "eu-west-3"),
        ("s3://b/k", {}, {"AWS_ENDPOINT_URL": "https://h:9", "AWS_DEFAULT_REGION": "x"},
         "https://h:9/b", "AWS_ENDPOINT_URL", "x"),
        ("s3a://b/k", {"endpoint_url": f"https://u:{SECRET}@h:9/"}, {}, "https://h:9/b",
         "storage_options", "us-east-1"),
        ("s3://b/k", {"endpoint_url": "https://h",
                      "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {},
         "https://b.h", "storage_options", "us-east-1"),
        ("oss://b/k", {"endpoint": "oss-cn-hangzhou.aliyuncs.com"}, {},
         "https://b.s3.oss-cn-hangzhou.aliyuncs.com", "storage_options", "cn-hangzhou"),
        ("oss://b/k", {}, {"OSS_REGION": "cn-beijing"},
         "https://b.s3.oss-cn-beijing.aliyuncs.com", "OSS_REGION", "cn-beijing"),
        ("gs://b/k", {}, {}, "https://storage.googleapis.com/b", "the cloud's default", ""),
        ("az://c/k", {"account_name": "acc"}, {}, "https://acc.blob.core.windows.net/c",
         "the cloud's default", ""),
        ("az://c/k", {"endpoint_url": "http://127.0.0.1:10000/acc"}, {},
         "http://127.0.0.1:10000/acc/c", "storage_options", ""),
        (f"https://u:{SECRET}@h:8/k", {}, {}, "https://h:8", "the URL", ""),
        ("/a/path", {}, {}, "", "", ""),
    ],
)  # fmt: skip
def test_where_requests_go(
    url: str,
    options: dict[str, Any],
    environment: dict[str, str],
    bucket_url: str,
    source: str,
    region: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_DEFAULT_REGION", "OSS_REGION", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    connection = connection_of(url, storage(**options))
    assert (connection.bucket_url, connection.source, connection.region) == (
        bucket_url,
        source,
        region,
    )
    assert SECRET not in repr(connection)


def test_an_endpoint_that_is_none_and_a_missing_account_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="no URL"):
        connection_of("s3://b/k", storage(endpoint_url="h:9"))
    with pytest.raises(ConfigError, match="account_name"):
        connection_of("az://c/k", storage())


@pytest.mark.parametrize(
    ("url", "options", "environment", "source", "temporary"),
    [
        ("s3://b/k", {"anon": True}, {}, "anonymous", False),
        ("s3://b/k", {"key": "k", "secret": SECRET}, {}, "storage_options", False),
        ("s3://b/k", {"key": "k", "secret": SECRET, "token": SECRET}, {}, "storage_options", True),
        ("s3://b/k", {}, {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": SECRET},
         "environment variables", False),
        ("oss://b/k", {"key": "k", "secret": SECRET}, {}, "storage_options", False),
        ("oss://b/k", {"anon": True}, {}, "anonymous", False),
        ("oss://b/k", {}, {"OSS_ACCESS_KEY_ID": "k", "OSS_ACCESS_KEY_SECRET": SECRET,
                           "OSS_SESSION_TOKEN": SECRET}, "environment variables", True),
        ("gs://b/k", {"token": "anon"}, {}, "anonymous", False),
        ("gs://b/k", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "/key.json"},
         "GOOGLE_APPLICATION_CREDENTIALS", False),
        ("az://c/k", {"account_key": SECRET}, {}, "storage_options", False),
        (f"https://u:{SECRET}@h/k", {}, {}, "the URL", False),
        ("https://h/k", {}, {}, "anonymous", False),
    ],
)  # fmt: skip
def test_what_signs_requests(
    url: str,
    options: dict[str, Any],
    environment: dict[str, str],
    source: str,
    temporary: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    credentials = credentials_of(url, storage(**options))
    assert credentials is not None
    assert (credentials.source, credentials.is_temporary) == (source, temporary)
    assert SECRET not in repr(credentials)


def test_a_file_of_oss_credentials_tells_its_end_and_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "sts.json"
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    file.write_text(
        json.dumps({"AccessKeyId": "k", "AccessKeySecret": SECRET, "SecurityToken": SECRET,
                    "Expiration": ends})
    )  # fmt: skip
    credentials = credentials_of("oss://b/k", storage(credentials_file=str(file)))
    assert credentials is not None
    assert credentials.source == "credentials_file"
    assert credentials.is_renewed
    assert credentials.expires is not None


def test_no_credentials_and_a_source_that_fails_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for scheme in ("s3", "oss"):
        with pytest.raises(AccessDeniedError, match="no credentials found"):
            credentials_of(f"{scheme}://b/k", storage())
    (tmp_path / "config").write_text("[default]\ncredential_process = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(StorageError, match="credentials could not be"):
        credentials_of("s3://b/k", storage())


def test_what_a_driver_or_a_disk_uses_is_not_known() -> None:
    for url in ("/a/path", "hdfs://h/k"):
        assert credentials_of(url, storage()) is None
        assert connection_of(url, storage()).endpoint == ""
