"""What a loader serves to Prometheus while it runs: tokens by dataset, and waits that go on."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.errors import ConfigError
from streammega.loading import stats as loader_stats
from streammega.samples.gather import Gatherer
from streammega.train.config import load_run
from streammega.train.devices import ProcessInfo, metrics_port_of
from tests.support.builders import write_dataset, write_small_run

LENGTH = 16
SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Two datasets whose ids tell them apart."""
    for number, name in enumerate(("web", "code")):
        write_dataset(tmp_path / name, [np.arange(4000) % 100 + 100 * number])
    return DataConfig(
        blend=[(f"{tmp_path}/web", 3), (f"{tmp_path}/code", 1)],
        sequence_length=LENGTH,
        order="stream",
        split="1,0,0",
        shuffle_lanes=8,
        shuffle_block_bytes=256,
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
    )


def scrape(loader: StreamLoader) -> dict[str, float]:
    assert loader.metrics_address is not None
    with urllib.request.urlopen(loader.metrics_address) as answer:
        text = answer.read().decode()
    lines = re.findall(r"^(streammega_\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


@pytest.mark.guarantee("stats-log-prometheus")
@pytest.mark.parametrize("taken", [1, 3, 100, 150])
def test_tokens_are_counted_by_dataset_as_batches_are_handed_out(
    config: DataConfig, taken: int
) -> None:
    with StreamLoader(config, **SIZES, metrics_port=0) as loader:
        tokens = {"web": 0, "code": 0}
        for _ in range(taken):
            for row in loader.take()["tokens"].tolist():
                tokens["code" if row[0] >= 100 else "web"] += LENGTH
        stats = loader.stats()
        assert stats["source_tokens"] == {name: count for name, count in tokens.items() if count}
        assert stats["batches"] == taken
        assert stats["tokens"] == taken * 2 * LENGTH
        served = scrape(loader)
        assert served['streammega_tokens_total{dp_rank="0"}'] == taken * 2 * LENGTH
        for name, count in stats["source_tokens"].items():
            line = f'streammega_source_tokens_total{{dp_rank="0",source="{name}"}}'
            assert served[line] == count
        loader.seek(0)
        loader.take()
        assert loader.stats()["tokens"] == (taken + 1) * 2 * LENGTH, "over all iterations"


def test_a_context_parallel_rank_counts_the_tokens_that_it_keeps(config: DataConfig) -> None:
    with StreamLoader(config, **SIZES, ids_only=True, cp_rank=1, cp_size=2) as loader:
        for _ in range(10):
            loader.take()
        assert loader.stats()["tokens"] == 10 * 2 * LENGTH // 2


def test_of_many_datasets_the_last_are_counted_together(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_stats, "MAX_SOURCES", 2)
    root = Path(config.storage.cache_dir or "").parent
    write_dataset(root / "math", [np.arange(4000)])
    blend = [(f"{root}/{name}", 1) for name in ("web", "code", "math")]
    with StreamLoader(replace(config, blend=blend), **SIZES) as loader:
        for _ in range(60):
            loader.take()
        counted = loader.stats()["source_tokens"]
    assert set(counted) == {"web", "others"}
    assert counted["others"] > counted["web"]


def test_a_wait_is_counted_while_it_goes_on_and_never_falls(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = Gatherer.gather
    may_go_on = threading.Event()

    def gather_late(*arguments: Any) -> Any:
        assert may_go_on.wait(60)
        return gather(*arguments)

    monkeypatch.setattr(Gatherer, "gather", gather_late)
    with StreamLoader(config, **SIZES) as loader:
        caller = threading.Thread(target=loader.take)
        caller.start()
        waited = [0.0]
        while waited[-1] < 0.05:
            waited.append(loader.stats()["wait_total"])
            time.sleep(0.001)
        assert 0 < loader.stats()["stall_share"] <= 1
        may_go_on.set()
        caller.join()
        waited += [loader.stats()["wait_total"] for _ in range(3)]
        assert waited == sorted(waited)
        assert waited[-1] == waited[-2], "the wait has ended"


def test_ranks_of_a_machine_have_ports_one_after_the_other() -> None:
    assert metrics_port_of(None, ProcessInfo(3, 4, 3, 4)) is None
    assert metrics_port_of(9400, ProcessInfo(11, 16, 3, 8)) == 9403
    assert metrics_port_of(9400, ProcessInfo(5, 8, None, 1)) == 9405, "no launcher numbers them"
    with pytest.raises(ConfigError, match="rank 3 would serve on 65536; the largest port is 65535"):
        metrics_port_of(65533, ProcessInfo(3, 4, 3, 4))


def test_the_trainer_serves_its_training_loader(tmp_path: Path) -> None:
    import torch

    from streammega.train.trainer import Trainer

    write_dataset(tmp_path / "web", [np.arange(100)] * 200)
    path = write_small_run(tmp_path, str(tmp_path / "web"))
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        free = reserved.getsockname()[1]
    trainer = Trainer(load_run(path, [f"train.metrics_port={free}"]), torch.device("cpu"))
    try:
        trainer.train_step()
        address = f"http://127.0.0.1:{free}/metrics"
        assert trainer.loader.metrics_address == address
        assert scrape(trainer.loader)['streammega_tokens_total{dp_rank="0"}'] > 0
    finally:
        trainer.close()


def test_a_group_of_batches_is_waited_for_once() -> None:
    stats = loader_stats.Stats()
    for batches in (1, 2, 1):
        group = loader_stats.TakenGroup(np.zeros(batches, np.int64), LENGTH, batches, 0)
        stats.group_delivered(group, 1.0)
    assert list(stats.waits) == [1.0, 1.0, 0.0, 1.0]
