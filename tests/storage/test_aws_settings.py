"""Settings of AWS that say where requests go are read as botocore reads them."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import botocore.config
import botocore.session
import obstore
import pytest
from obstore.store import S3Store

from streammega import StorageConfig
from streammega.errors import ConfigError, EndpointError
from streammega.storage import open_store
from streammega.storage.backends.s3_options import s3_arguments
from streammega.storage.connection import connection_of
from tests.support.processes import run_python

KEYS = {"key": "AKID", "secret": "unused"}
DIRECTORY_BUCKET = "bucket--usw2-az1--x-s3"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_PROFILE",
        "AWS_CA_BUNDLE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def set_up(
    environment: dict[str, str], profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if profile:
        (tmp_path / "config").write_text(f"[default]\n{profile}\n")


def by_botocore(bucket: str, options: dict[str, Any]) -> tuple[str, str, str, str]:
    """(scheme, host, path, region) of a request of botocore, which is not sent."""
    requests: list[Any] = []

    class NotSent(Exception):
        pass

    def keep(request: Any, **_: Any) -> None:
        requests.append(request)
        raise NotSent

    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=options.get("endpoint_url"),
        region_name=(options.get("client_kwargs") or {}).get("region_name"),
        config=botocore.config.Config(**options.get("config_kwargs", {})),
        aws_access_key_id="AKID",
        aws_secret_access_key="unused",
    )
    client.meta.events.register("before-send.s3", keep)
    with pytest.raises(NotSent):
        client.get_object(Bucket=bucket, Key="folder/key")
    signed = requests[0].headers["Authorization"].decode()
    url = urlsplit(requests[0].url)
    return url.scheme, url.netloc, url.path, signed.partition("Credential=AKID/")[2].split("/")[1]


def by_obstore(bucket: str, options: dict[str, Any]) -> tuple[str, str, str, str]:
    """The same of a request of obstore."""
    made = s3_arguments(bucket, StorageConfig(storage_options={**KEYS, **options}))
    store = S3Store(bucket, **made)
    url = urlsplit(obstore.sign(store, "GET", "folder/key", timedelta(seconds=60)))
    region = parse_qs(url.query)["X-Amz-Credential"][0].split("/")[2]
    return url.scheme, url.netloc, url.path, region


LOCAL = "http://localhost:9000"
SERVICES = f"services = mine\n[services mine]\ns3 =\n  endpoint_url = {LOCAL}"


@pytest.mark.guarantee("aws-settings")
@pytest.mark.parametrize(
    ("environment", "profile", "options", "bucket"),
    [
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, "", {}, "bucket-1"),
        ({"AWS_USE_FIPS_ENDPOINT": "true", "AWS_DEFAULT_REGION": "us-gov-west-1"}, "", {}, "b.c.d"),
        ({}, "use_fips_endpoint = true", {}, "bucket-1"),
        ({}, "", {"config_kwargs": {"use_fips_endpoint": True}}, "bucket-1"),
        ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "region = eu-west-3", {}, "bucket-1"),
        ({}, "use_dualstack_endpoint = true", {}, "b.c.d"),
        ({}, SERVICES, {}, "bucket-1"),
        ({"AWS_ENDPOINT_URL": "http://localhost:1"}, SERVICES, {}, "bucket-1"),
        ({}, f"endpoint_url = {LOCAL}", {}, "bucket-1"),
        (
            {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            f"endpoint_url = {LOCAL}",
            {},
            "bucket-1",
        ),
        ({"AWS_ENDPOINT_URL": LOCAL}, "ignore_configured_endpoint_urls = true", {}, "bucket-1"),
        (
            {"AWS_ENDPOINT_URL": LOCAL},
            "ignore_configured_endpoint_urls = true",
            {"endpoint_url": "http://localhost:2"},
            "bucket-1",
        ),
        ({}, "s3 =\n  addressing_style = virtual", {"endpoint_url": LOCAL}, "bucket-1"),
        ({}, "s3 =\n  addressing_style = path", {}, "bucket-1"),
        ({}, "s3 =\n  use_accelerate_endpoint = true", {}, "bucket-1"),
        ({}, "", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "bucket-1"),
        ({"AWS_DEFAULT_REGION": "cn-north-1"}, "", {}, "bucket-1"),
        ({}, "", {"client_kwargs": {"region_name": "us-iso-east-1"}}, "bucket-1"),
        ({}, "", {"client_kwargs": {"region_name": "us-isob-east-1"}}, "bucket-1"),
        ({}, "region = eusc-de-east-1", {}, "bucket-1"),
        ({}, "", {}, "mine-abcdefghijk-s3alias"),
        (
            {"AWS_ENDPOINT_URL_S3": LOCAL, "AWS_ENDPOINT_URL": "http://localhost:1"},
            "",
            {},
            "bucket-1",
        ),
    ],
)
def test_requests_go_where_botocore_sends_them(
    environment: dict[str, str],
    profile: str,
    options: dict[str, Any],
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up(environment, profile, tmp_path, monkeypatch)
    expected = by_botocore(bucket, options)
    assert by_obstore(bucket, options) == expected
    scheme, host, path, region = expected
    connection = connection_of(f"s3://{bucket}/key", StorageConfig(storage_options=options))
    assert connection.bucket_url == f"{scheme}://{host}{path.removesuffix('/folder/key')}"
    assert connection.region == region


@pytest.mark.guarantee("aws-settings")
@pytest.mark.parametrize(
    ("environment", "profile", "bucket", "message"),
    [
        (
            {"AWS_USE_FIPS_ENDPOINT": "true"},
            "s3 =\n  use_accelerate_endpoint = true",
            "bucket-1",
            r"s3://bucket-1: AWS's settings of where requests go do not fit \(.*FIPS.*; correct them in",
        ),
        ({}, "", DIRECTORY_BUCKET, r"S3 Express .* set transport='fsspec'"),
        (
            {},
            "",
            "arn:aws:s3:us-east-1:123456789012:accesspoint",  # as of arn:...:accesspoint/name
            r"give the alias of the access point",
        ),
        ({"AWS_CA_BUNDLE": "/no/such.pem"}, "", "bucket-1", r"/no/such\.pem: .* AWS_CA_BUNDLE"),
    ],
)
def test_what_cannot_be_followed_is_one_error_that_names_it(
    environment: dict[str, str],
    profile: str,
    bucket: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up(environment, profile, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        s3_arguments(bucket, StorageConfig(storage_options=KEYS))


def test_a_bucket_of_another_server_is_another_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place() -> str:
        store, _ = open_store("s3://bucket-1/key", StorageConfig(storage_options=KEYS))
        return store.place("folder")

    assert place() == "s3://bucket-1/folder"
    set_up({}, SERVICES, tmp_path, monkeypatch)
    assert place() == "s3://bucket-1/folder at localhost:9000"


def test_without_profiles_and_switches_botocore_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from streammega import StorageConfig\n"
        "from streammega.storage.backends.s3_options import s3_arguments\n"
        "s3_arguments('bucket-1', StorageConfig(storage_options={'key': 'a', 'secret': 'b'}))\n"
        "assert 'botocore' not in sys.modules"
    )
    run_python(program)


def certificate(name: str, issuer: Any = None) -> tuple[Any, Any]:
    """(a key, a certificate of it): an authority's, or by one that of localhost."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    issuer_key, issued_by = (key, subject) if issuer is None else (issuer[0], issuer[1].subject)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issued_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return key, made


def pem_of(made: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    if hasattr(made, "subject"):
        pem: bytes = made.public_bytes(serialization.Encoding.PEM)
        return pem
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    of_key: bytes = made.private_bytes(encoding, form, serialization.NoEncryption())
    return of_key


class OneObject(http.server.BaseHTTPRequestHandler):
    """Answers every request with three bytes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(206)
        for name, value in (
            ("Content-Length", "3"),
            ("Content-Range", "bytes 0-2/3"),
            ("ETag", '"a"'),
            ("Last-Modified", "Mon, 30 Nov 2026 10:00:00 GMT"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"abc")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def https_server(folder: Path, key: Any, made: Any) -> Iterator[str]:
    """The URL of a server with a certificate."""
    (folder / "server.pem").write_bytes(pem_of(key) + pem_of(made))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneObject)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.guarantee("aws-settings")
@pytest.mark.parametrize("named_by", ["AWS_CA_BUNDLE", "ca_bundle", "verify"])
def test_certificates_of_the_users_settings_are_trusted(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, other = certificate("authority"), certificate("other")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(pem_of(other[1]) + pem_of(authority[1]))
    with https_server(tmp_path, *certificate("localhost", authority)) as url:
        options: dict[str, Any] = {**KEYS, "endpoint_url": url}
        with pytest.raises(EndpointError, match="UnknownIssuer"):
            read_object(options, timeout=20.0)
        if named_by == "verify":
            options["client_kwargs"] = {"verify": str(bundle)}
        elif named_by == "ca_bundle":
            set_up({}, f"ca_bundle = {bundle}", tmp_path, monkeypatch)
        else:
            set_up({"AWS_CA_BUNDLE": str(bundle)}, "", tmp_path, monkeypatch)
        assert read_object(options, timeout=30.0) == b"abc"


def read_object(options: dict[str, Any], timeout: float) -> bytes:
    """timeout: another one for another client."""
    config = StorageConfig(storage_options=options, transport="obstore", request_timeout=timeout)
    storage = config.tuned(max_retries=0)
    store, key = open_store("s3://bucket-1/key", storage)
    return bytes(store.read(key, [(0, 3)])[0])
