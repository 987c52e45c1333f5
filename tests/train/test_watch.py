"""What a rank does when another fails while its own main thread is blocked where Python cannot
reach it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streammega.train.watchdog import BEAT_SECONDS, INTERRUPT_BEATS, StatusStore, Watchdog
from tests.support.processes import Family

LONG = timedelta(seconds=600)
"""Of collectives: none of them ends a test."""
TOLD_WITHIN = 5.0
DEAD_WITHIN = 15.0
"""Seconds: what docs/training.md says of a cause that was told, and of a rank that died."""
KILLED_AFTER = 30.0
"""Seconds between torchrun's SIGTERM and its SIGKILL."""
SOON = 60.0
"""Seconds for a process to be gone on a machine with much to do; what does not end it would take
ten minutes.
"""


def blocked(rank: int, port: int, timeout: float, kind: str) -> None:
    """Rank 1 fails as `kind` says; 0 and 2 wait for each other in gloo, or sleep in C, until
    something ends them.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=3, timeout=LONG
    )
    watch = Watchdog(dist.PrefixStore("watch", store), rank, 3, timeout)
    # as the trainer's: it can only run when the main thread does
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Together: on a busy machine a rank that is late would be ended before it is ready.
    dist.barrier()
    watch.enter_phase("reducing", 5)
    time.sleep(1.2)  # until the next beat, which says so
    print("ready", flush=True)
    if kind == "finished" and rank == 0:
        watch.close()
        return
    if rank == 1:
        fail(watch, kind)
    if kind == "in C":
        ctypes.CDLL(None).sleep(600)
    try:
        dist.recv(torch.zeros(1), 2 - rank)
    except RuntimeError:  # the other has ended; NCCL would not say so
        time.sleep(600)


def fail(watch: Watchdog, kind: str) -> None:
    if kind in ("cause", "in C"):
        time.sleep(1.0)
        print(f"told at {time.time()}", flush=True)
        watch.fail("s3://bucket/web.bin: 503 SlowDown")
        os._exit(1)
    if kind == "stalled":
        watch.enter_phase("waiting for data", 5)
    time.sleep(600)


class Scene:
    """Three ranks of a job of their own. `since`: when what ends them happened, by time.time."""

    since: float

    def __init__(self, folder: Path, timeout: float, kind: str) -> None:
        folder.mkdir()
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.family = Family(folder, 3, blocked, self.store.port, timeout, kind)

    def ready(self) -> Family:
        self.family.wait_for("ready", 0, 1, 2)
        return self.family


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    """All of them at once: nearly all of their time is waiting."""
    folder = tmp_path_factory.mktemp("scenes")
    timeouts = {
        "cause": 600.0,
        "in C": 600.0,
        "killed": 600.0,
        "stopped": 3.0,
        "finished": 3.0,
        "stalled": 3.0,
        "waiting": 2.0,
        "interrupted": 600.0,
        "store": 3.0,
        "store after a signal": 600.0,
    }
    made = {
        kind: Scene(folder / kind.replace(" ", "-"), timeout, kind)
        for kind, timeout in timeouts.items()
    }
    made["stopped"].ready().signal(signal.SIGSTOP, 1)
    made["finished"].ready().signal(signal.SIGSTOP, 1)
    killed = made["killed"].ready()
    made["killed"].since = time.time()
    killed.signal(signal.SIGKILL, 1)
    killed.signal(signal.SIGTERM, 0, 2)
    interrupted = made["interrupted"].ready()
    made["interrupted"].since = time.time()
    interrupted.signal(signal.SIGINT, 0)
    made["store"].ready()
    del made["store"].store
    ending = made["store after a signal"].ready()
    del made["store after a signal"].store
    time.sleep(3 * BEAT_SECONDS)  # until each rank waits for an answer, where it sees no signal
    made["store after a signal"].since = time.time()
    ending.signal(signal.SIGTERM, 0, 1, 2)
    yield made
    for scene in made.values():
        scene.family.close()


@pytest.mark.guarantee("rank-fails-says")
@pytest.mark.parametrize("kind", ["cause", "in C"])
def test_a_blocked_rank_prints_the_cause_of_another_and_ends(
    scenes: dict[str, Scene], kind: str
) -> None:
    """The main threads of ranks 0 and 2 wait for ten minutes, where no signal and no exception
    reaches them.
    """
    family = scenes[kind].family
    assert family.ended(0, 1, 2, within=SOON) == [1, 1, 1]
    [told] = re.findall(r"told at (\S+)", family.log(1))
    for rank in (0, 2):
        # A beat at least, in which a launcher may end it without a second message.
        assert BEAT_SECONDS <= family.said_last(rank) - float(told) < TOLD_WITHIN
        expected = f"error (rank {rank}): in step 5 (reducing): rank 1 ended the job: s3://bucket/web.bin: 503 SlowDown"
        assert expected in family.log(rank)


@pytest.mark.guarantee("rank-fails-says")
def test_a_blocked_rank_that_is_told_to_end_names_the_one_that_died(
    scenes: dict[str, Scene],
) -> None:
    """As torchrun does it: one rank is gone, the others get SIGTERM, which a blocked main thread
    cannot see.
    """
    family = scenes["killed"].family
    assert family.ended(0, 2, within=SOON) == [1, 1]
    for rank in (0, 2):
        assert family.said_last(rank) - scenes["killed"].since < DEAD_WITHIN
        assert "rank 1 gives no sign of life; last seen in step 5 (reducing" in family.log(rank)


@pytest.mark.guarantee("rank-stopped-named")
def test_a_rank_that_is_stopped_is_named_without_torchrun(scenes: dict[str, Scene]) -> None:
    family = scenes["stopped"].family
    assert family.ended(0, 2, within=SOON) == [1, 1]
    assert "rank 1 gives no sign of life; last seen in step 5 (reducing" in family.log(0)
    assert "; seen every 1 s)" in family.log(0)


@pytest.mark.guarantee("rank-stopped-named")
def test_a_rank_that_is_stopped_is_named_also_after_rank_0_has_finished(
    scenes: dict[str, Scene],
) -> None:
    family = scenes["finished"].family
    assert family.ended(0, 2, within=SOON) == [0, 1]
    assert "rank 1 gives no sign of life; last seen in step 5 (reducing" in family.log(2)


@pytest.mark.guarantee("rank-fails-says")
def test_a_rank_that_stalls_is_named_and_ended_with_the_others(scenes: dict[str, Scene]) -> None:
    family = scenes["stalled"].family
    assert family.ended(0, 1, 2, within=SOON) == [1, 1, 1]
    for rank in range(3):
        assert "rank 1 is elsewhere; last seen in step 5 (waiting for data, for " in family.log(
            rank
        )


@pytest.mark.guarantee("without-torchrun-others")
def test_blocked_ranks_end_when_the_jobs_store_is_gone(scenes: dict[str, Scene]) -> None:
    """Its host has died: no rank can say why it ends, nor hear of another."""
    family = scenes["store"].family
    assert family.ended(0, 1, 2, within=SOON) == [1, 1, 1]
    for rank in range(3):
        assert "the job's store has not answered for" in family.log(rank)


@pytest.mark.guarantee("without-torchrun-others")
def test_blocked_ranks_that_a_signal_ends_wait_no_longer_for_a_store_that_is_gone(
    scenes: dict[str, Scene],
) -> None:
    """Its host has died. A request to it takes seconds, and no second one is made."""
    scene = scenes["store after a signal"]
    assert scene.family.ended(0, 1, 2, within=SOON) == [1, 1, 1]
    for rank in range(3):
        assert scene.family.said_last(rank) - scene.since < KILLED_AFTER
        assert "the job's store has not answered for" in scene.family.log(rank)


def test_ctrl_c_ends_a_blocked_rank_with_one_line(scenes: dict[str, Scene]) -> None:
    family = scenes["interrupted"].family
    assert family.ended(0, 1, 2, within=SOON) == [130, 1, 1]
    assert family.said_last(2) - scenes["interrupted"].since < TOLD_WITHIN + BEAT_SECONDS * (
        INTERRUPT_BEATS + 1
    )
    assert family.log(0).splitlines()[-1] == "[0] interrupted in step 5"
    assert "rank 0 ended the job: interrupted" in family.log(2)
    assert "Traceback" not in family.log(0) + family.log(2)


@pytest.mark.guarantee("rank-stopped-named")
def test_ranks_that_wait_at_the_same_place_are_not_ended(scenes: dict[str, Scene]) -> None:
    """All compile, or read a slow store: none waits for another, and the transport has a timeout of
    its own.
    """
    assert scenes["waiting"].ready().ended(0, 1, 2, within=6) == [None] * 3


def test_the_watch_outlives_errors_of_its_store_and_does_not_wait_for_its_clients(
    tmp_path: Path,
) -> None:
    """The client of training is locked while it waits for a key that nobody sets."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    family = Family(tmp_path, 2, busy, store.port)
    family.wait_for("waits", 0)
    family.wait_for("ended", 1, timeout=30)
    lines = family.log(1).splitlines()
    family.close()
    beats = [int(line.split()[1]) for line in lines if line.startswith("beat")]
    assert beats[-1] > beats[0], "rank 0 gives signs of life while its own client waits"
    del store


def busy(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    if rank == 0:
        first: Any = LosesItsFirstConnection(dist.PrefixStore("watch", store))
        Watchdog(first, 0, 2, 600.0)
        print("waits", flush=True)
        store.get("a key that nobody sets")
    reader = StatusStore(dist.PrefixStore("watch", store))
    deadline = time.monotonic() + 20
    seen: list[int] = []
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.5)
        for status in reader.statuses([0]).values():
            if status.beats not in seen:
                seen.append(status.beats)
                print(f"beat {status.beats}", flush=True)
    print("ended", flush=True)
    sys.stdout.flush()


class LosesItsFirstConnection:
    """A store of which the first client finds its connection gone, and later ones do not."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._is_lost = False

    def clone(self) -> object:
        if self._is_lost:
            return self._store.clone()  # type: ignore[attr-defined]
        self._is_lost = True
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("Connection reset by peer")
