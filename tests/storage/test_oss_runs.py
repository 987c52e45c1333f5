"""Whole runs on oss://: the stream under faults and expiring credentials, conversion, verification,
training and its resume.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import (
    DataConfig,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    StorageConfig,
    StreamLoader,
)
from streammega.cli.main import main
from streammega.convert import convert
from streammega.errors import AccessDeniedError, ObjectChangedError
from streammega.storage import open_store
from streammega.train.config import load_run
from streammega.train.run_log import read_metrics
from streammega.train.trainer import Trainer
from tests.convert.test_convert import tokenizer as tokenizer
from tests.storage.test_storage import put
from tests.support.builders import write_random_pair, write_small_run
from tests.support.oss_server import KEY, SECRET, Oss
from tests.support.run_hashes import loader_hashes
from tests.support.streams import (
    blend_of,
    check_that_faults_change_no_token,
    config_of,
    impatient,
    stream,
    write_data,
)
from tests.support.typed import tokens

TRANSPORTS = ("obstore", "fsspec")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("local")
    write_data(root)
    return root


@pytest.fixture
def bucket(oss: Oss, local: Path) -> str:
    """A bucket with the datasets data/web and data/code."""
    name = oss.new_bucket()
    for path in (local / "data").iterdir():
        store, key = open_store(
            f"oss://{name}/data/{path.name}", StorageConfig(storage_options=oss.options)
        )
        put(store, key, path.read_bytes())
    return name


def storage_of(oss: Oss, transport: str, **options: Any) -> StorageConfig:
    return impatient(options or oss.options, transport, read_timeout=0.6)


@pytest.mark.guarantee("faults-endpoint-change")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("fault", "order"),
    [
        ("503 bursts", "stream"),
        ("truncation", "stream"),
        ("mixture", "megatron"),  # of all of them
        *(
            pytest.param(fault, "stream", marks=pytest.mark.soak)
            for fault in ("resets", "stalls", "over-long bodies")
        ),
    ],
)
def test_faults_change_no_token(
    oss: Oss, bucket: str, local: Path, tmp_path: Path, fault: str, order: str, transport: str
) -> None:
    remote = config_of(order, f"oss://{bucket}", tmp_path, storage_of(oss, transport), samples=600)
    check_that_faults_change_no_token(oss, remote, local, fault)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_object_that_is_replaced_stops_the_run(
    oss: Oss, bucket: str, tmp_path: Path, transport: str
) -> None:
    config = config_of("stream", f"oss://{bucket}", tmp_path, storage_of(oss, transport))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    batches = iter(loader)
    next(batches)
    store, key = open_store(f"oss://{bucket}/data/web.bin", config.storage)
    put(store, key, bytes(store.info(key).size))
    with pytest.raises(ObjectChangedError, match=r"web\.bin: the object was replaced"):
        list(batches)


def settle(loader: StreamLoader) -> None:
    """Wait until no request is under way: a read that meets two changes of keys is refused twice,
    and ends the run.
    """
    deadline = time.monotonic() + 60
    idle = 0
    while idle < 10 and time.monotonic() < deadline:
        stats = loader.stats()
        idle = idle + 1 if stats["requests_in_flight"] == stats["requests_queued"] == 0 else 0
        time.sleep(0.01)


KEY_LASTS = 50
"""Batches."""


@pytest.mark.guarantee("credentials-expire-read")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_credentials_that_expire_during_a_run_are_replaced(
    oss: Oss, bucket: str, local: Path, tmp_path: Path, transport: str
) -> None:
    path = tmp_path / "sts.json"

    def hand_out(number: int) -> None:
        """The next key; a moment later the server knows no former one."""
        known = {
            f"STS.{n}": {"secret": "s", "token": f"token-{n}"} for n in (number - KEY_LASTS, number)
        }
        oss.know(**known)
        fields = {
            "AccessKeyId": f"STS.{number}",
            "AccessKeySecret": "s",
            "SecurityToken": f"token-{number}",
        }
        (tmp_path / "next").write_text(json.dumps(fields))
        os.replace(tmp_path / "next", path)
        del known[f"STS.{number - KEY_LASTS}"]
        oss.know(**known)

    hand_out(0)
    storage = storage_of(oss, transport, endpoint=oss.endpoint, credentials_file=str(path))
    # a fraction of the data, so that much is left to be read with later keys
    storage = replace(storage, memory_bytes=80_000)
    config = config_of("stream", f"oss://{bucket}", tmp_path, storage, samples=1000)
    got = []
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        for number, batch in enumerate(loader):
            if number and number % KEY_LASTS == 0:
                settle(loader)
                hand_out(number)
            got.append(torch.cat([batch["tokens"], batch["labels"]], 1).clone())
    assert torch.equal(torch.cat(got), stream(replace(config, blend=blend_of(local))))
    seen = {
        request["headers"]["authorization"].split("=")[1].split("/")[0]
        for request in oss.take_log()[-2000:]
    }
    assert len(seen) > 2, "the run lived through several keys"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_refused_credentials_end_the_run_soon(
    oss: Oss, bucket: str, tmp_path: Path, transport: str
) -> None:
    config = config_of("stream", f"oss://{bucket}", tmp_path, storage_of(oss, transport))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    oss.know(other={"secret": "x"})
    began = time.monotonic()
    # s3fs has the server's message without its code.
    with pytest.raises(AccessDeniedError, match=r"InvalidAccessKeyId|Access Key Id you provided"):
        list(loader)
    assert time.monotonic() - began < 20, "the pauses between its tries would last 30 seconds"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_map_style_datasets_pages_and_workers_read_the_same(
    oss: Oss, bucket: str, local: Path, tmp_path: Path, transport: Any
) -> None:
    storage = StorageConfig(transport=transport, storage_options=oss.options)
    remote = IndexedDataset(f"oss://{bucket}/data/web", storage)
    own = IndexedDataset(f"{local}/data/web")
    assert len(remote) == len(own)
    for number in (0, 7, len(own) - 1):
        np.testing.assert_array_equal(tokens(remote, number), tokens(own, number))
    config = config_of("megatron", f"oss://{bucket}", tmp_path, storage)
    assert config.blend is not None
    ours = replace(config, blend=[f"oss://{bucket}/data/web"], num_samples=(64, 0, 0))
    theirs = replace(ours, blend=[f"{local}/data/web"])
    for remote_sample, own_sample in zip(_samples(ours), _samples(theirs), strict=True):
        assert torch.equal(remote_sample, own_sample)
    # A request that is sent again, as on a machine with much to do, goes past the cache: what it
    # brings is on the disk only when the first one is answered, too.
    on_disk = replace(storage, cache_dir=tmp_path / "pages", cache_max_bytes=1 << 30).tuned(
        hedge_requests=False
    )
    cached = replace(config, order="stream", shuffle_lanes=16, storage=on_disk)
    expected = stream(replace(cached, blend=blend_of(local), storage=StorageConfig()))
    assert torch.equal(stream(cached), expected)
    oss.take_log()
    assert torch.equal(stream(cached), expected)
    bodies = [
        request
        for request in oss.take_log()
        if request["method"] == "GET" and "range" in request["headers"]
    ]
    read = [request["path"] for request in bodies if request["path"].endswith(".bin")]
    assert len(read) <= 2 * len(set(read)), "but for the opening the second run reads the disk"
    loader = StreamLoader(replace(cached, storage=storage), micro_batch_size=4, global_batch_size=8)
    workers: Any = torch.utils.data.DataLoader(
        loader.dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    got = torch.cat([torch.cat([batch["tokens"], batch["labels"]], 1) for batch in workers])
    assert torch.equal(got, expected)


def _samples(config: DataConfig) -> Iterator[torch.Tensor]:
    assert config.blend is not None
    dataset = GPTDataset(IndexedDataset(str(config.blend[0]), config.storage), None, 8, config)
    for index in range(8):
        yield torch.as_tensor(dataset[index]["tokens"])


@pytest.mark.guarantee("corpora-datasets-oss")
def test_a_corpus_becomes_a_dataset_within_oss_by_the_command_line(
    oss: Oss, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inputs, shards and manifest all lie in one bucket."""
    bucket = oss.new_bucket()
    texts = [f"document {n} " + "wörd " * (n * 7 % 50) for n in range(300)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    for name, part in (("a.jsonl", lines[:200]), ("b.jsonl.gz", lines[200:])):
        store, key = open_store(
            f"oss://{bucket}/in/{name}", StorageConfig(storage_options=oss.options)
        )
        put(store, key, gzip.compress(b"".join(part)) if name.endswith(".gz") else b"".join(part))
    told = [
        word for name, value in oss.options.items() for word in ("--storage", f"{name}={value}")
    ]
    target = f"oss://{bucket}/out/web"
    words = [
        "convert",
        f"oss://{bucket}/in",
        target,
        "--tokenizer",
        tokenizer,
        "--shard-size",
        "16K",
        "--shuffle",
        *told,
    ]
    assert main(words) == 0, capsys.readouterr().err
    assert main(["verify", target, *told]) == 0, capsys.readouterr().err
    assert main(["describe", target, "--tokenizer", tokenizer, *told]) == 0
    shown = capsys.readouterr()
    assert "300" in shown.out
    assert SECRET not in shown.out + shown.err
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"".join(lines))
    convert([str(tmp_path / "in")], str(tmp_path / "out" / "web"), tokenizer=tokenizer)
    remote = IndexedDataset(target, StorageConfig(storage_options=oss.options))
    own = IndexedDataset(str(tmp_path / "out" / "web"))
    assert sorted(bytes(remote[i]) for i in range(len(remote))) == sorted(
        bytes(own[i]) for i in range(len(own))
    )


@pytest.mark.guarantee("corpora-datasets-oss")
def test_a_run_on_oss_resumes_on_exactly_the_next_token(
    oss: Oss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("ENDPOINT", oss.endpoint),
        ("ACCESS_KEY_ID", KEY),
        ("ACCESS_KEY_SECRET", SECRET),
    ):
        monkeypatch.setenv(f"OSS_{name}", value)
    write_random_pair(str(tmp_path / "pair"))
    prefix = f"oss://{oss.new_bucket()}/pair"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_index(str(tmp_path / "pair"))
    config = load_run(write_small_run(tmp_path, prefix, train_iters=8, eval_interval=100))
    first = Trainer(config, torch.device("cpu"))
    for _ in range(4):
        first.train_step()
        first.step += 1
    first.save()
    second = Trainer(config, torch.device("cpu"))
    second.resume()
    assert second.step == 4
    second.run()
    expected = loader_hashes(config)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {record["step"] for record in records} == set(range(5, 9))
    assert all(record["batch_hash"] == expected[record["step"] - 1] for record in records)
