"""One blend over two accounts or endpoints: each URL has the storage of its longest prefix."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.cli.main import main
from streammega.config import load_storage
from streammega.config.storage import Tuning
from streammega.errors import ConfigError, StorageError
from streammega.train.config import load_run
from tests.support.builders import write_random_pair
from tests.support.servers import KEY, S3, moto_server

OTHER_SECRET = "secret-of-the-other-account"
SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}


@pytest.fixture(scope="module")
def servers(moto: S3) -> Iterator[tuple[S3, S3]]:
    """Two endpoints: a bucket `near` on one, `far` on the other."""
    with moto_server() as other:
        for server, bucket in ((moto, "near"), (other, "far")):
            server.client().create_bucket(Bucket=bucket)
            storage = StorageConfig(storage_options=server.options)
            with IndexedDatasetWriter(f"s3://{bucket}/data/web", np.uint16, storage=storage) as out:
                for document in range(40):
                    out.add_item(np.arange(50) + len(bucket) + document)
                    out.end_document()
        yield moto, other


def options_of(server: S3) -> dict[str, Any]:
    return {"key": KEY, "secret": OTHER_SECRET, "endpoint_url": server.endpoint}


def config_of(servers: tuple[S3, S3], order: Any, cache: Path, **settings: Any) -> DataConfig:
    near, far = servers
    return DataConfig(
        **{
            "blend": [("s3://near/data/web", 0.5), ("s3://far/data/web", 0.5)],
            "sequence_length": 16,
            "order": order,
            "num_samples": (100, 0, 0),
            "storage": StorageConfig(storage_options=near.options, cache_dir=cache).tuned(
                max_retries=1
            ),
            "storage_by_prefix": {"s3://far/": StorageConfig(storage_options=options_of(far))},
            **settings,
        }
    )


@pytest.mark.guarantee("blend-several-accounts")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_blend_over_two_endpoints_is_read_and_resumed(
    servers: tuple[S3, S3], tmp_path: Path, order: str
) -> None:
    config = config_of(servers, order, tmp_path)
    with StreamLoader(config, **SIZES) as loader:
        batches = [batch["tokens"].numpy().copy() for batch in loader]
        loader.seek(8)
        state = json.dumps(loader.state_dict())
    assert len(batches) == 50
    with StreamLoader(replace(config, seed=config.seed), **SIZES) as loader:
        loader.load_state_dict(json.loads(state))
        np.testing.assert_array_equal(next(iter(loader))["tokens"].numpy(), batches[4])
    for secret in (OTHER_SECRET, KEY):
        assert secret not in state
        assert secret not in repr(config)
    without = replace(config, storage_by_prefix={})
    with pytest.raises(StorageError, match="far") as caught:
        StreamLoader(without, **SIZES)
    assert OTHER_SECRET not in str(caught.value)


@pytest.mark.guarantee("blend-several-accounts")
def test_the_longest_prefix_wins_and_all_else_is_storage(servers: tuple[S3, S3]) -> None:
    near, far = servers
    by_prefix = {
        "s3://far/": StorageConfig(storage_options=near.options, request_timeout=1.0),
        "s3://far/data/": StorageConfig(storage_options=options_of(far), request_timeout=2.0),
    }
    config = config_of(servers, "stream", Path("unused"), storage_by_prefix=by_prefix)
    for url, timeout in (
        ("s3://far/other", 1.0),
        ("s3://far/data/web.idx", 2.0),
        ("s3://farther/data", 60.0),
        ("/far/data", 60.0),
    ):
        assert config.storage.for_url(url).request_timeout == timeout
    assert config.storage.for_url("s3://far/x").tuning.max_retries == 1, "as all of the loader"
    assert config.storage.for_url("s3://far/x").cache_dir == Path("unused"), "as all of the loader"
    assert (
        replace(config, storage_by_prefix={}).storage.for_url("s3://far/x").request_timeout == 60.0
    )


def test_a_map_style_dataset_keeps_the_settings_of_prefixes(
    servers: tuple[S3, S3], tmp_path: Path
) -> None:
    storage = config_of(servers, "stream", tmp_path).storage
    chunks = SimpleNamespace(path_to_idx_cache=str(tmp_path / "idx"), bin_chunk_nbytes=4 << 20)
    cases: list[dict[str, Any]] = [{}, {"mmap": False}, {"object_storage_config": chunks}]
    for options in cases:
        dataset = IndexedDataset(
            "s3://far/data/web", storage=storage.changed(cache_dir=None), **options
        )
        assert len(dataset) > 0
    far = dataset.storage.for_url("s3://far/data/web")
    assert far.tuning.cache_chunk_bytes == 4 << 20
    assert far.cache_dir == tmp_path / "idx"
    assert list((tmp_path / "idx").rglob("*.idx"))


def test_tuning_is_kept_by_copies_pickles_and_prefixes(
    servers: tuple[S3, S3], tmp_path: Path
) -> None:
    config = config_of(servers, "stream", tmp_path)
    assert config.storage.tuning == Tuning(max_retries=1)
    for storage in (
        config.storage,
        copy.copy(config.storage),
        copy.deepcopy(config.storage),
        pickle.loads(pickle.dumps(config.storage)),  # noqa: S301
        config.storage.changed(retry_timeout=5),
        replace(config, seed=3).storage,
        pickle.loads(pickle.dumps(config)).storage,  # noqa: S301
    ):
        for url in ("s3://near/x", "s3://far/x"):
            assert storage.for_url(url).tuning == Tuning(max_retries=1)
    tuned = config.storage.tuned(read_timeout=2.0)
    for url, server in zip(("s3://near/x", "s3://far/x"), servers, strict=True):
        assert tuned.for_url(url).tuning == Tuning(max_retries=1, read_timeout=2.0)
        options = tuned.for_url(url).storage_options
        assert options["endpoint_url"] == server.endpoint
    assert config.storage.tuning == Tuning(max_retries=1), "it is a copy"


def test_values_of_tuning_are_no_settings(
    servers: tuple[S3, S3], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    write_run(path, servers)
    good = path.read_text()
    for item in fields(Tuning):
        unknown = f"unknown setting {item.name}"
        unknown_ones: dict[str, Any] = {item.name: item.default}
        with pytest.raises(ConfigError, match=unknown):
            StorageConfig(**unknown_ones)
        value = {"local_io": '"mmap"', "max_retries": "3", "hedge_requests": "true"}.get(
            item.name, str(item.default)
        )
        (tmp_path / "storage.toml").write_text(f"{item.name} = {value}\n")
        with pytest.raises(ConfigError, match=unknown):
            load_storage(str(tmp_path / "storage.toml"))
        write_run(path, servers, f"{item.name} = {value}\n")
        with pytest.raises(ConfigError, match=f"unknown setting .*{item.name}"):
            load_run(str(path))
        path.write_text(good)
        with pytest.raises(ConfigError, match=f"unknown setting .*{item.name}"):
            load_run(str(path), [f"data.storage.{item.name}={value}"])
    assert main(["ls", str(tmp_path), "--storage-file", str(tmp_path / "storage.toml")]) == 1
    assert "unknown setting resident_bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("by_prefix", "words"),
    [
        ({"s3://far": StorageConfig()}, r"'s3://far'.*and a slash"),
        ({"/data/": StorageConfig()}, "is no beginning of URLs"),
        ({"s3://far/": {"key": OTHER_SECRET}}, "is a dict; it must be a StorageConfig"),
        (
            {"s3://far/": StorageConfig(max_concurrent_requests=3)},
            "max_concurrent_requests counts for the whole loader",
        ),
        ({"s3://u:secret@far/": {}}, r"s3://\*\*\*@far/"),
    ],
)
def test_what_is_no_storage_of_a_prefix_is_refused(by_prefix: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        DataConfig(blend="x", sequence_length=8, storage_by_prefix=by_prefix)
    assert OTHER_SECRET not in str(caught.value)


def write_run(
    path: Path, servers: tuple[S3, S3], of_prefix: str = "request_timeout = 20\n"
) -> None:
    near, far = servers
    path.write_text(
        '[data]\nblend = ["0.5", "s3://near/data/web", "0.5", "s3://far/data/web"]\n'
        f'sequence_length = 16\norder = "stream"\n'
        f'[data.storage]\ncache_dir = "cache"\n[data.storage.storage_options]\nkey = "{KEY}"\nsecret = "x"\n'
        f'endpoint_url = "{near.endpoint}"\n'
        f'[data.storage_by_prefix."s3://far/"]\n{of_prefix}'
        f'[data.storage_by_prefix."s3://far/".storage_options]\nkey = "{KEY}"\n'
        f'secret = "{OTHER_SECRET}"\nendpoint_url = "{far.endpoint}"\n'
        "[model]\nvocab_size = 50304\n[train]\ntrain_iters = 10\nmicro_batch_size = 1\n"
        'global_batch_size = 2\nout_dir = "out"\n'
    )


@pytest.mark.guarantee("blend-several-accounts")
def test_commands_of_a_run_file_read_both_endpoints(
    servers: tuple[S3, S3],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run.toml"), servers)
    for command in (
        ["describe", "run.toml"],
        ["order-report", "run.toml"],
        ["trace", "run.toml", "--step", "1"],
    ):
        assert main(command) == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        assert OTHER_SECRET not in shown.out + shown.err
    assert OTHER_SECRET not in repr(load_run("run.toml"))


def test_a_mistyped_setting_of_a_prefix_is_named_without_its_value(
    servers: tuple[S3, S3], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    write_run(path, servers, f'request_timout = "{OTHER_SECRET}"\n')
    with pytest.raises(ConfigError, match=r"did you mean .*request_timeout") as caught:
        load_run(str(path))
    assert OTHER_SECRET not in str(caught.value)
    write_run(path, servers, f'request_timeout = "{OTHER_SECRET}"\n')
    with pytest.raises(ConfigError, match="request_timeout") as caught:
        load_run(str(path))
    assert OTHER_SECRET not in str(caught.value)


def test_local_files_stand_beside_them(servers: tuple[S3, S3], tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "local"))
    config = config_of(
        servers, "stream", tmp_path, blend=[str(tmp_path / "local"), "s3://far/data/web"]
    )
    with StreamLoader(config, **SIZES) as loader:
        assert next(iter(loader))["tokens"].shape == (2, 16)
