"""gs:// and az://: what reaches obstore, and the stores' contract against what can be run here.

gs://: obstore speaks Google's XML API, which is S3's but for the signature, so that moto answers
it: no emulator of Google's. az://: against Azurite, which is installed by npm alone. By hand:
`azurite-blob --inMemoryPersistence --skipApiVersionCheck`, then
`STREAMMEGA_AZURITE=http://127.0.0.1:10000 pytest tests/storage/test_clouds.py`.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.storage import Store
from streammega.storage.backends.obstore import ObstoreStore
from streammega.storage.backends.s3_options import cloud_arguments
from tests.storage.test_storage import StoreContract
from tests.support.builders import write_random_pair
from tests.support.servers import S3
from tests.support.typed import all_tokens

AZURITE = os.environ.get("STREAMMEGA_AZURITE", "")
ACCOUNT = "devstoreaccount1"  # Azurite's own, which it documents
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@pytest.mark.guarantee("options-gcsfs-adlfs")
@pytest.mark.parametrize(
    ("scheme", "options", "made"),
    [
        (
            "gs",
            {
                "anon": True,
                "endpoint_url": "http://127.0.0.1:4443",
                "project": "p",
                "use_listings_cache": False,
            },
            {"skip_signature": True, "base_url": "http://127.0.0.1:4443"},
        ),
        ("gs", {"token": "anon"}, {"skip_signature": True}),
        (
            "gs",
            {"token": "/keys/service.json"},
            {"application_credentials": "/keys/service.json"},
        ),
        ("gs", {"token": "google_default"}, {}),
        (
            "gs",
            {"token": {"client_email": "a"}},
            {"service_account_key": json.dumps({"client_email": "a"})},
        ),
        (
            "az",
            {"account_name": "a", "account_key": "k", "endpoint_url": "https://host/a"},
            {"account_name": "a", "account_key": "k", "endpoint": "https://host/a"},
        ),
    ],
)
def test_options_of_gcsfs_and_adlfs_reach_obstore(
    scheme: str, options: dict[str, Any], made: dict[str, Any]
) -> None:
    assert cloud_arguments(scheme, StorageConfig(storage_options=options))["config"] == made


@pytest.mark.guarantee("options-gcsfs-adlfs")
@pytest.mark.parametrize(
    ("endpoint", "plain"),
    [("http://127.0.0.1:10000/a", True), ("https://host", False), (None, False)],
)
def test_plain_http_is_spoken_only_where_the_endpoint_asks_for_it(
    endpoint: str | None, plain: bool
) -> None:
    for scheme in ("gs", "az"):
        made = cloud_arguments(
            scheme, StorageConfig(storage_options={"endpoint_url": endpoint} if endpoint else {})
        )
        assert made["client_options"]["allow_http"] is plain


class CloudContract(StoreContract):
    """The contract of every store, and a pair written and read."""

    @pytest.fixture
    def key(self) -> str:
        return "folder/object"

    @pytest.mark.guarantee("gs-holds-contract")
    def test_large_uploads_are_whole(self, store: Store, key: str) -> None:
        writer = store.open_writer(key)
        for number in range(66):
            writer.write(bytes([number]) * (1 << 20))
        writer.commit()
        assert store.info(key).size == 66 << 20
        assert bytes(store.read(key, [((33 << 20) - 2, (33 << 20) + 2)])[0]) == b"\x20\x20\x21\x21"

    @pytest.mark.guarantee("gs-holds-contract")
    def test_pairs_are_written_and_read(self, store: ObstoreStore, tmp_path: Path) -> None:
        sequences = write_random_pair(str(tmp_path / "pair"), count=20)
        prefix = f"{store.scheme}://{store.root}/pair"
        with IndexedDatasetWriter(prefix, np.uint16, storage=store._config) as writer:
            writer.add_index(str(tmp_path / "pair"))
        remote = IndexedDataset(prefix, store._config)
        for stored, sequence in zip(all_tokens(remote), sequences, strict=True):
            np.testing.assert_array_equal(stored, sequence)


@pytest.mark.parametrize("s3", ["moto"], indirect=True)
class TestGoogleThroughMoto(CloudContract):
    @pytest.fixture
    def conditions(self) -> set[str]:
        return set()  # moto knows none of Google's

    @pytest.fixture
    def store(self, s3: S3) -> Store:
        # without hyphens, which obstore encodes in Google's paths and moto does not decode
        name = f"gs{os.urandom(6).hex()}"
        s3.client().create_bucket(Bucket=name)
        options = {"endpoint_url": s3.endpoint, "bearer_token": "not-looked-at"}
        return ObstoreStore("gs", name, StorageConfig(storage_options=options).tuned(max_retries=1))


@pytest.mark.skipif(not AZURITE, reason="Azurite is installed by npm; see the head of this file")
class TestAzureThroughAzurite(CloudContract):
    @pytest.fixture
    def store(self) -> Store:
        container = f"c-{os.urandom(6).hex()}"
        make_container(container)
        options = {
            "endpoint_url": f"{AZURITE}/{ACCOUNT}",
            "account_name": ACCOUNT,
            "account_key": ACCOUNT_KEY,
        }
        return ObstoreStore(
            "az", container, StorageConfig(storage_options=options).tuned(max_retries=1)
        )


def make_container(name: str) -> None:
    """By Azure's shared-key signature, since obstore makes no containers."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    own = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = f"PUT{chr(10) * 12}{own}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    headers |= {
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(
        f"{AZURITE}/{ACCOUNT}/{name}?restype=container", headers=headers, method="PUT"
    )
    urllib.request.urlopen(request, timeout=10).close()
