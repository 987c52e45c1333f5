"""Processes of a conversion that end in the middle of their work: the others go on, what ends one is
done again, and what ends it twice is named, or left out.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammega.convert import ConvertReport, convert
from streammega.convert.options import ExecutionConfig
from streammega.convert.workers import run_parallel
from streammega.errors import ConfigError, ConvertError
from tests.convert.test_reshape import check_that_a_killed_worker_is_replaced, ignore
from tests.support.builders import stored_texts
from tests.support.process_programs import end_at, exit_at_once, kill_itself, run_unit_or_die


@pytest.mark.usefixtures("new_interpreters")
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    check_that_a_killed_worker_is_replaced(tmp_path, "local")


@pytest.mark.usefixtures("new_interpreters")
def test_a_worker_that_dies_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **named))
        if len(started) == 2:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    results = dict(run_parallel(operator.is_, range(5), ExecutionConfig(workers=3), ignore))
    assert results == dict.fromkeys(range(5), False)
    assert "a worker was killed" in caplog.text
    assert len(started) == 5
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize("end", [kill_itself, os.abort, exit_at_once])
def test_what_ends_its_process_once_is_done_again(end: Any, tmp_path: Path) -> None:
    work = partial(end_at, end, 1, tmp_path)
    results = list(run_parallel(work, range(6), ExecutionConfig(workers=3), ignore))
    assert sorted(results) == [(number, number) for number in range(6)]
    assert results[-1] == (2, 2), "at the end, alone"


@pytest.mark.guarantee("file-ends-process")
@pytest.mark.parametrize("may_leave_out", [False, True])
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (kill_itself, r"2\.parquet, row group 1: the system killed .* memory; use fewer --workers"),
        (os.abort, r"2\.parquet, row group 1: reading it ends the process \(SIGABRT\), twice"),
        (exit_at_once, r"2\.parquet, row group 1: reading it ends the process \(exit 7\), twice"),
    ],
)
def test_what_ends_its_process_twice_is_named_or_left_out(
    end: Any, message: str, may_leave_out: bool, tmp_path: Path
) -> None:
    work = partial(end_at, end, 100, tmp_path)
    results = run_parallel(
        work, range(6), ExecutionConfig(workers=3), ignore, may_leave_out=may_leave_out
    )
    done = [next(results) for _ in range(5)]
    assert sorted(done) == [(number, number) for number in (0, 1, 3, 4, 5)]
    if may_leave_out and end is not kill_itself:
        assert list(results) == [(2, -2)]
        return
    with pytest.raises(ConvertError, match=message):
        next(results)


# --- conversions ----------------------------------------------------------------------------------

ROWS = 10


def parquet(path: Path, *bad_groups: int) -> str:
    """Five row groups of ten rows; pyarrow aborts where it reads some of them: a list of two numbers
    in the description of their column has three.
    """
    texts = [None if n % ROWS == n // ROWS else f"{path.stem} {n}" for n in range(5 * ROWS)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=ROWS)
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    counts = b"\x19\x26\x02\x12"
    parts = footer.split(counts)
    if len(parts) != 6:
        pytest.skip("this version of pyarrow does not write such counts")
    for number, part in enumerate(parts[1:]):
        is_bad = number in bad_groups
        parts[number + 1] = (b"\x19\x36\x02\x12\x00" if is_bad else counts) + part
    footer = b"".join(parts)
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return str(path)


def rows_of(name: str, *bad_groups: int) -> list[str]:
    numbers = [n for n in range(5 * ROWS) if n // ROWS not in bad_groups and n % ROWS != n // ROWS]
    return [f"{name} {n}" for n in numbers]


def converted(folder: Path, output: str, workers: int, **options: Any) -> ConvertReport:
    inputs = [str(path) for path in sorted(folder.iterdir())]
    prefix = str(folder.parent / output / "web")
    return convert(inputs, prefix, tokenizer="bytes", workers=workers, **options)


@pytest.mark.guarantee("file-ends-process")
def test_row_groups_that_end_the_process_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes and messages, whatever the workers are and what the units are."""
    folder = tmp_path / "in"
    folder.mkdir()
    parquet(folder / "a.parquet")
    parquet(folder / "b.parquet", 1, 3)
    parquet(folder / "c.parquet")
    wanted = [*rows_of("a"), *rows_of("b", 1, 3), *rows_of("c")]
    with pytest.raises(ConvertError, match=r"b\.parquet, row group 1: reading it ends the process"):
        converted(folder, "stop", 3)
    reports = []
    for workers, unit in ((3, 1), (1, 1 << 20)):
        monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", unit)
        report = converted(folder, str(workers), workers, on_error="skip")
        assert stored_texts(tmp_path / str(workers) / "web") == wanted
        reports.append((report.dropped, sorted(report.messages)))
    assert reports[0] == reports[1]
    dropped, messages = reports[0]
    assert dropped == {"unreadable row": 2 * ROWS, "empty": 13}
    assert [message.partition(": ")[0] for message in messages] == [
        f"{folder}/b.parquet, row group {number}" for number in (1, 3)
    ]
    with pytest.raises(ConvertError, match="20 records of 150 that were read were skipped"):
        converted(folder, "limited", 2, on_error="skip", max_errors="13%")


@pytest.mark.guarantee("file-ends-process")
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_what_the_system_kills_for_memory_is_never_left_out(
    on_error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        parquet(folder / f"{name}.parquet")
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 1)
    work = partial(run_unit_or_die, kill_itself, {"b.parquet": "row group 3"})
    with monkeypatch.context() as patch:
        patch.setattr("streammega.convert.conversion.run_unit", work)
        message = (
            r"b\.parquet, row group 3: the system killed .*fewer --workers.*smaller row groups"
        )
        with pytest.raises(ConvertError, match=message):
            converted(folder, "out", 3, on_error=on_error)
        assert not list((tmp_path / "out").glob("web*"))
    converted(folder, "out", 2, on_error=on_error)
    wanted = [row for name in "abc" for row in rows_of(name)]
    assert stored_texts(tmp_path / "out" / "web") == wanted


@pytest.mark.guarantee("file-ends-process")
@pytest.mark.parametrize(
    ("form", "part", "lost", "count"),
    [
        ("file", "", range(5), 1),
        ("file", "record batch 1", [1], 1),
        ("file", "rows of record batch 1", [1], ROWS),
        ("stream", "rows of record batch 1", [1], ROWS),
        ("stream", "record batch 3 and all behind it", [3, 4], 1),
    ],
)
def test_record_batches_that_end_the_process_are_left_out(
    form: str,
    part: str,
    lost: Sequence[int],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    parquet(folder / "a.parquet")
    table = pa.table({"text": [f"b {n}" for n in range(5 * ROWS)]})
    new = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with new(folder / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS)
    work = partial(run_unit_or_die, os.abort, {"b.arrow": part})
    monkeypatch.setattr("streammega.convert.conversion.run_unit", work)
    report = converted(folder, "out", 2, on_error="skip")
    kept = [f"b {n}" for n in range(5 * ROWS) if n // ROWS not in lost]
    assert stored_texts(tmp_path / "out" / "web") == [*rows_of("a"), *kept]
    assert report.dropped == {"unreadable row": count, "empty": 5}


SCRIPT = """
from streammega.convert import convert
convert(["in.parquet"], "web", tokenizer="bytes")
convert(["in.jsonl"], "tars", tokenizer="bytes", workers=2, format="tar", shard_bytes=4000)
"""


def of_a_script(number: int, progress: Any) -> int:
    return number


@pytest.mark.usefixtures("new_interpreters")
def test_what_only_the_script_has_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_a_script, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_a_script", of_a_script, raising=False)
    with pytest.raises(ConfigError, match=r"'of_a_script'.*define it in a module"):
        list(run_parallel(of_a_script, range(2), ExecutionConfig(workers=2), ignore))


def test_a_script_needs_no_main_guard_and_its_folder_no_care(tmp_path: Path) -> None:
    """Its modules are not taken for those of Python."""
    parquet(tmp_path / "in.parquet")
    record = json.dumps({"text": "some text"})
    (tmp_path / "in.jsonl").write_text(f"{record}\n" * 2000)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "socket.py").write_text("raise ImportError('not this one')")
    command = [sys.executable, "-P", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert stored_texts(tmp_path / "web") == rows_of("in")
    assert (tmp_path / "tars.manifest.json").exists()


def test_processes_whose_parent_was_killed_end_without_a_word(tmp_path: Path) -> None:
    program = (
        "import operator, os, signal, threading\n"
        "from streammega.convert.options import ExecutionConfig\n"
        "from streammega.convert.workers import run_parallel\n"
        "threading.Timer(float(os.environ['AFTER']), os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "list(run_parallel(operator.is_, range(10**6), ExecutionConfig(workers=3), lambda *_: None))\n"
    )
    for after in ("0.05", "0.3", "1.0", "2.0"):
        environment = os.environ | {"AFTER": after}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert ended.returncode == -9
        assert ended.stderr == ""
