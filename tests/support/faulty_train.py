"""The training program with a fault: FAULT=rank:step:kind makes that rank, in that step, die, stop,
hang or fail, once.

`kill`: SIGKILL. `stop`: SIGSTOP. `hang`: sleeps while it should take a batch. `storage`: its
storage fails. `term`: SIGTERM. `full`: its disk has no space for new files from then on.
`log`: nor for its log.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

from streammega.errors import EndpointError
from streammega.parallel import RankBatches
from streammega.storage.backends import local
from streammega.train import run_log
from streammega.train.program import main
from streammega.train.trainer import Trainer


def act(kind: str) -> None:
    if kind == "full":
        local.AtomicFile = make_no_file  # type: ignore[attr-defined, assignment]
        return
    if kind == "log":
        run_log.with_space = wait_for_space  # type: ignore[attr-defined, assignment]
        return
    if kind == "storage":
        raise EndpointError(
            "s3://bucket/web.bin: 503 SlowDown, after 6 tries; lower max_concurrent_requests"
        )
    if kind == "hang":
        time.sleep(1000)
    os.kill(
        os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind]
    )


def make_no_file(path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def wait_for_space(*_: object) -> None:
    time.sleep(1000)


def inject(rank: int, step: int, kind: str, marker: Path) -> None:
    if int(os.environ.get("RANK", "0")) != rank or marker.exists():
        return
    take = RankBatches.__next__
    seen = {"step": 0}

    def faulty(self: RankBatches) -> object:
        if seen["step"] == step and not marker.exists():
            marker.touch()
            act(kind)
        return take(self)

    train_step = Trainer.train_step

    def counted(self: Trainer) -> object:
        seen["step"] = self.step + 1
        return train_step(self)

    RankBatches.__next__ = faulty  # type: ignore[assignment, method-assign]
    Trainer.train_step = counted  # type: ignore[assignment, method-assign]


def run(arguments: list[str]) -> int:
    """Train with the fault of the environment; the exit code."""
    fault = os.environ.get("FAULT")
    if fault:
        number, when, what = fault.split(":")
        inject(int(number), int(when), what, Path(arguments[0]).with_suffix(".fault"))
    code = main(arguments)
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    os._exit(run(sys.argv[1:]))
