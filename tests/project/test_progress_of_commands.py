"""Every command that may take long says how far it is, on stderr alone."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from streammega.apps import view
from streammega.cli.main import main
from streammega.cli.progress import ProgressDisplay
from streammega.convert.work_dir import WorkDir
from streammega.storage.backends.local import LocalStore
from streammega.storage.cache import PAGE_BYTES, PageCache, open_cached
from tests.support.builders import convert_bytes, put_dataset, write_jsonl, write_run_file
from tests.support.servers import S3


@dataclass
class Stage:
    """What a display was told of a stage."""

    name: str
    total: int | None
    done: int = 0


def show_every_report(patch: pytest.MonkeyPatch) -> list[Stage]:
    """All stages of displays from now on. Each report is a line at once, as if it took long."""
    stages: list[Stage] = []
    begin, advance, part = ProgressDisplay.begin, ProgressDisplay.advance, ProgressDisplay.part

    def show(display: ProgressDisplay) -> None:
        typer.echo(display._line(), err=True)

    def begin_shown(display: ProgressDisplay, stage: str, *arguments: Any, **named: Any) -> None:
        begin(display, stage, *arguments, **named)
        stages.append(Stage(stage, display._total))
        show(display)

    def advance_shown(display: ProgressDisplay, size: int, tokens: int = 0) -> None:
        advance(display, size, tokens)
        stages[-1].done += size
        show(display)

    def part_shown(
        display: ProgressDisplay, name: str, size: int, *arguments: Any, **named: Any
    ) -> None:
        part(display, name, size, *arguments, **named)
        show(display)

    patch.setattr(ProgressDisplay, "begin", begin_shown)
    patch.setattr(ProgressDisplay, "advance", advance_shown)
    patch.setattr(ProgressDisplay, "part", part_shown)
    return stages


def make(folder: Path) -> None:
    """The inputs of all commands below."""
    write_jsonl(folder / "a.jsonl", [{"text": f"a needle {n % 30}"} for n in range(60)])
    convert_bytes(folder / "web", folder / "a.jsonl")
    for number in range(3):
        (folder / f"web-gen0123456789{number:02}.bin").write_bytes(b"left")
    for name, seed in (("other", 2), ("run", 1)):
        written = write_run_file(
            folder,
            data={
                "blend": [[f"{folder}/web", 1.0]],
                "seed": seed,
                "split": "1,0,0",
                "eod_id": 256,
                "exclude_documents": ["web#3"],
            },
            train={"train_iters": 4},
        )
        Path(written).rename(folder / f"{name}.toml")
    fill_cache(folder / "cache")


def fill_cache(folder: Path) -> None:
    cached = open_cached(
        PageCache(folder, 1 << 30, 4 * PAGE_BYTES), "s3://b/k", "e", 6 * PAGE_BYTES
    )
    assert cached is not None

    def fetch(_start: int, _stop: int, out: Any) -> None:
        out[:] = 0

    cached.read(0, cached.size, np.empty(cached.size, np.uint8), fetch)


METER = r"\d+% [\d.kMG]+/[\d.kMG]+ \[.*<.*"
"""Figures with the time left."""
CASES = {
    "convert a.jsonl out --tokenizer bytes --dedup": [
        f"converting: +{METER}B/s",
        f"looking for duplicates: +{METER} documents",
        f"noting duplicates: +{METER} documents",
        f"writing shards: +{METER}B/s",
        f"publishing: +{METER} files",
    ],
    "verify web": [f"verifying: +{METER}B/s"],
    "gc web": ["looking for leftovers: 00:00 so far"],
    "gc web --remove --older-than 0": [f"removing: +{METER} files"],
    "ls .": ["looking for files: .*names found: .*/s"],
    "describe web": [f"opening: .*, steps: +{METER}"],
    "describe run.toml": [f"opening: .*, steps: +{METER}", "counting"],
    "cat web#0..9 --ids": [f"opening: .*, steps: +{METER}"],
    "cache ls cache": ["reading the cache"],
    "cache verify cache": [f"verifying: +{METER}B/s"],
    "cache clear cache": ["removing"],
    "prepare run.toml": [f"building indices: +{METER} datasets"],
    "trace run.toml --step 1": [f"opening: .*, steps: +{METER}", f"tracing: +{METER} samples"],
    "trace run.toml --find needle --tokenizer bytes": [
        f"searching: +{METER}B/s",
        f"tracing: +{METER} samples",
    ],
    "trace run.toml --excluded": [f"tracing: +{METER} samples"],
    "order-report run.toml": [f"measuring: +{METER} steps"],
    "order-report web --sequence-length 8 --steps 1": [f"measuring: +{METER} steps"],
    "simulate web=2m --ranks-per-node 2 --sequence-length 64": [
        f"simulating: +{METER} micro-batches"
    ],
    "view web": [f"opening: .*, steps: +{METER}"],
    "view run.toml": [f"opening: .*, steps: +{METER}"],
}  # fmt: skip


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """What a command prints, without what depends on time; and its stderr."""
    capsys.readouterr()
    with_json = [] if words.startswith("view") else ["--json"]
    assert main([*shlex.split(words), *with_json]) in (0, 1, 130)
    out, err = capsys.readouterr()
    if not with_json:
        return re.sub(r"http://\S+", "ADDRESS", out), err
    lines = out.splitlines() if words.startswith("cat") else [out]
    return [without_times(json.loads(line)) for line in lines], err


def without_times(value: Any) -> Any:
    """A report without measured times: numbers that are not whole, and dates."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("last_used", "notes")}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return None if isinstance(value, float) else value


@pytest.mark.parametrize("words", CASES)
def test_a_command_says_how_far_it_is_on_stderr_and_prints_the_same(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(view, "_serve", lambda *_: None)
    answers = []
    stages: list[Stage] = []
    for shows in (False, True):
        folder = tmp_path / "same"
        folder.mkdir()
        monkeypatch.chdir(folder)
        make(folder)
        with monkeypatch.context() as patch:
            if shows:
                stages = show_every_report(patch)
            answers.append(answer(words, capsys))
        monkeypatch.chdir(tmp_path)
        folder.rename(tmp_path / f"done-{shows}")
    (plain, _), (shown, err) = answers
    assert shown == plain
    for line in CASES[words]:
        assert re.search(f"^{line}", err, re.MULTILINE), err
    for stage in stages:
        if stage.name != "comparing":  # which ends where orders differ
            assert stage.total in (None, stage.done), stage


def test_copies_of_index_files_are_shown_with_bytes_rate_and_time_left(
    moto: S3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    bucket = moto.new_bucket()
    put_dataset(str(tmp_path / "web"), seed=0)
    for path in tmp_path.glob("web*"):
        moto.objects(bucket)[path.name] = path.read_bytes()
    url = f"s3://{bucket}/web"
    show_every_report(monkeypatch)
    assert main(["describe", url, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["documents"] == 40
    assert re.search(f"^opening: .*copies of index files: +{METER}B/s", err, re.MULTILINE), err


def test_work_counts_when_it_is_done_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    stages = show_every_report(monkeypatch)
    looks: list[tuple[str, int, int | None]] = []

    def watch(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            looks.append((stages[-1].name, stages[-1].done, stages[-1].total))
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    watch(WorkDir, "write_record")  # the last act of a unit, and of a shard
    watch(LocalStore, "delete")
    assert main(["convert", f"{tmp_path}/a.jsonl", f"{tmp_path}/out", "--tokenizer", "bytes"]) == 0
    assert main(["gc", f"{tmp_path}/web", "--remove", "--older-than", "0"]) == 0
    named = {name for name, _, _ in looks}
    assert {"converting", "writing shards", "publishing", "removing"} <= named
    for name, done, total in looks:
        assert total is None or done < total, name
    assert [done for name, done, _ in looks if name == "removing"] == [0, 1, 2]


def test_warnings_of_all_commands_begin_alike(tmp_path: Path) -> None:
    convert_bytes(
        tmp_path / "web", write_jsonl(tmp_path / "a.jsonl", ["a text"] * 9), provenance=True
    )
    command = [sys.executable, "-m", "streammega", "convert", f"{tmp_path}/web", f"{tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"WARNING: \S+/web: tells where .*\n", done.stderr)
    program = (
        "import logging; from streammega.errors.logs import log_to_stderr; log_to_stderr('[3] ');"
        "log = logging.getLogger('streammega'); log.setLevel('INFO');"
        "log.info('step 1'); log.warning('slow')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[3] step 1\nWARNING: [3] slow\n"
