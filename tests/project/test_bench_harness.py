"""The bench harness: turns are fair, sides that fail are left out, and intervals hold the ratio."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.bench import convert, corpus, harness, table


def test_each_side_goes_first_in_turn_and_a_side_that_fails_is_left_out() -> None:
    calls: list[str] = []

    def side(name: str, values: list[float | None]) -> float | None:
        calls.append(name)
        return values.pop(0)

    failing: list[float | None] = [1.0, None]
    sound: list[float | None] = [3.0, 5.0, 4.0]
    medians = harness.medians(
        3, {"failing": lambda: side("failing", failing), "sound": lambda: side("sound", sound)}
    )
    assert calls == ["failing", "sound", "sound", "failing", "sound"]
    assert medians == {"sound": 4.0}


@pytest.mark.parametrize("paired", [False, True])
def test_an_interval_holds_the_ratio_of_the_medians(paired: bool) -> None:
    low, high = harness.interval([2.0, 2.2, 1.8, 2.1, 1.9], [1.0, 1.1, 0.9, 1.0, 1.0], paired)
    assert low < 2.0 < high
    assert high - low < 1.0
    same, _ = harness.interval([4.0] * 5, [2.0] * 5, paired)
    assert same == 2.0


def test_what_was_measured_is_told_with_its_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.versions(["no-such-package"]) == "no-such-package not installed"
    assert harness.versions(["numpy"]).startswith("numpy ")
    harness.table("figure", "ratio")
    harness.row("a", 1.5)
    assert capsys.readouterr().out == "| figure | ratio |\n|---|---|\n| a | 1.5 |\n"


def test_what_a_bench_prepares_is_made_once_and_never_half(tmp_path: Path) -> None:
    calls = []

    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    def whole(path: Path) -> None:
        calls.append(path)
        path.write_text("whole")

    with pytest.raises(KeyboardInterrupt):
        corpus.made(tmp_path / "corpus", interrupted)
    for _ in range(2):
        assert Path(corpus.made(tmp_path / "corpus", whole)).read_text() == "whole"
    assert len(calls) == 1


def test_every_side_of_the_conversion_bench_is_one_that_a_process_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each figure alone: it asks for sides that exist, and prints its rows."""
    scale = convert.Scale(runs=1, corpus=1, pair=1)

    def in_process(side: Callable[..., object], **arguments: object) -> dict[str, object]:
        assert getattr(convert, side.__name__) is side
        inspect.signature(side).bind(**arguments)
        return {"rate": 2.0, "cpu": 1.0, "peak": 3e6, "kinds": {"handing out": 0.5}}

    monkeypatch.setattr(harness, "in_process", in_process)
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(corpus, "made", lambda path, make: str(path))
    for name in ("megatron", "datatrove", "verify", "memory", "shuffle", "zst", "tar", "learning"):
        convert.FIGURES[name](scale)
        told = capsys.readouterr().out
        assert told.startswith("| "), f"{name} printed {told!r}"


def test_the_table_compares_equal_fields_and_says_the_peak_memory_of_both_sides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = {
        "litdata 0 ids": 90e6,
        "mosaic 2 ids": 10e6,
        "litdata 2 int64": 75e6,
        "ours 0 ids": 270e6,
        "ours 0 int64": 150e6,
        "ours 0 int64, 1 MiB blocks": 160e6,
        "ours 2 int64, forked": 80e6,
        "ours 2 int64, spawned": 70e6,
    }
    measured = {side: [{"rate": rate, "peak": rate}] for side, rate in rates.items()}
    table.print_epochs(measured, "loopback", goal="1.5x")
    lines = capsys.readouterr().out.splitlines()
    assert [line[line.index("vs ") :] for line in lines] == [
        "vs litdata | 90 | 270 | 3.00x | 1.5x | 90, 270 |",
        "vs mosaicml-streaming, 2 workers | 10 | 270 | 27.00x | 1.5x | 10, 270 |",
        "vs litdata, 2 workers | 75 | 150 | 2.00x | 1.5x | 75, 150 |",
        "vs litdata, 2 workers | 75 | 80 | 1.07x | 1.0x | 75, 80 |",
        "vs litdata, 2 workers | 75 | 70 | 0.93x | 1.0x | 75, 70 |",
        "vs 1 MiB blocks | 160 | 150 | 0.94x | 0.9x | 160, 150 |",
    ]


def test_a_figure_that_fails_leaves_the_others_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(chosen: table.Chosen) -> None:
        raise KeyError("ours")

    def tells(chosen: table.Chosen) -> None:
        table.print_row("blend", 1)

    monkeypatch.setattr(table, "FIGURES", harness.Figures(epochs=fails, blends=tells, stalls=fails))
    monkeypatch.setattr("sys.argv", ["table.py", "--figures", "epochs", "blends"])
    assert table.main() == 1
    told = capsys.readouterr()
    assert told.out.endswith("| blend |  | 1 |  |  |  |\n")
    assert "KeyError" in told.err


def test_a_side_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "web.bin").write_bytes(bytes(100))
    found = harness.in_process(convert.side_cat, dataset=str(tmp_path / "web"))
    assert found["rate"] > 0
    assert found["peak"] > 1 << 20
