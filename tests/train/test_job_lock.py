"""Two jobs in one out_dir: on a disk the second is refused; in a bucket none harms a checkpoint of the
other.
"""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from streammega import StorageConfig
from streammega.errors import ConfigError
from streammega.storage.store import create_object
from streammega.train.checkpoints import out_dir
from streammega.train.checkpoints import store as checkpoint_store
from streammega.train.checkpoints.out_dir import lock_file
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import load_run
from streammega.train.trainer import Trainer
from tests.support.builders import write_random_pair, write_run_file
from tests.support.checkpoint_programs import hold
from tests.support.gang import Gang
from tests.support.servers import S3

CPU = torch.device("cpu")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # of metrics
    write_random_pair(str(tmp_path / "pair"))
    return write_run_file(
        tmp_path,
        data={"blend": [f"{tmp_path}/pair"], "order": "stream"},
        train={"train_iters": 6, "save_interval": 2, "device": None},
    )


def is_free(path: Path) -> bool:
    """Whether another process could lock a file."""
    try:
        with filelock.FileLock(path, timeout=0):
            return True
    except filelock.Timeout:
        return False


@pytest.mark.guarantee("job-time-trains")
def test_a_second_job_on_a_disk_is_refused_and_a_killed_one_is_no_job(
    gang: Gang, run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_dir, "LOCK_SECONDS", 0.3)
    refused: list[str] = []
    held = tmp_path / "held"

    def look() -> bool:
        if held.exists():
            try:
                Trainer(load_run(run_file), CPU)
            except ConfigError as error:
                refused.append(str(error))
        return bool(refused)

    assert gang.run_until(look, 1, hold, run_file, [], str(held))
    assert "another job trains there (process" in refused[0]
    trainer = Trainer(load_run(run_file), CPU)
    trainer.resume()
    assert trainer.step == 1
    trainer.close()


@pytest.mark.guarantee("job-time-trains")
def test_runs_of_one_process_share_its_lock_on_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    first, second = lock_file(path), lock_file(path)
    assert first is not None
    assert second is not None
    first.release()
    assert not is_free(path)
    second.release()
    assert is_free(path)


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    with caplog.at_level(logging.WARNING):
        assert lock_file(tmp_path / ".lock") is None
    assert "has no locks (No locks available); let only one job at a time" in caplog.text


def trained(config: Any, steps: int) -> Trainer:
    trainer = Trainer(config, CPU)
    trainer.train_step()
    trainer.step = steps
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.chunks[0].parameters()]


@pytest.mark.guarantee("job-time-trains")
@pytest.mark.parametrize("step_of_second", [2, 3])
def test_two_jobs_in_one_folder_of_a_bucket_mix_no_checkpoint(
    run_file: str, moto: S3, monkeypatch: pytest.MonkeyPatch, step_of_second: int
) -> None:
    """The first saves, and keeps one checkpoint alone, while all files of the second are written and its
    record is not.
    """
    bucket = moto.new_bucket()
    options = [
        f"data.storage.storage_options.{name}={json.dumps(value)}"
        for name, value in moto.options.items()
    ]
    shared = [f"train.out_dir=s3://{bucket}/run", "train.keep_checkpoints=1", *options]
    first = trained(load_run(run_file, shared), 1)
    second = trained(load_run(run_file, [*shared, "train.seed=7"]), step_of_second)
    first.save()
    first.step = 2
    publish = CheckpointStore.publish

    def publish_late(self: CheckpointStore, *arguments: Any) -> None:
        if self is second.checkpoints.store:
            first.save()
        publish(self, *arguments)

    monkeypatch.setattr(CheckpointStore, "publish", publish_late)
    if step_of_second == 2:
        with pytest.raises(ConfigError, match=r"step-00000002\.json: another job has saved step 2"):
            second.save()
        newest = first
    else:
        second.save()
        newest = second
    second.close()
    found = Trainer(load_run(run_file, [*shared, "train.train_iters=9"]), CPU)
    found.resume()
    assert found.step == newest.step
    assert all(map(torch.equal, weights(found), weights(newest)))
    found.step = 8
    found.save()
    found.close()
    assert found.checkpoints.store.steps() == [8]
    folders = {key.split("/")[2] for key in moto.objects(bucket) if not key.endswith(".json")}
    assert folders == {found.checkpoints.store.find(8).name}, "what is left of both jobs is removed"


def test_a_record_whose_answer_was_lost_is_this_jobs(
    moto: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = StorageConfig(storage_options=moto.options)
    place = CheckpointStore.open(f"s3://{moto.new_bucket()}/run", storage)

    def create_and_lose(*arguments: Any) -> bool:
        assert create_object(*arguments)
        return create_object(*arguments)

    monkeypatch.setattr(checkpoint_store, "create_object", create_and_lose)
    place.publish(4, place.begin(4), "", {"step": 4, "data": {}})
    assert place.steps() == [4]
