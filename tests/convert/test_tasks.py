"""A conversion in tasks that know nothing of each other: the bytes of one process, whatever their
order, number and deaths.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.convert import ExecutionConfig, Task, convert, convert_task, merge_tasks
from streammega.convert.run import parse_task
from streammega.convert.work_dir import WorkDir
from streammega.dataset.verify import verify
from streammega.errors import ConfigError, ConvertError
from streammega.storage import open_store
from tests.support.builders import without_marks
from tests.support.servers import S3
from tests.support.task_programs import do_task

OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 20_000}
TARGET_UNITS = 9


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 10_000)


def write_corpus(folder: Path) -> list[str]:
    """A file of so many units, the last of which repeats texts of the first."""
    rng = random.Random(3)
    texts = ["".join(rng.choices("abc \n", k=rng.randrange(1, 400))) for _ in range(300)]
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, *texts[:40]]]
    path = folder / "in.jsonl"
    path.write_text("".join(lines))
    assert -(-path.stat().st_size // 10_000) == TARGET_UNITS
    return [str(path)]


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    return write_corpus(tmp_path)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def by_one_process(inputs: list[str], folder: Path, **options: Any) -> dict[str, bytes]:
    convert(inputs, str(folder / "web"), **(OPTIONS | options))
    return files_of(folder)


@pytest.mark.guarantee("task-i-n")
@pytest.mark.parametrize(
    "options", [{}, {"shuffle_seed": 5}, {"dedup": True, "shuffle_seed": 5}, {"format": "zst"}]
)
def test_tasks_in_any_order_make_the_bytes_of_one_process(
    inputs: list[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = by_one_process(inputs, tmp_path / "alone", **options)
    output = str(tmp_path / "shared" / "web")
    tasks = [Task(number=number, of=4) for number in range(4)]
    random.Random(1).shuffle(tasks)
    for task in [*tasks, tasks[0]]:  # one of them twice
        report = convert_task(inputs, output, task, **OPTIONS, **options)
        assert report.units_of_all == TARGET_UNITS
        assert report.units == len(range(task.number, TARGET_UNITS, 4))
        assert not [name for name in files_of(tmp_path / "shared") if not name.startswith(".")]
    assert report.units_before == report.units
    merged = merge_tasks(inputs, output, **OPTIONS, **options)
    assert files_of(tmp_path / "shared") == expected
    assert not list((tmp_path / "shared").glob(".web*"))
    assert merged.documents + sum(merged.dropped.values()) >= 340


@pytest.mark.guarantee("task-i-n")
def test_another_number_of_tasks_goes_on(inputs: list[str], tmp_path: Path) -> None:
    expected = by_one_process(inputs, tmp_path / "alone")
    output = str(tmp_path / "shared" / "web")
    convert_task(inputs, output, Task(number=1, of=3), **OPTIONS)
    again = convert_task(inputs, output, Task(number=0, of=1), **OPTIONS)
    assert (again.units, again.units_before) == (TARGET_UNITS, 3)
    merge_tasks(inputs, output, **OPTIONS)
    assert files_of(tmp_path / "shared") == expected


@pytest.mark.guarantee("task-i-n")
def test_a_merge_names_what_is_not_done_and_leaves_what_is(
    inputs: list[str], tmp_path: Path
) -> None:
    expected = by_one_process(inputs, tmp_path / "alone")
    output = str(tmp_path / "shared" / "web")
    # nothing at all is done: another task may just have begun
    with pytest.raises(ConvertError, match="9 of 9 units are not done"):
        merge_tasks(inputs, output, **OPTIONS)
    for number in (0, 2):
        convert_task(inputs, output, Task(number=number, of=3), **OPTIONS)
    with pytest.raises(ConvertError, match=r"3 of 9 units .*: 1, 4, 7; start the tasks again"):
        merge_tasks(inputs, output, **OPTIONS)
    # other options are other work
    with pytest.raises(ConvertError, match="9 of 9 units are not done"):
        merge_tasks(inputs, output, **OPTIONS, min_tokens=2)
    assert convert_task(inputs, output, Task(number=1, of=3), **OPTIONS).units == 3
    merge_tasks(inputs, output, **OPTIONS)
    assert files_of(tmp_path / "shared") == expected


@pytest.mark.guarantee("task-i-n")
def test_machines_of_other_sizes_do_not_write_into_each_others_segments(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was thought to be dead goes on with a unit that another does too."""
    monkeypatch.setattr("streammega.convert.write.segments.BATCH_BYTES", 500)
    expected = by_one_process(inputs, tmp_path / "alone")
    output = str(tmp_path / "shared" / "web")
    work = Path(WorkDir.of(output, None, StorageConfig()).url)
    alone = Task(number=0, of=1)
    execution = ExecutionConfig(workers=1)
    monkeypatch.setattr("streammega.convert.job.SEGMENT_BYTES", 1000)  # of a small machine
    convert_task(inputs, output, alone, execution=execution, **OPTIONS)
    records = {path: path.read_bytes() for path in work.glob("unit-*.json")}
    assert len(records) == TARGET_UNITS
    for path in records:
        path.unlink()
    monkeypatch.setattr("streammega.convert.job.SEGMENT_BYTES", 4000)
    convert_task(inputs, output, alone, execution=execution, **OPTIONS)
    for path, record in records.items():
        path.write_bytes(record)  # the small one was the last to end
    merge_tasks(inputs, output, **OPTIONS)
    assert files_of(tmp_path / "shared") == expected


def test_a_task_does_not_begin_while_its_folder_is_merged(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.work_dir.LOCK_TIMEOUT", 0.05)
    output = str(tmp_path / "web")
    with (
        WorkDir.of(output, None, StorageConfig()).lock(),
        pytest.raises(ConvertError, match="another conversion to this output is running"),
    ):
        convert_task(inputs, output, Task(number=0, of=2), **OPTIONS)


@pytest.mark.guarantee("task-i-n")
def test_tasks_of_other_options_do_not_meet_in_a_bucket(
    inputs: list[str], tmp_path: Path, s3: S3
) -> None:
    storage = s3.storage
    output = f"s3://{s3.new_bucket()}/web"

    def named(options: dict[str, Any]) -> dict[str, Any]:
        work = ExecutionConfig(work_dir=str(tmp_path / f"work-{len(options)}"))
        return {**OPTIONS, **options, "storage": storage, "execution": work}

    both = [named({}), named({"min_tokens": 30})]
    for number in range(2):
        for each in both:
            convert_task(inputs, output, Task(number=number, of=2), **each)
    merged = merge_tasks(inputs, output, **both[1])
    with pytest.raises(ConvertError, match="exists already"):
        merge_tasks(inputs, output, **both[0])
    assert verify(output, storage).problems == []
    assert len(IndexedDataset(output, storage)) == merged.documents
    assert merge_tasks(inputs, output, **both[0], overwrite=True).documents > merged.documents
    assert verify(output, storage).problems == []


@pytest.mark.guarantee("task-i-n")
def test_killed_tasks_that_are_started_again_make_the_same_in_a_bucket(
    inputs: list[str], tmp_path: Path, s3: S3
) -> None:
    """Three processes at once, one of which is killed when it has done a unit."""
    expected = by_one_process(inputs, tmp_path / "alone")
    bucket = s3.new_bucket()
    output = f"s3://{bucket}/set/web"
    work = f"s3://{bucket}/tmp"
    context = multiprocessing.get_context("forkserver")

    def start(number: int, wait_after: int | None) -> Any:
        given = (s3.storage, inputs, output, work, number, 3, wait_after, OPTIONS)
        process = context.Process(target=do_task, args=given, daemon=True)
        process.start()
        return process

    processes = [start(number, 1 if number == 1 else None) for number in range(3)]
    storage = s3.storage
    store, key = open_store(WorkDir.of(output, work, storage).file(""), storage)
    deadline = time.monotonic() + 100
    while not any(info.key.endswith("unit-000001.json") for info in store.list(key)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].kill()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, -9, 0]
    execution = ExecutionConfig(work_dir=work)
    with pytest.raises(ConvertError, match="units are not done"):
        merge_tasks(inputs, output, execution=execution, storage=storage, **OPTIONS)
    again = start(1, None)
    again.join(100)
    assert again.exitcode == 0
    merge_tasks(inputs, output, execution=execution, storage=storage, **OPTIONS)
    client = s3.client()
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"]]
    found = {
        key.removeprefix("set/"): client.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in keys
    }
    assert without_marks(found) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3", "such as 3/16"),
        ("3/", "such as 3/16"),
        ("-1/4", "such as 3/16"),
        ("4/4", "counted from 0, to 3"),
        ("0/0", "there is no task 0 of 0"),
    ],
)
def test_a_task_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_task(text)


@pytest.mark.guarantee("task-i-n")
@pytest.mark.parametrize(
    ("inputs", "output", "execution", "words"),
    [
        (["-"], "web", {}, "a pipe can be read once"),
        (["in.jsonl"], "web", {"resume": False}, "would forget what other tasks have done"),
        (["in.jsonl"], "web", {"backend": "ray"}, "choose one of them"),
        (["in.jsonl"], "s3://bucket/web", {}, "name one by --work-dir"),
    ],
)
def test_what_tasks_cannot_share_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[str],
    output: str,
    execution: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    with pytest.raises(ConfigError, match=words):
        convert_task(
            inputs, output, Task(number=0, of=2), execution=ExecutionConfig(**execution), **OPTIONS
        )
    with pytest.raises(ConfigError, match=words):
        merge_tasks(inputs, output, execution=ExecutionConfig(**execution), **OPTIONS)


def test_datasets_that_pass_as_they_are_are_no_work_for_tasks(
    inputs: list[str], tmp_path: Path
) -> None:
    convert(inputs, str(tmp_path / "web"), tokenizer="bytes")
    again = [str(tmp_path / "web")]
    with pytest.raises(ConfigError, match="run it without tasks"):
        convert_task(again, str(tmp_path / "other"), Task(number=0, of=2))
    with pytest.raises(ConfigError, match="run it without tasks"):
        merge_tasks(again, str(tmp_path / "other"))


def test_the_command_does_tasks_and_merges_them(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = by_one_process(inputs, tmp_path / "alone")
    output = str(tmp_path / "shared" / "web")
    command = ["convert", *inputs, output, "--tokenizer", "bytes", "--shard-size", "20000"]
    for number in (1, 0):
        assert main([*command, "--task", f"{number}/2"]) == 0
    told = capsys.readouterr().out
    assert "task: 1/2\nunits: 4\nunits_before: 0\nunits_of_all: 9\n" in told
    assert "--task merge" in told
    assert main([*command, "--task", "merge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 340
    assert files_of(tmp_path / "shared") == expected
