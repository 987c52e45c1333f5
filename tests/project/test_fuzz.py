"""The inputs that the fuzzer keeps (`make fuzz`) are read, or refused by errors of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz.common import Target
from tools.fuzz.run import ENVIRONMENT, finding, name_of, with_change
from tools.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]


def test_no_kept_input_is_a_finding() -> None:
    """In a process of its own, whose address space is limited."""
    replay = subprocess.run(
        [sys.executable, "tools/fuzz/run.py", "--replay"],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert f"{len(TARGETS)} targets: 0 findings" in replay.stdout


def test_a_target_finds_an_error_that_is_not_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS["manifest"](tmp_path)
    sound = target.seeds[0]
    assert finding(target, sound) is None
    assert finding(target, sound[:-9]) is None, "a damaged one is refused by the library"
    monkeypatch.setattr("streammega.dataset.manifest.check_manifest", lambda *_, **__: 1 / 0)
    error = finding(target, sound)
    assert isinstance(error, ZeroDivisionError)
    assert name_of(error).startswith("ZeroDivisionError-manifest-")


def test_a_librarys_error_that_hides_a_lack_of_memory_is_a_finding() -> None:
    from streammega.errors import FormatError

    def run(_: bytes) -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise FormatError("damaged") from None

    assert isinstance(finding(Target(run, []), b""), FormatError)
    assert finding(Target(run, [], may_lack_memory=True), b"") is None


def test_a_change_of_json_is_one_value() -> None:
    import random

    value = {"a": [1, {"b": "c"}], "d": None}
    changed = [with_change(value, random.Random(seed)) for seed in range(50)]
    assert value == {"a": [1, {"b": "c"}], "d": None}
    assert sum(other != value for other in changed) > 40
