"""What `storage_options` and the environment become for oss://: endpoints, regions, credentials,
and their renewal.
"""

from __future__ import annotations

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from streammega import StorageConfig
from streammega.errors import AccessDeniedError, ConfigError, EndpointError
from streammega.storage.backends.oss import oss_arguments, oss_endpoint
from streammega.storage.backends.oss_credentials import OssCredentials, OssKey
from streammega.storage.backends.s3_options import s3_arguments
from streammega.storage.open import open_store
from tests.support.servers import http_server

FIXED = {"key": "LTAIfixed0000", "secret": "fixed-secret"}


@pytest.mark.guarantee("buckets-named-host")
@pytest.mark.parametrize(
    ("given", "url", "region"),
    [
        ("oss-cn-hangzhou.aliyuncs.com", "https://web.s3.oss-cn-hangzhou.aliyuncs.com", "cn-hangzhou"),
        ("http://oss-cn-hangzhou-internal.aliyuncs.com/", "http://web.s3.oss-cn-hangzhou-internal.aliyuncs.com", "cn-hangzhou"),
        ("https://s3.oss-ap-southeast-1.aliyuncs.com", "https://web.s3.oss-ap-southeast-1.aliyuncs.com", "ap-southeast-1"),
        ("web.oss-us-west-1.aliyuncs.com", "https://web.s3.oss-us-west-1.aliyuncs.com", "us-west-1"),
        ("oss-accelerate.aliyuncs.com", "https://web.s3.oss-accelerate.aliyuncs.com", ""),
        ("oss-accelerate-overseas.aliyuncs.com", "https://web.s3.oss-accelerate-overseas.aliyuncs.com", ""),
        ("cn-hongkong.oss.aliyuncs.com", "https://web.cn-hongkong.oss.aliyuncs.com", "cn-hongkong"),
        ("vpc100-oss-cn-beijing.aliyuncs.com", "https://web.vpc100-oss-cn-beijing.aliyuncs.com", "cn-beijing"),
        ("oss-cn-local-d01.ops.example.com:8080", "https://web.oss-cn-local-d01.ops.example.com:8080", "cn-local-d01"),
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000/web", ""),
        ("http://localhost:9000", "http://localhost:9000/web", ""),
    ],
)  # fmt: skip
def test_endpoints_of_all_kinds_lead_to_the_bucket(given: str, url: str, region: str) -> None:
    found = oss_endpoint("web", {"endpoint": given}, {})
    assert (found.bucket_url("web"), found.region) == (url, region)


@pytest.mark.guarantee("region-comes-option")
@pytest.mark.parametrize(
    ("options", "environment", "host", "region"),
    [
        ({"region": "oss-cn-beijing"}, {}, "oss-cn-beijing.aliyuncs.com", "cn-beijing"),
        ({}, {"OSS_REGION": "cn-beijing"}, "oss-cn-beijing.aliyuncs.com", "cn-beijing"),
        ({"endpoint": "oss-cn-wuhan.aliyuncs.com"}, {"OSS_REGION": "cn-beijing"}, "", "cn-wuhan"),
        ({"endpoint": "oss-cn-wuhan.aliyuncs.com", "region": "cn-x"}, {}, "", "cn-x"),
        ({}, {"OSS_ENDPOINT": "oss-accelerate.aliyuncs.com", "OSS_REGION": "cn-y"}, "", "cn-y"),
        ({"endpoint_url": "oss-cn-a.aliyuncs.com"}, {"OSS_ENDPOINT": "oss-cn-b.x"}, "", "cn-a"),
    ],
)
def test_the_region_alone_names_the_public_endpoint_and_an_explicit_one_wins(
    options: dict[str, str], environment: dict[str, str], host: str, region: str
) -> None:
    found = oss_endpoint("b", options, environment)
    assert found.region == region
    assert host in ("", found.host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "oss://web: no endpoint"),
        ({"endpoint": "ftp://oss-cn-x.aliyuncs.com"}, "no http"),
        ({"endpoint": "https://host/path"}, "no http"),
        ({"endpoint": "https://user:hunter2secret@host"}, "no http"),
        ({"endpoint": "https://"}, "no http"),
    ],
)
def test_a_missing_or_impossible_endpoint_says_what_to_set(
    options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        oss_endpoint("web", options, {})
    assert ("OSS_ENDPOINT" in str(caught.value)) == (not options)
    assert "hunter2" not in str(caught.value)


def arguments_of(**options: Any) -> dict[str, Any]:
    return oss_arguments("web", StorageConfig(storage_options=options), os.environ)


@pytest.mark.guarantee("settings-aws-obstore")
def test_options_become_arguments_for_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    made = arguments_of(endpoint="oss-cn-hangzhou-internal.aliyuncs.com", **FIXED)
    assert made["config"]["endpoint"] == "https://web.s3.oss-cn-hangzhou-internal.aliyuncs.com"
    assert made["config"]["virtual_hosted_style_request"] is True
    assert made["config"]["region"] == "cn-hangzhou"
    assert made["client_options"]["allow_http"] is False
    address = arguments_of(endpoint="http://127.0.0.1:9", anon=True)["config"]
    assert address["virtual_hosted_style_request"] is False, "an address has no sub-domains"
    assert address["skip_signature"] is True
    with pytest.raises(ConfigError, match="endpoint_ulr"):
        arguments_of(endpoint_ulr="x", anon=True)
    for name in ("AWS_SERVER_SIDE_ENCRYPTION", "AWS_CHECKSUM_ALGORITHM"):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=f"{name} is set"):
            patch.setenv(name, "SHA256")
            arguments_of(endpoint="oss-cn-hangzhou.aliyuncs.com", **FIXED)


@pytest.mark.guarantee("anonymous-reads-environment")
def test_options_of_ossfs_that_are_not_used_are_taken_and_certificates_are(tmp_path: Path) -> None:
    unused: dict[str, Any] = {
        "use_listings_cache": False,
        "default_block_size": 1 << 20,
        "default_cache_type": "none",
    }
    endpoint: dict[str, Any] = {"endpoint": "oss-cn-hangzhou.aliyuncs.com", "anon": True}
    made = arguments_of(**endpoint, **unused)
    assert not set(unused) & set(made["config"])
    assert "allow_invalid_certificates" not in made["client_options"]
    (tmp_path / "ca").write_bytes(b"pem")
    for verify, name, value in (
        (False, "allow_invalid_certificates", True),
        (str(tmp_path / "ca"), "root_certificate", b"pem"),
    ):
        made = arguments_of(**endpoint, client_kwargs={"verify": verify})
        assert made["client_options"][name] == value


def credentials_of(**options: Any) -> OssCredentials:
    credentials = OssCredentials.from_options("web", options)
    assert credentials is not None
    return credentials


class Wrapped:
    """As providers and keys of Alibaba's SDKs are."""

    def get_credentials(self) -> Any:
        return self

    def get_access_key_id(self) -> str:
        return "LTAIwrapped"

    def get_access_key_secret(self) -> str:
        return "wrapped-secret"

    def get_security_token(self) -> str:
        return "wrapped-token"


ALIBABA = {
    "ALIBABA_CLOUD_ACCESS_KEY_ID": "LTAIalibaba",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "a",
    "ALIBABA_CLOUD_SECURITY_TOKEN": "alibaba-token",
}
OSS = {"OSS_ACCESS_KEY_ID": "LTAIoss", "OSS_ACCESS_KEY_SECRET": "o"}
ANSWER = {
    "AccessKeyId": "LTAIanswer",
    "AccessKeySecret": "u",
    "SecurityToken": "t",
    "Expiration": "2099-01-01T00:00:00Z",
}


@pytest.mark.guarantee("anonymous-reads-environment")
@pytest.mark.parametrize(
    ("options", "environment", "key_id", "token"),
    [
        ({}, ALIBABA, "LTAIalibaba", "alibaba-token"),
        ({}, ALIBABA | {"ALIBABA_CLOUD_CREDENTIALS_URI": "SERVER"}, "LTAIalibaba", "alibaba-token"),
        ({}, ALIBABA | OSS, "LTAIoss", ""),
        ({}, ALIBABA | OSS | {"OSS_SESSION_TOKEN": "session"}, "LTAIoss", "session"),
        ({}, OSS | {"OSS_SECURITY_TOKEN": "security"}, "LTAIoss", "security"),
        (FIXED, ALIBABA | OSS, FIXED["key"], ""),
        (FIXED | {"token": "own"}, OSS, FIXED["key"], "own"),
        ({"credentials_provider": lambda: {"key": "LTAIcall", "secret": "c"}}, OSS, "LTAIcall", ""),
        ({"credentials_provider": Wrapped()}, OSS, "LTAIwrapped", "wrapped-token"),
        ({"credentials_file": "FILE"}, OSS, "LTAIanswer", "t"),
        ({}, {"ALIBABA_CLOUD_CREDENTIALS_URI": "SERVER"}, "LTAIanswer", "t"),
    ],
)
def test_credentials_come_from_options_files_functions_and_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    environment: dict[str, str],
    key_id: str,
    token: str,
) -> None:
    """What is given is taken, whatever the environment holds."""
    path = tmp_path / "sts.json"
    path.write_text(json.dumps({"Credentials": ANSWER}))
    with http_server({"/role": json.dumps(ANSWER).encode()}) as server:
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("SERVER", f"{server.url}/role"))
        if "credentials_file" in options:
            options = {"credentials_file": str(path)}
        found = credentials_of(**options).current()
    assert (found.access_key_id, found.token) == (key_id, token)
    temporary = datetime(2099, 1, 1, tzinfo=UTC) if key_id == "LTAIanswer" else None
    assert found.expires == temporary


def test_no_credentials_are_read_for_anonymous_access() -> None:
    assert OssCredentials.from_options("web", {"anon": True}) is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, AccessDeniedError, "oss://web: no credentials found; set OSS_ACCESS_KEY_ID"),
        ({"key": "AKIAonly"}, ConfigError, "both 'key' and 'secret'"),
        ({"secret": "only-secret"}, ConfigError, "both 'key' and 'secret'"),
        (FIXED | {"credentials_file": "x"}, ConfigError, "give one of them"),
        ({"credentials_provider": "name"}, ConfigError, "must be a function"),
        ({"credentials_provider": dict}, AccessDeniedError, "gives no credentials"),
        ({"credentials_file": "/none.json"}, AccessDeniedError, "/none.json: the credentials cann"),
        (
            {"credentials_provider": lambda: FIXED | {"expires": "soon"}},
            ConfigError,
            "'soon', which is no time",
        ),
    ],
)
def test_credentials_that_are_incomplete_or_contradict_each_other_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        credentials_of(**options).current()
    assert "only" not in str(caught.value).replace("only one", "")
    assert FIXED["secret"] not in str(caught.value)


@pytest.mark.guarantee("credentials-expire-read")
def test_credentials_are_read_again_when_they_are_refused_and_used_on_when_they_cannot_be() -> None:
    failures: list[Exception] = []
    keys = iter(range(100))

    def read() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return {"key": f"LTAI{next(keys)}", "secret": "s", "expires": time.time() + 60}

    made = credentials_of(credentials_provider=read)
    first = made.current()
    assert made.renew(first) is True
    second = made.current()
    assert [first.access_key_id, second.access_key_id] == ["LTAI0", "LTAI1"]
    failures.append(OSError("the service is away"))
    assert made.current(read_again=True) == second, "what is still valid is used on"
    assert made.renew(first) is True, "another thread has renewed it"
    assert made.current() == second
    failures.append(OSError("the service is away"))
    with pytest.raises(EndpointError, match="cannot be read again") as caught:
        made.renew(second)
    assert caught.value.transient
    fixed = credentials_of(**FIXED)
    assert fixed.renew(fixed.current()) is False


@pytest.mark.guarantee("fixed-read-again")
@pytest.mark.parametrize(
    ("seconds_left", "readings"),
    [(None, [1, 1, 2]), (3600.0, [1, 1, 2]), (150.0, [1, 2, 2]), (100.0, [1, 2, 3])],
)
def test_keys_are_read_again_every_five_minutes_and_two_before_their_end(
    monkeypatch: pytest.MonkeyPatch, seconds_left: float | None, readings: list[int]
) -> None:
    now = [1000.0]
    calls = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def read() -> dict[str, Any]:
        calls.append(1)
        return FIXED | {"expires": time.time() + seconds_left if seconds_left else 0.0}

    made = credentials_of(credentials_provider=read)
    counts = []
    for seconds in (0.0, 299.0, 2.0):
        now[0] += seconds
        made.current()
        made.current()
        counts.append(len(calls))
    assert counts == readings


@pytest.mark.guarantee("credentials-cloud-never")
def test_neither_cloud_is_sent_the_others_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAaws")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret")
    with pytest.raises(AccessDeniedError, match="OSS_ACCESS_KEY_ID"):
        credentials_of().current()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "LTAIoss")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "oss-secret")
    monkeypatch.setenv("OSS_ENDPOINT", "oss-cn-hangzhou.aliyuncs.com")
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
        s3_arguments("web", StorageConfig())
    assert (
        "endpoint"
        not in s3_arguments("web", StorageConfig(storage_options={"anon": True}))["config"]
    )


def test_keys_do_not_show_their_secrets() -> None:
    key = OssKey(access_key_id="LTAI", access_key_secret="hunter2", token="hunter3")
    assert "hunter" not in repr(key)
    assert "OSS_ACCESS_KEY_SECRET" not in os.environ


@pytest.mark.parametrize(
    ("options", "variable", "place"),
    [
        ({}, "oss-cn-hangzhou.aliyuncs.com", "oss://bucket/a"),
        ({}, "https://oss.own.example:9000", "oss://bucket/a at oss.own.example:9000"),
        ({}, "oss.own.example", "oss://bucket/a at oss.own.example"),
        ({"endpoint": "oss.own.example"}, "", "oss://bucket/a at oss.own.example"),
        ({"region": "cn-hangzhou"}, "", "oss://bucket/a"),
    ],
)
def test_buckets_of_one_name_at_two_endpoints_are_two_places(
    options: dict[str, Any], variable: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ETags that were seen at one of them say nothing of the other."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.own.example")
    if variable:
        monkeypatch.setenv("OSS_ENDPOINT", variable)
    for transport in ("obstore", "fsspec"):
        storage: Any = {"transport": transport, "storage_options": {"anon": True, **options}}
        store, _ = open_store("oss://bucket/a/b", StorageConfig(**storage))
        assert store.place("a") == place
