"""What SECURITY.md says and no test of a room shows."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.config.storage import Tuning
from streammega.convert.work_dir import WorkDir
from streammega.errors import AccessDeniedError, FormatError, StorageError
from streammega.storage import open_store
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import load_run
from streammega.train.trainer import Trainer
from tests.support.builders import write_dataset, write_manifest, write_run_file

FAST: dict[str, Any] = {"request_timeout": 5, "_tuning": Tuning(max_retries=0)}


class Tls:
    """A server with a certificate that nobody has signed but itself. asked: the paths of requests."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                for name, value in {"Content-Length": "4", "ETag": '"1"'}.items():
                    self.send_header(name, value)
                self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.certificate = str(folder / "certificate.pem")
        key = str(folder / "key.pem")
        write_certificate(Path(self.certificate), Path(key))
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def write_certificate(certificate: Path, key_file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now - day).not_valid_after(now + day)
    made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    signed = made.sign(key, hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Tls]:
    server = Tls(tmp_path)
    yield server
    server.close()


@pytest.mark.guarantee("tls-verified")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_a_certificate_that_nobody_signed_is_refused_unless_it_is_given(
    tls: Tls, transport: Any
) -> None:
    options: dict[str, Any] = {"key": "key", "secret": "any-secret", "endpoint_url": tls.url}
    for url, given in (("s3://bucket/web.bin", options), (f"{tls.url}/web.bin", {})):
        storage = StorageConfig(transport=transport, storage_options=given, **FAST)
        store, key = open_store(url, storage)
        with pytest.raises(StorageError, match="did not answer"):
            store.info(key)
    assert tls.asked == []
    options["client_kwargs"] = {"verify": tls.certificate}
    storage = StorageConfig(transport=transport, storage_options=options, **FAST)
    store, key = open_store("s3://bucket/web.bin", storage)
    assert store.info(key).size == 4
    assert tls.asked == ["/bucket/web.bin"]


@pytest.mark.guarantee("credentials-cloud-never")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_keys_of_oss_are_no_keys_of_s3(monkeypatch: pytest.MonkeyPatch, transport: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    for family in ("OSS", "ALIBABA_CLOUD"):
        monkeypatch.setenv(f"{family}_ACCESS_KEY_ID", "LTAIkey")
        monkeypatch.setenv(f"{family}_ACCESS_KEY_SECRET", "secret")
    options = {"endpoint_url": "http://127.0.0.1:1"}
    storage = StorageConfig(transport=transport, storage_options=options, **FAST)
    with pytest.raises(AccessDeniedError):
        IndexedDataset("s3://bucket/web", storage)


@pytest.mark.guarantee("sizes-before-memory")
@pytest.mark.parametrize(
    ("sequences", "documents"), [(1 << 40, 2), (1, 1 << 40), (1 << 62, 1 << 62)]
)
def test_an_index_that_claims_sequences_it_has_not_takes_no_memory(
    tmp_path: Path, sequences: int, documents: int
) -> None:
    prefix = write_dataset(tmp_path / "web", [np.arange(9)])
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[18:34] = struct.pack("<QQ", sequences, documents)
    Path(f"{prefix}.idx").write_bytes(index)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            IndexedDataset(prefix)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 22


def remove_checkpoints(folder: Path, link: Callable[[Path], None]) -> None:
    """Three steps, of which the newest checkpoint is kept; links as folders of files."""
    write_dataset(folder / "pair", [np.arange(40) for _ in range(40)])
    run = write_run_file(
        folder,
        data={"blend": [f"{folder}/pair"], "order": "stream", "split": "1,0,0"},
        train={"train_iters": 3, "save_interval": 1, "keep_checkpoints": 1},
    )
    link(folder / "run" / "checkpoints" / "step-00000001-0a0a0a0a")
    trainer = Trainer(load_run(run), torch.device("cpu"))
    trainer.run()
    trainer.close()
    store = CheckpointStore.open(str(folder / "run"), StorageConfig())
    assert store.steps() == [3]


def remove_work(folder: Path, link: Callable[[Path], None]) -> None:
    link(folder / "work" / "unit-0-0")
    WorkDir(str(folder / "work"), StorageConfig()).remove()


def clear_a_cache(folder: Path, link: Callable[[Path], None]) -> None:
    link(folder / "cache" / "chunks" / "0123456789abcdef")
    assert main(["cache", "clear", str(folder / "cache")]) == 0


def collect_garbage(folder: Path, link: Callable[[Path], None]) -> None:
    write_dataset(folder / "set" / "web", [np.arange(40)])
    write_manifest(folder / "set" / "web", ["web"])
    link(folder / "set" / "web-gen0123456789ab-00000")
    link(folder / "set" / ".web.removed")
    assert main(["gc", str(folder / "set" / "web"), "--remove", "--older-than", "0"]) == 0


@pytest.mark.guarantee("links-not-removed")
@pytest.mark.parametrize(
    "remove", [remove_checkpoints, remove_work, clear_a_cache, collect_garbage]
)
def test_what_removes_files_follows_no_link_to_a_folder(
    tmp_path: Path, remove: Callable[[Path, Callable[[Path], None]], None]
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    names = ("a.bin", "__0_0.distcp", "tensors.json", "object.json", "0.data", "unit-0.json")
    for name in names:
        (others / name).write_bytes(b"of others")

    def link(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(others)

    (tmp_path / "here").mkdir()
    remove(tmp_path / "here", link)
    assert sorted(path.name for path in others.iterdir()) == sorted(names)
