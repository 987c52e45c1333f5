"""What `storage_options` and the environment become for oss://: endpoints, regions, credentials,
and their renewal.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from streammega import StorageConfig
from streammega.errors import AccessDeniedError, ConfigError, EndpointError
from streammega.storage.backends import oss_credentials
from streammega.storage.backends.oss import OssStore, oss_endpoint
from streammega.storage.backends.oss_credentials import OssCredentials, OssKey, key_of
from streammega.storage.backends.s3_options import s3_arguments
from tests.support.servers import http_server

FIXED = {"key": "LTAIfixed0000", "secret": "fixed-secret"}


@pytest.mark.guarantee("buckets-named-host")
@pytest.mark.parametrize(
    ("given", "native", "s3", "region"),
    [
        ("oss-cn-hangzhou.aliyuncs.com", "https://oss-cn-hangzhou.aliyuncs.com",
         "https://web.s3.oss-cn-hangzhou.aliyuncs.com", "cn-hangzhou"),
        ("http://oss-cn-hangzhou-internal.aliyuncs.com/", "http://oss-cn-hangzhou-internal.aliyuncs.com",
         "http://web.s3.oss-cn-hangzhou-internal.aliyuncs.com", "cn-hangzhou"),
        ("https://s3.oss-ap-southeast-1.aliyuncs.com", "https://oss-ap-southeast-1.aliyuncs.com",
         "https://web.s3.oss-ap-southeast-1.aliyuncs.com", "ap-southeast-1"),
        ("web.oss-us-west-1.aliyuncs.com", "https://oss-us-west-1.aliyuncs.com",
         "https://web.s3.oss-us-west-1.aliyuncs.com", "us-west-1"),
        ("oss-accelerate.aliyuncs.com", "https://oss-accelerate.aliyuncs.com", "https://web.s3.oss-accelerate.aliyuncs.com", ""),
        ("oss-accelerate-overseas.aliyuncs.com", "https://oss-accelerate-overseas.aliyuncs.com",
         "https://web.s3.oss-accelerate-overseas.aliyuncs.com", ""),
        ("cn-hongkong.oss.aliyuncs.com", "https://cn-hongkong.oss.aliyuncs.com",
         "https://web.cn-hongkong.oss.aliyuncs.com", "cn-hongkong"),
        ("vpc100-oss-cn-beijing.aliyuncs.com", "https://vpc100-oss-cn-beijing.aliyuncs.com",
         "https://web.vpc100-oss-cn-beijing.aliyuncs.com", "cn-beijing"),
        ("oss-cn-local-d01.ops.example.com:8080", "https://oss-cn-local-d01.ops.example.com:8080",
         "https://web.oss-cn-local-d01.ops.example.com:8080", "cn-local-d01"),
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000", "http://127.0.0.1:9000", ""),
        ("http://localhost:9000", "http://localhost:9000", "http://localhost:9000", ""),
    ],
)  # fmt: skip
def test_endpoints_of_all_kinds_lead_to_both_dialects(
    given: str, native: str, s3: str, region: str
) -> None:
    found = oss_endpoint("web", {"endpoint": given}, {})
    assert (found.native_url, found.s3_url("web"), found.region) == (native, s3, region)


@pytest.mark.guarantee("region-comes-option")
def test_the_region_alone_names_the_public_endpoint_and_an_explicit_one_wins() -> None:
    assert (
        oss_endpoint("b", {"region": "oss-cn-beijing"}, {}).native_url
        == "https://oss-cn-beijing.aliyuncs.com"
    )
    assert oss_endpoint("b", {}, {"OSS_REGION": "cn-beijing"}).region == "cn-beijing"
    named = {"endpoint": "oss-cn-hangzhou.aliyuncs.com"}
    assert oss_endpoint("b", named, {"OSS_REGION": "cn-beijing"}).region == "cn-hangzhou"
    assert oss_endpoint("b", named | {"region": "cn-other"}, {}).region == "cn-other"
    environment = {"OSS_ENDPOINT": "oss-accelerate.aliyuncs.com", "OSS_REGION": "cn-beijing"}
    assert oss_endpoint("b", {}, environment).region == "cn-beijing"
    assert (
        oss_endpoint("b", {"endpoint_url": "oss-cn-wuhan.aliyuncs.com"}, environment).region
        == "cn-wuhan"
    )


def test_a_missing_or_impossible_endpoint_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"oss://web: no endpoint.*OSS_ENDPOINT"):
        oss_endpoint("web", {}, {})
    for wrong in (
        "ftp://oss-cn-x.aliyuncs.com",
        "https://host/path",
        "https://user:hunter2secret@host",
        "https://",
    ):
        with pytest.raises(ConfigError, match="no http") as caught:
            oss_endpoint("web", {"endpoint": wrong}, {})
        assert "hunter2" not in str(caught.value)


def arguments_of(config: StorageConfig) -> dict[str, Any]:
    return OssStore("oss", "web", config)._s3_arguments()


@pytest.mark.guarantee("settings-aws-obstore")
def test_options_become_arguments_for_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    options = FIXED | {"endpoint": "oss-cn-hangzhou-internal.aliyuncs.com", "token": "sts-token"}
    config = StorageConfig(storage_options=options)
    made = arguments_of(config)
    assert made["config"]["endpoint"] == "https://web.s3.oss-cn-hangzhou-internal.aliyuncs.com"
    assert made["config"]["virtual_hosted_style_request"] is True
    assert made["config"]["region"] == "cn-hangzhou"
    assert made["client_options"]["allow_http"] is False
    told = made["credential_provider"]()
    assert (told["access_key_id"], told["secret_access_key"], told["token"]) == (
        *FIXED.values(),
        "sts-token",
    )
    address = arguments_of(
        StorageConfig(storage_options={"endpoint": "http://127.0.0.1:9", "anon": True})
    )
    assert address["config"]["virtual_hosted_style_request"] is False, (
        "an address has no sub-domains"
    )
    assert address["config"]["skip_signature"] is True
    with pytest.raises(ConfigError, match="endpoint_ulr"):
        arguments_of(StorageConfig(storage_options={"endpoint_ulr": "x", "anon": True}))
    for name, value in (
        ("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms"),
        ("AWS_CHECKSUM_ALGORITHM", "SHA256"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=f"{name} is set"):
            patch.setenv(name, value)
            arguments_of(config)


@pytest.mark.guarantee("anonymous-reads-environment")
def test_options_of_ossfs_that_are_not_used_are_taken_and_certificates_are(tmp_path: Path) -> None:
    unused = {
        "use_listings_cache": False,
        "default_block_size": 1 << 20,
        "default_cache_type": "none",
    }
    endpoint = {"endpoint": "oss-cn-hangzhou.aliyuncs.com", "anon": True}
    made = arguments_of(StorageConfig(storage_options=endpoint | unused))
    assert not set(unused) & set(made["config"])
    assert "allow_invalid_certificates" not in made["client_options"]
    for verify, name, value in (
        (False, "allow_invalid_certificates", True),
        (str(tmp_path / "ca"), "root_certificate", b"pem"),
    ):
        (tmp_path / "ca").write_bytes(b"pem")
        given = StorageConfig(storage_options=endpoint | {"client_kwargs": {"verify": verify}})
        assert arguments_of(given)["client_options"][name] == value


def credential(options: dict[str, Any]) -> OssKey:
    made = OssCredentials.of("web", options)
    assert made is not None
    return made.current()


class Wrapped:
    """As oss2's and alibabacloud_credentials' providers and keys are."""

    def get_credentials(self) -> Any:
        return self

    def get_access_key_id(self) -> str:
        return "LTAIwrapped"

    def get_access_key_secret(self) -> str:
        return "wrapped-secret"

    def get_security_token(self) -> str:
        return "wrapped-token"


@pytest.mark.guarantee("anonymous-reads-environment")
def test_credentials_come_from_options_files_functions_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        AccessDeniedError, match=r"oss://web: no credentials found; set OSS_ACCESS_KEY_ID"
    ):
        credential({})
    assert OssCredentials.of("web", {"anon": True}) is None
    answer = {
        "AccessKeyId": "LTAIuri",
        "AccessKeySecret": "u",
        "SecurityToken": "t",
        "Expiration": "2099-01-01T00:00:00Z",
    }
    with http_server({"/role": json.dumps(answer).encode()}) as server:
        monkeypatch.setenv("ALIBABA_CLOUD_CREDENTIALS_URI", f"{server.url}/role")
        found = credential({})
        assert (found.access_key_id, found.token) == ("LTAIuri", "t")
        assert found.expires == datetime(2099, 1, 1, tzinfo=UTC)
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "LTAIalibaba")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "a")
    monkeypatch.setenv("ALIBABA_CLOUD_SECURITY_TOKEN", "alibaba-token")
    assert credential({}) == OssKey(
        access_key_id="LTAIalibaba", access_key_secret="a", token="alibaba-token"
    )
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "LTAIoss")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "o")
    assert credential({}) == OssKey(access_key_id="LTAIoss", access_key_secret="o")
    monkeypatch.setenv("OSS_SECURITY_TOKEN", "oss-token")
    assert credential({}).token == "oss-token"
    path = tmp_path / "sts.json"
    path.write_text(json.dumps({"Credentials": answer | {"AccessKeyId": "LTAIfile"}}))
    assert credential({"credentials_file": str(path)}).access_key_id == "LTAIfile"
    assert (
        credential(
            {"credentials_provider": lambda: {"key": "LTAIcall", "secret": "c"}}
        ).access_key_id
        == "LTAIcall"
    )
    assert credential({"credentials_provider": Wrapped()}).token == "wrapped-token"
    assert credential(FIXED).access_key_id == FIXED["key"], (
        "what is given is taken, whatever the environment holds"
    )


def test_half_given_and_contradicting_credentials_are_refused(tmp_path: Path) -> None:
    for options in ({"key": "only"}, {"secret": "only"}):
        with pytest.raises(ConfigError, match="both 'key' and 'secret'") as caught:
            OssCredentials.of("web", options)
        assert "only" not in str(caught.value).replace("only one", "")
    with pytest.raises(ConfigError, match="give one of them"):
        OssCredentials.of("web", FIXED | {"credentials_file": "x"})
    with pytest.raises(ConfigError, match="must be a function"):
        credential({"credentials_provider": "name"})
    with pytest.raises(AccessDeniedError, match="gives no credentials"):
        credential({"credentials_provider": dict})
    with pytest.raises(AccessDeniedError, match=r"none.json: the credentials cannot be read"):
        credential({"credentials_file": str(tmp_path / "none.json")})
    with pytest.raises(ConfigError, match="which is no time"):
        key_of(FIXED | {"expires": "soon"}, "the file")


@pytest.mark.guarantee("credentials-expire-read")
def test_credentials_are_read_again_before_they_expire_and_when_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oss_credentials, "LEAST_PAUSE", 0.0)
    given: list[Any] = []
    keys = iter(range(100))

    def read() -> dict[str, Any]:
        if given:
            raise given.pop()
        return {"key": f"LTAI{next(keys)}", "secret": "s", "expires": time.time() + 60}

    made = OssCredentials.of("web", {"credentials_provider": read})
    assert made is not None
    assert made.current().access_key_id == "LTAI0"
    assert made.current().access_key_id == "LTAI1", "less than the margin is left of it"
    given.append(OSError("the service is away"))
    assert made.current().access_key_id == "LTAI1", "what is still valid is used on"
    refused = OssKey(access_key_id="LTAI0", access_key_secret="s")
    assert made.renew(refused) is True, "another thread has renewed it"
    given.append(OSError("the service is away"))
    with pytest.raises(EndpointError, match="cannot be read again") as caught:
        made.renew(made._key)  # type: ignore[arg-type]
    assert caught.value.transient
    fixed = OssCredentials.of("web", FIXED)
    assert fixed is not None
    assert fixed.renew(fixed.current()) is False


@pytest.mark.guarantee("fixed-read-again")
def test_what_is_not_fixed_is_read_again_every_five_minutes_and_two_before_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    calls = []
    expires = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def read() -> dict[str, Any]:
        calls.append(1)
        return {"key": "LTAI", "secret": "s", "expires": expires[0]}

    for lasts, looks in (
        (None, [1, 1, 2]),
        (3600.0, [1, 1, 2]),
        (150.0, [1, 1, 2]),
        (100.0, [1, 2, 3]),
    ):
        expires[0] = time.time() + lasts if lasts else 0.0
        calls.clear()
        made = OssCredentials.of("web", {"credentials_provider": read})
        assert made is not None
        for seconds, number in zip((0.0, 299.0, 2.0), looks, strict=True):
            now[0] += seconds
            made.current()
            assert len(calls) == number, (lasts, seconds)
    fixed = OssCredentials.of("web", FIXED)
    assert fixed is not None
    fixed.current()
    now[0] += 10**6
    assert fixed.current().access_key_id == FIXED["key"]


@pytest.mark.guarantee("credentials-cloud-never")
def test_neither_cloud_is_sent_the_others_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAaws")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret")
    with pytest.raises(AccessDeniedError, match="OSS_ACCESS_KEY_ID"):
        credential({})
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
