"""`streammega bench`: figures beside a need, what would help, and what is printed where it is ended."""

from __future__ import annotations

import _thread
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import StreamLoader
from streammega.apps import bench as app
from streammega.cli import options as cli_options
from streammega.cli.main import main
from streammega.cli.options import storage_config
from streammega.errors import EndpointError
from tests.support.builders import write_dataset, write_run_file
from tests.support.servers import KEY, SECRET
from tools.bench.object_server import Running, running

SECONDS = "1"


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run the command: (exit code, report)."""

    def run(*words: str, **settings: Any) -> tuple[int, dict[str, Any]]:
        options = settings.pop("storage_options", {})
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        lines += ["[storage_options]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        (tmp_path / "storage.toml").write_text("\n".join(lines))
        files = ["--storage-file", str(tmp_path / "storage.toml")] if options or settings else []
        code = main(["bench", "--seconds", SECONDS, "--json", *files, *words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert SECRET not in printed.out + printed.err
        return code, json.loads(printed.out)

    return run


@pytest.fixture
def after_figures(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Have something done once, when the first figures of full speed are in the report."""
    real = app._figures
    made = 0

    def after(action: Callable[[], Any]) -> None:
        def figures(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            if made == 2:
                action()
            return real(*arguments)

        monkeypatch.setattr(app, "_figures", figures)

    return after


def keep_nothing(monkeypatch: pytest.MonkeyPatch, **tuning: Any) -> None:
    """Have no dataset stay in memory, so that requests are sent all the time."""
    tuning = {"resident_bytes": 0, **tuning}
    monkeypatch.setattr(
        cli_options,
        "storage_config",
        lambda *given, **named: storage_config(*given, **named).tuned(**tuning),
    )


@pytest.fixture
def web(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "root" / "data" / "web", [np.arange(2_000_000) % 1000])


@pytest.mark.guarantee("bench-measures-need")
def test_a_need_that_is_met_says_how_many_times(
    web: str, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "ACCEPTED_SHARE", 0.5)  # by others' work on this machine
    words = ("--tokens-per-second-per-gpu", "20000", "--gpus", "8", "--sequence-length", "512")
    code, report = measure(web, *words)
    assert code == 0
    assert report["dp_size"] == 8
    need = report["need"]
    assert need["is_met"]
    assert need["tokens_per_second"] == 20_000, "each of eight loaders feeds one GPU"
    assert need["times_met"] == report["full_speed"]["tokens_per_second"] / 20_000
    assert need["times_met"] > 1
    assert "nothing is needed" in report["advice"][0]
    assert report["at_need"]["waited_share"] <= app.ACCEPTED_SHARE
    assert 0 < report["open_seconds"] < report["first_batch_seconds"]
    assert report["tokens_of_a_batch"] == 4 * 512


@pytest.mark.guarantee("bench-measures-need")
def test_a_need_that_no_loader_meets_ends_with_1(web: str, measure: Any) -> None:
    code, report = measure(web, "--tokens-per-second-per-gpu", "1e15")
    assert code == 1
    assert not report["need"]["is_met"]
    assert "at_need" not in report
    assert "nothing is needed" not in " ".join(report["advice"])


@pytest.mark.guarantee("bench-measures-need")
def test_a_verdict_on_default_sizes_says_so(web: str, measure: Any) -> None:
    need = ("--tokens-per-second-per-gpu", "1e15")
    words = "this holds for micro-batches of 4 x 4,096 tokens: give --sequence-length"
    sizes = ("--micro-batch-size", "4")
    _, report = measure(web, *need, *sizes)
    assert any(line.startswith(words) for line in report["advice"]), report
    _, report = measure(web, *need, *sizes, "--sequence-length", "4096")
    assert not any("this holds" in line for line in report["advice"]), report


@pytest.mark.guarantee("bench-measures-need")
@pytest.mark.parametrize(
    ("behaviour", "tuning", "words"),
    [
        ({"latency": 0.1}, {"max_in_flight_bytes": 1 << 16}, r"a request took 1\d\d ms"),
        ({"bandwidth": 200_000}, {}, "storage is the limit: it gave "),
    ],
)
def test_what_makes_it_slow_is_named(
    behaviour: dict[str, Any],
    tuning: dict[str, Any],
    words: str,
    web: str,
    tmp_path: Path,
    measure: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_nothing(monkeypatch, **tuning)
    with running(tmp_path / "root", **behaviour) as server:
        options = {"storage_options": server.storage_options}
        need = ("--tokens-per-second-per-gpu", "1e15", "--sequence-length", "64")
        code, report = measure("s3://data/web", *need, **options)
    assert code == 1
    assert re.search(words, " ".join(report["advice"]))


@pytest.mark.guarantee("bench-tries-advice")
def test_a_change_that_helps_is_advised_with_what_it_gave(
    web: str, tmp_path: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_nothing(monkeypatch)
    with running(tmp_path / "root", latency=0.1) as server:
        options = {"storage_options": server.storage_options, "max_concurrent_requests": 2}
        need = ("--tokens-per-second-per-gpu", "1e15", "--sequence-length", "64")
        code, report = measure("s3://data/web", *need, "--seconds", "4", **options)
    assert code == 1
    (trial,) = [one for one in report["trials"] if "max_concurrent" in one["change"]]
    assert trial["times"] > app.HELPS
    words = "raise max_concurrent_requests from 2 to 8: tried here, it was "
    assert any(line.startswith(words) for line in report["advice"]), report


@pytest.mark.guarantee("bench-tries-advice")
def test_a_change_that_does_not_help_is_not_advised(
    web: str, tmp_path: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes share the samples of so little data: no memory makes its requests larger."""
    keep_nothing(monkeypatch, max_in_flight_bytes=1 << 16)
    monkeypatch.setattr(app, "SMALL_REQUEST_BYTES", 1 << 30)  # neighbours are read together
    with running(tmp_path / "root", latency=0.1) as server:
        options = {"storage_options": server.storage_options}
        need = ("--tokens-per-second-per-gpu", "1e15", "--sequence-length", "512")
        code, report = measure("s3://data/web", *need, "--seconds", "4", **options)
    assert code == 1
    (trial,) = [one for one in report["trials"] if "memory_bytes" in one["change"]]
    advice = " ".join(report["advice"])
    has_helped = trial["times"] >= app.HELPS  # by what else this machine did meanwhile
    assert ("raise memory_bytes" in advice) == has_helped, trial
    assert ("tried, of no help: memory_bytes=4294967296" in advice) != has_helped


@pytest.mark.guarantee("bench-tries-advice")
@pytest.mark.parametrize("fails_at", ["a change", "no change"])
def test_a_change_that_fails_helps_nothing(
    fails_at: str, web: str, tmp_path: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error without a change ends the command, as at full speed."""
    keep_nothing(monkeypatch)
    with running(tmp_path / "root", latency=0.1) as server:
        real = app._loader

        def loader(setup: Any, data: Any, seconds: float) -> Any:
            loaders.append(data)
            is_changed = data != setup.data
            if len(loaders) > 1 and is_changed == (fails_at == "a change"):
                raise EndpointError("http://store:9000: the endpoint did not answer")
            return real(setup, data, seconds)

        loaders: list[Any] = []
        monkeypatch.setattr(app, "_loader", loader)
        options = {"storage_options": server.storage_options, "max_concurrent_requests": 2}
        need = ("--tokens-per-second-per-gpu", "1e15", "--sequence-length", "64")
        code, report = measure("s3://data/web", *need, **options)
    assert code == 1
    if fails_at == "a change":
        assert report["trials"] == []
        assert "error" not in report
    else:
        assert "did not answer" in report["error"]


@pytest.mark.guarantee("bench-tries-advice")
def test_fields_are_tried_where_the_processor_is_the_limit(
    web: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose labels have a mask cannot leave it out, and is not told to."""
    sections: dict[str, Any] = {"data": {"blend": [web]}, "train": {"train_iters": 100_000}}
    run_file = write_run_file(tmp_path, **sections)
    command = ["bench", run_file, "--json", "--seconds", SECONDS]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert [trial["change"] for trial in report["trials"]] == ['fields=["tokens", "labels"]']
    assert main([*command, "data.eod_mask_loss=true", "data.eod_id=7"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == []


@pytest.mark.guarantee("bench-measures-need")
def test_a_short_run_is_measured_without_its_end(
    web: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes over two steps would measure how fast passes begin."""
    begun: list[StreamLoader] = []
    begin = StreamLoader.__iter__

    def counted(loader: StreamLoader) -> Any:
        begun.append(loader)
        return begin(loader)

    monkeypatch.setattr(StreamLoader, "__iter__", counted)
    sections: dict[str, Any] = {
        "data": {"blend": [web], "order": "stream"},
        "train": {"train_iters": 2},
    }
    run_file = write_run_file(tmp_path, **sections)
    assert main(["bench", run_file, "--json", "--seconds", SECONDS]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["full_speed"]["tokens_per_second"] > 0
    assert begun == []


def test_a_limit_of_local_data_is_not_called_storage() -> None:
    figures = {"waited_share": 0.9, "requests": 0}
    assert (
        app._limit(figures)
        == "this machine is the limit: its processors, or the disk with the data"
    )


def test_advice_begins_with_the_change_that_helped_most() -> None:
    def trial(name: str, times: float) -> dict[str, Any]:
        return {"change": f"{name}=1", "advice": f"set {name}", "times": times}

    lines = app._of_trials([trial("a", 1.5), trial("b", 1.1), trial("c", 3.0)])
    assert lines == [
        "set c: tried here, it was 3.0 times as fast",
        "set a: tried here, it was 1.5 times as fast",
        "tried, of no help: b=1 (1.10 times)",
    ]


@pytest.mark.guarantee("bench-measures-need")
def test_requests_that_are_refused_are_named(
    tmp_path: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few tokens that each pass over them sends requests, on the slowest machine too."""
    keep_nothing(monkeypatch)
    write_dataset(tmp_path / "root" / "data" / "web", [np.arange(100_000) % 1000])
    with running(tmp_path / "root") as server:
        real = app._read

        def read(*arguments: Any) -> Any:
            server.behave(rate=5)  # the start takes as many requests as it takes
            return real(*arguments)

        monkeypatch.setattr(app, "_read", read)
        words = ("s3://data/web", "--tokens-per-second-per-gpu", "1e15", "--seconds", "2")
        code, report = measure(*words, storage_options=server.storage_options)
    assert code == 1
    assert any("refused" in line for line in report["advice"]), report


@pytest.mark.guarantee("bench-measures-need")
def test_a_run_file_is_measured_with_settings_over_it(
    web: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {"data": {"blend": [web]}, "train": {"train_iters": 100_000}}
    run_file = write_run_file(tmp_path, **sections)
    command = ["bench", run_file, "train.micro_batch_size=4", "--json", "--seconds", SECONDS]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["order"] == "megatron"
    assert report["tokens_of_a_batch"] == 4 * 16
    assert main([*command, 'data.fields=["labels"]']) == 0
    assert json.loads(capsys.readouterr().out)["tokens_of_a_batch"] == 4 * 16
    assert main([*command, "--sequence-length", "8"]) == 1
    assert "write section.name=value" in capsys.readouterr().err


@pytest.mark.guarantee("bench-ends-well")
def test_ctrl_c_prints_what_was_measured_so_far(
    web: str, capsys: pytest.CaptureFixture[str], after_figures: Any
) -> None:
    after_figures(_thread.interrupt_main)
    assert main(["bench", web, "--seconds", "60"]) == 130
    printed = capsys.readouterr().out
    assert "full speed" in printed
    assert "What would help:" in printed


@pytest.mark.guarantee("bench-ends-well")
def test_a_server_that_ends_meanwhile_leaves_what_was_measured(
    web: str,
    tmp_path: Path,
    measure: Any,
    after_figures: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_nothing(monkeypatch)
    with running(tmp_path / "root") as server:
        after_figures(lambda: server.behave(status=403, code="AccessDenied"))
        words = ("s3://data/web", "--seconds", "60")
        code, report = measure(*words, storage_options=server.storage_options)
    assert code == 1
    assert "AccessDenied" in report["error"]
    assert report["full_speed"]["tokens_per_second"] > 0


@pytest.mark.guarantee("bench-ends-well")
@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://data/none", {}, "no such object"),
        ("s3://data/web", {"endpoint_url": "http://127.0.0.1:1"}, "did not answer"),
    ],
)
def test_what_cannot_be_opened_is_one_error(
    url: str,
    options: dict[str, Any],
    words: str,
    server: Running,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = {"key": KEY, "secret": SECRET, "endpoint_url": server.endpoint} | options
    lines = ["retry_timeout = 0.5", "[storage_options]"]
    lines += [f'{name} = "{value}"' for name, value in options.items()]
    (tmp_path / "storage.toml").write_text("\n".join(lines))
    command = ["bench", url, "--seconds", SECONDS, "--storage-file", f"{tmp_path}/storage.toml"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("error: ")
    assert words in printed.err


@pytest.mark.guarantee("bench-measures-need")
def test_a_full_cache_disk_is_named(
    web: str, tmp_path: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 29))
    code, report = measure(web, cache_dir=str(tmp_path / "cache"))
    assert code == 0
    assert report["advice"][0].startswith("cache_dir: ")
