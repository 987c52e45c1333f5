"""`streammega top`: rates of ranks, the one that differs, and what is shown of those that do not answer."""

from __future__ import annotations

import _thread
import contextlib
import gc
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.apps import metrics, top
from streammega.apps.metrics import Watch, parse_addresses, parse_answer
from streammega.cli.main import main
from streammega.errors import ConfigError
from streammega.loading.stats import MetricsServer, Stats
from tests.support.builders import write_dataset, write_layout_run
from tests.support.cuda_support import on_cuda
from tests.support.gang import Gang
from tests.support.rank_programs import watch_slow_forward
from tests.support.servers import SECRET, HttpServer
from tools.bench.object_server import running

ONCE = ("--once", "--interval", "0.1")


class Rank:
    """A rank whose figures grow by the same amounts each time that they are read: a second passes
    then, by its own clock.
    """

    def __init__(self, rank: int = 0, **grows: float) -> None:
        self.grows = {"batches": 10, "tokens": 1000, **grows}
        self.sources = {"web": 750, "code": 250}
        self.gauges = {"request_p50": 0.02}
        self.reads = 0
        self.server = MetricsServer(self, 0, rank)  # type: ignore[arg-type]
        self.address = self.server.address.removeprefix("http://").removesuffix("/metrics")

    def summary(self) -> dict[str, Any]:
        self.reads += 1
        figures: dict[str, Any] = dict.fromkeys(Stats().summary(), 0.0)
        figures |= {name: value * self.reads for name, value in self.grows.items()}
        figures["source_tokens"] = {name: n * self.reads for name, n in self.sources.items()}
        return figures | self.gauges | {"seconds": float(self.reads)}

    def end(self) -> None:
        del self.server
        gc.collect()


def report_of(*ranks: Rank, looks: int = 3) -> dict[str, Any]:
    watch = Watch([rank.address for rank in ranks])
    for _ in range(looks):
        watch.look()
    return watch.report()


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("9400", ["http://127.0.0.1:9400/metrics"]),
        ("node-1.lan:9400", ["http://node-1.lan:9400/metrics"]),
        ("[::1]:9400", ["http://[::1]:9400/metrics"]),
        ("h:9400-9402", [f"http://h:{port}/metrics" for port in (9400, 9401, 9402)]),
        ("https://h:9400", ["https://h:9400/metrics"]),
        ("http://h:9400/", ["http://h:9400/metrics"]),
        ("http://h:9400/train/metrics", ["http://h:9400/train/metrics"]),
    ],
)
def test_an_address_is_a_port_a_range_or_a_url(text: str, urls: list[str]) -> None:
    assert parse_addresses(text) == urls


@pytest.mark.guarantee("top-ends-well")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs/one", "is no address of metrics; write it as HOST:PORT"),
        ("s3://bucket/run", "is no address of metrics"),
        ("http://host/metrics", "write it as HOST:PORT"),
        (f"http://user:{SECRET}@h:94", "top sends no passwords"),
        (f"user:{SECRET}@h:94", "an address with an @: is no address"),
        ("h:0", "ports are numbers from 1 to 65535"),
        ("h:9402-9400", "the smaller one first"),
        ("h:1-65535", "too many; at most"),
    ],
)
def test_what_is_no_address_is_one_error(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", text]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert SECRET not in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.guarantee("top-shows-rates")
def test_rates_are_those_of_the_ranks_own_clocks(capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"requests": 4.0, "fetched_bytes": 3e6, "cache_hit_bytes": 9e6}
    ranks = [Rank(0, wait_total=0.01, **shared), Rank(1, wait_total=0.03, retries=2, **shared)]
    assert main(["top", *(rank.address for rank in ranks), *ONCE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["answering"] == report["addresses"] == 2
    now = report["now"]
    assert now["tokens_per_second"] == 2000
    assert now["batches_per_second"] == 20
    assert now["waited_share"] == pytest.approx(0.02)
    assert now["fetched_bytes_per_second"] == 6e6
    assert now["cache_share"] == 0.75
    assert now["requests_per_second"] == 8
    assert now["retries"] == 2
    assert [row["now"]["waited_share"] for row in report["ranks"]] == pytest.approx([0.01, 0.03])
    assert report["stragglers"] == report["findings"] == []
    assert report["sources"] == [
        {"source": "web", "tokens": 3000, "share": 0.75, "tokens_per_second": 1500},
        {"source": "code", "tokens": 1000, "share": 0.25, "tokens_per_second": 500},
    ]
    assert main(["top", *(rank.address for rank in ranks), *ONCE]) == 0
    text = capsys.readouterr().out
    for words in ("2 of 2 addresses answer", "throughput  2,000 tokens/s", "2 repeated", "75.0 %"):
        assert words in text


@pytest.mark.guarantee("top-shows-rates")
def test_the_window_is_a_minute_at_most_and_now_is_the_last_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "WINDOW", 3.0)
    rank = Rank()
    watch = Watch([rank.address])
    for _ in range(5):
        watch.look()
    rank.grows["tokens"] = 2000  # the total doubles at once
    watch.look()
    report = watch.report()
    assert report["window_seconds"] == 3.0
    assert report["now"]["tokens_per_second"] == 12_000 - 5_000
    assert report["window"]["tokens_per_second"] == (12_000 - 3_000) / 3


@pytest.mark.guarantee("top-names-stragglers")
@pytest.mark.parametrize(
    ("grows", "gauges", "reason"),
    [
        ({"throttled": 3.0, "requests": 9.0}, {}, "the store refused 6 of its 18 requests"),
        ({"retries": 1.0, "requests": 9.0}, {}, "2 of its 18 requests failed"),
        ({}, {"request_p50": 0.2}, "its requests take 200 ms, theirs 20 ms; look at its network"),
        (
            {"cache_hit_bytes": 0.0},
            {},
            "0 % of its bytes come from the cache, of theirs 90 %; look at its cache_dir",
        ),
        ({}, {}, "its requests are as fast as theirs; look at its processors and disk"),
    ],
)
def test_a_rank_that_waits_is_named_and_why(
    grows: dict[str, float], gauges: dict[str, float], reason: str
) -> None:
    usual = {"wait_total": 0.01, "requests": 4.0, "fetched_bytes": 1e6, "cache_hit_bytes": 9e6}
    ranks = [Rank(number, **usual) for number in range(3)]
    ranks[1].grows |= {"wait_total": 0.4} | grows
    ranks[1].gauges |= gauges
    report = report_of(*ranks)
    (straggler,) = report["stragglers"]
    assert straggler["dp_rank"] == 1
    start = f"rank 1 ({ranks[1].address}) waits for data 40 % of the time, the others 1 %: "
    assert straggler["reason"].startswith(start + reason)
    assert report["findings"][0] == straggler["reason"]


@pytest.mark.guarantee("top-names-stragglers")
def test_where_requests_are_slow_on_every_rank_the_one_that_waits_is_not_blamed() -> None:
    """Of ranks in step only one waits for data: the others wait for it meanwhile."""
    ranks = [Rank(0, wait_total=0.4), Rank(1), Rank(2)]
    for rank in ranks:
        rank.gauges["request_p50"] = 0.44
    (straggler,) = report_of(*ranks)["stragglers"]
    assert "requests take 440 ms on every rank" in straggler["reason"]


@pytest.mark.guarantee("top-names-stragglers")
def test_a_rank_that_takes_fewer_batches_is_named() -> None:
    report = report_of(Rank(0), Rank(1), Rank(2, batches=7.0))
    (straggler,) = report["stragglers"]
    assert "rank 2 " in straggler["reason"]
    assert "takes 7 batches a second, the others 10" in straggler["reason"]
    assert "look at its GPU" in straggler["reason"]


@pytest.mark.guarantee("top-names-stragglers")
def test_where_all_ranks_wait_there_is_no_straggler() -> None:
    report = report_of(*(Rank(number, wait_total=0.3 + number / 50) for number in range(3)))
    assert report["stragglers"] == []
    (finding,) = report["findings"]
    assert finding.startswith("all ranks wait for data, 32 % of the time: ")
    assert "`streammega doctor`" in finding


@pytest.mark.guarantee("top-names-stragglers")
@pytest.mark.parametrize("grows", [{"batches": 9.5}, {"batches": 1.0}, {"wait_total": 0.04}])
def test_small_differences_are_no_findings(grows: dict[str, float]) -> None:
    others = {"batches": 1.5} if grows.get("batches") == 1.0 else {}
    assert (
        report_of(Rank(0, **grows), *(Rank(number, **others) for number in (1, 2)))["findings"]
        == []
    )


@pytest.fixture
def web(tmp_path: Path) -> DataConfig:
    write_dataset(tmp_path / "root" / "data" / "web", [np.arange(400_000) % 1000])
    return DataConfig(
        blend=["s3://data/web"],
        sequence_length=256,
        order="stream",
        split="1,0,0",
        shuffle_lanes=12,
        shuffle_block_bytes=8192,
        storage=StorageConfig(cache_dir=tmp_path / "indices"),
    )


@pytest.mark.guarantee("top-names-stragglers")
def test_a_straggling_rank_of_a_real_run_is_found(
    web: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three ranks train in step; the storage of one is far."""
    sizes: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 12, "dp_size": 3}
    ended = threading.Event()
    in_step = threading.Barrier(3)

    def train(loader: StreamLoader) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            while not ended.is_set():
                if next(loader, None) is None:
                    iter(loader)
                time.sleep(0.002)
                in_step.wait(60)

    with (
        running(tmp_path / "root") as near,
        running(tmp_path / "root", latency=0.1) as far,
        contextlib.ExitStack() as opened,
    ):
        loaders = []
        for rank, server in enumerate((near, near, far)):
            storage = StorageConfig(
                storage_options=server.storage_options, max_concurrent_requests=2
            ).tuned(max_request_bytes=8192, coalesce_gap_bytes=0, resident_bytes=0)
            config = replace(web, storage=storage)
            loaders.append(StreamLoader(config, **sizes, dp_rank=rank, metrics_port=0))
            opened.enter_context(loaders[-1])
        threads = [threading.Thread(target=train, args=(loader,)) for loader in loaders]
        for thread in threads:
            thread.start()
        addresses = [str(loader.metrics_address) for loader in loaders]
        try:
            for address in addresses:  # its first batch is there
                wait_until(partial(has_taken, address, 4))
            assert main(["top", *addresses, "--once", "--interval", "2", "--json"]) == 0
        finally:
            ended.set()
            in_step.abort()
            for thread in threads:
                thread.join()
    report = json.loads(capsys.readouterr().out)
    (straggler,) = report["stragglers"]
    assert straggler["dp_rank"] == 2
    assert "waits for data" in straggler["reason"]
    assert "look at its network" in straggler["reason"]
    assert report["sources"][0]["source"] == "web"


@pytest.mark.guarantee("top-names-stragglers")
@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        ([0.6, 0.6, 0.04], "computes 280 ms longer than the others in each step of 500 ms"),
        ([0.8, 0.0], "computes 400 ms longer than the others in each step of 500 ms"),
        ([0.4, 0.4, 0.4, 0.0, 0.0], ""),
    ],
)
def test_of_ranks_in_step_those_that_wait_least_for_the_others_compute_slowly(
    waits: list[float], reason: str
) -> None:
    """waits: for other ranks, in seconds of a second with two steps."""
    ranks = [Rank(n, grad_syncs=2, grad_wait_total=wait) for n, wait in enumerate(waits)]
    report = report_of(*ranks)
    slow = [straggler["dp_rank"] for straggler in report["stragglers"]]
    assert slow == [number for number, wait in enumerate(waits) if wait < 0.1]
    assert f"rank {slow[0]} ({ranks[slow[0]].address}) {reason}" in report["findings"][0]
    for words in ("they wait for it", "nvidia-smi -q -d PERFORMANCE", "other processes"):
        assert words in report["findings"][0]
    assert "for ranks %" in top.report_text(report)


@pytest.mark.guarantee("top-names-stragglers")
@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"grad_syncs": 2, "grad_wait_total": 0.8}, id="equal"),
        pytest.param({"grad_syncs": 2, "grad_wait_total": 0.9}, id="nearly equal"),
        pytest.param({"grad_syncs": 1.5, "grad_wait_total": 0.6}, id="asked before a step ended"),
        pytest.param({"grad_syncs": 0, "grad_wait_total": 0.0}, id="waits are not counted"),
    ],
)
def test_equal_ranks_in_step_are_not_accused(others: dict[str, float]) -> None:
    ranks = [Rank(0, grad_syncs=2, grad_wait_total=0.8), Rank(1, **others), Rank(2, **others)]
    assert report_of(*ranks)["findings"] == []


@pytest.mark.guarantee("top-names-stragglers")
def test_too_few_steps_accuse_no_rank() -> None:
    ranks = [Rank(number, grad_syncs=1, grad_wait_total=0.8 * number) for number in range(2)]
    assert report_of(*ranks)["findings"] == []


@pytest.mark.guarantee("top-names-stragglers")
def test_a_rank_whose_data_come_slowly_is_not_said_to_compute_slowly() -> None:
    usual = {"grad_syncs": 2, "grad_wait_total": 0.4}
    late = Rank(2, grad_syncs=2, grad_wait_total=0.0, wait_total=0.4)
    (finding,) = report_of(Rank(0, **usual), Rank(1, **usual), late)["findings"]
    assert "rank 2 " in finding
    assert "waits for data 40 %" in finding
    # a wait for data that the device does not notice makes nobody late
    hidden = Rank(1, **usual, wait_total=0.4)
    (finding,) = report_of(Rank(0, **usual), hidden)["findings"]
    assert "rank 1 " in finding


@pytest.mark.guarantee("top-names-stragglers")
@pytest.mark.parametrize("device", ["cpu", on_cuda("cuda:0")])
def test_a_rank_that_computes_slowly_is_found_though_all_take_as_many_batches(
    gang: Gang, tmp_path: Path, device: str
) -> None:
    run_file = write_layout_run(tmp_path, layers=1, device=None)
    for report in gang.run(2, watch_slow_forward, run_file, [], 1, device):
        (straggler,) = report["stragglers"]
        assert straggler["dp_rank"] == 1
        assert "computes" in straggler["reason"]
        first, second = (row["window"]["grad_wait_share"] for row in report["ranks"])
        assert first > second


def look(address: str) -> metrics.Look:
    with urllib.request.urlopen(address) as answer:
        (figures,) = parse_answer(answer.read().decode()).values()
    return figures


def has_taken(address: str, batches: int) -> bool:
    return look(address).figures["batches_total"] > batches


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Other(BaseHTTPRequestHandler):
    """Another program's server."""

    def do_GET(self) -> None:
        code = {"/gone/metrics": 404}.get(self.path, 200)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b"# TYPE up gauge\nup 1.0\nstreammega_broken{dp_rank=\n<html>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    with HttpServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def mute() -> Iterator[str]:
    """A port where connections are accepted, and nothing is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.guarantee("top-ends-well")
def test_where_nothing_answers_the_reasons_are_one_error(
    other: str, mute: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT", 0.2)
    for address, words in (
        ("127.0.0.1:1", "no rank answers: 127.0.0.1:1: connection refused"),
        (other, "what answers there is no loader of streammega"),
        (f"{other}/gone/metrics", "HTTP 404: what answers there is no loader"),
        (mute, "no answer within 0.2 s"),
        ("no-such-host.invalid:94", "no-such-host.invalid:94: "),
        ("127.0.0.1:1-9", "and 6 others"),
    ):
        assert main(["top", address]) == 1
        printed = capsys.readouterr()
        assert words in printed.err
        assert "train.metrics_port" in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""


@pytest.mark.guarantee("top-ends-well")
def test_a_server_that_speaks_no_http_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"+PONG\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["top", f"127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join()
    assert "does not speak HTTP" in capsys.readouterr().err


@pytest.mark.guarantee("top-shows-gone-ranks")
def test_a_rank_that_vanishes_is_shown_as_gone_and_the_others_go_on() -> None:
    ranks = [Rank(0), Rank(1)]
    watch = Watch([*(rank.address for rank in ranks), "127.0.0.1:1"])
    for _ in range(3):
        watch.look()
    ranks[1].end()
    watch.look()
    report = watch.report()
    assert [row["state"] for row in report["ranks"]] == ["reads", "gone", "no answer"]
    assert (report["answering"], report["addresses"]) == (1, 3)
    assert report["now"]["tokens_per_second"] == 1000, "of the rank that goes on"
    gone, silent = report["findings"]
    assert gone.startswith(f"rank 1 ({ranks[1].address}) has not answered for ")
    assert gone.endswith(" s: connection refused: no process serves metrics there")
    assert silent.startswith("127.0.0.1:1 has never answered: connection refused")
    text = top.report_text(report)
    assert "1 of 3 addresses answer" in text
    assert "gone" in text
    assert top.report_line(report).startswith("1/3 ranks answer, 1,000 tokens/s, ")


@pytest.mark.guarantee("top-shows-gone-ranks")
def test_a_rank_that_was_restarted_counts_from_its_start() -> None:
    rank = Rank()
    watch = Watch([rank.address])
    for _ in range(5):
        watch.look()
    rank.reads = 0
    watch.look()
    (row,) = watch.report()["ranks"]
    assert row["state"] == "reads"
    assert row["window"] is None
    watch.look()
    assert watch.report()["now"]["tokens_per_second"] == 1000


@pytest.mark.guarantee("top-ends-well")
def test_without_a_terminal_each_look_is_a_line_until_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "ENDED_AFTER", 0.3)
    rank = Rank()
    ending = threading.Timer(1.0, rank.end)
    ending.start()
    assert main(["top", rank.address, "--interval", "0.1"]) == 1
    printed = capsys.readouterr()
    first, *_, last = printed.out.splitlines()
    assert "1/1 ranks answer, 1,000 tokens/s, waits 0.0 %" in first
    assert "0/1 ranks answer" in last
    assert "has not answered for" in last
    assert printed.err == (
        "error: no rank has answered for 0 s: the run has ended, or its machines cannot be reached\n"
    )


@pytest.mark.guarantee("top-ends-well")
def test_ctrl_c_ends_it_at_once(mute: str, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank()
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.monotonic()
    assert main(["top", rank.address, mute, "--interval", "600"]) == 130
    assert time.monotonic() - began < 300
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.guarantee("top-ends-well")
def test_on_a_terminal_the_view_is_drawn_again_until_ctrl_c() -> None:
    rank = Rank(wait_total=0.5)
    words = ["-m", "streammega", "top", rank.address, "--interval", "0.1"]
    terminal, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, *words], stdin=inner, stdout=inner, stderr=inner, env=environment
    )
    os.close(inner)
    shown = b""
    try:
        while shown.count(b"throughput") < 4:
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal is closed
            while data := os.read(terminal, 4096):
                shown += data
        assert process.wait(60) == 130
    finally:
        process.kill()
        os.close(terminal)
    assert b"1,000 tokens/s" in shown
    assert b"all ranks wait for data" in shown
    assert b"\x1b[?25h" in shown, "the cursor is shown again"
    assert b"Traceback" not in shown


@pytest.mark.guarantee("top-shows-rates")
def test_names_of_datasets_are_text_alone() -> None:
    rank = Rank()
    rank.sources = {'a"\\b\n\x1b[31m' + "long" * 99: 5}
    (source,) = report_of(rank)["sources"]
    assert source["source"].startswith('a"\\b ?[31mlong')
    assert len(source["source"]) == metrics.LONGEST_NAME


@pytest.mark.guarantee("top-shows-rates")
def test_names_that_differ_late_or_cannot_be_printed_stay_apart() -> None:
    rank = Rank()
    long = "x" * 200
    rank.sources = {
        f"{long}-0": 5,
        f"{long}-1": 4,
        "a\u2028b": 3,
        "a\x85b": 2,
        "a\rb": 1,
        "c\udcff": 6,
    }
    sources = report_of(rank)["sources"]
    assert [row["tokens"] // 3 for row in sources] == [6, 5, 4, 3, 2, 1]
    shown = [row["source"] for row in sources]
    assert shown[0] == "c\\udcff"
    assert [name[-3:] for name in shown[1:3]] == ["x-0", "x-1"]
    assert shown[3:] == ["a?b"] * 3


@pytest.mark.guarantee("top-shows-gone-ranks")
def test_ranks_that_are_gone_have_no_rate_of_tokens() -> None:
    stays, goes = Rank(0), Rank(1)
    watch = Watch([stays.address, goes.address])
    watch.look()
    watch.look()
    goes.end()
    watch.look()
    rates = {row["source"]: row["tokens_per_second"] for row in watch.report()["sources"]}
    assert rates == {"web": 750, "code": 250}


@pytest.mark.guarantee("top-shows-gone-ranks")
def test_a_port_with_another_rank_shows_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Rank(0), Rank(5)
    watch = Watch([before.address])
    watch.look()
    watch.look()
    watch.endpoints[0].url = f"http://{after.address}/metrics"
    watch.look()
    assert [row["dp_rank"] for row in watch.report()["ranks"]] == [5]


@pytest.mark.guarantee("top-shows-gone-ranks")
def test_a_rank_that_was_restarted_while_nothing_answered_counts_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank()
    watch = Watch([rank.address])
    for _ in range(3):
        watch.look()
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 600)
    rank.reads = (
        500  # it has run for longer than the one before it, and not for as long as it was gone
    )
    watch.look()
    (row,) = watch.report()["ranks"]
    assert row["window"] is None


def test_the_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert report_of(Rank())["answering"] == 1


def test_many_ranks_are_shown_by_their_waits() -> None:
    ranks = [Rank(number, wait_total=number / 10) for number in range(6)]
    assert "wait less" not in top.report_text(report_of(*ranks))
    text = top.report_text(report_of(*ranks), max_ranks=2)
    assert f"{ranks[5].address}" in text
    assert f"\n   0  {ranks[0].address}" not in text
    assert "and 4 ranks that wait less" in text


def test_broken_addresses_raise_no_other_error() -> None:
    for text in ("", ":", "h:", "http://", "h:1-", "h:99999", "h:1 2", "\x1b[0m:1"):
        with pytest.raises(ConfigError):
            parse_addresses(text)
